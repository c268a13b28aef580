"""What a job does with every document, and with which model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lookahead.summarization.prompting import SummaryRequest

if TYPE_CHECKING:
    from lookahead.config import LookaheadConfig
    from lookahead.hf.loading import LoadedModel
    from lookahead.summarization.summarizer import Summarizer


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Everything a process needs to summarize the documents of a job.

    Attributes:
        model: The model by its name, as for `lookahead.load`; so are dtype, device and quantize.
        location: Where this process finds the model; `None` is `model`.
        threads: CPU threads; `None` is as PyTorch chooses.
        request: What the model is asked for.
        max_new_tokens: Most tokens of a summary, at least 1.
        num_beams: Beams of the search, at least 1; `None` is the model's own number.
        sampling: Other options of `model.generate`; greedy without `do_sample`.
        seed: Of every call that samples.
        keep_parts: Whether the summaries of parts are written too.
        compare: Whether every document is decoded plainly too.
        config: How drafts are made; `None` is the default.
        rows: Most documents decoded together, 1 to 1024; `None` is decided by the device.
        predicts: Whether documents may come with predictions of their summaries.
    """

    model: str
    location: str | None = None
    dtype: str = "auto"
    device: str | None = None
    quantize: str | None = None
    threads: int | None = None
    request: SummaryRequest = field(default_factory=SummaryRequest)
    max_new_tokens: int = 200
    num_beams: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    keep_parts: bool = False
    compare: bool = False
    config: LookaheadConfig | None = None
    rows: int | None = None
    predicts: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that a summary depends on, besides the model and what `model.generate` is asked for."""
        return {"max_new_tokens": self.max_new_tokens, **asdict(self.request), "keep_parts": self.keep_parts}

    def summarizer(self, loaded: LoadedModel) -> Summarizer:
        """A summarizer with the loaded model; ConfigError if the model cannot do what is asked for."""
        from lookahead.summarization.summarizer import Summarizer

        return Summarizer(
            *loaded, max_new_tokens=self.max_new_tokens, num_beams=self.num_beams, sampling=self.sampling,
            seed=self.seed, config=self.config, compare=self.compare, request=self.request, keep_parts=self.keep_parts,
            predicts=self.predicts,
        )  # fmt: skip
