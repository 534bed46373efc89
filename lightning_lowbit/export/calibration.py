"""Text for calibration and for the parity report, and the amaxes of activations over it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowbit.export.tokenizer import load_tokenizer
from lightning_lowbit.export.trained_model import TrainedModel

LENGTH, SEQUENCES = 128, 16  # tokens of a sequence, and how many


def tokens_of(original: TrainedModel, text: str | Path | None) -> Tensor:
    """Token ids, int64 ``[sequences, length]``: of a text file, or drawn at random where there is none. An error for a
    text that is missing or shorter than a sequence, or where the checkpoint does not tell its tokenizer."""
    whole: Any = original.config
    config = whole.get_text_config()
    vocabulary, positions = int(config.vocab_size), int(getattr(config, "max_position_embeddings", LENGTH) or LENGTH)
    length = min(LENGTH, positions)
    if text is None:
        return torch.randint(vocabulary, (4, length), generator=torch.Generator().manual_seed(0))
    path, name = Path(text).expanduser(), original.facts.get("tokenizer")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file of text {path}. Give one in UTF-8.")
    if name is None:
        raise ValueError("The checkpoint does not tell its tokenizer: give --tokenizer bytes, or a folder or name.")
    ids = torch.tensor(load_tokenizer(name)(path.read_text(errors="replace"), add_special_tokens=False)["input_ids"])
    count = min(len(ids) // length, SEQUENCES)
    if count == 0:
        raise ValueError(f"{path} has {len(ids)} tokens, and a sequence {length}: give a longer text.")
    if int(ids.max()) >= vocabulary:
        raise ValueError(
            f"The tokenizer {name!r} gives the token {int(ids.max())}, and the model has {vocabulary}: give the "
            "tokenizer of the training (--tokenizer)."
        )
    return ids[: count * length].view(count, length)


@torch.no_grad()
def input_amaxes(original: TrainedModel, tokens: Tensor) -> dict[str, float]:
    """Returns the largest magnitude of each layer's input, by name, over the training's forward pass of some tokens."""
    amaxes: dict[str, float] = dict.fromkeys(original.layers, 0.0)

    def note(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        amaxes[name] = max(amaxes[name], float(inputs[0].detach().to(original.dtype).abs().amax()))

    handles = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in original.layers.items()]
    try:
        for part in torch.split(tokens, 4):
            original.model(input_ids=part)
    finally:
        for handle in handles:
            handle.remove()
    return amaxes
