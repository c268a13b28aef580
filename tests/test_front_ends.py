"""Front-ends that call `model.generate`: with lookahead enabled each shows what it shows without.

`make test-front-ends` installs them all; elsewhere those that are missing are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

import lookahead
from lookahead.engine.engine import Engine

TEXTS = ["the cat sat on the cat", "abab abab", "what? what? what?", "to be or not to be"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
GREEDY = {"do_sample": False, "max_new_tokens": 40}
# Few letters and few digits: a random model writes them until the limit.
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role[0] }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of bytes with an end-of-sequence token and a chat template, saved as any other."""
    vocabulary = {"<eos>": 0, "<pad>": 1}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left", chat_template=TEMPLATE
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("front_ends") / "model"
    LlamaForCausalLM(config).save_pretrained(path)
    fast.save_pretrained(path)
    return path


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the steps of our engine, to tell whether it was at work."""
    counted: list[int] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: counted.append(1) or step(self))
    return counted


@pytest.fixture
def same(model: Any, steps: list[int]) -> Iterator[Callable[..., Any]]:
    """Checks that something gives the same with lookahead enabled, decoded by our engine unless told otherwise."""

    def check(run: Callable[[], Any], *, on: Any = None, is_drafted: bool = True) -> Any:
        expected = run()
        assert not steps
        with lookahead.enable(model if on is None else on):
            assert run() == expected
        assert bool(steps) == is_drafted
        steps.clear()
        return expected

    yield check


# transformers


def test_a_pipeline_of_texts(model, tokenizer, same):
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    same(lambda: pipe(TEXTS[0], **GREEDY))
    same(lambda: pipe(TEXTS, **GREEDY))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_pipeline_of_chats_one_by_one_and_in_batches(model, tokenizer, same, batch_size):
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    shown = same(lambda: pipe(CHATS, batch_size=batch_size, **GREEDY))
    assert [each[0]["generated_text"][-1]["role"] for each in shown] == ["assistant"] * 4


def test_a_pipeline_that_samples(model, tokenizer, same):
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)

    def run() -> Any:
        torch.manual_seed(3)
        return pipe(CHATS[0], do_sample=True, temperature=0.7, top_k=20, max_new_tokens=40)

    same(run)


# LangChain


@pytest.mark.parametrize("batch_size", [1, 4])
def test_langchain_invoked_in_batches_and_streamed(model, tokenizer, same, batch_size):
    langchain = pytest.importorskip("langchain_huggingface")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"pipeline_kwargs": GREEDY}
    llm = langchain.HuggingFacePipeline(pipeline=pipe, batch_size=batch_size)
    same(lambda: llm.invoke(TEXTS[0], **options))
    same(lambda: llm.batch(TEXTS, **options))
    same(lambda: "".join(llm.stream(TEXTS[1], **options)))


def test_a_chat_of_langchain(model, tokenizer, same):
    langchain = pytest.importorskip("langchain_huggingface")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, return_full_text=False, **GREEDY)
    chat = langchain.ChatHuggingFace(llm=langchain.HuggingFacePipeline(pipeline=pipe), tokenizer=tokenizer)
    same(lambda: chat.invoke([("human", TEXTS[0])]).content)


# smolagents


def test_smolagents_generates_and_streams(folder, same):
    smolagents = pytest.importorskip("smolagents")
    agent_model = smolagents.TransformersModel(str(folder), device_map="cpu", torch_dtype="float32", max_new_tokens=40)
    messages = [{"role": "user", "content": [{"type": "text", "text": TEXTS[0]}]}]
    told = same(lambda: agent_model.generate(messages).content, on=agent_model.model)
    stop = told[10:12]
    same(lambda: agent_model.generate(messages, stop_sequences=[stop]).content, on=agent_model.model)
    same(lambda: [each.content for each in agent_model.generate_stream(messages)], on=agent_model.model)


# lm-eval


@pytest.mark.parametrize("batch_size", [1, 4])
def test_lm_eval_gives_the_same_scores(model, tokenizer, same, tmp_path, batch_size):
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lines = [{"question": text, "answer": text[:3]} for text in TEXTS]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "tiny.yaml").write_text(
        "task: tiny\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'data.jsonl'}}}}}\n"
        "test_split: test\n"
        "output_type: generate_until\n"
        "doc_to_text: '{{question}}'\n"
        "doc_to_target: '{{answer}}'\n"
        'generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 40}\n'
        "metric_list:\n"
        "  - {metric: exact_match, aggregation: mean, higher_is_better: true}\n"
        "  - {metric: chrf, aggregation: chrf, higher_is_better: true}\n"
    )

    def run() -> Any:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device="cpu")
        tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
        found = simple_evaluate(lm, tasks=["tiny"], task_manager=tasks, bootstrap_iters=0, log_samples=True)
        return found["results"]["tiny"], [sample["resps"] for sample in found["samples"]["tiny"]]

    # Its stopping criterion keeps a state for the whole batch.
    with pytest.warns(UserWarning) if batch_size > 1 else _quiet():
        same(run, is_drafted=batch_size == 1)


# Grammars: a processor that keeps a state is served for one prompt, and a batch is left to transformers.


@pytest.mark.parametrize("rows", [1, 4])
def test_xgrammar(model, tokenizer, same, rows):
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    inputs = tokenizer(TEXTS[:rows], return_tensors="pt", padding=True)

    def run() -> Any:
        processor = xgrammar.contrib.hf.LogitsProcessor(grammar)
        return model.generate(**inputs, **GREEDY, logits_processor=[processor]).tolist()

    with pytest.warns(UserWarning, match="LogitsProcessor") if rows > 1 else _quiet():
        tokens = same(run, is_drafted=rows == 1)
    assert tokenizer.decode(tokens[0], skip_special_tokens=True)[len(TEXTS[0]) :].startswith("{")


@pytest.mark.parametrize("rows", [1, 4])
def test_outlines(model, tokenizer, same, rows):
    outlines = pytest.importorskip("outlines")
    wrapped = outlines.from_transformers(model, tokenizer)
    generator = outlines.Generator(wrapped, outlines.json_schema(json.dumps(SCHEMA)))

    def run() -> Any:
        return generator(TEXTS[0], **GREEDY) if rows == 1 else generator.batch(TEXTS, **GREEDY)

    with pytest.warns(UserWarning) if rows > 1 else _quiet():
        same(run, is_drafted=rows == 1)


@pytest.mark.parametrize("rows", [1, 4])
def test_lm_format_enforcer(model, tokenizer, same, rows):
    enforcer = pytest.importorskip("lmformatenforcer")
    # Its module for transformers imports a name that transformers 5 no longer has, so the same is built of its core.
    letters = [(i, tokenizer.decode([i]), False) for i in range(2, model.config.vocab_size)]
    known = [each for each in letters if each[1].isascii() and each[1].isprintable()]
    data = enforcer.TokenEnforcerTokenizerData(known, tokenizer.decode, tokenizer.eos_token_id, False, len(tokenizer))
    inputs = tokenizer(TEXTS[:rows], return_tensors="pt", padding=True)

    def run() -> Any:
        tokens = enforcer.TokenEnforcer(data, enforcer.JsonSchemaParser(SCHEMA))

        def allowed(row: int, ids: torch.Tensor) -> list[int]:
            return tokens.get_allowed_tokens(ids.tolist()).allowed_tokens

        return model.generate(**inputs, **GREEDY, prefix_allowed_tokens_fn=allowed).tolist()

    with pytest.warns(UserWarning, match="prefix_allowed_tokens_fn") if rows > 1 else _quiet():
        same(run, is_drafted=rows == 1)


def _quiet() -> Any:
    """Fails on a warning of ours."""
    import warnings

    class Quiet(warnings.catch_warnings):
        def __enter__(self) -> Any:
            entered = super().__enter__()
            warnings.filterwarnings("error", module="lookahead")
            return entered

    return Quiet()
