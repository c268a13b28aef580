"""The command that serves models over HTTP: arguments in, one line out. The work is done by `generation.serving`."""

from __future__ import annotations

import sys
from contextlib import suppress
from enum import Enum
from typing import Annotated

import typer

from lookahead.cli.options import Device, Dtype, Proposers, Threads, drafting_config
from lookahead.cli.terminal import console, convert, say, usage_errors, watch_compilation
from lookahead.models.locating import DEFAULT_MODEL, locate_model


class LogLevel(str, Enum):
    """What the server logs, the least severe first."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


OnlyModel = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="The only model to serve. (default: smollm2, and others by name)")
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 is a free one.")]
Timeout = Annotated[int, typer.Option(min=1, help="Seconds until a model that nobody asks is unloaded.")]
Cors = Annotated[bool, typer.Option("--enable-cors", help="Let web pages of any origin call the server.")]
Batching = Annotated[
    bool, typer.Option("--continuous-batching", help="Batch requests by transformers' own loop, without drafts.")
]
Log = Annotated[LogLevel, typer.Option(help="What is logged on stderr; info shows every request.")]


def serve(
    model: OnlyModel = None,
    host: Host = "localhost",
    port: Port = 8000,
    model_timeout: Timeout = 300,
    enable_cors: Cors = False,
    continuous_batching: Batching = False,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    proposers: Proposers = "prompt,outputs,recycled",
    log_level: Log = LogLevel.warning,
) -> None:
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
    with usage_errors():
        name = model if model is not None else DEFAULT_MODEL
        location, _ = locate_model(name)
        config = drafting_config(proposers, None, None, None, None, None, None, False, False)
        from lookahead.models.loading import prepare_process

        with console(sys.stderr).status("loading the model"):
            prepare_process(threads)
            from lookahead.generation import serving

            serving.check_packages()
            watch_compilation()
            listener = serving.listen(host, port)
            convert(location)
            models = serving.EnabledModels(
                name, only=model is not None, config=config, dtype=dtype, device=device, timeout_s=model_timeout
            )
        server = serving.make_server(
            models, continuous_batching=continuous_batching, enable_cors=enable_cors, log_level=log_level.value
        )
        if continuous_batching:
            say("note", "with --continuous-batching transformers' own loop generates: nothing is drafted")
        address = f"[{host}]" if ":" in host else host
        say("serving", f"{name} at http://{address}:{listener.getsockname()[1]}/v1; Ctrl-C ends")
        try:
            with suppress(KeyboardInterrupt):  # uvicorn has ended its work before it passes the signal on
                server.run(sockets=[listener])
        finally:
            models.shutdown()
