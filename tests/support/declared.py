"""Small random models of the declared families, and calls of `model.generate` and of lookahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import lookahead
from lookahead.kernels import packed_product
from tests.support.small_layers import HALF, SINGLE, attends

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.15, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 8,
    "linear_num_key_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 256,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
SCALED = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
GROUPS = {
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 128, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
LATENT = {
    **GROUPS, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma": {},
    "Gemma2": {**WINDOWS, "query_pre_attn_scalar": 32},
    "Gemma3": {**WINDOWS, "query_pre_attn_scalar": 32},
    "Gemma4": {
        **WINDOWS, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "global_head_dim": 128, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 101, "use_double_wide_mlp": True,
    },
    "Olmo2": {},
    "Olmo3": WINDOWS,
    "Phi3": {"partial_rotary_factor": 0.75},
    "Granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
    "Mistral": {"sliding_window": 16},
    "Ministral": WINDOWS,
    "Ministral3": {"rope_parameters": SCALED},
    "SeedOss": {},
    "Arcee": {},
    "Jais2": {},
    "HunYuanDenseV1": {},
    "Exaone4": {**WINDOWS, "sliding_window_pattern": 2},
    "GraniteMoeHybrid": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0, "num_local_experts": 0,
        "shared_intermediate_size": 512, "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope",
    },
    "GraniteMoeHybrid-Mamba": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0, "num_local_experts": 0,
        "shared_intermediate_size": 512, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_n_groups": 2,
        "position_embedding_type": "nope",
    },
    "NemotronH": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"], "mamba_num_heads": 8, "mamba_head_dim": 64,
        "ssm_state_size": 32, "n_groups": 2,
    },
    "Starcoder2": {"sliding_window": 16},
    "GPTNeoX": {
        "rope_parameters": PARTIAL, "head_dim": None,
    },
    "Phi": {"rope_parameters": PARTIAL, "head_dim": None, "num_key_value_heads": 8},
    "StableLm": {"rope_parameters": PARTIAL, "head_dim": None, "num_key_value_heads": 8, "use_qkv_bias": True},
    "StableLm-parallel": {
        "rope_parameters": PARTIAL, "head_dim": None, "num_key_value_heads": 8, "use_parallel_residual": True,
    },
    "GPT2": {"n_embd": 256, "n_layer": 3, "n_head": 8, "n_positions": 512, "scale_attn_by_inverse_layer_idx": True},
    "GPTBigCode": {"n_embd": 256, "n_layer": 3, "n_head": 8, "n_positions": 512},
    "GPTBigCode-heads": {"n_embd": 256, "n_layer": 3, "n_head": 8, "n_positions": 512, "multi_query": False},
    "OPT": {"num_attention_heads": 4, "ffn_dim": 512, "word_embed_proj_dim": 256},
    "Cwm": WINDOWS,
    "Glm": {},
    "Glm4": {},
    "Ernie4_5": {},
    "Ernie4_5_Moe": {
        "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2, "moe_intermediate_size": 128,
        "moe_layer_start_index": 1, "moe_layer_interval": 1,
    },
    "Helium": {"num_attention_heads": 4},
    "DeepseekV2": {**LATENT, "num_experts": 8, "topk_method": "group_limited_greedy", "head_dim": 32},
    "DeepseekV3": {**LATENT, "num_local_experts": 8, "head_dim": 32},
    "Glm4MoeLite": {**LATENT, "num_local_experts": 8, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "Glm4Moe": {**GROUPS, "num_local_experts": 8, "use_qk_norm": True},
    "Dots1": {**GROUPS, "num_local_experts": 8},
    "Qwen2Moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256, "decoder_sparse_step": 1,
    },
    "GraniteMoe": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0, "num_local_experts": 8,
        "num_experts_per_tok": 3, "intermediate_size": 128,
    },
    "GraniteMoeShared": {
        "residual_multiplier": 0.3, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 128,
        "shared_intermediate_size": 256,
    },
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "norm_topk_prob": True},
    "Olmoe": {
        "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 128,
        "head_dim": None, "num_key_value_heads": 8,
    },
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128, "sliding_window": None},
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False, "head_dim": None,
             "num_key_value_heads": 8},
    "Lfm3": {
        "layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 64,
        "num_key_value_heads": 8,
    },
    "Lfm2Moe": {
        "layer_types": ["conv", "full_attention", "conv"], "head_dim": None, "num_key_value_heads": 8,
        "num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128,
        "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    },
    "HunYuanMoEV1": {"num_experts": 8, "num_local_experts": 8, "moe_topk": 3, "intermediate_size": 256},
    "Qwen3_5": {**DELTA, "head_dim": 64},
    "Qwen3Next": {**DELTA, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128},
    "Qwen3_5Moe": {**DELTA, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128},
    "GptOss": {**WINDOWS, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 128},
}  # fmt: skip
MIXTURES = (
    "DeepseekV2",
    "Ernie4_5_Moe",
    "Glm4Moe",
    "Qwen2Moe",
    "Qwen3Moe",
    "Qwen3Next",
    "Qwen3_5Moe",
    "GraniteMoe",
    "GraniteMoeShared",
    "Olmoe",
    "Mixtral",
    "GptOss",
    "HunYuanMoEV1",
    "Lfm2Moe",
)

has_kernels = pytest.mark.skipif(
    not (attends(HALF) and all(packed_product.is_supported(torch.zeros(2, 64, dtype=kind)) for kind in (HALF, SINGLE))),
    reason="this CPU has no kernels for whole passes",
)


def made(name: str, dtype: torch.dtype = HALF, **options: Any) -> Any:
    """A random model of a family, including random norms and biases."""
    options, name = {**FAMILIES[name], **options}, name.partition("-")[0]
    sizes = {key: size for key, size in {**SIZES, **options}.items() if size is not None}
    text = "Text" if name in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else ""
    config = getattr(transformers, f"{name}{text}Config")(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        of_class = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        model = getattr(transformers, f"{name}{of_class}")(config)
        for key, weight in model.named_parameters():
            if weight.dim() == 1 or key.endswith("bias"):
                nn.init.normal_(weight, 0.5, 0.3)
        for key, buffer in model.named_buffers():
            if key.endswith("expert_bias"):
                buffer.normal_(0.0, 0.3)
        for layer in model.base_model.layers if name == "Gemma4" else ():
            layer.layer_scalar.uniform_(0.5, 2.0)
    return model.to(dtype).eval()


def prompt(length: int = 36, rows: int = 1, seed: int = 1) -> torch.Tensor:
    """Random tokens that repeat, so that there are drafts."""
    ids = torch.randint(3, 100, (rows, length // 3), generator=torch.Generator().manual_seed(seed))
    return ids.repeat(1, 3)


def both(model: Any, ids: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    """What `model.generate` gives, and what lookahead does."""
    options = {"max_new_tokens": 24, "output_logits": True, "return_dict_in_generate": True, **options}
    outputs = list[Any]()
    for ours in ({}, {"custom_generate": lookahead.decode}):
        torch.manual_seed(3)
        outputs.append(model.generate(ids, **options, **ours))
    return outputs[0], outputs[1]
