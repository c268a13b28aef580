"""The command that summarizes: options in, files and tables out. The work is done by `jobs` and `summarize`."""

from __future__ import annotations

import inspect
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from lookahead.cli.options import (
    Compile,
    Device,
    Dtype,
    Graphs,
    Guesses,
    KeepParts,
    MaxDocument,
    MaxNewTokens,
    MaxNodes,
    Model,
    NgramSize,
    Overlap,
    Proposers,
    Refine,
    Threads,
    TrainedHeads,
    Window,
    drafting_config,
    split_pool,
)
from lookahead.cli.summarize_job import Ray, RayAddress, Runner, Staff, Workers, full_path, ray_staff
from lookahead.cli.terminal import Display, console, load, say_skipped, table, usage_errors
from lookahead.errors import ConfigError
from lookahead.jobs import job_figures as report
from lookahead.models.locating import DEFAULT_MODEL

if TYPE_CHECKING:
    from lookahead.jobs.estimate import Estimate
    from lookahead.jobs.jobfile import Setting
    from lookahead.jobs.output_location import OutputPaths
    from lookahead.jobs.output_memory import OutputMemory
    from lookahead.summarization.prompting import SummaryRequest

FORMATS = ("auto", "text", "json")
_NO_SETTING = ("job", "show_job", "help")


def _use_job(context: typer.Context, path: Path | None) -> Path | None:
    """Take the options of a job file as defaults, so that those of the command line go before them."""
    if path is not None:
        from lookahead.jobs.jobfile import read_job_file

        with usage_errors():
            context.default_map = read_job_file(path, _settings(context))
    return path


def _settings(context: typer.Context) -> dict[str, Setting]:
    """The options a job file may set, by their names."""
    from lookahead.jobs.jobfile import Setting

    declared = inspect.signature(summarize, eval_str=True).parameters
    settings = {}
    for parameter in context.command.params:
        if parameter.name is not None and parameter.name not in _NO_SETTING:
            longest = max(parameter.opts, key=len)
            name = longest.removeprefix("--") if longest.startswith("--") else parameter.name
            hint, option = get_args(declared[parameter.name].annotation)
            kind = next(each for each in get_args(hint) or (hint,) if each is not type(None))
            kind = str if kind is Path else get_origin(kind) or kind
            settings[name] = Setting(parameter.name, kind, getattr(option, "min", None), getattr(option, "max", None))
    return settings


Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="INPUTS...",
        help="Files (.txt .md .html .pdf .docx .jsonl .csv .tsv .parquet), folders, patterns such as 'notes/*.md', "
        "URLs of any kind fsspec knows (https:// s3:// hf:// ...), - for stdin.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File for the summaries: a JSON line each, or .parquet."),
]
Field = Annotated[
    str | None,
    typer.Option(
        "--field", "--text-field", help="Field or column with the document; makes - JSON lines. (default: text)"
    ),
]
IdField = Annotated[
    str | None, typer.Option(help="Field or column that names the document. (default: id, where there is one)")
]
PromptFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Instruction in your words; {document} in it is the document.")
]
Style = Annotated[str | None, typer.Option(help="bullets, paragraph or headline, of a model that takes instructions.")]
Compare = Annotated[
    bool, typer.Option("--compare", help="Decode plainly too: both speeds, and are the tokens identical?")
]
Format = Annotated[
    str, typer.Option("--format", help="Of stdout: text, json, or auto: text on a terminal, else JSON lines.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace output files that exist.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an output: do what is missing in it.")]
Rejects = Annotated[Path | None, typer.Option(help="File for documents that fail. (default: OUTPUT.rejects.jsonl)")]
Retry = Annotated[bool, typer.Option("--retry-rejects", help="With --resume: try documents that failed again.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many documents.")]
Sample = Annotated[int | None, typer.Option(min=1, help="Only so many documents, drawn at random.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same ones.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count documents and tokens, and estimate the time.")]
Price = Annotated[float | None, typer.Option(min=0.0, help="What an hour here costs, for --dry-run.")]
Rows = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Most documents decoded together. (default: as suits the model)")
]
Pool = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Draft from this too: a corpus made by 'lookahead pool build', or else a file that keeps this job's "
        "outputs for later ones.",
    ),
]
Job = Annotated[
    Path | None,
    typer.Option(
        "--job", metavar="FILE", help="Take these options from a TOML file.", callback=_use_job, is_eager=True
    ),
]
ShowJob = Annotated[bool, typer.Option("--show-job", help="Print all options as such a file, and do nothing.")]


