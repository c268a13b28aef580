"""One output of a server: its row, and the updates for its client."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lookahead.decoding.plan import RequestPlan
from lookahead.decoding.text_pieces import TextPieces
from lookahead.engine.row import Row, StepOutput
from lookahead.serving.requests import EndReason, GenerationRequest, OnUpdate, Ticket, TokenLogprobs, Update
from lookahead.stats import DecodingStats

_LEAST_LOG = -9999.0  # JSON has no infinity


class Output:
    """An output that is waiting, being read, or being decoded.

    Args:
        plan: Its resolved request.
        row: Its row; None if it is decoded alone.
        tokenizer: The tokenizer.
        on_update: Gets its updates.
        request: The request.
    """

    def __init__(
        self,
        plan: RequestPlan,
        row: Row | None,
        tokenizer: PreTrainedTokenizerBase,
        on_update: OnUpdate,
        request: GenerationRequest,
    ) -> None:
        self.plan, self.row, self.ticket, self.has_ended = plan, row, Ticket(), False
        self.seed, self._top = request.seed, request.top_logprobs
        self._pieces, self._on_update = TextPieces(tokenizer), on_update

    def step(self, step_output: StepOutput, row: Row | None, stats: DecodingStats) -> None:
        """Send the update of a step."""
        tokens = step_output.tokens.tolist()
        text = self._pieces.put(tokens)
        if step_output.finished and step_output.error is None:
            text += self._pieces.end()
        logprobs = [] if row is None or self._top is None else self._logprobs(row, tokens)
        end, error = step_output.finish_reason, step_output.error
        self._tell(Update(text=text, tokens=tokens, logprobs=logprobs, end=end, error=error, stats=stats))

    def stop(self, reason: EndReason | Exception) -> None:
        """End the output, unless it has ended."""
        if self.has_ended:
            return
        stats = DecodingStats() if self.row is None else self.row.stats
        if isinstance(reason, Exception):
            self._tell(Update(error=reason, stats=stats))
        else:
            self._tell(Update(text=self._pieces.end(), end=reason, stats=stats))

    def _tell(self, update: Update) -> None:
        self.has_ended = update.is_last
        self._on_update(update)

    def _logprobs(self, row: Row, tokens: list[int]) -> list[TokenLogprobs]:
        """Log-probabilities of new tokens, from the logits that the chooser kept; the logits are dropped."""
        kept: list[Tensor] = row.chooser.logits[row.place]
        found = []
        for token, logits in zip(tokens, kept, strict=True):
            logs = torch.log_softmax(logits.float(), -1).clamp_min(_LEAST_LOG)
            top = logs.topk(min(self._top or 0, len(logs)))
            pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            found.append(TokenLogprobs(token, float(logs[token]), pairs))
        kept.clear()
        row.chooser.scores[row.place].clear()
        return found
