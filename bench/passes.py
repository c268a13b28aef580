"""The time of a pass of a real model over a token tree on a CPU, relative to a perfect pass.

    python -m bench.passes --dtype bf16
    python -m bench.passes --dtype bf16 --quantize int8
    python -m bench.passes --dtype bf16 --threads 2
    python -m bench.passes --dtype bf16 --stored
    python -m bench.passes --model DIR --dtype fp32 --contexts 300,8000,32000 --nodes 1,8,64
    python -m bench.passes --dtype bf16 --contexts 2000,8000 --reading

Our ways take turns with one step of transformers: "exact" lets every node attend alone (half precision only), "fast"
uses a mask. Figures are the least milliseconds of all rounds, of CPU time with one thread and of wall time with
several. Behind more than 1,024 tokens the keys and values of the first 1,024 repeat.

`--reading` measures how long a prompt of each context is read instead, in turn by transformers and by lookahead, and
whether both have the same bits.

A perfect pass reads every weight, key and value once at the measured bandwidth of the threads, or multiplies at their
measured peak, whichever takes longer. "% of perfect" is its time over the time of the way.

With `--stored` weights are multiplied as stored, as on a machine without room for packed copies of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from bench.command import parser_of, publish, seconds_of, setting_of, stay_on_cores, timer_of
from lookahead import load
from lookahead.backend.choice import backend_for
from lookahead.backend.cpu import linears
from lookahead.backend.protocol import BitPolicy
from lookahead.backend.self_check import keeps_solo_bits
from lookahead.drafting.tree import TokenTree
from lookahead.loading.loading import DEFAULT_MODEL
from lookahead.loading.quantized import QuantizedLinear
from lookahead.model.facts import CACHE, may_keep_states

STEP = "transformers, 1 token"
WAYS = {"exact": BitPolicy.SOLO, "fast": BitPolicy.ROUNDED}
_READ = 1 << 28  # floats summed to measure the bandwidth: 1 GiB, larger than any cache
_READ_TOKENS = 1024
_SIDE = 2048  # side of the matrices multiplied to measure the peak


def machine(dtype: torch.dtype, clock: Callable[[], float]) -> tuple[float, float]:
    """Bytes per second and floating-point operations per second of the threads, the best of five trials each.

    If torch multiplies half precision slower than float32, as without AVX-512, the products are in float32.
    """
    values = torch.ones(_READ)
    read = min(seconds_of(values.sum, clock) for _ in range(5))

    def seconds(kind: torch.dtype, side: int) -> float:
        square = torch.ones(side, side, dtype=kind)
        return min(seconds_of(lambda: square @ square, clock) for _ in range(5))

    fastest = min((dtype, torch.float32), key=lambda kind: seconds(kind, _SIDE // 8))
    return values.nbytes / read, 2 * _SIDE**3 / seconds(fastest, _SIDE)


def perfect_ms(model: PreTrainedModel, cache: DynamicCache, nodes: int, bandwidth: float, peak: float) -> float:
    """Milliseconds of a pass that only reads or multiplies the weights of the linear layers, and keys and values."""
    modules: list[Any] = [each for each in model.modules() if isinstance(each, (torch.nn.Linear, QuantizedLinear))]
    layers = {id(each.weight): each for each in modules}.values()
    size = sum(each.weight.nbytes for each in layers)
    products = 2 * nodes * sum(each.in_features * each.out_features for each in layers)
    heads = model.config.get_text_config().num_attention_heads
    for keys, values in kv_of(cache):
        size += keys.nbytes + values.nbytes
        products += 2 * nodes * heads * keys.shape[2] * (keys.shape[3] + values.shape[3])
    return 1e3 * max(size / bandwidth, products / peak)


def kv_of(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The keys and values of the layers that attend, `[1, heads, tokens, dim]`."""
    return [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]