def summarize(
    context: typer.Context,
    inputs: Inputs = None,
    output: Output = None,
    model: Model = DEFAULT_MODEL,
    field: Field = None,
    id_field: IdField = None,
    max_document_mb: MaxDocument = 64.0,
    max_new_tokens: MaxNewTokens = 200,
    prompt_file: PromptFile = None,
    style: Style = None,
    overlap: Overlap = 0,
    refine: Refine = False,
    keep_parts: KeepParts = False,
    compare: Compare = False,
    shape: Format = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    rejects: Rejects = None,
    retry_rejects: Retry = False,
    limit: Limit = None,
    sample: Sample = None,
    seed: Seed = 0,
    dry_run: DryRun = False,
    price_per_hour: Price = None,
    rows: Rows = None,
    job: Job = None,
    show_job: ShowJob = False,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    proposers: Proposers = "prompt,outputs,recycled",
    pool: Pool = None,
    heads: TrainedHeads = None,
    max_nodes: MaxNodes = None,
    window: Window = None,
    ngram_size: NgramSize = None,
    guesses: Guesses = None,
    compile: Compile = False,
    cuda_graphs: Graphs = False,
    ray: Ray = False,
    ray_address: RayAddress = None,
    workers: Workers = None,
) -> None:
    """Summarize documents of any length.

    A document longer than the model's context is cut between sections or sentences;
    its parts are summarized, then their summaries together, or with --refine one
    part after the other. One that cannot be read is reported and put aside, and the
    others go on. Equal texts are summarized once.

    With --output every summary is on the disk as soon as it is there. After a
    kill or a loss of power, the same command with --resume does the rest; at the
    end the lines stand in the order of the inputs.

    For example:

      lookahead summarize article.txt --compare
      lookahead summarize article.txt 'notes/*.md' -o summaries.jsonl
      lookahead summarize docs/ s3://bucket/more.parquet -o out.parquet --resume
      cat article.txt | lookahead summarize -
      lookahead summarize docs.jsonl --text-field body -o out.jsonl
      lookahead summarize --job job.toml --dry-run

    Exit status: 0 all are summarized; 1 a document failed, a file could not be
    written, or --compare found a difference in fp32; 2 an argument is wrong, and
    nothing was written; 130 interrupted, and what was finished is written.
    """
    with usage_errors(), ExitStack() as stack:
        inputs = inputs or (context.default_map or {}).get("inputs") or []
        if show_job:
            print(_as_job_file(context, inputs), end="")
            raise typer.Exit()
        _check(inputs, max_new_tokens, retry_rejects, resume, dry_run, price_per_hour, job)
        _check_ray(ray, ray_address, workers, dry_run)
        request = _request(prompt_file, style)
        corpus, memory_path = split_pool(pool, proposers)
        if ray:
            corpus, heads = full_path(corpus), full_path(heads)
        config = drafting_config(proposers, corpus, heads, max_nodes, window, ngram_size, guesses, compile, cuda_graphs)
        from lookahead.documents.byte_sources import MEGABYTE
        from lookahead.documents.inputs import find_inputs
        from lookahead.documents.readers import check_readers, count_documents
        from lookahead.jobs.document_sample import select_documents
        from lookahead.jobs.output_location import OutputPaths
        from lookahead.summarization.prompt_fitter import Approach

        approach = Approach(overlap=overlap, refine=refine)
        paths = OutputPaths(output, rejects, overwrite, resume)
        skipped: list[str] = []
        sources = find_inputs(inputs, field, id_field, leave_out=paths.all, on_skip=skipped.append)
        say_skipped(skipped)
        check_readers(sources)
        if not dry_run:
            paths.check(sources)
        as_text = _as_text(shape, output)
        documents = select_documents(
            sources, first=limit, sample=sample, seed=seed, limit=int(max_document_mb * MEGABYTE)
        )
        asked: dict[str, Any] = {
            "max_new_tokens": max_new_tokens, "request": request, "approach": approach, "keep_parts": keep_parts,
        }  # fmt: skip
        summarizing = {**asked, "config": config, "compare": compare}
        if ray:
            staff = stack.enter_context(
                ray_staff(
                    ray_address, workers, threads, memory_path, model=model, dtype=dtype, device=device, rows=rows,
                    summarizer=summarizing, identity=asked,
                )
            )  # fmt: skip
        else:
            loaded = load(model, dtype, device, threads)
            from lookahead.jobs.identity import JobIdentity
            from lookahead.summarization.summarizer import Summarizer

            summarizer = Summarizer(*loaded, **summarizing)
            memory = _open_memory(memory_path, loaded)
            with console(sys.stderr).status("warming up"):
                summarizer.warm_up()
            if dry_run:
                from lookahead.jobs.estimate import estimate_job

                with console(sys.stderr).status("counting"):
                    estimate = estimate_job(
                        documents, summarizer.fitter, summarizer, max_new_tokens=max_new_tokens, rows=rows,
                        price_per_hour=price_per_hour, seed=seed,
                    )  # fmt: skip
                _show_estimate(estimate, as_json=not (shape == "text" or (shape == "auto" and sys.stdout.isatty())))
                raise typer.Exit(1 if estimate.failed else 0)
            staff = Staff(summarizer, JobIdentity.of(model, *loaded, **asked), rows, memory)
        known = count_documents(sources)
        total = min((number for number in (known, limit, sample) if number is not None), default=None)
        display = _display(total if known is not None else None, paths, as_text=as_text)
        if not ray:
            summarizer.report_prefill(display.reading)
        runner = Runner(
            staff, paths, display, retry_rejects=retry_rejects, is_part=total != known, skipped=len(skipped)
        )
        status = runner.run(documents, as_text=as_text)
    raise typer.Exit(status)


