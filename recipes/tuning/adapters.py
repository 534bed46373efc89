"""LoRA on a frozen causal language model, whose weights may be kept in few bits."""

from collections.abc import Iterable
from typing import Any

from lightning_lowbit.checks import integer
from lightning_lowbit.nn import pack_frozen
from lightning_lowbit.nn.conversion.convert import CastsLike
from lightning_lowbit.packages import install

from ..models import CausalLM


class LoRACausalLM(CausalLM):
    """A :class:`CausalLM` that trains adapters of PEFT (``pip install peft``) beside its frozen weights.

    Args:
        network: a folder with ``config.json`` and weights, a model's name on the Hugging Face Hub, or a network that
            starts from random weights, for trials.
        base: casts in which the frozen weights are kept, as :func:`lightning_lowbit.pack_frozen` takes them; None keeps
            them as they are. The plugin must have the same ``fprop_w``, or none: then only weights are in few bits.
        skip: patterns of layers that ``base`` leaves alone.
        rank: of the adapters.
        alpha: adapters are multiplied by ``alpha / rank``.
        targets: names of the layers that get adapters, or PEFT's ``"all-linear"``.
        pretrained: whether to load the weights at ``network``.
        **kwargs: those of :class:`CausalLM`.

    Raises:
        ValueError: PEFT is not installed, or as :class:`CausalLM` and :func:`lightning_lowbit.pack_frozen` raise.
    """

    def __init__(
        self,
        network: str,
        base: CastsLike | None = "nvfp4-nvidia",
        skip: Iterable[str] = ("lm_head",),
        rank: int = 16,
        alpha: int = 32,
        targets: list[str] | str = "all-linear",
        pretrained: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(network=network, pretrained=pretrained, **kwargs)
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise ValueError(f"LoRACausalLM needs PEFT, which is not installed: {install('peft')}.") from error
        frozen = self.model.requires_grad_(False)
        if base is not None:
            pack_frozen(frozen, base, skip=skip)
        vars(frozen).pop("save_pretrained")  # of the whole model; that of PEFT saves the adapters
        config = LoraConfig(r=integer("rank", rank, 1), lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
        self.model = get_peft_model(frozen, config)
