"""What many tests share: one thread, a tiny model, the folder of a small trained one."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.support.default_run import mark_exhaustive
from tests.support.extended import EXTENDED, ROOT

# The process that starts the workers of xdist imports this file first, and has no use for torch, which takes seconds.
if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

collect_ignore_glob = [str(ROOT / pattern) for pattern in EXTENDED]  # of folders; a file that is named is collected
CLI_TEXT = "The cat sat on the mat. The dog sat by the door. "


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The command line sets the threads of the process; with several, sums round differently from pass to pass."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def three_threads(one_thread: None) -> None:
    """Three threads of torch, until the next test sets one."""
    import torch

    torch.set_num_threads(3)


@pytest.fixture
def prompt_kernel() -> None:
    """Skip where no kernel has the bits of prompts. It is compiled here, since every worker collects every file."""
    from lookahead.backend.cpu.exact_attention import has_bits_of_prompts

    if not has_bits_of_prompts(64):
        pytest.skip("this CPU adds in another order")


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the command line keeps between runs is not kept where its user's is."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        # Tests that break a kernel probe the same model as others.
        patch.setattr("lookahead.model.model_state.verdict_file", lambda model: None)
        yield folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make dist` name what it built."""
    parser.addoption(
        "--built", metavar="FOLDER", help="a folder with the sdist and wheel that tests/test_packaging.py checks"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of Hypothesis examples by the tests that are asked for."""
    settings.load_profile("brief" if "not exhaustive" in config.option.markexpr else "exhaustive")
    gc.disable()  # what is imported and collected stays, and the collector would go through it again and again


def pytest_collection_finish() -> None:
    """Leave what was imported to no later garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave a full product to the exhaustive run where a test asks for a covering selection."""
    mark_exhaustive(items)


def _random_llama() -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(20)
        return LlamaForCausalLM(config).float().eval()


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """A random fp32 Llama on the CPU, seconds small, whose greedy output wanders.

    Weights are drawn wide (0.4), so that logits are far from flat and argmax has no ties. It is shared by the
    whole session: a test that changes it must put it back.
    """
    return _random_llama()


@pytest.fixture(scope="session")
def looping_llama() -> LlamaForCausalLM:
    """A random fp32 Llama that likes to count, and starts again after 16 tokens: its drafts are accepted.

    The embedding outweighs what the layers add, and the head leans towards the token after the newest one, so that
    greedy and sampled output repeats itself and still wanders. It is shared by the whole session as well.
    """
    import torch

    model = _random_llama()
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        following = torch.arange(101) + 1 - 16 * (torch.arange(101) % 16 == 15)
        model.lm_head.weight[following.clamp(max=100)] += 2 * embedding
        embedding.mul_(30)
    return model


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Draft tokens accepted, one number for every batch that our engine decodes."""
    from lookahead.engine.engine import Engine

    counts: list[int] = []
    run = Engine.run

    def counting(self: Engine) -> Iterator[Any]:
        try:
            yield from run(self)
        finally:  # a loop whose requests have all ended is not asked again
            counts.append(sum(stats.accepted_tokens for stats in self.stats))

    monkeypatch.setattr(Engine, "run", counting)
    return counts


@pytest.fixture
def foretell(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor, torch.Tensor | None], None]:
    """Lets our engine draft the answer it is told, row by row: right tokens first, then a wrong one."""
    from tests.support.adversarial_proposers import Scripted, chain

    def tell(answer: torch.Tensor, mask: torch.Tensor | None) -> None:
        padding = [0] * len(answer) if mask is None else (mask == 0).sum(1).tolist()
        answers = [ids[pad:] for ids, pad in zip(answer.tolist(), padding, strict=True)]

        def offer(row: int, text: list[int], room: int) -> Any:
            tokens = answers[row][len(text) - 1 : len(text) + 2 + len(text) % 4]
            return chain([*tokens, (tokens[-1] + 1) % 101])

        monkeypatch.setattr("lookahead.decoding.assembly.make_proposers", lambda *_: [Scripted(offer)])

    return tell


