"""LoRA adapters of PEFT on a base model in few bits."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_lowbit import LinearCasts, convert, pack_frozen, unpack_frozen
from lightning_lowbit.nn import LayerKeys

# PEFT reads a name that transformers has renamed.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")]
TOKENS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).requires_grad_(False)


def with_lora(network):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(network, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"]))


def losses(model, steps=4):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    keys, found = LayerKeys(model), []
    for step in range(steps):
        keys.fill_(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@torch.no_grad()
def logits(model):
    LayerKeys(model).fill_(0)
    with torch.autocast("cpu", torch.bfloat16):
        return model.eval()(TOKENS).logits.float()


def test_both_orders_and_matrices_train_alike():
    skip = ["lm_head", "lora_A", "lora_B"]
    first = losses(with_lora(pack_frozen(base(), "nvfp4-nvidia", skip=["lm_head"])))
    afterwards = losses(pack_frozen(with_lora(base()), "nvfp4-nvidia", skip=skip))
    matrices = losses(convert(with_lora(base()), "nvfp4-nvidia", skip=skip))
    assert first == afterwards == matrices
    assert first[-1] < first[0]


def test_saved_adapters_give_the_outputs_of_training(tmp_path):
    from peft import PeftModel

    model = with_lora(pack_frozen(base(), "nvfp4", skip=["lm_head"]))
    losses(model)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(pack_frozen(base(), "nvfp4", skip=["lm_head"]), tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_merged_adapters_give_the_outputs_of_training_to_rounding():
    weights_alone = LinearCasts.preset("nvfp4-nvidia").replace(fprop_x=None)
    model = with_lora(pack_frozen(base(), weights_alone, skip=["lm_head"]))
    losses(model)
    expected = logits(model)
    merged = unpack_frozen(copy.deepcopy(model)).merge_and_unload()
    convert(merged, "bf16")
    assert (logits(merged) - expected).norm() < 0.01 * expected.norm()
    assert (logits(base()) - expected).norm() > 0.1 * expected.norm()
