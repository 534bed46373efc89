"""Coverage tells the truth, on modules that nobody here wrote: FLOPs are computed anew from shapes, name by name."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.modules import module as module_globals
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_lowbit import Cast, LinearCasts, Scale, compilation, convert
from lightning_lowbit.nn import GemmCounter, LayerKeys, QuantizedLayer, set_phase
from lightning_lowbit.quant import Hadamard

NVFP4 = LinearCasts.preset("nvfp4")
BITS, HP_BITS = 4.5, 16
BATCH, TOKENS, WIDTH, HEADS = 2, 5, 16, 2
BACKWARD = ("dgrad", "wgrad")


# --- what to expect, by shapes ----------------------------------------------------------------------------------------


def gemm(m: int, n: int, k: int) -> int:
    """FLOPs of ``[m, k] · [k, n]``."""
    return 2 * m * n * k


def attention(batch: int, queries: int, keys: int, width: int) -> int:
    """Q · Kᵀ and P · V of all heads, whose widths add up."""
    return batch * (gemm(queries, keys, width) + gemm(queries, width, keys))


def fused_backward(forward: int) -> int:
    """Fused attention computes Q · Kᵀ again, and two products for each of the two: five for two."""
    return forward * 5 // 2


def layer(rows: int, inputs: int, outputs: int, without: Iterable[str] = ()) -> dict[str, int]:
    """A linear layer's GEMMs but for some."""
    return {name: gemm(rows, outputs, inputs) for name in ("fprop", *BACKWARD) if name not in without}


def assert_counted(
    counter: GemmCounter, layers: Mapping[str, Mapping[str, int]], others: Mapping[str, int], recomputed: int = 0
) -> None:
    """Every FLOP is in a GEMM of a converted layer, both operands quantized, or uncovered under the right name."""
    assert dict(counter.gemms) == {(name, g): flops for name, gemms in layers.items() for g, flops in gemms.items()}
    assert dict(counter.others) == dict(others)
    low_bit, rest = sum(counter.gemms.values()), sum(others.values())
    coverage = counter.coverage()
    assert coverage.flops == low_bit + rest
    assert coverage.low_bit == low_bit
    assert coverage.uncovered == dict(others)
    assert list(coverage.uncovered.values()) == sorted(others.values(), reverse=True), "the largest does not come first"
    assert coverage.uncounted == ()
    assert coverage.share == pytest.approx(low_bit / (low_bit + rest))
    assert coverage.average_bits == pytest.approx((BITS * low_bit + HP_BITS * rest) / (low_bit + rest))
    assert counter.recomputed == recomputed
    assert counter.model_flops == low_bit + rest - recomputed


# --- how to count -----------------------------------------------------------------------------------------------------


def low_bit(model: nn.Module, casts: Any = NVFP4, **kwargs: Any) -> Any:
    convert(model, casts, **kwargs)
    LayerKeys(model).fill_(0)
    return model


@contextmanager
def quantized(*models: nn.Module) -> Iterator[None]:
    """Asserts that converted layers have run, and that their output is not that of the raw weights."""
    layers = {m for model in models for m in model.modules() if isinstance(m, QuantizedLayer)}
    seen: list[tuple[QuantizedLayer, Tensor, Tensor]] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if module in layers:
            seen.append((module, inputs[0].detach(), output.detach()))  # type: ignore[arg-type]

    hook = module_globals.register_module_forward_hook(record)  # a module's own would close torch's fast paths
    try:
        yield
    finally:
        hook.remove()
    assert {module for module, *_ in seen} == layers, "a converted layer did not run"
    with torch.no_grad():
        for module, x, y in seen:
            given = module.quantized_forward(x, module.weight_matrix(), module.bias)
            assert torch.equal(y, given), f"{module}: not what the casts give"
            raw = F.linear(x, module.weight_matrix(), module.bias)
            assert not torch.equal(y, raw), f"{module}: computes on the raw operands"


def backward(output: Any) -> None:
    output = getattr(output, "logits", output)
    output.square().sum().backward()


