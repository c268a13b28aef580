"""From files to documents, and from documents to sentences."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from pathlib import Path

import pytest

from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.inputs import find_inputs
from lookahead.documents.readers import count_documents, read_documents
from lookahead.errors import DocumentError
from lookahead.summarization.segmentation import split_sentences


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stdin(monkeypatch):
    """Sets what standard input holds."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def read(*arguments, field=None):
    return list(read_documents(find_inputs(arguments, field)))


def error_of(*arguments, field=None):
    (reject,) = read(*arguments, field=field)
    assert isinstance(reject, Reject)
    return reject.error


# Which files


def test_a_text_file_is_one_document_named_by_its_path(folder):
    (folder / "a.txt").write_text("One. Two.\n")
    assert read("a.txt") == [Document("a.txt", "One. Two.\n")]


def test_a_quoted_pattern_finds_its_files_in_order_and_passes_over_folders(folder):
    (folder / "notes" / "deep").mkdir(parents=True)
    for name in ("b.md", "a.md", "deep/c.md"):
        (folder / "notes" / name).write_text(name)
    (folder / "notes" / "d.md").mkdir()
    assert [source.path for source in find_inputs(["notes/*.md"])] == ["notes/a.md", "notes/b.md"]
    assert [source.path for source in find_inputs(["notes/**/*.md"])][-1] == "notes/deep/c.md"


def test_a_file_whose_name_looks_like_a_pattern_is_read(folder):
    (folder / "a[1].txt").write_text("Text.")
    assert read("a[1].txt") == [Document("a[1].txt", "Text.")]


def test_a_file_named_twice_is_read_once(folder):
    (folder / "a.txt").write_text("Text.")
    assert len(read("a.txt", "*.txt")) == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("gone.txt", "gone.txt: no such file"),
        ("gone/a.txt", "gone/a.txt: no such file"),
        ("*.rst", "no file matches this pattern"),
        ("notes", "notes: no file to read in this folder; known suffixes are .txt .text .md"),
    ],
)
def test_an_argument_that_names_no_file_is_refused(folder, argument, message):
    (folder / "notes").mkdir()
    with pytest.raises(DocumentError) as caught:
        find_inputs([argument])
    assert message in str(caught.value)


def test_a_text_given_in_place_of_a_file_is_refused_with_a_hint(folder):
    with pytest.raises(DocumentError, match=r"^'One sentence. One sentence. [^']*'\.\.\.: .* stdin with -$"):
        find_inputs(["One sentence. " * 1000])


def test_a_folder_that_cannot_be_listed_is_named_and_not_passed_over(folder, monkeypatch):
    (folder / "notes" / "locked").mkdir(parents=True)
    (folder / "notes" / "a.txt").write_text("One.")
    listed = os.scandir

    def locked(path):
        if "locked" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", locked)
    (folder / "notes" / "linked").symlink_to(folder)
    skipped = []
    assert [each.path for each in find_inputs(["notes"], on_skip=skipped.append)] == ["notes/a.txt"]
    assert skipped == ["notes/linked: links to folders are not followed", "notes/locked: Permission denied"]
    with pytest.raises(DocumentError, match=r"^notes/locked: Permission denied$"):
        find_inputs(["notes/locked"])


def test_a_file_in_a_folder_that_is_locked_is_refused_with_the_reason(folder, monkeypatch):
    def locked(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", locked)
    with pytest.raises(DocumentError, match=r"^notes/a\.txt: Permission denied$"):
        find_inputs(["notes/a.txt"])


@pytest.mark.parametrize("fields", [("", None), ("text", "")])
def test_a_field_without_a_name_is_refused(folder, fields):
    (folder / "a.jsonl").write_text('{"text": "One."}\n')
    with pytest.raises(DocumentError, match=r"^a field or column must have a name, got ''$"):
        find_inputs(["a.jsonl"], *fields)


def test_a_field_that_nothing_would_read_is_refused(folder):
    (folder / "a.txt").write_text("Text.")
    with pytest.raises(DocumentError, match="'body' is read from JSON lines"):
        find_inputs(["a.txt"], field="body")


# Text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_text_is_read_with_and_without_a_byte_order_mark(folder, encoding):
    (folder / "a.txt").write_bytes("Größe: 3 µm – ok.".encode(encoding))
    assert read("a.txt") == [Document("a.txt", "Größe: 3 µm – ok.")]


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["no mark", "mark"])
def test_another_encoding_is_refused_with_the_byte_offset(folder, mark):
    (folder / "a.txt").write_bytes(mark + "Größe".encode("latin1"))
    offset = len(mark) + 2
    assert error_of("a.txt").startswith(f"a.txt: not UTF-8 text: byte 0xf6 at byte offset {offset}")


