"""A trained model to export: a checkpoint, read back into a model that computes as it was trained.

The model's parameters are the tensors of the file, memory-mapped: each is read when it is used.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_lowbit._lightning import rank_zero_warn
from lightning_lowbit._torch import uncompiled
from lightning_lowbit.checks import some
from lightning_lowbit.export.smoothing import fold_smoothing
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.shared_amax import groups
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.precision import restore
from lightning_lowbit.precision.checkpoints.files import check_tensors, load_checkpoint, load_shards, state_of
from lightning_lowbit.precision.checkpoints.restored import run_hooks
from lightning_lowbit.precision.checkpoints.trained import Trained
from lightning_lowbit.precision.run_settings import COMPUTE_DTYPES

_RECIPES = "lightning_lowbit.recipes."
_CAUSAL_LM = f"{_RECIPES}models.CausalLM"
_OF_THE_COMMAND = ("_class_path", "_instantiator")  # entries of LightningCLI beside the hyper-parameters
_OBJECTS = (
    "If you trust whoever wrote it, load it with torch.load(path, weights_only=False), remove such objects, and "
    "torch.save the rest."
)


@dataclass(frozen=True)
class TrainedModel:
    """A trained model. ``model`` evaluates as it was trained, under the autocast of the training; it is one of
    ``transformers`` where the trained module holds one."""

    model: nn.Module
    layers: Mapping[str, QuantizedLayer]  # whose weights the forward pass quantizes, by their names in ``model``
    dtype: torch.dtype  # of the computation in training; weights are rounded to it before they are quantized
    config: Any | None = None  # of ``transformers``; None for other models
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the training, for the model card
    shared: Sequence[Sequence[str]] = ()  # groups of layers whose weights are scaled by one amax, by name
    folded: Mapping[str, float] = field(default_factory=dict)  # by layer, the change of its weight by smoothing
    unmerged: nn.Module | None = None  # with the adapters of the training, which ``model`` has in its weights

    @property
    def has_adapters(self) -> bool:
        """Returns whether the model has adapters of PEFT (:mod:`lightning_lowbit.export.merging`)."""
        return hasattr(self.model, "peft_config")

    @property
    def parameters(self) -> tuple[int, int]:
        """Returns numbers of all parameters, and of parameters in few bits."""
        total = sum(parameter.numel() for parameter in self.model.parameters())
        return total, sum(layer.weight_matrix().numel() for layer in self.layers.values())


def read(checkpoint: str | Path, module: str | None = None, in_few_bits: bool = True) -> TrainedModel:
    """Reads a checkpoint, a file or a folder of shards, of a run with a plugin of this package; runs no code that it
    names.

    ``module`` is the class of the trained ``LightningModule``, ``"package.module.Class"``, made from the file's
    hyper-parameters; None for that of a recipe. ``in_few_bits`` refuses a model whose forward pass quantizes no weight,
    and that has no adapters, and folds smoothing into the weights. A ``ValueError`` if the file is damaged, tells no
    casts, or is of a class that was not given, or if its hyper-parameters do not make the model.
    """
    loaded = load_checkpoint(checkpoint, advice=_OBJECTS)
    state = state_of(loaded)
    if state is None or state.get("trained") is None:
        raise ValueError(
            f"{checkpoint} does not tell how it was trained: it holds no casts. Give a checkpoint of a run with a "
            "plugin of lightning_lowbit, not one of weights alone."
        )
    if (hyper_parameters := loaded.get("hyper_parameters")) is None:
        hyper_parameters = {}
    if not isinstance(hyper_parameters, Mapping) or not all(isinstance(name, str) for name in hyper_parameters):
        raise ValueError(f"{checkpoint} has hyper_parameters that are no mapping of names: it is damaged.")
    trained = Trained.read(state["trained"])
    path = module or _class_name(hyper_parameters, checkpoint)
    whole = _module(path, hyper_parameters, loaded.get("hparams_name"))
    if not path.startswith(_RECIPES):  # whose hook does what follows here
        loaded = run_hooks(whole, loaded)
    whole = _uncompiled(whole)
    _assign(whole, _state(whole, loaded, checkpoint), checkpoint)
    prefix, model, config = _network(whole, [name for name, casts in trained.planned.items() if casts != LinearCasts()])
    restore(model, loaded, prefix=prefix, weights=False)
    layers = {clean_name(name): layer for name, layer in quantized_layers(model).items()}
    quantized = {name: layer for name, layer in layers.items() if layer.casts.fprop_w is not None}
    compute_dtype, shared = COMPUTE_DTYPES[trained.compute_dtype][1], _shared(trained, prefix, quantized)
    folded = {}
    if in_few_bits and any(layer.casts.smooth == "channel" for layer in layers.values()):
        folded = fold_smoothing(model, shared, compute_dtype)
    if in_few_bits and not quantized and not hasattr(model, "peft_config"):
        raise ValueError(
            f"{checkpoint} was saved in phase {state['phase']!r}, with casts {trained}: its forward pass quantizes no "
            "weight, so that there is nothing to export in few bits. Save it as it is: save_pretrained, or torch.save."
        )
    data: Mapping[str, Any] = next(
        (loaded[key] for key in loaded if key.endswith("DataModule") and isinstance(loaded[key], Mapping)), {}
    )
    facts = {
        "checkpoint": Path(checkpoint).name,
        "step": loaded.get("global_step"),
        "phase": state["phase"],
        "casts": str(trained),
        "tokenizer": data.get("tokenizer"),
        "hyper_parameters": {name: value for name, value in hyper_parameters.items() if not name.startswith("_")},
        "run": _run_facts(Path(checkpoint).expanduser()),
    }
    return TrainedModel(model, quantized, compute_dtype, config, facts, shared, folded=folded)


def _shared(trained: Trained, prefix: str, layers: Mapping[str, QuantizedLayer]) -> list[list[str]]:
    """Returns the groups of quantized layers that share an amax, by their names in the model."""
    if not trained.shared_amax:
        return []
    inside = f"{prefix}." if prefix else ""
    names = [[name.removeprefix(inside) for name in group] for group in groups(trained.layers, trained.shared_amax)]
    return [group for group in names if all(name in layers for name in group)]


def _run_facts(checkpoint: Path) -> dict[str, Any]:
    """Data, optimizer, metrics and coverage of a recipe's run, from the folder above that of its checkpoints."""
    facts: dict[str, Any] = {}
    folder, unreadable = checkpoint.resolve().parent.parent, (OSError, ValueError, LookupError, TypeError)
    with suppress(*unreadable, AttributeError, yaml.YAMLError):  # a run without a recipe, or a file of something else
        config = yaml.safe_load((folder / "config.yaml").read_text())
        model = config["model"].get("init_args") or {}
        facts |= {"data": config.get("data"), "optimizer": model.get("optimizer"), "scheduler": model.get("scheduler")}
    with suppress(*unreadable, AttributeError):
        run = json.loads((folder / "run.json").read_text())
        metrics = {name: value for name, value in run["metrics"].items() if name in run["validation_metrics"]}
        facts |= {"coverage": run["coverage"], "name": run["name"], **metrics}
    return {name: value for name, value in facts.items() if value is not None}


