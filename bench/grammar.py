"""JSON by schemas of increasing strictness: the gain of drafting forced tokens.

    python -m bench.grammar --dtype bf16
    python -m bench.grammar --batch 8 --limit 2 --threads 2

Every schema has a few prompts. They are decoded greedily under the schema's grammar, one at a time and then as a batch:
by transformers (`plain`), by ours with the grammar only as a processor for each row (`no forced drafts`), and by ours
with defaults (`forced drafts`). A run counts only if its tokens equal `plain`; in a padded batch in half precision,
which rounds, the number of equal outputs is reported. The figures are the speedups of whole calls over `plain` and over
no forced drafts, and passes. Finished outputs are checked against the schema. Only hit rates and costs are kept from
call to call.

Needs the extra `grammar` and the package jsonschema.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lookahead
from bench.command import clock_of, parser_of, publish, setting_of, stay_on_cores
from lookahead import LookaheadConfig
from lookahead.decoding.prompts import pad_prompts
from lookahead.loading.loading import DEFAULT_MODEL

_CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def _object(**properties: Any) -> dict[str, Any]:
    """The schema of an object with exactly these keys."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_TEXT = {"type": "string", "maxLength": 60}
_INGREDIENT = _object(ingredient_name=_TEXT, quantity={"type": "number"}, unit={"enum": ["gram", "cup", "piece"]})

SCHEMAS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "any object": (
        {"type": "object"},
        [
            "Describe the planet Mars as a short JSON object.",
            "Describe a bicycle as a short JSON object.",
            "Describe the city of Lisbon as a short JSON object.",
            "Describe a piano as a short JSON object.",
            "Describe the month of May as a short JSON object.",
            "Describe a cup of tea as a short JSON object.",
            "Describe an oak tree as a short JSON object.",
            "Describe a library as a short JSON object.",
        ],
    ),
    "contact": (
        _object(name=_TEXT, age={"type": "integer", "minimum": 0, "maximum": 120}, city=_TEXT, email=_TEXT),
        [
            "Extract as JSON: Ana Silva, 41, lives in Porto, ana.silva@example.com",
            "Extract as JSON: Peter Novak is 29, from Brno; write to novak@example.org",
            "Extract as JSON: my aunt Rosa, 67 years old, lives in Turin and uses rosa@example.net",
            "Extract as JSON: Captain James Hook, 55, Neverland, hook@example.com",
            "Extract as JSON: Li Wei, 33 years, from Chengdu, li.wei@example.com",
            "Extract as JSON: Omar lives in Cairo, is 48, and his address is omar@example.org",
            "Extract as JSON: our neighbour Greta, 72, Malmo, greta@example.net",
            "Extract as JSON: Noah Brown, 19, a student in Leeds, noah@example.com",
        ],
    ),
    "bug report": (
        _object(
            severity={"enum": ["low", "medium", "high", "critical"]},
            component={"enum": ["parser", "network", "storage", "interface"]},
            reproducible={"type": "boolean"},
            summary=_TEXT,
        ),
        [
            "File as a JSON bug report: The window goes blank whenever I resize it.",
            "File as a JSON bug report: Saving to a full disk loses the old file.",
            "File as a JSON bug report: The site is slow in the evening.",
            "File as a JSON bug report: A comma at the end of a list is not understood.",
            "File as a JSON bug report: The download stops at 99 percent, every time.",
            "File as a JSON bug report: Letters overlap on a small screen.",
            "File as a JSON bug report: Once in a month the index is empty after a restart.",
            "File as a JSON bug report: A file without a newline at its end is refused.",
        ],
    ),
    "recipe": (
        _object(
            title=_TEXT,
            servings={"type": "integer", "minimum": 1, "maximum": 12},
            ingredients={"type": "array", "minItems": 2, "maxItems": 4, "items": _INGREDIENT},
            preparation_minutes={"type": "integer", "minimum": 1, "maximum": 600},
        ),
        [
            "Write a recipe for lemonade as JSON.",
            "Write a recipe for an omelette as JSON.",
            "Write a recipe for rice pudding as JSON.",
            "Write a recipe for a green salad as JSON.",
            "Write a recipe for hot chocolate as JSON.",
            "Write a recipe for garlic bread as JSON.",
            "Write a recipe for apple sauce as JSON.",
            "Write a recipe for lentil soup as JSON.",
        ],
    ),
    "tool call": (
        _object(
            tool_name={"const": "get_weather_forecast"},
            arguments=_object(
                location=_object(city=_TEXT, country_code={"enum": ["US", "GB", "DE", "FR"]}),
                temperature_unit={"enum": ["celsius", "fahrenheit"]},
                include_hourly_forecast={"type": "boolean"},
                number_of_days={"type": "integer", "minimum": 1, "maximum": 14},
            ),
        ),
        [
            "Call the weather tool: will it rain in Hamburg this week?",
            "Call the weather tool for Lyon, two days, in celsius.",
            "Call the weather tool: how hot does Dallas get tomorrow, hour by hour?",
            "Call the weather tool for a weekend in Leeds.",
            "Call the weather tool: do I need a coat in Chicago today?",
            "Call the weather tool for Munich, ten days.",
            "Call the weather tool: sun in Nice at the weekend?",
            "Call the weather tool for Glasgow, hourly, in fahrenheit.",
        ],
    ),
}
"""Schemas and prompts by name, the least strict first."""


class Outputs(NamedTuple):
    """The outputs of a call."""

    tokens: list[list[int]]
    seconds: float
    passes: int
    has_ended: list[bool]


Way = Callable[[Sequence[str]], Outputs]


