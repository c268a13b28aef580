"""How a model under training does on held-out text: losses, copying, verbatim extracts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tools.train_extractor.rows import EOS_ID, SUM_ID, Batch, RowMaker, pad
from tools.train_extractor.stream import bare_sentences
from tools.train_extractor.trainer import wanted_logits


@dataclass(frozen=True, slots=True)
class Probe:
    """Fixed held-out rows."""

    batches: dict[str, Batch]  # by kind of row
    passages: list[npt.NDArray[np.int32]]  # prompts to summarize

    @classmethod
    def draw(cls, maker: RowMaker, *, rows: int = 12, passages: int = 6, size: int = 320) -> Probe:
        """Draw the rows and passages, always the same ones."""
        rng = np.random.default_rng(20_040)
        batches = {
            kind: pad([maker.make(kind, size, rng) for _ in range(rows)])
            for kind in ("language", "tiled", "ambiguous", "copy", "summary")
        }
        drawn = [maker.summary(int(rng.integers(200, 900)), rng).ids for _ in range(passages)]
        return cls(batches, [ids[: int(np.argmax(ids == SUM_ID)) + 1] for ids in drawn])

    @torch.no_grad()
    def measure(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
        """Loss (nats) and accuracy by kind, and the share of extract sentences that are verbatim."""
        training = model.config._attn_implementation
        model.eval()
        found: dict[str, float] = {}
        for kind, batch in self.batches.items():
            logits, labels = wanted_logits(model, batch)
            found[f"{kind}_loss"] = round(float(F.cross_entropy(logits, labels)), 4)
            found[f"{kind}_accuracy"] = round(float((logits.argmax(-1) == labels).float().mean()), 4)
        model.set_attn_implementation("sdpa")  # generation keeps a cache
        found["verbatim"] = round(self._verbatim(model, tokenizer), 4)
        model.set_attn_implementation(training)
        model.train()
        return found

    def _verbatim(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
        shares = [0, 0]
        for prompt in self.passages:
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            output = model.generate(  # type: ignore[misc]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=160,
                do_sample=False,
                eos_token_id=EOS_ID,
                pad_token_id=0,
            )
            extract = str(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True))
            source = str(tokenizer.decode(prompt, skip_special_tokens=True))
            hits, emitted = verbatim_sentences(source, extract)
            shares = [shares[0] + hits, shares[1] + emitted]
        return shares[0] / max(1, shares[1])


def verbatim_sentences(source: str, extract: str) -> tuple[int, int]:
    """How many sentences of the extract stand in the source as they are, and how many it has.

    >>> verbatim_sentences("It rained. We stayed in.", " It rained. We went in.")
    (1, 2)
    """
    emitted: Sequence[str] = bare_sentences(extract.strip())
    return sum(sentence in source for sentence in emitted), len(emitted)
