"""Attention's two products: torch's results without casts, those of whole matrices with them, in any tiles."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from lightning_lowbit import LinearCasts
from lightning_lowbit.nn import OPERANDS
from lightning_lowbit.nn.attention import products as calls
from lightning_lowbit.nn.attention.function import Attention, QuantizedAttention
from lightning_lowbit.nn.attention.products import ActivationProduct, attend
from tests.references.attention import Reference

HEADS = 3


def products(casts, seed=7):
    made = {name: ActivationProduct(torch.nn.Module()) for name in ("qk", "pv")}
    for product, keys in zip(made.values(), keys_of(seed), strict=True):
        product.set_casts(LinearCasts.of(casts))
        product.lowbit.keys = keys
    return made


def keys_of(seed):
    return torch.randint(-(2**62), 2**62, (2, len(OPERANDS)), generator=torch.Generator().manual_seed(seed))


def in_tiles(tile):
    """:func:`attend` with this many queries in a tile."""

    def call(made, q, k, v, mask=None, **given):
        how = Attention(
            *(made[name].product_pass(q.dtype, q.device) for name in ("qk", "pv")),
            q.shape[-1] ** -0.5,
            given.get("is_causal", False),
            tile,
        )
        return QuantizedAttention.apply(q, k, v, mask, how)[0]

    return call


def drawn(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def qkv():
    return drawn(*[(HEADS, 20, 16)] * 3)


def run(call, inputs, g=None):
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = call(*leaves)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) if g is None else g)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


CASES = {
    "square": {"queries": 40, "keys": 40},
    "causal": {"queries": 40, "keys": 40, "is_causal": True},
    "causal, more keys": {"queries": 24, "keys": 40, "is_causal": True},
    "causal, fewer keys": {"queries": 40, "keys": 24, "is_causal": True},
    "bool mask": {"queries": 33, "keys": 20, "mask": "bool"},
    "additive mask": {"queries": 33, "keys": 20, "mask": "float"},
    "mask of keys": {"queries": 33, "keys": 20, "mask": "keys"},
    "one query": {"queries": 1, "keys": 21},
    "one key": {"queries": 5, "keys": 1},
    "scale": {"queries": 5, "keys": 7, "scale": 0.3},
    "grouped": {"queries": 17, "keys": 17, "enable_gqa": True, "of_kv": 1},
}


def inputs_of(case, dtype):
    given = dict(case)
    queries, keys, mask = given.pop("queries"), given.pop("keys"), given.pop("mask", None)
    of_kv = given.pop("of_kv", HEADS)
    inputs = drawn((2, HEADS, queries, 20), (2, of_kv, keys, 20), (2, of_kv, keys, 12), dtype=dtype)
    if mask == "float":
        inputs += drawn((HEADS, queries, keys), dtype=dtype, seed=1)
    elif mask is not None:
        given["attn_mask"] = drawn((2, 1, queries if mask == "bool" else 1, keys), seed=1)[0] > -0.5
        if mask == "bool":
            given["attn_mask"][0, 0, 3] = False  # a query that sees nothing
    return inputs, given


def quantizing(made):
    """Products that compute themselves, though they have no casts."""
    for product in made.values():
        object.__setattr__(product.lowbit.casts.traits, "is_empty", False)
    return made


def test_without_casts_it_is_torchs_attention_up_to_rounding():
    """In float64, sums of up to 40 terms in another order; float32 likewise, with 2^29 times its rounding."""
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 2e-6)):
        for name, case in CASES.items():
            inputs, given = inputs_of(case, dtype)
            wanted = run(lambda *x, given=given: F.scaled_dot_product_attention(*x, **given), inputs)
            for tile in (16, 64):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(calls, "_queries_in_tile", lambda *_, tile=tile: tile)
                    got = run(lambda *x, given=given: attend(quantizing(products("bf16")), *x, **given), inputs)
                for a, b in zip(got, wanted, strict=True):
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


CASTS = ("nvfp4", "mxfp8", "fp8-current", "fp8-row", "fp8-blockwise", "nvfp4-nvidia", "nvfp4-row", "mxfp4", "ufp4")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("casts", [*CASTS, "int4", "ternary"])
@pytest.mark.fast("nvfp4-True", "fp8-row-False", "nvfp4-nvidia-True", "int4-True")
def test_with_casts_it_is_what_whole_matrices_give(casts, is_causal):
    """Equal but for the order of sums, where these are not exact. The data keep results of casts off ties."""
    queries, keys = 40, 40
    for dtype in (torch.float32, torch.bfloat16):
        shapes = (HEADS, queries, 32), (HEADS, keys, 32), (HEADS, keys, 16), (HEADS, queries, 16)
        q, k, v, g = drawn(*shapes, dtype=dtype)
        seen = torch.ones(queries, keys, dtype=torch.bool)
        wanted = Reference(LinearCasts.preset(casts), keys_of(7))(
            q, k, v, g, seen.tril() if is_causal else seen, 1 / math.sqrt(32)
        )
        got = run(lambda *x: attend(products(casts), *x, is_causal=is_causal), [q, k, v], g)
        for name, a, b in zip(("o", "dq", "dk", "dv"), got, wanted, strict=True):
            last_bit = 1e-5 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(a, b, rtol=last_bit, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("casts", ["nvfp4", "mxfp4"])  # whose sums of scores are exact in float32
@pytest.mark.fast("nvfp4")
def test_tiles_change_no_bits_but_the_order_of_sums_over_queries(casts):
    for is_causal, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
        inputs = drawn((2, HEADS, 300, 20), (2, HEADS, 300, 20), (2, HEADS, 300, 20), dtype=dtype)
        whole, cut = (
            run(lambda *x, t=tile, c=is_causal: in_tiles(t)(products(casts), *x, is_causal=c), inputs)
            for tile in (512, 128)
        )
        assert torch.equal(whole[0], cut[0])
        assert torch.equal(whole[1], cut[1])
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # one rounding of the last bit
        for a, b in zip(whole[2:], cut[2:], strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_tiles_hold_whole_blocks_and_scales():
    def tile(casts, size):
        return calls._queries_in_tile(LinearCasts.of(casts), LinearCasts.of(casts), 4096, size)

    assert tile("nvfp4", 2**20) == 16
    assert tile("fp8-blockwise", 2**20) == 128
    assert tile("nvfp4", 2**16) == 256
    assert tile("mxfp4", 2**30) == 32
    for casts in ("fp8-row", "nvfp4-row", "nvfp4-nvidia"):
        assert tile(casts, 2**30) == 4096, "a scale or a rotation reaches over all queries"


def test_random_bits_are_those_of_the_keys():
    inputs = qkv()
    one, same, other = (run(lambda *x, s=s: attend(products("nvfp4", s), *x), inputs) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert torch.equal(one[0], other[0]), "the forward pass rounds to nearest"
    assert not any(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))


def test_each_operand_has_its_cast():
    """Each of the twelve changes what its GEMM gives, and what follows from that, and nothing else."""
    inputs = qkv()
    results = ("o", "dq", "dk", "dv")
    changed = {
        "qk": {"fprop": set(results), "dgrad": {"dq"}, "wgrad": {"dk"}},
        "pv": {"fprop": {"o"}, "dgrad": {"dq", "dk"}, "wgrad": {"dv"}},
    }
    cast = LinearCasts.preset("nvfp4").fprop_x
    plain = run(lambda *x: in_tiles(64)(products("bf16"), *x), inputs)
    for product, operand in itertools.product(changed, OPERANDS):
        made = products("bf16")
        made[product].set_casts(LinearCasts(**{operand: cast}))
        got = run(lambda *x, made=made: attend(made, *x), inputs)
        differing = {name for name, a, b in zip(results, got, plain, strict=True) if not torch.equal(a, b)}
        assert differing == changed[product][operand.partition("_")[0]], (product, operand)


def test_annealing_blends_operands():
    inputs = qkv()

    def at(share):
        made = products("mxfp8")
        for product in made.values():
            product.lowbit.blend = None if share is None else torch.tensor(share)
        return run(lambda *x: attend(made, *x), inputs)

    plain = run(lambda *x: in_tiles(64)(products("bf16"), *x), inputs)
    assert all(torch.equal(a, b) for a, b in zip(at(0.0), plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(at(1.0), at(None), strict=True))
    assert not torch.equal(at(0.5)[0], at(1.0)[0])


def test_autocast_gives_its_dtype():
    inputs = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        y = attend(products("nvfp4"), *inputs)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, attend(products("nvfp4"), *(x.bfloat16() for x in inputs)))


def test_refusals():
    q, k, v = qkv()
    refused = {
        "dropout_p": {"dropout_p": 1.5},
        "is bool .* got torch.int64": {"attn_mask": torch.ones(20, 20, dtype=torch.int64)},
        "not both": {"attn_mask": torch.ones(20, 20, dtype=torch.bool), "is_causal": True},
    }
    for message, given in refused.items():
        with pytest.raises(ValueError, match=message):
            attend(products("nvfp4"), q, k, v, **given)
    with pytest.raises(ValueError, match="one dtype"):
        attend(products("nvfp4"), q.bfloat16(), k, v)


def test_rotated_operands_are_scaled_by_their_own_amax():
    """A column of P may be all ones, and its rotation four times as large: one scale for an amax of 1 would clip it."""
    q, v, g = torch.zeros(1, 16, 16), torch.randn(1, 1, 16), torch.ones(1, 16, 16)
    k = torch.zeros(1, 1, 16)  # one key, which all queries see
    got = run(lambda *x: attend(products("nvfp4-nvidia"), *x), [q, k, v], g)
    torch.testing.assert_close(got[3], torch.full((1, 1, 16), 16.0), rtol=0.02, atol=0)


def test_dropout_drops_its_share_of_p_alike_in_both_passes_and_all_tiles():
    inputs = drawn((2, HEADS, 40, 20), (2, HEADS, 40, 20), (2, HEADS, 40, 12), dtype=torch.float64)
    key = torch.tensor(0x1234567890ABCDEF)

    def call(*x, tile=64):
        made = products("bf16")
        passes = [made[name].product_pass(torch.float64, x[0].device) for name in ("qk", "pv")]
        return QuantizedAttention.apply(*x, None, Attention(*passes, 0.2, True, tile, 0.25, key))[0]

    ones = torch.ones(6, 40, 40, dtype=torch.float64)
    both = [products("bf16")["qk"].product_pass(torch.float64, ones.device)] * 2
    kept = Attention(*both, 0.2, True, 64, 0.25, key).dropped(ones, 0)
    assert set(kept.unique().tolist()) == {0.0, 1 / 0.75}
    assert (kept == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)  # of 9600

    def wanted(q, k, v):
        scores = (q @ k.mT * 0.2).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
        return (scores.softmax(-1) * kept.view(2, HEADS, 40, 40)) @ v

    for tile in (64, 16):
        for a, b in zip(run(lambda *x, t=tile: call(*x, tile=t), inputs), run(wanted, inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def test_dropout_follows_the_generator_and_the_scale_of_p_leaves_it_room():
    inputs = qkv()

    def at(seed, casts="nvfp4"):
        torch.manual_seed(seed)
        return attend(products(casts), *inputs, dropout_p=0.5)

    assert torch.equal(at(1), at(1))
    assert not torch.equal(at(1), at(2))
    assert not torch.equal(at(1), attend(products("nvfp4"), *inputs))
    one_key = [inputs[0], inputs[1][:, :1], torch.ones(HEADS, 1, 16)]
    y = attend(products("fp8-current"), *one_key, dropout_p=0.5)
    assert y.unique().tolist() == pytest.approx([0.0, 2.0], rel=1e-6)


def test_an_operand_without_a_cast_is_the_tensor_itself():
    """A copy in another layout would change the order of sums."""
    product = products({"preset": "int4", "fprop_w": None})["pv"].product_pass(torch.float32, torch.device("cpu"))
    (v,) = drawn((1, 9, 12))
    assert product.weight_operand("fprop_w", v.mT).values.data_ptr() == v.data_ptr()
