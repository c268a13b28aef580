"""PDF and Word files beside others in a folder: read, or refused by name, and what is not read is named."""

from __future__ import annotations

import io
import os
import sys
import zipfile

import docx
import fsspec
import pypdf
import pytest

from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.inputs import find_inputs
from lookahead.documents.readers import read_documents
from lookahead.errors import DocumentError

MEGABYTE = 1 << 20


def pdf(*pages):
    """A PDF file with a page for each text; an empty one is a page without text."""
    writer = pypdf.PdfWriter()
    for text in pages:
        page = writer.add_blank_page(300, 300)
        stream = pypdf.generic.DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode() if text else b"0 0 9 9 re f")
        font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
        font = pypdf.generic.DictionaryObject({N(key): N(value) for key, value in font.items()})
        fonts = pypdf.generic.DictionaryObject({N("/F1"): font})
        page[N("/Resources")] = pypdf.generic.DictionaryObject({N("/Font"): fonts})
        page[N("/Contents")] = writer._add_object(stream)
    return writer


N = pypdf.generic.NameObject


def saved(document):
    """The bytes of a file."""
    file = io.BytesIO()
    document.write(file) if isinstance(document, pypdf.PdfWriter) else document.save(file)
    return file.getvalue()


def word(*paragraphs):
    """A Word file."""
    document = docx.Document()
    for paragraph in paragraphs:
        document.add_paragraph(paragraph)
    return document


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*paths, **options):
    return list(read_documents(find_inputs(paths), **options))


def test_the_pages_of_a_pdf_are_one_document(folder):
    (folder / "a.pdf").write_bytes(saved(pdf("The storm hit the coast.", "", "Two ships were lost.")))
    assert read("a.pdf") == [Document("a.pdf", "The storm hit the coast.\n\nTwo ships were lost.")]


PAGE = "<html><body><article><p>The storm hit the coast at dawn, and two ships were lost.</p></article>"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (f"\n<!DOCTYPE html>\n{PAGE}".encode(), "The storm hit the coast at dawn, and two ships were lost."),
        (f"<!-- a page --> {PAGE}".encode(), "The storm hit the coast at dawn, and two ships were lost."),
        (saved(pdf("The storm hit the coast.")), "The storm hit the coast."),
        (b"<htmlish> text", "<htmlish> text"),
    ],
    ids=["page", "comment", "pdf", "text"],
)
def test_what_an_address_without_a_suffix_leads_to_is_known_by_its_first_bytes(folder, data, text):
    fsspec.filesystem("memory").pipe("/papers/2402.02057", data)
    assert read("memory://papers/2402.02057") == [Document("memory://papers/2402.02057", text)]
    (folder / "page").write_bytes(b"<html>")  # but a file on this machine is the text that it says it is
    assert read("page") == [Document("page", "<html>")]


def test_a_word_file_is_read_with_its_tables_and_without_what_was_deleted(folder):
    document = word("The storm hit\tthe coast.", "Two ships were lost.")
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "Brest", "1907"
    change = docx.oxml.parse_xml(
        f'<w:p {docx.oxml.ns.nsdecls("w")}><w:pPr><w:tabs><w:tab w:val="left" w:pos="90"/></w:tabs></w:pPr>'
        "<w:ins><w:r><w:t>Nobody was hurt.</w:t></w:r></w:ins>"
        "<w:del><w:r><w:delText>All lived.</w:delText></w:r></w:del></w:p>"
    )
    document.element.body.append(change)
    (folder / "a.docx").write_bytes(saved(document))
    (got,) = read("a.docx")
    expected = "The storm hit\tthe coast.\n\nTwo ships were lost.\n\nBrest\n\n1907\n\nNobody was hurt."
    assert got == Document("a.docx", expected)


