"""The summarizer's byte-level BPE tokenizer and its prompt format."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, EOS, DOC, SUM = "<pad>", "<eos>", "<doc>", "<sum>"
SPECIAL_TOKENS = (PAD, EOS, DOC, SUM)
"""Their ids are 0, 1, 2, 3."""

TEMPLATE = "{{ '<doc> ' ~ messages[-1]['content'].split() | join(' ') ~ '<sum>' }}"
"""Renders the last message as a prompt, its whitespace collapsed as `corpus.clean` does.

The space after `<doc>` gives the first word of the passage the same token as inside a text, so
copying a sentence is copying its tokens.
"""


def prompt(passage: str) -> str:
    """The prompt that asks for an extract of the passage, as `TEMPLATE` renders it.

    >>> prompt("It  rained.")
    '<doc> It rained.<sum>'
    """
    return f"{DOC} {' '.join(passage.split())}{SUM}"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on cleaned texts, with at least 260 tokens, special ones included."""
    if vocab_size < len(SPECIAL_TOKENS) + 256:
        raise ValueError(f"vocab_size must be at least {len(SPECIAL_TOKENS) + 256}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrap(tokenizer, max_length=max_length)


def wrap(tokenizer: Tokenizer, *, max_length: int) -> PreTrainedTokenizerFast:
    """Dress a trained tokenizer for transformers: special tokens, length, chat templates."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[DOC, SUM],
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = {"default": TEMPLATE, "summarize": TEMPLATE}
    return fast