def test_utf_16_that_is_cut_short_is_refused(folder):
    (folder / "a.txt").write_bytes("Text".encode("utf-16")[:-1])
    assert error_of("a.txt").startswith("a.txt: not UTF-16 text: byte 0x74 at byte offset 8")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the document is empty"),
        (b" \n\t\n", "the document is empty"),
        (b"ELF\0\0", "a binary file, not text (a zero byte at byte offset 3)"),
        (b"%PDF-1.7 ...", "a PDF file, not text; extract its text first"),
        (b"PK\x03\x04...", "a zip, docx or epub file, not text"),
    ],
)
def test_what_is_no_text_is_refused_by_name(folder, data, message):
    (folder / "a.txt").write_bytes(data)
    assert error_of("a.txt").startswith(f"a.txt: {message}")


def test_a_bad_file_does_not_stop_the_others(folder):
    (folder / "a.txt").write_bytes(b"\0")
    (folder / "b.txt").write_text("Text.")
    assert [type(item) for item in read("a.txt", "b.txt")] == [Reject, Document]


def test_a_file_that_goes_away_after_it_was_named_is_a_reject(folder):
    (folder / "a.txt").write_text("Text.")
    inputs = find_inputs(["a.txt"])
    (folder / "a.txt").unlink()
    assert list(read_documents(inputs)) == [Reject("a.txt", "a.txt: No such file or directory")]
    assert count_documents(inputs) == 1


def test_standard_input_is_one_text(stdin):
    stdin("Größe.".encode())
    assert read("-") == [Document("-", "Größe.")]


# JSON lines


def test_json_lines_are_named_by_their_id_or_by_path_and_line(folder):
    lines = ['{"id": "x", "text": "One."}', "", '{"id": 7, "text": "Two."}', '{"id": null, "text": "Three."}']
    (folder / "a.jsonl").write_text("\n".join(lines))
    assert read("a.jsonl") == [Document("x", "One."), Document(7, "Two."), Document("a.jsonl:4", "Three.")]
    assert count_documents(find_inputs(["a.jsonl"])) == 3


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_json_lines_are_read_in_unicode_encodings(folder, encoding):
    text = json.dumps({"body": "Größe."}, ensure_ascii=False) + "\n"
    (folder / "a.jsonl").write_bytes(text.encode(encoding))
    assert read("a.jsonl", field="body") == [Document("a.jsonl:1", "Größe.")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_line_as_long_as_the_limit_is_read(folder, encoding):
    line = json.dumps({"text": "Two."})
    (folder / "a.jsonl").write_bytes(f"{line}\n{line}\n".encode(encoding))
    documents = read_documents(find_inputs(["a.jsonl"]), limit=len(line))
    assert [document.text for document in documents] == ["Two.", "Two."]


@pytest.mark.parametrize(("name", "encoding"), [("a.csv", "utf-8"), ("a.jsonl", "utf-16")])
def test_the_limit_counts_the_bytes_of_a_value_in_utf_8_wherever_it_stands(folder, name, encoding):
    rows = {
        "a.csv": 'text\n"ééééé\nééééé\nééééé"\nTwo.\n',
        "a.jsonl": '{"text": "' + "é" * 14 + '"}\n{"text": "Two."}\n',
    }
    (folder / name).write_bytes(rows[name].encode(encoding))
    reject, second = read_documents(find_inputs([name]), limit=26)
    assert "longer than" in reject.error and second.text == "Two."


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', "not valid JSON: Unterminated string starting at character 10"),
        ('{"text": "a\tb"}', "not valid JSON: Invalid control character at character 12"),
        ("plain words", "not valid JSON: Expecting value"),
        ("[" * 100_000, "not valid JSON"),
        ('["text"]', "expected a JSON object, got list"),
        ('{"id": 1, "body": "x"}', "no field 'text'; the fields are id, body"),
        ("{}", "no field 'text'; the fields are none"),
        ('{"text": 5}', "field 'text' must hold a string, got int"),
        ('{"text": "  "}', "the document is empty"),
    ],
    ids=lambda value: value[:20],
)
def test_a_bad_line_is_refused_by_its_number_and_the_rest_is_read(folder, line, message):
    (folder / "a.jsonl").write_text(f'{{"text": "One."}}\n{line}\n{{"text": "Three."}}\n')
    first, reject, last = read("a.jsonl")
    assert (first.text, last.text) == ("One.", "Three.")
    assert reject.error.startswith(f"a.jsonl:2: {message}")


