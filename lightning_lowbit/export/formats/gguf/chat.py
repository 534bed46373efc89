"""A short chat with a file in llama.cpp and with the training: the file's template, first and last tokens are those of
the tokenizer if both get the same ids and give the same text."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.export.formats.base import Chat
from lightning_lowbit.export.formats.gguf.client import LlamaCpp
from lightning_lowbit.export.source import Source
from lightning_lowbit.export.tokenizer import load_tokenizer

QUESTION, LENGTH = "Who are you?", 24  # tokens of the answer, at most


def chat(source: Source, client: Any) -> Chat | None:
    """What a file in llama.cpp and the training answer to a question; None without a tokenizer, or room for it."""
    assert isinstance(client, LlamaCpp)
    name = source.facts.get("tokenizer")
    if name is None or not client.has_tokenizer:
        return None
    tokenizer, model, config = load_tokenizer(name), source.model, source.config
    ours, theirs = _prompt(tokenizer), client.prompt(QUESTION)
    room = int(getattr(config, "max_position_embeddings", LENGTH)) - max(len(ours), len(theirs))
    if room <= 0 or not ours or not theirs:
        return None
    ends = _ends(model, tokenizer)
    return Chat(
        QUESTION,
        (ours, theirs),
        (tokenizer.decode(ours), client.text(theirs)),
        (
            tokenizer.decode(_greedy(model, ours, min(LENGTH, room), ends.__contains__)),
            client.text(_greedy(client, theirs, min(LENGTH, room), client.ends)),
        ),
    )


def _prompt(tokenizer: Any) -> list[int]:
    """The ids of the question as transformers makes them."""
    if tokenizer.chat_template is None:
        return [*tokenizer(QUESTION)["input_ids"]]
    conversation = [{"role": "user", "content": QUESTION}]
    return [*tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)]


def _ends(model: Any, tokenizer: Any) -> set[int]:
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = ends if isinstance(ends, list) else [ends]
    return {end for end in (*listed, tokenizer.eos_token_id) if end is not None}


@torch.no_grad()
def _greedy(model: Any, prompt: Sequence[int], length: int, ends: Callable[[int], bool]) -> list[int]:
    """The ids that follow a prompt, up to one that ends the text."""
    tokens = [*prompt]
    while len(tokens) - len(prompt) < length:
        logits: Tensor = model(input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
        if ends(tokens[-1]):
            break
    return tokens[len(prompt) :]
