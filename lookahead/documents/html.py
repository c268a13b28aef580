"""Web pages: their main text alone, without menus, advertisements and footers."""

from __future__ import annotations

from typing import Any

from lookahead.errors import DocumentError


def main_text(data: bytes, path: str) -> str:
    """The main text of an HTML page, by trafilatura; the page tells its encoding itself.

    Raises:
        DocumentError: trafilatura is not there, or finds no text.
    """
    trafilatura = load_trafilatura(path)
    try:
        text = trafilatura.extract(data, include_comments=False, favor_recall=True)
    except Exception as error:  # lxml's own, of several types
        raise DocumentError(f"{path}: cannot be read as HTML: {' '.join(str(error).split())}") from error
    if not text:
        raise DocumentError(f"{path}: no main text found in this page")
    return str(text)


def load_trafilatura(path: str) -> Any:
    """The module trafilatura.

    Raises:
        DocumentError: It is not installed; the message names the path that needs it.
    """
    try:
        import trafilatura
    except ImportError as error:
        raise DocumentError(f"{path}: HTML needs trafilatura: pip install 'lookahead-decoding[html]'") from error
    return trafilatura
