"""Inputs of every kind people have: folders, tables, pages and URLs, and what is wrong with them."""

from __future__ import annotations

import http.server
import io
import json
import sys
import threading

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from lookahead.documents.byte_sources import bounded_lines, file_system
from lookahead.documents.decode_text import Document, Reject
from lookahead.documents.inputs import find_inputs
from lookahead.documents.readers import count_documents, read_documents
from lookahead.errors import DocumentError

PAGE = """<html><head><title>News</title></head><body><nav><a href="/">Home</a> <a href="/b">Sport</a></nav>
<article><h1>The storm</h1><p>The storm hit the coast at dawn, and two ships were lost before noon came.</p>
<p>The harbour of Brest stayed open all day, and nobody on land was hurt, the mayor said on Monday.</p></article>
<footer>Copyright, cookies and imprint</footer></body></html>"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def server():
    """Serves what its dict holds by path over HTTP, on this machine."""
    files = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            data = files.get(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data or b"")

        do_HEAD = do_GET

        def log_message(self, *_):
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}", files
        running.shutdown()


def read(*arguments, field=None, id_field=None, limit=1 << 20, **options):
    return list(read_documents(find_inputs(arguments, field, id_field, **options), limit=limit))


def error_of(*arguments, **options):
    (reject,) = read(*arguments, **options)
    assert isinstance(reject, Reject)
    return reject.error


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


# Folders


def test_a_folder_stands_for_the_files_of_known_suffixes_in_it_and_below(folder):
    for name in (
        "notes/b.txt",
        "notes/a.md",
        "notes/deep/c.TXT",
        "notes/image.png",
        "notes/.git/d.txt",
        "notes/.e.txt",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    assert [source.path for source in find_inputs(["notes"])] == ["notes/a.md", "notes/b.txt", "notes/deep/c.TXT"]
    left = find_inputs(["notes"], leave_out=[folder / "notes" / "b.txt"])
    assert [source.path for source in left] == ["notes/a.md", "notes/deep/c.TXT"]


JOB_FILES = ["out.jsonl", "out.jsonl.manifest.json", "out.jsonl.rejects.jsonl", "out.jsonl.report.html"]
JOB_FILES += ["out.parquet.running.jsonl", "out.parquet.manifest.json"]


def test_what_a_job_wrote_to_a_folder_is_no_document_of_it_but_can_be_named(folder):
    (folder / "docs").mkdir()
    files = fsspec.filesystem("memory")
    for name in (*JOB_FILES, "a.jsonl", "a.rejects.jsonl"):
        (folder / "docs" / name).write_text("{}")
        files.pipe(f"/of_jobs/{name}", b"{}")
    assert [source.path for source in find_inputs(["docs"])] == ["docs/a.jsonl", "docs/a.rejects.jsonl"]
    of_url = [source.path.rsplit("/")[-1] for source in find_inputs(["memory://of_jobs"])]
    assert of_url == ["a.jsonl", "a.rejects.jsonl"]
    assert [source.path for source in find_inputs(["docs/out.jsonl"])] == ["docs/out.jsonl"]


def test_a_folder_of_mixed_formats_and_encodings_is_read_file_by_file(folder):
    (folder / "docs").mkdir()
    (folder / "docs" / "a.txt").write_bytes("Größe.".encode("utf-16"))
    (folder / "docs" / "b.txt").write_bytes("Größe.".encode("latin1"))
    (folder / "docs" / "c.jsonl").write_text('{"text": "Größe."}\n', "utf-8")
    first, reject, last = read("docs")
    assert (first.text, last.text) == ("Größe.", "Größe.")
    assert reject.error.startswith("docs/b.txt: not UTF-8 text: byte 0xf6")


def test_an_empty_name_is_not_the_folder_one_stands_in(folder):
    (folder / "a.txt").write_text("One.")
    with pytest.raises(DocumentError, match="an input is an empty string; name files"):
        find_inputs([""])


# Tables


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_csv_file_has_a_document_a_row_quoted_line_breaks_included(folder, encoding):
    (folder / "a.csv").write_bytes('id,text\nx,"One,\ntwo."\n\n,Größe.\n'.encode(encoding))
    assert read("a.csv") == [Document("x", "One,\ntwo."), Document("a.csv:5", "Größe.")]
    (folder / "a.tsv").write_bytes("doc\tbody\n7\tOne, two.\n".encode(encoding))
    assert read("a.tsv", field="body", id_field="doc") == [Document("7", "One, two.")]


def test_a_parquet_file_has_a_document_a_row(folder):
    write_parquet(folder / "a.parquet", id=[1, None, 3], text=["One.", "Two.", None])
    one, two, reject = read("a.parquet")
    assert (one, two) == (Document(1, "One."), Document("a.parquet:2", "Two."))
    assert reject == Reject(3, "a.parquet:3: column 'text' must hold a string, got NoneType")
    assert count_documents(find_inputs(["a.parquet"])) == 3


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_the_fields_of_text_and_id_can_be_named(folder, suffix):
    path = folder / f"a.{suffix}"
    if suffix == "parquet":
        write_parquet(path, key=["x"], body=["One."], text=["no"])
    else:
        path.write_text("key,body,text\nx,One.,no\n" if suffix == "csv" else '{"key": "x", "body": "One."}\n')
    assert read(path.name, field="body", id_field="key") == [Document("x", "One.")]
    assert "no" in error_of(path.name, field="gone") and "'gone'" in error_of(path.name, field="gone")
    assert "'gone'" in error_of(path.name, field="body", id_field="gone")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_without_the_column_is_refused_with_the_columns_it_has(folder, suffix):
    if suffix == "csv":
        (folder / "a.csv").write_text("id,body\n1,One.\n")
    else:
        write_parquet(folder / "a.parquet", id=[1], body=["One."])
    expected = f"a.{suffix}: no column 'text'; the columns are id, body (--text-field names one)"
    assert error_of(f"a.{suffix}") == expected


@pytest.mark.parametrize(("value", "kind"), [(1, "int64"), (["One."], "list<element: string>")])
def test_a_column_of_something_else_is_no_column_of_documents(folder, value, kind):
    write_parquet(folder / "a.parquet", text=[value, value])
    assert error_of("a.parquet") == f"a.parquet: column 'text' must hold strings, it holds {kind}"


def test_a_value_that_is_no_text_is_a_reject_and_the_rows_behind_it_are_read(folder):
    texts = pyarrow.array([b"One.", b"Gr\xf6\xdfe.", b"Three."]).view(pyarrow.string())
    write_parquet(folder / "a.parquet", text=texts)
    first, reject, last = read("a.parquet")
    assert (first.text, last.text) == ("One.", "Three.")
    assert reject.error == "a.parquet:2: column 'text' is not UTF-8 text: invalid start byte at byte 2"


def test_of_columns_of_one_name_the_first_is_read(folder):
    table = pyarrow.Table.from_arrays([pyarrow.array(["One."]), pyarrow.array(["Two."])], names=["text", "text"])
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    (folder / "a.csv").write_text("\ntext,text\nOne.,Two.\n")
    assert [document.text for document in read("a.parquet", "a.csv")] == ["One.", "One."]


def test_a_named_id_field_must_hold_an_id(folder):
    (folder / "a.jsonl").write_text('{"key": 1.5, "text": "One."}\n{"key": "", "text": "Two."}\n')
    first, second = read("a.jsonl", id_field="key")
    assert first.error == "a.jsonl:1: field 'key' must be a string or a whole number, got float"
    assert second.error == "a.jsonl:2: field 'key' must be a string or a whole number, got an empty string"


@pytest.mark.parametrize(
    "data", [b"PAR1 is not all of it PAR1", b"", b"id,text\n1,One.\n"], ids=["cut", "empty", "csv"]
)
def test_a_damaged_parquet_file_is_told(folder, data):
    (folder / "a.parquet").write_bytes(data)
    assert error_of("a.parquet").startswith("a.parquet: cannot be read as Parquet: ")


def test_rows_with_missing_cells_are_rejects_and_the_others_are_read(folder):
    (folder / "a.csv").write_text("id,text\n1\n2,Two.\n3,Three.,more\n")
    first, second, third = read("a.csv")
    assert first.error == "a.csv:2: 1 cells, and there are 2 columns"
    assert second == Document("2", "Two.")
    assert third.error == "a.csv:4: 3 cells, and there are 2 columns"


def test_a_row_that_is_no_text_is_a_reject_and_the_rows_behind_it_are_read(folder):
    (folder / "a.csv").write_bytes(b'id,text\n1,One.\n2,"Gr\xf6\xdfe,\n\xf6\0."\n3,Three.\n')
    first, reject, last = read("a.csv")
    assert (first, last) == (Document("1", "One."), Document("3", "Three."))
    assert reject.id == "a.csv:4"
    assert reject.error.startswith("a.csv:3: not UTF-8 text: byte 0xf6 at byte offset 20; ")


def test_a_table_whose_columns_have_no_readable_names_is_told(folder):
    (folder / "a.csv").write_bytes(b"id,text,gr\xf6\xdfe\n1,One.,2\n")
    assert error_of("a.csv").startswith("a.csv:1: not UTF-8 text: byte 0xf6 at byte offset 10; ")


@pytest.mark.parametrize("end", ["", "\n2,Two.\n3,Three.\n"])
def test_a_quote_that_is_not_closed_swallows_no_row_unsaid(folder, end):
    (folder / "a.csv").write_text(f'id,text\n1,One.\n2,"Two{end}')
    first, reject = read("a.csv")
    assert first.text == "One."
    assert reject == Reject("a.csv", "a.csv:3: a quote is not closed; the rest of the file is not read")
    (folder / "a.csv").write_text('id,"text\n1,One.\n')
    assert error_of("a.csv") == "a.csv:1: a quote is not closed; the rest of the file is not read"


@pytest.mark.parametrize("text", ["id,text\n", "", "\n\n", None])
def test_a_table_without_rows_is_refused(folder, text):
    name = "a.parquet" if text is None else "a.csv"
    if text is None:
        write_parquet(folder / name, text=pyarrow.array([], pyarrow.string()))
    else:
        (folder / name).write_text(text)
    assert error_of(name) == f"{name}: no documents"


# Pages


def test_of_a_page_the_main_text_is_read(folder):
    (folder / "a.html").write_text(PAGE)
    (document,) = read("a.html")
    assert document.id == "a.html"
    assert "two ships were lost" in document.text and "nobody on land" in document.text
    assert "Sport" not in document.text and "cookies" not in document.text


def test_a_page_tells_its_own_encoding(folder):
    page = PAGE.replace("<head>", '<head><meta charset="latin1">').replace("mayor", "Bürgermeister")
    (folder / "a.html").write_bytes(page.encode("latin1"))
    (document,) = read("a.html")
    assert "Bürgermeister" in document.text


@pytest.mark.parametrize("page", ["", "<html><body></body></html>"], ids=["empty", "no text"])
def test_a_page_without_text_is_refused(folder, page):
    (folder / "a.html").write_text(page)
    assert error_of("a.html") == "a.html: no main text found in this page"


@pytest.mark.parametrize(("name", "module"), [("a.html", "trafilatura"), ("a.parquet", "pyarrow")])
def test_a_reader_that_is_not_installed_is_named_with_what_to_install(folder, monkeypatch, name, module):
    (folder / name).write_text(PAGE)
    monkeypatch.setitem(sys.modules, module, None)
    extra = {"trafilatura": "html", "pyarrow": "tables"}[module]
    with pytest.raises(DocumentError, match=rf"needs {module}: pip install 'lookahead-decoding\[{extra}\]'"):
        find_inputs([name])


# URLs


def test_urls_are_read_as_files_are(folder):
    files = fsspec.filesystem("memory")
    files.pipe({"/docs/a.txt": b"One.", "/docs/deep/b.jsonl": b'{"id": 5, "text": "Two."}\n', "/docs/c.png": b"no"})
    expected = [Document("memory:///docs/a.txt", "One."), Document(5, "Two.")]
    assert read("memory://docs") == expected
    assert read("memory://docs/*.txt") == expected[:1]
    (folder / "a.txt").write_text("One.")
    assert read(f"file://{folder}/a.txt") == [Document(f"file://{folder}/a.txt", "One.")]


def test_a_parquet_file_behind_a_url_is_read(folder, server):
    address, files = server
    write_parquet(folder / "a.parquet", text=["One.", "Two."])
    files["/a.parquet"] = (folder / "a.parquet").read_bytes()
    assert [document.text for document in read(f"{address}/a.parquet")] == ["One.", "Two."]


def test_lines_and_pages_come_over_http_whatever_follows_in_the_query(server):
    address, files = server
    files["/docs.jsonl?version=2"] = b'{"text": "One."}\n{"text": "Two."}'
    files["/a.html"] = PAGE.encode()
    documents = read(f"{address}/docs.jsonl?version=2", f"{address}/a.html")
    assert [document.text for document in documents[:2]] == ["One.", "Two."]
    assert "two ships" in documents[2].text


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://gone/a.txt", "memory://gone/a.txt: not found"),
        ("file:///gone/a.txt", "file:///gone/a.txt: not found"),
        ("http://127.0.0.1:1/a.txt", "http://127.0.0.1:1/a.txt: "),
    ],
)
def test_a_url_that_cannot_be_read_is_a_reject_and_the_others_are_read(folder, url, message):
    (folder / "a.txt").write_text("One.")
    reject, document = read(url, "a.txt")
    assert reject.id == url and reject.error.startswith(message) and "\n" not in reject.error
    assert document.text == "One."


def test_a_page_a_server_does_not_have_is_told(server):
    address, _ = server
    assert error_of(f"{address}/gone.txt").startswith(f"{address}/gone.txt: not found")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("zzz://a/b.txt", "zzz://a/b.txt: cannot be read: Protocol not known: zzz"),
        ("memory://docs/*.rst", "memory://docs/*.rst: no file matches this pattern"),
    ],
)
def test_a_url_that_names_nothing_is_refused_at_once(url, message):
    with pytest.raises(DocumentError) as caught:
        find_inputs([url])
    assert message in str(caught.value)


def test_a_driver_that_is_not_installed_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        DocumentError, match=r"^s3://b/a\.txt: Install s3fs .* pip install 'lookahead-decoding\[remote\]'"
    ):
        file_system("s3://b/a.txt")


# Limits


def test_a_line_above_the_limit_is_a_reject_and_the_next_is_read(folder):
    long = json.dumps({"text": "x" * 5000})
    (folder / "a.jsonl").write_text(f'{{"text": "One."}}\n{long}\n{{"text": "Three."}}\n{long}')
    first, reject, third, last = read("a.jsonl", limit=1000)
    assert (first.text, third.text) == ("One.", "Three.")
    assert reject.error == "a.jsonl:2: longer than 0.000954 MB; --max-document-mb raises the limit"
    assert last.id == "a.jsonl:4"


def test_of_an_endless_line_no_more_than_the_limit_is_held():
    class Endless(io.RawIOBase):
        """Bytes without a line break, and how many were asked for at once."""

        left, largest = 1 << 30, 0

        def readable(self):
            return True

        def readinto(self, buffer):
            size = min(len(buffer), self.left)
            self.left -= size
            self.largest = max(self.largest, size)
            buffer[:size] = b"x" * size
            return size

    raw = Endless()
    assert list(bounded_lines(io.BufferedReader(raw, 1 << 20), 1 << 20)) == [(0, None)]
    assert raw.left == 0 and raw.largest <= (1 << 20) + 2


@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.csv", "a.parquet"])
def test_a_document_above_the_limit_is_a_reject_in_every_format(folder, name):
    long = "word " * 1000
    if name == "a.parquet":
        write_parquet(folder / name, text=[long])
    else:
        (folder / name).write_text(f"text\n{long}\n" if name == "a.csv" else long)
    assert "MB; --max-document-mb raises the limit" in error_of(name, limit=1000)


@pytest.mark.parametrize("end", ["", "\n"])
def test_lines_in_utf_16_are_read_one_at_a_time(folder, end):
    long = "x" * 5000
    (folder / "a.jsonl").write_bytes(
        f'{{"text": "Größe."}}\n{{"text": "{long}"}}\n{{"text": "Three."}}{end}'.encode("utf-16")
    )
    first, reject, third = read("a.jsonl", limit=1000)
    assert (first.text, third.text, type(reject)) == ("Größe.", "Three.", Reject)
