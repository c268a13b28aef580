"""Small tokenizers, one for each kind of decoder in transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXTS = [
    "def f(x):\n    if x:\n\n        return  [x]\n\ty = 1\n",
    "你好，世界。今天天气很好。\n    缩进",
    "👩\u200d👩\u200d👧\u200d👦 family 🏳️\u200d🌈",
    "cafe\u0301 a\u0308\u0323 naïve \ufffd",
    "don't . I 'm ' s he 's ' ' ' ok ! ?  ' a ' , they 've we 're",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _fast(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **options)


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate([*SPECIAL, *tokens])}


def byte_level(texts: Sequence[str] = TEXTS) -> PreTrainedTokenizerFast:
    """Tokens are bytes and frequent byte sequences, as in GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts] * 2, trainer)
    return _fast(tokenizer)


def stripping(pieces: list[str] | None = None) -> PreTrainedTokenizerFast:
    """The decoder strips one space, and bytes replace characters outside the vocabulary, as in Llama 2."""
    words = ["▁", "▁▁", "▁▁▁▁", "a", "▁a", "if", "▁if", "x", "▁x", "return", "▁return", "'", "▁'", "s", "."]
    tokenizer = Tokenizer(models.BPE(_numbered(pieces or BYTES + words), [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([*steps])
    if pieces is None:
        tokenizer.add_special_tokens([AddedToken("<|turn|>", special=True)])
        tokenizer.add_tokens(["<tool>"])
    return _fast(tokenizer)


def unigram(**options: Any) -> PreTrainedTokenizerFast:
    """Tokens begin with a mark for a space, as in T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return _fast(tokenizer, **options)


def word_pieces() -> PreTrainedTokenizerFast:
    """Spaces between words are made by the decoder, and cleaned up around punctuation, as in BERT."""
    words = ["a", "do", "not", "n", "m", "t", "ve", "re", "hello", "I", "你", "n't", "'s"]
    vocabulary = _numbered([*words, *"'s.,?!", "##a", "##ing", "##s", "##好"])
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece("##", True)
    return _fast(tokenizer, clean_up_tokenization_spaces=True)


def word_ends() -> PreTrainedTokenizerFast:
    """Tokens end with a mark for a space, dropped from the last token, as in CTRL and the first GPT."""
    vocabulary = _numbered(["a", "b</w>", "c</w>", "ab</w>", ".</w>"])
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder("</w>")
    return _fast(tokenizer)


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte level": byte_level,
    "stripping": stripping,
    "unigram": unigram,
    "unigram, cleaned up": partial(unigram, clean_up_tokenization_spaces=True),
    "word pieces": word_pieces,
    "word ends": word_ends,
    "bytes in Python": partial(ByT5Tokenizer, extra_ids=3),
}
