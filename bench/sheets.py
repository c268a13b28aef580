"""What the results page shows of every result file."""

from __future__ import annotations

from bench.goals import GPU_DECODE, KERNEL
from bench.sheet import Row, Sheet

KINDS = ("medusa", "mtp", "eagle", "eagle3")
"""Of heads, as the files call them."""


def _llm(dtype: str) -> Sheet:
    prompts = "--prompts spec_bench.jsonl --stories squality_dev.jsonl --offset 16"
    ways = {"greedy": "transformers' greedy", "prompt lookup 3": "prompt lookup of 3 tokens"}
    ways |= {f"prompt lookup {n}": f"prompt lookup of {n} tokens" for n in (10, 20)}
    ways |= {"lookahead": "lookahead", "window": "lookahead with its window"}
    ways |= {f"{name} alone": f"lookahead, `{name}` alone" for name in ("prompt", "recycled")}
    figures = {"ms a token": "ms_per_token/cpu", "over greedy": "speedup/cpu"}
    figures |= {"over greedy by the wall's clock": "speedup/wall", "the same end to end": "end_to_end/cpu"}
    figures |= {"over greedy where no output loops": "without_loops/speedup/cpu", "tokens a pass": "tokens_per_pass"}
    figures |= {"over greedy on its worst prompt": "lowest", "outputs identical to greedy": "identical"}
    rows = tuple(
        Row(f"{who}: {what}", f"methods/{way}/{path}", is_optional=True)
        for way, who in ways.items()
        for what, path in figures.items()
    )
    return Sheet(
        f"llm_{dtype}.json",
        f"A real model, {dtype}",
        f"python -m bench.llm {prompts} --dtype {dtype} --output bench/results/llm_{dtype}.json",
        (
            Row("prompts", "prompts"),
            Row("new tokens", "new_tokens"),
            Row("places of prompts with an output that loops", "looping"),
            *rows,
            Row("lookahead in fresh processes: prompts", "cold/prompts", is_optional=True),
            Row("over greedy", "cold/cold/speedup/cpu", is_optional=True),
            Row(
                "tokens a pass over those of a warm process", "cold/tokens_per_pass_of_warm", "at least 0.95", "", True
            ),
        ),
        note="Seconds are the processor's, of one thread, but where the wall's are named.",
    )


def _job(dtype: str, name: str = "", options: str = "", what: str = "Many documents") -> Sheet:
    file = f"job_{dtype}{name}.json"
    command = f"python -m bench.job --text squality_dev.jsonl --dtype {dtype}{options} --output bench/results/{file}"
    rows = (
        Row("documents a second over one after the other, with lookahead both", "speedup_vs_one_by_one", "1.8"),
        Row("over transformers' greedy in batches of its best size", "speedup_vs_hf_batch", "1.5"),
        Row("that size", "hf_batch_size"),
        Row("over one after the other, were decoding free", "speedup_if_decoding_were_free", is_optional=True),
        Row("the same, were no draft wrong", "speedup_if_no_draft_were_wrong", is_optional=True),
        Row("rows", "rows"),
        Row("documents", "documents"),
        Row("summaries identical to greedy", "identical", "all" if dtype == "fp32" else ""),
        Row("documents streamed through a dry engine", "streamed", is_optional=True),
        Row("memory they took at most, MiB", "rss_growth_mb", "at most 200", is_optional=True),
    )
    return Sheet(file, f"{what} in refilled rows, {dtype}", command, rows)


def _faults(file: str, title: str, options: str, kills: int) -> Sheet:
    rows = (
        Row("documents", "documents"),
        Row("lines of JSON cut in half among them, put aside", "rejects"),
        Row("results", "results", "all"),
        Row("kills", "kills", str(kills)),
        Row("kills before any result", "kills_before_any_result"),
        Row("jobs that the kills were spread over", "jobs"),
        Row("last lines cut at a random byte after a kill", "lines_cut_after_kills"),
        Row("results lost", "lost", "0"),
        Row("results doubled", "doubled", "0"),
        Row("results different, stats aside", "different", "0"),
        Row("byte-identical to an undisturbed job", "identical", "yes"),
    )
    command = f"python -m bench.faults {options} --output bench/results/{file}"
    return Sheet(file, title, command, rows, dtype="fp32", device="cpu")


