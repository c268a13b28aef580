"""The metrics of a server, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from lookahead.stats import DecodingStats

_GAUGES = {
    "running": "Outputs that are being read or decoded.",
    "waiting": "Requests that wait.",
    "cache_bytes": "Bytes of keys and values, earlier prompts included.",
}
_COUNTERS = {
    "read_tokens": "Tokens of prompts that were read.",
    "reused_tokens": "Tokens of prompts whose keys and values were copied from earlier ones.",
}


class Metrics:
    """The counters of a server, and the current figures of its loops.

    Args:
        figures: Returns the name of every loaded model and the figures of its loop.
    """

    def __init__(self, figures: Callable[[], Iterable[tuple[str, dict[str, float]]]]) -> None:
        self._registry, self._figures = CollectorRegistry(), figures
        counter: Any = lambda name, text, *labels: Counter(f"lookahead_{name}", text, labels, registry=self._registry)  # noqa: E731
        self.requests = counter("requests", "Requests by path and status.", "path", "status")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self.new = counter("completion_tokens", "Tokens that were written.")
        self._passes = counter("passes", "Passes of the model after prompts, counted for every row.")
        self._nodes = counter("draft_tokens", "Drafted tokens; one of several sources counts once.")
        self._hits = counter("accepted_draft_tokens", "Accepted tokens; one of several sources counts once.")
        self._drafted = counter("drafted_tokens", "Drafted tokens by source.", "source")
        self._accepted = counter("accepted_tokens", "Accepted tokens by source.", "source")
        name = "lookahead_first_token_seconds"
        self.first_token = Histogram(name, "Time to the first token.", registry=self._registry)
        self._registry.register(self)

    def count(self, stats: DecodingStats) -> None:
        """Count a finished output."""
        self._prompt.inc(stats.prompt_tokens)
        self._passes.inc(stats.target_forwards)
        self._nodes.inc(stats.drafted_tokens)
        self._hits.inc(stats.accepted_tokens)
        for counter, tokens in ((self._drafted, stats.drafted_by_source), (self._accepted, stats.accepted_by_source)):
            for source, number in tokens.items():
                counter.labels(source).inc(number)

    def collect(self) -> Iterator[Any]:
        """The current figures, as a Prometheus collector."""
        models = list(self._figures())
        for names, kind in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                family = kind(f"lookahead_{name}", text, labels=["model"])
                for model, figures in models:
                    family.add_metric([model], figures[name])
                yield family

    def text(self) -> bytes:
        """All metrics in the text format."""
        return generate_latest(self._registry)
