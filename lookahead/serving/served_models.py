"""The models of a server: each is loaded once and decoded by its own loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from lookahead import LookaheadConfig, load, prepare_costs
from lookahead.errors import LookaheadError
from lookahead.serving.api_errors import ApiError
from lookahead.serving.decoding_loop import DecodingLoop
from lookahead.serving.requests import GenerationRequest
from lookahead.serving.translation import Translator

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
        self.loop = DecodingLoop(self.model, self.tokenizer, config=config, **decoding)
        self.translator = Translator(self.model, self.tokenizer, max_new_tokens, self.loop.most_outputs)
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile the kernels before the first request, for one row and for several."""
        ended, options = threading.Semaphore(0), {"max_new_tokens": 16, "do_sample": False}
        prompts = _WARM_UP[: self.loop.rows]
        for last in prompts:
            request = GenerationRequest(ids=[*range(1, 9)] * 4 + [last], options=options)
            self.loop.submit(request, lambda update: ended.release() if update.is_last else None)
        for _ in prompts:
            ended.acquire(timeout=_WARM_UP_S)


class ServedModels:
    """Loads the models of a server, each on a thread.

    Args:
        names: The models; the first is the default of requests.
        options: Further arguments of `ServedModel`.
    """

    def __init__(self, names: Sequence[str], **options: Any) -> None:
        self.names, self._options = tuple(names), options
        self._models: dict[str, Future[ServedModel]] = {name: Future() for name in self.names}
        for name, future in self._models.items():
            threading.Thread(target=self._load, args=(name, future), daemon=True).start()

    @property
    def is_loading(self) -> bool:
        """Whether a model is not loaded yet."""
        return not all(future.done() for future in self._models.values())

    @property
    def loaded(self) -> list[ServedModel]:
        """The loaded models."""
        done = [future for future in self._models.values() if future.done()]
        return [future.result() for future in done if future.exception() is None]

    def wait(self) -> ServedModel:
        """Wait for all models; returns the first, or raises the error of loading one."""
        first, *_ = [future.result() for future in self._models.values()]
        return first

    def get(self, name: str | None) -> Future[ServedModel]:
        """The model of a request, which may still be loading; ApiError if it is not served."""
        wanted = self.names[0] if name is None else name
        if wanted not in self._models:
            raise ApiError(
                404, f"model: must be one of {', '.join(map(repr, self.names))}, got {wanted[:100]!r}",
                param="model", code="model_not_found",
            )  # fmt: skip
        return self._models[wanted]

    def _load(self, name: str, future: Future[ServedModel]) -> None:
        try:
            future.set_result(ServedModel(name, **self._options))
        except BaseException as error:
            future.set_exception(error)

    def close(self) -> None:
        """End the outputs of all models."""
        for model in self.loaded:
            model.loop.close()
