"""Grammars for outputs: JSON schemas, regular expressions and context-free grammars, with llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import PreTrainedTokenizerBase

from lookahead.drafting.proposal import Proposal
from lookahead.errors import ConfigError, LogitsError, first_line
from lookahead.plugins.grammar.constrain import Constraint, constrain
from lookahead.plugins.grammar.grammar_text import grammar_library, grammar_text
from lookahead.utils.seams import register
from lookahead.verification.per_row import ForcingProcessor, PerRow
from lookahead.verification.stopping import end_tokens

_LEAST = 0.02  # nodes less likely to be reached are rarely verified, but cost as much to check
_known: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()  # the `LLTokenizer`s of tokenizers


class Grammar(PerRow):
    """A logits processor that makes outputs follow a grammar: it allows only tokens that continue it.

    An end-of-sequence token is allowed exactly where the grammar can end, and is the only allowed token where the
    grammar must end. Forced tokens are drafted. transformers' own loop gives the same tokens without drafts.

    Args:
        tokenizer: The model's tokenizer, a fast one of bytes or with bytes as a fallback.
        json_schema: A JSON schema, as a dict, as text, or as a pydantic model class. JSON is written as by
            `json.dumps`, with one space after commas and colons, unless the schema has other options of llguidance
            under `"x-guidance"`, such as `{"whitespace_flexible": True}`.
        regex: A regular expression that the whole output matches, without lookaround and references, as in Rust.
        grammar: A context-free grammar in llguidance's dialect of Lark, with the start rule `start`.
        eos_token_id: The end-of-sequence tokens, as for `model.generate`; None for the tokenizer's.

    Example:
        `model.generate(**inputs, logits_processor=[lookahead.Grammar(tokenizer, regex="yes|no")])`

    Raises:
        ConfigError: There is not exactly one grammar, it is invalid, llguidance is not installed, or it does not
            support the tokenizer.

    Source: M. Moskal et al. 2025, llguidance, https://github.com/guidance-ai/llguidance.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> None:
        given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
        named = [name for name, each in given.items() if each is not None]
        if len(named) != 1:
            raise ConfigError(f"pass one of json_schema, regex and grammar, got {' and '.join(named) or 'none'}")
        library = grammar_library()
        ends = _end_tokens(tokenizer, eos_token_id)
        tokens = _tokens_of(tokenizer, ends)
        text = grammar_text(named[0], given[named[0]], tokens)
        self._start = library.LLMatcher(tokens, text, log_level=0)
        super().__init__(lambda: GrammarProcessor(self._start.deep_copy(), tokens, ends))