def broken(kind):
    """A file that cannot be read, by what is wrong with it."""
    if kind.startswith("password"):
        writer = pdf("Secret.")
        writer.encrypt("" if kind == "password of the owner" else "open", "owner", algorithm="RC4-128")
        return "b.pdf", saved(writer)
    whole_pdf, whole_docx = saved(pdf("The storm.", "")), saved(word("The storm."))
    bomb = io.BytesIO(whole_docx)
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/media/x.xml", bytes(40 * MEGABYTE))
    return {
        "scanned": ("b.pdf", saved(pdf("", ""))),
        "cut pdf": ("b.pdf", whole_pdf[: len(whole_pdf) // 3]),
        "no pdf": ("b.pdf", b"<html>not found</html>"),
        "empty pdf": ("b.pdf", b""),
        "cut docx": ("b.docx", whole_docx[: len(whole_docx) // 2]),
        "old word": ("b.docx", b"\xd0\xcf\x11\xe0" + bytes(600)),
        "other zip": ("b.docx", _zip({"a.txt": b"The storm."})),
        "no words": ("b.docx", saved(word(""))),
        "bomb": ("b.docx", bomb.getvalue()),
    }[kind]


def _zip(files):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("password", "b.pdf: this PDF needs a password; save a copy without one"),
        ("scanned", "b.pdf: its 2 pages hold no text; scanned pages need OCR first, for example with ocrmypdf"),
        ("cut pdf", "b.pdf: "),
        ("no pdf", "b.pdf: cannot be read as PDF: "),
        ("empty pdf", "b.pdf: cannot be read as PDF: "),
        ("cut docx", "b.docx: cannot be read as a Word file: "),
        ("old word", "b.docx: an old or encrypted Word file; save it as .docx without a password"),
        ("other zip", "b.docx: cannot be read as a Word file: "),
        ("no words", "b.docx: this Word file has no text"),
        ("bomb", "b.docx, unpacked: longer than 16 MB; --max-document-mb raises the limit"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name_and_the_rest_goes_on(folder, kind, says, capfd):
    name, data = broken(kind)
    (folder / name).write_bytes(data)
    for other in ("a.txt", "c.txt"):
        (folder / other).write_text("The storm.")
    first, reject, last = read("a.txt", name, "c.txt", limit=16 * MEGABYTE)
    assert isinstance(reject, Reject) and reject.id == name
    assert reject.error.startswith(says) and "\n" not in reject.error
    assert isinstance(first, Document) and isinstance(last, Document)
    assert capfd.readouterr().err == ""  # nothing but what is said here


def test_a_pdf_that_only_its_owner_may_change_is_read(folder):
    (folder / "b.pdf").write_bytes(broken("password of the owner")[1])
    assert read("b.pdf") == [Document("b.pdf", "Secret.")]


def test_a_pdf_with_more_text_than_the_limit_is_refused(folder):
    (folder / "a.pdf").write_bytes(saved(pdf(*["The storm hit the coast. " * 300] * 9)))
    (reject,) = read("a.pdf", limit=20_000)
    assert "longer than 0.0191 MB" in reject.error


def test_readers_that_are_not_installed_are_told_before_the_work(folder, monkeypatch):
    (folder / "a.pdf").write_bytes(b"")
    (folder / "a.docx").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    monkeypatch.setitem(sys.modules, "docx", None)
    for name, needs in (("a.pdf", "PDF needs pypdf"), ("a.docx", "Word files need python-docx")):
        with pytest.raises(DocumentError, match=rf"{name}: {needs}: pip install 'lookahead-decoding\[documents\]'"):
            find_inputs([name])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_every_file_of_a_folder_that_is_not_read_is_named(folder):
    for name in ("a.txt", "b.md", "photo.png", "sub/README", "sub/c.txt", ".hidden", "out.jsonl.manifest.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("The storm.")
    os.mkfifo(folder / "pipe.txt")
    os.symlink("nowhere.txt", folder / "link.txt")
    skipped = []
    found = find_inputs(["."], on_skip=skipped.append)
    assert [each.path for each in found] == ["a.txt", "b.md", "sub/c.txt"]
    assert sorted(skipped) == [
        "link.txt: not a regular file, or a broken link",
        "photo.png: files with suffix .png are not read",
        "pipe.txt: not a regular file, or a broken link",
        "sub/README: files without a suffix are not read",
    ]
