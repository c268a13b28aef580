"""`lookahead serve`: the OpenAI client gets what plain `generate` gives, and mistakes are told in a line."""

from __future__ import annotations

import gc
import json
import shutil
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from lookahead.cli.app import app
from lookahead.engine.engine import Engine
from lookahead.generation.serving import _NEWEST_MODULE, EnabledModels, listen, make_server
from tests.support.forked import command

pytestmark = pytest.mark.skipif(find_spec(_NEWEST_MODULE) is None, reason="needs transformers 5.20")
QUESTIONS = ["the cat sat on the cat", "abab abab", "what? what?", "xyz"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama, chat_tokenizer):
    """A tiny model with a chat template, saved as any other."""
    path = tmp_path_factory.mktemp("served") / "chatty"
    tiny_llama.save_pretrained(path)
    chat_tokenizer.save_pretrained(path)
    return str(path)


class Running:
    """A server on a thread of this process, and a client of it."""

    def __init__(self, models):
        self.models = models
        listener = listen("127.0.0.1", 0)
        self._server = make_server(models)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        import openai  # here, as it takes a second, and every worker imports this file

        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)

    def ask(self, model, text, **options):
        options = {"max_tokens": 40, "temperature": 0, **options}
        return self.client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **options)

    def stream(self, model, text, **options):
        """The pieces of an answer."""
        chunks = self.ask(model, text, stream=True, **options)
        return [piece for chunk in chunks if (piece := chunk.choices[0].delta.content)]

    def end(self):
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def server(folder):
    """A server that has one model loaded, and loads others by name."""
    running = Running(EnabledModels(folder, device="cpu"))
    yield running
    running.end()


