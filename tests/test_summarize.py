"""Documents of any length to summaries, token for token what plain decoding gives."""

from __future__ import annotations

import copy
import json
import resource
import subprocess
import sys
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from lookahead import ConfigError, DocumentError, LookaheadConfig, UnsupportedModelError
from lookahead.jobs.line_file import LineFile
from lookahead.loading import loading
from lookahead.stats import DecodingStats, total_in_sequence
from lookahead.summarization.chunking import MeasuredText, cut
from lookahead.summarization.prompting import INSTRUCTION, PromptFitter, Prompting, context_length
from lookahead.summarization.segmentation import split_pieces
from lookahead.summarization.summarizer import PlainFigures, Summarizer
from tests.support.forked import status_of

# With the tokenizer of these tests a token is a character.
SENTENCE = "The cat sat on the mat. "


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


# Parts


def split_document(text, tokenizer, budget):
    return cut(MeasuredText(split_pieces(text.strip()), tokenizer), budget)


def texts(parts):
    return [part.text for part in parts.parts]


def test_a_document_that_fits_is_left_whole(tiny_tokenizer):
    text = (SENTENCE * 3).strip()
    parts = split_document(f"\n{text} \n", tiny_tokenizer, len(text))
    assert (texts(parts), parts.tokens, parts.split) == ([text], len(text), "none")


def test_a_long_document_is_cut_between_sentences_into_parts_of_similar_length(tiny_tokenizer):
    parts = split_document(SENTENCE * 11, tiny_tokenizer, 240)
    assert parts.split == "sentences"
    assert [len(text) for text in texts(parts)] == [24 * 6 - 1, 24 * 5 - 1]
    assert "".join(texts(parts)).count("The cat sat on the mat.") == 11


def test_a_long_sentence_is_cut_between_its_lines_first(tiny_tokenizer):
    lines = "\n".join(f"line {i} of a list" for i in range(10, 30))
    parts = split_document(lines, tiny_tokenizer, 60)
    assert parts.split == "sentences"
    assert all(text.startswith("line") and text.endswith("list") for text in texts(parts))
    assert "\n".join(texts(parts)) == lines


def test_words_without_a_sentence_or_line_end_are_cut_hard_between_words(tiny_tokenizer):
    words = " ".join(["word"] * 50)
    parts = split_document(words, tiny_tokenizer, 42)
    assert parts.split == "hard"
    assert all(set(text.split()) == {"word"} and len(text) <= 42 for text in texts(parts))
    assert " ".join(texts(parts)) == words


def test_one_endless_word_is_cut_hard_between_tokens(tiny_tokenizer):
    parts = split_document("x" * 100, tiny_tokenizer, 40)
    assert (parts.split, "".join(texts(parts))) == ("hard", "x" * 100)
    assert all(len(text) <= 40 for text in texts(parts))


def test_a_slow_tokenizer_without_offsets_gets_parts_that_are_rather_too_short(tiny_tokenizer):
    class Slow:
        is_fast = False

    parts = split_document("word " * 100, Slow(), 40)
    assert "".join(texts(parts)).replace(" ", "") == "word" * 100
    assert all(len(text.split()) <= 40 for text in texts(parts))


@pytest.mark.parametrize("budget", [16, 17, 40, 100])
@pytest.mark.parametrize(
    "text", [SENTENCE * 9, "x" * 500, "a b " * 90, "1. 2. 3.\n\n" * 30, "é😀" * 100], ids=lambda text: text[:5]
)
def test_no_part_is_longer_than_the_budget_or_lost(tiny_tokenizer, text, budget):
    parts = split_document(text, tiny_tokenizer, budget)
    assert all(0 < len(tiny_tokenizer(part)["input_ids"]) <= budget for part in texts(parts))
    assert "".join("".join(texts(parts)).split()) == "".join(text.split())


# Prompts


def test_a_template_named_summarize_gets_the_bare_document_on_one_line(tiny_tokenizer):
    templates = {"default": "unused", "summarize": "<doc>{{ messages[0]['content'] }}<sum>"}
    prompting = Prompting(with_template(tiny_tokenizer, templates))
    assert prompting.render(prompting.clean("One.\n\n  Two.")) == "<doc>One. Two.<sum>"
    assert not prompting.add_special_tokens


