"""The same random numbers in a resumed run as in an uninterrupted one."""

import random
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_lowbit._lightning import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LightningModule,
    ModelCheckpoint,
    ModelPruning,
    ProgressBar,
    StochasticWeightAveraging,
    Trainer,
    begin_next_epoch,
    begins_data_anew,
    call_around_fetches,
    forget_fetches,
    forget_restart,
    generators_of_data,
    has_ended_loader,
    is_ahead,
    is_overridden,
    is_within_batch,
    logged_in_batch,
    logged_metrics,
    places_of_prefetched,
    rank_zero_warn,
    update_plateaus,
    validation_is_due,
)
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.checks import some
from lightning_lowbit.nn.state.keys import hash_numbers
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.precision.run_settings import data_rank, global_seed
from lightning_lowbit.report.history import scalars
from lightning_lowbit.saved_state import check_state

_FETCH = 1  # other random numbers before a batch is fetched than in its training step
_AFTER_THE_EPOCH = (
    "The checkpoint was saved when its epoch had ended: at its end, or by Trainer.save_checkpoint after fit. "
    "Lightning {which}, so the run may differ from an uninterrupted one. Resume from a checkpoint of a step "
    "(CrashSafeCheckpoint with every_n_train_steps){or_else}."
)
_ENDED = "lightning_lowbit_ended_loader"  # whether one of several loaders had ended within its epoch, in the checkpoint
_FROZEN = "lightning_lowbit_frozen"  # names of parameters, in the checkpoint
_GENERATORS = "lightning_lowbit_generators"  # states of those of loaders and samplers, in the checkpoint
_METRICS = "lightning_lowbit_metrics"  # logged values by name, in the checkpoint
_UNVALIDATED = "lightning_lowbit_unvalidated"  # whether a validation was still to follow, in the checkpoint
# Of Lightning; within an epoch nothing calls their on_train_epoch_start again.
_BY_EPOCH = (BaseFinetuning, StochasticWeightAveraging)
# What they do at the end of an epoch changes no training.
_NEUTRAL = (LowBitCallback, ModelCheckpoint, ProgressBar)


