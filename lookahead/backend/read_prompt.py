"""Reading prompts in their own cache, apart from the batch that they join, and reusing the KV of earlier prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.backend.choice import backend_for
from lookahead.backend.probes import continues_texts
from lookahead.backend.prompt_groups import Alike, shared_tokens
from lookahead.backend.protocol import BitPolicy, OnPrefill
from lookahead.backend.self_check import keeps_solo_bits, packs_prompts, shares_beginnings
from lookahead.drafting.tree import IntArray
from lookahead.kernels.prompt_attention import tokens_alike
from lookahead.model.cache import TreeCache
from lookahead.model.calls import kind_of
from lookahead.model.facts import may_keep_states, prefills_at_once
from lookahead.model.model_state import recognise, state_of
from lookahead.model.slots import RowCopy, RowStates
from lookahead.model.state_scope import mixers_of

_FEWEST_TOKENS = 16  # shortest prefix worth copying


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt read into a cache of one row, and the logits after it.

    Attributes:
        cache: The cache; its row has committed all tokens but the last.
        logits: The logits after the last token, `[1, 1, vocab]`.
        reused: Tokens that were copied from an earlier prompt instead of read.
        is_whole: Whether it was read in one pass, as transformers does.
    """

    cache: TreeCache
    logits: Tensor
    reused: int
    is_whole: bool

    @property
    def tokens(self) -> int:
        """Length of the prompt in tokens."""
        return int(self.cache.slots.lengths[0]) + 1

    def kv(self) -> RowCopy:
        """Views of its keys and values, `[heads, tokens, dim]` each."""
        layers = ((at, layer) for at, layer in enumerate(self.cache.layers) if layer.is_initialized)
        kv, origin = {at: _views(layer, self.tokens) for at, layer in layers}, self.cache.slots.origins[0]
        return RowCopy(kv, {}, self.tokens, origin)

    def copy_to(self, cache: TreeCache, row: int) -> Tensor:
        """Copy the prompt into an empty row of another cache; returns the logits."""
        _fill(cache, row, self.kv(), self.tokens)
        cache.hold_root(row)
        return self.logits


class Prefix(NamedTuple):
    """The longest beginning of a prompt in a store.

    Attributes:
        held: Keys and values of a text, `[heads, tokens, dim]`; None if nothing is shared.
        tokens: Length of the shared prefix in tokens.
        keeps_bits: Whether the rest of the prompt is read with the bits that it has in a pass over the whole prompt.
    """

    held: RowCopy | None
    tokens: int
    keeps_bits: bool = False

    def copy_to(self, cache: TreeCache, row: int) -> None:
        """Copy the prefix into an empty row of a cache."""
        if self.held is not None:
            _fill(cache, row, self.held, self.tokens)

    def cut(self) -> RowCopy:
        """Views of the keys and values of the shared tokens."""
        assert self.held is not None
        kv = {at: (keys[:, : self.tokens], values[:, : self.tokens]) for at, (keys, values) in self.held.kv.items()}
        return self.held._replace(kv=kv, tokens=self.tokens)


def _views(layer: Any, tokens: int) -> RowStates:
    keys, values = (states[0, :tokens].transpose(0, 1) for states in (layer.keys, layer.values))
    return keys, values


def _fill(cache: TreeCache, row: int, copy: RowCopy, tokens: int) -> None:
    last = max(copy.kv, default=-1)

    def states() -> Iterator[RowStates | None]:
        for at in range(last + 1):
            pair = copy.kv.get(at)
            yield None if pair is None else (pair[0][:, :tokens], pair[1][:, :tokens])

    cache.copy_prefix_from(row, states(), tokens, copy.origin)
    for at, of_layer in copy.states.items():
        cache.layers[at].committed[row] = dict(of_layer)


class ReadingAhead:
    """Reads prompts one after another, each in its own cache, for models whose only state is keys and values.

    One thread at a time may use it.

    Args:
        model: The model.
        store: Prefixes of earlier prompts; prompts read here are added.
        options: Options of `lookahead.backend.choice.backend_for`.
    """

    def __init__(self, model: PreTrainedModel, store: PrefixStore, options: Mapping[str, Any]) -> None:
        self._backend = backend_for(model, rows=1, capacity=1, shape="trees", **options)
        self._store = store

    def read(self, ids: IntArray, salt: str = "", on_prefill: OnPrefill | None = None) -> ReadPrompt:
        """Read a prompt, int32 `[tokens]`, after its longest prefix in the store with the same `salt`."""
        backend = self._backend
        backend.begin(len(ids))
        with backend.serving():
            prefix = self._store.longest(ids, salt)
            prefix.copy_to(backend.cache, 0)
            logits = backend.read([ids], as_whole=prefix.keeps_bits, on_prefill=on_prefill)
            is_whole = backend.is_read_whole and (prefix.keeps_bits or not prefix.tokens)
            read = ReadPrompt(backend.cache, logits, prefix.tokens, is_whole)
            if is_whole or not self._store.keeps_bits:
                self._store.put(ids, read.kv(), salt)
        return read


