"""Where block-scaled GEMMs run: what a GPU says of itself, and what it computes when asked."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit import Cast, Scale, convert
from lightning_lowbit.compilation import backend
from lightning_lowbit.nn.layers.native import obstacle_of
from lightning_lowbit.nn.native import devices
from lightning_lowbit.nn.native.table import NATIVE
from tests.nn.native.stand_in import NO_ROWS, OF_GPUS, StandIn
from tests.operations import Operations
from tests.tables import each

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
rows_on_cpus = pytest.mark.skipif(NO_ROWS is not None, reason=str(NO_ROWS))


@pytest.fixture(autouse=True)
def _plain():
    """Compiling the samples takes longer than all else."""
    with backend("eager"):
        yield


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch speak of a GPU, and run on the CPU what it is asked to compute."""

    def make(capability=(10, 0), hip=None, arch=""):
        properties = type("Properties", (), {"gcnArchName": arch})()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.version, "hip", hip)

    trial = devices._trial_obstacle.__wrapped__
    monkeypatch.setattr(devices, "_trial_obstacle", lambda device, kind: trial(CPU, kind))
    monkeypatch.setattr(devices, "_name", lambda device: "Some GPU")
    monkeypatch.setattr(F, "scaled_mm", StandIn())
    return make


@rows_on_cpus
def test_gpus_by_what_they_say(gpu):
    everywhere, blackwell = {"fp8", "int8"}, OF_GPUS - {"fp8-blockwise"}
    for gpu_like, kinds in (
        ([(7, 0)], set()),
        *(([capability], {"int8"}) for capability in ((7, 5), (8, 6))),
        ([(8, 9)], everywhere),
        ([(9, 0)], everywhere | {"fp8-blockwise"}),
        *(([capability], everywhere | blackwell) for capability in ((10, 0), (10, 3))),
        ([(12, 0)], everywhere | {"nvfp4", "mxfp8"}),
        ([(9, 5), "7.0", "gfx950:sramecc+:xnack-"], {"mxfp4", "mxfp8"}),
    ):
        gpu(*gpu_like)
        assert {kind for kind in NATIVE if devices.native_obstacle(GPU, kind) is None} == kinds, gpu_like


NEEDED = "GEMMs need an NVIDIA GPU of compute capability"
GFX942 = [(9, 4), "7.0", "gfx942:sramecc+:xnack-"]


@each(
    ("kind", "gpu_like", "obstacle"),
    [
        ("nvfp4", [(9, 0)], f"native NVFP4 {NEEDED} 10.0 or more (Blackwell); Some GPU has 9.0"),
        ("fp8", [(8, 6)], "8.9 or more (Ada, Hopper, Blackwell); Some GPU has 8.6"),
        ("int8", [(7, 0)], f"int8 {NEEDED} 7.5 or more, or a CPU with VNNI; Some GPU has 7.0"),
        *((kind, GFX942, "Some GPU is AMD's, which has not been tried") for kind in ("fp8", "int8", "nvfp4")),
        ("mxfp8", GFX942, "gfx950 (MI350); Some GPU is gfx942"),
    ],
)
def test_what_a_gpu_lacks_is_said(gpu, kind, gpu_like, obstacle):
    gpu(*gpu_like)
    assert str(devices.native_obstacle(GPU, kind)).endswith(obstacle)


def test_a_layout_of_amd_that_is_not_written_is_said(gpu, monkeypatch):
    gpu((9, 5), "7.14", "gfx950")
    monkeypatch.setattr(F.ScalingType, "BlockWiseBlk32Ue8m0_32_8_EXT", 6, raising=False)
    assert "in a layout that is not written yet" in str(devices.native_obstacle(GPU, "mxfp8"))


