"""How summaries end: by the model, by the token limit, or without a word; and how many prompts are read together."""

from __future__ import annotations

import copy

import pytest

import lookahead
from lookahead import DocumentError
from lookahead.documents.decode_text import Document
from lookahead.summarization.summarizer import Summarizer

SENTENCE = "The cat sat on the mat. "  # with the tokenizer of these tests a token is a character


def test_a_summary_tells_whether_the_token_limit_cut_it_off(tiny_llama, tiny_tokenizer):
    model = copy.deepcopy(tiny_llama)
    whole = Summarizer(model, tiny_tokenizer, max_new_tokens=20)
    assert whole.summarize(SENTENCE).finish_reason == "length"
    (prompt,) = whole.fitter.prompts(whole.fitter.fit(SENTENCE).parts)
    tokens = lookahead.generate(model, tiny_tokenizer, prompt, max_new_tokens=20, do_sample=False).token_ids[0]
    model.generation_config.eos_token_id = [101, tokens[11]]
    end = tokens.index(tokens[11]) + 1
    for limit, reason in ((end - 1, "length"), (end, "stop"), (end + 1, "stop")):
        summarizer = Summarizer(model, tiny_tokenizer, max_new_tokens=limit)
        (together,) = summarizer.summarize_all([Document("a", SENTENCE)])
        for summary in (summarizer.summarize(SENTENCE), together.summary):
            assert (summary.summary_tokens, summary.finish_reason) == (min(end, limit), reason)
            assert summary.to_dict()["finish_reason"] == reason


def test_a_document_of_which_the_model_says_nothing_is_not_done(tiny_llama, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.decode = lambda *_, **__: " "
    summarizer = Summarizer(tiny_llama, tokenizer, max_new_tokens=8)
    with pytest.raises(DocumentError, match="the model wrote no summary of the document's 23 tokens"):
        summarizer.summarize(SENTENCE)
    (reject,) = summarizer.summarize_all([Document("a.txt", SENTENCE)])
    assert reject.error == "a.txt: the model wrote no summary of the document's 23 tokens"


def test_parts_too_long_for_the_cache_together_are_read_one_after_the_other(tiny_llama, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("lookahead.summarization.summarizer.cache_tokens_of", lambda *_: 900)
    summarizer, together = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=16), []
    generate = lookahead.generate

    def watched(model, tokenizer, prompts, *, max_new_tokens, **options):
        together.append(len(prompts))
        assert len(prompts) == 1 or len(prompts) * (max(map(len, prompts)) + max_new_tokens) <= 900
        return generate(model, tokenizer, prompts, max_new_tokens=max_new_tokens, **options)

    monkeypatch.setattr("lookahead.summarization.summarizer.generate", watched)
    assert summarizer.summarize(SENTENCE * 60).parts > 2
    assert max(together[:-1]) == 1
