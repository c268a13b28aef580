"""Libraries of others speak to the server as they do to the APIs that they are made for; missing ones are left out.

`make test-clients` installs them all. A random model follows grammars, so what must be called is called.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from pydantic import BaseModel, ConfigDict
from transformers import AutoTokenizer

from tests.support.grammars import END
from tests.support.running_server import Running, save_chatty

pytest.importorskip("openai")
TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = "the cat sat on the cat"


class Street(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["road", "lane"]
    is_long: bool


class Person(BaseModel):
    """Where somebody lives."""

    model_config = ConfigDict(extra="forbid")
    home: Street
    work: Street


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    path = save_chatty(tmp_path_factory.mktemp("served") / "chatty")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Running]:
    running = Running(folder)
    yield running
    running.end()


@pytest.fixture(scope="module")
def url(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture(scope="module")
def text(server: Running) -> str:
    """What the server answers."""
    return str(server.ask(QUESTION, max_tokens=20).choices[0].message.content)


def test_litellm_completes_streams_and_calls_over_three_apis(server, url, text, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    chat = [{"role": "user", "content": QUESTION}]
    for model, base in ((f"openai/{server.name}", url), (f"anthropic/{server.name}", url.removesuffix("/v1"))):
        options: Any = {"model": model, "api_base": base, "api_key": "none", "messages": chat}
        short = {"max_tokens": 20, "temperature": 0}
        assert litellm.completion(**options, **short).choices[0].message.content == text
        chunks = list(litellm.completion(**options, **short, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        tool = {"type": "function", "function": {"name": "f", "parameters": Person.model_json_schema()}}
        named = {"type": "function", "function": {"name": "f"}}
        got = litellm.completion(**options, tools=[tool], tool_choice=named, max_tokens=300)
        (call,) = got.choices[0].message.tool_calls
        Person.model_validate_json(call.function.arguments)
    got = litellm.responses(
        model=f"openai/{server.name}", api_base=url, api_key="none", input=QUESTION, max_output_tokens=20, temperature=0
    )
    assert got.output[0].content[0].text == text


def test_langchain_invokes_streams_and_fills_nested_models(server, url, text):
    langchain_openai = pytest.importorskip("langchain_openai")
    options: Any = {"model": server.name, "base_url": url, "api_key": "none", "temperature": 0}
    model = langchain_openai.ChatOpenAI(**options, max_tokens=20)
    assert model.invoke(QUESTION).content == text
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == text
    filling = langchain_openai.ChatOpenAI(**options, max_tokens=300)
    for method in ("function_calling", "json_schema"):
        assert isinstance(filling.with_structured_output(Person, method=method).invoke(QUESTION), Person)
    responses = langchain_openai.ChatOpenAI(**options, max_tokens=20, use_responses_api=True)
    assert responses.invoke(QUESTION).content[0]["text"] == text


def test_instructor_fills_nested_models(server):
    instructor = pytest.importorskip("instructor")
    chat = [{"role": "user", "content": QUESTION}]
    options: Any = {"model": server.name, "messages": chat, "response_model": Person, "max_tokens": 300}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(server.client, mode=mode)
        assert isinstance(client.chat.completions.create(**options, max_retries=0), Person)
    client = instructor.from_openai(server.client, mode=instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(**options)
    Person.model_validate(last.model_dump())


def test_an_agent_of_pydantic_ai_calls_a_tool_and_gives_a_nested_model(server, url):
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(server.name, provider=OpenAIProvider(base_url=url, api_key="none"))
        agent = Agent(model, output_type=Person, model_settings={"max_tokens": 300}, retries=3)
        result = agent.run_sync(QUESTION)
        assert isinstance(result.output, Person) and result.usage.output_tokens > 10
        again = agent.run_sync("and now?", message_history=result.all_messages())
        assert isinstance(again.output, Person)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_agent_loop_of_openai_agents_calls_a_function_and_answers(server, url, api):
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    seen = list[Person]()

    @agents.function_tool
    def look_up(person: Person) -> str:
        """Look up where a person lives."""
        seen.append(person)
        return "nowhere"

    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    agent = agents.Agent(
        name="one",
        instructions="Look it up.",
        tools=[look_up],
        model=kind(model=server.name, openai_client=client),
        model_settings=agents.ModelSettings(
            tool_choice="required",
            max_tokens=300,
            temperature=0,
            extra_body={"logit_bias": {str(END): 100}, "min_tokens": 3},  # the answer after the call ends soon
        ),
    )
    result = agents.Runner.run_sync(agent, QUESTION, max_turns=4)
    assert seen and all(isinstance(person, Person) for person in seen)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"] and result.final_output


def test_llm_prompts_and_streams(server, url, text, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")
    llm = pytest.importorskip("llm")
    model = {"model_id": "served", "model_name": server.name, "api_base": url, "can_stream": True}
    Path(tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
    for streams in (False, True):
        response = llm.get_model("served").prompt(QUESTION, stream=streams, temperature=0, max_tokens=20)
        assert response.text() == text


def test_whatever_its_description_allows_the_server_does_not_fail(folder):
    schemathesis = pytest.importorskip("schemathesis")
    running = Running(folder, max_new_tokens=4)
    try:
        schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{running.port}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        assert len(operations) > 15
        for operation in operations:

            @settings(max_examples=12, deadline=None, suppress_health_check=[*HealthCheck], database=None)
            @given(case=operation.as_strategy())
            def check(case: Any) -> None:
                answer = case.call(timeout=60)
                assert answer.status_code < 500, (case, answer.text)

            check()
    finally:
        running.end()
