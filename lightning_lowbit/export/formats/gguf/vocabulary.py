"""The tokenizer of a file: pieces of bytes that llama.cpp merges as the tokenizer of the training does, the tokens that
begin and end texts and turns, and the template of a chat.

llama.cpp knows by name, ``tokenizer.ggml.pre``, the regular expressions that cut a text before bytes are merged. A
tokenizer with another one cannot be told to it: the file then has no vocabulary, and llama.cpp takes token ids alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lightning_lowbit.export.reading.files import first_line
from lightning_lowbit.export.tokenizer import byte_characters, load_tokenizer

# Regular expressions that cut a text, in LLaMA 3 and in Qwen2, which differ in how many digits stay together.
_QUOTES, _WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's names of these, and whether a word that is a token is not merged from its parts.
_CUTS = {
    f"{_QUOTES}|{_WORDS}|\\p{{N}}{{1,3}}|{_SIGNS}": ("llama-bpe", True),
    f"{_QUOTES}|{_WORDS}|\\p{{N}}|{_SIGNS}": ("qwen2", False),
}
# Where no piece is merged the cut does not matter, but with this one texts keep the spaces before signs.
_OF_BYTES = "qwen2"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_NO_MERGE = "!! !!"  # a list must not be empty, and pieces begin as one character: this one never applies


@dataclass(frozen=True)
class Vocabulary:
    """Byte-level pieces.

    ``special`` are ids by their names in a file: ``bos`` and ``eos`` of a text, ``eot`` of a turn, ``eom``, ``unk``,
    ``sep``, ``pad``, ``mask``; ``added`` tells of ``bos`` and ``eos`` if it stands before a text, or behind it.
    """

    pre: str  # llama.cpp's name of the cut of texts
    tokens: Sequence[str]  # of each id; a byte is a character of :func:`byte_characters`
    types: Sequence[int]  # of each id, llama.cpp's numbers
    merges: Sequence[str]  # pairs of pieces, the most frequent first
    special: Mapping[str, int]
    added: Mapping[str, bool]
    template: str | Mapping[str, str] | None = None  # of a chat, in Jinja, or several by name


def vocabulary(tokenizer: str | None, size: int, ends: Sequence[int] = ()) -> Vocabulary | str:
    """Returns the vocabulary of a tokenizer, or why a file cannot tell it, in words. ``size`` is the number of ids of
    the model, which are filled where they have no token; at the ids ``ends`` its generation stops."""
    if tokenizer is None:
        return "the checkpoint does not name one: give --tokenizer bytes, a folder, or a name on the Hugging Face Hub"
    if tokenizer == "bytes":
        if size < 256:
            return f"the model has {size} ids, fewer than bytes"
        pieces = _filled(dict(enumerate(byte_characters())), {}, size)
        return Vocabulary(_OF_BYTES, *pieces, [_NO_MERGE], {"bos": 0, "eos": 0}, {"bos": False, "eos": False})
    try:
        loaded = load_tokenizer(tokenizer)
        content = json.loads(loaded.backend_tokenizer.to_str())
    except Exception as error:  # it is missing, or written in Python: each has its own class
        return f"{tokenizer!r} cannot be loaded ({first_line(error)})"
    model = content["model"]
    pre, added = _cut(content), _added(loaded)
    if pre is None:
        return (
            f"{tokenizer!r} is not byte-level BPE with a cut of text that llama.cpp has (GPT-2's, LLaMA 3's, Qwen2's)"
        )
    if added is None:
        return f"{tokenizer!r} puts other tokens around a text than its bos_token before and its eos_token behind"
    if 1 + max(loaded.get_vocab().values()) > size:
        return f"{tokenizer!r} has {1 + max(loaded.get_vocab().values())} ids, and the model {size}"
    types = {int(id): _CONTROL if token.special else _USER_DEFINED for id, token in loaded.added_tokens_decoder.items()}
    pieces = _filled({id: token for token, id in loaded.get_vocab().items()}, types, size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    special = _special(loaded, [end for end in ends if end < size])
    return Vocabulary(pre, *pieces, merges or [_NO_MERGE], special, added, loaded.chat_template)


def _special(tokenizer: Any, ends: Sequence[int]) -> dict[str, int]:
    """The ids of special tokens. Without an own one, llama.cpp would take a fixed id for ``bos`` and ``eos``."""
    names = ("bos", "eos", "unk", "sep", "pad", "mask")
    ids = {name: id for name in names if (id := getattr(tokenizer, f"{name}_token_id", None)) is not None}
    end = next((ids[name] for name in ("eos", "sep", "bos") if name in ids), next(iter(ends), None))
    if end is not None:
        ids = {"bos": end, "eos": end} | ids
    others = dict.fromkeys([*_ends_of_turns(tokenizer), *ends])
    turns = [id for id in others if id != ids.get("eos")]
    return ids | dict(zip(("eot", "eom"), turns, strict=False))


def _ends_of_turns(tokenizer: Any) -> list[int]:
    """Returns the special token that a chat's template puts behind an answer, if it puts one there."""
    answer = "0x5eed"
    try:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        behind = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(answer)[2]
    except Exception:  # no template, or one that takes other turns: each has its own class
        return []
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"][:1]
    added = tokenizer.added_tokens_decoder
    return [id for id in ids if id in added and added[id].special]


def _added(tokenizer: Any) -> dict[str, bool] | None:
    """Returns whether a tokenizer puts ``bos`` before a text, and ``eos`` behind it; None if it puts other tokens."""
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    around = tokenizer("a")["input_ids"]
    for bos, eos in product((False, True), repeat=2):
        if around == [*[tokenizer.bos_token_id] * bos, *text, *[tokenizer.eos_token_id] * eos]:
            return {"bos": bos, "eos": eos}
    return None


def _filled(tokens: dict[int, str], types: dict[int, int], size: int) -> tuple[list[str], list[int]]:
    every = [tokens.get(id, f"[PAD{id}]") for id in range(size)]
    return every, [types.get(id, _NORMAL if id in tokens else _UNUSED) for id in range(size)]


def _cut(content: dict[str, Any]) -> str | None:
    """llama.cpp's name of how a tokenizer (its ``tokenizer.json``) cuts text; None if it has none."""
    model, steps = content["model"], content["pre_tokenizer"] or {}
    normalizer = (content["normalizer"] or {}).get("type")
    plain = model["type"] == "BPE" and not model.get("byte_fallback") and not model.get("continuing_subword_prefix")
    if not plain or normalizer not in (None, "NFC"):
        return None
    *first, last = steps.get("pretokenizers", [steps])
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    merges_whole = bool(model.get("ignore_merges"))
    if not (first or model["merges"] or merges_whole or normalizer):  # of bytes
        return _OF_BYTES
    if not first and last.get("use_regex", True) and normalizer is None:
        return None if merges_whole else "gpt-2"
    if len(first) != 1 or first[0].get("type") != "Split" or first[0].get("behavior") != "Isolated":
        return None
    name, ignores = _CUTS.get(first[0]["pattern"].get("Regex", ""), (None, False))
    return name if ignores == merges_whole and not last.get("use_regex", True) else None