class Operations(TorchDispatchMode):
    """Notes what runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def count(model: nn.Module, *inputs: Any, runs: str | None = None, **kwargs: Any) -> GemmCounter:
    """Counts a forward and, in training, a backward pass, in which an operation ``runs``."""
    with quantized(model), Operations() as operations, GemmCounter(model) as counter:
        output = model(*inputs, **kwargs)
        if model.training:
            backward(output)
    assert runs is None or runs in operations.names, f"{runs} did not run: {operations.names}"
    return counter


def x_of(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, requires_grad=grad)


class Applied(nn.Module):
    """A function of itself and its input, with named members."""

    def __init__(self, function: Callable[..., Tensor], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("keys", [TOKENS, 7])
def test_multihead_attention(need_weights: bool, keys: int) -> None:
    """Its projections are functional calls: none is quantized, though out_proj looks like a layer."""
    model = low_bit(
        Applied(
            lambda self, x, m: self.head(self.mha(x, m, m, need_weights=need_weights)[0]),
            mha=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
            head=nn.Linear(WIDTH, 8),
        )
    )
    x = x_of(BATCH, TOKENS, WIDTH)
    memory = x if keys == TOKENS else x_of(BATCH, keys, WIDTH)
    counter = count(model, x, memory)
    # of the input no gradient is needed, of out_proj's input one
    projections = 2 * gemm(BATCH * TOKENS, WIDTH, WIDTH) + 4 * gemm(BATCH * keys, WIDTH, WIDTH)
    projections += 3 * gemm(BATCH * TOKENS, WIDTH, WIDTH)
    forward = attention(BATCH, TOKENS, keys, WIDTH)
    products = forward + (2 * forward if need_weights else fused_backward(forward))
    assert_counted(counter, {"head": layer(BATCH * TOKENS, WIDTH, 8)}, {"mha": projections + products})


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)


ENCODER_ATTENTION = 4 * gemm(BATCH * TOKENS, WIDTH, WIDTH) + attention(BATCH, TOKENS, TOKENS, WIDTH)


def test_encoder_layer_in_training() -> None:
    counter = count(low_bit(encoder_layer()), x_of(BATCH, TOKENS, WIDTH))
    projection, products = gemm(BATCH * TOKENS, WIDTH, WIDTH), attention(BATCH, TOKENS, TOKENS, WIDTH)
    assert_counted(
        counter,
        {"linear1": layer(BATCH * TOKENS, WIDTH, 32), "linear2": layer(BATCH * TOKENS, 32, WIDTH)},
        {"self_attn": (3 * 2 + 3) * projection + products + fused_backward(products)},
    )


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_in_evaluation(norm_first: bool) -> None:
    """Where its feed-forward layers are converted they run, and its attention is one fused operation."""
    model = low_bit(nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, norm_first=norm_first)).eval()
    with torch.no_grad():
        counter = count(model, x_of(BATCH, TOKENS, WIDTH), runs="_native_multi_head_attention")
    layers = {
        "linear1": layer(BATCH * TOKENS, WIDTH, 32, BACKWARD),
        "linear2": layer(BATCH * TOKENS, 32, WIDTH, BACKWARD),
    }
    assert_counted(counter, layers, {"self_attn": ENCODER_ATTENTION})


def test_a_skipped_encoder_layer_in_evaluation() -> None:
    """It is one fused operation, in which nothing is quantized."""
    model = low_bit(nn.Sequential(encoder_layer(), nn.Linear(WIDTH, 8)), skip=["0"]).eval()
    with torch.no_grad():
        counter = count(model, x_of(BATCH, TOKENS, WIDTH), runs="_transformer_encoder_layer_fwd")
    feed_forward = 2 * gemm(BATCH * TOKENS, WIDTH, 32)
    layers = {"1": layer(BATCH * TOKENS, WIDTH, 8, BACKWARD)}
    assert_counted(counter, layers, {"0": ENCODER_ATTENTION + feed_forward})


def padded_encoder(skip: Iterable[str] = ()) -> tuple[nn.Module, Tensor, Tensor]:
    """With padding, torch's fast path makes the input a nested tensor."""
    encoder = nn.TransformerEncoder(encoder_layer(), 2)
    model = Applied(
        lambda self, x, padding: self.head(self.encoder(x, src_key_padding_mask=padding)),
        encoder=encoder,
        head=nn.Linear(WIDTH, 8),
    )
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[1, 3:] = True
    return low_bit(model, skip=skip).eval(), x_of(BATCH, TOKENS, WIDTH), padding


def test_an_encoder_with_padding_in_evaluation() -> None:
    model, x, padding = padded_encoder()
    with torch.no_grad():
        counter = count(model, x, padding)
    shapes = {"linear1": (WIDTH, 32), "linear2": (32, WIDTH)}
    layers = {
        f"encoder.layers.{i}.{name}": layer(BATCH * TOKENS, *shape, BACKWARD)
        for i in range(2)
        for name, shape in shapes.items()
    }
    layers["head"] = layer(BATCH * TOKENS, WIDTH, 8, BACKWARD)
    assert_counted(counter, layers, {f"encoder.layers.{i}.self_attn": ENCODER_ATTENTION for i in range(2)})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_a_skipped_encoder_with_padding_in_evaluation() -> None:
    """A nested tensor has no shape to count by: it is said that there is more, and the run goes on."""
    model, x, padding = padded_encoder(skip=["encoder"])
    with torch.no_grad():
        counter = count(model, x, padding)
    assert dict(counter.gemms) == {("head", "fprop"): gemm(BATCH * TOKENS, 8, WIDTH)}
    assert dict(counter.others) or counter.coverage().uncounted == ("aten._transformer_encoder_layer_fwd",)


# --- functional calls and expert stacks -------------------------------------------------------------------------------


def test_einsum_and_functional_calls() -> None:
    """They belong to the module whose forward makes them, also where the weight is a converted layer's."""
    inner = Applied(lambda self, x: torch.einsum("bti,io->bto", x, self.w), w=nn.Parameter(torch.randn(WIDTH, 8)))
    model = low_bit(
        Applied(
            lambda self, x: F.linear(self.up(self.down(self.inner(x))), self.up.weight.t()),
            inner=inner,
            down=nn.Linear(8, 4),
            up=nn.Linear(4, 24),
        )
    )
    counter, rows = count(model, x_of(BATCH, TOKENS, WIDTH)), BATCH * TOKENS
    assert_counted(
        counter,
        {"down": layer(rows, 8, 4), "up": layer(rows, 4, 24)},
        {"inner": 2 * gemm(rows, 8, WIDTH), "": 3 * gemm(rows, 4, 24)},
    )


