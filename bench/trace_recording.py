"""Requests of repetitive traffic with a model's outputs, as JSON lines.

Five kinds: `agent` (tool calls, each followed by its result and the next order), `chat` (six turns), `document`
(questions about a story), `reasoning` (a solution, and its check in the next turn), and `retries` (several concurrent
samples of one prompt at a temperature). All but the last are greedy. A line has the kind, the number of the
conversation or group of samples as `group`, and `prompt` and `output` as token ids.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any

import torch

from bench.command import make_engine, use_one_thread
from bench.prompts import cut
from lookahead import LookaheadConfig
from lookahead.loading.loading import DEFAULT_MODEL, load

Conversation = tuple[str, list[str], list[str]]
"""The kind, the initial messages from the system message on, and the user's turns."""
_TOOLS = (
    {
        "name": "get_weather",
        "description": "The weather forecast of a city for one day.",
        "parameters": {"city": {"type": "string"}, "day": {"type": "string"}, "unit": {"enum": ["celsius", "kelvin"]}},
    },
    {
        "name": "search_orders",
        "description": "Orders of a customer, the newest first.",
        "parameters": {"customer": {"type": "string"}, "status": {"type": "string"}, "limit": {"type": "integer"}},
    },
    {
        "name": "edit_file",
        "description": "Replaces a line of a file of the project.",
        "parameters": {"path": {"type": "string"}, "line": {"type": "integer"}, "text": {"type": "string"}},
    },
    {
        "name": "run_query",
        "description": "Rows of a query of the shop's database.",
        "parameters": {"sql": {"type": "string"}, "timeout_s": {"type": "integer"}},
    },
)
_SYSTEM = (
    "You use tools. Answer every message with one call, a JSON object with the name of the tool and all its arguments, "
    f"and nothing else.\nTools:\n{json.dumps(_TOOLS, indent=1)}"
)
# For each tool: an order, its call, and its result, with a placeholder for the name; the first is the example.
_ORDERS = (
    (
        "Get the weather of {} for Monday in celsius.",
        '{{"name": "get_weather", "arguments": {{"city": "{}", "day": "Monday", "unit": "celsius"}}}}',
        '{{"city": "{}", "sky": "clear", "high": 21, "low": 9}}',
        "Rome Oslo Lima Cairo Quito Hanoi Perth",
    ),
    (
        "Find the open orders of customer {}, at most 5.",
        '{{"name": "search_orders", "arguments": {{"customer": "{}", "status": "open", "limit": 5}}}}',
        '{{"customer": "{}", "orders": []}}',
        "Young Adams Baker Clark Davis Evans Frank",
    ),
    (
        "Set line 12 of src/{}.py to: import os",
        '{{"name": "edit_file", "arguments": {{"path": "src/{}.py", "line": 12, "text": "import os"}}}}',
        '{{"path": "src/{}.py", "changed": true}}',
        "models main api cache users tests views",
    ),
    (
        "Count the {} of the last 30 days by country.",
        '{{"name": "run_query", "arguments": {{"sql": "SELECT country, COUNT(*) FROM {} WHERE age_days < 30 GROUP BY '
        'country", "timeout_s": 10}}}}',
        '{{"table": "{}", "rows": [["NO", 12], ["PE", 7]]}}',
        "visits refunds signups invoices shipments complaints payments",
    ),
)
_CHECK = "Check your solution: go through it again step by step, and write all of it with the answer at the end."
_FOLLOW_UPS = (
    "Write the answer again, with one more example.",
    "Summarize what you said so far.",
    "Which part is the most important, and why?",
    "Write a final version of your first answer.",
)


def conversations(arguments: Namespace, tokenizer: Any) -> Iterator[Conversation]:
    """The conversations of the first four kinds, grouped by kind."""
    count = slice(arguments.offset, arguments.offset + arguments.groups)
    loops = [[each] for each in _ORDERS] + [list(_ORDERS)]  # a loop for each tool, and one over all tools
    for orders in loops[: arguments.groups]:
        before, turns, result = [_SYSTEM], list[str](), ""
        for order, call, _, names in orders:
            before += [order.format(names.split()[0]), call.format(names.split()[0])]
        rounds = 6 if len(orders) == 1 else 4
        for at, (order, _, answer, names) in product(range(rounds), orders):
            name = names.split()[1 + (at + arguments.offset) % 6]
            turns.append(result + order.format(name))
            result = f"Result: {answer.format(name)}\n"
        yield "agent", before, turns
    for entry in _read(arguments.chats)[8 * arguments.offset :: 8][: arguments.groups]:  # of every category
        yield "chat", [], [*entry["turns"], *_FOLLOW_UPS]
    for entry in _read(arguments.stories)[count]:
        story = cut(entry["document"].strip(), tokenizer, arguments.longest)
        for question in entry["questions"]:
            yield "document", [], [f"{story}\n\n{question['question_text']}"]
    for entry in _read(arguments.problems)[count]:
        yield "reasoning", [], [entry["question"], _CHECK]


