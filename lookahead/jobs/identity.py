"""What tells one job from another, and one document from another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lookahead.documents.decode_text import DocumentId
    from lookahead.jobs.job_options import WorkerOptions


_MOST_TOLD = 80  # characters of a value


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """Everything a summary depends on besides its document; options that only change the speed do not count.

    Attributes:
        model: The model's name as it was given. It is not compared, so a moved folder is the same model.
        weights: Hash of the model's weights, 16 hexadecimal digits.
        tokenizer: Hash of the tokenizer.
        manners: Hash of the generation configuration and the tokenizer's chat template.
        dtype: The model's dtype.
        options: The options that identify a job, by name (`WorkerOptions.identity`).
    """

    model: str
    weights: str
    tokenizer: str
    manners: str = ""
    dtype: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, options: WorkerOptions, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> JobIdentity:
        """The identity of a job with a loaded model."""
        from lookahead.utils.fingerprints import tokenizer_fingerprint, weights_fingerprint

        return cls(
            model=options.model,
            weights=weights_fingerprint(model),
            tokenizer=f"{tokenizer_fingerprint(tokenizer):016x}",
            manners=_manners_of(model, tokenizer),
            dtype=str(model.dtype).removeprefix("torch."),
            options=options.identity,
        )

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that are the same for the same job."""
        compared = {name: value for name, value in self.to_dict().items() if name != "model"}
        return xxhash.xxh3_64_hexdigest(json.dumps(compared, sort_keys=True).encode())

    def to_dict(self) -> dict[str, Any]:
        """The identity as a JSON-ready dict, as manifests hold it."""
        named = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "options"}
        return {**named, **self.options}

    def differences(self, other: dict[str, Any]) -> str:
        """What another job did differently, in words; empty where it is the same."""
        mine = self.to_dict()
        changed = [name for name in mine if name != "model" and mine[name] != other.get(name)]
        for name, what in (("weights", "weights"), ("manners", "settings for generation, or chat template")):
            if name in changed:
                return f"model was {other.get('model')!r} and is {self.model!r}, with other {what}"
        # A prompt may be pages long.
        return ", ".join(f"{name} was {_brief(other.get(name))} and is {_brief(mine[name])}" for name in changed)


def _brief(value: object) -> str:
    """A value, cut where it is long."""
    words = repr(value)
    return words if len(words) <= _MOST_TOLD else f"{words[:_MOST_TOLD]}..."


def _manners_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """What tells how a model generates and is spoken to."""
    config = model.generation_config
    settings = {} if config is None else config.to_diff_dict()
    settings.pop("transformers_version", None)
    described = json.dumps([settings, tokenizer.chat_template], sort_keys=True, default=str)
    return xxhash.xxh3_64_hexdigest(described.encode())


def text_hash(text: str) -> str:
    """32 hexadecimal digits that are the same for equal texts."""
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def key_of(name: DocumentId, content: str) -> bytes:
    """16 bytes for a document or a reject of this id with this hash of its text, or else its error.

    What a Parquet file may not tell apart is the same here: 5 and "5", half of a surrogate pair and its escape.
    """
    return xxhash.xxh3_128_digest(f"{name}\0{content}".encode("utf-8", "backslashreplace"))


def id_key(name: DocumentId) -> int:
    """64 bits for an id, the same for ids that a Parquet file may not tell apart."""
    return xxhash.xxh3_64_intdigest(str(name).encode("utf-8", "backslashreplace"))