def expert_stack(function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> nn.Module:
    experts = Applied(lambda self, x: function(x, self.stack), stack=nn.Parameter(torch.randn(3, WIDTH, 8)))
    return low_bit(nn.Sequential(nn.Linear(4, WIDTH), experts, nn.Linear(8, 4)).to(dtype))


@pytest.mark.parametrize("product", [torch.bmm, lambda x, w: torch.einsum("eti,eio->eto", x, w)], ids=["bmm", "einsum"])
def test_an_expert_stack(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    counter, rows = count(expert_stack(product), x_of(3, TOKENS, 4)), 3 * TOKENS
    layers = {"0": layer(rows, 4, WIDTH, ["dgrad"]), "2": layer(rows, 8, 4)}
    assert_counted(counter, layers, {"1": 3 * 3 * gemm(TOKENS, 8, WIDTH)})


def test_a_grouped_product() -> None:
    """Each row meets one expert, however the rows are divided."""
    offsets = torch.tensor([1, 1, 8], dtype=torch.int32)
    model = expert_stack(lambda x, w: torch._grouped_mm(x, w, offs=offsets), torch.bfloat16)
    counter = count(model, x_of(8, 4).bfloat16())
    layers = {"0": layer(8, 4, WIDTH, ["dgrad"]), "2": layer(8, 8, 4)}
    assert_counted(counter, layers, {"1": 3 * gemm(8, 8, WIDTH)})


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: Callable[[], Any]) -> None:
    """In inference mode linear, matmul, einsum and conv1d arrive whole, not as the operations they are made of."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.plain(self.layer(x))
        scores = torch.einsum("bqc,bkc->bqk", y, y)
        return self.convolution((scores @ y).transpose(1, 2))

    members = {"layer": nn.Linear(WIDTH, 8), "plain": nn.Linear(8, 4), "convolution": nn.Conv1d(4, 6, 1)}
    model = low_bit(Applied(forward, **members), skip=["plain"]).eval()
    with context():
        counter, rows = count(model, x_of(BATCH, TOKENS, WIDTH)), BATCH * TOKENS
    others = {"plain": gemm(rows, 4, 8), "": attention(BATCH, TOKENS, TOKENS, 4), "convolution": gemm(rows, 6, 4)}
    assert_counted(counter, {"layer": layer(rows, WIDTH, 8, BACKWARD)}, others)


# --- models of others -------------------------------------------------------------------------------------------------


def test_gpt2() -> None:
    """Its layers are Conv1D; only attention itself is left."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=WIDTH, n_layer=2, n_head=HEADS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = low_bit(GPT2LMHeadModel(config)).train()
    counter, rows = count(model, torch.arange(BATCH * TOKENS).view(BATCH, TOKENS), use_cache=False), BATCH * TOKENS
    shapes = {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH)}
    shapes |= {"mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH)}
    layers = {f"transformer.h.{i}.{name}": layer(rows, *shape) for i in range(2) for name, shape in shapes.items()}
    layers["lm_head"] = layer(rows, WIDTH, 32)
    forward = attention(BATCH, TOKENS, TOKENS, WIDTH)
    assert_counted(counter, layers, {f"transformer.h.{i}.attn": forward + fused_backward(forward) for i in range(2)})


def encoder_sizes() -> dict[str, Any]:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 24}
    return sizes | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_bert_classifier(kernel: str) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=32, max_position_embeddings=8, attn_implementation=kernel, **encoder_sizes())
    model = low_bit(BertForSequenceClassification(config)).train()
    counter, rows = count(model, torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)), BATCH * TOKENS
    block = "bert.encoder.layer.0"
    layers = {f"{block}.attention.self.{name}": layer(rows, WIDTH, WIDTH) for name in ("query", "key", "value")}
    layers |= {
        f"{block}.attention.output.dense": layer(rows, WIDTH, WIDTH),
        f"{block}.intermediate.dense": layer(rows, WIDTH, 24),
        f"{block}.output.dense": layer(rows, 24, WIDTH),
        "bert.pooler.dense": layer(BATCH, WIDTH, WIDTH),
        "classifier": layer(BATCH, WIDTH, 3),
    }
    forward = attention(BATCH, TOKENS, TOKENS, WIDTH)
    products = forward + (fused_backward(forward) if kernel == "sdpa" else 2 * forward)
    assert_counted(counter, layers, {f"{block}.attention.self": products})


def test_a_vit_classifier() -> None:
    """The patches are a convolution, of whose input no gradient is needed."""
    from transformers import ViTConfig, ViTForImageClassification

    model = low_bit(ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **encoder_sizes()))).train()
    counter = count(model, x_of(BATCH, 3, 8, 8))
    patches, rows = BATCH * 4, BATCH * 5  # with the class token
    shapes = sorted((m.in_features, m.out_features) for m in model.modules() if isinstance(m, QuantizedLayer))
    assert shapes == [(WIDTH, 3)] + [(WIDTH, WIDTH)] * 4 + [(WIDTH, 24), (24, WIDTH)]
    layers = {
        name: layer(BATCH if name == "classifier" else rows, m.in_features, m.out_features)
        for name, m in model.named_modules()
        if isinstance(m, QuantizedLayer)
    }
    [convolution] = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    [block] = [name for name, m in model.named_modules() if type(m).__name__.endswith("Attention")]
    forward = attention(BATCH, 5, 5, WIDTH)
    others = {convolution: 2 * gemm(patches, WIDTH, 3 * 4 * 4), block: forward + fused_backward(forward)}
    assert_counted(counter, layers, others)