class GrammarProcessor(ForcingProcessor):
    """The grammar of one row, called with its ids `[1, tokens]` and scores `[1, vocab]` once for every new token.

    It owns `matcher`, an `LLMatcher` at the start of the grammar, made with the `LLTokenizer` `tokens`.
    """

    def __init__(self, matcher: Any, tokens: Any, ends: Sequence[int]) -> None:
        self._matcher, self._tokens, self._ends = matcher, tokens, frozenset(ends)
        self._length = 0  # ids seen so far, the prompt included
        self._has_ended = False
        self._error: LogitsError | None = None  # raised again by all later calls

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        """Forbid all tokens that the grammar does not allow here.

        Raises:
            LogitsError: The grammar does not allow the previous token, allows no remaining token, or exceeded a limit
                of llguidance.
        """
        self._follow(input_ids[0])
        vocabulary = scores.shape[-1]
        if self._has_ended:
            allowed = np.zeros(vocabulary, np.uint8)
            allowed[[token for token in self._ends if token < vocabulary]] = 1
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, count=vocabulary, bitorder="little")  # 0 beyond the tokenizer's vocabulary
            self._raise_error()
        is_forbidden = torch.from_numpy(allowed == 0).to(scores.device)
        scores = cast(FloatTensor, scores.masked_fill(is_forbidden, float("-inf")))
        if not self._has_ended and bool(scores.max() == float("-inf")):
            raise LogitsError("other processors forbid all that the grammar allows")
        return scores

    def constrain(
        self, ids: Tensor, offers: Sequence[Proposal | None], max_nodes: int, least: float
    ) -> tuple[list[Proposal | None], Proposal | None]:
        """See `ForcingProcessor.constrain`.

        If the grammar cannot continue, it drafts nothing; choosing the next token raises the error.
        """
        try:
            self._follow(ids)
        except LogitsError:
            return list(offers), None
        if self._has_ended:
            return list(offers), None
        return constrain(
            int(ids[-1]), offers, _Place(self._matcher, self._tokens, self._ends), max_nodes, max(_LEAST, least)
        )

    def _follow(self, ids: Tensor) -> None:
        """Consume the tokens that are new since the last call; the first call's tokens are the prompt."""
        if self._error is not None:
            raise self._error
        new = ids[self._length :].tolist() if self._length else []
        self._length = len(ids)
        for token in new:
            self._has_ended = self._has_ended or token in self._ends
            if self._has_ended:
                return
            if _consume(self._matcher, self._tokens, token):
                continue
            if token < self._tokens.vocab_size and self._tokens.is_special_token(token):
                self._has_ended = True  # padding: the row ended for another reason
            else:
                self._raise_error()
                self._error = LogitsError(f"the grammar does not allow token {token}, which was chosen all the same")
                raise self._error

    def _raise_error(self) -> None:
        """Raise the error of the library, which does not raise it itself."""
        if self._matcher.is_error():
            reason = first_line(Exception(self._matcher.get_error()))
            self._error = LogitsError(f"the grammar cannot be followed: {reason}")
            raise self._error


class _Place(Constraint):
    """The state of a grammar that moves along a draft tree."""

    def __init__(self, matcher: Any, tokens: Any, ends: frozenset[int]) -> None:
        self._matcher, self._tokens, self._ends = matcher, tokens, ends

    def push(self, token: int) -> bool:
        # An end is chosen from the scores before it: its node would add nothing.
        return token not in self._ends and _consume(self._matcher, self._tokens, token)

    def pop(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def forced(self) -> list[int]:
        return cast(list[int], self._matcher.compute_ff_tokens())

    def likely(self) -> list[int]:
        # A tokenizer rarely merges a quote with the following text, but mostly merges white space.
        beginning = self._matcher.compute_ff_bytes()
        return cast(list[int], self._tokens.tokenize_bytes(beginning)[:1]) if beginning.strip() else []


def _consume(matcher: Any, tokens: Any, token: int) -> bool:
    """Consume a token if it is allowed. A token beyond the vocabulary would put an `LLMatcher` in an error state."""
    is_allowed = token < tokens.vocab_size and bool(matcher.validate_tokens([token]))
    return is_allowed and bool(matcher.consume_token(token))


def _end_tokens(tokenizer: PreTrainedTokenizerBase, given: int | Sequence[int] | None) -> list[int]:
    """The end-of-sequence tokens; without one an output could not end where its grammar does."""
    ends = end_tokens(tokenizer.eos_token_id if given is None else given)
    if not ends or not all(isinstance(end, int) and 0 <= end < len(tokenizer) for end in ends):
        raise ConfigError(
            f"eos_token_id must be one or more tokens of the tokenizer for outputs that follow a grammar, 0 to "
            f"{len(tokenizer) - 1}, got {ends or None}"
        )
    return ends


def _tokens_of(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> Any:
    """The `LLTokenizer` of a tokenizer, cached for its lifetime; tokens may be added to it meanwhile."""
    if not tokenizer.is_fast:
        raise ConfigError(f"grammars need a fast tokenizer, got {type(tokenizer).__name__}")
    from llguidance.hf import from_tokenizer

    fast: Any = tokenizer

    known, key = _known.setdefault(tokenizer, {}), (len(tokenizer), *ends)
    if key not in known:
        try:
            known[key] = from_tokenizer(fast, eos_token=list(ends))
        except Exception as error:
            raise ConfigError(f"llguidance does not know this kind of tokenizer: {first_line(error)}") from error
    return known[key]


register("processor", "grammar", Grammar)