def _class_name(hyper_parameters: Mapping[str, Any], checkpoint: Any) -> str:
    """Returns the class of a recipe. Others are not imported, because whoever wrote the file chose them."""
    name = str(hyper_parameters.get("_class_path", _CAUSAL_LM if "network" in hyper_parameters else ""))
    if name.startswith(_RECIPES):
        return name
    statement = f"says {name!r}" if name else "does not say"
    raise ValueError(
        f"{checkpoint} {statement} of which class the trained module is. Give it, if you trust it: --module "
        "package.module.Class."
    )


def _module(path: str, hyper_parameters: Mapping[str, Any], name_of_all: Any = None) -> nn.Module:
    """Returns a module of a class with its hyper-parameters. Only those of recipes have parameters on the meta device:
    others may draw or compute something from theirs when they are made."""
    package, _, name = path.rpartition(".")
    try:
        cls = getattr(import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--module is package.module.Class; {path!r} cannot be imported ({error}).") from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"--module is the class of a LightningModule; {path!r} is {cls!r}.")
    arguments = _arguments(cls, hyper_parameters, name_of_all)
    if "pretrained" in arguments:  # its weights are those of the checkpoint
        arguments["pretrained"] = False
    try:
        with parameters_on_meta() if path.startswith(_RECIPES) else nullcontext():
            module: nn.Module = cls(**arguments)
    except Exception as error:  # whatever the class raises for such arguments
        advice = "Save them in its __init__: self.save_hyperparameters()."
        if not isinstance(error, TypeError):
            advice = (
                "If they name files that have moved, such as a pretrained model's, put them back, or give --module a "
                "subclass whose __init__ replaces them."
            )
        raise ValueError(
            f"{path} cannot be made from the hyper-parameters of the checkpoint ({type(error).__name__}: "
            f"{' '.join(str(error).split()).rstrip('.')}). {advice}"
        ) from error
    return module


def _arguments(cls: type[nn.Module], hyper_parameters: Mapping[str, Any], name_of_all: Any) -> dict[str, Any]:
    """Returns the arguments of a class, as Lightning's ``load_from_checkpoint`` gives them: those that it takes, or one
    that holds them all."""
    arguments = {name: value for name, value in hyper_parameters.items() if name not in _OF_THE_COMMAND}
    kinds = {name: parameter.kind for name, parameter in signature(cls).parameters.items()}
    takes_any = Parameter.VAR_KEYWORD in kinds.values()
    if name_of_all in kinds and kinds[name_of_all] is not Parameter.VAR_KEYWORD:
        return {name_of_all: arguments}
    return {name: value for name, value in arguments.items() if takes_any or name in kinds}


def _uncompiled(module: nn.Module) -> nn.Module:
    for parent in [*module.modules()]:
        for name, part in parent.named_children():
            setattr(parent, name, uncompiled(part))
    return uncompiled(module)


def _state(module: nn.Module, loaded: Mapping[str, Any], checkpoint: str | Path) -> Mapping[str, Tensor]:
    """Returns the tensors of a checkpoint, a file or a folder of shards, by clean names."""
    if Path(checkpoint).expanduser().is_dir():
        return load_shards(module.state_dict(), Path(checkpoint).expanduser(), same_dtype=False)
    state = loaded.get("state_dict")
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{checkpoint} holds no weights by name (state_dict).")
    return {clean_name(name): tensor for name, tensor in state.items()}


@contextmanager
def parameters_on_meta() -> Generator[None, None, None]:
    """Modules that are made have parameters on the meta device; buffers have their values."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:  # such as one that is tied
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def _assign(module: nn.Module, state: Mapping[str, Tensor], checkpoint: Any) -> None:
    """Gives a module the tensors of a checkpoint as its parameters, without copies; tied ones stay tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    check_tensors(module.state_dict(), state, same_dtype=False)
    missing, unexpected = module.load_state_dict(dict(state), strict=False, assign=True)
    if (missing or unexpected) and getattr(module, "strict_loading", True):
        raise ValueError(
            f"{checkpoint} lacks {some(missing) or 'nothing'} of {type(module).__name__}, and holds "
            f"{some(unexpected) or 'nothing'} that the module does not have. Export with the class that was trained."
        )
    for tied in names.values():
        first, *others = sorted(tied)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, module.get_parameter(first))


