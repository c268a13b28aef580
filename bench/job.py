"""A summarization job: documents per second with refilled rows, compared to one document after the other.

    python -m bench.job --documents 500 --text squality_dev.jsonl --field document --output bench/results/job_fp32.json

Documents of mixed length, cut from texts at sentence ends, are summarized in three ways in turn: one after the other
with lookahead, together in refilled rows (`Summarizer.summarize_all`), and by transformers' greedy `generate` in padded
batches of the size that was fastest on the first documents. Cutting, tokenizing and prefill count in all ways. Ours
starts without anything learned from these documents. The first documents warm up and are the losslessness gate: in
fp32 all three must write the same summaries, or nothing is timed. Timed summaries are compared too. In half precision
the padded batches of transformers round differently from single documents. Without --text the documents are cut from
the stories in `examples`, each at a random sentence, so that they overlap.

Seconds are CPU time of one thread, which is independent of other processes; wall time is reported too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.command import in_turn, parser_of, publish, setting_of, use_one_thread
from bench.prompts import SUMMARIZER, cut_documents, read_texts
from lookahead.documents.decode_text import Document, Reject
from lookahead.loading.loading import load
from lookahead.model.model_state import LearnedState, use_learned
from lookahead.summarization.prompting import PromptFitter
from lookahead.summarization.summarizer import Summarizer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HF_SIZES = (4, 8, 16, 32)
GATE = 32  # documents that warm up and are compared first, at most the number of timed ones

Texts = dict[int, str]


def together(summarizer: Summarizer, rows: int) -> Callable[[Sequence[str]], Texts]:
    """Summaries by refilled rows. A document is rejected if its summary is empty."""
    stream = partial(summarizer.summarize_all, rows=rows)
    return lambda documents: {
        done.document.id: "" if isinstance(done, Reject) else done.summary.text
        for done in stream(starmap(Document, enumerate(documents)))
    }


def huggingface(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, size: int
) -> Callable[[Sequence[str]], Texts]:
    """Summaries by transformers' greedy `generate` in batches of `size`."""
    fitter = PromptFitter(model, tokenizer, max_new_tokens)
    tokenizer.padding_side = "left"
    encode = partial(tokenizer, return_tensors="pt", add_special_tokens=fitter.add_special_tokens)

    def run(documents: Sequence[str]) -> Texts:
        texts: list[str] = []
        for begin in range(0, len(documents), size):
            prompts = [fitter.prompts(fitter.fit(document).parts)[0] for document in documents[begin : begin + size]]
            inputs = encode(prompts, padding=True)
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
            texts += tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        return {number: text.strip() for number, text in enumerate(texts)}

    return run


def timed(
    way: Callable[[Sequence[str]], Texts], documents: Sequence[str], model: PreTrainedModel
) -> tuple[Texts, float, float]:
    """The summaries, CPU seconds and wall seconds. Nothing learned from other documents is used."""
    with use_learned(model, LearnedState()):
        cpu, wall = time.process_time(), time.perf_counter()
        texts = way(documents)
        return texts, time.process_time() - cpu, time.perf_counter() - wall


def check(ways: dict[str, Texts], dtype: str, what: str) -> int:
    """The number of summaries by refilled rows that equal `generate`; in fp32 a difference ends the benchmark."""
    same = {name: sum(texts[i] == ways["hf_batch"][i] for i in texts) for name, texts in ways.items()}
    if dtype == "fp32" and any(count != len(ways["hf_batch"]) for count in same.values()):
        sys.exit(f"not lossless: of {len(ways['hf_batch'])} {what} summaries {same} are those of generate")
    return same["together"]


def read_documents(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The documents to summarize, after those that warm up."""
    path, texts = arguments.text, list[str]()
    for file in [path] if path else sorted(EXAMPLES.glob("*.txt")):
        texts += [file.read_text("utf-8")] if file.suffix == ".txt" else read_texts(file, arguments.field)
    lengths = {"shortest": arguments.shortest, "longest": arguments.longest}
    limit = arguments.documents + min(GATE, arguments.documents)
    return cut_documents(texts, tokenizer, limit=limit, **lengths, overlap=not path)


def measure(arguments: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    documents = read_documents(arguments, tokenizer)
    first = min(GATE, len(documents) // 2)
    gate, documents = documents[:first], documents[first:]
    if not documents:
        sys.exit(f"the texts give no document of {arguments.shortest} to {arguments.longest} tokens")
    new = arguments.max_new_tokens
    summarizer = Summarizer(model, tokenizer, max_new_tokens=new)
    summarizer.warm_up()
    ours = {
        "together": together(summarizer, arguments.rows),
        "one_by_one": lambda texts: {i: summarizer.summarize(text).text for i, text in enumerate(texts)},
    }
    sizes = {size: huggingface(model, tokenizer, new, size) for size in HF_SIZES}
    tried = {size: timed(way, gate, model) for size, way in sizes.items()}
    best = min(tried, key=lambda size: tried[size][1])
    print({size: round(run[1], 1) for size, run in tried.items()}, flush=True)
    gated = {name: timed(way, gate, model)[0] for name, way in ours.items()}
    check({**gated, "hf_batch": tried[best][0]}, arguments.dtype, "first")
    ways = {**ours, "hf_batch": sizes[best]}
    rounds: list[dict[str, tuple[Texts, float, float]]] = []
    for number in range(arguments.trials):
        rounds.append({name: timed(ways[name], documents, model) for name in in_turn(list(ways), number)})
        print({name: round(run[1], 1) for name, run in rounds[-1].items()}, flush=True)
    whole = {name: run[0] for name, run in rounds[0].items()}
    identical = check(whole, arguments.dtype, "timed")

    def over(name: str) -> float:
        return round(statistics.median(each[name][1] / each["together"][1] for each in rounds), 3)

    lengths, written = (
        [len(ids) for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
        for texts in (documents, list(whole["together"].values()))
    )
    return {
        "speedup_vs_one_by_one": over("one_by_one"),
        "speedup_vs_hf_batch": over("hf_batch"),
        "documents": len(documents),
        "identical": identical,
        "identical_to_one_by_one": sum(text == whole["one_by_one"][i] for i, text in whole["together"].items()),
        "hf_batch_size": best,
        "rows": arguments.rows or "decided by lookahead",
        "document_tokens": {"min": min(lengths), "median": statistics.median(lengths), "max": max(lengths)},
        "summary_tokens": {"min": min(written), "median": statistics.median(written), "max": max(written)},
        "documents_per_cpu_s": {
            name: round(len(documents) / statistics.median(each[name][1] for each in rounds), 2) for name in ways
        },
        "wall_s": {name: round(statistics.median(each[name][2] for each in rounds), 1) for name in ways},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, model=SUMMARIZER, dtype="fp32")
    parser.add_argument("--documents", type=int, default=500, help="how many to summarize; fewer where texts end")
    parser.add_argument("--text", type=Path, help="a .txt or .jsonl file to cut them from")
    parser.add_argument("--field", default="document", help="the field of each JSON line")
    parser.add_argument("--shortest", type=int, default=40, help="tokens of the shortest document")
    parser.add_argument("--longest", type=int, default=900, help="tokens of the longest document")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, help="documents together; left to lookahead where not given")
    parser.add_argument("--trials", type=int, default=1, help="timed rounds")
    arguments = parser.parse_args(argv)
    use_one_thread()
    model, tokenizer = load(arguments.model, dtype=arguments.dtype, device="cpu")
    report = measure(arguments, model, tokenizer)
    publish({**report, **setting_of(arguments, "max_new_tokens", "trials")}, arguments.output)


if __name__ == "__main__":
    main()
