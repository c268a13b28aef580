"""Drafts of a smaller model that shares the target's vocabulary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.backend.choice import backend_for
from lookahead.backend.protocol import Backend, Shape
from lookahead.backend.support import support_of
from lookahead.config import check_whole
from lookahead.drafting.budget import PassTimes
from lookahead.drafting.proposal import BatchProposer, Call, Feedback, IntArray, Proposal, Proposer
from lookahead.errors import ConfigError, ProposerError, warn
from lookahead.loading.quantized import weight_count
from lookahead.model.facts import (
    decoder_vocabulary,
    uncompiled,
    validate_causal_lm,
    validate_model,
)
from lookahead.model.model_kind import kind_of
from lookahead.model.model_state import state_of
from lookahead.model.state_scope import mixers_of
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.plugins.draft_models.draft_tree import LEVELS, DraftTree, DraftTreeBatch
from lookahead.utils.fingerprints import tokenizer_fingerprint

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
class _DraftRow:
    ids: IntArray
    tree: DraftTree | None = None


class ModelProposer(BatchProposer):
    """The proposer of one call. Rows share the passes of the draft model, whose cache keeps accepted tokens.

    Args:
        draft: The draft model and its options.
        call: The call.
        state: The learned state of the draft model for the target.
        vocabulary: Number of token ids that both models know.
        shape: The shape that the draft model reads in one pass, trees or chains.
    """

    def __init__(self, draft: DraftModel, call: Call, state: DraftModelState, vocabulary: int, shape: Shape) -> None:
        self.sources = (draft.name,)
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
        self._rows: dict[int, _DraftRow] = {}
        self._slots: list[int] = []  # rows in the order of the model's passes
        self._backend: Backend | None = None  # of the draft model
        self._done: float | None = None  # end time of the drafts of this step

    def start(self, row: int, prompt: IntArray) -> None:
        self._rows[row] = _DraftRow(prompt.astype(np.int32))
        self._backend = None

    def propose_batch(self, rows: Sequence[int], max_nodes: int) -> list[Proposal | None]:
        """Draft for rows together; other rows of the call are drafted for as well."""
        backend = self._backend if self._backend is not None else self._open()
        if backend is None:
            return [None] * len(rows)
        for row in list(self._slots):
            if not self._can_read(row, backend):
                self._leave(row)
        offers: dict[int, Proposal] = {}
        # The target chooses the last token itself, so it is not drafted.
        shortest = min((len(self._rows[row].ids) for row in self._slots), default=0)
        passes = min(self._depth, self._max_length - shortest - 1)
        if self._slots and passes > 0:
            with backend.serving():
                proposals = self._grow(backend, max_nodes, passes)
            offers = dict(zip(self._slots, proposals, strict=True))
        self._done = time.perf_counter()
        return [offers.get(row) for row in rows]

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        if self._done is not None:
            self._pass_times().target.add(time.perf_counter() - self._done)
            self._done = None
        state = self._rows[row]
        tree, state.tree = state.tree, None
        if tree is not None and self._backend is not None:
            with torch.inference_mode():
                self._backend.cache.commit(self._slots.index(row), tree.learn(self._rates, feedback.tokens))
        state.ids = np.append(state.ids, feedback.tokens)

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
            inputs = kind.make_inputs(encoded)
            options = {"rows": len(self._slots), "capacity": capacity, "shape": self._shape, "make_inputs": inputs}
            self._backend = backend_for(self._model, **options)
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

    def _grow(self, backend: Backend, max_nodes: int, passes: int) -> list[Proposal]:
        """Read the new tokens of every row in a first pass, then grow their trees pass by pass."""
        begin = time.perf_counter()
        states = [self._rows[row] for row in self._slots]
        trees = [DraftTree(int(state.ids[-1])) for state in states]
        for state, tree in zip(states, trees, strict=True):
            state.tree = tree
        batch = DraftTreeBatch(
            trees,
            self._rates,
            max_nodes=max_nodes,
            width=self._width,
            children=self._children,
            vocabulary=self._vocabulary,
            warp=self._call.warp,
            by_rejection=self._call.by_rejection,
        )
        batch.add(backend.read([state.ids for state in states]))
        times, now = self._pass_times(), time.perf_counter()
        for _ in range(passes - 1):
            if self._call.is_timed and not times.pays(*batch.outlook(), now - begin):
                break
            before = batch.choose()
            if not any(tree.chosen.size for tree in trees):
                break
            batch.add(backend.score([tree.scored_tree() for tree in trees], scored=before))
            then, now = now, time.perf_counter()
            times.draft.add(now - then)
        return batch.proposals()

    def _pass_times(self) -> PassTimes:
        return self._times.setdefault((len(self._rows) - 1).bit_length(), PassTimes())
