"""Incremental detokenization: the pieces add up to the decoded text of all tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

_CONTEXT = 8
"""Tokens that a window keeps, so that special treatment of its first token does not affect the newest."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a character whose last byte is missing
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a token of byte fallback
_CERTAIN = re.compile("^[^ ]+|[^ ]{3,}")  # no clean-up of spaces reaches across these


class TextPieces:
    """Decodes tokens as they come; the pieces add up to `tokenizer.decode(tokens, skip_special_tokens=True)`.

    A piece is final, so text that later tokens may change is held back: a character until its last byte, tokens of byte
    fallback until another token follows, and spaces that the tokenizer may clean up until three characters without a
    space follow. `end` returns the held text. A piece costs the decoding of a few tokens, independent of the length of
    the text.

    If a decoder changes earlier text in other ways, as Moses detokenizers do, earlier pieces stay, and `end` returns
    the whole text from that number of characters on.

    Source: the windows of `detokenize_incrementally` in vLLM and of `decode_token` in Text Generation Inference.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(_skipped(tokenizer))  # skipped tokens do not end a run of byte fallback
        self._cleans = _cleans_up(tokenizer)
        self._tokens: list[int] = []  # all tokens
        self._window: list[int] = []  # the last tokens, decoded together
        self._bytes: list[int] = []  # tokens of byte fallback after the window
        self._shown = 0  # characters of the window's text already taken
        self._unclean = ""  # text whose spaces may still be cleaned up
        self._given = 0  # characters of all pieces

    def put(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the new text that is final."""
        self._tokens += tokens
        waiting, complete = self._bytes, 0
        for token in tokens:
            if token in self._special:
                continue
            waiting.append(token)
            if not _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))):
                complete = len(waiting)
        if not complete:
            return ""
        self._window += waiting[:complete]
        del waiting[:complete]
        text = self._decode(self._window)
        end = max(self._shown, len(text) - text.endswith(_INCOMPLETE))
        piece, self._shown = text[self._shown : end], end
        if len(self._window) > 2 * _CONTEXT:
            self._shorten(text)
        piece = self._cleaned(piece) if self._cleans else piece
        self._given += len(piece)
        return piece

    def end(self) -> str:
        """The rest of the text, after the last token."""
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        return text[self._given :]

    def _decode(self, tokens: list[int]) -> str:
        options = {"clean_up_tokenization_spaces": False} if self._cleans else {}
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, **options))

    def _shorten(self, text: str) -> None:
        """Drop tokens of the window if the rest decodes to the same end of its text."""
        window, unshown = self._window, len(text) - self._shown
        shorter = [window[-length:] for length in range(_CONTEXT, _CONTEXT + 4)]  # some start inside a character
        for tokens in [*shorter, window[:_CONTEXT] + window[-_CONTEXT:]]:  # the newest may have no text
            short = self._decode(tokens)
            if short == text or (self._shown and short.endswith(text[self._shown - 1 :])):
                self._window, self._shown = tokens, len(short) - unshown
                return

    def _cleaned(self, piece: str) -> str:
        """Clean up the text that is final."""
        searched = max(0, len(self._unclean) - 2)
        self._unclean += piece
        certain = max((match.end() for match in _CERTAIN.finditer(self._unclean, searched)), default=0)
        piece, self._unclean = self._unclean[:certain], self._unclean[certain:]
        tokenizer: Any = self._tokenizer
        return str(tokenizer.clean_up_tokenization(piece))


def _skipped(tokenizer: Any) -> Iterable[int]:
    """The tokens that decoding skips."""
    if not getattr(tokenizer, "is_fast", False):
        return cast(Iterable[int], tokenizer.all_special_ids)
    return [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]


def _cleans_up(tokenizer: Any) -> bool:
    """Whether decoding cleans up spaces; releases with the second option do so for BPE only if it is set."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    option = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_meant = type(model).__name__ != "BPE" or getattr(tokenizer, option, True)
    return bool(tokenizer.clean_up_tokenization_spaces and is_meant)