@pytest.mark.parametrize("kind", sorted(OF_GPUS))
def test_a_device_that_computes_something_else_is_not_believed(gpu, monkeypatch, kind):
    """Such as one that reads scales in another order, or none."""
    gpu((9, 0) if kind == "fp8-blockwise" else (10, 0))
    right = StandIn()

    def reads_another_order(a, b, scales_a, *rest, **kwargs):
        first, *others = scales_a if isinstance(scales_a, list) else [scales_a]
        turned = first.clone(memory_format=torch.preserve_format)
        turned.copy_(first.flatten().roll(1).view(first.shape))
        return right(a, b, [turned, *others], *rest, **kwargs)

    monkeypatch.setattr(F, "scaled_mm", reads_another_order)
    assert "Some GPU was asked, and its result is off by" in str(devices.native_obstacle(GPU, kind))
    monkeypatch.setattr(F, "scaled_mm", lambda *_, **kwargs: torch.full((48, 144), torch.nan))
    assert "off by nan of its norm" in str(devices.native_obstacle(GPU, kind))


def test_what_torch_refuses_is_said(gpu, monkeypatch):
    gpu((10, 0))

    def refuses(*_, **kwargs):
        raise NotImplementedError("MXFP4 scaling supported on ROCM and CUDA+FBGEMM_GENAI only\nException raised from")

    monkeypatch.setattr(F, "scaled_mm", refuses)
    assert str(devices.native_obstacle(GPU, "mxfp4")).endswith(
        "torch refuses it on Some GPU: MXFP4 scaling supported on ROCM and CUDA+FBGEMM_GENAI only"
    )


class Otherwise(TorchDispatchMode):
    """Computes some GEMMs of rows or tensors without their bias or scales, or refuses them."""

    def __init__(self, is_wrong, **changes):
        super().__init__()
        self.is_wrong, self.changes = is_wrong, changes

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        if operator == torch.ops.aten._scaled_mm.default:
            names = [one.name for one in operator._schema.arguments]
            call = dict(zip(names, arguments, strict=False)) | (named or {})
            if self.is_wrong(call):
                if not self.changes:
                    raise RuntimeError("Invalid scaling configuration")
                return operator(**{**call, **self.changes})
        elif operator == torch.ops.aten._int_mm.default and self.changes:
            return 2 * operator(*arguments)
        return operator(*arguments, **(named or {}))


@rows_on_cpus
@each(
    ("kind", "is_wrong", "changes"),
    [
        ("fp8", lambda call: call["self"].dtype == torch.float8_e5m2, {}),
        ("fp8", lambda call: call["scale_a"].dim() == 2, {}),
        ("fp8", lambda call: call.get("out_dtype") == torch.float32, {}),
        ("fp8", lambda call: call.get("use_fast_accum"), {}),
        ("fp8", lambda call: call.get("bias") is not None, {}),
        ("fp8", lambda call: call.get("bias") is not None, {"bias": None}),
        ("fp8", lambda call: call["scale_a"].dim() == 2, {"scale_a": torch.ones(48, 1)}),
        ("int8", lambda call: False, {"twice": True}),
    ],
)
def test_each_way_of_a_gemm_of_rows_is_tried(gpu, kind, is_wrong, changes):
    gpu((9, 0))
    with Otherwise(is_wrong, **changes):
        obstacle = str(devices.native_obstacle(GPU, kind))
    if changes:
        assert "Some GPU was asked, and its result is off by" in obstacle
    else:
        assert obstacle.endswith("torch refuses it on Some GPU: Invalid scaling configuration")
    assert devices.native_obstacle(GPU, kind) is None


@pytest.fixture
def questions(scaled_mm):
    """What a device computes that nobody has asked yet."""
    devices._trial_obstacle.cache_clear()
    return scaled_mm.calls


def test_a_device_is_asked_once(questions):
    for _ in range(3):
        assert devices.native_obstacle(CPU, "nvfp4") is None
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    assert [dtype for _, dtype in questions] == dtypes
    assert devices.native_obstacle(CPU, "mxfp8") is None
    assert [dtype for _, dtype in questions] == 2 * dtypes


@pytest.mark.usefixtures("compiler")
def test_asking_breaks_no_graph(questions):
    """A compiled layer asks the device while it is traced."""
    layer = convert(nn.Linear(32, 32), "mxfp8")
    x = torch.randn(8, 32)
    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert len(questions) == 4  # the question for three dtypes, and the forward pass
    assert torch.equal(found, layer(x))


