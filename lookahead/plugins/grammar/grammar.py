"""Grammars for outputs: JSON schemas, regular expressions and context-free grammars, with llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import PreTrainedTokenizerBase

from lookahead.drafting.proposal import Proposal
from lookahead.errors import ConfigError, LogitsError, first_line
from lookahead.plugins.grammar.grammar_text import grammar_library, grammar_text
from lookahead.utils.seams import register
from lookahead.verification.per_row import ForcingProcessor, PerRow
from lookahead.verification.rules import end_tokens

_LEAST = 0.02  # nodes less likely to be reached are rarely verified, but cost as much to check
_LIKELY = 0.8  # probability of a likely token, measured with SmolLM2 and JSON schemas
_known: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()  # the `LLTokenizer`s of tokenizers
_making = Lock()  # they take half a second, and threads of a server want the first one together


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
        kinds = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
        named = [name for name, value in kinds.items() if value is not None]
        if len(named) != 1:
            raise ConfigError(f"pass one of json_schema, regex and grammar, got {' and '.join(named) or 'none'}")
        library = grammar_library()
        ends = _end_tokens(tokenizer, eos_token_id)
        tokens = _tokens_of(tokenizer, ends)
        text = grammar_text(named[0], kinds[named[0]], tokens)
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
        """Forbid the tokens that the grammar does not allow here; LogitsError if these are all, or it was broken."""
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
            int(ids[-1]), offers, Constraint(self._matcher, self._tokens, self._ends), max_nodes, max(_LEAST, least)
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


class Constraint:
    """The state of a grammar that moves along a draft tree."""

    def __init__(self, matcher: Any, tokens: Any, ends: frozenset[int]) -> None:
        self._matcher, self._tokens, self._ends = matcher, tokens, ends

    def push(self, token: int) -> bool:
        """Move past a token that does not end the output; False, without a move, if it is forbidden."""
        # An end is chosen from the scores before it: its node would add nothing.
        return token not in self._ends and _consume(self._matcher, self._tokens, token)

    def pop(self, count: int) -> None:
        """Move back by `count` tokens."""
        if count:
            self._matcher.rollback(count)

    def forced(self) -> list[int]:
        """The next tokens while only one is allowed at a time; they do not end the output."""
        return cast(list[int], self._matcher.compute_ff_tokens())

    def likely(self) -> list[int]:
        """At most one token: the common beginning of several allowed next tokens."""
        # A tokenizer rarely merges a quote with the following text, but mostly merges white space.
        beginning = self._matcher.compute_ff_bytes()
        return cast(list[int], self._tokens.tokenize_bytes(beginning)[:1]) if beginning.strip() else []


def _consume(matcher: Any, tokens: Any, token: int) -> bool:
    """Consume a token if it is allowed. A token beyond the vocabulary would put an `LLMatcher` in an error state."""
    is_allowed = token < tokens.vocab_size and bool(matcher.validate_tokens([token]))
    return is_allowed and bool(matcher.consume_token(token))


def _end_tokens(tokenizer: PreTrainedTokenizerBase, tokens: int | Sequence[int] | None) -> list[int]:
    """The end-of-sequence tokens; without one an output could not end where its grammar does."""
    ends = end_tokens(tokenizer.eos_token_id if tokens is None else tokens)
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

    with _making:
        tries, key = _known.setdefault(tokenizer, {}), (len(tokenizer), *ends)
        if key not in tries:
            try:
                tries[key] = from_tokenizer(fast, eos_token=list(ends))
            except Exception as error:
                raise ConfigError(f"llguidance does not know this kind of tokenizer: {first_line(error)}") from error
        return tries[key]


def constrain(
    root: int, offers: Sequence[Proposal | None], constraint: Constraint, max_nodes: int, least: float = 0.0
) -> tuple[list[Proposal | None], Proposal | None]:
    """Cut forbidden nodes from the proposals of a row, and propose the tokens forced after their nodes.

    A cut node gets the probability 0; a required one stays. Nodes reached with a probability below `least` are not
    checked.

    Args:
        root: The row's last token.
        offers: The proposals, None for an empty one; they are not modified.
        constraint: The constraint with its state after `root`, which is restored at the end.
        max_nodes: Maximum nodes added, and maximum nodes checked.
        least: Minimum probability of reaching a node to check it.

    Returns:
        The proposals without the cut nodes, and a proposal of the forced and likely tokens (source 0) with the nodes
        before them (no source), or None if there are none.
    """
    tree, placed = _Tree(root), list[list[int]]()
    for offer in offers:
        placed.append([] if offer is None else tree.take_in(offer))
    is_cut, is_forced = _walk(tree, constraint, max_nodes, least)
    if is_cut:
        offers = [
            offer if offer is None else _without(offer, [node in is_cut for node in nodes])
            for offer, nodes in zip(offers, placed, strict=True)
        ]
    return list(offers), tree.leading_to(is_forced) if is_forced else None


class _Tree:
    """Proposals merged by prefix; node 0 is their root."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [0], [0]
        self.chances = [1.0]  # probability given the parent
        self.children: list[dict[int, int]] = [{}]

    def child(self, parent: int, token: int, chance: float) -> int:
        """The child of a node with a token, created if missing."""
        node = self.children[parent].get(token)
        if node is None:
            node = self.children[parent][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.chances.append(chance)
            self.children.append({})
        else:
            self.chances[node] = max(self.chances[node], chance)
        return node

    def take_in(self, offer: Proposal) -> list[int]:
        """Add a proposal; returns the node of each of its nodes."""
        nodes = [0]
        columns = offer.tokens.tolist(), offer.parents.tolist(), offer.probabilities.tolist()
        for token, parent, chance in list(zip(*columns, strict=True))[1:]:
            nodes.append(self.child(nodes[parent], token, chance))
        return nodes

    def leading_to(self, forced: set[int]) -> Proposal:
        """The proposal of `forced` nodes and their ancestors."""
        kept = set[int]()
        for node in forced:
            while node not in kept:
                kept.add(node)
                node = self.parents[node]
        nodes = sorted(kept | {0})
        places = {node: place for place, node in enumerate(nodes)}
        return Proposal(
            np.array([self.tokens[node] for node in nodes], np.int32),
            np.array([places[self.parents[node]] for node in nodes], np.int32),
            np.array([self.chances[node] for node in nodes], np.float32),
            np.array([node in forced for node in nodes], np.int32),
        )


def _walk(tree: _Tree, constraint: Constraint, max_nodes: int, least: float) -> tuple[set[int], set[int]]:
    """Walk a tree depth first, most likely child first, and add forced tokens; returns the cut and forced nodes."""
    is_cut, is_forced = set[int](), set[int]()
    stack, depth, visits = [(0, 1.0)], 0, 0
    while stack and visits <= max_nodes and len(is_forced) < max_nodes:
        node, reached = stack.pop()
        visits += 1
        if node:
            constraint.pop(depth - tree.depths[node] + 1)
            depth = tree.depths[node] - 1
            if not constraint.push(tree.tokens[node]):
                is_cut.add(node)
                is_forced.discard(node)
                continue
            depth += 1
        for token in constraint.forced()[: max_nodes - len(is_forced)]:
            is_cut |= {other for drafted, other in tree.children[node].items() if drafted != token}
            node = tree.child(node, token, 1.0)
            is_forced.add(node)
            constraint.push(token)
            depth += 1
        for token in constraint.likely():
            is_forced.add(tree.child(node, token, _LIKELY))
        behind = [(child, reached * tree.chances[child]) for child in tree.children[node].values()]
        stack += sorted((node for node in behind if node[1] >= least), key=lambda node: node[1])
    constraint.pop(depth)
    return is_cut, is_forced


def _without(offer: Proposal, is_cut: list[bool]) -> Proposal:
    """The proposal with cut nodes set to probability 0."""
    if not any(is_cut):
        return offer
    return offer._replace(probabilities=np.where(is_cut, np.float32(0.0), offer.probabilities))


register("processor", "grammar", Grammar)
