"""The architectures of `tests.support.families` in the tested configurations, by the drafts that they can verify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Options = dict[str, Any]
Rows = Mapping[str, tuple[str, Options]]

# Weights have a wide range and embeddings are not tied, so that texts vary and argmax has no ties.
COMMON: Options = {"vocab_size": 101, "initializer_range": 0.4, "tie_word_embeddings": False}
SIZES: Options = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2_SIZES: Options = {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
BLOOM_SIZES: Options = {**COMMON, "hidden_size": 32, "n_layer": 2, "n_head": 4}
NEO_SIZES: Options = {**SIZES, "num_layers": 2, "num_heads": 4, "window_size": 8}
# Architectures with their own names for sizes.
OWN_SIZES: dict[str, Options] = {
    "GPT2": GPT2_SIZES,
    "GPTJ": {**GPT2_SIZES, "rotary_dim": 4},
    "GPTBigCode": GPT2_SIZES,
    "CodeGen": {**GPT2_SIZES, "rotary_dim": 4},
    "CTRL": {**GPT2_SIZES, "dff": 64},
    "OpenAIGPT": GPT2_SIZES,
    "Bloom": BLOOM_SIZES,
    "GPTNeo": NEO_SIZES,
    "Mpt": {**COMMON, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "XGLM": {**COMMON, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "init_std": 0.4},
    "Dbrx": {**COMMON, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
}
CLASSES = {
    "CTRL": "CTRLLMHeadModel",
    "GPT2": "GPT2LMHeadModel",
    "MiniMaxM3": "MiniMaxM3VLForCausalLM",
    "OpenAIGPT": "OpenAIGPTLMHeadModel",
}

# Windows and chunks are shorter than the tests' texts. Head sizes differ from hidden_size / heads where possible.
MIXED = ["sliding_attention", "full_attention"]
LINEAR = ["linear_attention", "full_attention"]
WINDOW: Options = {"sliding_window": 9}
MIXED_WINDOW: Options = {**WINDOW, "layer_types": MIXED}
HEAD_8: Options = {"head_dim": 8}
EXPERTS: Options = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MIXED_EXPERTS: Options = {**EXPERTS, **MIXED_WINDOW, **HEAD_8}
LORA: Options = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
MLA: Options = {**LORA, "num_key_value_heads": 4}
MLA_EXPERTS: Options = {**MLA, **EXPERTS}
# With few heads many keys score 0, and the choice among equal scores depends on the slots, in transformers too.
PICKING: Options = {**MLA_EXPERTS, "index_topk": 6, "index_head_dim": 8, "index_n_heads": 64}
GEMMA4: Options = {**HEAD_8, **WINDOW, "global_head_dim": 16, "vocab_size_per_layer_input": 101}
GEMMA_SHARED: Options = {
    "num_hidden_layers": 4,
    "layer_types": MIXED * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}
LLAMA4: Options = {**HEAD_8, "intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 16}
# A low cap, so that it has an effect. Older transformers ignore it under SDPA.
SOFTCAP: Options = {"attn_logit_softcapping": 1.0, "attn_implementation": "eager"}
MAMBA2: Options = {"mamba_n_heads": 4, "mamba_d_state": 8}
DELTA: Options = {
    "layer_types": LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _rope(kind: str, factor: float, **options: float) -> Options:
    """Rotary embeddings with scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": factor, **options}}


