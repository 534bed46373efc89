"""Causal language models: LLaMA in the papers' sizes, LLaMA and BitNet for a laptop, or any of ``transformers``.

A name and changes to its configuration define a network, so YAML describes it completely. Low precision is added by the
precision plugin, and by the callables ``optimizer`` and ``scheduler``.
"""

import math
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric, Metric
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_lowbit._lightning import (
    LightningModule,
    LRSchedulerCallable,
    OptimizerCallable,
    OptimizerLRScheduler,
    TrainerFn,
    total_steps,
)
from lightning_lowbit.checks import choose, nearest
from lightning_lowbit.distributed import connect, gradient_norm
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.checkpoints.files import CHECKPOINT_KEY
from lightning_lowbit.precision.run_settings import seed_or_global

from .saving import SavePretrained, restore_casts
from .schedules import WarmupSchedule
from .sharding import spread


def count_tokens(batch: Tensor) -> int:
    """Number of predicted tokens in a batch of int64 (batch, length + 1)."""
    return batch[:, 1:].numel()


class Perplexity(MeanMetric):
    """exp of the mean loss over all tokens and ranks, not the mean of the batches' perplexities."""

    def compute(self) -> Tensor:
        return super().compute().exp()


# LLaMA in the sizes of the Stable-SPAM paper (arXiv 2502.17055, table A.1), LLaMA-7B (arXiv 2302.13971), and small
# networks on bytes for two CPU cores; their dimensions are multiples of 64, so that no format pads a block. BitNet
# (arXiv 2504.12285) is LLaMA with a squared ReLU and SubLN: an RMSNorm before every linear layer. OLMoE (arXiv
# 2409.02060) has a mixture of experts in each block, of which each token gets two of eight here.
_SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
NETWORKS: dict[str, dict[str, Any]] = {
    name: dict(zip(_SHAPE, shape, strict=True))
    for name, shape in {
        "llama-small": ("llama", 256, 704, 4, 4, 256),
        "bitnet-small": ("bitnet", 256, 704, 4, 4, 256),
        "llama-60m": ("llama", 512, 1376, 8, 8, 32000),
        "llama-130m": ("llama", 768, 2048, 12, 12, 32000),
        "llama-350m": ("llama", 1024, 2736, 24, 16, 32000),
        "llama-1b": ("llama", 2048, 5461, 24, 32, 32000),
        "llama-7b": ("llama", 4096, 11008, 32, 32, 32000),
        "olmoe-small": ("olmoe", 256, 384, 4, 4, 256),
    }.items()
}
NETWORKS["olmoe-small"] |= {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None}
# Common to all. None: as many key-value heads as heads, also where a configuration changes the heads.
_FIXED = {
    "num_key_value_heads": None,
    "max_position_embeddings": 1024,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def network_config(network: str, config: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Returns the configuration of a causal language model of ``transformers``.

    Args:
        network: a name in ``NETWORKS``; a folder with a ``config.json``, or that file; a model type of ``transformers``
            such as ``"gpt2"`` or ``"qwen3"``; or a model's name on the Hugging Face Hub.
        config: values of the configuration to change.

    Raises:
        ValueError: there is no such network, or its configuration has no value of this name.
    """
    changes = dict(config or {})
    network = os.path.expanduser(network)
    if network in NETWORKS:
        result: PreTrainedConfig = AutoConfig.for_model(**{**NETWORKS[network], **_FIXED, **changes})
    elif network in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        result = AutoConfig.for_model(network, **changes)
    elif Path(network).exists() or re.fullmatch(r"[\w-]+/[\w.-]+", network):
        try:
            changed = {name: value for name, value in changes.items() if name != "trust_remote_code"}  # refused below
            result = AutoConfig.from_pretrained(network, trust_remote_code=False, **changed)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"network: {network!r} has no configuration that transformers can read: "
                f"{str(error).splitlines()[0]} Give a folder with a config.json, or one of {', '.join(NETWORKS)}."
            ) from error
    else:
        hint = nearest(network, [*NETWORKS, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
        raise ValueError(
            f"network: there is no {network!r}.{hint} Give one of "
            f"{', '.join(NETWORKS)}; an existing folder with a config.json; or a type of causal language model that "
            "transformers knows, such as gpt2."
        )
    for name in changes:
        choose(f"value of {type(result).__name__}", name, sorted({*type(result)().to_dict(), *result.attribute_map}))
    return result


class RecipeModule(LightningModule):
    """The common base of the modules of recipes: optimizer, schedule, gradient norm, and casts in checkpoints.

    Attributes:
        make_optimizer: creates the optimizer from named parameters.
        make_scheduler: creates the learning-rate schedule, stepped once per optimizer step; None for a constant rate.
    """

    make_optimizer: OptimizerCallable
    make_scheduler: LRSchedulerCallable | None

    @contextmanager
    def initialized(self, seed: int | None) -> Generator[None, None, None]:
        """Modules that are made within have the initial weights of a seed (None for the global one, or 0), on the CPU;
        or shapes alone, if the default device is meta. Random states stay as they were."""
        device = "meta" if torch.get_default_device().type == "meta" else "cpu"
        with torch.random.fork_rng(devices=[]), torch.device(device):
            # Not `torch.manual_seed`, which would seed the generators of all accelerators, too.
            torch.default_generator.manual_seed(seed_or_global(seed))
            yield

    def setup(self, stage: str) -> None:
        """Empties all metrics: ``Trainer.validate`` leaves tensors of inference mode in them, which ``Trainer.fit``
        cannot update, and an interrupted run leaves half an epoch."""
        for module in self.modules():
            if isinstance(module, Metric):
                module.reset()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the casts of the training if no plugin does: without a Trainer, or in evaluation."""
        trainer = self._trainer
        evaluates = trainer is None or trainer.state.fn != TrainerFn.FITTING
        if evaluates and not (trainer and isinstance(trainer.precision_plugin, LowBitPrecision)):
            restore_casts(self, checkpoint)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the casts to a checkpoint of weights alone, where the plugin does not."""
        plugin = self.trainer.precision_plugin
        if CHECKPOINT_KEY not in checkpoint and isinstance(plugin, LowBitPrecision):
            plugin.on_save_checkpoint(checkpoint)

    def on_train_start(self) -> None:
        """Prepares the gradient norm under FSDP1, for any precision plugin."""
        assert self.trainer.model is not None
        connect(self.trainer.model)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Logs the gradient norm as a tensor on the device, without synchronization."""
        self.log("grad_norm", gradient_norm([*self.parameters()]), prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        optimizer = self.make_optimizer(trained)
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer)
        if isinstance(scheduler, WarmupSchedule) and scheduler.total_steps == math.inf:
            if (total := total_steps(self.trainer)) == math.inf:
                raise ValueError(
                    f"{type(scheduler).__name__} needs the length of the run: set max_steps, max_epochs or "
                    "total_steps; with max_epochs the data need a length."
                )
            scheduler.set_total_steps(total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class CausalLM(RecipeModule):
    """Next-token prediction on batches of int64 tokens (batch, length + 1), by any network of ``transformers``.

    Logs ``loss``, ``grad_norm`` (global L2 norm before clipping), ``val_loss`` (mean over tokens) and
    ``val_perplexity``. Under ``ModelParallelStrategy`` the network is tensor-parallel and sharded, see
    :mod:`lightning_lowbit.recipes.sharding`. :meth:`load_from_checkpoint` restores the casts of the training, and
    ``model.save_pretrained`` refuses to write latent weights.

    Args:
        network: ``"llama-small"`` (3.3 million parameters), ``"bitnet-small"`` (the same with BitNet b1.58's norms and
            activation, for ternary weights), ``"olmoe-small"`` (10.6 million, 8 experts, two of them for a token),
            ``"llama-60m"``, ``"llama-130m"``, ``"llama-350m"``, ``"llama-1b"``, ``"llama-7b"``, or anything else that
            :func:`network_config` takes.
        config: values of the network's configuration to change, e.g. ``{"num_hidden_layers": 2}``.
        pretrained: whether to load the weights at ``network``, a path or Hub name.
        gradient_checkpointing: whether to recompute activations instead of keeping them.
        gather_dtype: ``"bf16"``: FSDP2 (``ModelParallelStrategy``) gathers parameters in bf16, and the residual stream
            is in bf16. Otherwise autocast keeps a bf16 copy of all weights on each device.
        seed: of the initial weights, independent of the global generator; None takes that of ``seed_everything``, or 0.
        optimizer: creates the optimizer from the parameters; in YAML a ``class_path`` with ``init_args``.
        scheduler: creates the learning-rate schedule, stepped once per optimizer step; None for a constant rate.

    Raises:
        ValueError: as in :func:`network_config`; or (before training) the data has more tokens than the vocabulary or
            longer sequences than positions, or the strategy does not gather in ``gather_dtype``.
    """

    # configure_model creates no layers, so that `lowbit fit` can match patterns before a run begins.
    makes_layers_at_once = True

    def __init__(
        self,
        network: str = "llama-small",
        config: dict[str, Any] | None = None,
        pretrained: bool = False,
        gradient_checkpointing: bool = False,
        gather_dtype: Literal["bf16"] | None = None,
        seed: int | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        # Without classes and functions, so that the checkpoint loads with `weights_only=True`.
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        settings = network_config(network, config)
        if pretrained:
            self.model = _load(network, settings)
        else:
            with self.initialized(seed):
                self.model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
            if settings.name_or_path:
                with suppress(OSError):  # without a file of them: those of the configuration
                    self.model.generation_config = GenerationConfig.from_pretrained(settings.name_or_path)
        vars(self.model)["save_pretrained"] = SavePretrained(self.model)
        if gradient_checkpointing:
            former = "gradient_checkpointing_enable"  # its name before transformers 5.23
            getattr(self.model, "activation_checkpointing_enable", getattr(self.model, former))()
        self.gather_dtype = gather_dtype
        self._is_spread = False
        # NaN replaces NaN, so that the mean shows it ("disable" does, too, but in torchmetrics 1.9 disables weights).
        self.val_loss = MeanMetric(nan_strategy=math.nan)
        self.val_perplexity = Perplexity(nan_strategy=math.nan)

    def _networks(self) -> list[nn.Module]:
        """The networks that are sharded: the trained one, and a frozen one beside it."""
        return [self.model]

    def configure_model(self) -> None:
        """Distributes the networks under ``ModelParallelStrategy``; Lightning may call this more than once."""
        if self.device_mesh is not None and not self._is_spread:
            dtype = None if self.gather_dtype is None else torch.bfloat16
            for network in self._networks():  # a frozen one has no backward pass that would use its root again
                frozen = network is not self.model
                spread(network, self.device_mesh, dtype, reshard_after_forward=True if frozen else None)
            self._is_spread = True
        elif self.device_mesh is None and self.gather_dtype is not None:
            raise ValueError(
                f"gather_dtype is what FSDP2 gathers parameters in, and {type(self.trainer.strategy).__name__} is "
                "another strategy. Train with ModelParallelStrategy, or leave it out."
            )

    def prepare_data(self) -> None:
        """Checks the data against the network, before any logger writes a file."""
        data, config = getattr(self.trainer, "datamodule", None), self.model.config
        for size, limit, value in (
            ("vocab_size", "vocab_size", "tokens of the data's tokenizer"),
            ("sequence_length", "max_position_embeddings", "tokens of a sequence"),
        ):
            needed, available = getattr(data, size, None), getattr(config, limit, None)
            if needed is not None and available is not None and needed > available:
                raise ValueError(
                    f"The network's {limit} is {available}, fewer than the {needed} {value}. Set "
                    f"model.init_args.config.{limit} to {needed} or more, or choose other data."
                )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocab_size) of the token after each of ``tokens`` (batch, length)."""
        return self.model(input_ids=tokens).logits

    def _loss(self, batch: Tensor) -> Tensor:
        return _cross_entropy(self(batch[:, :-1]), batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._validate(self(batch[:, :-1]), batch)

    def _validate(self, logits: Tensor, batch: Tensor) -> None:
        """Logs the loss and the perplexity of the text under logits (batch, length, vocab_size)."""
        loss, tokens = _cross_entropy(logits, batch), batch[:, 1:].numel()
        self.val_loss.update(loss, tokens)
        self.val_perplexity.update(loss, tokens)
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)


def _cross_entropy(logits: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def _load(network: str, config: PreTrainedConfig) -> Any:
    try:
        path = os.path.expanduser(network)
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32, trust_remote_code=False)
        return model.train()  # from_pretrained returns it in evaluation mode
    except OSError as error:
        raise ValueError(
            f"pretrained needs a path with weights, but transformers can load none from {network!r}: "
            f"{str(error).splitlines()[0]} Leave pretrained out to draw new ones."
        ) from error
