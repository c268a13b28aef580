"""Counters of decoding, named as in vLLM."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

_SECONDS = ("prefill_s", "decode_s", "ttft_s")
# Fields of `to_dict` and the decimals they are rounded to.
_SHOWN = (
    (0, "prompt_tokens reused_tokens emitted_tokens target_forwards bitwise_forwards exactness backend"),
    (0, "drafted_tokens accepted_tokens"),
    (4, "mean_acceptance_length draft_acceptance_rate"),
    (3, "expected_tokens"),
    (4, "calibration_error forwards_by_source drafted_by_source accepted_by_source"),
    (3, "expected_by_source"),
    (4, "calibration_error_by_source divergence acceptance_histogram"),
    (6, "prefill_s decode_s ttft_s tpot_s"),
    (3, "tokens_per_s"),
)


@dataclass(slots=True)
class DecodingStats:
    """Counters of one row, or of several rows added up.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Tokens of the prompt whose keys and values were copied: from an earlier text (`prefix_bytes`), or
            from a row that begins alike.
        emitted_tokens: New tokens, including an end-of-sequence token.
        target_forwards: Target passes that verified this row's tree; prefill passes are not counted.
        bitwise_forwards: Target passes whose results equal those of `model.generate` bit for bit.
        drafted_tokens: Draft nodes verified, the root not counted.
        accepted_tokens: Draft nodes whose token was emitted.
        expected_tokens: Sum of the acceptance probabilities that the proposers gave their draft nodes.
        forwards_by_source: Target passes that verified nodes of a proposer, by proposer.
        drafted_by_source: Draft nodes by proposer; a node proposed by two counts for both.
        accepted_by_source: Accepted draft nodes by proposer, likewise.
        expected_by_source: `expected_tokens` by proposer, likewise.
        total_variation: Sum over the emitted tokens of the total variation distance between the distribution a token
            was taken from and the target's; 0 unless `acceptance="typical"`, which is lossy.
        acceptance_histogram: Number of passes that emitted 1, 2, 3, … tokens, keyed by the number of tokens.
        prefill_s: Seconds from the start to the end of the prefill, shared by the rows of a batch.
        decode_s: Seconds from the end of the prefill, which gives the first token, to the row's last token.
        ttft_s: Seconds from the start to the row's first token.
        backend: The backend that scored the tokens and its path: `"CpuBackend: passes as one call"`, or
            `"transformers"` for its own loop. The sum of rows with different backends says `"several"`; empty for beam
            search.
        fallback_reason: Why transformers' own loop decoded, as in the warning; empty if drafts were possible. The sum
            of rows with different ones says `"several"`.
        dtype: The type of the model, such as `"float32"`; `"several"` for a sum of rows with different ones.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    emitted_tokens: int = 0
    target_forwards: int = 0
    bitwise_forwards: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    expected_tokens: float = 0.0
    forwards_by_source: Counter[str] = field(default_factory=Counter)
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    expected_by_source: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    total_variation: float = 0.0
    acceptance_histogram: Counter[int] = field(default_factory=Counter)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    backend: str = ""
    fallback_reason: str = ""
    dtype: str = ""

    @property
    def decoded_tokens(self) -> int:
        """Emitted tokens of counted passes: all but the first of every row, which comes from the prefill."""
        return sum(length * passes for length, passes in self.acceptance_histogram.items())

    @property
    def exactness(self) -> Literal["bitwise", "tokens", "rounding"]:
        """How far the passes equal those of `model.generate`.

        `"bitwise"`: bit for bit, as of the prompt alone. `"tokens"`, in float32: the tokens are equal, and the last
        bits of scores may differ.
        `"rounding"`, in half precision: a token may change where two are about equally likely.
        """
        if self.bitwise_forwards == self.target_forwards > 0:
            return "bitwise"
        return "tokens" if self.dtype == "float32" else "rounding"

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass, the bonus token included and the prefill excluded."""
        return self.decoded_tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted nodes."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def calibration_error(self) -> float:
        """Mean of expected minus actual acceptance of a draft node; above 0 the proposers are overconfident."""
        drafted = self.drafted_tokens
        return (self.expected_tokens - self.accepted_tokens) / drafted if drafted else 0.0

    @property
    def calibration_error_by_source(self) -> dict[str, float]:
        """`calibration_error` by proposer; 0 for a proposer without nodes."""
        return {
            name: (self.expected_by_source[name] - self.accepted_by_source[name]) / drafted if drafted else 0.0
            for name, drafted in self.drafted_by_source.items()
        }

    @property
    def accepted_prediction_tokens(self) -> int:
        """Output tokens drafted from a prediction, as in OpenAI's `completion_tokens_details`."""
        return self.accepted_by_source.get("prediction", 0)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Tokens drafted from a prediction and rejected; the same wrong token may count twice.

        OpenAI counts tokens of the prediction that the completion lacks; here only drafted tokens count.
        """
        return self.drafted_by_source.get("prediction", 0) - self.accepted_prediction_tokens

    @property
    def divergence(self) -> float:
        """Total variation distance from the target's distribution per emitted token, 0 (lossless) to 1.

        A token of probability p that is accepted as typical counts 1 - p, since it was certain. A drawn token counts 0.
        """
        return self.total_variation / self.emitted_tokens if self.emitted_tokens else 0.0

    @property
    def tpot_s(self) -> float:
        """Decode seconds per token after the first."""
        return self.decode_s / self.decoded_tokens if self.decoded_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first per decode second."""
        return self.decoded_tokens / self.decode_s if self.decode_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Counters, rates and seconds as a JSON-ready dict, with `fallback_reason` if there is one."""
        shown: dict[str, Any] = {}
        for digits, names in _SHOWN:
            for name in names.split():
                value = getattr(self, name)
                if isinstance(value, dict):
                    ordered = sorted(value.items()) if name == "acceptance_histogram" else value.items()
                    value = {str(key): round(number, digits) for key, number in ordered}
                shown[name] = round(value, digits) if isinstance(value, float) else value
        return shown | ({"fallback_reason": self.fallback_reason} if self.fallback_reason else {})


def total(rows: Iterable[DecodingStats]) -> DecodingStats:
    """Add up rows that were decoded together: counters are summed, seconds are the maximum."""
    result = DecodingStats()
    for row in rows:
        for one in fields(DecodingStats):
            mine, more = getattr(result, one.name), getattr(row, one.name)
            if one.name in _SECONDS:
                setattr(result, one.name, max(mine, more))
            elif isinstance(mine, dict):
                for key, value in more.items():
                    mine[key] += value
            elif isinstance(mine, str):
                setattr(result, one.name, "several" if mine and more and mine != more else mine or more)
            else:
                setattr(result, one.name, mine + more)
    return result


def total_in_sequence(calls: Iterable[DecodingStats]) -> DecodingStats:
    """Add up calls that ran one after the other: counters and seconds are summed.

    The time to the first token runs to the first token of the last call.
    """
    done = list(calls)
    result = total(done)
    result.prefill_s = sum(stats.prefill_s for stats in done)
    result.decode_s = sum(stats.decode_s for stats in done)
    result.ttft_s = sum(stats.prefill_s + stats.decode_s for stats in done[:-1]) + (done[-1].ttft_s if done else 0.0)
    return result
