"""GGUF without its packages: bytes of blocks, what is refused, names and tokens."""

import math

import pytest
import torch
from transformers import AutoConfig

from lightning_lowbit.export.formats.gguf.blocks import TQ1_0, TQ2_0, BlockType, block_type, has_scale, pack
from lightning_lowbit.export.formats.gguf.networks import NETWORKS, network_of
from lightning_lowbit.export.formats.gguf.vocabulary import vocabulary
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.quant import Cast, Scale, quantize
from tests.export.llama_cpp.gguf_blocks import READERS

E2M1 = Cast("e2m1", Scale("e4m3", 16, two_level=True))
TERNARY = Cast("ternary", Scale("fp32", "tensor", statistic="absmean"))
INT4 = Cast("int4", Scale("fp16", 64))
# Cast, elements of a row, the type of its blocks, and that of ternary blocks to choose.
HELD = [
    (E2M1, 128, "NVFP4", TQ2_0),
    (E2M1.replace(scale={"block": (16, 16)}), 64, "NVFP4", TQ2_0),
    (E2M1.replace(scale={"block": 32}), 192, "NVFP4", TQ2_0),
    (E2M1.replace(scale={"four_over_six": "mse"}), 64, "NVFP4", TQ2_0),
    (E2M1.replace(scale={"two_level": False}), 64, "NVFP4", TQ2_0),
    (Cast("e2m1", Scale("e8m0", 32)), 96, "MXFP4", TQ2_0),
    (Cast("e2m1", Scale("e8m0", 32, "floor", prescale=0.75)), 96, "MXFP4", TQ2_0),
    (TERNARY, 512, "TQ2_0", TQ2_0),
    (TERNARY, 512, "TQ1_0", TQ1_0),
    (TERNARY, 704, "Q4_0", TQ2_0),
    (INT4, 128, "Q4_0", TQ2_0),
    (INT4.replace(scale={"block": (8, 32)}), 128, "Q4_0", TQ2_0),
    (Cast("int8", Scale("fp32", "row", "power_of_two")), 96, "Q8_0", TQ2_0),
    (Cast("int8", Scale("fp32", "tensor")), 96, "Q8_0", TQ2_0),
    (Cast("int8", Scale("bf16", 128)), 96, "Q8_0", TQ2_0),  # incomplete groups
]


def weight(inner, rows=20):
    generator = torch.Generator().manual_seed(inner)
    scales = torch.logspace(-2, 0, rows)[:, None]
    return torch.randn(rows, inner, generator=generator) * scales


def test_blocks_hold_codes_and_scales():
    for cast, inner, name, ternary in HELD:
        q = quantize(weight(inner), cast)
        kind = block_type(cast, inner, ternary)
        assert isinstance(kind, BlockType) and kind.name == name, (cast, kind)
        blocks = pack(q, kind)
        assert blocks.error == 0 and (blocks.scale is not None) == has_scale(cast), cast
        rows = blocks.data.unflatten(1, (-1, kind.bytes)).tolist()
        read = [[READERS[name](bytes(block), i) for block in row for i in range(kind.elements)] for row in rows]
        elements = torch.tensor([[element for element, _ in row] for row in read])
        scales = torch.tensor([[scale for _, scale in row] for row in read])
        assert torch.equal(elements, q.elements()), cast
        overall = 1.0 if blocks.scale is None else blocks.scale
        assert torch.equal(elements * (scales * overall), q.dequantize()), cast


def test_the_error_of_scales_that_float16_does_not_hold():
    cast = Cast("int4", Scale("fp32", 64))
    q = quantize(weight(128), cast)
    rounded = q.scales.half().float().repeat_interleave(64, 1) * q.elements()
    error = pack(q, block_type(cast, 128)).error
    assert 0 < error == pytest.approx(float((rounded - q.dequantize()).abs().max()), rel=1e-3)
    with pytest.raises(ValueError, match="NaN or infinite"):
        pack(quantize(torch.full((4, 64), math.inf), E2M1), block_type(E2M1, 64))