class UNet(nn.Module):
    """Down, attention in the middle, up; the time enters through an MLP."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 2 * width))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.middle = nn.ModuleDict({"qkv": nn.Linear(2 * width, 6 * width), "out": nn.Linear(2 * width, 2 * width)})
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 3, 1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        outer = self.stem(image)
        x = self.norm(self.down(outer) + self.time(time)[..., None, None])
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.middle["qkv"](tokens).chunk(3, dim=-1)
        tokens = tokens + self.middle["out"](torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v)
        x = tokens.transpose(1, 2).reshape(x.shape)
        return self.last(torch.cat([self.up(x), outer], dim=1))


def test_a_unet() -> None:
    counter = count(low_bit(UNet()), x_of(BATCH, 3, 6, 6), x_of(BATCH, 4))
    small, large, width = BATCH * 9, BATCH * 36, 8
    layers = {
        "time.0": layer(BATCH, 4, 16, ["dgrad"]),
        "time.2": layer(BATCH, 16, 16),
        "middle.qkv": layer(small, 16, 48),
        "middle.out": layer(small, 16, 16),
    }
    others = {
        "stem": 2 * gemm(large, width, 3 * 9),  # no gradient of the image
        "down": 3 * gemm(small, 2 * width, width * 9),
        "": 3 * attention(BATCH, 9, 9, 2 * width),
        "up": 3 * gemm(small, 2 * width, width * 4),  # each input pixel meets the whole filter
        "last": 3 * gemm(large, 3, 2 * width),
    }
    assert_counted(counter, layers, others)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_convolutions(groups: int, transposed: bool) -> None:
    """As in ConvNeXt and MobileNet: channels meet those of their group only, in the backward pass too."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = low_bit(nn.Sequential(kind(8, 8, 3, groups=groups), nn.Flatten(1, 2), nn.Linear(6 if transposed else 2, 4)))
    counter = count(model, x_of(BATCH, 8, 4, 4, grad=True))
    points, height = (16, 6) if transposed else (4, 2)
    forward = groups * gemm(BATCH * points, 8 // groups, 8 // groups * 9)
    assert_counted(counter, {"2": layer(BATCH * 8 * height, height, 4)}, {"0": 3 * forward})


@pytest.mark.parametrize("directions", [1, 2])
def test_lstm(directions: int) -> None:
    """One fused operation a layer; its backward pass computes the gradients of all its inputs."""
    lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True, bidirectional=directions == 2)
    head = nn.Linear(12 * directions, 6)
    model = low_bit(Applied(lambda self, x: self.head(self.lstm(x)[0]), lstm=lstm, head=head))
    counter, rows = count(model, x_of(BATCH, TOKENS, 8), runs="mkldnn_rnn_layer"), BATCH * TOKENS
    forward = directions * (gemm(rows, 4 * 12, 8 + 12) + gemm(rows, 4 * 12, 12 * directions + 12))
    assert_counted(counter, {"head": layer(rows, 12 * directions, 6)}, {"lstm": 3 * forward})


def test_gru() -> None:
    """Many small operations: the first needs no gradient of its input, nor any step one of the initial state."""
    model = low_bit(
        Applied(lambda self, x: self.head(self.gru(x)[0]), gru=nn.GRU(8, 12, batch_first=True), head=nn.Linear(12, 6))
    )
    counter, rows = count(model, x_of(BATCH, TOKENS, 8)), BATCH * TOKENS
    inputs, states = gemm(rows, 36, 8), gemm(rows, 36, 12)
    recurrent = 3 * states - gemm(BATCH, 36, 12)
    assert_counted(counter, {"head": layer(rows, 12, 6)}, {"gru": 2 * inputs + recurrent})


# --- which gradients are needed, and whose ----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["fqt", "bf16"])
@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("needs_w", [False, True])
def test_frozen_weights_and_inputs_without_gradient(needs_x: bool, needs_w: bool, phase: str) -> None:
    """Counted alike whatever the phase in force: the coverage of another one can be asked for."""
    model = low_bit(nn.Linear(WIDTH, 8))
    set_phase(model, phase)
    model.weight.requires_grad_(needs_w)
    x = x_of(TOKENS, WIDTH, grad=needs_x)
    with GemmCounter(nn.Sequential(model)) as counter:
        backward(model(x))
    without = [name for name, needed in (("dgrad", needs_x), ("wgrad", needs_w)) if not needed]
    set_phase(model, "fqt")
    assert_counted(counter, {"0": layer(TOKENS, WIDTH, 8, without)}, {})


def test_a_layer_called_twice() -> None:
    """The first call needs no gradient of its input, the second does."""
    counter = count(
        low_bit(Applied(lambda self, x: self.layer(self.layer(x)), layer=nn.Linear(WIDTH, WIDTH))),
        x_of(TOKENS, WIDTH),
    )
    flops = gemm(TOKENS, WIDTH, WIDTH)
    assert_counted(counter, {"layer": {"fprop": 2 * flops, "dgrad": flops, "wgrad": 2 * flops}}, {})


def test_an_input_given_by_name() -> None:
    """A converted layer may be called as nn.Linear may."""
    model = low_bit(Applied(lambda self, x: self.layer(input=x), layer=nn.Linear(WIDTH, 8)))
    with GemmCounter(model) as counter:
        backward(model(x_of(TOKENS, WIDTH, grad=True)))
    assert_counted(counter, {"layer": layer(TOKENS, WIDTH, 8)}, {})


