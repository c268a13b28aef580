"""Text of others in a page: shown as it is, whatever it holds."""

from __future__ import annotations

import re
from html import escape

# What no page may hold: control characters, and halves of characters beyond the first 65,536. What turns the
# direction of writing would reach out of its place.
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """Text for a page, between tags or in quotes."""
    return escape(_UNFIT.sub("\ufffd", text))
