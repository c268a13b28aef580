"""The settings of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lookahead.summarization.prompting import SummaryRequest

if TYPE_CHECKING:
    from lookahead import LoadedModel, LookaheadConfig
    from lookahead.summarization.summarizer import Summarizer


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
    request: SummaryRequest = field(default_factory=SummaryRequest)
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
        return {"max_new_tokens": self.max_new_tokens, **asdict(self.request)}

    def summarizer(self, loaded: LoadedModel) -> Summarizer:
        """A summarizer with the loaded model; ConfigError if the model cannot follow the settings."""
        from lookahead.summarization.summarizer import Summarizer

        return Summarizer(
            *loaded, max_new_tokens=self.max_new_tokens, num_beams=self.num_beams, sampling=self.sampling,
            seed=self.seed, config=self.config, compare=self.compare, request=self.request,
            predicts=self.predicts,
        )  # fmt: skip
