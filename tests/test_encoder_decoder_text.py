"""Encoder-decoder models from text to text: where drafts come from, and the command line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import lookahead
from lookahead import DraftModel, LookaheadConfig
from lookahead.cli.app import app
from lookahead.documents.decode_text import Document
from lookahead.drafting.proposal import IntArray
from lookahead.errors import ConfigError, PromptError, UnsupportedModelError
from lookahead.summarization.prompting import Prompting
from lookahead.summarization.summarizer import Summarized, Summarizer
from tests.support.families import ENCODER_DECODERS, build

DOCUMENT = "A boy met a dog. The dog met a cat. The boy, the dog and the cat went home, and the cat slept."
FIXED = LookaheadConfig(draft="fixed", memory="request", trust_user_code=True)


class Copies(LogitsProcessor):
    """Makes a decoder say what its encoder read, token by token, as a summarizer does for long stretches."""

    def __init__(self, read: list[int]) -> None:
        self.read = read

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        told = torch.full_like(scores, -torch.inf)
        for row in range(len(scores)):
            told[row, self.read[min(input_ids.shape[1] - 1, len(self.read) - 1)]] = 0.0
        return told


@pytest.fixture(scope="module", params=["Bart", "T5"])
def model(request: Any) -> PreTrainedModel:
    return build(ENCODER_DECODERS[request.param])


def own_tokens(model: Any, tokenizer: Any, text: str, **options: Any) -> list[int]:
    """What `model.generate` says after its start token."""
    output: torch.Tensor = model.generate(
        **tokenizer(text, return_tensors="pt", return_token_type_ids=False), **options
    )
    return output[0, 1:].tolist()


def test_what_the_encoder_reads_is_drafted_from(
    model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    read = tiny_tokenizer(DOCUMENT)["input_ids"]
    options = {"max_new_tokens": len(read), "do_sample": False, "logits_processor": [Copies(read)]}
    result = lookahead.generate(model, tiny_tokenizer, DOCUMENT, config=FIXED, **options)
    assert result.texts == [DOCUMENT]
    assert result.stats.mean_acceptance_length > 8
    assert result.stats.accepted_by_source["prompt"] > 0.8 * len(read)
    assert result.stats.prompt_tokens == len(read) + 1  # and the decoder's start token


def test_earlier_outputs_are_drafted_from(model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    said = tiny_tokenizer("Nothing of this is in the document, every word is new!")["input_ids"]
    options = {"max_new_tokens": len(said), "do_sample": False, "logits_processor": [Copies(said)]}
    config = LookaheadConfig(proposers=("outputs",), draft="fixed")
    passes = [
        lookahead.generate(model, tiny_tokenizer, DOCUMENT, config=config, **options).stats.target_forwards
        for _ in range(2)
    ]
    assert passes[1] < passes[0] / 3


def test_text_is_generated_and_streamed_as_the_model_itself_would(
    model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    options = {"max_new_tokens": 30, "do_sample": False, "repetition_penalty": 1.3}
    result = lookahead.generate(model, tiny_tokenizer, DOCUMENT, config=FIXED, **options)
    assert result.token_ids == [own_tokens(model, tiny_tokenizer, DOCUMENT, **options)]
    assert "".join(lookahead.stream(model, tiny_tokenizer, DOCUMENT, **options)) == result.texts[0]
    both = lookahead.generate(model, tiny_tokenizer, [DOCUMENT, "A cat."], **options)
    assert both.token_ids == [own_tokens(model, tiny_tokenizer, text, **options) for text in (DOCUMENT, "A cat.")]


def test_a_switch_serves_stop_strings(model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    said = tiny_tokenizer(DOCUMENT)["input_ids"]
    options = {"max_new_tokens": 60, "logits_processor": [Copies(said)], "stop_strings": ["dog."]}
    inputs = tiny_tokenizer(DOCUMENT, return_tensors="pt", return_token_type_ids=False)
    expected = model.generate(**inputs, **options, tokenizer=tiny_tokenizer)
    with lookahead.enable(model, FIXED):
        assert torch.equal(model.generate(**inputs, **options, tokenizer=tiny_tokenizer), expected)
    assert tiny_tokenizer.decode(expected[0], skip_special_tokens=True).endswith("A boy met a dog.")


class Remembers:
    """A proposer that offers nothing and keeps what it was shown."""

    sources, needs_argmax, needs_top, hidden_layers = ("remembers",), False, False, ()
    prompts: list[list[int]] = []  # noqa: RUF012

    def __init__(self, call: Any) -> None:
        assert call.inputs is not None and not call.is_chain

    def start(self, row: int, prompt: IntArray) -> None:
        self.prompts.append(prompt.tolist())

    def propose(self, row: int, max_nodes: int) -> None: ...
    def observe(self, row: int, outcome: Any, placed: IntArray) -> None: ...
    def finish(self, row: int) -> None: ...


class Curious(Remembers):
    """One that wants hidden states."""

    hidden_layers = (-1,)


def test_a_proposer_of_ones_own_is_shown_the_input(
    model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = LookaheadConfig(proposers=("prompt", Remembers))
    lookahead.generate(model, tiny_tokenizer, DOCUMENT, config=config, max_new_tokens=9)
    start = model.config.decoder_start_token_id
    assert Remembers.prompts[-1] == [*tiny_tokenizer(DOCUMENT)["input_ids"], start]
    with pytest.raises(UnsupportedModelError, match="no hidden states"):
        curious = LookaheadConfig(proposers=(Curious,))
        lookahead.generate(model, tiny_tokenizer, DOCUMENT, config=curious, max_new_tokens=9)


def test_a_causal_draft_model_changes_no_token(
    model: PreTrainedModel, tiny_llama: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = LookaheadConfig(proposers=("prompt", DraftModel(tiny_llama)), draft="fixed")
    options = {"max_new_tokens": 20, "do_sample": False}
    result = lookahead.generate(model, tiny_tokenizer, DOCUMENT, config=config, **options)
    assert result.token_ids == [own_tokens(model, tiny_tokenizer, DOCUMENT, **options)]


def test_what_the_encoder_cannot_read_is_told_before_it_fails(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    bart = build(ENCODER_DECODERS["Bart"])
    with pytest.raises(PromptError, match="input 0 has 940 tokens and the encoder has 256 positions"):
        lookahead.generate(bart, tiny_tokenizer, DOCUMENT * 10, max_new_tokens=3)
    for config in (None, LookaheadConfig(proposers=())):  # plain steps run over the table as well
        with pytest.raises(PromptError, match="lower max_new_tokens"):
            lookahead.generate(bart, tiny_tokenizer, DOCUMENT, config=config, max_new_tokens=300)
    small = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(PromptError, match="vocabulary ends at 49"):
        lookahead.generate(small.eval(), tiny_tokenizer, "zebra", max_new_tokens=3)


def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, **config: Any) -> str:
    """The folder of a model as the command line takes it; its configuration asks for beams, as published ones do."""
    model.config.update(config)
    model.generation_config.update(num_beams=4, eos_token_id=2, early_stopping=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["Bart", "T5", "LED"])
def test_the_command_line_summarizes_documents_longer_than_the_encoder_reads(
    name: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    limit = {"model_max_length": 120} if name == "T5" else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer._tokenizer, pad_token="<pad>", **limit)
    prefix = {"task_specific_params": {"summarization": {"prefix": "summarize: "}}} if name == "T5" else {}
    folder = saved(build(ENCODER_DECODERS[name]), tokenizer, tmp_path / "model", **prefix)
    (tmp_path / "long.txt").write_text(DOCUMENT * 4)
    options = ["--model", folder, "-o", str(tmp_path / "out.jsonl"), "--max-new-tokens", "12", "--compare"]
    run = CliRunner().invoke(app, ["summarize", str(tmp_path / "long.txt"), *options])
    assert run.exit_code == 0, run.output
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert line["identical"] is True and line["parts"] > 1 and line["summary_tokens"] <= 12


def test_an_encoder_reads_the_document_behind_the_prefix_its_model_wants(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    t5, bart = build(ENCODER_DECODERS["T5"]), build(ENCODER_DECODERS["Bart"])
    t5.config.task_specific_params = {"summarization": {"prefix": "summarize: "}}
    assert Prompting(tiny_tokenizer, model=t5).render("A cat.") == "summarize: A cat."
    assert Prompting(tiny_tokenizer, model=bart).render("A cat.") == "A cat."
    with pytest.raises(ConfigError, match="encoder must read at least"):
        tiny_tokenizer_of_ten = PreTrainedTokenizerFast(
            tokenizer_object=tiny_tokenizer._tokenizer, pad_token="<pad>", model_max_length=10
        )
        lookahead.summarize(DOCUMENT, t5, tiny_tokenizer_of_ten, max_new_tokens=5)


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_documents_of_a_job_are_drafted_for_and_each_is_read_once(
    name: str, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, texts = build(ENCODER_DECODERS[name]), [DOCUMENT[5:], DOCUMENT[:60], DOCUMENT[20:]]
    model.generation_config.no_repeat_ngram_size = 5  # with processors of its own, as BART's and T5's checkpoints have
    read: list[torch.Tensor] = []
    model.get_encoder().register_forward_pre_hook(
        lambda _, args, inputs: read.extend(inputs["input_ids"]), with_kwargs=True
    )
    summarizer = Summarizer(model, tiny_tokenizer, max_new_tokens=12, config=FIXED)
    expected = [summarizer.summarize(text) for text in texts]
    read.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that they are decoded plainly would be one
        done = list(summarizer.summarize_all(Document(number, text) for number, text in enumerate(texts)))
    summaries = {each.document.id: each.summary for each in done if isinstance(each, Summarized)}
    assert [summaries[number].text for number in range(3)] == [summary.text for summary in expected]
    assert all(summary.stats.drafted_tokens > 0 for summary in summaries.values())
    assert len(read) == len(texts)
