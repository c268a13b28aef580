"""Long documents: cut at sections, parts that cover the text, rounds that come to an end, one part after the other."""

from __future__ import annotations

import copy
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig

import lookahead
from lookahead import ConfigError, DocumentError
from lookahead.documents.decode_text import Document
from lookahead.stats import DecodingStats
from lookahead.summarization.chunking import MeasuredText, cut
from lookahead.summarization.pipeline import SummaryPipeline
from lookahead.summarization.prompting import INSTRUCTION, PromptFitter, Prompting, SummaryRequest
from lookahead.summarization.segmentation import Break, split_pieces
from lookahead.summarization.summarizer import Summarizer

SENTENCE = "The cat sat on the mat. "
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
HEADINGS = ["## Of cats", "Of cats\n=======", "Of cats\n---", "Chapter IX", "PART TWO: The mat", "* * *", "IV."]
HEADINGS += ["Epilogue", "第三章 雨", "Kapitel 4", "  Act 1, Scene 2"]

STRETCHES = st.sampled_from(
    [SENTENCE, "Why? ", "\n\n", "\n", "a line\n", " \t ", "x" * 70, "word " * 30, "é😀", "<eos>", "\r\n\r\n"]
    + [f"\n\n{heading}\n\n" for heading in HEADINGS]
)
TEXTS = st.lists(STRETCHES, min_size=1, max_size=60).map("".join).filter(str.strip)


@pytest.fixture(scope="module")
def summarizer_tokenizer(summarizer_path):
    return AutoTokenizer.from_pretrained(summarizer_path)


def measured(text, tokenizer, clean=str):
    return MeasuredText(split_pieces(text), tokenizer, clean)


def texts(parts):
    return [part.text for part in parts.parts]


def letters(text):
    return "".join(text.split())


def chat(tokenizer, context=512):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template, changed.model_max_length = CHAT, context
    return changed


# Sections


@given(TEXTS)
def test_the_pieces_of_a_text_are_the_text(text):
    pieces = split_pieces(text)
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text for piece in pieces)


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_heading_ends_the_section_before_it_and_belongs_to_the_one_behind(heading):
    pieces = split_pieces(f"One.\n\n{heading}\n\nTwo. Three.")
    assert [(piece.text, piece.end) for piece in pieces] == [
        ("One.\n\n", Break.SECTION),
        (f"{heading}\n\n", Break.NOTHING),
        ("Two. ", Break.SENTENCE),
        ("Three.", Break.SECTION),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "It stood in\nChapter IX of the book.",
        "One.\n\nPart of it was gone.",
        "One.\n\n#cats are everywhere.",
        "One.\n\n- a list\n- of two",
        "One.\n\nChapter nine was the longest of them all, and " + "it went on and on, " * 5 + "like that.",
    ],
)
def test_what_only_looks_like_a_heading_is_none(text):
    assert Break.NOTHING not in {piece.end for piece in split_pieces(text)}


@pytest.mark.parametrize("text", ["-", "* ", "\n", "# ", "IX\n\n", " "])
def test_no_text_takes_quadratic_time(text):
    text *= 300_000 // len(text)
    assert "".join(piece.text for piece in split_pieces(text)) == text


@pytest.mark.parametrize("heading", HEADINGS)
def test_parts_begin_with_a_heading_where_one_is_near(tiny_tokenizer, heading):
    sections = [f"{heading}\n\n" + SENTENCE * count for count in (9, 8, 10, 9, 8, 7)]
    parts = cut(measured("\n\n".join(sections), tiny_tokenizer), 300)
    assert parts.split == "sections"
    assert texts(parts) == [section.strip() for section in sections]


def test_a_paragraph_is_a_better_place_than_a_sentence_and_a_sentence_than_a_line(tiny_tokenizer):
    text = f"{SENTENCE * 5}\n\n{SENTENCE * 7}"
    assert [part.count(".") for part in texts(cut(measured(text, tiny_tokenizer), 200))] == [5, 7]
    text = f"{SENTENCE * 4}The cat\nsat on\nthe mat.{' And so on' * 9}"
    assert texts(cut(measured(text, tiny_tokenizer), 130))[0] == (SENTENCE * 4).strip()