def _ways(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, schema: Any, new: int, clock: str
) -> dict[str, Way]:
    grammar, now = lookahead.Grammar(tokenizer, json_schema=schema), _CLOCKS[clock]

    def hidden() -> Any:
        (own,) = grammar.objects(1)
        return lambda ids, scores: own(ids, scores)

    def plainly(prompts: Sequence[str]) -> Outputs:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        encoded: Any = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
        ids, mask = pad_prompts(encoded, 0, on_the_right=False)
        inputs: Any = {"input_ids": ids, "attention_mask": mask}
        begin, given = now(), {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        rows = model.generate(**inputs, logits_processor=[grammar], **given)[:, inputs["input_ids"].shape[1] :].tolist()
        seconds, end = now() - begin, tokenizer.eos_token_id
        tokens = [row[: row.index(end) + 1] if end in row else row for row in rows]
        return Outputs(tokens, seconds, len(rows[0]), [end in row for row in rows])

    def ours(processor: Any) -> Way:
        def run(prompts: Sequence[str]) -> Outputs:
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            given = {"config": LookaheadConfig(memory="request"), "max_new_tokens": new, "do_sample": False}
            begin = now()
            result = lookahead.generate(model, tokenizer, chats, logits_processor=[processor], **given)
            seconds, passes = now() - begin, max(row.target_forwards for row in result.row_stats)
            return Outputs(result.token_ids, seconds, passes, [each == "stop" for each in result.finish_reasons])

        return run

    return {"plain": plainly, "no forced drafts": ours(lookahead.PerRow(hidden)), "forced drafts": ours(grammar)}


def _is_valid(tokenizer: PreTrainedTokenizerBase, schema: Any, ids: list[int]) -> bool:
    import jsonschema

    try:
        jsonschema.validate(json.loads(str(tokenizer.decode(ids, skip_special_tokens=True))), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


class _Sum:
    """Sums over the calls of some prompts, by way."""

    def __init__(self) -> None:
        self.seconds, self.passes, self.identical = Counter[str](), Counter[str](), Counter[str]()
        self.tokens = self.ended = self.valid = 0

    def add(self, other: _Sum) -> None:
        for mine, its in zip(vars(self).values(), vars(other).values(), strict=True):
            if isinstance(mine, Counter):
                mine.update(its)
        self.tokens, self.ended = self.tokens + other.tokens, self.ended + other.ended
        self.valid += other.valid

    def figures(self) -> dict[str, Any]:
        forced, rows = self.seconds["forced drafts"], self.identical["plain"]
        return {
            "tokens": self.tokens,
            "ms_per_token": {name: round(1e3 * each / self.tokens, 2) for name, each in self.seconds.items()},
            "over_plain": round(self.seconds["plain"] / forced, 3),
            "over_no_forced_drafts": round(self.seconds["no forced drafts"] / forced, 3),
            "passes": dict(self.passes),
            "identical": f"{self.identical['forced drafts']} of {rows}",
            "valid": f"{self.valid} of {self.ended} that ended",
        }


def _measure(
    ways: Mapping[str, Way], calls: Sequence[Sequence[str]], rounds: bool, is_valid: Callable[[Any], bool]
) -> _Sum:
    """Measure every way on every call, in turn. A difference in tokens ends the run unless a padded batch `rounds`."""
    found, names = _Sum(), list(ways)
    for way in names[1:]:
        ways[way](["Warm up with a few words, please."] * len(calls[0]))
    for at, call in enumerate(calls):
        turn = at % len(names)
        outputs = {name: ways[name](call) for name in names[turn:] + names[:turn]}
        plain = outputs["plain"].tokens
        for name, given in outputs.items():
            same = [*map(list.__eq__, given.tokens, plain)]
            if not all(same) and not rounds:
                sys.exit(f"not lossless: {name} differs from plain for {call!r}; nothing is reported")
            found.identical[name] += sum(same)
            found.seconds[name] += given.seconds
            found.passes[name] += given.passes
        found.tokens += sum(map(len, plain))
        ended = [ids for ids, has_ended in zip(*outputs["forced drafts"][::3], strict=True) if has_ended]
        found.ended += len(ended)
        found.valid += sum(map(is_valid, ended))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, model=DEFAULT_MODEL, dtype="fp32", core=True, threads=True)
    parser.add_argument("--batch", type=int, default=8, help="prompts of a batch (default 8)")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each schema, at most 8 (default 4)")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    options = parser.parse_args(argv)
    lacking = [name for name in ("llguidance", "jsonschema") if importlib.util.find_spec(name) is None]
    if lacking:
        sys.exit(f"bench.grammar needs {' and '.join(lacking)}: pip install {' '.join(lacking)}")
    stay_on_cores(options.core, options.threads)
    model, tokenizer = lookahead.load(options.model, dtype=options.dtype, device="cpu")
    clock = clock_of(options.threads)
    report: dict[str, Any] = {**setting_of(options, "max_new_tokens"), "clock": clock}
    for kind, rows in {"one prompt": 1, f"batch of {options.batch}": options.batch}.items():
        found, all_of = {}, _Sum()
        for name, (schema, prompts) in SCHEMAS.items():
            prompts = prompts[: options.limit]
            in_turn = [[prompts[i % len(prompts)] for i in range(rows)]]
            calls = [[prompt] for prompt in prompts] if rows == 1 else in_turn
            ways = _ways(model, tokenizer, schema, options.max_new_tokens, clock)
            rounds = rows > 1 and options.dtype != "fp32"
            each = _measure(ways, calls, rounds, partial(_is_valid, tokenizer, schema))
            all_of.add(each)
            found[name] = each.figures()
            print(f"{kind}, {name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
        report[kind] = {**found, "all": all_of.figures()}
    publish(report, options.output)


if __name__ == "__main__":
    main()
