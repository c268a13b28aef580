"""One output of a server, and the updates for its client."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lookahead.decoding.request import Request
from lookahead.decoding.text_pieces import TextPieces
from lookahead.engine.row import Row
from lookahead.serving.requests import GenerationRequest, OnUpdate, TokenLogprobs, Update

_LEAST_LOG = -9999.0  # JSON has no infinity


class Output:
    """An output of a client.

    Args:
        request: Its request in a scheduler.
        tokenizer: The tokenizer.
        on_update: Gets its updates.
        asked: The client's request.

    Attributes:
        has_begun: Whether an update was sent.
    """

    def __init__(
        self, request: Request, tokenizer: PreTrainedTokenizerBase, on_update: OnUpdate, asked: GenerationRequest
    ) -> None:
        self.request, self.has_begun, self._top = request, False, asked.top_logprobs
        self._hidden_ends = frozenset(asked.hidden_ends)
        self._pieces, self._on_update = TextPieces(tokenizer), on_update

    def tell(self) -> None:
        """Send what the last step wrote, or that the output was cancelled."""
        request, self.has_begun = self.request, True
        last = request.last
        if last is None or (request.is_over and not request.is_finished):
            self._on_update(Update(text=self._pieces.end(), end="cancelled", stats=request.stats))
            return
        tokens = last.tokens.tolist()
        is_hidden = last.finish_reason == "stop" and tokens[-1] in self._hidden_ends
        text = self._pieces.put(tokens[:-1] if is_hidden else tokens)
        if last.finish_reason is not None:
            text += self._pieces.end()
        end, error, logprobs = last.finish_reason, last.error, list[TokenLogprobs]()
        if request.row is not None and self._top is not None and error is None:
            logprobs = self._logprobs(request.row, tokens)
        self._on_update(Update(text=text, tokens=tokens, logprobs=logprobs, end=end, error=error, stats=request.stats))

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
