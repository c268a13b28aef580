"""Training a small summarizer: text in, rows, a short run, a folder transformers loads."""

from __future__ import annotations

import copy
import io
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from lookahead.errors import TrainingError
from tools.train_extractor import blockwise
from tools.train_extractor.__main__ import main
from tools.train_extractor.architecture import build, llama_config
from tools.train_extractor.corpus import Document, clean, read_documents, split_held_out
from tools.train_extractor.extractive import central_sentences, extract_size
from tools.train_extractor.optimizer import MasterOptimizer, rate_scale
from tools.train_extractor.phases import PHASES, phase_at
from tools.train_extractor.rows import CHANCE, DOC_ID, EOS_ID, IGNORED, KINDS, SUM_ID, Batch, RowMaker, make_batches
from tools.train_extractor.stream import Stream, bare_sentences, inverse_document_frequency
from tools.train_extractor.tokenizer import prompt, train_tokenizer
from tools.train_extractor.trainer import Trainer, wanted_loss

NOUNS = ("harbour", "lantern", "orchard", "captain", "letter", "garden", "storm", "village", "river", "bridge")
VERBS = ("crossed", "watched", "remembered", "repaired", "painted", "followed", "measured", "promised", "lifted")


def story(seed: int, sentences: int = 160) -> str:
    """Sentences of random words, each of 8-14 words, so that no two agree."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(sentences):
        words = [str(rng.choice(VERBS if i % 3 == 1 else NOUNS)) for i in range(int(rng.integers(8, 15)))]
        lines.append(f"The {' '.join(words)}.")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three small documents in three wrappings."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "one.txt").write_text(story(1), encoding="utf-8")
    row = json.dumps({"document": story(2)})
    (folder / "two.jsonl.xz").write_bytes(lzma.compress(f"{row}\n".encode()))
    with tarfile.open(folder / "three.tar.xz", "w:xz") as tar:
        raw = story(3).encode()
        member = tarfile.TarInfo("inside.txt")
        member.size = len(raw)
        tar.addfile(member, io.BytesIO(raw))
    return folder


@pytest.fixture(scope="module")
def tokenizer(text: Path) -> PreTrainedTokenizerFast:
    texts = [document.text for document in read_documents([text])]
    return train_tokenizer(texts, vocab_size=400, max_length=512)


@pytest.fixture(scope="module")
def maker(text: Path, tokenizer: PreTrainedTokenizerFast) -> RowMaker:
    stream = Stream.encode(read_documents([text]), tokenizer)
    return RowMaker(stream, inverse_document_frequency(stream, len(tokenizer)))


def command(text: Path, folder: Path, *more: str) -> list[str]:
    """The command line of a run that takes seconds."""
    small = ["--hidden-size", "128", "--layers", "1", "--vocab-size", "400", "--probe-tokens", "1000000"]
    places = ["--text", str(text), "--work", str(folder / "run"), "--output", str(folder / "model")]
    return [*places, *small, *more]


def test_documents_are_found_in_text_json_lines_and_archives_with_whitespace_collapsed(text: Path) -> None:
    documents = read_documents([text])
    assert [document.name for document in documents] == ["one.txt", "three.tar/inside.txt", "two.jsonl:000001"]
    assert [document.text for document in documents] == [clean(story(seed)) for seed in (1, 3, 2)]


def test_a_missing_an_empty_and_a_broken_text_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"no such file or folder: .*absent"):
        read_documents([tmp_path / "absent"])
    with pytest.raises(TrainingError, match="no text found"):
        read_documents([tmp_path])
    (tmp_path / "bad.jsonl").write_text("{}\n{oops\n", encoding="utf-8")
    with pytest.raises(TrainingError, match=r"bad\.jsonl, line 2 is not JSON"):
        read_documents([tmp_path])
    (tmp_path / "bad.jsonl").write_bytes(b"")
    (tmp_path / "bad.txt.xz").write_bytes(b"not xz")
    with pytest.raises(TrainingError, match=r"cannot read .*bad\.txt\.xz"):
        read_documents([tmp_path])


def test_whole_documents_are_held_out_and_a_single_one_is_kept_for_training() -> None:
    documents = [Document(str(number), "text") for number in range(10)]
    train, held_out = split_held_out(documents, 4)
    assert [document.name for document in held_out] == ["2", "6"]
    assert sorted(train + held_out, key=lambda document: document.name) == documents
    assert split_held_out(documents[:1], 4) == (documents[:1], [])
    with pytest.raises(TrainingError, match="at least 2"):
        split_held_out(documents, 1)


@pytest.mark.parametrize(
    "sentences",
    [
        [],
        ["One."],
        ["Mr. and Mrs. J. Hale called on Dr. Grey.", "“Why?”", "He paid 3.50 for it!", "(It rained.)"],
        ["no capital follows here. so it is one sentence", ""][:1],
    ],
)
def test_sentences_joined_by_spaces_are_the_text_again(sentences: list[str]) -> None:
    assert bare_sentences(" ".join(sentences)) == sentences


def test_the_tokenizer_gives_any_text_back_and_renders_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    odd = "Tabs\tand  spaces, “quotes”, naïve 日本 \U0001f600 <doc"
    assert tokenizer.decode(tokenizer(odd)["input_ids"]) == odd
    message = [{"role": "user", "content": "  Two\n lines. "}]
    for name in (None, "default", "summarize"):
        rendered = tokenizer.apply_chat_template(message, chat_template=name, tokenize=False)
        assert rendered == prompt("  Two\n lines. ") == "<doc> Two lines.<sum>"
    ids = tokenizer("<doc> Two lines.<sum>")["input_ids"]
    assert (ids[0], ids[-1]) == (DOC_ID, SUM_ID)


def test_encoding_by_sentences_gives_the_tokens_of_the_whole_text(
    text: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    document = read_documents([text])[0]
    stream = Stream.encode([document], tokenizer)
    assert stream.tokens.tolist() == tokenizer(f" {document.text}")["input_ids"]


def test_passages_do_not_cross_documents(maker: RowMaker) -> None:
    last = int(maker.stream.documents[1]) - 2
    assert len(maker.stream.passage(last, 10_000)) == 2


def test_central_sentences_are_in_document_order_and_the_off_topic_one_is_left_out() -> None:
    topic = [np.arange(start, start + 10, dtype=np.int32) for start in (5, 7, 6)]
    stray = np.arange(50, 60, dtype=np.int32)
    idf = np.ones(64)
    assert central_sentences([topic[0], stray, topic[1], topic[2]], idf, count=3) == [0, 2, 3]
    assert central_sentences([], idf) == []
    assert [extract_size(count) for count in (1, 5, 6, 14, 15)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_every_kind_can_be_drawn_again_from_its_seed(maker: RowMaker, kind: str) -> None:
    rows = [maker.make(kind, 150, np.random.default_rng(7)) for _ in range(2)]
    assert np.array_equal(rows[0].ids, rows[1].ids) and np.array_equal(rows[0].wanted, rows[1].wanted)
    assert rows[0].wanted.any() and not rows[0].wanted[0]


def test_a_tiled_row_wants_only_tokens_that_stood_a_chunk_before(maker: RowMaker) -> None:
    row = maker.tiled(120, np.random.default_rng(3))
    first = int(np.argmax(row.wanted))
    chunk = first - 1
    assert np.array_equal(row.ids[chunk:], row.ids[:-chunk])
    assert row.wanted[first:].all()


@pytest.mark.parametrize("kind", ["copy", "summary"])
def test_what_follows_the_passage_is_sentences_of_it_in_order(
    maker: RowMaker, tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    row = maker.make(kind, 200, np.random.default_rng(5))
    separator = SUM_ID if kind == "summary" else DOC_ID
    middle = 1 + int(np.argmax(row.ids[1:] == separator))
    assert row.ids[0] == DOC_ID and row.ids[-1] == EOS_ID
    source = bare_sentences(str(tokenizer.decode(row.ids[1:middle])).strip())
    copied = bare_sentences(str(tokenizer.decode(row.ids[middle + 1 : -1])).strip())
    places = [source.index(sentence) for sentence in copied]
    assert places == sorted(places) and len(places) >= 1
    assert row.wanted[middle + 1 : middle + 1 + CHANCE].all() == (kind == "summary")
    assert not row.wanted[: middle + 1].any()


def test_an_ambiguous_row_repeats_its_chunks_with_the_planted_crossings(maker: RowMaker) -> None:
    row = maker.ambiguous(200, np.random.default_rng(11))
    middle = 1 + int(np.argmax(row.ids[1:] == DOC_ID))
    passage, copies = row.ids[1:middle].tolist(), row.ids[middle + 1 : -1].tolist()
    start = copies[:12]  # no chunk is shorter
    assert any(passage[place : place + 12] == start for place in range(len(passage)))


def test_batches_hold_every_row_once_with_labels_one_ahead(maker: RowMaker) -> None:
    rng = np.random.default_rng(0)
    rows = [maker.summary(int(rng.integers(60, 200)), rng) for _ in range(30)]
    batches = make_batches(rows, 1000, rng)
    assert sum(len(batch.ids) for batch in batches) == len(rows)
    assert sum(int((batch.labels != IGNORED).sum()) for batch in batches) == sum(r.wanted.sum() for r in rows)
    for batch in batches:
        assert batch.ids.size <= 1000 or len(batch.ids) == 1
        wanted = batch.labels[:, :-1] != IGNORED
        assert np.array_equal(batch.labels[:, :-1][wanted], batch.ids[:, 1:][wanted])


def test_the_phases_share_the_budget_and_the_rate_rises_holds_and_falls() -> None:
    assert sum(phase.share for phase in PHASES) == pytest.approx(1.0)
    assert all(sum(phase.mixture.values()) == pytest.approx(1.0) for phase in PHASES)
    assert phase_at(0, 1000) is PHASES[0] and phase_at(1000, 1000) is PHASES[-1]
    assert rate_scale(0, 0, 1000) < 0.05 < rate_scale(500, 100, 1000) == 1.0
    assert rate_scale(500, 1000, 1000) == pytest.approx(0.02)


@pytest.mark.parametrize("length", [1, 127, 128, 300])
def test_blockwise_attention_has_the_loss_and_gradients_of_torch_attention(length: int) -> None:
    model = build(llama_config(vocab_size=400, hidden_size=128, layers=2), seed=0)
    ids = np.random.default_rng(length).integers(4, 400, size=(2, length))
    results = []
    for name in ("sdpa", blockwise.NAME):
        model.set_attn_implementation(name)
        model.zero_grad()
        loss = wanted_loss(model, Batch(ids, ids))
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append((loss.detach(), gradients))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_the_first_layer_starts_out_looking_at_the_tokens_just_before() -> None:
    model = build(llama_config(vocab_size=400), seed=0)
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, 400, size=(1, 60)))
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0][0]
    for head in range(4):
        seen = weights[head].diagonal(offset=-(head + 1))[10:]  # from position n to n - head - 1
        assert float(seen.mean()) > 0.6


@pytest.mark.exhaustive
def test_a_short_run_ends_in_a_folder_that_transformers_loads(text: Path, tmp_path: Path) -> None:
    assert main(command(text, tmp_path, "--tokens", "60000")) == 0
    folder = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.dtype == torch.bfloat16 and model.config.max_position_embeddings == 2048
    ids = tokenizer(prompt("The harbour watched winter."), return_tensors="pt")
    assert len(model.generate(**ids, max_new_tokens=4)[0]) > len(ids["input_ids"][0])  # type: ignore[misc]
    entries = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert entries[-1]["tokens"] >= 60_000
    assert entries[-1]["language_loss"] < np.log(400)
    assert 0.0 <= entries[-1]["verbatim"] <= 1.0
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_at_its_token_count_and_ends_as_if_it_had_not_stopped(
    maker: RowMaker, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    def trainer(name: str) -> Trainer:
        config = llama_config(vocab_size=len(tokenizer), hidden_size=128, layers=1)
        return Trainer(build(config, seed=1), maker, budget=30_000, seed=1, checkpoint=tmp_path / name)

    class Stop(Exception):
        pass

    def stop(_: object) -> None:
        interrupted.save()
        raise Stop

    whole = trainer("whole.pt")
    whole.run(lambda report: None)
    interrupted = trainer("parts.pt")
    with pytest.raises(Stop):
        interrupted.run(stop, report_steps=4)
    resumed = trainer("parts.pt")
    resumed.resume()
    assert resumed.progress == interrupted.progress
    assert 0 < resumed.progress.tokens < 30_000
    resumed.run(lambda report: None)
    assert resumed.progress == whole.progress
    for left, right in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.exhaustive
def test_a_finished_run_is_not_overwritten_without_resume_nor_resumed_with_other_settings(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(text, tmp_path, "--tokens", "1000")) == 0
    assert main(command(text, tmp_path, "--tokens", "1000")) == 2
    assert "pass --resume" in capsys.readouterr().err
    assert main(command(text, tmp_path, "--tokens", "1000", "--resume", "--seed", "5")) == 2
    assert "seed = 0, not 5" in capsys.readouterr().err
    assert main(command(text, tmp_path, "--tokens", "1000", "--export-only")) == 0
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"torn")
    assert main(command(text, tmp_path, "--tokens", "1000", "--resume")) == 2
    assert "cannot resume from" in capsys.readouterr().err


def test_bad_input_ends_with_status_2_and_a_message_that_names_it(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path / "absent", tmp_path)) == 2
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    assert main(command(text, tmp_path, "--output", str(tmp_path / "file" / "model"))) == 2
    assert "cannot write to" in capsys.readouterr().err
    assert main(command(text, tmp_path, "--tokens", "0")) == 2
    assert "tokens must be at least 1, got 0" in capsys.readouterr().err
    assert main(command(text, tmp_path, "--hidden-size", "100")) == 2
    assert "multiple of 128" in capsys.readouterr().err
    assert main(command(text, tmp_path / "fresh", "--export-only")) == 2
    assert "no checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["--work", "x"])
    assert stopped.value.code == 2


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "python -m tools.train_extractor --text corpus/" in capsys.readouterr().out


def test_the_summarizer_of_the_tests_loads_and_is_small(summarizer_path: Path) -> None:
    weights = summarizer_path / "model.safetensors"
    assert weights.stat().st_size <= 16 * 2**20
    tokenizer = AutoTokenizer.from_pretrained(summarizer_path, local_files_only=True)
    config = AutoModelForCausalLM.from_pretrained(summarizer_path, local_files_only=True).config
    assert len(tokenizer) == config.vocab_size
    message = [{"role": "user", "content": "It\nrained."}]
    rendered = tokenizer.apply_chat_template(message, chat_template="summarize", tokenize=False)
    assert rendered == prompt("It rained.")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_an_optimizer_goes_on_from_its_stored_tensors_as_if_never_stopped(tiny_llama: LlamaForCausalLM) -> None:
    def gradients(model: LlamaForCausalLM, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)

    straight = copy.deepcopy(tiny_llama).bfloat16()
    first = MasterOptimizer(straight)
    for step in range(2):
        gradients(straight, step)
        first.step(1.0)
    stored = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    assert len(stored) > 2 * len(first.masters)
    resumed = copy.deepcopy(tiny_llama).bfloat16()
    second = MasterOptimizer(resumed)
    second.load_state_dict(stored)
    for model, optimizer in ((straight, first), (resumed, second)):
        gradients(model, 2)
        optimizer.step(1.0)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