@pytest.fixture(scope="module")
def plain(folder, chat_tokenizer):
    """What transformers alone answers: the text and the number of its tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder)

    def answer(text, **options):
        chat = [{"role": "user", "content": text}]
        inputs = chat_tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        new = model.generate(**inputs, **{"max_new_tokens": 40, **options})[0, inputs["input_ids"].shape[1] :]
        return chat_tokenizer.decode(new, skip_special_tokens=True), len(new)

    return answer


def test_an_answer_is_that_of_generate_and_drafts_were_at_work(server, folder, plain, monkeypatch):
    steps = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: steps.append(1) or step(self))
    for text in QUESTIONS:
        got = server.ask(folder, text)
        assert (got.choices[0].message.content, got.usage.completion_tokens) == plain(text)
        assert (got.model, got.choices[0].finish_reason) == (folder, "length")
    assert steps


def test_a_streamed_answer_comes_in_pieces_and_is_the_same(server, folder, plain):
    pieces = server.stream(folder, QUESTIONS[0])
    assert "".join(pieces) == plain(QUESTIONS[0])[0]
    assert len(pieces) > 3


def test_four_clients_at_once_each_get_their_own_answer(server, folder, plain):
    def ask(i):
        if i % 2:
            return "".join(server.stream(folder, QUESTIONS[i]))
        return server.ask(folder, QUESTIONS[i]).choices[0].message.content

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [plain(text)[0] for text in QUESTIONS]


def test_a_text_is_continued_and_a_response_is_answered(server, folder, tiny_llama, tiny_tokenizer, plain):
    got = server.client.completions.create(model=folder, prompt="abab", max_tokens=20, temperature=0)
    ids = tiny_tokenizer("abab", return_tensors="pt").input_ids
    new = tiny_llama.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert got.choices[0].text == tiny_tokenizer.decode(new, skip_special_tokens=True)
    options = {"max_output_tokens": 40, "temperature": 0, "stream": False}
    answered = server.client.responses.create(model=folder, input=QUESTIONS[1], **options)
    assert answered.output_text == plain(QUESTIONS[1])[0]


def test_the_same_seed_samples_the_same_answer(server, folder, plain):
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 30}
    body = {"seed": 7, "generation_config": GenerationConfig(**options).to_json_string()}
    got = server.ask(folder, QUESTIONS[0], temperature=None, max_tokens=None, extra_body=body)
    torch.manual_seed(7)
    assert got.choices[0].message.content == plain(QUESTIONS[0], **options)[0]


def test_a_stop_string_ends_an_answer_where_it_would_have(server, folder, plain, chat_tokenizer):
    stop = plain(QUESTIONS[0])[0][10:12]
    got = server.ask(folder, QUESTIONS[0], stop=[stop]).choices[0]
    assert got.message.content == plain(QUESTIONS[0], stop_strings=[stop], tokenizer=chat_tokenizer)[0]
    assert got.finish_reason == "stop"


def test_a_client_that_leaves_a_stream_does_not_disturb_the_next(server, folder, plain):
    chunks = server.ask(folder, QUESTIONS[0], stream=True, max_tokens=400)
    next(iter(chunks))
    chunks.close()
    assert server.ask(folder, QUESTIONS[1]).choices[0].message.content == plain(QUESTIONS[1])[0]


@pytest.mark.filterwarnings("ignore:decoded by transformers alone")
def test_beam_search_is_left_to_transformers(server, folder, plain):
    options = {"num_beams": 2, "max_new_tokens": 10}
    body = {"generation_config": GenerationConfig(**options).to_json_string()}
    got = server.ask(folder, QUESTIONS[0], temperature=None, max_tokens=None, extra_body=body)
    assert got.choices[0].message.content == plain(QUESTIONS[0], **options)[0]


def test_a_model_that_does_not_exist_is_told_by_name_and_the_server_lives_on(server, folder, plain):
    from openai import NotFoundError

    with pytest.raises(NotFoundError) as caught:
        server.ask("./missing", QUESTIONS[0])
    assert caught.value.code == "model_not_found"
    assert caught.value.body["message"].startswith("model './missing' does not exist: looked for the folder ")
    assert server.ask(folder, QUESTIONS[0]).choices[0].message.content == plain(QUESTIONS[0])[0]


def test_a_model_that_lacks_a_tensor_is_refused_by_its_name_and_the_server_lives_on(server, folder, plain, tmp_path):
    from openai import NotFoundError

    damaged = shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    with pytest.raises(NotFoundError, match=r"lacks 1 tensor: model\.norm\.weight"):
        server.ask(str(damaged), QUESTIONS[0])
    assert server.ask(folder, QUESTIONS[0]).choices[0].message.content == plain(QUESTIONS[0])[0]


def test_what_the_model_cannot_be_asked_is_a_request_of_400(server, folder, model_folder):
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="no tools here"):
        server.client.chat.completions.create(model=folder, messages=[{"role": "tool", "content": "x"}])
    with pytest.raises(BadRequestError, match="chat_template"):
        server.ask(str(model_folder), QUESTIONS[0])


def test_models_are_listed_loaded_on_request_and_freed(server, folder, model_folder):
    assert server.client.models.list().data[0].id == folder
    server.client.completions.create(model=str(model_folder), prompt="ab", max_tokens=4)
    assert str(model_folder) in [model.id for model in server.client.models.list()]
    model = weakref.ref(server.models.loaded_models[str(model_folder)].model)
    server.models.loaded_models[str(model_folder)].delete_model()
    gc.collect()
    assert model() is None


def test_a_model_that_is_served_alone_is_the_only_one(folder, model_folder, plain):
    from openai import BadRequestError

    running = Running(EnabledModels(folder, only=True, device="cpu"))
    try:
        assert [model.id for model in running.client.models.list()] == [folder]
        with pytest.raises(BadRequestError, match="pinned"):
            running.ask(str(model_folder), QUESTIONS[0])
        assert running.ask(folder, QUESTIONS[0]).choices[0].message.content == plain(QUESTIONS[0])[0]
    finally:
        running.end()


# The command


def serve(*arguments):
    return CliRunner().invoke(app, ["serve", *arguments])


def test_a_port_in_use_is_told_in_a_line_before_the_model_is_loaded(cli_folder, folder, monkeypatch):
    monkeypatch.setattr("lookahead.generation.serving.EnabledModels", None)
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        result = serve(folder, "--port", str(port))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: cannot listen on port {port} of localhost: Address already in use; --port names another\n"
    )


def test_packages_that_are_missing_are_told_with_the_extra_that_has_them(cli_folder, folder, monkeypatch):
    monkeypatch.setattr("lookahead.generation.serving._PACKAGES", ("openai", "no_such_package"))
    result = serve(folder)
    assert result.exit_code == 2
    assert result.stderr == "error: serving needs no_such_package: pip install 'lookahead-decoding[serve]'\n"


def test_a_transformers_too_old_to_serve_is_told_before_anything_is_loaded(folder, monkeypatch):
    monkeypatch.setattr("lookahead.generation.serving._NEWEST_MODULE", "transformers.cli.serving.no_such_module")
    result = serve(folder)
    assert result.exit_code == 2
    assert result.stderr == (
        "error: serving needs transformers 5.20 or newer: pip install 'lookahead-decoding[serve]'\n"
    )


def test_a_model_that_does_not_exist_is_told_in_a_line(cli_folder):
    result = serve("./missing")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "model './missing' does not exist" in result.stderr


def test_the_command_answers_and_ctrl_c_ends_it_quietly(folder, plain, tmp_path):
    from openai import OpenAI

    said = tmp_path / "stdout"
    with said.open("w") as stdout:
        words = ("serve", folder, "--port", "0")
        with command(*words, folder=tmp_path, stdout=stdout.fileno()) as process:
            process.until(lambda: process.stderr.endswith("\n"))
            line = process.stderr
            assert line.startswith(f"serving: {folder} at http://localhost:"), line
            client = OpenAI(base_url=line.split()[3].rstrip(";"), api_key="none", timeout=120)
            chat = [{"role": "user", "content": QUESTIONS[0]}]
            got = client.chat.completions.create(model=folder, messages=chat, max_tokens=40, temperature=0)
            assert json.loads(got.to_json())["choices"][0]["message"]["content"] == plain(QUESTIONS[0])[0]
            process.interrupt()
            assert process.wait() == 0
    assert (said.read_text(), process.stderr) == ("", line)
