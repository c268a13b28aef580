"""What people hand to `lookahead.summarize` by mistake: each is told in the words of the call, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

import lookahead
from lookahead import ConfigError, DocumentError

TEXT = "The cat sat on the mat. The dog sat by the door. "


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def summarize(tiny_llama, tiny_tokenizer):
    """Summarizes with a tiny model."""
    return lambda text, **options: lookahead.summarize(text, tiny_llama, tiny_tokenizer, max_new_tokens=8, **options)


def test_the_path_of_a_file_is_read(folder, summarize):
    assert summarize(Path("file.txt")).text == summarize(TEXT).text


def test_the_name_of_a_file_is_not_taken_for_a_text(folder, summarize):
    for name in ("file.txt", str(folder / "file.txt"), " file.txt\n"):
        with pytest.raises(
            DocumentError, match=r"is the name of a file, not its text; pass pathlib\.Path\(.*\) to read it"
        ):
            summarize(name)
    assert summarize("file").text  # a word that no file is called
    assert summarize(f"file.txt {TEXT}").text


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_a_path_that_is_no_file_is_refused(folder, summarize, name):
    with pytest.raises(DocumentError, match="is not a file"):
        summarize(Path(name))


def test_a_path_of_many_documents_names_the_command_for_them(folder, summarize):
    (folder / "many.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(DocumentError, match="one document per line or row; 'lookahead summarize' reads such files"):
        summarize(Path("many.jsonl"))


@pytest.mark.parametrize("texts", [[TEXT, TEXT], (TEXT,)])
def test_several_texts_are_told_of_what_takes_several(summarize, texts):
    with pytest.raises(ConfigError, match=f"must be one document, got a {type(texts).__name__} of .*summarize_all"):
        summarize(texts)


@pytest.mark.parametrize("text", [None, TEXT.encode(), 7])
def test_what_is_no_text_is_refused(summarize, text):
    with pytest.raises(ConfigError, match=f"must be a string or a pathlib.Path, got {type(text).__name__}"):
        summarize(text)


@pytest.mark.parametrize("text", ["", " \n\t", ".", "...", "\u200b\u200b", "-- ?!"])
def test_a_text_without_a_letter_or_digit_is_refused(summarize, text):
    with pytest.raises(
        DocumentError, match=r"the document (is empty|holds (1 character|[2-9] characters) and no letter or digit)"
    ):
        summarize(text)


@pytest.mark.parametrize("text", ["Hello", "7", "\u732b"])
def test_one_word_is_a_document(summarize, text):
    assert summarize(text).text


def test_the_name_of_a_model_is_not_taken_for_a_model(tiny_llama, tiny_tokenizer, tmp_path):
    for model in ("gpt2", tmp_path):
        with pytest.raises(ConfigError, match=r"model must be a PreTrainedModel, got .*; load it: .*lookahead\.load"):
            lookahead.summarize(TEXT, model)
    with pytest.raises(ConfigError, match="tokenizer must be a tokenizer of transformers, got str 'gpt2'; load it"):
        lookahead.summarize(TEXT, tiny_llama, "gpt2")


def test_model_and_tokenizer_in_each_others_place_are_told(tiny_llama, tiny_tokenizer):
    with pytest.raises(ConfigError, match="model and tokenizer are swapped"):
        lookahead.summarize(TEXT, tiny_tokenizer, tiny_llama)
    with pytest.raises(ConfigError, match="model must be a PreTrainedModel, got a "):
        lookahead.summarize(TEXT, tiny_tokenizer)


def test_options_that_are_no_configuration_are_refused(summarize):
    with pytest.raises(ConfigError, match="config must be a LookaheadConfig, got "):
        summarize(TEXT, config={"window": 7})
