"""The command that serves models over HTTP, with the server of transformers."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from lookahead.cli.terminal import console, convert, remembering, say, watch_compilation
from lookahead.errors import ConfigError
from lookahead.jobs.job_options import DeviceOptions, DraftingOptions, option
from lookahead.models.loading import DEFAULT_MODEL, locate_model, prepare_process, resolve_device


@dataclass(frozen=True, kw_only=True)
class ServeOptions(DraftingOptions, DeviceOptions):
    """Options of `lookahead serve`."""

    model: str | None = option(
        None, "The only model to serve. (default: smollm2, and others by name)", argument=True, metavar="MODEL"
    )
    host: str = option("localhost", "Address to listen on; 0.0.0.0 is every one of this machine.")
    port: int = option(8000, "Port to listen on; 0 is a free one.", min=0, max=65535)
    model_timeout: int = option(300, "Seconds without requests until a model is unloaded.", min=1)
    enable_cors: bool = option(False, "Let web pages of any origin call the server.")
    continuous_batching: bool = option(False, "Batch requests by transformers' own loop, without drafts.")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "warning", "What is logged on stderr; info shows every request."
    )


def serve(options: ServeOptions) -> None:
    """Serve models over the OpenAI API, token for token as 'transformers serve' does.

    It is the server of transformers, with lookahead enabled on every model it
    loads. A client asks for a model by its name: the folder, the GGUF file or the
    name on the Hub. With MODEL, that one is served alone and stays in memory.
    Ctrl-C ends the server.

    For example:

      lookahead serve
      lookahead serve ./my-model --port 8080
      lookahead serve --host 0.0.0.0 --log-level info
    """
    name = options.model if options.model is not None else DEFAULT_MODEL
    location, _ = locate_model(name)
    config = options.config()
    if options.memory is not None and options.model is None:
        raise ConfigError(f"memory {options.memory} is that of one model: name the only MODEL to serve")
    with console(sys.stderr).status("loading the model"):
        prepare_process(options.threads)
        from lookahead.generation import serving
        from lookahead.models.quantized import resolve_quantize

        resolve_quantize(options.quantize, resolve_device(options.device))
        serving.check_packages()
        watch_compilation()
        listener = serving.listen(options.host, options.port)
        convert(location)
        models = serving.EnabledModels(
            name, only=options.model is not None, config=config, dtype=options.dtype, device=options.device,
            quantize=options.quantize, timeout_s=options.model_timeout,
        )  # fmt: skip
    server = serving.make_server(
        models, continuous_batching=options.continuous_batching, enable_cors=options.enable_cors,
        log_level=options.log_level,
    )  # fmt: skip
    if options.continuous_batching:
        say("note", "with --continuous-batching transformers' own loop generates: nothing is drafted")
    address = f"[{options.host}]" if ":" in options.host else options.host
    say("serving", f"{name} at http://{address}:{listener.getsockname()[1]}/v1; Ctrl-C ends")
    try:
        with suppress(KeyboardInterrupt), remembering(options, models.first):
            server.run(sockets=[listener])  # uvicorn finishes its work and then passes the signal on
    finally:
        models.shutdown()