def test_another_chat_template_gets_an_instruction_and_the_document_as_it_is(tiny_tokenizer):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
    )
    for templates in (template, {"default": template, "tool_use": "unused"}):
        prompting = Prompting(with_template(tiny_tokenizer, templates))
        asked = INSTRUCTION.replace("{document}", "One.\n\nTwo.")
        assert asked.startswith("Summarize this article:\n\nOne.\n\nTwo.\n\nSummary")
        assert prompting.render(prompting.clean("One.\n\nTwo.")) == f"[user]{asked}[bot]"
        assert not prompting.add_special_tokens


def test_without_a_template_the_document_is_followed_by_a_cue(tiny_tokenizer):
    prompting = Prompting(tiny_tokenizer)
    assert prompting.render("One.") == "One.\n\nSummary:"
    assert prompting.add_special_tokens


def test_a_special_token_in_a_document_is_spelled_out(tiny_tokenizer):
    prompting = Prompting(tiny_tokenizer)
    prompt = prompting.render(prompting.clean("It writes <eos> and <eos><pad>."))
    assert "It writes < eos> and < eos>< pad>." in prompt
    assert tiny_tokenizer.eos_token_id not in tiny_tokenizer(prompt)["input_ids"]


@pytest.mark.parametrize(("stated", "expected"), [(300, 300), (10**30, 512), (4096, 512)])
def test_the_shorter_of_the_model_and_the_tokenizer_tells_the_context(tiny_llama, tiny_tokenizer, stated, expected):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = stated
    assert context_length(tiny_llama, tokenizer) == expected


@pytest.mark.parametrize("max_new_tokens", [1, 100, 485])
@pytest.mark.parametrize("text", [SENTENCE * 60, "x" * 1500, "😀" * 700], ids=["sentences", "one word", "emoji"])
def test_every_prompt_leaves_room_for_its_summary(tiny_llama, summarizer_path, tiny_tokenizer, text, max_new_tokens):
    for tokenizer in (tiny_tokenizer, AutoTokenizer.from_pretrained(summarizer_path, model_max_length=512)):
        fitter = PromptFitter(tiny_llama, tokenizer, max_new_tokens)
        lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in fitter.prompts(fitter.fit(text).parts)]
        assert max(lengths) <= 512 - max_new_tokens


# Summaries


def test_a_short_document_is_summarized_as_plain_decoding_would(tiny_llama, tiny_tokenizer):
    summary = lookahead.summarize(SENTENCE * 4, tiny_llama, tiny_tokenizer, max_new_tokens=40)
    inputs = tiny_tokenizer((SENTENCE * 4).strip() + "\n\nSummary:", return_tensors="pt")
    plain = tiny_llama.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=0)
    expected = tiny_tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert str(summary) == summary.text == expected.strip()
    assert (summary.document_tokens, summary.summary_tokens) == (95, 40)
    assert (summary.parts, summary.split, summary.plain) == (1, "none", None)
    assert summary.stats.emitted_tokens == 40


@pytest.mark.parametrize(
    ("text", "split"), [(SENTENCE * 100, "sentences"), ("x" * 2400, "hard")], ids=["sentences", "one endless word"]
)
def test_a_document_longer_than_the_context_is_summarized_in_parts(tiny_llama, tiny_tokenizer, text, split):
    summary = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=64, compare=True).summarize(text)
    assert (summary.parts, summary.split) == (6, split)
    assert 0 < summary.summary_tokens <= 64
    assert summary.stats.emitted_tokens > summary.summary_tokens  # the parts' own
    assert summary.plain.identical
    assert summary.plain.stats.emitted_tokens == summary.stats.emitted_tokens


