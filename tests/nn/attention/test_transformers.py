"""Attention of transformers, which is found by its interface: everything in the model has two quantized operands."""

import pytest
import torch
import transformers as hf
from packaging.version import Version

from lightning_lowbit import convert
from lightning_lowbit.nn import GemmCounter, LayerKeys

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),  # since transformers 5.24
]

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WITHOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)

BEFORE_5_15 = Version(hf.__version__) < Version("5.15")
# Angles of positions, which are products before transformers 5.15.
ANGLES = {"model.rotary_emb"} if BEFORE_5_15 else set()


def models():
    return {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **SMALL)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL, **WITHOUT)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
        "modernbert": lambda: hf.ModernBertForMaskedLM(hf.ModernBertConfig(**SMALL, **TOKENS)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0)
        ),
    }


@pytest.mark.parametrize("name", models())
def test_everything_is_quantized(name):
    if name == "t5" and BEFORE_5_15:
        pytest.skip("T5's attention has no interface in transformers before 5.15")
    torch.manual_seed(0)
    model = models()[name]().train()
    convert(model, "nvfp4", attention="mxfp8")
    keys = LayerKeys(model)
    keys.fill_(0)
    tokens = torch.randint(0, 64, (2, 24))
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    given["attention_mask"][0, 20:] = 0
    if name == "t5":
        given["decoder_input_ids"] = tokens

    def gradients():
        keys.fill_(0)
        model.zero_grad()
        model(**given)[0].square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with GemmCounter(model) as counter:
        wanted = gradients()
    coverage = counter.coverage()
    assert coverage.uncovered.keys() <= ANGLES
    assert not coverage.uncounted
    assert {part for part, _ in counter.gemms if part.endswith(("qk", "pv"))}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(torch.equal(a, b) for a, b in zip(gradients(), wanted, strict=True))


def test_one_token_at_a_time():
    """Decoding with a cache gives what a pass over all tokens does: scales of blocks see one token alone."""
    model = models()["llama"]().eval()
    each_its_own = {"element": "e4m3", "scale": {"format": "e8m0", "block": 1}}
    convert(model, "bf16", attention={"fprop_x": each_its_own, "fprop_w": each_its_own})
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens).logits
        cache, steps = None, []
        for i in range(tokens.shape[1]):
            out = model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-3, atol=1e-4)