def test_a_conv1d_input_given_by_name() -> None:
    from transformers.pytorch_utils import Conv1D

    model = low_bit(Applied(lambda self, x: self.layer(x=x), layer=Conv1D(8, WIDTH)))
    with GemmCounter(model) as counter:
        backward(model(x_of(TOKENS, WIDTH, grad=True)))
    assert_counted(counter, {"layer": layer(TOKENS, WIDTH, 8)}, {})


def tower(inputs: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 4))


def test_two_towers() -> None:
    """Without gradients of inputs, and one of them in high precision: each gets its own backward pass."""
    model = low_bit(Applied(lambda self, x: self.a(x) * self.b(x), a=tower(WIDTH, 8), b=tower(WIDTH, 32)), skip=["b"])
    counter = count(model, x_of(TOKENS, WIDTH))
    assert_counted(
        counter,
        {"a.0": layer(TOKENS, WIDTH, 8, ["dgrad"]), "a.2": layer(TOKENS, 8, 4)},
        {"b.0": 2 * gemm(TOKENS, 32, WIDTH), "b.2": 3 * gemm(TOKENS, 4, 32)},
    )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("skip", [[], ["teacher"], ["student"], ["student", "teacher"]])
def test_a_teacher_without_gradients_after_a_student(frozen: bool, skip: list[str]) -> None:
    """It leaves no autograd node behind, and takes no gradient of the student's."""

    def distance(self: Any, x: Tensor) -> Tensor:
        student = self.student(x)
        with torch.set_grad_enabled(frozen):
            teacher = self.teacher(x)
        return self.head(student - teacher)

    names = ("student", "teacher", "head")
    model = low_bit(Applied(distance, **{name: nn.Linear(4, 4) for name in names}), skip=skip)
    model.teacher.requires_grad_(not frozen)
    counter = count(model, x_of(TOKENS, 4))
    without = {"student": ["dgrad"], "teacher": BACKWARD, "head": []}
    expected = {name: layer(TOKENS, 4, 4, without[name]) for name in names}
    layers = {name: gemms for name, gemms in expected.items() if name not in skip}
    assert_counted(counter, layers, {name: sum(expected[name].values()) for name in skip})


def test_a_backward_pass_inside_a_forward() -> None:
    """As in manual optimization under DDP, whose forward runs the training step: nothing is computed twice."""
    model = low_bit(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4)), skip=["0"])

    def step(self: Any, x: Tensor) -> Tensor:
        loss = self.model(x).square().sum()
        loss.backward()
        return loss.detach()

    with GemmCounter(model) as counter:
        Applied(step, model=model)(x_of(TOKENS, WIDTH))
    assert_counted(counter, {"2": layer(TOKENS, 8, 4)}, {"0": 2 * gemm(TOKENS, 8, WIDTH)})


def test_gradients_of_gradients() -> None:
    """A penalty on the gradient: backward operations with a graph of their own are no recomputation."""
    model = nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    x = x_of(TOKENS, WIDTH, grad=True)
    with GemmCounter(model) as counter:
        [gradient] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert counter.recomputed == 0
    assert dict(counter.others) == {"0": 2 * gemm(TOKENS, 8, WIDTH), "2": 2 * gemm(TOKENS, 1, 8)}
    assert gradient.shape == x.shape


# --- recomputed activations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(reentrant: bool) -> None:
    """They count once more as forward GEMMs, and are told apart from what the model needs."""
    block = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    model = low_bit(
        Applied(
            lambda self, x: self.head(checkpoint(self.block, x, use_reentrant=reentrant)),
            block=block,
            head=nn.Linear(WIDTH, 4),
        )
    )
    counter = count(model, x_of(TOKENS, WIDTH, grad=True))
    flops = gemm(TOKENS, 32, WIDTH)
    twice = {"fprop": 2 * flops, "dgrad": flops, "wgrad": flops}
    layers = {"block.0": twice, "block.2": twice, "head": layer(TOKENS, WIDTH, 4)}
    assert_counted(counter, layers, {}, recomputed=2 * flops)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_of_a_function(reentrant: bool) -> None:
    """A raw product in a checkpointed function, before a converted layer: it is recomputed, and is not low-bit."""

    def block(self: Any, x: Tensor) -> Tensor:
        return self.layer(torch.relu(x @ self.w))

    model = low_bit(
        Applied(
            lambda self, x: checkpoint(block, self, x, use_reentrant=reentrant),
            w=nn.Parameter(torch.randn(WIDTH, 32)),
            layer=nn.Linear(32, WIDTH),
        )
    )
    counter, flops = count(model, x_of(TOKENS, WIDTH, grad=True)), gemm(TOKENS, 32, WIDTH)
    assert counter.coverage().flops == 8 * flops
    assert counter.recomputed == 2 * flops
    assert counter.model_flops == 6 * flops
    assert dict(counter.gemms) == {
        ("layer", "fprop"): 2 * flops,
        ("layer", "dgrad"): flops,
        ("layer", "wgrad"): flops,
    }
    assert sum(counter.others.values()) == 4 * flops


# --- compilation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["module", "in place"])
def test_compiled(whole: bool) -> None:
    """A compiled module counts as it does otherwise, and says nothing about hooks."""
    x = x_of(TOKENS, WIDTH)
    model = low_bit(nn.Sequential(tower(WIDTH, 8), nn.Tanh(), nn.Linear(4, 2)), skip=["2"])
    eager = count(model, x)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    if whole:
        compiled = torch.compile(model, backend=backend)
    else:
        compiled = model
        compiled.compile(backend=backend)
    with warnings.catch_warnings(record=True) as caught, GemmCounter(compiled) as counter:
        backward(compiled(x))
    assert not caught, [str(warning.message) for warning in caught]
    assert counter.gemms == eager.gemms
    assert counter.others == eager.others
    assert not graphs, "which module computes is not known in compiled code"
    backward(compiled(x))
    assert graphs, "the model was left as eager code for good"


