"""The format ``onnx``: codes, inputs and patches against the package's own casts, and whole models in onnxruntime."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, quantize
from lightning_lowbit.export.formats import onnx
from lightning_lowbit.export.formats.base import Options
from lightning_lowbit.export.formats.onnx_layers import TYPES, Decoded, InputRounding, input_obstacle, patches
from lightning_lowbit.export.parity import outputs_difference
from lightning_lowbit.export.weights import weights
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.kernels.windows import Window
from lightning_lowbit.nn.casts.linear_casts import PRESETS
from lightning_lowbit.nn.core.watch import LayerAmaxes
from lightning_lowbit.nn.layers.convolution import QuantizedConvolution
from tests.export.originals import VOCABULARY, greedy, language_model, trained_model
from tests.tables import each

FORMAT = onnx.FORMATS["onnx"]
ROWS = Cast("int8", Scale("fp32", "row", epsilon=1e-5))


def dequantize_linear(decoded):
    """``DequantizeLinear`` of ONNX, by its specification."""
    axis, size = decoded.attributes.get("axis", 0), decoded.attributes.get("block_size")

    def spread(values):
        if size is not None:
            return values.repeat_interleave(size, axis).narrow(axis, 0, decoded.codes.shape[axis])
        return values.reshape([-1 if i == axis else 1 for i in range(decoded.codes.dim())]) if values.dim() else values

    zeros = 0 if decoded.zeros is None else spread(decoded.zeros).float()
    return (decoded.codes.float() - zeros) * spread(decoded.scales)


def test_codes_times_scales_are_the_weight_to_the_bit():
    casts = {preset: cast for preset in PRESETS if (cast := LinearCasts.preset(preset).cast_of("fprop_w")) is not None}
    scales = {block: Scale("fp32", block) for block in ("row", "tensor", 16, (4, 16))}
    casts |= {f"{e}/{block}": Cast(e, scale) for e in ELEMENT_FORMATS for block, scale in scales.items()}
    casts |= {f"minmax of int{n}": Cast(f"int{n}", Scale("fp32", 16, statistic="minmax")) for n in (4, 8)}
    weight = torch.randn(24, 72) * torch.logspace(-3, 3, 24)[:, None]
    for name, cast in casts.items():
        quantized = quantize(weight, cast)
        for transposed in (False, True):
            found = dequantize_linear(Decoded(quantized, transposed))
            assert torch.equal(found.t() if transposed else found, quantized.dequantize()), name


def test_whole_numbers_of_up_to_four_bits_take_four_bits():
    types = {e: TYPES[Decoded(quantize(torch.randn(4, 8), Cast(e, ROWS.scale)), False).number] for e in ELEMENT_FORMATS}
    few = dict.fromkeys(("int2", "int3", "int4", "ternary", "e1m2"), "int4")
    whole = dict.fromkeys(("int5", "int6", "int7", "int8", "e2m1", "e3m0", "e2m3"), "int8")
    assert types == few | whole | {"e4m3": "e4m3", "e3m2": "e4m3", "e5m2": "e5m2"}


def test_inputs_are_rounded_as_the_training_rounds_them():
    x = torch.randn(3, 5, 40) * torch.logspace(-6, 4, 5)[:, None]
    x[0, 0], x[1, 1, :20] = 0, 0
    blocks = ["row", "tensor", 16]
    scales = [Scale("fp32", block, factor=factor) for block in blocks for factor in (1.0, 0.5)] + [ROWS.scale]
    casts = [Cast(e, scale) for e in ("int2", "int4", "int8", "ternary", "e2m1", "e4m3", "e5m2") for scale in scales]
    presets = [LinearCasts.preset(preset).cast_of("fprop_x") for preset in PRESETS]
    expressed = [cast for cast in presets if cast is not None and input_obstacle(cast) is None]
    assert {cast.scale.format for cast in expressed} == {"fp32", "e4m3", "e8m0"}
    for cast in (*casts, *expressed):
        expected = quantize(x.flatten(0, 1), cast).dequantize().view_as(x)
        assert torch.equal(InputRounding(cast, None)(x), expected), cast


def test_an_input_that_is_not_finite_gives_no_number():
    x = torch.tensor([[1.0, torch.inf], [torch.nan, 1.0], [1.0, 2.0]])
    assert InputRounding(ROWS, None)(x).isnan().any(-1).tolist() == [True, True, False]


def test_patches_are_those_of_the_layer():
    windows = [
        Window((3,), (1,), (1,), (1,), (1,)),
        Window((3, 2), (2, 1), (1, 2), (1, 0), (0, 1)),
        Window((2, 3, 1), (1, 2, 3), (1, 1, 1), (0, 1, 0), (0, 1, 0)),
    ]
    for window in windows:
        x = torch.randn(2, 4, *[7] * len(window.kernel))
        assert torch.equal(patches(x, window).flatten(0, -2), window.gather(x)), window


def test_what_operators_do_not_express_is_refused():
    refused = {
        LinearCasts.preset("nvfp4-4over6"): r"0: its input has scales e4m3:1x16.*4/6.*do not express",
        LinearCasts(Cast("e3m0", Scale("fp32", 16)), ROWS): r"0: its input is quantized to e3m0",
        LinearCasts(Cast("int8", ROWS.scale, "stochastic"), ROWS): r"0: its input is rounded stochastically",
    }
    for casts, message in refused.items():
        with pytest.raises(ValueError, match=message):
            FORMAT.write(trained_model(nn.Sequential(nn.Linear(32, 32)), casts), Path(), Options())
    original = trained_model(nn.Sequential(nn.Linear(32, 32)), LinearCasts.preset("int8"))
    with pytest.raises(ValueError, match=r"needs its shape: give --shape"):
        FORMAT.write(original, Path(), Options())


# --- in onnxruntime ---------------------------------------------------------------------------------------------------


def written(original, folder, **options):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    rows = FORMAT.write(original, folder, Options(**options))
    assert [row.name for row in rows] == [*original.layers] and all(row.error == 0 for row in rows)
    return FORMAT.load(folder)


def assert_same_weights(original, folder, example):
    """What ``DequantizeLinear`` gives in onnxruntime, against the weights of the training, to the bit."""
    import onnx as package
    import onnxruntime

    model = package.load(folder / "model.onnx")
    nodes = [node for node in model.graph.node if node.op_type == "DequantizeLinear" and "in_onnx" in node.input[0]]
    model.graph.output.extend(package.ValueInfoProto(name=node.output[0]) for node in nodes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = session.run([node.output[0] for node in nodes], {session.get_inputs()[0].name: example.numpy()})
    found = {}
    for node, value in zip(nodes, values, strict=True):
        name, _, part = node.input[0].removeprefix("model.").partition(".in_onnx.")
        layer, decoded = original.layers[name], torch.from_numpy(value)
        is_image = isinstance(layer, QuantizedConvolution) and part == "weight.codes"
        found[name] = decoded.t() if not is_image else decoded if decoded.dim() == 2 else layer._matrices(decoded)[0]
    assert found.keys() == original.layers.keys()
    for weight in weights(original):
        assert torch.equal(found[weight.name], weight.quantized.dequantize()), weight.name


def assert_close(found, expected):
    """Both compute in float32, and their sums differ in order: by some units of 2^-24. That takes an input, now and
    then, to the other side of a tie, which moves the outputs of a token or an image by more."""
    errors = (found - expected).abs().amax(-1) / expected.std()
    assert errors.median() < 2e-5 and errors.max() < 0.02, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "preset"), [("gpt2", "int8"), ("qwen3", "fp8-row"), ("bitnet", "ternary"), ("llama", "nvfp4")]
)
@torch.no_grad()
def test_language_models_compute_the_same(kind, preset, tmp_path):
    original = language_model(kind, LinearCasts.preset(preset))
    before = {name: parameter.clone() for name, parameter in original.model.named_parameters()}
    loaded = written(original, tmp_path)
    assert_same_weights(original, tmp_path, torch.zeros(1, 4, dtype=torch.int64))
    for shape in ((2, 12), (1, 5), (3, 1)):
        tokens = torch.randint(VOCABULARY, shape)
        assert_close(loaded(input_ids=tokens).logits, original.model(input_ids=tokens).logits)
    tokens = torch.randint(VOCABULARY, (1, 4))
    assert greedy(loaded, tokens) == greedy(original.model, tokens)
    assert b"site-packages" not in (tmp_path / "model.onnx").read_bytes()  # paths of the machine that wrote it
    after = dict(original.model.named_parameters())
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


class Pair(nn.Sequential):
    def forward(self, input):
        return super().forward(input), input


@pytest.mark.slow
def test_a_module_that_cannot_be_traced_is_refused_with_the_reason(tmp_path):
    original = trained_model(Pair(nn.Linear(32, 32)), LinearCasts.preset("int8"))
    with pytest.raises(ValueError, match=r"cannot trace Pair: it returns tuple, and the format .* a tensor\. Branches"):
        written(original, tmp_path, shape=(2, 32))


@pytest.mark.slow
def test_a_dtype_of_the_modules_own_is_refused_with_the_remedy(tmp_path):
    cast = nn.Sequential(nn.Linear(32, 32), *nn.Sequential(nn.Linear(32, 32)).bfloat16())
    cast[1].register_forward_pre_hook(lambda layer, args: args[0].bfloat16())
    original = trained_model(cast, LinearCasts.preset("int8"), skip=["1"])
    with pytest.raises(ValueError, match=r"onnxruntime cannot load it \(.*must compute in no other dtype, as by \.bfl"):
        written(original, tmp_path, shape=(2, 32))


class OfTokens(nn.Module):
    """Takes ids, of any length or, with positions, of one."""

    def __init__(self, positions):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(16, 32), nn.Linear(32, 8)
        self.positions = nn.Parameter(torch.randn(positions, 32))
        self.example_input_array = torch.randint(16, (2, 6))

    def forward(self, ids):
        return self.layer(self.embedding(ids) + self.positions)


@pytest.mark.slow
@torch.no_grad()
def test_tokens_of_a_module_of_ones_own(tmp_path):
    for positions, lengths in ((1, (6, 9)), (6, (6,))):
        original = trained_model(OfTokens(positions), LinearCasts.preset("int8"))
        loaded = written(original, tmp_path)
        for length in lengths:
            ids = torch.randint(16, (3, length))
            assert_close(loaded(ids), original.model(ids))
        assert outputs_difference(original, loaded, original.model.example_input_array) < 0.01


class EveryInput(nn.Module):
    """An input by all casts of presets that operators of ONNX express."""

    def __init__(self):
        super().__init__()
        casts = {LinearCasts.preset(preset).cast_of("fprop_x") for preset in PRESETS} - {None}
        self.inputs = nn.ModuleList(
            InputRounding(cast, None) for cast in casts if cast and input_obstacle(cast) is None
        )

    def forward(self, x):
        return torch.stack([each(x) for each in self.inputs])


@pytest.mark.slow
def test_no_optimization_changes_a_bit_of_the_inputs(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    model = EveryInput().eval()
    x = torch.randn(6, 200) * torch.logspace(-6, 6, 6)[:, None]
    onnx._traced(onnx._Outputs(model, is_network=False), x).save(str(tmp_path / "model.onnx"))
    assert torch.equal(onnx.Session(tmp_path / "model.onnx")(x), model(x))


class ConvolutionalNetwork(nn.Module):
    """Kernels of one pixel and of nine, with strides and circular padding, a batch norm, a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.norm = nn.BatchNorm2d(16)
        self.inner = nn.Conv2d(16, 32, 3, 2, padding=1, padding_mode="circular", bias=False)
        self.short = nn.Conv2d(16, 32, 1, 2)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.head = nn.Linear(16, 10)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return self.head(torch.relu(self.up(self.inner(x) + self.short(x))).mean((2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "activations"), [("int8", True), ("int4", False), ("fp8-current", True)])
@torch.no_grad()
def test_convolutions_compute_the_same(preset, activations, tmp_path):
    casts = LinearCasts.preset(preset)
    casts = casts if activations else casts.replace(fprop_x=None, wgrad_x=None)
    original = trained_model(ConvolutionalNetwork(), casts)
    loaded = written(original, tmp_path, shape=(1, 3, 16, 16))
    images = torch.randn(5, 3, 16, 16)
    assert_same_weights(original, tmp_path, images)
    assert_close(loaded(images), original.model(images))


@pytest.mark.slow
@torch.no_grad()
def test_incomplete_blocks_tiles_and_zero_points_compute_the_same(tmp_path):
    scales = [Scale("fp32", block) for block in (16, 128, (16, 16), "tensor")]
    casts = [Cast("int4", scale) for scale in scales] + [Cast("int8", scales[1]), Cast("e4m3", scales[1])]
    casts += [Cast(f"int{n}", Scale("fp32", 32, statistic="minmax")) for n in (4, 8)]
    for cast in casts:
        original = trained_model(nn.Sequential(nn.Linear(200, 24)), LinearCasts(fprop_w=cast))
        loaded, x = written(original, tmp_path, shape=(2, 200)), torch.randn(9, 200)
        assert_same_weights(original, tmp_path, x)
        assert_close(loaded(x), original.model(x))


@each("is_calibrated", [True, False], fast=1)
@torch.no_grad()
def test_known_amaxes_become_static_scales(is_calibrated, tmp_path):
    """Those of calibration, and of delayed scaling. ``QuantizeLinear`` divides where the training multiplies."""
    x, amaxes = torch.randn(64, 32), None
    casts = LinearCasts(Cast("int8", Scale("fp32", "tensor")), ROWS)
    original = trained_model(nn.Sequential(nn.Linear(32, 16)), casts if is_calibrated else "fp8-delayed")
    if is_calibrated:
        amaxes = {"0": x.abs().max().item()}
    else:
        known = torch.full((6,), 2.5)
        known[1] = 0  # of the weight there is none
        original.layers["0"].lowbit.amaxes = LayerAmaxes(known, torch.zeros(6), torch.zeros(0), torch.zeros(0), [False])
    package = pytest.importorskip("onnx")
    loaded = written(original, tmp_path, shape=(2, 32), input_amaxes=amaxes)
    operators = [node.op_type for node in package.load(tmp_path / "model.onnx").graph.node]
    assert operators.count("QuantizeLinear") == 1 and "Abs" not in operators
    difference = loaded(x) - original.model(x)
    assert difference.norm() < 1e-3 * original.model(x).norm()
