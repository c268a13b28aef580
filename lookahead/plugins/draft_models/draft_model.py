"""Drafts of a smaller model that shares the target's vocabulary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.backend.choice import backend_for
from lookahead.backend.protocol import Backend, Shape
from lookahead.backend.support import support_of
from lookahead.config import check_whole
from lookahead.drafting.budget import PassTimes
from lookahead.drafting.proposal import BatchProposer, Call, Feedback, IntArray, Proposal, Proposer
from lookahead.drafting.select import Draft, merge
from lookahead.errors import ConfigError, ProposerError, warn
from lookahead.loading.quantized import weight_count
from lookahead.model.calls import kind_of
from lookahead.model.facts import (
    decoder_vocabulary,
    uncompiled,
    validate_causal_lm,
    validate_model,
)
from lookahead.model.model_state import state_of
from lookahead.model.state_scope import mixers_of
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.ngram.prune import Limits
from lookahead.plugins.draft_models.draft_tree import LEVELS, NO_TOKENS, DraftTree, DraftTreeBatch
from lookahead.utils.fingerprints import tokenizer_fingerprint

_MOST_UNREAD = 32  # tokens that are read with the root in one pass; more are read as a prompt
_MOST_DECLINED = 64  # steps in succession in which nothing is drafted since other sources promise more
_NODES_OF_OTHERS = 8  # of other sources, about as many as a pass verifies at little cost
_MOST_GUESSED = 4  # nodes of other sources that are scored with the root
_LEAST_GUESS = 0.3  # probability from which a node of other sources is scored with the root
_SHAPE = 8, 4  # children of a node, nodes scored per pass
_DRAWN_SHAPE = 3, 2


@dataclass(slots=True)
class DraftModelState:
    """Learned state of a draft model for one target."""

    rates: dict[str, AcceptanceTable] = field(default_factory=dict)  # by mode: greedy, sampled, drawn
    times: dict[int, PassTimes] = field(default_factory=dict)  # by batch size in powers of two
    shares_encoder: bool = False  # whether both encoders give the same output


class DraftModel:
    """A smaller model that drafts for a target, used in `LookaheadConfig.proposers`.

    It continues the text with its own KV cache and grows a tree best first: every pass scores the candidates most
    likely to be reached. With `draft="auto"` it stops when a further pass would cost more time than its tokens save.
    Its probabilities are calibrated while decoding. Several draft models in one configuration draft one tree together,
    as in SpecInfer.

    Example:
        >>> config = LookaheadConfig(proposers=("prompt", DraftModel(small)))  # doctest: +SKIP
        >>> lookahead.generate(large, tokenizer, "Once upon a time", config=config)  # doctest: +SKIP

    Args:
        model: Any HuggingFace causal LM with the tokenizer of the target, on any device and in any dtype. For an
            encoder-decoder target it may be one too: its encoder reads the input once, unless it has the weights of the
            target's encoder, as a distilled Whisper does.
        tokenizer: Its tokenizer, compared with the target's if that is known. If they are equal, the sizes of the
            embedding tables may differ.
        name: Its name in the stats.
        depth: Maximum passes of the draft model per step, which is the depth of the tree, 1 to 64.
        children: Candidates after every node, 1 to 16; 1 drafts chains. None means 8, or 3 with
            `acceptance="rejection"`, where every draw is a node of the draft.
        width: Candidates scored per pass, 1 to 64. None means 4, or 2 with `acceptance="rejection"`.

    Raises:
        ConfigError: An option is out of its range.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Chen et al. 2023,
        "Accelerating Large Language Model Decoding with Speculative Sampling"; Miao et al. 2024, "SpecInfer", §3
        (several small models, one tree); Li et al. 2024, "EAGLE-2", §4 (growing the most likely nodes).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "draft",
        depth: int = 8,
        children: int | None = None,
        width: int | None = None,
    ) -> None:
        model = uncompiled(model)
        if not hasattr(model, "get_input_embeddings"):
            raise ConfigError(
                f"DraftModel takes a loaded causal LM, got {model!r}: load it with AutoModelForCausalLM.from_pretrained"
            )
        for option, value, most in (("depth", depth, 64), ("children", children, 16), ("width", width, 64)):
            if value is not None or option == "depth":
                check_whole(option, value, 1, most)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"name must be a string that is not empty, got {name!r}")
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.depth = depth
        self.children = children
        self.width = width
        self.sharpness = 1  # as in `DraftTreeBatch`

    def __call__(self, call: Call) -> Proposer:
        """Make the proposer of one call; ProposerError if the model cannot draft for the target."""
        if call.inputs is None:
            validate_causal_lm(self.model, "draft for a causal one")
        validate_model(self.model)
        vocabulary = self._shared_vocabulary(call)
        name, has_encoder = type(self.model).__name__, kind_of(self.model).has_encoder
        if has_encoder and (own := self.model.main_input_name) != (read := call.model.main_input_name):
            raise ProposerError(
                f"{name} cannot draft: it reads {own}, and the target {read}; choose another draft model"
            )
        support = support_of(self.model, shortest=1, max_length=call.max_length, trusted=True)
        if support.shape == "none":
            raise ProposerError(f"{name} cannot draft: {support.reason}; choose another draft model")
        if mixers_of(self.model):  # drafted tokens are kept between passes, without states
            raise ProposerError(f"{name} cannot draft: its layers keep states; choose another draft model")
        if support.shape == "chains" and call.rows > 1:
            raise ProposerError(f"{name} cannot draft for {call.rows} prompts at once: {support.reason}")
        state = state_of(call.model).learned.of(self, partial(_begin, self.model, call.model))
        return ModelProposer(self, call, state, vocabulary, support.shape)

    def _shared_vocabulary(self, call: Call) -> int:
        """Number of token ids, from 0 on, that both models know."""
        own = decoder_vocabulary(self.model)
        if self.tokenizer is not None and call.tokenizer is not None:
            if tokenizer_fingerprint(self.tokenizer) != tokenizer_fingerprint(call.tokenizer):
                raise ProposerError(
                    f"the tokenizer of the draft model {self.name!r} gives other ids than the target's: choose a draft "
                    "model of the target's family, or train one with its tokenizer"
                )
        elif own != call.vocab_size:
            raise ProposerError(
                f"the draft model {self.name!r} knows {own} token ids and the target {call.vocab_size}: choose a draft "
                "model with the target's tokenizer. If it has that, and only the size of its table differs, say so: "
                "DraftModel(model, tokenizer=...), and lookahead.generate, or lookahead_tokenizer=... in model.generate"
            )
        return min(own, call.vocab_size)