def _compiled(dtype: str) -> Sheet:
    ways = ("plain", "plain, compiled", "drafts", "drafts, compiled")
    rows = (
        Row("compiled over plain", "steps/*/speedup", each="step, nodes {nodes}"),
        *(Row(f"{way}, tokens/s", f"outputs/{way}/median_tokens_per_s") for way in ways),
    )
    command = f"python -m bench.compiled --dtype {dtype}"
    return Sheet(
        f"compiled_{dtype}.json", f"Compiled passes, {dtype}", command, rows, "tests/models/summarizer", device="cpu"
    )


def _replay(name: str, texts: str) -> Sheet:
    ways = {"hf_prompt_lookup": "transformers' prompt lookup", "longest_suffix": "longest suffix"}
    ways |= {"first_occurrence": "first occurrence"}
    ways |= {f"ours@{n}": f"ours, at most {n} nodes" for n in (8, 16, 32, 64)}
    ways |= {f"ours_shared@{n}": f"ours, memory shared, at most {n} nodes" for n in (8, 16, 32, 64)}
    rows = tuple(Row(f"tokens a step, {what}", f"methods/{way}/tokens_per_step") for way, what in ways.items())
    return Sheet(
        f"replay_{name}.json",
        f"Recorded outputs: {texts}",
        "python -m bench.replay --tokenizer DIR --pairs FILE",
        (Row("outputs", "pairs"), Row("tokens", "tokens"), *rows),
        model="none runs",
        dtype="none",
        device="cpu",
    )


def _jacobi(name: str, options: str) -> Sheet:
    rows = (
        Row("tokens a pass", "mean_acceptance_length"),
        Row("before the output loops", "mean_acceptance_length_before_loops"),
        Row("nodes a pass", "drafted_per_forward"),
        Row("prompts", "prompts"),
    )
    command = f"python -m bench.jacobi --model DIR {options}"
    title = f"The lookahead branch alone: {options}"
    return Sheet(f"jacobi_{name}.json", title, command, rows, dtype="fp32", device="cpu")


def _propose() -> Sheet:
    rows: tuple[Row, ...] = ()
    for context in (1024, 4096, 16384, 65536, 131072):
        for way, what in {"propose": "n-grams of the request", "mixture": "all sources"}.items():
            rows += (Row(f"{what}, {context:,} tokens of context, median us", f"{way}_p50_us/{context}"),)
    rows += (Row("a token in bulk, us", "append_bulk_us"), Row("bytes a token", "bytes_per_token"))
    command = "python -m bench.propose --tokenizer DIR --text FILE"
    return Sheet("propose.json", "What a proposal costs the host", command, rows, "none runs", "none", "cpu")