def test_a_compiled_function_that_calls_modules() -> None:
    """It counts as it does otherwise."""
    x = x_of(TOKENS, WIDTH)
    model = low_bit(tower(WIDTH, 8))
    with GemmCounter(model) as counter:
        backward(torch.compile(lambda x: model(x), backend="eager")(x))
    assert counter.gemms == count(model, x).gemms


@pytest.mark.slow
def test_casts_are_compiled_after_the_count() -> None:
    """What torch.compile once ran as eager code stays eager code; the casts of a run must not be among it."""
    x = x_of(TOKENS, WIDTH)
    model = low_bit(tower(WIDTH, 8))
    torch._dynamo.reset()
    counters.clear()
    with compilation.backend("compiled"):
        with GemmCounter(model):
            backward(model(x))
        assert not counters["frames"]
        backward(model(x))
    assert counters["frames"]["ok"] > 0 and counters["frames"]["ok"] == counters["frames"]["total"]


# --- phases and casts -------------------------------------------------------------------------------------------------

FLOPS = gemm(TOKENS, WIDTH, WIDTH)


def three_layers(casts: Any = NVFP4, **kwargs: Any) -> GemmCounter:
    """Three layers with the same FLOPs in each of nine GEMMs, "c" skipped; ``kwargs`` override "b"."""
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in "abc"}
    model = low_bit(Applied(lambda self, x: self.c(self.b(self.a(x))), **layers), casts, skip=["c"], **kwargs)
    with GemmCounter(model) as counter:
        backward(model(x_of(TOKENS, WIDTH, grad=True)))
    return counter


C = {"c": 3 * FLOPS}
AB = ("a", "b")


@pytest.mark.parametrize(
    ("phase", "low", "uncovered"),
    [
        (None, 6, C),
        ("fqt", 6, C),
        ("qaf", 2, C | {f"{name} ({g})": FLOPS for name in AB for g in BACKWARD}),
        ("hp-forward", 4, C | {f"{name} (fprop)": FLOPS for name in AB}),
        ("bf16", 0, C | dict.fromkeys(AB, 3 * FLOPS)),
    ],
)
@pytest.mark.parametrize("hp_bits", [16, 32])
def test_phases(phase: str | None, low: int, uncovered: dict[str, int], hp_bits: int) -> None:
    coverage = three_layers().coverage(phase, hp_bits)
    assert coverage.flops == 9 * FLOPS
    assert coverage.low_bit == low * FLOPS
    assert coverage.share == pytest.approx(low / 9)
    assert coverage.average_bits == pytest.approx((low * BITS + (9 - low) * hp_bits) / 9)
    assert coverage.uncovered == uncovered


def test_the_phase_in_force() -> None:
    counter = three_layers()
    for name, module in counter._layers.items():
        set_phase(module, "bf16" if name == "a" else "qaf")
    coverage = counter.coverage()
    assert coverage.low_bit == FLOPS
    assert coverage.uncovered == C | {"a": 3 * FLOPS, "b (dgrad)": FLOPS, "b (wgrad)": FLOPS}
    assert counter.coverage("fqt") == three_layers().coverage(), "the phase asked for, not the one in force"


def test_an_unknown_phase() -> None:
    with pytest.raises(ValueError, match="Unknown phase 'qat'"):
        three_layers().coverage("qat")


def test_casts_of_the_forward_pass() -> None:
    """Quantization-aware training: dW meets the quantized x, but the gradient is in high precision."""
    casts = LinearCasts(
        fprop_x=Cast("int8", Scale(block=32)),
        fprop_w=Cast("int4", Scale(block=16)),
        dgrad_g=Cast("int8", Scale(block=32)),
        dgrad_w="fprop",
        wgrad_x="fprop",
    )
    counter = three_layers(casts)
    x_bits, w_bits = 8.25, 4.5
    coverage = counter.coverage()
    assert coverage.low_bit == 4 * FLOPS, "fprop and dgrad of two layers"
    assert coverage.uncovered == C | {f"{name} (wgrad)": FLOPS for name in AB}
    per_layer = (x_bits + w_bits) / 2 + (x_bits + w_bits) / 2 + (16 + x_bits) / 2
    assert coverage.average_bits == pytest.approx((2 * per_layer + 3 * 16) / 9)
    hp_forward = counter.coverage("hp-forward")
    assert hp_forward.low_bit == 0, "what the forward pass used is in high precision there"
    assert hp_forward.average_bits == pytest.approx((2 * (16 + (x_bits + 16) / 2 + 16) + 3 * 16) / 9)


def test_an_override_in_high_precision() -> None:
    coverage = three_layers(overrides={"b": "bf16"}).coverage()
    assert coverage.low_bit == 3 * FLOPS
    assert coverage.uncovered == C | {"b": 3 * FLOPS}


def test_one_gemm_in_high_precision() -> None:
    """One operand suffices: the GEMM is then not low-bit, and its bits are those of both."""
    coverage = three_layers(overrides={"b": NVFP4.replace(dgrad_g=None)}).coverage()
    assert coverage.low_bit == 5 * FLOPS
    assert coverage.uncovered == C | {"b (dgrad)": FLOPS}
    assert coverage.average_bits == pytest.approx((5 * BITS + (BITS + 16) / 2 + 3 * 16) / 9)


