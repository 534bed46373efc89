"""A short chat with a file in llama.cpp and with the training: same ids and same text mean that the file's template,
first and last tokens are right."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.export.formats.base import Chat
from lightning_lowbit.export.formats.gguf.client import LlamaCpp
from lightning_lowbit.export.tokenizer import load_tokenizer
from lightning_lowbit.export.trained_model import TrainedModel, eos_tokens

QUESTION, LENGTH = "Who are you?", 24  # tokens of the answer, at most


def chat(original: TrainedModel, client: Any) -> Chat | None:
    """Asks a file in llama.cpp and the training a question; None without a tokenizer, room, or a fitting template."""
    assert isinstance(client, LlamaCpp)
    name = original.facts.get("tokenizer")
    if name is None or not client.has_tokenizer:
        return None
    tokenizer, model, config = load_tokenizer(name), original.model, original.config
    try:
        if tokenizer.chat_template is None:
            ours = [*tokenizer(QUESTION)["input_ids"]]
        else:
            turns = [{"role": "user", "content": QUESTION}]
            ours = [*tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)]
        theirs = client.prompt(QUESTION)
    except Exception:  # of a template that takes other turns: each has its own class
        return None
    room = int(getattr(config, "max_position_embeddings", LENGTH)) - max(len(ours), len(theirs))
    if room <= 0 or not ours or not theirs:
        return None
    ends = {*eos_tokens(model), tokenizer.eos_token_id} - {None}
    answer = _greedy(model, ours, min(LENGTH, room), ends.__contains__)
    answer_there = _greedy(client, theirs, min(LENGTH, room), client.ends)
    answers = _shown(tokenizer.decode(answer)), _shown(client.text(answer_there))
    return Chat(QUESTION, (ours, theirs), (tokenizer.decode(ours), client.text(theirs)), answers)


def _shown(text: str) -> str:
    """Replaces bytes that are no text by one sign, since decoders count them differently."""
    return re.sub("\ufffd+", "\ufffd", text)


@torch.no_grad()
def _greedy(model: Any, prompt: Sequence[int], length: int, ends: Callable[[int], bool]) -> list[int]:
    """Returns the ids that follow a prompt, up to one that ends the text."""
    tokens = [*prompt]
    while len(tokens) - len(prompt) < length:
        logits: Tensor = model(input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
        if ends(tokens[-1]):
            break
    return tokens[len(prompt) :]
