"""The models of a server: each is loaded once, decoded by its own loop, and freed when another replaces it."""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from lookahead.backend.step_costs import prepare_costs
from lookahead.config import LookaheadConfig
from lookahead.drafting.select import BatchValue, Draft, fit
from lookahead.drafting.tree import TokenTree
from lookahead.errors import LookaheadError
from lookahead.loading.loading import load
from lookahead.serving.api_errors import ApiError
from lookahead.serving.decoding_loop import DecodingLoop
from lookahead.serving.requests import GenerationRequest
from lookahead.serving.translation import Translator

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # not a path: it does not start with a dot or slash
_MOST_OTHERS = 2  # maximum models at a time that were not named at the start of the server
_WARM_UP_S = 600.0
_WARM_UP = 1, 2, 3  # last tokens of prompts
_log = logging.getLogger(__name__)


class ServedModel:
    """A served model.

    Args:
        name: Its name in requests.
        config: How to draft.
        max_new_tokens: Maximum tokens of an output.
        loading: Options of `lookahead.load`.
        decoding: Options of `DecodingLoop`.
    """

    def __init__(
        self,
        name: str,
        *,
        config: LookaheadConfig | None,
        max_new_tokens: int,
        loading: dict[str, Any],
        decoding: dict[str, Any],
    ) -> None:
        self.name = name
        self.model, self.tokenizer = load(name, **loading)
        try:
            prepare_costs(self.model)
        except (LookaheadError, OSError) as error:  # transformers decodes it, or the costs are not saved
            _log.info("%s: %s", name, error)
        self.translator = Translator(self.model, self.tokenizer, max_new_tokens)
        self.loop = DecodingLoop(self.model, self.tokenizer, config=config, **decoding)
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile the kernels before the first request, for one row and for several."""
        _compile_passes_by_layers()
        ended, options = threading.Semaphore(0), {"max_new_tokens": 16, "do_sample": False}
        prompts = _WARM_UP[: self.loop.rows]
        for last in prompts:
            request = GenerationRequest(ids=[*range(1, 9)] * 4 + [last], options=options)
            self.loop.submit(request, lambda update: ended.release() if update.is_last else None)
        for _ in prompts:
            ended.acquire(timeout=_WARM_UP_S)


def _compile_passes_by_layers() -> None:
    """Compile the code of passes over several rows layer by layer, as used while a prompt is read."""
    tree = TokenTree.from_parents([1, 2], [0, 0])
    tree.ancestor_words()
    draft = Draft(tree, (), np.ones(2), np.zeros(2, np.int32))
    fit([draft, draft], np.ones(3), BatchValue.of([1, 1], np.arange(3.0), 0.5))


class ServedModels:
    """Loads models by name on threads, those in `names` immediately.

    Args:
        names: Models that are always served; the first is the default of requests.
        allow_any: Whether other models are loaded by their names on the Hub.
        options: Further arguments of `ServedModel`.

    Attributes:
        is_closed: Whether the models were told to end.
    """

    def __init__(self, names: Sequence[str], *, allow_any: bool = False, **options: Any) -> None:
        self.names, self._allow_any, self._options = tuple(names), allow_any, options
        self.is_closed = False
        self._lock = threading.Lock()
        self._models: OrderedDict[str, Future[ServedModel]] = OrderedDict()
        for name in self.names:
            self._begin(name)

    @property
    def is_loading(self) -> bool:
        """Whether a model in `names` is not loaded yet."""
        return not all(self._models[name].done() for name in self.names)

    @property
    def loaded(self) -> list[ServedModel]:
        """The loaded models."""
        with self._lock:
            futures = list(self._models.values())
        return [each.result() for each in futures if each.done() and each.exception() is None]

    def wait(self) -> ServedModel:
        """Wait for the models in `names`; returns the first, or raises the error of loading one."""
        loaded = [self._models[name].result() for name in self.names]
        return loaded[0]

    def get(self, name: str | None) -> Future[ServedModel]:
        """The model of a request, which may still be loading; ApiError if it is not served."""
        wanted = self.names[0] if name is None else name
        with self._lock:
            if wanted in self._models:
                self._models.move_to_end(wanted)
                return self._models[wanted]
            if not (self._allow_any and _NAME.fullmatch(wanted)) or Path(wanted).exists():
                raise ApiError(
                    404, f"model: must be one of {', '.join(map(repr, self.names))}, got {wanted[:100]!r}",
                    param="model", code="model_not_found",
                )  # fmt: skip
            gone = self._make_room()
            future = self._begin(wanted)
        if gone is not None:
            gone.result().loop.close()
        return future

    def _make_room(self) -> Future[ServedModel] | None:
        """Remove the least recently used idle model; ApiError if all are loading or have requests."""
        others = [each for each in self._models if each not in self.names]
        if len(others) < _MOST_OTHERS:
            return None
        idle = next((each for each in others if _is_idle(self._models[each])), None)
        if idle is None:
            raise ApiError(
                503, f"model: {len(others)} others are in use; try again later", headers={"Retry-After": "5"}
            )
        return self._models.pop(idle)

    def _begin(self, name: str) -> Future[ServedModel]:
        future: Future[ServedModel] = Future()
        self._models[name] = future
        threading.Thread(target=self._load, args=(name, future), daemon=True).start()
        return future

    def _load(self, name: str, future: Future[ServedModel]) -> None:
        try:
            future.set_result(ServedModel(name, **self._options))
        except BaseException as error:
            if name not in self.names:
                with self._lock:
                    self._models.pop(name, None)
            future.set_exception(error)

    def close(self) -> None:
        """End the outputs of all models."""
        self.is_closed = True
        for each in self.loaded:
            each.loop.close()


def _is_idle(future: Future[ServedModel]) -> bool:
    """Whether a model is loaded and has no requests."""
    if not future.done() or future.exception() is not None:
        return False
    figures = future.result().loop.figures()
    return not (figures["running"] or figures["waiting"])