def read(model: PreTrainedModel, prompt: torch.Tensor) -> DynamicCache:
    """A cache of transformers behind a prompt, int64 `[tokens]`."""
    cache, causal_lm = DynamicCache(config=model.config), cast(Any, model)
    first, repeats = prompt[:_READ_TOKENS], -(-len(prompt) // _READ_TOKENS)
    with torch.inference_mode():
        causal_lm(first[None], logits_to_keep=1, **{CACHE: cache})
        lengths = [keys.shape[2] for keys, _ in kv_of(cache)]
        is_plain = len(lengths) == len(cache.layers) and set(lengths) == {len(first)}
        if repeats > 1 and not is_plain:  # a window, states, or keys of another layer
            causal_lm(prompt[None, len(first) :], logits_to_keep=1, **{CACHE: cache})
        elif repeats > 1:
            for layer in cache.layers:
                some = (
                    each.repeat(1, 1, repeats, 1)[:, :, len(first) : len(prompt)] for each in (layer.keys, layer.values)
                )
                layer.update(*some)
    return cache


def branching_tree(nodes: int, vocabulary: int) -> TokenTree:
    """A tree with a long path and branches, like a draft."""
    parents = [0] + [max(0, (node - 1) // 2) if node % 3 else node - 1 for node in range(1, nodes)]
    return TokenTree.from_parents((np.arange(nodes) * 31 + 5) % vocabulary, parents)


def measure(
    model: PreTrainedModel,
    own: DynamicCache,
    prompt: torch.Tensor,
    widths: list[int],
    rounds: int,
    ways: dict[str, BitPolicy],
    clock: Callable[[], float],
) -> dict[str, dict[int, float]]:
    """Least milliseconds by way and nodes, behind a prompt and its cache."""
    vocabulary = model.config.get_text_config().vocab_size
    backend = backend_for(model, rows=1, capacity=len(prompt) + max(widths))
    causal_lm: Any = model

    def step() -> None:
        with torch.inference_mode():
            causal_lm(torch.tensor([[5]]), **{CACHE: own})
        if not may_keep_states(model):  # states cannot be cut back; a text that grows by a token a round is as good
            own.crop(-1)

    trees = {width: branching_tree(width, vocabulary) for width in widths}
    seconds: dict[tuple[str, int], list[float]] = {}
    with backend.serving():
        if len(prompt) > _READ_TOKENS and len(kv_of(own)) == len(own.layers):
            held = ((keys[0, :, :-1], values[0, :, :-1]) for keys, values in kv_of(own))
            backend.cache.copy_prefix_from(0, held, len(prompt) - 1)
        backend.read([prompt.numpy().astype(np.int32)])
        if backend.cache.states:  # which include the root
            backend.cache.commit(0, np.zeros(1, np.int32))
    for lap in range(rounds + 1):
        spent = {(STEP, 1): seconds_of(step, clock)}
        with backend.serving():
            for (name, policy), (width, tree) in product(ways.items(), trees.items()):
                spent[name, width] = seconds_of(partial(backend.score, [tree], policy), clock)
        if lap:  # the first round packs weights and compiles
            for key, taken in spent.items():
                seconds.setdefault(key, []).append(taken)
    milliseconds: dict[str, dict[int, float]] = {}
    for (name, width), laps in seconds.items():
        milliseconds.setdefault(name, {})[width] = round(1e3 * min(laps), 2)
    return milliseconds


def measure_reading(
    model: PreTrainedModel, prompt: torch.Tensor, rounds: int, clock: Callable[[], float]
) -> dict[str, float | bool]:
    """Least milliseconds of reading a prompt, int64 `[tokens]`, and whether the logits have the same bits."""
    backend = backend_for(model, rows=1, capacity=len(prompt) + 1)
    causal_lm, seconds, logits = cast(Any, model), dict[str, list[float]](), dict[str, torch.Tensor]()

    def theirs() -> torch.Tensor:
        with torch.inference_mode():
            own: torch.Tensor = causal_lm(
                prompt[None], logits_to_keep=1, **{CACHE: DynamicCache(config=model.config)}
            ).logits
        return own

    def ours() -> torch.Tensor:
        backend.begin(len(prompt) + 1)
        with backend.serving():
            return backend.read([prompt.numpy().astype(np.int32)])

    for _ in range(rounds + 1):  # the first round packs weights and compiles
        for name, way in (("transformers", theirs), ("lookahead", ours)):
            begun = clock()
            logits[name] = way()
            seconds.setdefault(name, []).append(clock() - begun)
    figures: dict[str, float | bool] = {name: round(1e3 * min(laps[1:]), 1) for name, laps in seconds.items()}
    return {**figures, "same_bits": torch.equal(*logits.values())}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, model=DEFAULT_MODEL, dtype="bf16", core=True, threads=True, quantize=True)
    parser.add_argument("--contexts", default="60,700", help="tokens, with commas between them")
    parser.add_argument("--nodes", default="1,4,8,16,32", help="likewise")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--reading", action="store_true", help="measure how long prompts are read")
    parser.add_argument("--stored", action="store_true", help="without packed copies of weights")
    arguments = parser.parse_args(argv)
    stay_on_cores(arguments.core, arguments.threads)
    if arguments.stored:
        linears._SHARE_OF_MEMORY = 0.0
    clock = timer_of(arguments.threads)
    model = load(arguments.model, dtype=arguments.dtype, device="cpu", quantize=arguments.quantize).model
    vocabulary = model.config.get_text_config().vocab_size
    prompts = {n: (torch.arange(n) * 7919 + 13) % vocabulary for n in map(int, arguments.contexts.split(","))}
    if arguments.reading:
        read_ms = {n: measure_reading(model, prompt, arguments.rounds, clock) for n, prompt in prompts.items()}
        publish({**setting_of(arguments), "reading_ms": read_ms}, arguments.output)
        return
    bandwidth, peak = machine(model.dtype, clock)
    widths = [int(each) for each in arguments.nodes.split(",")]
    print(f"{bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s, {model.dtype}, {arguments.threads} threads")
    ways = {name: policy for name, policy in WAYS.items() if name != "exact" or keeps_solo_bits(model)}
    tables, perfect = {}, {}
    for context, prompt in prompts.items():
        cache = read(model, prompt)
        limits = {width: round(perfect_ms(model, cache, width, bandwidth, peak), 2) for width in widths}
        perfect[context] = limits
        tables[context] = measure(model, cache, prompt, widths, arguments.rounds, ways, clock)
        print(f"\n{context} tokens of context, ms (% of perfect) by nodes: {', '.join(map(str, widths))}")
        for name, times in {"perfect": limits, **tables[context]}.items():
            print(f"{name:24}" + "".join(f"{ms:9.1f} ({limits[n] / ms:4.0%})" for n, ms in times.items()))
    rates = {"gb_per_s": round(bandwidth / 1e9, 2), "gflop_per_s": round(peak / 1e9, 1)}
    publish({**setting_of(arguments), **rates, "perfect_ms": perfect, "ms": tables}, arguments.output)


if __name__ == "__main__":
    main()
