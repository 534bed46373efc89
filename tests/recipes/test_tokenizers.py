"""Tokenizers: the separator, the size of the vocabulary, and that text is only text."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_lowbit.recipes.data import TextDataModule
from lightning_lowbit.recipes.tokenizers import BATCH, ByteTokenizer, PretrainedTokenizer, encode_all, load_tokenizer

LETTERS = "▁abcdefghijklmnopqrstuvwxyz0123456789</>_."


def save_tokenizer(folder, letters=LETTERS, **special):
    """A small T5-like tokenizer: special tokens 0 to 2, letters, and sentinels behind the vocabulary."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *((letter, -3.0) for letter in letters), ("▁the", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    sentinels = ["<extra_id_0>", "<extra_id_1>"]
    special = special or {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=sentinels, **special)
    fast.save_pretrained(folder)
    return str(folder)


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    tokens = tokenizer.encode([b"ab", b"", "é".encode()])
    assert tokens.tolist() == [97, 98, 0, 0, 0xC3, 0xA9, 0]
    assert tokens.dtype == tokenizer.encode([]).dtype == torch.uint8
    assert tokenizer.encode([]).shape == (0,)
    assert (tokenizer.separator, tokenizer.vocab_size) == (0, 256)


def test_pretrained(tmp_path):
    tokenizer = PretrainedTokenizer(save_tokenizer(tmp_path))
    letter = {piece: 3 + index for index, piece in enumerate([*LETTERS, "▁the"])}
    expected = [letter["▁the"], letter["▁"], letter["a"], 1, 1, letter["▁"], 2, 1]
    tokens = tokenizer.encode([b"the a", b"", "É".encode()])
    assert tokens.tolist() == expected
    assert tokens.dtype == torch.uint8
    assert tokenizer.encode([]).tolist() == []
    assert tokenizer.separator == 1
    documents = [str(number).encode() for number in range(2 * BATCH + 3)]
    assert torch.equal(encode_all(tokenizer, documents), tokenizer.encode(documents)[:-1])


def test_text_is_only_text(tmp_path):
    folder = save_tokenizer(tmp_path)
    tokenizer = PretrainedTokenizer(folder)
    assert len(tokenizer._tokenizer) == tokenizer.vocab_size + 2  # the sentinels
    tokens = tokenizer.encode([b"a <extra_id_0> b </s> c <pad> d"])
    assert tokens[-1] == 1 and tokens[:-1].min() > 2 and tokens.max() < tokenizer.vocab_size
    assert "extra_id_0" in tokenizer._tokenizer.decode(tokens).replace(" ", "")
    assert TextDataModule(tokenizer=folder).vocab_size == tokenizer.vocab_size == 3 + len(LETTERS) + 1


def test_large_vocabularies_need_int32(tmp_path):
    letters = LETTERS + "".join(chr(0x4E00 + index) for index in range(300))
    tokenizer = PretrainedTokenizer(save_tokenizer(tmp_path, letters))
    tokens = tokenizer.encode([letters[-1].encode()])
    assert tokens.tolist() == [3, 2 + len(letters), 1] and tokens.dtype == torch.int32


def test_other_tokens_can_end_a_document(tmp_path):
    for special, separator in (
        ({"sep_token": "</s>", "bos_token": "<pad>"}, 1),
        ({"bos_token": "<pad>", "unk_token": "<unk>"}, 0),
    ):
        assert PretrainedTokenizer(save_tokenizer(tmp_path, **special)).separator == separator


def test_mistakes_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="has no eos, sep or bos token to stand between documents; give it one"):
        load_tokenizer(save_tokenizer(tmp_path / "endless", unk_token="<unk>"))
    with pytest.raises(ValueError, match=r"nowhere' cannot be loaded \(.+\); give `tokenizer` the name of one on the"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty' cannot be loaded"):
        load_tokenizer(str(tmp_path / "empty"))
