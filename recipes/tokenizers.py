"""Tokenization of documents, which are UTF-8 bytes; a separator ends each:

    documents  b"ab", b"c"
    tokens     a b | c |            | is the separator: byte 0, or the end token of a pretrained tokenizer

Special tokens in a document are plain text: `</s>` in it does not end it.
"""

import os
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

BATCH = 64  # documents tokenized at once


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        separator: the id between documents.
        vocab_size: 1 + the largest id that ``encode`` can give.
    """

    separator: int
    vocab_size: int

    def encode(self, documents: list[bytes]) -> Tensor:
        """Returns the ids of all documents, each followed by the separator, 1-D, uint8 if they fit, else int32."""


class ByteTokenizer:
    """Bytes as tokens."""

    separator = 0  # occurs in no text
    vocab_size = 256

    def encode(self, documents: list[bytes]) -> Tensor:
        text = bytearray(b"\0".join([*documents, b""]))
        return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


class PretrainedTokenizer:
    """Any tokenizer of ``transformers``; ``name`` is what ``AutoTokenizer.from_pretrained`` takes.

    ``vocab_size`` excludes special tokens that no text produces, such as T5's 100 sentinels: it is 32000, not 32100.

    Raises:
        ValueError: there is no such tokenizer, or it has no token that can end a document.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer  # takes seconds

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(os.path.expanduser(name), trust_remote_code=False)
        except Exception as error:  # a missing network, file, package or entry: each has its own class
            raise ValueError(
                f"The tokenizer {name!r} cannot be loaded ({str(error).strip().splitlines()[0]}); give `tokenizer` the"
                " name of one on the Hugging Face Hub, a folder written by its `save_pretrained`, or 'bytes'."
            ) from error
        ends = (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id, self._tokenizer.bos_token_id)
        separator = next((end for end in ends if end is not None), None)
        if separator is None:
            raise ValueError(
                f"The tokenizer {name!r} has no eos, sep or bos token to stand between documents; give it one"
                " (`add_special_tokens({'eos_token': '</s>'})`, then `save_pretrained`), or take another `tokenizer`."
            )
        self.separator: int = separator
        added = self._tokenizer.added_tokens_decoder.items()
        special = {*self._tokenizer.all_special_ids, *(index for index, token in added if token.special)}
        special.discard(self._tokenizer.unk_token_id)  # stands for text
        self._special = torch.tensor(sorted(special), dtype=torch.int32)
        self.vocab_size: int = 1 + max(separator, *(set(self._tokenizer.get_vocab().values()) - special))
        self._dtype = torch.uint8 if self.vocab_size <= 256 else torch.int32

    def encode(self, documents: list[bytes]) -> Tensor:
        texts = [document.decode(errors="ignore") for document in documents]
        settings = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
        encoded = self._tokenizer(texts, **settings, verbose=False)["input_ids"] if texts else []
        tokens = torch.tensor(list(chain.from_iterable((*ids, -1) for ids in encoded)), dtype=torch.int32)
        # With `split_special_tokens` some models still produce special tokens that they know as text: T5 `</s>`.
        tokens = tokens[~torch.isin(tokens, self._special)]
        return tokens.masked_fill_(tokens < 0, self.separator).to(self._dtype)


def load_tokenizer(name: str) -> Tokenizer:
    """``"bytes"``, or what :class:`PretrainedTokenizer` takes."""
    return ByteTokenizer() if name == "bytes" else PretrainedTokenizer(name)


def encode_all(tokenizer: Tokenizer, documents: list[bytes]) -> Tensor:
    """Returns the ids of any number of documents, 1-D, with a separator between them, but not after the last one."""
    parts = range(0, len(documents), BATCH)
    return torch.cat([tokenizer.encode(documents[part : part + BATCH]) for part in parts])[:-1]