@pytest.mark.parametrize(
    ("cast", "bits"),
    [
        (NVFP4.fprop_x, 4.5),
        (NVFP4.wgrad_g, 4.5),
        (Cast("e2m1", Scale("e4m3", 32)), 4.25),
        (Cast("e2m1", Scale("e4m3", (16, 16))), 4.03125),
        (Cast("e2m1", Scale("e4m3", (1, 128))), 4.0625),
        (Cast("e2m3", Scale("e5m2", 16)), 6.5),
        (Cast("e4m3", Scale("e4m3", 128)), 8.0625),
        (Cast("int2", Scale("e4m3", 16)), 2.5),
    ],
)
def test_bits_of_a_cast(cast: Cast, bits: float) -> None:
    """The scale of a block is shared by its elements; that of the tensor weighs nothing."""
    assert cast.bits == bits


# --- what has no formula ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda: torch.addbmm(torch.zeros(2, 4), torch.randn(3, 2, 5), torch.randn(3, 5, 4)), "aten.addbmm"),
        (lambda: torch.sparse.mm(torch.eye(3).to_sparse(), torch.randn(3, 4)), "aten._sparse_addmm"),
        (lambda: F.bilinear(torch.randn(2, 3), torch.randn(2, 4), torch.randn(5, 3, 4)), "aten._trilinear"),
    ],
)
def test_an_operation_without_a_formula(operation: Callable[[], Tensor], name: str) -> None:
    with GemmCounter(nn.Identity()) as counter:
        operation()
    assert counter.coverage().uncounted == (name,)
    assert counter.coverage().flops == 0


def test_a_custom_operation_without_a_formula() -> None:
    """Somebody's kernel: its name tells, and once."""

    @torch.library.custom_op("coverage_test::fused_mlp_mm", mutates_args=())
    def fused(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    with GemmCounter(nn.Identity()) as counter:
        fused(torch.randn(2, 3), torch.randn(3, 4))
        fused(torch.randn(2, 3), torch.randn(3, 4))
    assert counter.coverage().uncounted == ("coverage_test.fused_mlp_mm",)


def test_what_is_no_matrix_product_is_not_taken_for_one() -> None:
    with GemmCounter(nn.Identity()) as counter:
        x = torch.randn(4, 4)
        x.to(torch.bfloat16).float().sum().add(1)
        F.layer_norm(F.gelu(x), (4,)).softmax(-1).cumsum(0).argmax(-1)
        F.interpolate(x[None, None], scale_factor=2, mode="nearest")
        F.interpolate(x[None, None], scale_factor=2, mode="bilinear")  # aten.upsample_bilinear2d
        F.embedding(torch.tensor([1]), x).logsumexp(-1).lerp(x[0, 0], 0.5).norm()
        torch.where(x > 0, x, -x).triu().sort()
    assert counter.coverage().uncounted == ()
    assert counter.coverage().flops == 0
    assert counter.coverage().share == 0
    assert counter.coverage().average_bits == 16


@pytest.mark.parametrize(
    ("operation", "flops"),
    [
        (lambda: torch.mv(torch.randn(3, 5), torch.randn(5)), 2 * 3 * 5),
        (lambda: torch.addmv(torch.randn(3), torch.randn(3, 5), torch.randn(5)), 2 * 3 * 5),
        (lambda: torch.baddbmm(torch.randn(2, 3, 4), torch.randn(2, 3, 5), torch.randn(2, 5, 4)), 2 * gemm(3, 4, 5)),
        (lambda: torch._int_mm(*(torch.ones(8, 8, dtype=torch.int8),) * 2), gemm(8, 8, 8)),
        (lambda: torch.tensordot(torch.randn(2, 3, 4), torch.randn(3, 4, 5), 2), gemm(2, 5, 12)),
    ],
)
def test_operations_outside_any_module(operation: Callable[[], Tensor], flops: int) -> None:
    with GemmCounter(nn.Identity()) as counter:
        operation()
    assert counter.coverage().uncovered == {"": flops}
    assert counter.coverage().uncounted == ()


def test_a_module_that_is_not_part_of_the_model() -> None:
    """A loss or a metric counts as the module that calls it."""
    stranger = nn.Linear(4, 8)
    head = Applied(lambda self, x: self.function_of[0](x), function_of=(stranger,))
    model = low_bit(Applied(lambda self, x: self.head(self.layer(x)), layer=nn.Linear(WIDTH, 4), head=head))
    counter = count(model, x_of(TOKENS, WIDTH))
    assert_counted(counter, {"layer": layer(TOKENS, WIDTH, 4, ["dgrad"])}, {"head": 3 * gemm(TOKENS, 8, 4)})


# --- casts that multiply matrices themselves --------------------------------------------------------------------------

HADAMARD = {"fprop": 16, "dgrad": Hadamard(16, "keyed"), "wgrad": Hadamard(32, "keyed")}
MEANS = ("fprop", "dgrad", "wgrad")


@pytest.mark.parametrize(
    "changes",
    [
        {"hadamard": HADAMARD},
        {"subtract_mean": MEANS},
        {"hadamard": HADAMARD, "subtract_mean": MEANS},
        {"surrogate": {"fprop_x": "dge", "fprop_w": "trust"}, "hadamard": HADAMARD},
        {"subtract_mean": MEANS, "dgrad_w": "fprop"},
    ],
    ids=str,
)
def test_rotations_and_means(changes: dict[str, Any]) -> None:
    """They are part of the casts: GEMMs, coverage and what the model needs are what they would be without."""
    model = low_bit(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32)), NVFP4.replace(**changes))
    counter = count(model, x_of(32, 64, grad=True))
    assert_counted(counter, {"0": layer(32, 64, 48), "2": layer(32, 48, 32)}, {})


