"""The folder that goes to the Hub, loaded by transformers from a local one in an environment with the package."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "custom_generate"
METADATA = "Metadata-Version: 2.1\nName: lookahead-decoding\nVersion: 0.1.0\n"
SCRIPT = """
import sys, torch, lookahead
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer

class Counter(TextStreamer):
    pieces = 0
    def on_finalized_text(self, text, stream_end=False):
        Counter.pieces += 1

repository, source = sys.argv[1:]
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(source)
model = AutoModelForCausalLM.from_pretrained(source).eval()
ids = tokenizer("The boy said that the boy said that the", return_tensors="pt").input_ids
remote = {"custom_generate": repository, "trust_remote_code": True}
passes = []
handle = model.register_forward_hook(lambda *_: passes.append(1))

def both(*args, **options):
    torch.manual_seed(1)
    expected = model.generate(*args, **options)
    del passes[:]
    Counter.pieces = 0
    torch.manual_seed(1)
    got = model.generate(*args, **options, **remote)
    assert torch.equal(got, expected), options
    return len(passes), got.shape[1] - ids.shape[1]

fixed = lookahead.LookaheadConfig(draft="fixed", trust_user_code=True)  # for the hook that counts
both(ids, max_new_tokens=30, do_sample=True)
both(input_ids=ids, generation_config=GenerationConfig(max_new_tokens=30, do_sample=False))
both(ids, max_new_tokens=30, do_sample=False, stop_strings=[" the"], tokenizer=tokenizer)
both(ids, max_new_tokens=30, do_sample=False, streamer=Counter(tokenizer))
assert Counter.pieces > 2
expected = model.generate(ids, max_new_tokens=60, do_sample=False)
del passes[:]
got = model.generate(ids, max_new_tokens=60, do_sample=False, lookahead_config=fixed, **remote)
assert torch.equal(got, expected) and len(passes) < got.shape[1] - ids.shape[1], len(passes)
del passes[:]
text = {"lookahead_prediction": tokenizer.decode(expected[0, ids.shape[1]:]), "tokenizer": tokenizer}
got = model.generate(ids, max_new_tokens=60, do_sample=False, lookahead_config=fixed, **text, **remote)
assert torch.equal(got, expected) and len(passes) < 15, len(passes)

together = AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True).eval()
assert "generate" in vars(together)  # a model loaded with the folder generates by it, unasked
assert torch.equal(together.generate(ids, max_new_tokens=60, do_sample=False), expected)
"""


@pytest.fixture
def repository(tmp_path: Path, float32_summarizer: Path) -> Path:
    """A repository as the Hub holds it: a model, and the folder beside it."""
    shutil.copytree(float32_summarizer, tmp_path / "repository")
    shutil.copytree(FOLDER, tmp_path / "repository" / "custom_generate", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "repository"


def test_the_folder_serves_every_generate_of_a_model(
    repository: Path, float32_summarizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "lookahead_decoding-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)  # as an installation would leave it, wherever these tests run
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["script", str(repository), str(float32_summarizer)])
    try:
        exec(SCRIPT, {"__name__": "script"})
    finally:
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            del sys.modules[name]


def test_it_asks_for_the_package_and_nothing_else() -> None:
    project = re.search(r'^name = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert project and (FOLDER / "requirements.txt").read_text() == f"{project.group(1)}\n"


def test_its_page_has_the_tag_that_the_hub_looks_for() -> None:
    front = (FOLDER / "README.md").read_text(encoding="utf-8").split("---")[1]
    assert "library_name: transformers" in front and "- custom_generate" in front
