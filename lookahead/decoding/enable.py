"""`enable`: decode every `generate` call of one model speculatively."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from threading import RLock
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from lookahead.config import LookaheadConfig
from lookahead.decoding.decode import decode
from lookahead.decoding.validation import check_config, resolved, serve_stop_strings
from lookahead.errors import UnsupportedModelError, warn
from lookahead.model.calls import own_loop
from lookahead.model.facts import uncompiled, validate_model
from lookahead.proposers.ngram import Memory

_guard = RLock()  # held while a switch is turned on or off


def enable(model: PreTrainedModel, config: LookaheadConfig | None = None) -> Enabled:
    """Decode every `generate` call of this model speculatively, including `pipeline` and third-party code.

    The outputs do not change. Streamers and stop strings are supported; a call that cannot be decoded speculatively and
    exactly goes to transformers with one warning. `generate` takes one more argument, `lookahead_prediction`: the
    expected output, as in `lookahead.decode`.

    Example:
        >>> with lookahead.enable(model):  # doctest: +SKIP
        ...     pipeline("text-generation", model=model, tokenizer=tokenizer)("Once upon a time")

    Args:
        model: One model; others of its class are not touched.
        config: How to draft; the defaults when None. Of several active switches the newest applies.

    Returns:
        The switch, already on: a context manager, with `disable()` for use without one.

    Raises:
        ConfigError: The model or the configuration has the wrong type.
        UnsupportedModelError: The model is not a causal LM, or has no weights.
    """
    model = uncompiled(model)
    validate_model(model)
    check_config("config", config)
    return Enabled(model, config)


class Enabled(AbstractContextManager["Enabled"]):
    """A switch that is on until `disable` is called or the `with` block ends; see `enable`."""

    def __init__(self, model: PreTrainedModel, config: LookaheadConfig | None) -> None:
        owner: Any = model
        self.config = config
        with _guard:
            serving: Any = model.__dict__.get("generate")
            if isinstance(serving, Generate) and serving.model is not model:
                del owner.generate  # a shallow copy kept the original's
                serving = None
            if not isinstance(serving, Generate):
                serving = owner.generate = Generate(model)
            self._serving: Generate = serving
            serving.switches.append(self)

    def disable(self) -> None:
        """Turn the switch off; the last one restores the model. A second call does nothing."""
        serving = self._serving
        with _guard:
            if self not in serving.switches:
                return
            serving.switches.remove(self)
            if not serving.switches:
                del serving.model.generate
                if serving.had_its_own:
                    serving.model.generate = serving.original

    def __exit__(self, *error: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        model, is_on = self._serving.model, self in self._serving.switches
        name = model.config.name_or_path
        of_model = f"{type(model).__name__}{f' {name!r}' if name else ''}"
        return f"<lookahead {'on' if is_on else 'off'} for {of_model}, {self.config or 'the default configuration'}>"


class Generate:
    """Replaces `generate` of one model while a switch is on."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.had_its_own = "generate" in model.__dict__
        self.original = model.generate
        self.switches: list[Enabled] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # `enable` was not called on a copy of the model.
        return partial, (self.original,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as `model.generate` does."""
        # A custom method such as `lookahead.decode` takes the argument; transformers refuses unknown ones.
        prediction = kwargs.pop("lookahead_prediction", None) if kwargs.get("custom_generate") is None else None
        switches = self.switches[:]  # another thread may turn one off meanwhile
        # The inputs and the configuration may be positional. An assistant's drafts need transformers' loop.
        own_config = args[1] if len(args) == 2 else kwargs.get("generation_config")
        is_own = any(kwargs.get(name) is not None for name in ("custom_generate", "assistant_model"))
        if not switches or is_own or len(args) > 2 or getattr(own_config, "is_assistant", False):
            return self.original(*args, **kwargs)
        streamer: _CountingStreamer | None = None
        try:
            if kwargs.get("adapter_names") is not None:
                # PEFT does not remove its hooks after an error.
                raise UnsupportedModelError("adapter_names gives every row its own")
            if resolved(self.model, own_config, kwargs, "token_healing"):
                raise UnsupportedModelError("token_healing is not served")
            served = {name: value for name, value in kwargs.items() if name != "generation_config" or len(args) == 2}
            tokenizer = served.pop("tokenizer", None)
            if served.pop("streamer", None) is not None:
                streamer = _CountingStreamer(kwargs["streamer"])
            generation_config, served = serve_stop_strings(self.model, tokenizer, own_config, served)
            config = switches[-1].config
            ours = {"lookahead_config": config, "lookahead_tokenizer": tokenizer}
            ours["lookahead_prediction"] = prediction
            if config is not None and config.memory == "request":
                ours["lookahead_memory"] = Memory()
            method = partial(_decode_or_hand_over, ours=ours, streamer=streamer)
            return self.original(*args[:1], **served, generation_config=generation_config, custom_generate=method)
        except UnsupportedModelError as error:
            if streamer is not None and streamer.shown:
                raise
            warn(f"decoded by transformers alone: {error}")
            return self.original(*args, **kwargs)


class _CountingStreamer(BaseStreamer):
    """Forwards to a streamer and counts the calls: the prompt, then every token."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self.shown = streamer, 0

    def put(self, value: Any) -> None:
        """Show the prompt or the next tokens."""
        self._streamer.put(value)
        self.shown += 1

    def end(self) -> None:
        """Signal the end of the tokens."""
        self._streamer.end()


def _decode_or_hand_over(
    model: Any,
    input_ids: Tensor,
    ours: dict[str, Any],
    streamer: _CountingStreamer | None,
    inputs_tensor: Any = None,
    **kwargs: Any,
) -> Any:
    """Run `decode`; a call that it refuses goes to the loop of transformers, with a warning.

    The loop gets the inputs that `generate` prepared, so an encoder reads its input once. A streamer gets the prompt
    once. After it got a token the error is raised, since the output cannot be retracted.
    """
    try:
        return decode(model, input_ids, inputs_tensor=inputs_tensor, lookahead_streamer=streamer, **ours, **kwargs)
    except UnsupportedModelError as error:
        mode = kwargs["generation_config"].get_generation_mode()
        loop = own_loop(model, kwargs["generation_config"])
        is_sampling = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        if loop is None or (streamer is not None and (not is_sampling or streamer.shown > 1)):
            raise
        warn(f"decoded by transformers alone: {error}")
    if streamer is not None and not streamer.shown:
        streamer.put(input_ids.cpu())
    if is_sampling:
        kwargs["streamer"] = streamer
    elif mode is GenerationMode.ASSISTED_GENERATION:
        kwargs["inputs_tensor"] = inputs_tensor
    return loop(model, input_ids, **kwargs)