# Parts


@given(text=TEXTS, budget=st.integers(8, 150))
@example(text="\N{SNOWMAN}\N{SLOTH}" * 40, budget=12)  # characters of several tokens
@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_parts_cover_the_document_and_keep_to_the_budget(tiny_tokenizer, summarizer_tokenizer, kind, text, budget):
    tokenizer = tiny_tokenizer if kind == "characters" else summarizer_tokenizer
    parts = cut(measured(text, tokenizer), budget).parts
    assert letters("".join(part.text for part in parts)) == letters(text)
    assert all(part.text and part.text == part.text.strip() and part.tokens <= budget for part in parts)
    assert sum(part.tokens for part in parts) <= len(tokenizer(text, add_special_tokens=False)["input_ids"])


@given(TEXTS)
def test_cleaning_loses_no_letter_of_the_parts(summarizer_tokenizer, text):
    clean = Prompting(summarizer_tokenizer).clean
    parts = cut(measured(text, summarizer_tokenizer, clean), 40).parts
    assert letters("".join(part.text for part in parts)) == letters(text)


# Rounds

SPEAKERS = {
    "as much as it may": lambda prompt, limit: "y" * limit,
    "its prompt": lambda prompt, limit: prompt[:limit],
    "more than it was asked for": lambda prompt, limit: prompt * 3,
    "nothing": lambda prompt, limit: " ",
    "something of every other part": lambda prompt, limit: "word " if len(prompt) % 2 else "",
}


def summary_of(text, fitter, speak):
    """The summary by a stand-in for a model, and how many prompts each round had."""
    pipeline = SummaryPipeline(text, fitter)
    rounds = []
    while pipeline.summary is None:
        rounds.append(len(pipeline.prompts))
        with suppress(DocumentError):  # which tells in the end that nothing was said
            pipeline.take([speak(prompt, pipeline.limit) for prompt in pipeline.prompts], DecodingStats())
    return pipeline.summary, rounds


class Configured:
    """All that a fitter reads of a model."""

    def __init__(self, config):
        self.config = config


@given(text=TEXTS, room=st.integers(16, 120), new=st.integers(1, 60))
@pytest.mark.parametrize("speaker", SPEAKERS)
def test_rounds_come_to_an_end_whatever_the_model_says(tiny_tokenizer, speaker, text, room, new):
    model = Configured(LlamaConfig(max_position_embeddings=room + new + len("\n\nSummary:")))
    fitter = PromptFitter(model, tiny_tokenizer, new)
    summary, rounds = summary_of(text * 3, fitter, SPEAKERS[speaker])
    assert all(after < before for before, after in pairwise(rounds)) and rounds[-1] == 1
    assert rounds[0] == summary.parts