def test_summaries_of_parts_that_do_not_fit_together_are_summarized_again(tiny_llama, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = 60
    summary = Summarizer(tiny_llama, tokenizer, max_new_tokens=20).summarize(SENTENCE * 12)
    assert summary.parts > 8  # more than one batch, and more than one round
    assert summary.summary_tokens == 20


def test_a_config_changes_the_passes_but_not_the_summary(tiny_llama, tiny_tokenizer):
    plain = LookaheadConfig(proposers=())
    summaries = [
        lookahead.summarize(SENTENCE * 4, tiny_llama, tiny_tokenizer, max_new_tokens=48, config=config)
        for config in (plain, None)
    ]
    assert summaries[0].text == summaries[1].text
    assert summaries[0].stats.target_forwards == 47  # the prefill gives the first token


def test_a_summary_is_a_json_ready_dict(tiny_llama, tiny_tokenizer):
    summary = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=16, compare=True).summarize(SENTENCE)
    record = json.loads(json.dumps(summary.to_dict()))
    assert list(record) == [
        "summary", "document_tokens", "summary_tokens", "parts", "split", "finish_reason", "loops", "stats",
        "plain", "speedup", "identical",
    ]  # fmt: skip
    assert record["stats"]["emitted_tokens"] == record["plain"]["emitted_tokens"] == 16
    assert record["identical"] is True
    assert record["speedup"] > 0


def test_figures_of_a_document_that_failed_are_not_charged_to_the_next(tiny_llama, tiny_tokenizer, monkeypatch):
    summarizer = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=16, compare=True)
    with monkeypatch.context() as patch:
        patch.setattr(PromptFitter, "fit_summaries", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            summarizer.summarize(SENTENCE * 30)
    assert summarizer.summarize(SENTENCE).plain.stats.emitted_tokens == 16


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_text_is_refused(tiny_llama, tiny_tokenizer, text):
    with pytest.raises(DocumentError, match="the document is empty"):
        lookahead.summarize(text, tiny_llama, tiny_tokenizer)


@pytest.mark.parametrize(
    ("max_new_tokens", "message"),
    [(0, "at least 1, got 0"), (-1, "at least 1, got -1"), (512, "at most 487 to leave room"), (488, "at most 487")],
)
def test_a_summary_length_that_leaves_no_room_is_refused(tiny_llama, tiny_tokenizer, max_new_tokens, message):
    with pytest.raises(ConfigError, match=message):
        lookahead.summarize(SENTENCE, tiny_llama, tiny_tokenizer, max_new_tokens=max_new_tokens)


def test_a_model_without_its_tokenizer_is_refused(tiny_llama, tiny_tokenizer):
    with pytest.raises(ConfigError, match="got a model but no tokenizer"):
        lookahead.summarize(SENTENCE, tiny_llama)
    with pytest.raises(ConfigError, match="got a tokenizer but no model"):
        lookahead.summarize(SENTENCE, tokenizer=tiny_tokenizer)


# Figures


def test_calls_in_sequence_add_up_their_seconds():
    calls = [
        DecodingStats(emitted_tokens=4, acceptance_histogram=Counter({3: 1}), prefill_s=1, decode_s=2, ttft_s=1.5),
        DecodingStats(emitted_tokens=8, acceptance_histogram=Counter({7: 1}), prefill_s=0.5, decode_s=3, ttft_s=0.75),
    ]
    together = total_in_sequence(calls)
    assert (together.emitted_tokens, together.prefill_s, together.decode_s) == (12, 1.5, 5.0)
    assert together.ttft_s == 3.75
    assert together.tokens_per_s == 2.0
    assert total_in_sequence([]) == DecodingStats()


def test_plain_figures_leave_the_prefill_out_of_the_rate():
    stats = DecodingStats(emitted_tokens=11, acceptance_histogram=Counter({1: 10}), prefill_s=1.0, decode_s=2.0)
    figures = PlainFigures(stats)
    assert figures.to_dict()["tokens_per_s"] == 5.0
    assert figures.speedup(DecodingStats(acceptance_histogram=Counter({5: 2}), decode_s=1.0)) == 2.0
    assert PlainFigures().speedup(DecodingStats()) is None
    both = figures + PlainFigures(DecodingStats(emitted_tokens=1), identical=False)
    assert (both.stats.emitted_tokens, both.stats.decode_s, both.identical) == (12, 2.0, False)


# Lines on disk


def test_a_line_that_does_not_fit_the_disk_leaves_only_whole_lines(tmp_path):
    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        file = LineFile(tmp_path / "out.jsonl")
        with pytest.raises(OSError):
            for i in range(99):
                file.write({"id": i, "text": "x" * 100})
        file.write({"id": "short"})
        sys.exit(i)

    assert status_of(fill) == 8
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["id"] for line in lines] == [*range(8), "short"]
    assert lines[-1].endswith(b"\n")


