"""``model.onnx``, for any module: onnxruntime and other engines that read ONNX run it.

A weight is kept in few bits, and ``DequantizeLinear`` decodes it in the graph, to the values of the training. Inputs in
few bits are rounded by operators, too (:mod:`lightning_lowbit.export.formats.onnx_layers`). All else is float32.
"""

import copy
import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowbit.checks import some
from lightning_lowbit.export.folder import write_network
from lightning_lowbit.export.formats.base import Format, Inputs, Options, Written, example_input, row, static_amax
from lightning_lowbit.export.formats.onnx_layers import (
    INT4,
    TYPES,
    UINT4,
    Decoded,
    InputRounding,
    attach,
    input_obstacle,
)
from lightning_lowbit.export.reading.files import first_line
from lightning_lowbit.export.trained_model import TrainedModel
from lightning_lowbit.export.weights import Weight, check, common_obstacle
from lightning_lowbit.nn.casts.linear_casts import FORWARD, LinearCasts
from lightning_lowbit.nn.conversion.context import ForwardContext
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from lightning_lowbit.packages import install
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.quant import Cast

_OPSET = 21  # the first with integers of four bits, and with scales of blocks
_FILE = "model.onnx"
_LOGITS = "logits"  # the output of a model of transformers
_FOUR_BITS = (INT4, UINT4)
_TOKENS = (2, 8)  # of the example; both sizes are free in the file

# Session entry of onnxruntime: by default it multiplies weights of few bits by inputs that it rounds to int8.
_IN_FLOAT32 = ("session.qdq_matmulnbits_accuracy_level", "1")


def obstacle(name: str, layer: QuantizedLayer) -> str | None:
    """Returns why operators of ONNX do not express a layer, in words; None if they do."""
    if (why := common_obstacle(layer)) is not None:
        return why
    cast = layer.casts.cast_of("fprop_x")
    return None if cast is None else input_obstacle(cast)


def _write(format: Format, original: TrainedModel, folder: Path, options: Options) -> list[Written]:
    layers = {clean_name(name): layer for name, layer in quantized_layers(original.model).items()}
    forward = {name: layer for name, layer in layers.items() if layer.casts.has_cast(FORWARD)}
    check(replace(original, layers=forward), {name: obstacle(name, layer) for name, layer in forward.items()}, "onnx")
    example = _example(original, options)
    if missing := [name for name in ("onnx", "onnx_ir", "onnxscript") if find_spec(name) is None]:
        raise ValueError(f"The format onnx takes {some(missing)}: {install(*missing)}.")
    model = _Outputs(_twin(original.model), original.config is not None)
    twins = {clean_name(name): layer for name, layer in quantized_layers(model.model).items()}
    rows = []
    for weight in format.weights(original, options):
        inputs = _inputs(weight.name, weight.layer, options)
        rows.append(_row(weight, attach(twins[weight.name], weight, inputs).weight, inputs))
    for name, layer in layers.items():
        if name not in forward:
            twins[name].casts = LinearCasts()  # its backward pass alone was quantized
        elif name not in original.layers:
            attach(twins[name], None, _inputs(name, layer, options))
    program = _traced(model, example)
    _set_types(program.model, model)
    _forget_source(program.model)
    program.save(str(folder / _FILE))
    if original.config is not None:
        write_network(original, folder, torch.float32, None)
    return rows


def _row(weight: Weight, decoded: Decoded, inputs: InputRounding | None) -> Written:
    codes = decoded.codes.numel() // (2 if decoded.number in _FOUR_BITS else 1)
    size = codes + 4 * decoded.scales.numel() + (0 if decoded.zeros is None else decoded.zeros.numel())
    amax = None if inputs is None or inputs.amax is None else float(inputs.amax)
    by = None if inputs is None else Inputs(inputs.cast, amax)
    return row(weight, f"onnx {TYPES[decoded.number]}", size, by)


def _inputs(name: str, layer: QuantizedLayer, options: Options) -> InputRounding | None:
    """The rounding of a layer's input: by an amax of calibration, or of delayed scaling, or its own in each pass."""
    cast = layer.casts.cast_of("fprop_x")
    if not isinstance(cast, Cast):
        return None
    amax = static_amax(name, layer, options) if cast.scale.block == "tensor" else None
    return InputRounding(cast, None if amax is None else torch.tensor(amax))


class _Outputs(nn.Module):
    """A model with one input and one output: the first one of a model of ``transformers``, such as logits."""

    def __init__(self, model: Any, is_network: bool) -> None:
        super().__init__()
        self.model, self.name = model, model.main_input_name if is_network else None
        if is_network and hasattr(model.config, "use_cache"):
            model.config.use_cache = False

    def forward(self, input: Tensor) -> Tensor:
        output = self.model(input) if self.name is None else self.model(**{self.name: input}, return_dict=True)[0]
        if not isinstance(output, Tensor):
            raise ValueError(f"it returns {type(output).__name__}, and the format takes modules that return a tensor.")
        return output


