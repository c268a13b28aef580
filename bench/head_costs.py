"""The time of a level of draft heads relative to a pass of a Llama, by model size, and the gain it needs to pay.

    python -m bench.head_costs --dtype fp32
    python -m bench.head_costs --models 135M,1B --dtype bf16 --draft-vocab 8192 --gain 0.5

Models have the sizes of SmolLM2 and Llama 3.2 and random weights. For a model over `--gigabytes`, two models with fewer
layers are measured, and the time of a pass is extrapolated linearly. Heads have the sizes of their model, random
weights and 8 bits, as on any CPU: the layer of EAGLE-3 over 8 guesses with its projection, and one head of Medusa.
Both follow 64 tokens of context. Passes are measured as in `bench.passes`. Milliseconds are CPU time of one thread.

A head pays if it adds more tokens per pass than decoding without it gives in the head's time, at `--tokens` per pass of
`--nodes` nodes. "to pay" is this number for one level and for all levels. `--gain` is the gain of all levels, where
each adds 0.6 of the previous one. "levels" is the number that pays then, and "speed" is the speed with them relative to
without.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.command import parser_of, publish, seconds_of, stay_on_cores
from bench.passes import measure
from lookahead.backend.self_check import keeps_solo_bits
from lookahead.decoding.head_costs import DRAFT_VOCAB, KINDS, HeadCost, untrained_cost
from lookahead.drafting.budget import Ema, PassTimes
from lookahead.utils.machine import processor

NODES = (1, 4, 8, 16, 32)
_CONTEXT, _ROUNDS = 64, 7
_RIGHT = 0.6  # gain of a level relative to the previous one: about the top-5 accuracy in docs/heads.md
_NAMES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
SIZES = {
    "135M": (576, 1536, 30, 9, 3, 49_152),  # SmolLM2
    "360M": (960, 2560, 32, 15, 5, 49_152),
    "1B": (2048, 8192, 16, 32, 8, 128_256),  # Llama 3.2
    "1.7B": (2048, 8192, 24, 32, 32, 49_152),  # SmolLM2
    "3B": (3072, 8192, 28, 24, 8, 128_256),  # Llama 3.2
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def made(name: str, layers: int, dtype: torch.dtype) -> Any:
    """A model of the size `name` with random weights and `layers` layers."""
    sizes: dict[str, Any] = dict(zip((*_NAMES, "vocab_size"), SIZES[name], strict=True))
    config = LlamaConfig(**{**sizes, "num_hidden_layers": layers}, tie_word_embeddings=True, dtype=dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.02) if weight.dim() > 1 else weight.fill_(1.0)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not weights
    model.tie_weights()
    return model.eval().requires_grad_(False)


def depths_of(name: str, size: int, most: float) -> list[int]:
    """The numbers of layers to measure, for weights of `size` bytes: all, or two numbers that fit."""
    hidden, inner, layers, heads, kv_heads, vocab = SIZES[name]
    of_layer = size * hidden * (2 * hidden + 2 * hidden * kv_heads // heads + 3 * inner)
    room = int((most - size * hidden * vocab) / of_layer)
    return [layers] if room >= layers else [max(1, room // 2), max(2, room)]


def passes_and_heads(
    name: str, dtype: torch.dtype, gigabytes: float, draft_vocab: int
) -> tuple[dict[int, float], dict[str, HeadCost], int]:
    """Seconds of a pass of the whole model by nodes, the costs of heads, and the maximum number of measured layers."""
    depths = depths_of(name, dtype.itemsize, gigabytes * 1e9 / 2)  # packed weights are a second copy
    seconds, costs, layers = list[list[float]](), dict[str, HeadCost](), SIZES[name][2]
    for depth in depths:
        model = made(name, depth, dtype)
        if not costs:  # before packing, which takes memory
            costs = {kind: untrained_cost(kind, model, draft_vocab=draft_vocab, timer=seconds_of) for kind in KINDS}
        way = "exact" if keeps_solo_bits(model) else "fast"
        times = measure(model, _CONTEXT, list(NODES), _ROUNDS, {way: {}}, time.process_time)[way]
        seconds.append([1e-3 * times[nodes] for nodes in NODES])
        del model
        gc.collect()
    first, last = np.array(seconds[0]), np.array(seconds[-1])
    if len(depths) > 1:
        last = last + (last - first) * (layers - depths[1]) / (depths[1] - depths[0])
    return dict(zip(NODES, last.tolist(), strict=True)), costs, depths[-1]


def levels_that_pay(cost: HeadCost, tokens: float, pass_s: float, gain: float) -> tuple[int, float]:
    """The number of levels that pay by the rule `PassTimes.pays`, and the speed with them relative to without."""
    shares = _RIGHT ** np.arange(cost.levels)
    emitted, spent, levels = tokens, 0.0, 0
    for share in gain * shares / shares.sum():
        took = cost.level_s if levels else cost.first_s
        if not PassTimes(Ema(0.0, value=took), Ema(0.0, value=pass_s)).pays(emitted, share, spent):
            break
        emitted, spent, levels = emitted + share, spent + took, levels + 1
    return levels, emitted / tokens * pass_s / (pass_s + spent)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, dtype="bf16", core=True)
    parser.add_argument("--models", default=",".join(SIZES), help="with commas between them")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="most memory of weights (default 2)")
    parser.add_argument("--draft-vocab", type=int, default=DRAFT_VOCAB, help="tokens that EAGLE-3 can propose")
    parser.add_argument("--tokens", type=float, default=2.48, help="a pass without heads (default 2.48)")
    parser.add_argument("--nodes", type=int, choices=NODES, default=32, help="of that pass (default 32)")
    parser.add_argument("--gain", type=float, default=0.29, help="tokens a pass that six levels add (default 0.29)")
    arguments = parser.parse_args(argv)
    stay_on_cores(arguments.core)
    tables: dict[str, Any] = {}
    sizes = _DTYPES[arguments.dtype], arguments.gigabytes, arguments.draft_vocab
    heads = "".join(f"{label:>12}: first, level, to pay (1, all), levels, speed" for label in KINDS.values())
    print(f"{'model':6}{'layers made':>12}  pass of {', '.join(map(str, NODES))} nodes, ms{heads}")
    for name in arguments.models.split(","):
        passes, costs, layers = passes_and_heads(name, *sizes)
        pass_s = passes[arguments.nodes]
        row: dict[str, Any] = {"layers": layers, "pass_ms": {n: round(1e3 * s, 1) for n, s in passes.items()}}
        line = f"{name:6}{layers:6} of {SIZES[name][2]:2}  {' '.join(f'{1e3 * s:7.1f}' for s in passes.values())}"
        for kind, cost in costs.items():
            levels, speed = levels_that_pay(cost, arguments.tokens, pass_s, arguments.gain)
            row[kind] = {**cost.to_dict(arguments.tokens / pass_s), "pay": levels, "speed": round(speed, 3)}
            one, most = (cost.tokens_to_pay(n, arguments.tokens / pass_s) for n in (1, cost.levels))
            line += f"{1e3 * cost.first_s:9.2f}{1e3 * cost.level_s:7.2f}{one:7.2f}{most:6.2f}{levels:4}{speed:7.3f}x"
        tables[name] = row
        print(line, flush=True)
    told = {n: getattr(arguments, n) for n in ("dtype", "draft_vocab", "tokens", "nodes", "gain")}
    publish({**told, "device": f"cpu, {processor()}", "threads": 1, "models": tables}, arguments.output)


if __name__ == "__main__":
    main()
