"""The decoding loop of the server with models whose layers differ, or keep states."""

from __future__ import annotations

import pytest

from lookahead.serving.decoding_loop import DecodingLoop
from lookahead.serving.requests import GenerationRequest
from tests.support.families import FAMILIES, build
from tests.test_decoding_loop import GREEDY, Client, alone, serving

__all__ = ["serving"]  # a fixture

KEEPING_MORE = "Lfm2", "Qwen3Next"
CONTINUED = "Bamba", "Lfm2", "Lfm2Moe", "OlmoHybrid", "Qwen3_5", "Qwen3Next", "Zamba2"
BEGUN_ANEW = "FalconMamba", "Jamba", "Mamba", "Zamba"  # by a pass of several tokens, in transformers too


@pytest.mark.parametrize("name", ["Gemma4", "MiniMax", "RecurrentGemma"])
def test_models_whose_layers_differ_or_that_verify_no_trees_are_served(name, tiny_tokenizer):
    model = build(FAMILIES[name])
    loop, request = DecodingLoop(model, tiny_tokenizer, rows=2), GenerationRequest(ids=[*range(5, 30)], options=GREEDY)
    clients = [Client(loop, request) for _ in range(2)]
    assert [client.wait().error for client in clients] == [None, None]
    assert [client.tokens for client in clients] == 2 * alone(model, tiny_tokenizer, request).token_ids
    loop.close()


@pytest.mark.parametrize("name", KEEPING_MORE)
def test_prefixes_with_states_are_used_whole_or_not_at_all(serving, name, tiny_tokenizer):
    model = build(FAMILIES[name])
    loop = serving(model, tiny_tokenizer, rows=2)
    requests = [GenerationRequest(ids=[*range(5, 5 + length)], options=GREEDY) for length in (40, 40, 70, 9)]
    clients = [Client(loop, request) for request in requests]
    for client, request in zip(clients, requests, strict=True):
        assert client.wait().stats.reused_tokens == 0
        assert client.tokens == alone(model, tiny_tokenizer, request).token_ids[0]


@pytest.mark.parametrize("name", CONTINUED + BEGUN_ANEW)
def test_the_next_turn_of_a_recurrent_model_reads_its_new_tokens_where_it_can_go_on(serving, name, tiny_tokenizer):
    """The states at the end of a turn are kept; a prompt that leaves the text before its end reads all."""
    model = build(FAMILIES[name])
    loop = serving(model, tiny_tokenizer, rows=2)
    first = GenerationRequest(ids=[*range(5, 45)], options=GREEDY)
    client = Client(loop, first)
    client.wait()
    text = [*first.ids, *client.tokens]
    for ids, reused in (([*text, 7, 8, 9], len(text) - 1), ([*text[:-4], 7, 8, 9], 0), (text[:-1], 0)):
        request = GenerationRequest(ids=ids, options=GREEDY)
        client = Client(loop, request)
        assert client.wait().stats.reused_tokens == (reused if name in CONTINUED else 0)
        assert client.tokens == alone(model, tiny_tokenizer, request).token_ids[0]