def _twin(model: nn.Module) -> Any:
    """A copy of a model that computes in float32, without the context of its training; float32 tensors are shared."""
    context, memo = ForwardContext.of(model), dict[int, Any]()
    for tensor in (*model.parameters(), *model.buffers()):
        wide = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
        memo[id(tensor)] = nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide
    if context is not None:
        memo[id(context)] = context
    twin = copy.deepcopy(model, memo)
    ForwardContext.detach(twin)
    return twin.eval()


def _example(original: TrainedModel, options: Options) -> Tensor:
    """An input to trace the model with; its first dimension is free in the file, and of tokens the second, too."""
    model: Any = original.model
    if original.config is not None and model.main_input_name == "input_ids":
        return torch.zeros(_TOKENS, dtype=torch.int64)
    if (example := example_input(original, options)) is not None:
        return example
    raise ValueError(
        f"The format onnx traces {type(model).__name__} with an input, and needs its shape: give --shape 2,3,32,32 "
        "(any number of images of 3x32x32), or set example_input_array in the module to a tensor."
    )


def _traced(model: _Outputs, example: Tensor) -> Any:
    if example.shape[0] == 1:  # a size of 1 would be taken for fixed
        example = example.expand(2, *example.shape[1:])
    is_text, is_network = example.dtype == torch.int64 and example.dim() == 2, model.name is not None
    free: list[dict[int, Any]] = [{0: "batch", 1: "length"}] if is_text else []
    if not (is_text and is_network):
        free.append({0: "batch"})  # of tokens, of a module whose forward takes one length
    for dimensions in free:
        try:
            with _quiet(), torch.no_grad():
                return torch.onnx.export(
                    model,
                    (example,),
                    dynamo=True,
                    opset_version=_OPSET,
                    dynamic_shapes=(dimensions,),
                    input_names=[model.name or "input"],
                    output_names=[_LOGITS if is_network else "output"],
                    verbose=False,
                )
        except torch.onnx.OnnxExporterError as error:
            last = error
    why = str(last.__cause__ or last).strip().replace(":\n", ": ").splitlines()[0].rstrip(".")
    raise ValueError(
        f"torch.onnx cannot trace {type(model.model).__name__}: {why}. Branches on values of tensors cannot be traced; "
        "torch.export.draft_export shows where they are."
    ) from last


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Silences the exporter, which reports missing packages and its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _set_types(graph: Any, model: nn.Module) -> None:
    """Gives codes of four bits, which torch keeps in bytes, their type in the file."""
    import ml_dtypes
    import onnx_ir

    for name, module in model.named_modules():
        if not isinstance(module, Decoded) or module.number not in _FOUR_BITS:
            continue
        numbers = {INT4: ml_dtypes.int4, UINT4: ml_dtypes.uint4}[module.number]
        for part in ("codes", "zeros"):
            value = graph.graph.initializers.get(f"{name}.{part}")
            if value is not None:
                four_bits = getattr(module, part).numpy().astype(numbers)
                value.const_value = onnx_ir.tensor(four_bits, onnx_ir.DataType(module.number), name=value.name)
                value.dtype = onnx_ir.DataType(module.number)


def _forget_source(graph: Any) -> None:
    """Removes the exporter's notes on each node: lines of code, with the paths of this machine."""
    for node in graph.graph.all_nodes():
        for part in (node, *node.outputs):
            part.metadata_props.clear()
    for value in (*graph.graph.inputs, *graph.graph.initializers.values()):
        value.metadata_props.clear()
    graph.graph.metadata_props.clear()


class Session(nn.Module):
    """A file in onnxruntime, on the CPU: called with a tensor, or ``input_ids``, as the model that was exported."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry(*_IN_FLOAT32)
        try:
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # of classes of its own
            raise ValueError(
                f"onnxruntime cannot load it ({first_line(error)}). Its real numbers are float32: the module's forward "
                "must compute in no other dtype, as by .bfloat16() or an autocast of its own"
            ) from error

    def forward(self, input: Tensor | None = None, *, input_ids: Tensor | None = None) -> Any:
        tensor = input_ids if input is None else input
        assert tensor is not None
        [output] = self.session.run(None, {self.session.get_inputs()[0].name: tensor.numpy()})
        is_network = self.session.get_outputs()[0].name == _LOGITS
        return SimpleNamespace(logits=torch.from_numpy(output)) if is_network else torch.from_numpy(output)


FORMATS = {
    "onnx": Format(
        "onnx",
        obstacle,
        _write,
        lambda folder: Session(folder / _FILE).eval(),
        needs_network=False,
        traces=True,
        dtypes=(torch.float32,),
        programs=("onnxruntime",),
    )
}