def test_every_summary_of_a_round_is_read_in_the_next(tiny_llama, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = 90
    pipeline, said = SummaryPipeline(SENTENCE * 60, PromptFitter(tiny_llama, tokenizer, 20)), []
    rounds = 0
    while pipeline.summary is None:
        assert all(sum(text in prompt for prompt in pipeline.prompts) == 1 for text in said)
        said = [f"<{rounds}.{i}>" for i in range(len(pipeline.prompts))]
        pipeline.take(said, DecodingStats())
        rounds += 1
    assert rounds > 2 and str(pipeline.summary) == said[0]


BOOK = """
import random, resource, sys
from itertools import pairwise
from transformers import AutoConfig, AutoTokenizer
from lookahead.stats import DecodingStats
from lookahead.summarization.pipeline import SummaryPipeline
from lookahead.summarization.prompting import PromptFitter
draw, words = random.Random(0), "the old house on hill was quiet that night and nobody came to see him".split()
def chapter(number):
    sentences = (" ".join(draw.choices(words, k=draw.randrange(4, 24))).capitalize() + "." for _ in range(80))
    return f"Chapter {number}" + "\\n\\n" + " ".join(sentences)
text = "\\n\\n".join(map(chapter, range(int(sys.argv[2]))))
class Configured:
    config = AutoConfig.from_pretrained(sys.argv[1])
model = Configured()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = memory()
pipeline = SummaryPipeline(text, PromptFitter(model, tokenizer, 128))
rounds = []
while pipeline.summary is None:
    assert max(len(tokenizer(prompt)["input_ids"]) for prompt in pipeline.prompts) <= 1152 - 128
    rounds.append(len(pipeline.prompts))
    pipeline.take([prompt[-900:-100] for prompt in pipeline.prompts], DecodingStats())
assert all(after < before for before, after in pairwise(rounds)) and rounds[-1] == 1
print(pipeline.summary.document_tokens, memory() - before)
"""


def test_a_book_comes_to_an_end(summarizer_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["book", str(summarizer_path), "60"])
    exec(BOOK, {})
    assert int(capsys.readouterr().out.split()[0]) > 50_000


@pytest.mark.exhaustive
def test_a_book_of_a_million_tokens_comes_to_an_end_in_little_memory(summarizer_path):
    run = subprocess.run([sys.executable, "-c", BOOK, str(summarizer_path), "900"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    tokens, megabytes = map(int, run.stdout.split())
    assert tokens > 1_000_000
    assert megabytes < 400


def test_parts_of_a_chosen_size_are_those_of_a_context_of_that_size(tiny_llama, tiny_tokenizer):
    chosen = PromptFitter(tiny_llama, chat(tiny_tokenizer), 12, SummaryRequest(part_tokens=150))
    narrow = PromptFitter(tiny_llama, chat(tiny_tokenizer, 150), 12)
    wide = PromptFitter(tiny_llama, chat(tiny_tokenizer), 12, SummaryRequest(part_tokens=10**6))
    text = SENTENCE * 14
    assert texts(chosen.fit(text)) == texts(narrow.fit(text)) and len(texts(chosen.fit(text))) > 1
    assert texts(wide.fit(text)) == [text.strip()]
    summary = lookahead.summarize(text, tiny_llama, chat(tiny_tokenizer), max_new_tokens=12, part_tokens=150)
    assert summary.parts == len(texts(chosen.fit(text)))


# Several documents together


@pytest.mark.covering(1)
@pytest.mark.parametrize("asked", [SummaryRequest(), SummaryRequest(refine=True)])
@pytest.mark.parametrize("rows", [1, 5])
def test_summaries_are_the_same_for_one_document_and_for_many_together(tiny_llama, tiny_tokenizer, asked, rows):
    tokenizer = chat(tiny_tokenizer, 512 if asked.refine else 150)
    summarizer = Summarizer(tiny_llama, tokenizer, max_new_tokens=12, request=asked)
    documents = [Document(i, f"Number {i}. " + SENTENCE * count) for i, count in enumerate((2, 30, 1, 20, 50))]
    outcomes = {done.document.id: done.summary for done in summarizer.summarize_all(documents, rows)}
    assert len(outcomes) == 5
    for document in documents:
        alone, together = summarizer.summarize(document.text), outcomes[document.id]
        assert together.text == alone.text
        assert (together.parts, together.summary_tokens) == (alone.parts, alone.summary_tokens)
    assert outcomes[4].parts > 4


# One part after the other


def test_refining_reads_the_parts_in_order_each_with_the_summary_so_far(tiny_llama, tiny_tokenizer):
    tokenizer = chat(tiny_tokenizer)
    fitter = PromptFitter(tiny_llama, tokenizer, 30, request=SummaryRequest(refine=True))
    text = "".join(f"Sentence {i} is here. " for i in range(50))
    pipeline = SummaryPipeline(text, fitter)
    parts = texts(fitter.fit(text))
    assert len(parts) > 5
    seen = []
    while pipeline.summary is None:
        assert len(pipeline.prompts) == 1 and pipeline.limit == 30
        seen += pipeline.prompts
        pipeline.take([f"summary {len(seen)}"], DecodingStats())
    assert len(seen) == len(parts)
    for number, (prompt, part) in enumerate(zip(seen, parts, strict=True)):
        assert prompt.endswith(f"{INSTRUCTION.replace('{document}', part)}[bot]")
        assert len(tokenizer(prompt)["input_ids"]) <= 512 - 30
        assert (f"\n\nsummary {number}\n\n" in prompt) == (number > 0)
    assert str(pipeline.summary) == f"summary {len(parts)}"


def test_refining_decodes_what_generate_does_with_the_same_prompts(tiny_llama, tiny_tokenizer):
    tokenizer, request = chat(tiny_tokenizer), SummaryRequest(refine=True)
    summarizer = Summarizer(tiny_llama, tokenizer, max_new_tokens=24, request=request)

    def generate(prompt, limit):
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        output = tiny_llama.generate(**inputs, max_new_tokens=limit, do_sample=False, pad_token_id=0)
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    expected, rounds = summary_of(SENTENCE * 40, summarizer.fitter, generate)
    summary = summarizer.summarize(SENTENCE * 40)
    assert summary.text == expected.text
    assert len(rounds) == summary.parts > 3


def test_a_summary_too_long_for_its_place_is_cut_and_an_empty_one_is_ignored(tiny_llama, tiny_tokenizer):
    tokenizer = chat(tiny_tokenizer)
    fitter = PromptFitter(tiny_llama, tokenizer, 30, request=SummaryRequest(refine=True))
    pipeline = SummaryPipeline(SENTENCE * 40, fitter)
    said = iter(["", "s" * 999, " ", *["<eos>" * 200] * 99])
    lengths, prompts = [], []
    while pipeline.summary is None:
        prompts += pipeline.prompts
        lengths.append(len(tokenizer(pipeline.prompts[0])["input_ids"]))
        pipeline.take([next(said)], DecodingStats())
    assert max(lengths) <= 512 - 30
    assert ["\n\nsss" in prompt for prompt in prompts[:5]] == [False, False, True, True, False]


def test_a_document_that_fits_is_not_refined(tiny_llama, tiny_tokenizer):
    tokenizer = chat(tiny_tokenizer)
    summaries = [
        lookahead.summarize(SENTENCE * 4, tiny_llama, tokenizer, max_new_tokens=16, refine=refine)
        for refine in (False, True)
    ]
    assert summaries[0].text == summaries[1].text and summaries[1].parts == 1


# Refusals


def test_a_model_that_follows_no_instructions_is_not_asked_to_refine(tiny_llama, tiny_tokenizer, summarizer_path):
    with pytest.raises(ConfigError, match="made to summarize and follows no instructions, so it cannot refine"):
        lookahead.summarize(SENTENCE, *lookahead.load(str(summarizer_path)), refine=True)
    with pytest.raises(ConfigError, match=r"tokenizer has no chat template, so it cannot refine .* leave --refine out"):
        lookahead.summarize(SENTENCE, tiny_llama, tiny_tokenizer, refine=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": 8}, "overlap was removed: parts of a long document are cut between sections or sentences"),
        ({"keep_parts": True}, "keep_parts was removed: a line of results holds the summary of the whole document"),
        (
            {"refine": True, "max_new_tokens": 150},
            "max_new_tokens must be at most .* so far and a part in the model",
        ),
        ({"part_tokens": 0}, "part_tokens must be at least 1, or None, got 0"),
        ({"part_tokens": "64"}, "part_tokens must be at least 1, or None, got '64'"),
        (
            {"part_tokens": 200},
            r"part_tokens must be at least 2\d\d to leave room for text and a summary",
        ),
    ],
)
def test_options_that_leave_no_room_or_were_removed_are_refused(tiny_llama, tiny_tokenizer, options, message):
    with pytest.raises(ConfigError, match=message):
        lookahead.summarize(SENTENCE, tiny_llama, chat(tiny_tokenizer), **options)


def test_the_longest_summary_that_is_named_is_one_that_can_be_refined(tiny_llama, tiny_tokenizer):
    tokenizer = chat(tiny_tokenizer)
    with pytest.raises(ConfigError) as refusal:
        lookahead.summarize(SENTENCE, tiny_llama, tokenizer, max_new_tokens=200, refine=True)
    most = int(str(refusal.value).split("at most ")[1].split()[0])
    Summarizer(tiny_llama, tokenizer, max_new_tokens=most, request=SummaryRequest(refine=True))
    with pytest.raises(ConfigError, match=f"at most {most} to leave room"):
        Summarizer(tiny_llama, tokenizer, max_new_tokens=most + 1, request=SummaryRequest(refine=True))