def _read(path: Path | None) -> list[dict[str, Any]]:
    return [] if path is None else [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def decode(model: Any, prompt: Sequence[int], rows: int, options: dict[str, Any]) -> list[list[int]]:
    """The outputs of several rows of one prompt, in token ids."""
    engine = make_engine(model, torch.tensor([prompt] * rows), LookaheadConfig(), **options)
    outputs: list[list[int]] = [[] for _ in range(rows)]
    for step in engine.run():
        for each in step:
            outputs[each.row] += each.tokens.tolist()
    return outputs


def record(model: Any, tokenizer: Any, arguments: Namespace) -> Iterator[dict[str, Any]]:
    """Let the model answer, request by request."""

    def rendered(messages: list[dict[str, str]]) -> list[int]:
        if tokenizer.chat_template is None:
            text = "\n".join(message["content"] for message in messages)
        else:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    options = {"max_new_tokens": arguments.max_new_tokens}
    for group, (kind, before, turns) in enumerate(conversations(arguments, tokenizer)):
        roles = chain(["system"], cycle(["user", "assistant"]))
        messages = [{"role": role, "content": text} for role, text in zip(roles, before, strict=False)]
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            prompt = rendered(messages)
            (output,) = decode(model, prompt, 1, options)
            yield {"category": kind, "group": group, "prompt": prompt, "output": output}
            messages.append({"role": "assistant", "content": tokenizer.decode(output, skip_special_tokens=True)})
    sampled = options | {"do_sample": True, "temperature": arguments.temperature}
    prompts = [entry["turns"][0] for entry in _read(arguments.chats)[8 * arguments.offset + 1 :: 8][: arguments.groups]]
    for epoch, (group, text) in product(range(arguments.epochs), enumerate(prompts)):
        torch.manual_seed(epoch)
        prompt = rendered([{"role": "user", "content": text}])
        for output in decode(model, prompt, arguments.samples, sampled):
            yield {"category": "retries", "group": epoch * len(prompts) + group, "prompt": prompt, "output": output}


def add_recording_options(parser: ArgumentParser) -> None:
    """Add the options of `record_to`."""
    group = parser.add_argument_group("recording")
    group.add_argument("--record", action="store_true", help="let a model write the outputs first")
    group.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"a folder, or a name on the Hub (default {DEFAULT_MODEL})"
    )
    group.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    for option, what in (("--chats", "MT-bench"), ("--stories", "SQuALITY"), ("--problems", "GSM8K")):
        group.add_argument(option, type=Path, help=f"JSON lines as in {what}; without them none of this kind")
    group.add_argument("--groups", type=int, default=5, help="conversations of a kind, prompts of retries (default 5)")
    group.add_argument("--offset", type=int, default=0, help="of these, how many to leave out, at most 5 (default 0)")
    group.add_argument("--longest", type=int, default=1000, help="tokens of a story that are read (default 1000)")
    group.add_argument("--samples", type=int, default=8, help="of a prompt, at once (default 8)")
    group.add_argument("--epochs", type=int, default=1, help="times that every prompt is sampled (default 1)")
    group.add_argument("--temperature", type=float, default=0.8, help="of the samples (default 0.8)")
    group.add_argument("--max-new-tokens", type=int, default=128)


def record_to(path: Path, arguments: Namespace) -> None:
    """Write the requests and the model's outputs, line by line."""
    use_one_thread()
    model, tokenizer = load(arguments.model, dtype=arguments.dtype, device="cpu")
    with path.open("w", encoding="utf-8") as lines:
        for request in record(model, tokenizer, arguments):
            lines.write(json.dumps(request) + "\n")
            lines.flush()
            shown = tokenizer.decode(request["output"])[:80].replace("\n", " ")
            print(request["category"], request["group"], shown, file=sys.stderr)