def test_the_emulation_asks_nothing(questions):
    original = nn.Linear(32, 32)
    for casts, choice in (("mxfp6", "auto"), ("ufp4", "auto"), ("nvfp4", "emulated")):
        assert convert(copy.deepcopy(original), casts, backend=choice).native_gemms(CPU) == ()
    assert not questions


def test_native_where_there_is_none_is_refused():
    for name, needed in {"mxfp8": "MXFP8", "fp8-blockwise": "FP8", "fp8-row": "FP8"}.items():
        layer = convert(nn.Linear(32, 32), name, backend="native")
        expected = f"backend='native': native {needed} GEMMs.* need .*; the device is 'cpu'. Use backend='auto' or"
        with pytest.raises(ValueError, match=expected):
            layer(torch.randn(4, 32))
    for casts in ("mxfp6", "int8", {"preset": "nvfp4", "every": {"scale": {"block": 24}}}):
        with pytest.raises(ValueError, match=r"has no native GEMM: .*blocks of 16 .*Use backend='auto', skip such"):
            convert(nn.Linear(32, 32), casts, backend="native")
    for name in ("nvfp4", "mxfp4", "ternary"):
        layer = convert(nn.Linear(32, 32), name, backend="native")
        expected = r"GEMMs of codes on CPUs need the C\+\+ kernels; 'cpu' is declared"
        with devices.declared("cpu", ()), pytest.raises(ValueError, match=expected):
            layer(torch.randn(4, 32))


def test_without_int8_units_layers_are_emulated_or_refuse(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    casts = dict.fromkeys(("fprop_x", "fprop_w"), Cast("int8", Scale("fp32", "row")))
    layer, x = convert(nn.Linear(64, 48), casts), torch.randn(8, 64)
    with Operations() as operations:
        layer(x)
    assert layer.native_gemms(CPU) == () and not operations.counts["_int_mm"]
    layer.lowbit.backend = "native"
    with pytest.raises(ValueError, match="7.5 or more, or a CPU with VNNI; this CPU has none. Use backend='auto' or "):
        layer(x)
    for device in ("meta", "mps"):
        assert str(devices.native_obstacle(torch.device(device), "int8")).endswith(f"the device is '{device}'")


def test_codes_are_multiplied_where_that_is_faster(monkeypatch):
    assert obstacle_of(CPU, "cpu", "native") is None
    assert obstacle_of(CPU, "cpu", "auto") == devices.slower_because("cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert obstacle_of(CPU, "cpu", "native") is None
    reason = "this CPU has tile units (AMX), whose bf16 GEMMs are faster"
    assert obstacle_of(CPU, "cpu", "auto") == reason
    layer = convert(nn.Linear(32, 32), "nvfp4")
    assert layer.emulated_because(CPU) == {"fprop, dgrad, wgrad": reason}
    with devices.declared("cpu", {"cpu"}):
        assert obstacle_of(CPU, "cpu", "auto") is None, "it is known better"


def test_a_declaration_holds_in_its_context():
    before = {kind: devices.native_obstacle(CPU, kind) for kind in NATIVE}
    with devices.declared("cpu", {"fp8", "mxfp8"}):
        assert devices.native_obstacle(CPU, "fp8") is None
        assert str(devices.native_obstacle(CPU, "int8")).endswith("'cpu' is declared to have none")
        assert "torch refuses it on 'cpu'" in str(devices.native_obstacle(CPU, "mxfp8")), "it is tried"
        assert devices.native_obstacle(torch.device("meta"), "fp8") is not None
    devices._trial_obstacle.cache_clear()
    assert before == {kind: devices.native_obstacle(CPU, kind) for kind in NATIVE}
    with pytest.raises(ValueError, match=r"Unknown kinds of native GEMMs \['fp9'\]: choose among fp8, int8, nvfp4"):
        devices.declared("cpu", {"fp9"}).__enter__()