def test_an_interrupt_in_the_middle_of_a_line_leaves_only_whole_lines(tmp_path, monkeypatch):
    file = LineFile(tmp_path / "out.jsonl")
    file.write({"id": 1})
    real = file._file

    class Interrupted:
        truncate, seek, close, fileno = real.truncate, real.seek, real.close, real.fileno

        def write(self, data):
            real.write(data[:5])
            raise KeyboardInterrupt

    file._file = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        file.write({"id": 2})
    assert (tmp_path / "out.jsonl").read_text() == '{"id": 1}\n'


def test_a_name_that_is_no_text_is_written_as_a_json_escape(tmp_path):
    with LineFile(tmp_path / "out.jsonl") as file:
        file.write({"id": "caf\udce9.txt", "summary": "Größe"})
    line = (tmp_path / "out.jsonl").read_text("utf-8")
    assert line == '{"id": "caf\\udce9.txt", "summary": "Größe"}\n'
    assert json.loads(line)["id"] == "caf\udce9.txt"


# Loading


@pytest.mark.parametrize("name", ["./gone", "/gone/model", "~/gone", "gone/", "a/b/c", "models/gone", "has space"])
def test_what_looks_like_a_path_is_never_looked_for_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(UnsupportedModelError, match="does not exist: looked for the folder /"):
        loading.load(name)


@pytest.mark.parametrize("name", ["gpt2", "org/model", "org/model-1.5_b"])
def test_a_name_of_the_hub_is_none_of_a_path(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "in_time", lambda *_: None)
    loading._check_hub.cache_clear()
    assert loading.locate_model(name) == (name, False)
    loading._check_hub.cache_clear()


def test_a_folder_without_a_model_or_with_a_broken_one_is_refused_in_one_line(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"no config\.json in the folder"):
        loading.load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no such type"}')
    with pytest.raises(UnsupportedModelError, match="cannot be loaded: ") as caught:
        loading.load(str(tmp_path))
    assert "\n" not in str(caught.value)
    with pytest.raises(UnsupportedModelError, match=r"is a file, but not a GGUF file"):
        loading.load(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "dtype must be auto, fp32, bf16, fp16, got 'fp8'"),
        ({"device": "gpu:1"}, "device 'gpu:1' is not available: PyTorch finds cpu"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not available"),
    ],
)
def test_a_dtype_or_device_that_is_none_is_refused(summarizer_path, options, message):
    with pytest.raises(ConfigError, match=message):
        loading.load(str(summarizer_path), **options)


def test_a_saved_model_is_loaded_in_the_dtype_asked_for(tmp_path, tiny_llama, tiny_tokenizer):
    tiny_llama.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    for dtype, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("auto", torch.float32)):
        model, tokenizer = loading.load(str(tmp_path), dtype=dtype, device="cpu")
        assert model.dtype == expected
        assert not model.training
        assert tokenizer("ab")["input_ids"] == tiny_tokenizer("ab")["input_ids"]


# The default model, and the one of the tests


def test_a_default_model_summarizes_from_one_call_and_is_loaded_once(monkeypatch, summarizer_path):
    monkeypatch.setattr(loading, "_default_file", lambda: summarizer_path)
    loading.load_default.cache_clear()
    text = "The storm hit the coast at dawn. Two ships were lost. The harbour of Brest stayed open. " * 3
    summary = lookahead.summarize(text, max_new_tokens=24)
    assert 0 < summary.summary_tokens <= 24
    assert loading.load_default() is loading.load_default()
    loading.load_default.cache_clear()


def test_the_summarizer_of_the_tests_is_an_ordinary_model_folder(summarizer_path):
    model = AutoModelForCausalLM.from_pretrained(summarizer_path)
    tokenizer = AutoTokenizer.from_pretrained(summarizer_path)
    assert Prompting(tokenizer).template == "summarize"
    assert context_length(model, tokenizer) >= 1024


def test_importing_the_library_and_its_summarize_loads_no_torch():
    script = "import sys, lookahead; lookahead.summarize; print('torch' in sys.modules, 'numba' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