def _begin(draft: PreTrainedModel, target: PreTrainedModel) -> DraftModelState:
    """The state of a draft model; warns of one that is larger than its target."""
    own, others = map(weight_count, (draft, target))
    if own > others and not (kind_of(draft).has_encoder or kind_of(target).has_encoder):
        warn(f"the draft model has {own:,} parameters and the target {others:,}: drafting with it will hardly pay")
    return DraftModelState(shares_encoder=kind_of(draft).shares_encoder(draft, target))


@dataclass(slots=True)
class DraftRow:
    """The text of a row, and its tree in a step."""

    ids: IntArray
    tree: DraftTree | None = None


class ModelProposer(BatchProposer):
    """The proposer of one call. Rows share the passes of the draft model, whose cache keeps accepted tokens.

    `vocabulary` is the number of token ids that both models know, and `shape` what the draft model reads in one pass.
    """

    def __init__(self, draft: DraftModel, call: Call, state: DraftModelState, vocabulary: int, shape: Shape) -> None:
        self.sources, self.reads_offers = (draft.name,), True
        self._sharpness = draft.sharpness
        self.reads_inputs = kind_of(draft.model).has_encoder
        self._model = draft.model
        self._call = call
        inputs = call.inputs if self.reads_inputs else None
        self._max_length = call.max_length - max(map(len, inputs or ((),)))
        self._vocabulary = vocabulary
        self._shape = shape
        self._depth = draft.depth
        children, width = _DRAWN_SHAPE if call.by_rejection else _SHAPE
        is_chain = shape == "chains" or call.is_chain
        self._children = 1 if is_chain else draft.children or children
        self._width = 1 if is_chain else draft.width or width
        mode = "drawn" if call.by_rejection else "greedy" if call.warp is None else "sampled"
        self._shares_encoder = state.shares_encoder
        self._rates = state.rates.setdefault(mode, AcceptanceTable(LEVELS))
        self._times = state.times
        self._rows: dict[int, DraftRow] = {}
        self._slots: list[int] = []  # rows in the order of the model's passes
        self._backend: Backend | None = None  # of the draft model
        self._done: float | None = None  # end time of the drafts of this step
        self._declined = 0  # steps in succession in which other sources promised more
        self._promised = 0.0  # tokens by other sources in such a step, 0 if this is none

    def start(self, row: int, prompt: IntArray) -> None:
        self._rows[row] = DraftRow(prompt.astype(np.int32))
        self._backend = None

    def propose_batch(
        self, rows: Sequence[int], max_nodes: int, offers: Sequence[Sequence[Proposal | None]] = ()
    ) -> list[Proposal | None]:
        """Draft for rows together; other rows of the call are drafted for as well.

        `offers` are the proposals of earlier proposers, by proposer and row: the most likely chain of a row is scored
        in the first pass, and if it promises more tokens per second than a draft of this model, nothing is drafted.
        """
        backend = self._ready(rows)
        if backend is None:
            return [None] * len(rows)
        guesses = self._guesses(rows, offers, max_nodes)
        if self._is_outdone(guesses):
            return [None] * len(rows)
        drafts: dict[int, Proposal] = {}
        if self._slots and (passes := self._most_passes(backend)) > 0:
            with backend.serving():
                proposals = self._grow(backend, max_nodes, passes, guesses)
            drafts = dict(zip(self._slots, proposals, strict=True))
        self._done = time.perf_counter()
        return [drafts.get(row) for row in rows]

    def _ready(self, rows: Sequence[int]) -> Backend | None:
        """The backend, with a cache of the rows that it can read; None if it can read none."""
        backend = self._backend if self._backend is not None else self._open()
        if backend is not None:
            for row in list(self._slots):
                if not self._can_read(row, backend):
                    self._leave(row)
        return backend

    def _most_passes(self, backend: Backend) -> int:
        """Most passes of a step: the target chooses the last token itself, so it is not drafted."""
        shortest = min(len(self._rows[row].ids) for row in self._slots)
        return min(self._depth, self._max_length - shortest - 1)

    def _unread(self, backend: Backend) -> list[IntArray]:
        """The tokens of every row that are not in its cache, the last token always among them."""
        read = backend.cache.slots.lengths
        return [self._rows[row].ids[read[slot] :] for slot, row in enumerate(self._slots)]

    def _guesses(
        self, rows: Sequence[int], offers: Sequence[Sequence[Proposal | None]], max_nodes: int
    ) -> dict[int, Draft]:
        """What other sources offer together for each row."""
        if self._call.by_rejection or not offers:
            return {}
        limits = Limits(min(max_nodes, _NODES_OF_OTHERS), self._max_length, 0.0, False, 0.0)
        of_rows = zip(rows, zip(*offers, strict=True), strict=True)
        return {row: merge(int(self._rows[row].ids[-1]), others, limits) for row, others in of_rows}

    def _is_outdone(self, guesses: dict[int, Draft]) -> bool:
        """Whether the drafts of other sources promise more tokens per second than those of this model gave."""
        if not self._call.is_timed or not guesses:
            return False
        promised = sum(float(draft.path_probs.sum()) for draft in guesses.values()) / len(guesses)
        if self._declined >= _MOST_DECLINED or self._pass_times().beats(promised, self._depth):
            self._declined = 0
            return False
        self._declined, self._promised = self._declined + 1, promised
        return True

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        if self._done is not None:
            self._pass_times().target.add(time.perf_counter() - self._done)
            self._done = None
        elif self._promised:
            self._pass_times().others.add(len(feedback.tokens) / self._promised)
            self._promised = 0.0
        state = self._rows[row]
        tree, state.tree = state.tree, None
        if tree is not None:
            self._keep(row, tree.learn(self._rates, self._pass_times().agreement, feedback.tokens))
        self._add(state, feedback.tokens)

    def _keep(self, row: int, path: IntArray) -> None:
        """Keep the KV of a path of a row's tree."""
        if self._backend is not None:
            with torch.inference_mode():
                self._backend.cache.commit(self._slots.index(row), path)

    def _add(self, state: DraftRow, tokens: IntArray) -> None:
        """Add emitted tokens to a row."""
        state.ids = np.append(state.ids, tokens)

    def finish(self, row: int) -> None:
        self._leave(row)
        del self._rows[row]

    def _open(self) -> Backend | None:
        """Create a cache for all current rows that the draft model can read; their tokens are read again."""
        self._slots, kind, encoded = list(self._rows), kind_of(self._model), None
        if self.reads_inputs:
            self._slots, encoded = kind.encode_for_drafts(
                self._model, self._call, self._slots, is_shared=self._shares_encoder
            )
        if self._slots:
            capacity = max(len(self._rows[row].ids) for row in self._slots) + 256
            inputs = partial(kind.make_inputs, encoded=encoded)
            options = {"rows": len(self._slots), "capacity": capacity, "shape": self._shape, "make_inputs": inputs}
            self._backend = backend_for(self._model, **options, is_draft=True)
        return self._backend

    def _can_read(self, row: int, backend: Backend) -> bool:
        """Whether the draft model knows all tokens of a row, and has positions for it and a draft."""
        ids, deepest = self._rows[row].ids, self._depth * (self._width if backend.counts_nodes else 1)
        if backend.positions is not None and len(ids) + deepest > backend.positions:
            return False
        return self._vocabulary == self._call.vocab_size or int(ids.max()) < self._vocabulary

    def _leave(self, row: int) -> None:
        if row not in self._slots:
            return
        slot, last = self._slots.index(row), self._slots.pop()
        if last != row:
            self._slots[slot] = last
        if self._backend is not None:
            with torch.inference_mode():
                self._backend.retire(slot)

    def _grow(self, backend: Backend, max_nodes: int, passes: int, guesses: dict[int, Draft]) -> list[Proposal]:
        """Read the new tokens of every row in a first pass, then grow their trees pass by pass."""
        begin = time.perf_counter()
        states, unread = [self._rows[row] for row in self._slots], self._unread(backend)
        # What an encoder has read joins a cache when `read` begins it.
        is_begun = not self.reads_inputs or bool(backend.cache.slots.lengths[: len(self._slots)].all())
        is_short = is_begun and max(map(len, unread)) <= _MOST_UNREAD
        for row, state, tokens in zip(self._slots, states, unread, strict=True):
            state.tree = DraftTree(tokens, self._guess_of(guesses.get(row))) if is_short else DraftTree(tokens[-1:])
        trees = [state.tree for state in states if state.tree is not None]
        batch = DraftTreeBatch(
            trees,
            self._rates,
            max_nodes=max_nodes,
            width=self._width,
            children=self._children,
            vocabulary=self._vocabulary,
            warp=self._call.warp,
            by_rejection=self._call.by_rejection,
            sharpness=self._sharpness,
        )
        times = self._pass_times()
        if is_short:
            logits = backend.score([tree.scored_tree() for tree in trees])
            columns = [logits[i, tree.root : len(tree.scored)] for i, tree in enumerate(trees)]
            logits = columns[0][None] if len(columns) == 1 else pad_sequence(columns, batch_first=True)
        else:
            logits = backend.read([state.ids for state in states])
        batch.add(logits)
        now = time.perf_counter()
        # The first pass of all compiles and packs.
        is_warm, times.is_warm = times.is_warm and not backend.is_cold, True
        if is_short and is_warm:
            times.draft.add(now - begin)
        for _ in range(passes - 1):
            if self._call.is_timed and not times.pays(*batch.outlook(), now - begin):
                break
            before = batch.choose()
            if not any(tree.chosen.size for tree in trees):
                break
            batch.add(backend.score([tree.scored_tree() for tree in trees], scored=before))
            then, now = now, time.perf_counter()
            if is_warm:
                times.draft.add(now - then)
        return batch.proposals()

    def _guess_of(self, draft: Draft | None) -> IntArray:
        """The tokens of the most likely chain of a draft that are worth a node of the first pass."""
        if draft is None:
            return NO_TOKENS
        tree, likely = draft.tree, draft.path_probs >= _LEAST_GUESS
        is_chain = np.arange(len(tree.tokens)) == tree.depths  # a draft is laid out with its most likely chain first
        size = int(np.argmin(np.append(is_chain & likely, False)))
        tokens = tree.tokens[1 : min(size, 1 + _MOST_GUESSED)]
        return tokens if not len(tokens) or int(tokens.max()) < self._vocabulary else NO_TOKENS

    def _pass_times(self) -> PassTimes:
        return self._times.setdefault((len(self._rows) - 1).bit_length(), PassTimes())
