"""What a GGUF file tells of a tokenizer is what the tokenizer does, so that a chat with the file in llama.cpp is one
with the trained model. ``gguf`` reads the metadata; the chats are slow, and take llama.cpp."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from lightning_lowbit.export.checkpoint import _compared
from lightning_lowbit.export.formats.base import Options
from lightning_lowbit.export.formats.gguf import GGUF
from lightning_lowbit.export.formats.gguf.client import QUESTION, chat
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from tests.export.llama_cpp import tokenizers
from tests.export.llama_cpp.tokenizers import client
from tests.export.originals import language_model
from tests.tables import each

gguf = pytest.importorskip("gguf")
INT4 = {"element": "int4", "scale": {"format": "bf16", "block": 32}}


def untrained(tokenizer, ends=None, **changes):
    sizes = {"intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 512, "max_position_embeddings": 128}
    casts = LinearCasts.of({"fprop_w": INT4, "dgrad_w": "fprop"})
    original = language_model("llama", casts, **{**sizes, **changes})
    original.model.generation_config = GenerationConfig(eos_token_id=ends)
    return replace(original, facts={"tokenizer": tokenizer})


def metadata(folder):
    fields = gguf.GGUFReader(folder / "model.gguf").fields
    return {
        name.removeprefix("tokenizer."): field.contents()
        for name, field in fields.items()
        if name.startswith("tokenizer.") and not name.endswith((".tokens", ".token_type", ".merges"))
    }


LLAMA3 = {"bos": "<|begin|>", "eos": "<|end|>", "eot": "<|eot_id|>", "padding": "<|pad|>", "add_bos": True}
CHATML = {"bos": "<|im_end|>", "eos": "<|im_end|>", "padding": "<|endoftext|>", "add_bos": False}
OWN = {"bos": "<stop>", "eos": "<stop>", "eot": "<turn_over>", "add_bos": False, "add_eos": True}
PLAIN = {"bos": "<s>", "eos": "</s>", "seperator": "<sep>", "mask": "<mask>", "unknown": "<unk>", "add_bos": False}
# A tokenizer, the tokens at which the model's generation ends, and what the file tells.
TOLD = [
    (tokenizers.llama3, ["<|end|>", "<|eot_id|>"], LLAMA3),
    (tokenizers.llama3, None, LLAMA3),
    (tokenizers.chatml, "<|im_end|>", CHATML),
    (tokenizers.chatml, ["<|im_end|>", "<|endoftext|>"], CHATML | {"eot": "<|endoftext|>"}),
    (tokenizers.own_turns, None, OWN),
    (tokenizers.plain, None, PLAIN),
]


@each(("make", "ends", "told"), TOLD)
def test_a_file_tells_what_the_tokenizer_does(make, ends, told, tmp_path):
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    tokenizer = make(folder)
    vocabulary = tokenizer.get_vocab()
    ends = [vocabulary[token] for token in ends] if isinstance(ends, list) else vocabulary.get(ends)
    GGUF.write(untrained(str(folder), ends), folder, Options())
    found = metadata(folder)
    ids = {name: vocabulary[token] for name, token in told.items() if not name.startswith("add_")}
    assert {name: found[f"ggml.{name}_token_id"] for name in ids} == ids
    assert len([name for name in found if name.endswith("_token_id")]) == len(ids)
    added = {"add_bos": False, "add_eos": False} | {name: is_added for name, is_added in told.items() if "add_" in name}
    assert {name: found[f"ggml.{name}_token"] for name in added} == added
    templates = tokenizer.chat_template
    named = templates if isinstance(templates, dict) else {"default": templates} if templates else {}
    assert found.get("chat_template") == named.get("default")
    assert found.get("chat_template.tool_use") == named.get("tool_use")


def test_a_file_of_bytes_begins_no_text(tmp_path):
    GGUF.write(untrained("bytes"), tmp_path, Options())
    found = metadata(tmp_path)
    ends = {name: found[name] for name in found if "_token" in name}
    ids = dict.fromkeys(("ggml.bos_token_id", "ggml.eos_token_id"), 0)
    assert ends == ids | dict.fromkeys(("ggml.add_bos_token", "ggml.add_eos_token"), False)
    assert "chat_template" not in found


def test_tokens_around_a_text_that_no_file_tells_leave_the_tokenizer_out(tmp_path):
    tokenizers.cls(tmp_path)
    with pytest.warns(UserWarning, match="puts other tokens around a text than its bos_token"):
        GGUF.write(untrained(str(tmp_path)), tmp_path, Options())


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def trained(make, folder):
    """A model that has learned one answer, and other answers to prompts that are made in other ways."""
    tokenizer = make(folder)
    ids = tokenizer.get_vocab()
    ends = [ids[token] for token in ("<|end|>", "<|eot_id|>") if token in ids] or [tokenizer.eos_token_id]
    original = untrained(str(folder), ends)

    def learned(answer):
        if tokenizer.chat_template is None:
            return [*tokenizer(f"{QUESTION} {answer}")["input_ids"], tokenizer.eos_token_id]
        turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
        return [*tokenizer.apply_chat_template(turns, return_dict=False)]

    texts, other = [learned(tokenizers.ANSWER)], "it is an assistant."  # without the template, or the first token
    if tokenizer.bos_token is not None and tokenizer.chat_template is not None:
        spelled = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{other}"
        texts.append(tokenizer(spelled, add_special_tokens=False)["input_ids"])
        texts.append([tokenizer.eos_token_id, *learned(other)[1:]])
    model = original.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        for text in texts:
            tokens = torch.tensor([text])
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return original


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "chatml", "plain"])
def test_a_chat_with_the_file_is_one_with_the_training(name, tmp_path):
    original = trained(getattr(tokenizers, name), tmp_path)
    GGUF.write(original, tmp_path, Options(dtype=torch.float32))
    found = chat(original, client(tmp_path))
    assert found is not None and found.is_same_prompt
    end = {"llama3": "<|eot_id|>", "chatml": "<|im_end|>", "plain": "</s>"}[name]
    assert [answer.strip() for answer in found.answers] == [f"{tokenizers.ANSWER}{end}"] * 2
    assert "as in training" in str(found)


@pytest.mark.slow
def test_a_report_shows_another_prompt(tmp_path):
    """A template without ``bos``, of a tokenizer that begins texts with it: llama.cpp begins chats with it, too."""
    original = trained(tokenizers.llama3, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = tokenizers.TURNS.removeprefix("{{ bos_token }}")
    tokenizer.save_pretrained(tmp_path)
    rows = GGUF.write(original, tmp_path, Options(dtype=torch.float32))
    client(tmp_path)
    tokens = torch.randint(500, (2, 16))
    with pytest.warns(UserWarning, match="makes another prompt.*prompt is '<.begin.><.start.>user"):
        found = _compared(GGUF, original, tmp_path, rows, Options(dtype=torch.float32), tokens)["parity"]
    assert found is not None and found.chat is not None and "in training '<|start|>user" in str(found)


@pytest.mark.slow
def test_without_room_a_tokenizer_or_a_template_that_takes_the_turns_there_is_no_chat(tmp_path):
    tokenizer = tokenizers.llama3(tmp_path / "other")
    tokenizer.chat_template = "{{ raise_exception('the first turn is of the system') }}"
    tokenizer.save_pretrained(other := str(tmp_path / "other"))
    for written, told, positions in (("bytes", None, 128), ("bytes", "bytes", 8), (other, other, 128)):
        original = untrained(written, max_position_embeddings=positions)
        GGUF.write(original, tmp_path, Options())
        assert chat(replace(original, facts={"tokenizer": told}), client(tmp_path)) is None, (told, positions)