def _check(
    inputs: list[str],
    max_new_tokens: int,
    retry_rejects: bool,
    resume: bool,
    dry_run: bool,
    price_per_hour: float | None,
    job: Path | None,
) -> None:
    """Refuse options that do not go together."""
    from lookahead.summarization.prompt_fitter import check_max_new_tokens

    check_max_new_tokens(max_new_tokens)
    if not inputs:
        where = f"; {job} names none" if job is not None else ""
        raise ConfigError(f"no input: name files, folders or URLs, or - for stdin{where}")
    if retry_rejects and not resume:
        raise ConfigError("--retry-rejects tries again what an earlier run put aside; it needs --resume")
    if price_per_hour is not None and not dry_run:
        raise ConfigError("--price-per-hour is for --dry-run, which estimates the cost")
    if dry_run and resume:
        raise ConfigError("--dry-run estimates a whole job; leave --resume out")


def _check_ray(ray: bool, address: str | None, workers: int | None, dry_run: bool) -> None:
    """Refuse options that only a cluster knows, and what it does not do."""
    if not ray and (address is not None or workers is not None):
        raise ConfigError("--ray-address and --workers are for --ray, which works on a cluster")
    if ray and dry_run:
        raise ConfigError("--dry-run measures the time on this machine alone; leave --ray out")


def _as_job_file(context: typer.Context, inputs: list[str]) -> str:
    """All options as a job file."""
    from lookahead.jobs.jobfile import to_toml

    values: dict[str, Any] = {**context.params, "inputs": inputs or None}
    return to_toml({name: values[setting.key] for name, setting in _settings(context).items()})


def _request(prompt_file: Path | None, style: str | None) -> SummaryRequest | None:
    """What the model is asked for, if not the usual summary."""
    from lookahead.documents.byte_sources import MEGABYTE, read_bounded
    from lookahead.documents.decode_text import decode_bytes
    from lookahead.summarization.prompting import SummaryRequest

    prompt = None if prompt_file is None else decode_bytes(read_bounded(str(prompt_file), MEGABYTE), str(prompt_file))
    return None if prompt is None and style is None else SummaryRequest(prompt=prompt, style=style)


def _open_memory(path: Path | None, loaded: Any) -> OutputMemory | None:
    """Load the memory of earlier outputs, where one is kept."""
    if path is None:
        return None
    from lookahead.jobs.output_memory import OutputMemory

    return OutputMemory(path, *loaded)


def _show_estimate(estimate: Estimate, *, as_json: bool) -> None:
    """Show what a job would take."""
    if as_json:
        print(json.dumps(estimate.to_dict()))
    else:
        console(sys.stdout).print(table(("", ""), report.estimate_rows(estimate)))


def _as_text(shape: str, output: Path | None) -> bool:
    """Whether summaries are shown to be read, not as JSON lines."""
    if shape not in FORMATS:
        raise ConfigError(f"format must be {', '.join(FORMATS)}, got {shape!r}")
    if output is not None and shape != "auto":
        raise ConfigError("format is that of stdout; with --output the summaries go to that file as JSON lines")
    return output is None and (shape == "text" or (shape == "auto" and sys.stdout.isatty()))


def _display(total: int | None, paths: OutputPaths, *, as_text: bool) -> Display:
    """What shows the job."""
    lines_on_terminal = not as_text and paths.results is None and sys.stdout.isatty()
    return Display(total, as_text=as_text, with_bar=not lines_on_terminal)
