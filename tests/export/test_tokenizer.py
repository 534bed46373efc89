"""The tokenizer of bytes: its ids are those of the recipes' ``tokenizer: bytes``."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from lightning_lowbit import FP8Precision
from lightning_lowbit.export.tokenizer import bytes_tokenizer
from lightning_lowbit.recipes.tokenizers import ByteTokenizer, PretrainedTokenizer
from tests.export.modules import Plain
from tests.export.originals import export, fit
from tests.recipes.test_tokenizers import save_tokenizer
from tests.tables import deterministic

TOKENIZER = bytes_tokenizer()


@deterministic(100)
@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\0ĀĠ \n")))  # Ā would be byte 0's letter
def test_ids_are_the_bytes_of_a_text_and_back(text):
    assert TOKENIZER(text)["input_ids"] == [*text.encode()]
    assert TOKENIZER(text, split_special_tokens=True)["input_ids"] == [*text.encode()]
    assert TOKENIZER.decode([*text.encode()]) == text


def test_the_separator_is_the_end_of_a_text():
    assert (TOKENIZER.eos_token_id, len(TOKENIZER), TOKENIZER.vocab_size) == (ByteTokenizer.separator, 256, 256)
    assert TOKENIZER.decode([97, 0], skip_special_tokens=True) == "a"


@pytest.mark.parametrize("model_type", [None, "llama", "gpt2", "bitnet"])
def test_a_folder_keeps_it_beside_the_configuration_of_any_model(model_type, tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    if model_type is not None:
        AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = " Ā\0é\r\n  日本 <|endoftext|> "
    assert again(text)["input_ids"] == [*text.encode()]
    assert again.decode(again(text)["input_ids"]) == text
    assert (again.eos_token_id, len(again)) == (0, 256)


def test_a_tokenizer_with_more_ids_than_the_model_is_not_exported(trained, tmp_path):
    name = save_tokenizer(tmp_path / "tokenizer", "".join(map(chr, range(33, 545))))
    for format in ("mxfp8", "dequantized"):
        with pytest.raises(ValueError, match="has ids up to 515, and the model takes 256. Give --tokenizer that"):
            export(trained("llama", "mxfp8", steps=2), format, tmp_path / "out", tokenizer=name)
        assert not (tmp_path / "out").exists()


def test_a_module_without_tokens_is_not_exported_with_a_tokenizer(tmp_path):
    checkpoint = fit(Plain(), FP8Precision("mx"), tmp_path, 1, torch.randn(4, 16))
    with pytest.raises(ValueError, match="of a model that takes tokens, and the .* has no nn.Embedding: leave it out"):
        export(checkpoint, "dequantized", tmp_path / "out", module="tests.export.modules.Plain", tokenizer="bytes")


def test_recipes_read_a_folder_of_it_as_they_read_bytes(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    documents, folder = [b"ab c\n", "é".encode()], PretrainedTokenizer(str(tmp_path))
    assert folder.encode(documents).tolist() == ByteTokenizer().encode(documents).tolist()
    assert (folder.separator, folder.vocab_size) == (ByteTokenizer.separator, ByteTokenizer.vocab_size)
