"""Families of models on a CPU: random models of equal shape, greedy by transformers, and our passes without drafts.

    python -m bench.families --dtype bf16
    python -m bench.families --dtype fp32 --threads 2 --families Gemma3,Qwen3Moe

Every family runs in a process of its own. "speedup" is the time of a token of `model.generate` over that of ours
without drafts. "pass" is the median milliseconds of a pass over a tree. A perfect pass only reads the weights, or
multiplies, at the measured rates of the threads; of a mixture it reads the experts that random choices of the nodes
reach. "first call" is the time of the first call of the process over that of `model.generate`, both with 48 new
tokens. Memory is the largest resident size of the process over that of the weights. Figures are CPU time with one
thread, else wall time.

The gate comes first: a token that differs from `model.generate` ends the run, in bf16 if the stats promise its bits.

The last line printed is one JSON object.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

import lookahead
from bench.command import parser_of, publish, seconds_of, setting_of, stay_on_cores, timer_of
from bench.passes import STEP, machine, measure, read
from lookahead.backend.protocol import BitPolicy
from lookahead.backend.self_check import keeps_solo_bits

_NEW_TOKENS, _PROMPT, _NODES, _ROUNDS = 48, 128, (1, 8, 16), 7
_TOKENS_OF_A_RATE = 24
_WARM = 72  # new tokens before the rates: experts are packed after 64 passes
DENSE = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MIXTURE = {**DENSE, "num_hidden_layers": 12, "num_experts_per_tok": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", DENSE),
    "Qwen3": ("Qwen3", DENSE),
    "Gemma2": ("Gemma2", DENSE),
    "Gemma3": ("Gemma3Text", {**DENSE, "sliding_window": 512, "query_pre_attn_scalar": 64}),
    "Gemma4": (
        "Gemma4Text",
        {
            **DENSE, "sliding_window": 512, "global_head_dim": 128, "num_kv_shared_layers": 8,
            "hidden_size_per_layer_input": 128, "vocab_size_per_layer_input": 32000,
        },
    ),
    "Starcoder2": ("Starcoder2", DENSE),
    "GPTNeoX": ("GPTNeoX", {**DENSE, "head_dim": None}),
    "OPT": ("OPT", {**DENSE, "ffn_dim": 4096, "word_embed_proj_dim": 1024}),
    "Phi3": ("Phi3", DENSE),
    "Olmo2": ("Olmo2", DENSE),
    "Olmo3": ("Olmo3", {**DENSE, "sliding_window": 512}),
    "Granite": ("Granite", {**DENSE, "attention_multiplier": 0.125}),
    "SmolLM3": ("SmolLM3", DENSE),
    "Qwen3Moe": ("Qwen3Moe", {**MIXTURE, "num_experts": 32, "moe_intermediate_size": 512, "norm_topk_prob": True}),
    "Olmoe": ("Olmoe", {**MIXTURE, "num_experts": 32, "intermediate_size": 512, "num_key_value_heads": 16}),
    "Mixtral": ("Mixtral", {**MIXTURE, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1536}),
    "GptOss": ("GptOss", {**MIXTURE, "num_local_experts": 16, "intermediate_size": 512, "sliding_window": 512}),
    "DeepseekV3": (
        "DeepseekV3",
        {
            **MIXTURE, "num_local_experts": 32, "moe_intermediate_size": 512, "n_shared_experts": 1, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 512, "kv_lora_rank": 256,
            "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "num_key_value_heads": 16,
            "head_dim": 32,
        },
    ),
    "Glm4Moe": (
        "Glm4Moe",
        {
            **MIXTURE, "num_local_experts": 32, "moe_intermediate_size": 512, "n_shared_experts": 1, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
        },
    ),
    "Lfm2": ("Lfm2", {**DENSE, "head_dim": None, "layer_types": ["conv", "conv", "full_attention"] * 8}),
    "Lfm3": (
        "Lfm3",
        {
            **DENSE, "sliding_window": 512,
            "layer_types": ["conv", "conv", "sliding_attention"] * 7 + ["conv", "conv", "full_attention"],
        },
    ),
    "Qwen3_5": ("Qwen3_5Text", {**DENSE, "head_dim": 128}),
    "GraniteMoeHybrid": (
        "GraniteMoeHybrid",
        {
            **DENSE, "num_local_experts": 0, "shared_intermediate_size": 3072, "mamba_n_heads": 32,
            "mamba_d_head": 64, "mamba_d_state": 128, "position_embedding_type": "nope",
            "layer_types": (["linear_attention"] * 5 + ["full_attention"]) * 4,
        },
    ),
}  # fmt: skip


def make(name: str, dtype: torch.dtype) -> Any:
    """A random model of a family."""
    of_config, sizes = FAMILIES[name]
    config = getattr(transformers, f"{of_config}Config")(
        **{key: size for key, size in sizes.items() if size is not None}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, dtype=dtype)
    return model.eval()


def touched(model: Any, nodes: int) -> tuple[int, int]:
    """Bytes of the weights that a pass reads, and the products of a node: experts as far as random choices reach."""
    size = products = 0
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    if model.config.tie_word_embeddings:
        tables.remove(id(model.get_input_embeddings().weight))
    for weight in model.parameters():
        if weight.dim() == 3:
            experts = len(weight)
            reached = experts * (1 - (1 - chosen / experts) ** nodes)
            size += int(weight.nbytes * reached / experts)
            products += weight.numel() * chosen // experts
        elif weight.dim() == 2 and id(weight) not in tables:
            size += weight.nbytes
            products += weight.numel()
    return size, products


def rate(model: Any, prompt: torch.Tensor, clock: Callable[[], float], **options: Any) -> float:
    """Seconds of a further token: those of a long call less those of a short one."""
    options = {"do_sample": False, **options}
    short, long = (
        min(seconds_of(lambda n=n: model.generate(prompt, max_new_tokens=n, min_new_tokens=n, **options), clock)
            for _ in range(2))
        for n in (2, 2 + _TOKENS_OF_A_RATE)
    )  # fmt: skip
    return (long - short) / _TOKENS_OF_A_RATE


def measured(name: str, dtype: torch.dtype, threads: int, rates: tuple[float, float]) -> dict[str, Any]:
    """The figures of a family."""
    clock, model = timer_of(threads), make(name, dtype)
    weights = sum(weight.nbytes for weight in model.parameters())
    prompt = torch.randint(3, 30000, (1, _PROMPT), generator=torch.Generator().manual_seed(1))
    calls = {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False}
    outputs = list[Any]()
    own = [seconds_of(lambda: outputs.append(model.generate(prompt, **calls)), clock) for _ in range(2)][-1]
    first = seconds_of(lambda: outputs.append(model.generate(prompt, **calls, custom_generate=lookahead.decode)), clock)
    is_exact = dtype == torch.float32 or keeps_solo_bits(model)
    if is_exact and not torch.equal(outputs[0], outputs[-1]):
        sys.exit(f"{name}: tokens differ from model.generate")
    plain = lookahead.LookaheadConfig(proposers=())
    ours = {"custom_generate": lookahead.decode, "lookahead_config": plain}
    model.generate(prompt, **{**calls, "max_new_tokens": _WARM}, **ours)
    greedy, without_drafts = rate(model, prompt, clock), rate(model, prompt, clock, **ours)
    policy = BitPolicy.SOLO if dtype != torch.float32 and is_exact else BitPolicy.ROUNDED
    passes = measure(model, read(model, prompt[0]), prompt[0], list(_NODES), _ROUNDS, {"pass": policy}, clock)
    perfect = {}
    for nodes in _NODES:
        size, products = touched(model, nodes)
        perfect[nodes] = 1e3 * max(size / rates[0], 2 * nodes * products / rates[1])
    one_call = next(path for path in lookahead.backend_report(model).paths if path.path == "passes as one call")
    return {
        "weights_mb": weights >> 20,
        "speedup": round(greedy / without_drafts, 2),
        "greedy_ms": round(1e3 * greedy, 2),
        "no_drafts_ms": round(1e3 * without_drafts, 2),
        "step_ms": passes[STEP][1],
        "pass_ms": passes["pass"],
        "of_perfect": {nodes: round(perfect[nodes] / passes["pass"][nodes], 2) for nodes in _NODES},
        "first_call": round(first / own, 2),
        "memory": round(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / weights, 2),
        "keeps_bits": is_exact,
        "one_call": one_call.serves or one_call.reason,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, dtype="bf16", core=True, threads=True)
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, with commas between them")
    parser.add_argument("--child", help="the rates of the machine, for a process of one family")
    arguments = parser.parse_args(argv)
    stay_on_cores(arguments.core, arguments.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[arguments.dtype]
    if arguments.child:
        bandwidth, peak = map(float, arguments.child.split(","))
        print(json.dumps(measured(arguments.families, dtype, arguments.threads, (bandwidth, peak))))
        return
    rates = machine(dtype, timer_of(arguments.threads))
    print(f"{rates[0] / 1e9:.1f} GB/s, {rates[1] / 1e9:.0f} GFLOP/s, {dtype}, {arguments.threads} threads")
    report = {}
    for name in arguments.families.split(","):
        command = [sys.executable, "-m", "bench.families", "--families", name, "--child", ",".join(map(str, rates))]
        command += ["--dtype", arguments.dtype, "--threads", str(arguments.threads)]
        if arguments.core is not None:
            command += ["--core", str(arguments.core)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr[-2000:]}")
        report[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, report[name], flush=True)
    arguments.model = "random"
    publish({**setting_of(arguments), "rates": rates, "families": report}, arguments.output)


if __name__ == "__main__":
    main()
