"""`enable`: every call of `generate` of one model is decoded speculatively while it is on."""

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
from lookahead.errors import UnsupportedModelError, warn
from lookahead.generation.decode import decode
from lookahead.generation.validation import check_config, resolved, serve_stop_strings
from lookahead.hf.calls import own_loop
from lookahead.hf.facts import uncompiled, validate_model
from lookahead.proposers.ngram import OutputStore

_guard = RLock()  # held while switches are turned


def enable(model: PreTrainedModel, config: LookaheadConfig | None = None) -> Enabled:
    """Decode every `generate` of this model speculatively, `pipeline` and third-party code included.

    The outputs stay those of `model.generate`. A streamer and stop strings are served too; a call that has no
    exact speculative form, such as beam search, goes to transformers as before, with one warning. `generate` takes one
    more argument, `lookahead_prediction`: what the output will largely be, as of `lookahead.decode`.

    Example:
        >>> with lookahead.enable(model):  # doctest: +SKIP
        ...     pipeline("text-generation", model=model, tokenizer=tokenizer)("Once upon a time")

    Args:
        model: One model; others of its class are not touched.
        config: How to draft; the defaults when None. Of several that are on, the newest counts.

    Returns:
        The switch, already on: a context manager, with `disable()` for use without one.

    Raises:
        ConfigError: The model or the configuration has the wrong type.
        UnsupportedModelError: It is no causal LM, or has no weights.
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
                del owner.generate  # a shallow copy took that of its original along
                serving = None
            if not isinstance(serving, Generate):
                serving = owner.generate = Generate(model)
            self._serving: Generate = serving
            serving.switches.append(self)

    def disable(self) -> None:
        """Turn the switch off; with the last one the model is as it was. A second call does nothing."""
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
        # A copy of the model is another model, for which `enable` was not called.
        return partial, (self.original,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as `model.generate` does."""
        # A custom method takes it itself, as `lookahead.decode` does; transformers refuses what it does not know.
        prediction = kwargs.pop("lookahead_prediction", None) if kwargs.get("custom_generate") is None else None
        switches = self.switches[:]  # another thread may turn one off meanwhile
        # The inputs and the configuration may come by position. An assistant's drafts need its own loop.
        given = args[1] if len(args) == 2 else kwargs.get("generation_config")
        is_own = any(kwargs.get(name) is not None for name in ("custom_generate", "assistant_model"))
        if not switches or is_own or len(args) > 2 or getattr(given, "is_assistant", False):
            return self.original(*args, **kwargs)
        streamer: _CountingStreamer | None = None
        try:
            if kwargs.get("adapter_names") is not None:
                # PEFT does not remove its hooks when an error passes through them.
                raise UnsupportedModelError("adapter_names gives every row its own")
            if resolved(self.model, given, kwargs, "token_healing"):
                raise UnsupportedModelError("token_healing is not served")
            served = {name: each for name, each in kwargs.items() if name != "generation_config" or len(args) == 2}
            tokenizer = served.pop("tokenizer", None)
            if served.pop("streamer", None) is not None:
                streamer = _CountingStreamer(kwargs["streamer"])
            generation_config, served = serve_stop_strings(self.model, tokenizer, given, served)
            config = switches[-1].config
            ours = {"lookahead_config": config, "lookahead_tokenizer": tokenizer}
            ours["lookahead_prediction"] = prediction
            if config is not None and config.memory == "request":
                ours["lookahead_memory"] = OutputStore()
            method = partial(_decode_or_hand_over, ours=ours, streamer=streamer)
            return self.original(*args[:1], **served, generation_config=generation_config, custom_generate=method)
        except UnsupportedModelError as error:
            if streamer is not None and streamer.shown:
                raise
            warn(f"decoded by transformers alone: {error}")
            return self.original(*args, **kwargs)


class _CountingStreamer(BaseStreamer):
    """Shows a streamer what it is shown, and counts: the prompt, and then every token."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self.shown = streamer, 0

    def put(self, value: Any) -> None:
        """Show the prompt or the next tokens."""
        self._streamer.put(value)
        self.shown += 1

    def end(self) -> None:
        """Tell that no more tokens follow."""
        self._streamer.end()


def _decode_or_hand_over(
    model: Any,
    input_ids: Tensor,
    ours: dict[str, Any],
    streamer: _CountingStreamer | None,
    inputs_tensor: Any = None,
    **kwargs: Any,
) -> Any:
    """`decode`; a call that it refuses goes to the loop of transformers, with a warning.

    That loop gets the inputs that `generate` prepared, so that no encoder reads its input twice. A streamer is shown
    the prompt once. Once it was shown a token the error is raised: what was shown cannot be taken back.
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
