"""A declared family for each mechanism; `test_declared_families.py` has all families, for changes of their rooms."""

from __future__ import annotations

import pytest

from tests import test_declared_families as every
from tests.support.declared import has_kernels
from tests.support.small_layers import on_x86

pytestmark = [on_x86, has_kernels]
MECHANISMS = {
    "soft caps": "Gemma2",
    "windows and norms of heads": "Gemma3",
    "keys of another layer": "Gemma4",
    "norms after": "Olmo2",
    "joined products": "Phi3",
    "multipliers": "Granite",
    "layers without rope": "SmolLM3",
    "biases": "Starcoder2",
    "parallel branches": "GPTNeoX",
    "interleaved rope": "Glm4",
    "a shared expert": "Qwen2Moe",
    "joined experts": "GraniteMoe",
    "short convolutions": "Lfm2",
    "delta nets": "Qwen3Next",
    "sinks": "GptOss",
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_greedy_passes_are_one_call_with_the_bits_of_generate(mechanism, calls):
    every.test_greedy_passes_are_one_call_with_the_bits_of_generate(MECHANISMS[mechanism], calls)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_in_float32_passes_are_one_call_with_the_tokens_of_generate(mechanism, calls):
    every.test_in_float32_passes_are_one_call_with_the_tokens_of_generate(MECHANISMS[mechanism], calls)


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_windows_are_passed_and_left_with_the_bits_of_generate(name, calls):
    every.test_windows_are_passed_and_left_with_the_bits_of_generate(name, calls)


def test_rows_of_other_lengths_get_the_tokens_of_generate(calls):
    every.test_rows_of_other_lengths_get_the_tokens_of_generate("Gemma3", calls)


def test_a_declaration_that_is_wrong_is_found_by_comparison(monkeypatch):
    every.test_a_declaration_that_is_wrong_is_found_by_comparison(monkeypatch)