def _network(module: nn.Module, layers: Sequence[str]) -> tuple[str, nn.Module, Any | None]:
    """Returns name, module and configuration of the transformers model that holds all quantized layers; without one
    ``""``, the module and None."""
    models = {name: part for name, part in module.named_modules() if _is_network(part)}
    holding = [name for name in models if not name or any(layer.startswith(f"{name}.") for layer in layers)]
    name = next(iter(holding or models), "")  # models within it come later
    inside = f"{name}." if name else ""
    if not models or not all(layer.startswith(inside) for layer in layers):
        return "", module, None
    if others := [parameter for parameter, _ in module.named_parameters() if not parameter.startswith(inside)]:
        rank_zero_warn(
            f"The trained module has {some(others)} outside of {name}, the model of transformers: they are not "
            "exported."
        )
    model: Any = models[name]
    return name, model, model.config


def _is_network(module: nn.Module) -> bool:
    return all(hasattr(part, "save_pretrained") for part in (module, getattr(module, "config", None)))


def is_language_model(model: Any) -> bool:
    """Returns whether a model is a causal language model of ``transformers``, called with ``input_ids`` alone."""
    config = getattr(model, "config", None)
    can_generate = config is not None and hasattr(model, "can_generate") and bool(model.can_generate())
    return can_generate and not getattr(config, "is_encoder_decoder", False)


def eos_tokens(model: nn.Module) -> list[int]:
    """Returns the ids at which a model's generation stops."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [] if ends is None else ends if isinstance(ends, list) else [ends]
