"""Byte-level tokenizers of chat models, as folders; and llama.cpp, if it is there."""

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from lightning_lowbit.export.formats.base import NoClient
from lightning_lowbit.export.formats.gguf import GGUF
from lightning_lowbit.export.formats.gguf.client import QUESTION
from lightning_lowbit.export.formats.gguf.vocabulary import _CUTS

ANSWER = "a tiny quantized model."
LLAMA3, QWEN2 = _CUTS
TURNS = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}\n\n{{ message['content'] | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def client(folder):
    try:
        return GGUF.load(folder)
    except NoClient as error:
        pytest.skip(str(error))


def byte_level(cut, whole, special, around=None, normalizer=None, texts=(f"{QUESTION} user assistant {ANSWER}",) * 3):
    """A tokenizer of 500 pieces of some texts; ``around`` is what its post-processor makes of a text, ``$A``."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=whole))
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut is None)
    split = [] if cut is None else [tokenizers.pre_tokenizers.Split(tokenizers.Regex(cut), "isolated")]
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*split, level]) if split else level
    made.decoder = tokenizers.decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    if around is not None:
        ids = [(token, made.token_to_id(token)) for token in special]
        made.post_processor = TemplateProcessing(single=around, special_tokens=ids)
    return made


def save(folder, made, template=None, **tokens):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **tokens)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def llama3(folder):
    """A text begins with ``bos``; a turn ends with ``eot``, which is not ``eos``."""
    special = ["<|begin|>", "<|end|>", "<|start|>", "<|eot_id|>", "<|pad|>"]
    made = byte_level(LLAMA3, True, special, "<|begin|> $A")
    return save(folder, made, TURNS, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>")


def chatml(folder):
    """No ``bos``; ``eos`` ends a turn."""
    made = byte_level(QWEN2, False, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return save(folder, made, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def own_turns(folder):
    """As :func:`chatml`, with an end of turns that llama.cpp does not know by name, and two templates."""
    made = byte_level(None, False, ["<stop>", "<turn>", "<turn_over>"], "$A <stop>")
    default = CHATML.replace("<|im_start|>", "<turn>").replace("<|im_end|>", "<turn_over>")
    return save(folder, made, {"default": default, "tool_use": TURNS}, eos_token="<stop>")


def plain(folder):
    """A base model's, with all kinds of tokens and no template."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "<sep>", "mask_token": "<mask>"}
    tokens |= {"unk_token": "<unk>"}
    return save(folder, byte_level(None, False, [*tokens.values()]), **tokens)


def cls(folder):
    """Puts a token before a text that is not its ``bos``."""
    made = byte_level(None, False, ["<cls>", "</s>"], "<cls> $A")
    return save(folder, made, cls_token="<cls>", eos_token="</s>")