def _proposers() -> Sheet:
    pair = {"plain": "no drafts", "names": "the default sources", "draft_model": "a draft model"}
    pair |= {"specinfer": "two draft models", **{kind: f"{kind} heads" for kind in KINDS}}
    pair |= {"hybrid": "the default sources, two draft models and an EAGLE head"}
    heads = {"summarizer_plain": "summarizer, no drafts", "summarizer_names": "summarizer, the default sources"}
    heads |= {f"summarizer_{kind}": f"summarizer, {kind} heads" for kind in KINDS}
    heads |= {"summarizer_hybrid": "summarizer, the default sources and the last of these heads"}
    figures = {
        "tokens a pass": "mean_acceptance_length",
        "tokens a pass at temperature 1": "temperature_1/mean_acceptance_length",
        "the same by rejection sampling": "rejection/mean_acceptance_length",
        "the same by typical acceptance, lossy": "typical/mean_acceptance_length",
        "its distance from the distribution": "typical/divergence",
        "nodes drafted a pass": "drafted_per_step",
        "tokens/s, the cost model deciding": "auto/tokens_per_s",
        "tokens/s of typical acceptance": "typical/tokens_per_s",
        "outputs identical, greedy": "identical",
        "outputs identical, temperature 1": "temperature_1/identical",
    }
    rows = tuple(
        Row(
            f"{who}: {what}",
            f"proposers/{way}/{path}",
            "1.5 or more" if way in ("draft_model", "specinfer", *KINDS) and what == "tokens a pass" else "",
        )
        for way, who in (pair | heads).items()
        for what, path in figures.items()
        if not (way.endswith("plain") and "typical" in path)
        and ("rejection" not in path or way in ("draft_model", "specinfer"))
    )
    return Sheet(
        "proposers.json",
        "Draft models and trained heads",
        "python -m bench.proposers --model DIR --draft DIR --pair-heads DIR --heads DIR --documents squality_dev.jsonl",
        tuple(
            Row(f"{what}: {name}", f"settings/{key}/{name}")
            for key, what in {"pair": "a draft model and its target", "heads": "summarizer"}.items()
            for name in ("prompts", "tokens", "nodes")
        )
        + rows,
        model="stories260K with llama2xs-279K, and the summarizer of the tests",
        dtype="fp32",
        device="cpu",
        note="The draft model and its target are two tiny story tellers, and heads without a further word are the "
        "target's. The summarizer of the tests summarizes stories that training never saw. Distance is in total "
        "variation per token, 0 to 1; outputs sampled by rejection or typical acceptance are others than from the same "
        "seed.",
    )


def _ray_data() -> Sheet:
    ways = {"crew": "the crew", "batches": "Ray Data, batches of 16", "calls": "Ray Data, a document a batch"}
    course = {"seconds": "seconds", "overhead": "what it takes longer than local processes, a share"}
    course |= {"first_s": "seconds until the first result", "at_half": "share of results after half of the seconds"}
    course |= {"read_before_first": "documents read before the first result"}
    killed = {"seconds": "seconds", "same": "the same summaries", "begun_again": "documents begun again"}
    killed |= {"begun_again_by_new": "of these, by a worker started since", "done_again": "decoded to their end again"}
    poison = {"ended": "it came to an end", "poison_begun": "workers it killed", "lost": "other documents lost"}
    poison |= {"told": "it is put aside with a reason", "begun_again": "other documents begun again"}
    rows = tuple(Row(f"{who}: {what}", f"{way}/{key}") for way, who in ways.items() for key, what in course.items())
    rows += tuple(
        Row(f"{who}, a worker killed: {what}", f"{way}/killed/{key}")
        for way, who in ways.items()
        for key, what in killed.items()
    )
    ways = ways | {f"{way}_bounded": f"{ways[way]}, two more tries" for way in ("batches", "calls")}
    rows += tuple(
        Row(f"{who}, a document that kills workers: {what}", f"{way}/poison/{key}")
        for way, who in ways.items()
        if way != "calls"
        for key, what in poison.items()
    )
    return Sheet(
        "ray_data.json",
        "Workers on Ray: ours against `map_batches`",
        "python -m bench.ray_data --documents 60 --workers 2 --max-new-tokens 64 --patience 20",
        (
            Row("documents", "documents"),
            Row("workers, each of one thread", "workers"),
            Row("cores they share, with other work", "cpus"),
            Row("seconds of local processes, each with a fixed share", "local_s"),
            Row("summaries identical to those of local processes", "identical", "all"),
            *rows,
        ),
        dtype="fp32",
        device="cpu",
        note="A job that writes no result for a minute is stopped, and came to no end.",
    )