def test_a_byte_that_is_no_text_is_told_by_its_offset_in_the_file(folder):
    (folder / "a.jsonl").write_bytes(b'{"text": "One."}\n{"text": "Gr\xf6"}\n')
    first, reject = read("a.jsonl")
    assert first.text == "One."
    assert reject.error.startswith("a.jsonl:2: not UTF-8 text: byte 0xf6 at byte offset 29")


def test_half_a_surrogate_pair_becomes_a_character_a_tokenizer_can_read(folder):
    (folder / "a.jsonl").write_text('{"text": "a \\ud83d\\ude00 b \\ud83d c"}\n')
    assert read("a.jsonl") == [Document("a.jsonl:1", "a 😀 b � c")]


def test_json_lines_without_a_document_are_refused(folder):
    (folder / "a.jsonl").write_text("\n\n")
    assert error_of("a.jsonl") == "a.jsonl: no documents"


def test_standard_input_is_json_lines_where_a_field_is_named(stdin):
    stdin(b'{"body": "One."}\n{"body": "Two."}\n')
    assert read("-", field="body") == [Document("-:1", "One."), Document("-:2", "Two.")]
    assert count_documents(find_inputs(["-"], field="body")) is None


# Sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["One. ", "Two! ", "Three? ", "Four… ", "Five"],
        ["Dr. Watson met Mrs. J. R. Smith. ", "They left."],
        ["It costs 3.50 or 4. ", "Take it."],
        ["See e.g. Fig. 3 and no. 5 of the U.S. list. ", "No. ", "It is not there."],
        ['"Where?" she asked. ', '"Here!" ', "He left."],
        ["(It was late.) ", "[Nobody came.] ", "«Si.» ", "“So?” ", "¿Que? ", "Y."],
        ["Hm ... perhaps. ", "So it was me and I. ", "Then we left."],
        ["A wrapped\nline goes on. ", "A heading\n\n", "And a paragraph.\n \n\n", "Another"],
        ["A heading\n\n", "small letters begin here."],
        ["他来了。", "她走了！", "“真的吗？”", "是。"],
        ["Visit example.com or v1.2.\n", "Then go."],
        ["no sentence ends here"],
    ],
    ids=lambda sentences: sentences[0],
)
def test_sentences_end_where_a_reader_would_say_so(sentences):
    assert split_sentences("".join(sentences)) == sentences


@pytest.mark.parametrize("text", ["", " ", "\n\n", ". . .", "...", "a\n\n\n", " \n\n A. \n\n b", "?!?! A"])
def test_sentences_joined_are_the_text_again(text):
    assert "".join(split_sentences(text)) == text


def test_a_long_text_without_a_boundary_is_split_in_linear_time():
    for run in ("a", " ", "\n ", ".", '."', ".(", ". (", "e.g.", "。"):
        text = run * 200_000
        assert "".join(split_sentences(text)) == text
