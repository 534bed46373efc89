"""The tokenizer of bytes, as a tokenizer of Hugging Face: the ids of a text are its bytes in UTF-8.

Byte-level BPE without merges. It writes each byte as a printable character, and its vocabulary has them in the order of
the bytes. Only byte 0, which separates documents, keeps its own name, so that the letter that stands for it remains a
letter.
"""

import os
import re
from typing import TYPE_CHECKING, Any

from lightning_lowbit.export.reading.files import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEPARATOR = "\0"
_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")  # a name there
_WAYS = "Give --tokenizer bytes, a folder written by its save_pretrained, or a name on the Hugging Face Hub."


def bytes_tokenizer() -> "PreTrainedTokenizerFast":
    """Returns a tokenizer with the 256 bytes as ids, no special tokens around a text, and byte 0 as its ``eos_token``.

    Examples:
        >>> bytes_tokenizer()("é!")["input_ids"]
        [195, 169, 33]
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {SEPARATOR: 0} | {letter: byte for byte, letter in enumerate(byte_characters()) if byte}
    # The one letter without an entry is that of byte 0.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SEPARATOR))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SEPARATOR, clean_up_tokenization_spaces=False)


def load_tokenizer(name: str) -> Any:
    """Returns a tokenizer of ``transformers``: ``"bytes"``, or what ``AutoTokenizer.from_pretrained`` takes; code
    beside it is not run. A ``ValueError`` if there is none."""
    if name == "bytes":
        return bytes_tokenizer()
    from transformers import AutoTokenizer

    if not (os.path.exists(os.path.expanduser(name)) or _HUB.fullmatch(name)):
        raise ValueError(f"The tokenizer {name!r} is no folder that exists. {_WAYS}")
    try:
        return AutoTokenizer.from_pretrained(os.path.expanduser(name), trust_remote_code=False)
    except Exception as error:  # a missing network, file, package or entry: each has its own class
        raise ValueError(f"The tokenizer {name!r} cannot be loaded ({first_line(error)}). {_WAYS}") from error


def fitting_tokenizer(name: str, model: Any) -> Any:
    """Returns :func:`load_tokenizer`; a ``ValueError`` if it has ids that a model of ``transformers`` does not take,
    but for special tokens, which no text gives."""
    tokenizer = load_tokenizer(name)
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
    largest = max({*tokenizer.get_vocab().values()} - special, default=0)
    taken = len(model.get_input_embeddings().weight)
    if largest >= taken:
        raise ValueError(
            f"The tokenizer {name!r} has ids up to {largest}, and the model takes {taken}. Give --tokenizer "
            "that of the training."
        )
    return tokenizer


def byte_characters() -> list[str]:
    """Returns the visible character that stands for each byte in byte-level vocabularies (GPT-2's ``encoder.py``):
    ``"Ġ"`` for a space."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
