"""Decodes outputs that cannot share a batch, one after another."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from transformers import StoppingCriteria

from lookahead.serving.output import Output
from lookahead.serving.requests import Ticket


class AloneWorker:
    """Decodes outputs on its own thread, in the order of arrival.

    Attributes:
        running: Number of outputs being decoded, 0 or 1.
    """

    def __init__(self) -> None:
        self.running = 0
        self._changed, self._closed, self._outputs = threading.Condition(), False, deque[Output]()
        self._thread: threading.Thread | None = None  # started with the first output

    @property
    def waiting(self) -> int:
        """Number of waiting outputs."""
        return len(self._outputs)

    def put(self, output: Output) -> None:
        """Add an output to the queue."""
        with self._changed:
            self._outputs.append(output)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """End all outputs with `"cancelled"`, and the thread after its current step."""
        with self._changed:
            self._closed, gone = True, list(self._outputs)
            self._outputs.clear()
            self._changed.notify_all()
        for output in gone:
            output.stop("cancelled")

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._outputs):
                    self._changed.wait()
                if self._closed:
                    return
                self.running = 1  # first: an output counts as waiting or running at every moment
                output = self._outputs.popleft()
            try:
                self._decode(output)
            except Exception as error:
                output.stop(error)
            finally:
                self.running = 0

    def _decode(self, output: Output) -> None:
        if output.ticket.is_cancelled:
            output.stop("cancelled")
            return
        output.plan.call.stopping_criteria.append(_Cancelled(output.ticket))  # for the loop of transformers
        if output.seed is not None:
            torch.manual_seed(output.seed)
        loop = output.plan.begin()
        steps: Any = loop.run()
        with suppress(StopIteration):
            while not (output.ticket.is_cancelled or self._closed):
                for each in next(steps):
                    output.step(each, None, loop.stats[0])
        steps.close()
        output.stop("cancelled")


class _Cancelled(StoppingCriteria):
    """Ends the loop of transformers when its request is cancelled."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self._ticket.is_cancelled, device=input_ids.device)