class PrefixStore:
    """Keys and values of texts, from which later prompts copy a shared prefix. Threads may share it.

    Texts of models with recurrent layers also hold the states after their last token: a prompt can use such a text only
    if it begins with all of it, as the next turn of a chat does.

    Args:
        most_bytes: Size limit in bytes; the least recently used text is dropped first. 0 keeps nothing.
        keeps_bits: Whether prompts copy only tokens whose bits in half precision do not depend on what follows them in
            a text. The texts must be prompts: passes over single tokens compute other bits.

    Attributes:
        newest: The number of texts that were put.
    """

    def __init__(self, most_bytes: int, *, keeps_bits: bool = False) -> None:
        self.most_bytes, self.keeps_bits, self._lock = most_bytes, keeps_bits, Lock()
        # A product of one token has other bits than those of several.
        self._fewest_left = 2 if keeps_bits else 1
        self._alike: Alike = tokens_alike if keeps_bits else min
        # By number: the tokens, their KV, its bytes, and the salt.
        self._texts: OrderedDict[int, tuple[IntArray, RowCopy, int, str]] = OrderedDict()
        self.newest = 0

    @property
    def nbytes(self) -> int:
        """Size of the stored texts in bytes."""
        with self._lock:
            return sum(nbytes for _, _, nbytes, _ in self._texts.values())

    def longest(self, ids: IntArray, salt: str = "") -> Prefix:
        """The text of that salt with the longest common prefix; some tokens of the prompt are left to read."""
        with self._lock:
            shared = {
                key: self._usable(tokens, ids, is_whole=bool(copy.states))
                for key, (tokens, copy, _, owner) in self._texts.items()
                if owner == salt
            }
            best = max(shared, key=shared.__getitem__, default=None)
            if best is None or shared[best] < _FEWEST_TOKENS:
                return Prefix(None, 0)
            self._texts.move_to_end(best)
            return Prefix(self._texts[best][1], min(shared[best], len(ids) - self._fewest_left), self.keeps_bits)

    def _usable(self, text: IntArray, ids: IntArray, *, is_whole: bool) -> int:
        """How many tokens of a text a prompt may copy; all or none if `is_whole`."""
        shared = self._alike(shared_tokens(text, ids), len(text), len(ids))
        return shared if not is_whole or shared == len(text) < len(ids) else 0

    def put(self, ids: IntArray, copy: RowCopy, salt: str = "") -> None:
        """Keep the KV of a text for prompts of that salt; it replaces their texts that are a prefix of it."""
        nbytes = sum(states.nbytes for pair in copy.kv.values() for states in pair)
        nbytes += sum(state.nbytes for of_layer in copy.states.values() for state in of_layer.values())
        if len(ids) < _FEWEST_TOKENS or nbytes > self.most_bytes or not nbytes:
            return
        with self._lock:
            texts = [(key, tokens) for key, (tokens, _, _, owner) in self._texts.items() if owner == salt]
            for key, tokens in texts:
                if shared_tokens(tokens, ids) == len(tokens):
                    del self._texts[key]
                elif shared_tokens(tokens, ids) == len(ids):
                    return
            self.newest += 1
            self._texts[self.newest] = ids, copy, nbytes, salt
        self.limit(self.most_bytes)

    def limit(self, most_bytes: int) -> None:
        """Keep at most `most_bytes` bytes from now on."""
        with self._lock:
            self.most_bytes = most_bytes
            while sum(nbytes for _, _, nbytes, _ in self._texts.values()) > most_bytes:
                self._texts.popitem(last=False)


def prefixes_of(model: PreTrainedModel, most_bytes: int, *, rounds: bool = False) -> PrefixStore:
    """The store of a model, shared by all its calls, for its weights and code as it was last recognised.

    It keeps nothing for encoder-decoder models, models that cannot continue from states, and models with weights that
    cannot be read. In half precision it keeps nothing either if copies change bits.

    Args:
        model: The model.
        most_bytes: Bytes that the store may take from now on.
        rounds: Whether copies may change bits in half precision, and so tokens.
    """
    plan = state_of(model).plan or recognise(model)
    keeps_bits = not rounds and model.dtype in (torch.bfloat16, torch.float16)
    if plan.prefixes is None or plan.prefixes.keeps_bits != keeps_bits:
        plan.prefixes = PrefixStore(0, keeps_bits=keeps_bits)
    store: PrefixStore = plan.prefixes
    copies = not (kind_of(model).has_encoder or prefills_at_once(model))
    is_here = all(
        parameter.numel() and not parameter.is_meta for parameter in model.parameters()
    )  # not with weights elsewhere
    copies = copies and not plan.user_code and is_here
    copies = copies and (reads_apart(model) or (not keeps_bits and continues_texts(model)))
    if copies and keeps_bits and most_bytes:
        copies = packs_prompts(model, BitPolicy.SOLO) and keeps_solo_bits(model) and shares_beginnings(model)
    store.limit(most_bytes if copies else 0)
    return store


def reads_apart(model: PreTrainedModel) -> bool:
    """Whether a prompt may be read in its own cache, because its only state is keys and values."""
    return not (may_keep_states(model) and bool(mixers_of(model)))