def test_what_no_block_type_holds():
    for cast, inner, why in [
        (E2M1, 96, "in_features, 96, are no multiple of 64, the block of NVFP4"),
        (Cast("e2m1", Scale("e8m0", 32)), 80, "no multiple of 32, the block of MXFP4"),
        (TERNARY, 100, "no multiple of 32, the block of Q4_0"),
        (E2M1.replace(scale={"two_level": "row"}), 64, "differs from row to row"),
        (Cast("e2m1", Scale("e8m0", 16)), 64, "blocks of 16 are no multiple of 32"),
        (Cast("e2m1", Scale("fp32", 32)), 64, "not fp32"),
        (Cast("int4", Scale("fp32", 64, statistic="minmax")), 64, "zero points"),
        (Cast("int3", Scale("fp16", 64)), 64, "no block type of int3"),
        (Cast("e4m3", Scale("fp32", "row")), 64, "no block type of e4m3"),
        (Cast("e1m2", Scale("e4m3", 16, two_level=True)), 64, "no block type of e1m2"),
    ]:
        assert why in str(block_type(cast, inner)), cast
    for preset in ("mxfp8", "mxfp6", "fp8-row", "int2", "ufp4"):
        assert "no block type" in str(block_type(LinearCasts.preset(preset).fprop_w, 256)), preset


def test_rows_of_q_and_k_are_neighbors_in_a_rotation():
    config = AutoConfig.for_model("llama", hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=12)
    network = network_of(config)
    for part, heads in (("blk.0.attn_q", 4), ("blk.0.attn_k", 2)):
        order = network.rows(part, config)
        for head in range(heads):
            for pair in range(6):  # rotated together: 2 pair and 2 pair + 1 there, pair and pair + 6 here
                there = order[12 * head + 2 * pair : 12 * head + 2 * pair + 2].tolist()
                assert there == [12 * head + pair, 12 * head + pair + 6]
    assert network.rows("blk.0.attn_v", config) is None
    assert NETWORKS["qwen3"].rows("blk.0.attn_q", config) is None


def test_names_of_parts():
    pytest.importorskip("gguf")
    assert NETWORKS["llama"].name("model.layers.12.mlp.down_proj") == "blk.12.ffn_down"
    assert NETWORKS["gpt2"].name("transformer.h.3.attn.c_attn") == "blk.3.attn_qkv"
    assert NETWORKS["llama"].name("model.layers.0.mlp.experts") is None


def test_networks_that_llama_cpp_would_compute_wrongly_are_refused():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    for kind, changes, why in [
        ("olmo2", {}, "llama, mistral, qwen3, gpt2, bitnet of transformers"),
        ("llama", {"hidden_act": "gelu"}, "'gelu' as its activation, where llama.cpp has 'silu'"),
        ("llama", {"rope_parameters": yarn}, "positions of type 'yarn'"),
        ("mistral", {"sliding_window": 64}, "a sliding window"),
        ("gpt2", {"activation_function": "relu"}, "'relu' as its activation"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("bitnet", {"tie_word_embeddings": True}, "'relu2' as its activation"),
        ("bitnet", {"hidden_act": "silu"}, "tie_word_embeddings=False.*network: llama, or config"),
    ]:
        with pytest.raises(ValueError, match=why):
            network_of(AutoConfig.for_model(kind, **changes))
    with pytest.raises(ValueError, match="of none"):
        network_of(None)


def test_the_vocabulary_of_bytes():
    found = vocabulary("bytes", 300)
    assert len(found.tokens) == len({*found.tokens}) == len(found.types) == 300
    assert [found.tokens[byte] for byte in b"a ~\n"] == ["a", "Ġ", "~", "Ċ"]
    assert found.types[255:257] == [1, 5] and found.special == {"bos": 0, "eos": 0}
    assert "does not name one" in str(vocabulary(None, 300)) and "fewer than bytes" in str(vocabulary("bytes", 100))
