"""The settings of a job, its identity, and that of its documents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from reprlib import Repr
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lookahead import LoadedModel, LookaheadConfig
    from lookahead.documents.decode_text import DocumentId
    from lookahead.summarization.prompting import SummaryRequest
    from lookahead.summarization.summarizer import Summarizer

_repr = Repr()
_repr.maxstring = 80
shortened = _repr.repr  # shortens a value in an error message: a prompt may be pages long
_OFF = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}  # values that turn an option off


def _default_request() -> SummaryRequest:
    from lookahead.summarization.prompting import SummaryRequest  # commands that summarize nothing do not load it

    return SummaryRequest()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """All that a process needs to summarize documents: arguments of `lookahead.load` and of `Summarizer`.

    Attributes:
        location: Where this process loads the model from; `None` is `model`.
        threads: CPU threads; `None` is PyTorch's default.
        rows: Prompts decoded together, 1 to 1024; `None` chooses by device.
    """

    model: str
    location: str | None = None
    dtype: str = "auto"
    device: str | None = None
    quantize: str | None = None
    threads: int | None = None
    request: SummaryRequest = field(default_factory=_default_request)
    max_new_tokens: int = 200
    num_beams: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    compare: bool = False
    config: LookaheadConfig | None = None
    rows: int | None = None
    predicts: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that a summary depends on, besides the model and the options of `model.generate`."""
        request = asdict(self.request)
        if request["part_tokens"] is None:  # jobs begun before there was this option go on
            del request["part_tokens"]
        return {"max_new_tokens": self.max_new_tokens, **request}

    def summarizer(self, loaded: LoadedModel) -> Summarizer:
        """A summarizer with the loaded model; ConfigError if the model cannot follow the settings."""
        from lookahead.summarization.summarizer import Summarizer

        return Summarizer(
            *loaded, max_new_tokens=self.max_new_tokens, num_beams=self.num_beams, sampling=self.sampling,
            seed=self.seed, config=self.config, compare=self.compare, request=self.request,
            predicts=self.predicts,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """Everything that a summary depends on besides its document. Options that only change the speed do not count."""

    model: str  # as given; not compared, so that a model may be moved
    weights: str  # a hash, 16 hexadecimal digits
    tokenizer: str  # a hash, 16 hexadecimal digits
    generation: str = ""  # a hash of the generation configuration and the chat template
    dtype: str
    # By name: `JobSettings.identity`, `num_beams` if above 1, options of `model.generate` that differ from the model's
    # own, and the seed if tokens are sampled.
    options: Mapping[str, Any]

    @classmethod
    def of(cls, settings: JobSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> JobIdentity:
        """The identity of a job with a loaded model."""
        from lookahead.utils.fingerprints import tokenizer_fingerprint, weights_fingerprint

        config = model.generation_config
        generating = {} if config is None else config.to_diff_dict()
        generating.pop("transformers_version", None)
        beams = settings.num_beams or generating.get("num_beams") or 1
        asked = {name: value for name, value in settings.sampling.items() if name != "do_sample"}
        asked = {name: value for name, value in asked.items() if value != (generating.get(name) or _OFF.get(name))}
        if settings.sampling.get("do_sample"):
            asked["seed"] = settings.seed
        manners = json.dumps([generating, tokenizer.chat_template], sort_keys=True, default=str)
        return cls(
            model=settings.model,
            weights=weights_fingerprint(model),
            tokenizer=f"{tokenizer_fingerprint(tokenizer):016x}",
            generation=xxhash.xxh3_64_hexdigest(manners.encode()),
            dtype=str(model.dtype).removeprefix("torch."),
            options=settings.identity | ({"num_beams": beams} if beams > 1 else {}) | asked,
        )

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits, equal for equal jobs."""
        compared = {name: value for name, value in self.to_dict().items() if name != "model"}
        return xxhash.xxh3_64_hexdigest(json.dumps(compared, sort_keys=True).encode())

    def to_dict(self) -> dict[str, Any]:
        """The identity as the JSON-ready dict of the manifest."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "options"}
        return {**named, **self.options}

    def differences(self, other: Mapping[str, Any]) -> str:
        """The differences to another job, given by its `to_dict`; empty if there are none."""
        mine = self.to_dict()
        names = dict.fromkeys([*mine, *other])
        changed = [name for name in names if name != "model" and mine.get(name) != other.get(name)]
        for name, what in (("weights", "weights"), ("generation", "settings for generation, or chat template")):
            if name in changed:
                return f"model was {other.get('model')!r} and is {self.model!r}, with other {what}"
        return ", ".join(
            f"{name} was {shortened(other.get(name))} and is {shortened(mine.get(name))}" for name in changed
        )


def text_hash(text: str) -> bytes:
    """16 bytes, equal for equal texts."""
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


def key_of(name: DocumentId, content: bytes | str = "") -> bytes:
    """16 bytes for an id, for the id and text hash of a document, or for the id and error of an unreadable document.

    Ids that are equal in a Parquet file have the same key: 5 and "5", a lone surrogate and its escape.
    """
    what = content.hex() if isinstance(content, bytes) else content
    return xxhash.xxh3_128_digest(f"{name}\0{what}".encode("utf-8", "backslashreplace"))