def test_casts_of_rows_and_tensors_are_covered() -> None:
    """Their scales count as no bits: there is one for a whole row."""
    rows, tensor = Cast("int8", Scale("fp32", "row")), Cast("e4m3", Scale("fp32", "tensor"))
    model = low_bit(nn.Sequential(nn.Linear(64, 48)), LinearCasts(rows, tensor, rows, "fprop", rows, None))
    counter = count(model, x_of(32, 64, grad=True))
    flops = gemm(32, 64, 48)
    coverage = counter.coverage()
    assert coverage.low_bit == 2 * flops
    assert coverage.uncovered == {"0 (wgrad)": flops}
    assert coverage.average_bits == pytest.approx((8 + 8 + (8 + HP_BITS) / 2) / 3)


def test_a_phase_without_rotations() -> None:
    """Coverage of another phase follows from the counts, whatever was rotated when they were made."""
    model = low_bit(nn.Sequential(nn.Linear(64, 48)), NVFP4.replace(hadamard=HADAMARD, subtract_mean=MEANS))
    counter = count(model, x_of(32, 64, grad=True))
    assert counter.coverage().uncounted == ()
    assert counter.coverage("fqt").average_bits == pytest.approx(BITS)
    assert counter.coverage("bf16").share == 0
    assert counter.coverage("bf16").average_bits == HP_BITS
    assert 0 < counter.coverage("qaf").share < counter.coverage("fqt").share == 1
    assert counter.coverage("qaf").uncovered.keys() == {"0 (dgrad)", "0 (wgrad)"}


# --- the counter itself -----------------------------------------------------------------------------------------------


def traces(model: nn.Module) -> tuple[Any, ...]:
    """Everything by which a counter could stay behind."""
    own = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    everywhere = [len(getattr(module_globals, name)) for name in vars(module_globals) if name.endswith("_hooks")]
    return own, everywhere, list(_get_current_dispatch_mode_stack()), list(warnings.filters)


def test_leaves_nothing_behind() -> None:
    model = low_bit(tower(WIDTH, 8))
    before = traces(model)
    count(model, x_of(TOKENS, WIDTH))
    assert traces(model) == before


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_leaves_nothing_behind_after_an_exception(where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if where == "forward":
                raise RuntimeError("broken forward")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise RuntimeError("broken backward")

    model = low_bit(nn.Sequential(nn.Linear(WIDTH, 8), Applied(lambda self, x: Fails.apply(x)), nn.Linear(8, 4)))
    before = traces(model)
    with pytest.raises(RuntimeError, match=f"broken {where}"), GemmCounter(model):
        backward(model(x_of(TOKENS, WIDTH)))
    assert traces(model) == before
    model[1] = nn.Identity()
    assert_counted(
        count(model, x_of(TOKENS, WIDTH)),
        {"0": layer(TOKENS, WIDTH, 8, ["dgrad"]), "2": layer(TOKENS, 8, 4)},
        {},
    )


def test_an_exception_that_the_model_catches() -> None:
    """A module that failed is not the one that runs."""

    def forward(self: Any, x: Tensor) -> Tensor:
        try:
            return self.fails(x)
        except RuntimeError:
            return x @ self.w

    def fail(self: Any, x: Tensor) -> Tensor:
        raise RuntimeError("broken")

    model = Applied(forward, fails=Applied(fail), w=nn.Parameter(torch.randn(WIDTH, 4)))
    with GemmCounter(model) as counter:
        backward(model(x_of(TOKENS, WIDTH)))
    assert dict(counter.others) == {"": 2 * gemm(TOKENS, 4, WIDTH)}


@pytest.mark.parametrize("changes", [{}, {"hadamard": HADAMARD, "subtract_mean": MEANS}], ids=["", "transforms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_no_result(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """Outputs and gradients are the same to the bit: random rounding, dropout and activations with kernels of their own
    (of which torch's own counter makes many operations, with a rounding each) included."""

    casts = NVFP4.replace(**changes)

    def run(counting: bool) -> list[Tensor]:
        torch.manual_seed(0)
        encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.1, batch_first=True)
        activations = (nn.SiLU(), nn.GELU("tanh"), nn.Mish(), nn.Hardswish(), nn.LayerNorm(WIDTH), nn.Softplus())
        model = low_bit(nn.Sequential(encoder, *activations, nn.LogSoftmax(-1), nn.Linear(WIDTH, 4)).to(dtype), casts)
        x = torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
        with GemmCounter(model) if counting else nullcontext():
            output = model(x)
            backward(output)
        assert x.grad is not None
        return [output.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected)


def test_agrees_with_torchs_own_counter() -> None:
    """Where that has a formula for all operations, and the right one."""
    model, inputs = low_bit(UNet()), (x_of(BATCH, 3, 6, 6), x_of(BATCH, 4))
    with FlopCounterMode(display=False) as expected:
        backward(model(*inputs))
    assert count(model, *inputs).coverage().flops == expected.get_total_flops()