TREES: Rows = {
    "Llama": ("RoPE, GQA", {}),
    "Llama-MHA": ("RoPE, MHA", {"num_key_value_heads": 4}),
    "Llama-MQA": ("RoPE, MQA", {"num_key_value_heads": 1}),
    "Llama-bias": ("RoPE, GQA, biases", {"attention_bias": True, "mlp_bias": True}),
    "Llama-tied": ("RoPE, GQA, tied embeddings", {"tie_word_embeddings": True}),
    "Llama-wide-heads": ("RoPE, GQA, heads wider than hidden_size / heads", {"head_dim": 32}),
    "Llama-linear-RoPE": ("linear RoPE, GQA", _rope("linear", 2.0)),
    "Llama-YaRN": ("YaRN, GQA", _rope("yarn", 4.0, original_max_position_embeddings=16)),
    "Llama-llama3-RoPE": (
        "llama3 RoPE, GQA",
        _rope("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "Llama4": (
        "RoPE in chunks, NoPE every fourth layer, GQA, QK norm, MoE",
        {**LLAMA4, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    ),
    "AXK1": ("MLA, MoE", MLA_EXPERTS),
    "Afmoe": ("RoPE in windows, NoPE, GQA, QK norm, gated, MoE", MIXED_EXPERTS),
    "Apertus": ("llama3 RoPE, GQA, QK norm", {}),
    "Arcee": ("RoPE, GQA", {}),
    "AriaText": ("RoPE, GQA, MoE", {"moe_num_experts": 4, "moe_topk": 2}),
    "BioGpt": ("learned positions, MHA", {}),
    "BitNet": ("RoPE, GQA, norm behind attention", {}),
    "CodeGen": ("partial RoPE, MHA, parallel residual", {}),
    "Cohere": ("RoPE, GQA, parallel residual", {}),
    "Cohere2": ("RoPE in windows, NoPE, GQA, parallel residual", MIXED_WINDOW),
    "Cohere2Moe": ("RoPE in windows, NoPE, GQA, parallel residual, MoE", MIXED_EXPERTS),
    "CTRL": ("sinusoidal positions, MHA", {}),
    "Cwm": ("llama3 RoPE, GQA, windows in every other layer", {**MIXED_WINDOW, **HEAD_8}),
    "Dbrx": (
        "RoPE, GQA, clipped QKV, MoE",
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "DeepseekV2": ("MLA, MoE", MLA_EXPERTS),
    "DeepseekV3": ("MLA, MoE", MLA_EXPERTS),
    "DiffLlama": ("RoPE, GQA, differential attention", {}),
    "Dots1": ("RoPE, GQA, QK norm, windows in every other layer, MoE", {**MIXED_EXPERTS, "n_shared_experts": 1}),
    "Ernie4_5": ("RoPE, GQA", HEAD_8),
    "Ernie4_5_Moe": ("RoPE, GQA, MoE", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "Exaone4": ("RoPE in windows, NoPE, GQA, QK norm", MIXED_WINDOW),
    "ExaoneMoe": ("RoPE in windows, NoPE, GQA, QK norm, MoE", MIXED_EXPERTS),
    "Falcon": ("RoPE, MQA, parallel residual", {"alibi": False}),
    "Falcon-MHA": ("RoPE, MHA, biases", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "Falcon-new": ("RoPE, GQA, parallel residual", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "FlexOlmo": ("RoPE, GQA, QK norm, MoE", EXPERTS),
    "Flint": ("RoPE, GQA, QK norm, sinks, windows in every other layer, MoE", MIXED_EXPERTS),
    "Gemma": ("RoPE, GQA", {"head_dim": 16}),
    "Gemma2": ("RoPE, GQA, softcap, windows in every other layer", {**MIXED_WINDOW, **SOFTCAP, "head_dim": 16}),
    "Gemma3": ("RoPE of two kinds, GQA, QK norm, windows in every other layer", {**MIXED_WINDOW, "head_dim": 16}),
    "Gemma3n": (
        "RoPE of two kinds, GQA, QK norm, windows in every other layer, layers that share KV",
        {
            **GEMMA_SHARED,
            **WINDOW,
            **HEAD_8,
            "vocab_size_per_layer_input": 101,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
        },
    ),
    "Gemma4": (
        "RoPE of two kinds, GQA, QK norm, windows in every other layer, heads of two sizes, layers that share KV",
        {**GEMMA_SHARED, **GEMMA4},
    ),
    "Gemma4-MoE": (
        "RoPE of two kinds, GQA, QK norm, windows in every other layer, heads of two sizes, values that are keys, MoE",
        {
            **GEMMA4,
            "layer_types": MIXED,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "Glm": ("partial RoPE, GQA", HEAD_8),
    "Glm4": ("partial RoPE, GQA, norms around attention", HEAD_8),
    "Glm4Moe": ("partial RoPE, GQA, MoE", {**EXPERTS, **HEAD_8}),
    "Glm4MoeLite": ("MLA, MoE", MLA_EXPERTS),
    "GPT2": ("learned positions, MHA", {}),
    "GPT2-upcast": (
        "learned positions, MHA, scaled by layer",
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ),
    "GPTBigCode": ("learned positions, MQA", {}),
    "GPTBigCode-MHA": ("learned positions, MHA", {"multi_query": False}),
    "GPTJ": ("partial RoPE, MHA, parallel residual", {}),
    "GPTNeo-global": ("learned positions, MHA, unscaled", {"attention_types": [[["global"], 2]]}),
    "GPTNeoX": ("partial RoPE, MHA, parallel residual", {}),
    "GPTNeoX-sequential": ("partial RoPE, MHA", {"use_parallel_residual": False}),
    "GptOss": (
        "YaRN, GQA, sinks, windows in every other layer, MoE",
        {**MIXED_EXPERTS, "head_dim": 16, "sliding_window": 8},
    ),
    "Granite": (
        "RoPE, GQA, scaled by a constant",
        {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    ),
    "GraniteMoe": ("RoPE, GQA, MoE", EXPERTS),
    "GraniteMoeShared": ("RoPE, GQA, MoE", {**EXPERTS, "shared_intermediate_size": 32}),
    "GraniteMoeSWA": ("RoPE, GQA, sinks, windows in every other layer, MoE", MIXED_EXPERTS),
    "GraniteSWA": ("RoPE, GQA, sinks, windows in every other layer", MIXED_WINDOW),
    "Helium": ("RoPE, GQA", HEAD_8),
    "HrmText": (
        "RoPE, MHA, gated, layers run several times",
        {"H_cycles": 2, "L_cycles": 2, "head_dim": 8, "num_hidden_layers": 1, "prefix_lm": False},
    ),
    "HunYuanDenseV1": ("RoPE, GQA, QK norm", HEAD_8),
    "HunYuanMoEV1": ("RoPE, GQA, QK norm, MoE", {**EXPERTS, **HEAD_8, "moe_topk": 2}),
    "HyperCLOVAX": ("RoPE, GQA", {}),
    "HYV3": ("RoPE, GQA, QK norm, MoE", {**EXPERTS, **HEAD_8}),
    "Jais2": ("RoPE, GQA, biases", {}),
    "JetMoe": ("RoPE, mixture of attention heads, MoE", {**EXPERTS, "kv_channels": 8}),
    "Kolibri1": ("RoPE, GQA, QK norm, windows in every other layer, MoE", MIXED_EXPERTS),
    "Laguna": ("partial RoPE, GQA, QK norm, gated, windows in every other layer, MoE", MIXED_EXPERTS),
    "LongcatFlash": (
        "MLA, two attentions a layer, MoE",
        {**MLA_EXPERTS, "head_dim": 4, "ffn_hidden_size": 64, "moe_topk": 2, "zero_expert_num": 2}
        | {"expert_ffn_hidden_size": 16},
    ),
    "Mellum": ("RoPE, GQA, QK norm, windows in every other layer, MoE", MIXED_EXPERTS),
    "MiMoV2Flash": (
        "partial RoPE, GQA, sinks, windows in every other layer, MoE",
        {**MIXED_EXPERTS, "v_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
        | {"swa_head_dim": 8, "swa_v_head_dim": 8},
    ),
    "MiniCPM3": ("MLA", MLA),
    "MiniMaxM2": ("RoPE, GQA, QK norm, MoE", {**EXPERTS, **HEAD_8}),
    "Ministral": ("RoPE, GQA, windows in every other layer", {**MIXED_WINDOW, **HEAD_8}),
    "Ministral3": (
        "YaRN, GQA, attention temperature by position",
        HEAD_8 | _rope("yarn", 4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1),
    ),
    "Mistral": ("RoPE, GQA, windows", WINDOW),
    "Mistral-full": ("RoPE, GQA", {"sliding_window": None}),
    "Mixtral": ("RoPE, GQA, windows, MoE", {**EXPERTS, **WINDOW}),
    "ModernBertDecoder": (
        "RoPE of two kinds, MHA, windows in every other layer",
        {"local_attention": 9, "layer_types": MIXED},
    ),
    "NanoChat": ("RoPE, GQA, QK norm", {}),
    "Nemotron": ("partial RoPE, GQA", {}),
    "Olmo": ("RoPE, GQA, clipped QKV", {"clip_qkv": 8.0}),
    "Olmo2": ("RoPE, GQA, QK norm, norm behind attention", {}),
    "Olmo3": ("RoPE, GQA, QK norm, windows in every other layer", MIXED_WINDOW),
    "Olmoe": ("RoPE, GQA, QK norm, MoE", EXPERTS),
    "OPT": ("learned positions, MHA", {"word_embed_proj_dim": 32, "ffn_dim": 64}),
    "OPT-post-norm": (
        "learned positions, MHA, norm behind attention, projected embeddings",
        {"word_embed_proj_dim": 16, "ffn_dim": 64, "do_layer_norm_before": False},
    ),
    "Persimmon": ("partial RoPE, MHA, QK norm", {}),
    "Phi": ("partial RoPE, GQA, parallel residual", {}),
    "Phi3": ("RoPE, GQA", {}),
    "Phi3-window": ("RoPE, GQA, windows", WINDOW),
    "Phimoe": ("RoPE, GQA, MoE", {**EXPERTS, "sliding_window": None}),
    "Phimoe-window": ("RoPE, GQA, windows that only masks know, MoE", {**EXPERTS, **WINDOW}),
    "Qwen2": ("RoPE, GQA", {}),
    "Qwen2-windows": (
        "RoPE, GQA, windows in the upper layers",
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "Qwen2Moe": ("RoPE, GQA, MoE", EXPERTS),
    "Qwen2Moe-windows": (
        "RoPE, GQA, windows that only masks know, MoE",
        {**EXPERTS, **MIXED_WINDOW, "use_sliding_window": True},
    ),
    "Qwen3": ("RoPE, GQA, QK norm", {"head_dim": 16}),
    "Qwen3Moe": ("RoPE, GQA, QK norm, MoE", {**EXPERTS, **HEAD_8}),
    "SeedOss": ("RoPE, GQA, biases", HEAD_8),
    "SmolLM3": ("RoPE, NoPE every fourth layer, GQA", {"num_hidden_layers": 4}),
    "SolarOpen": ("partial RoPE, GQA, MoE", {**EXPERTS, **HEAD_8}),
    "StableLm": ("partial RoPE, GQA, QK norm", {"use_qkv_bias": True, "qk_layernorm": True}),
    "StableLm-parallel": ("partial RoPE, GQA, parallel residual", {"use_parallel_residual": True}),
    "Starcoder2": ("RoPE, GQA, windows", WINDOW),
    "VaultGemma": ("RoPE, GQA, softcap, windows in every other layer", {**MIXED_WINDOW, **HEAD_8, **SOFTCAP}),
    "XGLM": ("sinusoidal positions, MHA", {}),
    "Youtu": ("MLA", MLA),
}
CHAINS: Rows = {
    "Bloom": ("ALiBi, MHA", {}),
    "Doge": ("RoPE, GQA, a mask made from the values", {}),
    "Falcon-ALiBi": ("ALiBi, MQA", {"alibi": True}),
    "GPTNeo": ("learned positions, MHA, windows by slot", {"attention_types": [[["global", "local"], 1]]}),
    "Llama4-temperature": (
        "RoPE in chunks, NoPE, GQA, QK norm, attention temperature by slot, MoE",
        {**LLAMA4, "no_rope_layers": [1, 0], "floor_scale": 8},
    ),
    "GPTNeoXJapanese": ("partial RoPE, MHA, keys that must lie in a row", {}),
    "Mpt": ("ALiBi, MHA", {"use_cache": True}),  # passes are counted by hooks, which may change results without a cache
}
STATES: Rows = {
    "BailingHybrid": (
        "delta attention and MLA, MoE",
        {**MLA_EXPERTS, **HEAD_8, "layer_types": LINEAR},
    ),
    "Bamba": ("Mamba 2 and attention", {**MAMBA2, "attn_layer_indices": [1]}),
    "FalconH1": ("Mamba 2 beside attention", {**MAMBA2, "mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_chunk_size": 16}),
    "FalconMamba": ("Mamba", {}),
    "GraniteMoeHybrid": (
        "Mamba 2 and attention, MoE",
        {**MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "shared_intermediate_size": 32},
    ),
    "Jamba": (
        "Mamba and attention, MoE",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4},
    ),
    "KimiLinear": (
        "delta attention and MLA, MoE",
        {**MLA_EXPERTS, "layer_types": LINEAR, "linear_head_dim": 8, "linear_num_heads": 4},
    ),
    "Lfm2": ("short convolutions and attention", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "Lfm2Moe": (
        "short convolutions and attention, MoE",
        {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "Lfm3": ("short convolutions and attention", {"layer_types": ["conv", "full_attention"]}),
    "Mamba": ("Mamba", {}),
    "Mamba2": ("Mamba 2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}),
    "NemotronH": (
        "Mamba 2 and attention",
        {**HEAD_8, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16}
        | {"ssm_state_size": 8, "n_groups": 1},
    ),
    "OlmoHybrid": ("gated delta net and attention", {"layer_types": LINEAR}),
    "Qwen3_5": ("gated delta net and attention", {**DELTA, "head_dim": 16}),
    "Qwen3_5Moe": ("gated delta net and attention, MoE", {**DELTA, **EXPERTS, "head_dim": 16}),
    "Qwen3Next": ("gated delta net and attention, MoE", {**DELTA, **EXPERTS, **HEAD_8}),
    "Zamba": (
        "Mamba and shared attention",
        {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 8}
        | {"n_mamba_heads": 2},
    ),
    "Zamba2": (
        "Mamba 2 and shared attention",
        {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 8}
        | {"n_mamba_heads": 4, "mamba_headdim": 16, "use_mem_eff_path": False, "num_mem_blocks": 1, "adapter_rank": 4},
    ),
    "Zaya": (
        "short convolutions beside partial RoPE, GQA, windows in every other layer, MoE",
        {**EXPERTS, **HEAD_8, **WINDOW, "num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"]}
        | {"router_hidden_size": 16},
    ),
}
PLAIN: Rows = {
    "AXK2": ("MLA, keys picked by an indexer, MoE", PICKING),
    "DeepseekV32": ("MLA, keys picked by an indexer, MoE", PICKING),
    "GlmMoeDsa": ("MLA, keys picked by an indexer, MoE", PICKING),
    "HYV4": ("MLA, keys picked by an indexer, sinks, MoE", PICKING),
    "Inkling": (
        "short convolutions beside attention by distance, GQA, windows, MoE",
        {**EXPERTS, **HEAD_8, "layer_types": ["hybrid_sliding", "hybrid"], "sliding_window": 9}
        | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
    ),
    "MiniMax": ("lightning attention and attention, MoE", {"layer_types": LINEAR, "num_local_experts": 4}),
    "MiniMaxM3": (
        "RoPE, GQA, blocks of keys picked by an indexer, MoE",
        {**EXPERTS, **HEAD_8, "layer_types": ["minimax_m3_sparse", "full_attention"], "index_block_size": 4}
        | {"index_topk_blocks": 2, "index_head_dim": 8},
    ),
    "OpenAIGPT": ("learned positions, MHA, no KV cache", {}),
    "RecurrentGemma": (
        "linear recurrences and windowed attention",
        {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64},
    ),
}
