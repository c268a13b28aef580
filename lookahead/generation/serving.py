"""The OpenAI-compatible server of transformers, with every model that it loads decoded speculatively."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState

from lookahead.backend.step_costs import prepare_costs
from lookahead.config import LookaheadConfig
from lookahead.errors import ConfigError, UnsupportedModelError, first_line, warn
from lookahead.generation.enable import Generate, enable
from lookahead.hf.checkpoints import load_weights
from lookahead.hf.loading import load, locate_model, prepare_files, resolve_device, resolve_dtype
from lookahead.hf.quantized import OWN_BLOCKS, resolve_quantize

if TYPE_CHECKING:
    import uvicorn

_PACKAGES = ("accelerate", "fastapi", "openai", "pydantic", "uvicorn")
_NEWEST_MODULE = "transformers.cli.serving.systemone"  # of those that `make_server` imports


class EnabledModels(ModelManager):
    """Loads models for the server by the names that `lookahead.load` takes, and enables each of them.

    The model to `preload` is loaded at once, and listed first; with `only` no other is served, and it stays in memory.
    `dtype`, `device` and `quantize` are as for `lookahead.load`.
    """

    def __init__(
        self,
        preload: str,
        *,
        only: bool = False,
        config: LookaheadConfig | None = None,
        dtype: str = "auto",
        device: str | None = None,
        quantize: str | None = None,
        timeout_s: int = 300,  # without a request, after which a model is unloaded
    ) -> None:
        self._preload, self._config = preload, config
        target = resolve_device(device)
        self._dtype, self._quantize = dtype, quantize
        self._quantization = resolve_quantize(quantize, target)
        super().__init__(
            device=str(target),
            dtype=str(resolve_dtype(dtype, target, quantize)).removeprefix("torch."),
            model_timeout=timeout_s,
            force_model=preload if only else None,
        )
        model, _ = self.load_model_and_processor(preload)
        self.first: PreTrainedModel = model
        if isinstance(model.generate, Generate):
            # Compile the kernels before the first request.
            model.generate(torch.arange(1, 9, device=model.device).repeat(1, 4), max_new_tokens=16, do_sample=False)

    def get_quantization_config(self) -> Any:
        """How models are quantized while they are loaded."""
        return self._quantization

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name as the client wrote it: responses repeat it."""
        return model_id

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        """The models that can be asked for: those loaded, and the Hub's cache unless one model is served alone."""
        from huggingface_hub.errors import CacheNotFound

        names = dict.fromkeys([self._preload, *self.loaded_models])
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": ""} for name in names]
        if self.force_model is None:
            with suppress(CacheNotFound):
                listed += ModelManager.get_gen_models(cache_dir)
        return listed

    def _load_processor(self, *args: Any, **options: Any) -> Any:
        return self._load(super()._load_processor, *args, **options)

    def _load_model(self, *args: Any, **options: Any) -> PreTrainedModel:
        model: PreTrainedModel
        if self._quantize == OWN_BLOCKS:
            model = load(args[0].partition("@")[0], dtype=self._dtype, device="cpu", quantize=OWN_BLOCKS).model
        else:
            model = self._load(super()._load_model, *args, **options)
        if self._quantize != OWN_BLOCKS and options.get("gguf_file") is None:
            self._load(partial(_check_weights, type(model)), args[0])
        try:
            enable(model, self._config)
            prepare_costs(model)
        except UnsupportedModelError as error:
            warn(f"{args[0]} is decoded by transformers alone: {error}")
        except OSError as error:
            warn(f"what steps cost is not kept for the next time: {error}")
        return model

    def _load(self, load: Callable[..., Any], model_id: str, gguf_file: str | None = None, **options: Any) -> Any:
        """Load a model or a tokenizer, named as for `lookahead.load`, or `NAME@REVISION` on the Hub."""
        name, _, revision = model_id.partition("@")
        if gguf_file is None:
            name = prepare_files(locate_model(name)[0], self._quantize)
        try:
            return load(f"{name}@{revision or 'main'}", gguf_file=gguf_file, **options)
        except Exception as error:  # dozens of unrelated types, as in `lookahead.load`
            raise UnsupportedModelError(f"model {model_id!r} cannot be loaded: {first_line(error)}") from error


def _check_weights(model_class: Any, model_id: str, **options: Any) -> None:
    """Check the tensors of a checkpoint that transformers has loaded, by names and shapes, without their numbers."""
    name, _, revision = model_id.partition("@")
    config = AutoConfig.from_pretrained(name, revision=revision)
    if getattr(config, "quantization_config", None) is None:  # such weights have no form without numbers
        load_weights(config, name, model_class, revision=revision, device_map="meta")


def check_packages() -> None:
    """Refuse to serve without the packages of the extra."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if not missing and importlib.util.find_spec(_NEWEST_MODULE) is None:
        missing = ["transformers 5.20 or newer"]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}: pip install 'lookahead-decoding[serve]'")


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections, which wait until the server runs; port 0 is a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # The errno of an address that cannot be resolved is negative, which os.strerror does not know.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"cannot listen on port {port} of {host}: {reason}; --port names another") from error


def make_server(
    models: EnabledModels, *, continuous_batching: bool = False, enable_cors: bool = False, log_level: str = "warning"
) -> uvicorn.Server:
    """The server of `transformers serve`, whose handlers call the `generate` of these models; they end with it.

    With `continuous_batching` requests are batched by transformers' own loop, which drafts nothing. Run it with
    `server.run(sockets=[listen(host, port)])`.
    """
    import uvicorn
    from fastapi import HTTPException
    from jinja2 import TemplateError
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.cli.serving.transcription import TranscriptionHandler

    state = GenerationState(continuous_batching=continuous_batching)
    app = build_server(
        models,
        ChatCompletionHandler(models, state),
        completion_handler=CompletionHandler(models, state),
        response_handler=ResponseHandler(models, state),
        transcription_handler=TranscriptionHandler(models, state),
        systemone_handler=SystemOneHandler(models, state),
        generation_state=state,
        enable_cors=enable_cors,
    )
    # The server of transformers answers most of these with "Internal Server Error" and nothing else.
    app.add_exception_handler(HTTPException, _answer(None, "invalid_request"))
    app.add_exception_handler(UnsupportedModelError, _answer(404, "model_not_found"))
    app.add_exception_handler(ValueError, _answer(400, "invalid_request"))
    app.add_exception_handler(TemplateError, _answer(400, "invalid_request"))
    return uvicorn.Server(uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=3))


def _answer(status: int | None, code: str) -> Callable[[Any, Exception], Any]:
    """A handler that answers an error in the form of the OpenAI API; status None is the status of the error."""
    from fastapi.responses import JSONResponse

    def answer(request: Any, error: Any) -> Any:
        message = first_line(error) if status is not None else str(error.detail)
        told = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        return JSONResponse({"error": told}, status_code=status or error.status_code)

    return answer
