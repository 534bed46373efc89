"""What a switch does: other casts for some layers, a learning rate that rises again, new moments; and its report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lowbit import (
    SPAM,
    Adaptive,
    FP4Precision,
    FP8Precision,
    LowBitAdamW,
    LowBitPrecision,
    PrecisionSwitch,
    QAFSwitch,
    SpikeRollback,
    StableSPAM,
)
from lightning_lowbit.callbacks.learning_rates import LowerRates, Rewarm
from lightning_lowbit.nn import OPERANDS, PRESETS, LinearCasts
from lightning_lowbit.nn.linear import QuantizedLayer
from lightning_lowbit.precision.checkpoints.trained import primitive
from tests.callbacks.switches.ranks_switches import RANKS, TOKENS
from tests.launch import launch
from tests.lightnings import Callback, LightningModule, MisconfigurationException
from tests.precision.regression import DOWN, LAYERS, Regression, flat, state, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Training ended at"),
    # The loader begins again, and nothing depends on it: a batch follows from its place in the run.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]

HP = LinearCasts()
WEIGHTS_OF_DOWN = {f"{DOWN}/fprop_w", f"{DOWN}/dgrad_w"}  # smoothed, and scaled by themselves
NVFP4 = PRESETS["nvfp4"]()
Optimizer = Callable[[Any], torch.optim.Optimizer]


class Model(Regression):
    """With an optimizer of one's own, of which each step notes the learning rate; a schedule halves it in each step.

    Args:
        make: the optimizer.
    """

    def __init__(self, make: Optimizer = lambda p: torch.optim.Adam(p, 1e-2)) -> None:
        super().__init__()
        self.make = make
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        optimizer.register_step_post_hook(lambda *_: self.scheduled.append(self.rate(optimizer)))
        self.scheduled: list[float] = []
        schedule = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def rate(self, optimizer: torch.optim.Optimizer) -> float:
        return float(optimizer.param_groups[0]["lr"])

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        def noted() -> Any:  # the hooks before a step have run
            loss = closure()
            self.rates.append(self.rate(optimizer.optimizer))
            return loss

        optimizer.step(closure=noted)


class Casts(Callback):
    """The casts of all layers in each step, outside the phase and in it; a checkpoint after each step, if it shall."""

    def __init__(self, keep: bool = False) -> None:
        self.full: list[dict[str, LinearCasts]] = []
        self.phases: list[str] = []
        self.keep = keep

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        layers = {name: m for name, m in pl_module.named_modules() if isinstance(m, QuantizedLayer)}
        phase = trainer.precision_plugin.phase
        for name, layer in layers.items():
            assert layer.casts == layer.full_casts.phase(phase), f"{name} is not in phase {phase}"
        self.phases.append(phase)
        self.full.append({name: layer.full_casts for name, layer in layers.items()})

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.keep and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(f"{trainer.global_step}.ckpt")

    def of(self, name: str) -> list[str]:
        return [str(casts[name]) for casts in self.full]


def fit(*callbacks: Callback, model: Any = None, plugin: Any = None, ckpt_path: Any = None, **kwargs: Any) -> Casts:
    """Six steps, with callbacks and then a witness."""
    witness = Casts(kwargs.pop("keep", False))
    made = trainer(
        plugin or FP4Precision(),
        callbacks=[*callbacks, witness],
        **{"max_steps": 6, "limit_train_batches": 64, **kwargs},
    )
    made.fit(model or Regression(), ckpt_path=ckpt_path)
    return witness


# --- some layers ------------------------------------------------------------------------------------------------------


def test_layers_that_match_get_other_casts_and_others_keep_theirs() -> None:
    seen = fit(PrecisionSwitch({"head": "bf16", "down_proj": "nvfp4-4over6", "mlp": "mxfp4"}, step=2))
    assert seen.of("head") == ["nvfp4"] * 2 + ["bf16"] * 4
    assert seen.of("mlp.down_proj") == ["nvfp4"] * 2 + ["nvfp4-4over6"] * 4, "the first pattern holds"
    assert seen.of("mlp.up_proj") == ["nvfp4"] * 2 + ["mxfp4"] * 4
    assert seen.of("first") == ["nvfp4"] * 6


def test_casts_of_any_kind() -> None:
    e1m2 = LinearCasts.of({"fprop_w": {"element": "e1m2"}})
    seen = fit(PrecisionSwitch({"head": {"fprop_w": {"element": "e1m2"}}, "first": e1m2}, step=1))
    assert seen.full[1]["head"] == seen.full[1]["first"] == e1m2


def test_phases_and_mappings_compose() -> None:
    """Each at its time, and in the order of time, whatever their order in the list."""
    seen = fit(
        PrecisionSwitch({"head": "fqt"}, step=5),
        PrecisionSwitch({"head": "mxfp4", "first": "bf16"}, step=1),
        QAFSwitch(step=3),
        PrecisionSwitch({"head": "qaf"}, step=2),
        PrecisionSwitch("fqt", step=4),
    )
    assert seen.phases == ["fqt"] * 3 + ["qaf"] + ["fqt"] * 2
    qaf = NVFP4.phase("qaf")
    assert [casts["head"] for casts in seen.full] == [NVFP4, PRESETS["mxfp4"](), qaf, qaf, qaf, NVFP4]
    assert [casts["first"] for casts in seen.full] == [NVFP4] + [HP] * 5


@pytest.mark.parametrize("reverse", [False, True])
def test_of_mappings_that_are_late_the_last_one_due_acts_last(reverse: bool) -> None:
    """A run resumes with switches that it did not have: all act in its first step."""
    fit(keep=True, max_steps=4)
    switches = [PrecisionSwitch({"head": "bf16"}, step=1), PrecisionSwitch({"head": "mxfp4"}, step=2)]
    seen = fit(*(reversed(switches) if reverse else switches), ckpt_path="4.ckpt")
    assert seen.of("head") == ["mxfp4"] * 2


def test_lambda_is_left_alone() -> None:
    blends: list[float] = []

    class Blends(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            blends.append(trainer.precision_plugin.blend.item())

    fit(PrecisionSwitch("fqt", step=0, steps=4), PrecisionSwitch({"head": "bf16"}, step=2), Blends())
    assert blends == [0, 0.25, 0.5, 0.75, 1, 1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resumes_with_the_casts_and_their_histories(accumulate: int) -> None:
    """Delayed scaling comes and goes, and smoothing is there all the time."""

    kwargs = {"max_steps": 7, "accumulate_grad_batches": accumulate}

    def run(ckpt_path: str | None = None, keep: bool = False) -> Any:
        switches = [
            PrecisionSwitch({"head": "bf16", "mlp": "nvfp4"}, step=2, rewarm=3),
            PrecisionSwitch({"mlp": "fp8-delayed"}, step=4, moments="reset"),
        ]
        model, plugin = Regression(), FP8Precision("delayed", smooth_swiglu="channel")
        seen = fit(*switches, model=model, plugin=plugin, ckpt_path=ckpt_path, keep=keep, **kwargs)
        return seen, flat(model), state(plugin)

    seen, weights, whole = run(keep=True)
    assert list(whole["casts"]) == ["head"], "the MLP has the constructor's casts again"
    assert whole["amax_history"].keys() == {f"{name}/{o}" for name in LAYERS[:-1] for o in OPERANDS} - WEIGHTS_OF_DOWN
    for step in range(1, 7):
        resumed, resumed_weights, resumed_state = run(f"{step}.ckpt")
        assert resumed.full == seen.full[step * accumulate :], f"resumed after step {step}: other casts"
        assert torch.equal(resumed_weights, weights), f"resumed after step {step}: other weights"
        for kind in ("amax_history", "channel_amax"):
            assert resumed_state[kind].keys() == whole[kind].keys()
            for name, tensor in whole[kind].items():
                assert torch.equal(resumed_state[kind][name], tensor), f"resumed after step {step}: {name}"


def test_amaxes_of_other_layers_go_on() -> None:
    """Weights stay, so that every history depends on the step alone."""

    class Still(Regression):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.0)

    def histories(*switches: Callback) -> Any:
        plugin = FP8Precision("delayed", compute_dtype="fp32", exact=True)
        fit(*switches, model=Still(), plugin=plugin)
        return state(plugin)["amax_history"]

    whole = histories()
    switched = histories(PrecisionSwitch({"first": "nvfp4"}, step=3), PrecisionSwitch({"first": "fqt"}, step=4))
    assert whole.keys() == switched.keys()
    for name, history in whole.items():
        if name.startswith("first/"):
            expected = 2 if history.any() else 0  # no gradient of the input is asked for
            assert switched[name].count_nonzero() == expected, f"{name}: of the last two steps"
        elif name.endswith(("_w", "first/fprop_x")):
            assert torch.equal(switched[name], history), f"{name} has not gone on"
        else:
            assert switched[name].count_nonzero() == history.count_nonzero(), f"{name} has not gone on"


@pytest.mark.parametrize("preset", list(PRESETS))
def test_casts_of_a_checkpoint_are_primitives(preset: str, tmp_path: Path) -> None:
    casts = PRESETS[preset]()
    torch.save(primitive(casts), tmp_path / "x.pt")
    assert LinearCasts.of(torch.load(tmp_path / "x.pt", weights_only=True)) == casts


def test_another_run_begins_with_the_constructors_casts() -> None:
    plugin, model = FP4Precision(overrides={"first": "mxfp4"}), Regression()
    for _ in range(2):
        seen = fit(PrecisionSwitch({"head": "bf16", "first": "bf16"}, step=3), plugin=plugin, model=model)
        assert seen.of("head") == ["nvfp4"] * 3 + ["bf16"] * 3
        assert seen.of("first") == ["mxfp4"] * 3 + ["bf16"] * 3


def test_the_same_trainer_goes_on() -> None:
    plugin, model, seen = FP8Precision("delayed"), Regression(), Casts()
    switch = PrecisionSwitch({"head": "bf16"}, step=1, moments="reset")
    made = trainer(plugin, callbacks=[switch, seen], max_steps=-1, max_epochs=1)
    for epochs in (1, 2):
        made.fit_loop.max_epochs = epochs
        made.fit(model)
    assert seen.of("head") == ["fp8-delayed", *["bf16"] * 3]


def test_the_same_trainer_goes_back_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    """From before the switch, when it had no state to save."""
    model, seen = Model(), Casts(keep=True)
    switch = PrecisionSwitch({"head": "bf16"}, step=3, rewarm=2)
    made = trainer(FP4Precision(), callbacks=[switch, seen], max_steps=6, limit_train_batches=64)
    made.fit(model)
    assert seen.of("head") == ["nvfp4"] * 3 + ["bf16"] * 3
    rates, before = list(model.rates), len(seen.full)
    made.fit(model, ckpt_path="1.ckpt")
    assert seen.of("head")[before:] == ["nvfp4"] * 2 + ["bf16"] * 3
    assert model.rates[before:] == rates[1:], "other learning rates"
    assert switch._record is not None
    assert switch._record["step"] == 3


def test_a_checkpoint_with_casts_of_layers_that_are_not_converted(tmp_path: Path) -> None:
    """They are said, and other casts may be set all the same."""
    fit(PrecisionSwitch({"head": "bf16"}, step=1), keep=True)
    plugin = FP4Precision(skip=["head"])
    with pytest.warns(UserWarning, match="layers that this run does not convert: head; they stay in high precision"):
        seen = fit(PrecisionSwitch({"first": "bf16"}, step=4), plugin=plugin, ckpt_path="3.ckpt")
    assert seen.of("first") == ["nvfp4", "bf16", "bf16"]
    assert list(state(plugin)["casts"]) == ["first"]


def test_another_model_without_a_layer_whose_casts_were_changed() -> None:
    class Headless(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.tail = self.head
            del self.head

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.tail(h + self.mlp(h))

    plugin = FP4Precision()
    made = trainer(plugin, max_steps=-1, max_epochs=1)
    made.fit(Regression())
    plugin.set_casts({"head": "bf16"})
    made.validate(model := Headless(), verbose=False)
    plugin.set_casts({"first": "bf16"})
    assert model.first.full_casts == HP


def test_a_resumed_run_leaves_the_phase_as_it_was_saved() -> None:
    """Unless a switch is no longer there that has acted since."""

    class ByHand(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.precision_plugin.set_phase("hp-forward")

    def switches() -> list[Callback]:
        return [QAFSwitch(step=1, rewarm=2)]

    assert fit(*switches(), ByHand(), keep=True).phases == ["fqt", "qaf", *["hp-forward"] * 4]
    assert fit(*switches(), ckpt_path="3.ckpt").phases == ["hp-forward"] * 3
    last = PrecisionSwitch("bf16", step=2)
    assert fit(*switches(), last, keep=True).phases == ["fqt", "qaf", *["bf16"] * 4]
    assert fit(*switches(), last, ckpt_path="3.ckpt").phases == ["bf16"] * 3
    assert fit(*switches(), ckpt_path="3.ckpt").phases == ["qaf"] * 3


def test_a_switch_that_is_due_later_in_a_longer_run_acts_again() -> None:
    class Back(Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            trainer.precision_plugin.set_phase("fqt")

    fit(QAFSwitch(at=0.5), max_steps=4, keep=True)
    with pytest.warns(UserWarning, match="in phase 'qaf' already"):
        seen = fit(QAFSwitch(at=0.5), Back(), max_steps=12, ckpt_path="4.ckpt")
    assert seen.phases == ["fqt"] * 2 + ["qaf"] * 6


def test_a_rollback_from_after_a_switch_to_before_it() -> None:
    """Histories of layers that have other casts since are passed over."""

    class Bad(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("nan") if self.trainer.global_step == 4 else 1)

    rollback = SpikeRollback(warmup_steps=50, every_n_steps=50)
    switches = [PrecisionSwitch({"head": "bf16"}, step=2), PrecisionSwitch({"first": "nvfp4"}, step=3)]
    plugin = FP8Precision("delayed")
    with pytest.warns(UserWarning, match="continues with the weights of step 0"):
        seen = fit(*switches, rollback, model=Bad(), plugin=plugin, max_steps=9)
    assert seen.of("head")[-1] == "bf16"
    names = {name.partition("/")[0] for name in state(plugin)["amax_history"]}
    assert names == {name for name in LAYERS if name.startswith("mlp")}


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ({"heed": "bf16"}, r"to={'heed': 'bf16'}\) cannot be: casts: the pattern 'heed' matches no converted layer"),
        ({"mlp": "mxfp4", "gate_proj": "bf16", "head": "bf16"}, "matches head, left in high precision by skip or only"),
    ],
    ids=["no layer", "unconverted"],
)
def test_patterns_without_a_layer(to: dict[str, str], message: str) -> None:
    """At the start of training, and before anything is changed."""
    seen = Casts()
    with pytest.raises(MisconfigurationException, match=message):
        fit(PrecisionSwitch(to, step=2), seen, plugin=FP4Precision(skip=["head"]))
    assert not seen.full


def test_casts_that_the_backend_refuses() -> None:
    plugin = LowBitPrecision("bf16", backend="native")
    with pytest.raises(
        MisconfigurationException, match="cannot be: backend='native', but fprop of first has no native"
    ):
        fit(PrecisionSwitch({"first": "nvfp4"}, step=2), plugin=plugin)


def test_by_hand_before_there_is_a_model() -> None:
    with pytest.raises(MisconfigurationException, match="none has been converted yet. Give the plugin overrides"):
        FP4Precision().set_casts({"head": "bf16"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it itself
@pytest.mark.parametrize("changes", [False, True])
def test_compiled_before_training_it_computes_the_same(changes: bool) -> None:
    """One graph for each precision, and none for going back."""
    from torch._dynamo.utils import counters

    def train(compiled: bool) -> Tensor:
        model = Regression()
        if compiled:
            model.mlp.compile(backend="eager")
        to: Any = {"mlp": "mxfp4"} if changes else "qaf"
        back: Any = {"mlp": "fqt"} if changes else "fqt"
        fit(PrecisionSwitch(to, step=2), PrecisionSwitch(back, step=4), model=model)
        return flat(model)

    counters.clear()
    torch._dynamo.reset()
    eager, compiled = train(False), train(True)
    assert torch.equal(eager, compiled)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"], dict(counters["graph_break"])


# --- learning rates ---------------------------------------------------------------------------------------------------


def adam(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, 1.0)


def tensor_rate(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, torch.tensor(1.0), capturable=False, foreach=False)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("make", [adam, tensor_rate, lambda p: Adaptive(adam(p))], ids=["adam", "tensor", "adaptive"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_learning_rate_rises_again_and_the_schedule_goes_on(make: Optimizer, accumulate: int) -> None:
    model = Model(make)
    fit(QAFSwitch(step=1, rewarm=4), model=model, accumulate_grad_batches=accumulate)
    assert model.rates == [1, 0.5 / 4, 0.25 / 2, 0.125 * 3 / 4, 0.0625, 0.03125]
    assert model.scheduled[0] == 1
    (optimizer,) = [model.trainer.optimizers[0]]
    assert not optimizer._optimizer_step_pre_hooks, "a hook is left"


class TwoOptimizers(Regression):
    """Two optimizers by hand, both of which step with each batch."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch_idx, 1.0)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        self.rates: list[float] = []
        made = [torch.optim.SGD([layer.weight], 1.0) for layer in (self.first, self.head)]
        for optimizer in made:
            # Hooks before a step run in the order in which they came, and this is run after those of the switch.
            optimizer.step = self.noted(optimizer, optimizer.step)
        return made

    def noted(self, optimizer: torch.optim.Optimizer, step: Any) -> Any:
        def run(closure: Any = None) -> Any:
            handle = optimizer.register_step_pre_hook(lambda *_: self.rates.append(optimizer.param_groups[0]["lr"]))
            step(closure)
            handle.remove()

        return run