SHEETS = (
    _llm("fp32"),
    _llm("bf16"),
    Sheet(
        "gpu_decode.json",
        "Decoding on a GPU",
        "python -m bench.gpu_decode --tokenizer DIR --pairs FILE --output bench/results/gpu_decode.json",
        (
            *(Row(goal.what, f"figures/{goal.key}", goal.target, is_optional=True) for goal in GPU_DECODE),
            Row("tokens of an output that are those of `generate`, before the first that is not", "plain/same_tokens"),
            Row("of so many", "max_new_tokens"),
        ),
        note="The targets are for the shape of Llama-3-8B, batch 1, 2,048 tokens of context, in bf16. The weights are "
        "random: with drafts, a recorded text dictates what the model says, so that acceptance is the text's and not "
        "this model's.",
        plot="Milliseconds of a step by its nodes",
    ),
    Sheet(
        "kernel.json",
        "Tree attention on a GPU",
        "python -m bench.kernel --output bench/results/kernel.json",
        (
            *(Row(goal.what, f"figures/{goal.key}", goal.target, is_optional=True) for goal in KERNEL),
            Row("copy, GB/s", "copy_gb_per_s"),
            *(
                Row(what, f"results/*/{key}", each="{method}, {rows} x {context} tokens, {width} nodes")
                for key, what in {"us_per_layer": "us a layer", "of_copy": "of a copy", "tflops": "TFLOP/s"}.items()
            ),
        ),
        model="none runs",
        note="The targets are for an H200 and heads as Llama-3-8B has them. Every figure that has one is the worst of "
        "its kind. FlexAttention is to take 0.9 to 1.2 times as long as the kernel where its mask is made before.",
        plot="Microseconds a layer of tree attention by the nodes of a tree",
    ),
    _job("fp32"),
    _job("bf16"),
    _job("fp32", "_short", " --documents 160 --longest 300 --streamed 0 --trials 2", "Many short documents"),
    Sheet(
        "never_slower.json",
        "Never slower than plain decoding",
        "python -m bench.never_slower --prompts squality_dev.jsonl --field document",
        (Row("worst case, over plain decoding", "worst"), Row("which", "worst_case")),
        dtype="fp32 and bf16",
    ),
    Sheet(
        "exactness.json",
        "The tokens of `model.generate`",
        "python -m bench.exactness --prompts squality_dev.jsonl --output bench/results/exactness.json",
        (
            Row("tiny models, fp32: outputs", "fp32/runs"),
            Row("identical", "fp32/identical", "all"),
            Row("summarizer, fp32: outputs", "summarizer/fp32/runs"),
            Row("identical", "summarizer/fp32/identical", "all"),
            Row("tiny models, bf16: share of outputs that part from greedy", "bf16/lookahead/divergence_rate"),
            Row("the same of transformers' prompt lookup", "bf16/prompt_lookup/divergence_rate"),
            Row("summarizer, bf16: that share", "summarizer/bf16/lookahead/divergence_rate"),
            Row("failures", "failures", "none"),
        ),
        model="tiny random ones of all families, and the summarizer of the tests",
        dtype="fp32 and bf16",
        device="cpu",
    ),
    Sheet(
        "fuzz.json",
        "Random settings",
        "python -m bench.fuzz --runs 10000 --output bench/results/fuzz.json",
        (Row("runs", "runs"), Row("failures", "failures", "none")),
        model="tiny random ones",
        dtype="fp32",
        device="cpu",
    ),
    _compiled("fp32"),
    _compiled("bf16"),
    _replay("spec_bench_summaries", "Spec-Bench summaries"),
    _replay("vicuna", "chat, Vicuna 7B"),
    _replay("llama3", "chat, Llama-3-8B-Instruct"),
    Sheet(
        "stories.json",
        "The default sources on story openings",
        "python -m bench.stories --model DIR --nodes 32 --tokens 160",
        (
            Row("tokens a pass, memory fresh for each", "fresh/mean_acceptance_length"),
            Row("before the output loops", "fresh/mean_acceptance_length_before_loops"),
            Row("tokens a pass, memory shared", "shared/mean_acceptance_length"),
            Row("before the output loops", "shared/mean_acceptance_length_before_loops"),
            Row("prompts", "prompts"),
        ),
        dtype="fp32",
        device="cpu",
    ),
    Sheet(
        "mixing.json",
        "All sources against each alone, on the summarizer of the tests",
        "python -m bench.mixing --prompts squality_dev.jsonl --field document --output bench/results/mixing.json",
        (
            Row("over the best source alone, at worst", "worst", "at least 0.99"),
            Row("tokens a pass", "budgets/*/mixture", each="{nodes} nodes"),
            Row("over the best source alone", "budgets/*/over_best", "at least 0.99", each="{nodes} nodes"),
            Row("promised over accepted", "budgets/*/calibration", "0.9 to 1.1", each="{nodes} nodes"),
        ),
    ),
    _proposers(),
    _jacobi("w7_n5_g7", "--window 7 --ngram-size 5 --guesses 7"),
    _jacobi("w7_n5_g7_prompt_pool", "--window 7 --ngram-size 5 --guesses 7 --pool-from-prompt"),
    _jacobi("w20_n7_g20_prompt_pool", "--window 20 --ngram-size 7 --guesses 20 --pool-from-prompt"),
    _propose(),
    Sheet(
        "dropin.json",
        "What it costs to be a drop-in",
        "python -m bench.dropin --output bench/results/dropin.json",
        (
            Row("the switch on and off, ms", "switch_ms"),
            *(
                Row(f"a single token after {n:,}, over transformers", f"single_token_ratio/{n}")
                for n in (16, 128, 512, 1024)
            ),
            Row("calls", "memory/calls"),
            Row("memory before them, MiB", "memory/before_mib"),
            Row("and after, MiB", "memory/after_mib"),
        ),
        model="tests/models/summarizer",
        dtype="fp32",
        device="cpu",
    ),
    Sheet(
        "soak.json",
        "Memory over many requests",
        "python -m bench.soak --model DIR --prompts squality_dev.jsonl --field document "
        "--output bench/results/soak.json",
        (
            Row("requests, after those that warm up", "requests"),
            Row("memory after warming up, MiB", "rss_mb_after_warmup"),
            Row("growth, MiB", "growth_mb"),
            Row("Python objects grown", "python_objects_grown"),
        ),
        dtype="fp32",
        device="cpu",
    ),
    _faults(
        "faults.json", "Jobs killed at random moments and resumed", "--documents 1000 --kills 200 --model none", 200
    ),
    _faults("faults_summarizer.json", "The same with the summarizer of the tests", "--documents 1000 --kills 200", 200),
    Sheet(
        "ray_job.json",
        "A job on Ray against local processes",
        "python -m bench.ray_job --documents 200 --workers 4 --output bench/results/ray_job.json",
        (
            Row("documents", "documents"),
            Row("workers, each of one thread", "workers"),
            Row("cores they share, with other work", "cpus"),
            Row("seconds of local processes, each with a fixed share", "local_s"),
            Row("seconds on Ray", "ray_s"),
            Row("what Ray takes longer, a share", "overhead", "at most 0.15"),
            Row("seconds on Ray, one worker killed", "ray_with_a_kill_s"),
            Row("workers that died", "died", "1"),
            Row("summaries identical to those of local processes", "identical", "all"),
        ),
        dtype="fp32",
        device="cpu",
    ),
    _ray_data(),
    Sheet(
        "summarizer.json",
        "The summarizer of the tests",
        "python -m bench.summarizer --model tests/models/summarizer --text FILE --limit 200",
        (
            Row("passages", "passages"),
            Row("share of sentences that stand in the passage", "verbatim"),
            Row("share of summaries that end", "finished"),
            Row("ROUGE-L", "rouge_l"),
            Row("of the first three sentences", "rouge_l_lead_3"),
            Row("of three at random", "rouge_l_random_3"),
        ),
        note="ROUGE-L is against the extract a classical scorer would make.",
    ),
)