@pytest.fixture(scope="session")
def summarizer_path() -> Path:
    """The folder of the small extractive summarizer that the tests use."""
    return ROOT / "tests" / "models" / "summarizer"


@pytest.fixture(scope="session")
def float32_summarizer(tmp_path_factory: pytest.TempPathFactory, summarizer_path: Path) -> Path:
    """The same in a folder of its own that says float32: in bfloat16 some CPUs take fifty times as long."""
    folder = tmp_path_factory.mktemp("summarizer")
    for path in summarizer_path.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((summarizer_path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters for `tiny_llama`: 95 printable ASCII characters behind six special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<bos>", "<eos>", "<unk>", "<a>", "<b>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def chat_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a chat template, which takes roles in turn and adds a beginning of its own."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "<bos>{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "<a>{{ m.role[0] }}{{ m.content }}<b>"
        "{% endfor %}{% if add_generation_prompt %}<a>a{% endif %}{{ mood }}"
    )
    return tokenizer


@pytest.fixture(scope="session")
def model_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A tiny random model, saved as any other."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Lets passes be recorded on the CPU, and lists what was."""
    from lookahead.backend.gpu import cuda_graphs
    from lookahead.model.model_state import ModelState, state_of
    from tests.support.pass_recorder import Recording

    made: list[Any] = []
    states: dict[Any, ModelState] = {}

    def capture(run: Any) -> Recording:
        run()  # as CUDA's capture does
        made.append(Recording(run))
        return made[-1]

    monkeypatch.setattr(cuda_graphs, "graphs_unsupported_reason", lambda *_: None)
    for name in ("assembly", "path_report"):
        monkeypatch.setattr(f"lookahead.decoding.{name}.records_graphs", lambda _: True)
    monkeypatch.setattr(cuda_graphs, "CudaGraphs", lambda *_, **__: capture)

    def state_for_graphs(model: Any) -> ModelState:
        state = states.setdefault(model, ModelState())
        state.plan = state_of(model).plan
        return state

    monkeypatch.setattr(cuda_graphs, "state_of", state_for_graphs)
    return made


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory; stderr and stdout are wide enough not to wrap."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    from transformers.utils import logging

    # The command sets up its process, which here is that of all tests.
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield
    logging.set_verbosity(verbosity)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture
def cli_folder(tmp_path: Path, workplace: None) -> Path:
    """A working directory with two documents."""
    (tmp_path / "a.txt").write_text(CLI_TEXT)
    (tmp_path / "b.txt").write_text(CLI_TEXT[::-1])
    return tmp_path


@pytest.fixture
def chat_folder(tmp_path: Path, tiny_llama: LlamaForCausalLM, chat_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny model with a chat template, saved as any other."""
    tiny_llama.save_pretrained(tmp_path / "chatty")
    chat_tokenizer.save_pretrained(tmp_path / "chatty")
    return tmp_path / "chatty"


@pytest.fixture
def summarize(cli_folder: Path, model_folder: Path) -> Callable[..., Any]:
    """Runs `lookahead summarize` with a tiny model and short summaries."""

    from typer.testing import CliRunner

    from lookahead.cli.app import app

    def run(*arguments: str, input: str | None = None) -> Any:
        options = [] if "--model" in arguments else ["--model", str(model_folder)]
        options += [] if "--max-new-tokens" in arguments else ["--max-new-tokens", "12"]
        return CliRunner().invoke(app, ["summarize", *arguments, *options], input=input)

    return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every pass that was one call. The package's own products serve, whatever is faster here."""
    from lookahead.backend.cpu import linears, pass_table

    tokens, own = list[int](), pass_table.PassTable.run

    def run(table: Any, hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
        tokens.append(hidden.shape[1])
        return own(table, hidden, *arguments)

    monkeypatch.setattr(pass_table.PassTable, "run", run)
    monkeypatch.setattr(linears, "measured_backends", lambda *kind: ("packed",))
    return tokens