def test_by_hand_steps_of_all_optimizers_count_and_a_batch_has_one_rate() -> None:
    model = TwoOptimizers()
    fit(QAFSwitch(step=2, rewarm=4), model=model, max_steps=8)
    assert model.rates == [1, 1, 1 / 4, 1 / 4, 3 / 4, 3 / 4, 1, 1]


def test_it_does_not_rise_before_the_switch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0)
    rewarm = Rewarm(4)
    rewarm.follow([optimizer], 0)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    rewarm.follow([optimizer], -1)
    assert not optimizer._optimizer_step_pre_hooks, "of a negative number of steps"


def test_learning_rates_of_two_causes_multiply_and_come_back() -> None:
    weights = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weights], 1.0)
    weights.grad = torch.ones(1)
    first, second = LowerRates(optimizer, 0.5), LowerRates(optimizer, 0.5)
    optimizer.step()
    assert (weights.item(), optimizer.param_groups[0]["lr"]) == (0.75, 1.0)
    first.release()
    second.factor = 0.25
    optimizer.step()
    assert (weights.item(), optimizer.param_groups[0]["lr"]) == (0.5, 1.0)
    second.release()
    first.release()
    optimizer.step()
    assert weights.item() == -0.5


# --- moments ----------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adaptive": lambda p: Adaptive(torch.optim.AdamW(p, 1e-2)),
    "stable_spam": lambda p: StableSPAM(p, lr=1e-2),
    "fp8": lambda p: LowBitAdamW(p, lr=1e-2),
    "sparse": lambda p: SPAM(p, lr=1e-2, density=0.25),
}
GUARDS = ("steps", "threshold", "norm_mean", "norm_mean_square", "norm_mean_weight")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_start_anew_and_guards_go_on(name: str) -> None:
    """After a step that follows the reset, moments are those of its gradients alone."""
    states: list[Any] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            (optimizer,) = trainer.optimizers
            weight = trainer.lightning_module.first.weight
            kept = {key: v.clone() for key, v in optimizer.state[weight].items() if isinstance(v, Tensor)}
            states.append({**kept, "g": weight.grad.clone()})

    fit(QAFSwitch(step=3, moments="reset"), Look(), model=Model(OPTIMIZERS[name]), max_steps=5)
    before, after = states[2], states[3]
    if name == "sgd":
        assert torch.equal(after["momentum_buffer"], after["g"])
    elif name in ("adamw", "adaptive"):
        assert (before["step"], after["step"]) == (3, 1)
    else:
        assert (before["steps_since_reset"], after["steps_since_reset"]) == (3, 1)
        assert after["mean_weight"] < before["mean_weight"]
    if name == "adamw":
        assert torch.allclose(after["exp_avg"], 0.1 * after["g"])
    for guard in [key for key in GUARDS if key in before]:
        assert states[4]["steps"] == 5, "the guards have forgotten their steps"
        assert before[guard] == 0 or after[guard] != 0, f"{guard} starts anew"
    assert ("steps" in before) == (name not in ("sgd", "adamw"))


