"""The commands `lookahead models`, `lookahead pull` and `lookahead tokens`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from rich.filesize import decimal

from lookahead.cli.draft_files import load_tokenizer_of
from lookahead.cli.options import OnePromptOptions, model_option, option
from lookahead.cli.terminal import console, harmless, say, show_line, table
from lookahead.errors import ConfigError
from lookahead.loading import loading
from lookahead.loading.suggested_models import choose_default, default_name, suggestions
from lookahead.loading.suggested_models import pull as download

_BREAKS = dict.fromkeys(map(ord, "\t\n\u2028\u2029"), "\ufffd")


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    suggest: bool = option(False, "List models of the Hub that fit this machine's memory, with an estimate of speed.")
    default: str | None = option(
        None, "Use this model from now on in commands without --model; smollm2 undoes it.", metavar="NAME"
    )
    device: str | None = option(None, "Device of --suggest: cpu, cuda, ... (default: a GPU if there is one)")
    as_json: bool = option(False, "Print one JSON object per line.", "--json")


def models(options: ModelsOptions) -> None:
    """List the models on this machine, one per line: names for --model, sizes, types and places.

    The list has the default model, the models in the cache of the Hugging Face Hub, and converted GGUF files. To use
    another folder or file, pass its path. A model of the Hub's cache has its name without the owner too.

    For example:

      lookahead models
      lookahead models --suggest
      lookahead models --default Qwen/Qwen2.5-1.5B-Instruct
      lookahead models --json
    """
    from lookahead.loading.local_models import local_models

    if options.default is not None:
        file = choose_default(options.default)
        show_line(sys.stderr, f"commands without --model use {default_name()} from now on; {file} keeps the choice")
        return
    if options.suggest:
        _suggest(options)
        return
    default = default_name()
    for model in local_models():
        if options.as_json:
            print(json.dumps(asdict(model) | {"is_default": model.name == default}))
            continue
        where = "" if model.path == model.name else model.path
        row = model.name, decimal(model.bytes), model.dtype or "", where, "(default)" if model.name == default else ""
        # A line for each, however long: a program reads lines, and a terminal breaks them.
        line = "  ".join(text for text in row if text)
        console(sys.stdout).print(harmless(line).translate(_BREAKS), soft_wrap=True)


def _suggest(options: ModelsOptions) -> None:
    """Print the models that fit, by the memory and the measured bandwidth of the device."""
    import lookahead

    device = loading.resolve_device(options.device)
    with console(sys.stderr).status("measuring the memory"):
        machine = lookahead.diagnose(device, "auto")["machine"]
    import torch

    is_cpu = device.type == "cpu"
    memory = machine["free_memory"] if is_cpu else torch.cuda.mem_get_info(device)[0]
    if memory is None:
        raise ConfigError("the free memory of this machine is not known")
    fitting = list(suggestions(memory, machine["bytes_per_s"], is_cpu=is_cpu))
    if options.as_json:
        for model in fitting:
            print(json.dumps(asdict(model)))
        return
    rows = [
        {
            "model": model.name,
            "type": model.dtype if model.dtype == "bf16" else f"--quantize {model.dtype}",
            "memory": decimal(model.bytes),
            "tokens/s,\nestimated": f"{model.tokens_per_s:.0f}"
            if model.tokens_per_s >= 10
            else f"{model.tokens_per_s:.1f}",
        }
        for model in fitting
    ]
    console(sys.stdout).print(table(rows))
    speed = f"{machine['bytes_per_s'] / 1e9:.0f} GB/s"
    show_line(
        sys.stdout,
        f"{decimal(memory)} are free. The speed is an estimate of plain decoding, which reads all weights for a token, "
        f"at the {speed} measured here; drafts give more where text repeats. 'lookahead pull NAME' downloads a model, "
        "and 'lookahead models --default NAME' makes it yours.",
    )


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    name: str = option(help="OWNER/NAME or hf://OWNER/NAME/FILE.gguf.", argument=True, metavar="NAME")


def pull(options: PullOptions) -> None:
    """Download a model of the Hugging Face Hub, or the rest of one; every file is compared with its checksum.

    The licence and the size are shown first. After an interrupt the same command continues.

    For example:

      lookahead pull Qwen/Qwen2.5-1.5B-Instruct
      lookahead pull hf://OWNER/NAME/FILE.gguf

    Exit status: 0 the model is here; 2 it cannot be downloaded; 130 interrupted, and the same command continues.
    """
    if not sys.stderr.isatty():  # a log gets no bars
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # it has no __all__

        disable_progress_bars()
    folder = download(options.name, lambda licence, size: say("note", f"licence {licence}, {decimal(size)}"))
    show_line(sys.stderr, f"{options.name}: {folder}")


@dataclass(frozen=True, kw_only=True)
class TokensOptions(OnePromptOptions):
    prompt: str | None = option(
        None, "A text file, or - for stdin. (default: stdin)", argument=True, metavar="FILE", show_default=False
    )
    model: str = model_option(default_name(), "The model whose tokenizer counts: only that is loaded.")
    as_json: bool = option(False, "Print one JSON object: tokens, ids, and the text of each.", "--json")


def tokens(options: TokensOptions) -> None:
    """Count the tokens of a text, as the model reads it.

    If the tokenizer has a chat template, the text is a user's message in it; with --raw it stands alone.

    For example:

      lookahead tokens article.txt
      lookahead tokens article.txt -m ./my-model --raw
      echo "Hello there" | lookahead tokens --json
    """
    text = options.read_prompt(names_file=True)
    tokenizer = load_tokenizer_of(options.model)
    prompt = options.prompt_of(tokenizer, text)
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    if options.as_json:
        print(json.dumps({"tokens": len(ids), "ids": ids, "texts": [tokenizer.decode([token]) for token in ids]}))
    else:
        print(len(ids))