class ExactResume(LowBitCallback):
    """Seeds torch, NumPy and Python before each training batch, from (seed, optimizer step, batch, rank of its data).

    Lightning's checkpoints hold no random state, so dropout draws other numbers after a resume. With this callback, the
    random numbers of a batch depend only on its place in the run; so do those of its fetch and its transfer, such as
    noise. Not covered are workers of a loader, and within an epoch the first fetch after a resume from data without a
    length, if their iterator draws numbers, too.

    The order of data is up to the loader: a plain ``DataLoader`` restarts its epoch after a resume, with a warning; at
    the end of an epoch it goes on, also with a generator of its own. Use one with ``state_dict`` and
    ``load_state_dict``; the state of data without a length, which Lightning saves one batch ahead, is saved without
    this batch. A checkpoint from the middle of gradient accumulation lacks the accumulated gradients: resume from the
    end of an optimizer step. One from the end of an epoch, or saved after ``Trainer.fit``, resumes exactly if the epoch
    is whole and ``max_epochs`` alone is set; else there is a warning. There is one, too, for ``on_train_epoch_end``
    after a checkpoint of the last batch, which Lightning leaves out, and for parameters that are frozen and were not in
    the checkpoint, or the other way round.

    Args:
        seed: any integer; None takes the seed of ``seed_everything``, or 0.

    Examples:
        >>> Trainer(plugins=[FP4Precision()], callbacks=[ExactResume()])
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = global_seed() if seed is None else seed
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._frozen: set[str] | None = None  # in the checkpoint that was loaded
        self._places: int | None = None  # of loaders, in a checkpoint from within an epoch
        self._has_ended_loader = False  # in that checkpoint
        self._metrics: dict[str, Tensor] | None = None  # in the checkpoint, until its epoch has ended
        self._due: list[str] = []  # intervals of schedules that go by a metric, whose step followed the checkpoint
        self._place = (0, 0)  # of the checkpoint: whole epochs, batches of this one
        self._generators: list[Tensor] = []  # states in the checkpoint, until the first batch
        self._fetch: tuple[list[Any], list[Any]] = ([], [])  # states of loaders before and after the last one

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the first process's seed: others may have been started after another ``seed_everything``.

        It seeds each fetch too: the order of data is drawn with the first one of an epoch, alike on all ranks.
        """
        self.seed = trainer.strategy.broadcast(self.seed)
        self._put_back_metrics(trainer)

        def seed(epoch: int, number: int) -> None:
            _seed(self.seed, epoch, number, data_rank(trainer) if number else 0, _FETCH)

        def begin(epoch: int, number: int) -> None:
            seed(epoch, number)
            # Each time: Lightning asks twice at the start of some resumed runs.
            for generator, state in zip(generators_of_data(trainer), self._generators, strict=False):
                generator.set_state(state)

        def before_fetch(epoch: int, number: int) -> None:
            self._go_on_within_epoch(trainer)  # now: in on_train_batch_start other callbacks may come first
            seed(epoch, number)
            self._fetch = deepcopy(places_of_prefetched(trainer)), []

        def after_fetch() -> None:
            self._fetch = self._fetch[0], deepcopy(places_of_prefetched(trainer))

        call_around_fetches(trainer, begin, before_fetch, after_fetch)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds what Lightning's checkpoints lack, and takes places of loaders from before a batch fetched ahead."""
        checkpoint[_FROZEN] = [name for name, is_frozen in _frozen(pl_module).items() if is_frozen]
        is_within = is_within_batch(trainer)
        metrics = scalars(logged_in_batch(trainer) if is_within else logged_metrics(trainer))
        checkpoint[_UNVALIDATED] = is_within and validation_is_due(trainer)
        checkpoint[_METRICS] = {name: value.detach().cpu() for name, value in metrics.items()}
        checkpoint[_GENERATORS] = [generator.get_state() for generator in generators_of_data(trainer)]
        checkpoint[_ENDED] = has_ended_loader(trainer)
        loop: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        before, after = self._fetch
        # Loaders that count used batches, as the recipes' stream does, have changed since.
        if is_ahead(trainer) and before and _is_same(loop.get("combined_loader"), after):
            loop["combined_loader"] = deepcopy(before)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes what `on_save_checkpoint` added; warns if Lightning takes the place in the run for another one."""
        loop = checkpoint.get("loops", {}).get("fit_loop")
        if trainer.state.fn != "fit" or loop is None:
            return
        if _FROZEN in checkpoint:
            check_state(_FROZEN, checkpoint[_FROZEN], [str])
            self._frozen = {*checkpoint[_FROZEN]}
        if _GENERATORS in checkpoint:
            check_state(_GENERATORS, checkpoint[_GENERATORS], [Tensor])
            self._generators = [*checkpoint[_GENERATORS]]
        if _METRICS in checkpoint:
            check_state(_METRICS, checkpoint[_METRICS], {str: Tensor})
            self._metrics = dict(checkpoint[_METRICS])
            self._put_back_metrics(trainer)
        epochs, is_whole = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]["is_last_batch"]
        if epochs["processed"] and any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            rank_zero_warn(
                "ModelPruning saves pruned weights without their masks: they train on, and are pruned as if for the "
                "first time, so the run differs from an uninterrupted one. Prune in a run that is not resumed."
            )
        has_ended = epochs["processed"] == epochs["ready"] > 0
        self._note_due(trainer, pl_module, checkpoint, has_ended)
        if has_ended and not is_whole:
            rank_zero_warn(_AFTER_THE_EPOCH.format(which="leaves out the rest of that epoch", or_else=""))
        elif has_ended and trainer.max_steps != -1:
            which = "counts batches on from that epoch if max_steps is set"
            rank_zero_warn(_AFTER_THE_EPOCH.format(which=which, or_else=", or set max_epochs alone"))
        elif not (has_ended or is_whole):
            self._places = len(loop["state_dict"].get("combined_loader", ()))
            self._has_ended_loader = checkpoint.get(_ENDED, False)
            callbacks = [callback for callback in trainer.callbacks if isinstance(callback, _BY_EPOCH)]  # type: ignore[attr-defined]
            for name in sorted({type(callback).__name__ for callback in callbacks}):
                rank_zero_warn(
                    f"{name} acts at the start of epochs, and Lightning goes on within one: until the next one the run "
                    "may differ from an uninterrupted one. Resume from a checkpoint of the end of an epoch."
                )

    def _note_due(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any], has_ended: bool
    ) -> None:
        """Notes what followed in the run that saved the checkpoint, and Lightning leaves out; warns of the rest."""
        loop = checkpoint["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]
        self._place, self._due = (loop["epoch_progress"]["current"]["completed"], batches["current"]["ready"]), []
        if batches["total"]["completed"] == batches["total"]["processed"]:
            return
        is_last = batches["is_last_batch"] and not has_ended
        if not checkpoint.get(_UNVALIDATED, True):
            self._due = ["step", "epoch"] if is_last else ["step"]
        callbacks = [one for one in trainer.callbacks if not isinstance(one, _NEUTRAL)]  # type: ignore[attr-defined]
        parts = [pl_module, *callbacks]
        names = [type(part).__name__ for part in parts if is_overridden("on_train_epoch_end", part)]
        if is_last and names:
            rank_zero_warn(
                f"The checkpoint was saved after the last batch of an epoch, whose end Lightning leaves out: that of "
                f"{some(names)} (on_train_epoch_end). The run may differ from an uninterrupted one. Resume from a "
                "checkpoint of another step, or of the end of the epoch."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        begin_next_epoch(trainer)
        self._compare_frozen(pl_module)
        self._put_back_metrics(trainer)
        if self._metrics is not None:
            for interval in ["epoch"] if trainer.fit_loop.resumed_on_epoch_end else self._due:
                update_plateaus(trainer, interval, *self._place)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets schedules of a plateau go on: Lightning leaves them out after a resume, for want of metrics."""
        if self._metrics is not None:
            forget_restart(trainer)
            self._metrics = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        forget_fetches(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        forget_fetches(trainer)
        self._metrics = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._go_on_within_epoch(trainer)  # the last batch may have been fetched before
        # Steps of raw optimizers (use_pl_optimizer=False) are not counted; then the epoch tells batches apart.
        _seed(self.seed, trainer.global_step or trainer.current_epoch, batch_idx, data_rank(trainer))

    def _put_back_metrics(self, trainer: Trainer) -> None:
        """Gives callbacks that monitor a metric that of a validation before the checkpoint.

        Lightning forgets metrics between the load of most checkpoints and ``on_fit_start``, and after a sanity check.
        """
        metrics, device = self._metrics or {}, trainer.strategy.root_device
        logged_metrics(trainer).update((name, value.to(device)) for name, value in metrics.items())

    def _go_on_within_epoch(self, trainer: Trainer) -> None:
        """Warns if its data begin anew; accumulates as since its start, which Lightning does not repeat."""
        places, self._places, self._generators = self._places, None, []
        if places is None:
            return
        if begins_data_anew(trainer, places):
            rank_zero_warn(
                "The run goes on within an epoch, and its data begin that epoch again, so it differs from an "
                "uninterrupted one. Give data whose loaders have state_dict and load_state_dict, in the run that saves "
                "the checkpoint, too; or resume from a checkpoint of the end of an epoch."
            )
        elif self._has_ended_loader:
            rank_zero_warn(
                "The run goes on within an epoch in which a loader may have ended before others, and begins again, so "
                "the run may differ from an uninterrupted one. Resume from a checkpoint of the end of an epoch."
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler):
                callback.on_train_epoch_start(trainer)

    def _compare_frozen(self, pl_module: LightningModule) -> None:
        """Warns if other parameters are frozen than in the checkpoint, before an epoch begins and may change them."""
        before, self._frozen = self._frozen, None
        if before is None:
            return
        is_frozen = _frozen(pl_module)
        news = [name for name, frozen in is_frozen.items() if frozen and name not in before]
        others = [name for name, frozen in is_frozen.items() if not frozen and name in before]
        for names, words in ((news, "trained then and frozen here"), (others, "frozen then and trained here")):
            if names:
                rank_zero_warn(
                    f"The run differs from the one that saved the checkpoint: {some(names)}, {words}. What freezes or "
                    "unfreezes in one epoch alone, as BaseFinetuning may, does not do so again after it: set "
                    "requires_grad in on_load_checkpoint, which is told the epoch."
                )


def _frozen(pl_module: LightningModule) -> dict[str, bool]:
    return {clean_name(name): not parameter.requires_grad for name, parameter in pl_module.named_parameters()}


def _is_same(one: Any, other: Any) -> bool:
    """Returns whether two states of loaders are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return np.array_equal(one, other) if isinstance(one, Tensor | np.ndarray) else bool(one == other)


def _seed(*place: int) -> None:
    seed = hash_numbers(*place) % 2**64
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
