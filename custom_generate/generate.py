"""What `model.generate(..., custom_generate="org/repo", trust_remote_code=True)` runs: lookahead, as installed."""

from typing import Any

import lookahead
from lookahead.decoding.validation import serve_stop_strings


def generate(*args: Any, model: Any, **kwargs: Any) -> Any:
    """Generate what `model.generate` gives for the same arguments, in fewer passes.

    Args:
        *args: As `model.generate` takes them by position: the inputs, then a generation configuration.
        model: The model that was asked.
        **kwargs: Whatever else `model.generate` takes, `lookahead_config`, a `lookahead.LookaheadConfig`, and
            `lookahead_prediction`, what the output will largely be: token ids, or text, which needs the `tokenizer`.
    """
    inputs, config = [*args, None, None][:2]
    inputs = kwargs.pop("inputs", None) if inputs is None else inputs
    config = kwargs.pop("generation_config", None) if config is None else config
    streamer, tokenizer = kwargs.pop("streamer", None), kwargs.pop("tokenizer", None)
    config, kwargs = serve_stop_strings(model, tokenizer, config, kwargs)
    # Of the class: a model loaded together with this file has a `generate` that leads here.
    return type(model).generate(
        model,
        inputs,
        generation_config=config,
        custom_generate=lookahead.decode,
        lookahead_streamer=streamer,
        lookahead_tokenizer=tokenizer,
        **kwargs,
    )