# --- the report, and what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [False, True])
def test_each_switch_that_acted_is_reported(resumed: bool) -> None:
    def make() -> list[PrecisionSwitch]:
        return [
            PrecisionSwitch({"head": "bf16", "mlp": "qaf"}, step=3),
            QAFSwitch(at=0.25),
            QAFSwitch(at=0.25),  # it is there twice
            PrecisionSwitch("bf16", step=100),
        ]

    switches = make()
    fit(*switches, max_steps=8, keep=True)
    if resumed:
        switches = make()
        fit(*switches, max_steps=8, ckpt_path="5.ckpt")
    made = trainer(None, callbacks=list(switches))
    expected = [
        {"step": 2, "from": "fqt", "to": "qaf", "why": "at=0.25"},
        {"step": 3, "from": "head: nvfp4, mlp: nvfp4", "to": "head: bf16, mlp: qaf", "why": "step=3"},
    ]
    assert switches[0].report_data(made) == {"precision_switches": expected}
    ((section,), *others) = [switch.report_sections(made) for switch in switches]
    assert [list(row) for row in section.blocks[0].rows] == [list(record.values()) for record in expected]
    assert others == [[], [], []], "said more than once"


def test_nothing_to_report() -> None:
    switch = QAFSwitch(step=100)
    fit(switch)
    made = trainer(None, callbacks=[switch])
    assert (switch.report_data(made), switch.report_sections(made)) == ({}, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": {}}, "to maps patterns of layers to casts, at least one"),
        ({"to": {"head": "qat"}}, "Unknown phase or preset 'qat'. Did you mean 'qaf'.*'mxfp4'"),
        ({"to": {"head": {"fprop_v": None}}}, "Unknown field of LinearCasts 'fprop_v'"),
        ({"to": {"head": "bf16"}, "steps": 5}, "λ is for all layers, and a mapping for some"),
        ({"rewarm": 0}, "rewarm is a number of optimizer steps, 1 or more, or None; got 0"),
        ({"rewarm": 2.5}, "rewarm is a number of optimizer steps, 1 or more, or None; got 2.5"),
        ({"moments": "forget"}, "Unknown moments 'forget'"),
    ],
    ids=["empty", "preset", "field", "gradual", "no rewarm", "part of a step", "moments"],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionSwitch(**{"to": "fqt", "step": 3, **arguments})


# --- two processes ----------------------------------------------------------------------------------------------------


def test_two_processes(tmp_path: Path) -> None:
    """Ranks with different numbers of tokens switch at one step, and go on from a checkpoint of any."""
    ranks = launch("tests.callbacks.switches.ranks_switches", RANKS, tmp_path)
    first, second = ranks
    assert first.keys() == second.keys()
    for name in first:
        a, b = first[name], second[name]
        assert a["seen"] == b["seen"], f"{name}: the ranks have switched at different steps"
        assert a["seen"][-1] == [8, "qaf", "mxfp4", "nvfp4"]
        steps = [step for step, phase, _, _ in a["seen"] if phase == "qaf"]
        # 40 and 5 tokens in a step: 45 k are TOKENS or more.
        assert steps[0] == -(-TOKENS // 45)
        for resumed, weights in a["resumed"].items():
            for whole, part in zip(a["weights"], weights, strict=True):
                assert torch.equal(whole, part), f"{name}, resumed after step {resumed}: other weights"
    for whole, sharded in zip(first["ddp"]["weights"], first["fsdp2"]["weights"], strict=True):
        torch.testing.assert_close(whole, sharded)
    assert first["ddp"]["record"] == first["fsdp2"]["record"]
