"""The models of a server: each is loaded once and decoded by its own loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead import LookaheadConfig, load, prepare_costs
from lookahead.decoding.transcription import check_speech
from lookahead.errors import ConfigError, LookaheadError
from lookahead.loading.loading import load_processor
from lookahead.serving.api_errors import ApiError
from lookahead.serving.decoding_loop import DecodingLoop
from lookahead.serving.requests import GenerationRequest
from lookahead.serving.translation import Translator

_WARM_UP_S = 600.0
_WARM_UP = 1, 2, 3  # last tokens of prompts
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HearingModel:
    """A served model that transcribes sound, with its processor."""

    name: str
    model: Any
    processor: Any
    config: LookaheadConfig | None


class ServedModel:
    """A served model that writes text.

    Args:
        name: Its name in requests.
        loaded: The model and its tokenizer.
        config: How to draft.
        max_new_tokens: Maximum tokens of an output.
        decoding: Options of `DecodingLoop`.
        plain_user_text: As in `Translator`.
        processor: As in `Translator`.
    """

    def __init__(
        self,
        name: str,
        loaded: tuple[Any, Any],
        *,
        config: LookaheadConfig | None,
        max_new_tokens: int,
        decoding: dict[str, Any],
        plain_user_text: bool = False,
        processor: Any = None,
    ) -> None:
        self.name = name
        self.model, self.tokenizer, self.processor = *loaded, processor
        try:
            prepare_costs(self.model)
        except (LookaheadError, OSError) as error:  # transformers decodes it, or the costs are not saved
            _log.info("%s: %s", name, error)
        self.loop = DecodingLoop(self.model, self.tokenizer, config=config, **decoding)
        arguments = self.model, self.tokenizer, max_new_tokens, self.loop.most_outputs
        self.translator = Translator(*arguments, plain_user_text=plain_user_text, processor=processor)
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
        sources: The models, as `lookahead.load` takes them; the first is the default of requests.
        names: Their names in requests; None for theirs, or those of their folders.
        loading: Options of `lookahead.load`.
        options: Further arguments of `ServedModel`.

    Raises:
        ConfigError: There is not a name of its own for each model.
    """

    def __init__(
        self, sources: Sequence[str], names: Sequence[str] | None = None, *, loading: dict[str, Any], **options: Any
    ) -> None:
        self.names = tuple(names or map(_name_of, sources))
        if len({*self.names}) != len(sources) or len(self.names) != len(sources):
            raise ConfigError(f"every model needs a name of its own, got {', '.join(self.names)}")
        self._loading, self._options, self._created = loading, options, int(time.time())
        self._models: dict[str, Future[Any]] = {name: Future() for name in self.names}
        for name, source in zip(self.names, sources, strict=True):
            threading.Thread(target=self._load, args=(name, source), daemon=True).start()

    @property
    def is_loading(self) -> bool:
        """Whether a model is not loaded yet."""
        return not all(future.done() for future in self._models.values())

    @property
    def loaded(self) -> list[ServedModel]:
        """The loaded models that write text."""
        done = [future for future in self._models.values() if future.done() and future.exception() is None]
        return [model for future in done if isinstance(model := future.result(), ServedModel)]

    def wait(self) -> Any:
        """Wait for all models; returns the first, or raises the error of loading one."""
        first, *_ = [future.result() for future in self._models.values()]
        return first

    def get(self, name: str | None) -> Future[Any]:
        """The model of a request, which may still be loading; ApiError if it is not served."""
        wanted = self.names[0] if name is None else name
        if wanted not in self._models:
            raise ApiError(
                404, f"model: must be one of {', '.join(map(repr, self.names))}, got {wanted[:100]!r}",
                param="model", code="model_not_found",
            )  # fmt: skip
        return self._models[wanted]

    def described(self, name: str) -> dict[str, Any]:
        """A model as `/v1/models` lists it; its context is known once it is loaded. ApiError if it is not served."""
        self.get(name)
        context = next((model.translator.context for model in self.loaded if model.name == name), None)
        length = {} if context is None else {"max_model_len": context}
        return {"id": name, "object": "model", "created": self._created, "owned_by": "lookahead", **length}

    def _load(self, name: str, source: str) -> None:
        try:
            model, tokenizer = load(source, **self._loading)
            if hasattr(tokenizer, "feature_extractor"):
                check_speech(model, name)
                self._models[name].set_result(HearingModel(name, model, tokenizer, self._options["config"]))
            else:
                options = {**self._options, "processor": load_processor(source)}
                self._models[name].set_result(ServedModel(name, (model, tokenizer), **options))
        except BaseException as error:
            self._models[name].set_exception(error)

    def close(self) -> None:
        """End the outputs of all models."""
        for model in self.loaded:
            model.loop.close()


def _name_of(source: str) -> str:
    """The name of a model in requests: paths of this machine are not shown."""
    path = Path(source)
    return path.resolve().name if path.exists() else source
