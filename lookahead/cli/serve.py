"""The command `lookahead serve`."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lookahead.cli.options import DeviceOptions, DraftingOptions, model_option, new_tokens_option, option
from lookahead.cli.terminal import console, memory_file_saved_at_exit, prepare, say
from lookahead.errors import ConfigError, one_line
from lookahead.loading.loading import locate_model
from lookahead.loading.suggested_models import default_name

_PACKAGES = "fastapi", "prometheus_client", "pydantic", "python_multipart", "uvicorn"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(DraftingOptions, DeviceOptions):
    models: list[str] = option(
        None, "Models to serve; the first answers requests that name none. (default: smollm2)", argument=True,
        metavar="MODELS",
    )  # fmt: skip
    model: list[str] | None = model_option(
        None, "A model to serve, in place of MODELS; may be repeated.", metavar="MODEL"
    )
    host: str = option("localhost", "Address to listen on; 0.0.0.0 stands for all addresses.")
    port: int = option(8000, "Port to listen on; 0 is a free one.", min=0, max=65535)
    rows: int | None = option(None, "Most outputs decoded together. (default: 16 on a CPU, 32 on a GPU)", min=1)
    queue: int = option(64, "Most requests that wait; the next ones get status 429.", min=0)
    prefix_cache_mb: int = option(1024, "Megabytes for keys and values of earlier prompts and answers.", min=0)
    inexact_prefix_cache: bool = option(
        False, "In half precision, reuse earlier prompts and answers as far as they agree: tokens may change."
    )
    max_new_tokens: int = new_tokens_option(2048, "Most tokens of an answer.")
    max_body_mb: float = option(4.0, "Largest request, in megabytes.", min=0.001)
    request_timeout: float = option(600.0, "Most seconds for an answer.", min=0.1)
    served_model_name: list[str] = option(
        None, "Name of a model in requests, one for each; may be repeated. (default: that of its folder)",
        metavar="NAME",
    )  # fmt: skip
    plain_user_text: bool = option(False, "Read special tokens in messages of users and tools as text.")
    no_page: bool = option(False, "Serve no page at /.")
    api_key: str | None = option(
        None, "Key that clients must send: 'Authorization: Bearer KEY'. (default: that of LOOKAHEAD_API_KEY)",
        metavar="KEY",
    )  # fmt: skip
    api_key_file: Path | None = option(None, "File with a key of each client, one per line.", metavar="FILE")
    allowed_host: list[str] = option(
        None, "Another name of this server that the header Host may have; may be repeated.", metavar="NAME"
    )
    cors_origin: list[str] = option(
        None, "Origin of web pages that may call the server; may be repeated.", metavar="ORIGIN"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "warning", "Level of the log on stderr; info shows every request."
    )


def serve(options: ServeOptions) -> None:
    """Serve models over the OpenAI API to a handful of users.

    Requests are decoded together, each with its own options and drafts. A prompt that begins like an earlier one reads
    only the rest. The page at / is a chat with figures; metrics for Prometheus are at /metrics. Ctrl-C ends the server.

    For example:

      lookahead serve
      lookahead serve ./my-model --port 8080
      lookahead serve --host 0.0.0.0 --allowed-host box.local --api-key SECRET
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}: pip install 'lookahead-decoding[serve]'")
    if options.models and options.model:
        raise ConfigError("name models as arguments or by --model, got both")
    names = options.models or options.model or [default_name()]
    locations = [locate_model(name)[0] for name in names]
    if options.memory is not None and len(names) > 1:
        raise ConfigError(f"memory {options.memory} belongs to one model: serve one model")
    keys = _keys(options)
    config: Any = options.config()
    from lookahead.serving.connections import Server, listen

    listener = listen(options.host, options.port)  # before torch is imported: another program may have the port
    with console(sys.stderr).status("loading the model"):
        from lookahead.serving.served_models import ServedModels
        from lookahead.serving.web_app import make_app

        for location in locations:
            prepare(options, location)
        loading = {"dtype": options.dtype, "device": options.device, "quantize": options.quantize}
        decoding = {"rows": options.rows, "queue": options.queue, "prefix_bytes": options.prefix_cache_mb << 20}
        decoding["rounds_prefixes"] = options.inexact_prefix_cache
        models = ServedModels(
            names, options.served_model_name or None, config=config, max_new_tokens=options.max_new_tokens,
            loading=loading, decoding=decoding, plain_user_text=options.plain_user_text,
        )  # fmt: skip
    hosts = {options.host, *(options.allowed_host or ())}
    app = make_app(
        models, hosts=hosts, api_keys=keys, max_body=int(options.max_body_mb * (1 << 20)),
        timeout_s=options.request_timeout, cors_origins=options.cors_origin or (),
        has_page=not options.no_page,
    )  # fmt: skip
    server = Server(app, models, options.log_level)
    if options.host in ("0.0.0.0", "::") and not options.allowed_host:
        say("note", "clients reach it by the IP addresses of this machine; --allowed-host adds a name")
    address = f"[{options.host}]" if ":" in options.host else options.host
    say("serving", f"{', '.join(models.names)} at http://{address}:{listener.getsockname()[1]}/v1; Ctrl-C ends")
    failed: list[Exception] = []

    def end_without_models() -> None:
        try:
            models.wait()
        except Exception as error:
            failed.append(error)
            server.stop()

    threading.Thread(target=end_without_models, daemon=True).start()
    with suppress(KeyboardInterrupt):
        if options.memory is None:
            server.run(sockets=[listener])  # uvicorn finishes its work and then passes the signal on
        else:
            with memory_file_saved_at_exit(options, models.wait().model):
                server.run(sockets=[listener])
    models.close()
    if failed:
        raise failed[0]


def _keys(options: ServeOptions) -> list[str]:
    """The API keys: of the command line, else of a file, else of the environment, which other users do not see."""
    if options.api_key is not None and options.api_key_file is not None:
        raise ConfigError("pass either --api-key or --api-key-file")
    key = os.environ.get("LOOKAHEAD_API_KEY") if options.api_key is None else options.api_key
    if options.api_key_file is None:
        return [] if key is None else [_checked(key)]
    try:
        lines = options.api_key_file.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file: {options.api_key_file} cannot be read: {one_line(error)}") from error
    keys = [_checked(line) for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"--api-key-file: {options.api_key_file} has no key")
    return keys


def _checked(key: str) -> str:
    if not key.strip():
        raise ConfigError("an API key must not be empty")
    return key.strip()
