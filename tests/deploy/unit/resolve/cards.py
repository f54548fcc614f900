"""Facts of public model cards of 2025 and 2026 that decide memory, and the values that follow from them by hand.

The fields of config.json are as published with the model, or transformers' defaults for the model type. Only those that
`deploy/resolve/model/` reads are here. Fields of vision encoders, names and training settings are omitted. Lists by
layer are written as runs. Cache sizes and states are computed by hand from these fields. They were not measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Card(NamedTuple):
    """A model card.

    Attributes:
        config: fields of config.json, or of its `text_config`.
        per_token: bytes that each token adds in layers without a window, with 16 bits per value, on one GPU.
        per_window: bytes of each token in the layers with a sliding window.
        billions: number of weights in 10^9, rounded: as published or, where only a rounded name is, from config.json.
        state: bytes of the states of one request.
    """

    config: dict[str, Any]
    per_token: float
    per_window: int
    billions: float
    state: float = 0


def _kda(layers: int, heads: int) -> float:
    """Return the states of Kimi Delta Attention with heads of 128: a matrix in 32 bits, three columns in 16."""
    return layers * (heads * 128 * 128 * 4 + 3 * 3 * heads * 128 * 2.0)


def _gdn(layers: int, heads: int) -> float:
    """Return the states of Gated DeltaNet with 16 key heads of 128, and value heads of 128."""
    return layers * (heads * 128 * 128 * 4 + 3 * (2 * 16 + heads) * 128 * 2.0)


def _mamba(layers: int, heads: int, width: int = 128) -> float:
    """Return the states of Mamba-2 with heads of 64, and 8 groups."""
    return layers * (heads * 64 * width * 4 + 3 * (heads * 64 + 2 * 8 * width) * 2.0)


def _blocks(*runs: tuple[int, float, int]) -> list[dict[str, Any]]:
    """Return `block_configs` from runs of heads in a group (0 for no attention), `ffn_mult`, and number of layers."""
    return [
        {"attention": {"n_heads_in_group": group or None, "no_op": not group}, "ffn": {"ffn_mult": factor}}
        for group, factor, number in runs
        for _ in range(number)
    ]


_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEEPSEEK = {
    **_LATENT, "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
_V4 = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "num_key_value_heads": 1, "head_dim": 512, "n_shared_experts": 1,
    "num_nextn_predict_layers": 1, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 64,
    "sliding_window": 128, "expert_dtype": "fp4", "o_lora_rank": 1024,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
_GLM = {
    **_LATENT, "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
    "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "index_head_dim": 128, "index_n_heads": 32,
}  # fmt: skip
_QWEN35 = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "head_dim": 256, "num_key_value_heads": 2,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4,
}  # fmt: skip
_NEMOTRON3 = {
    "model_type": "nemotron_h", "vocab_size": 131072, "num_key_value_heads": 2, "head_dim": 128, "n_groups": 8,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_shared_experts": 1, "sliding_window": None,
}  # fmt: skip
_FOUR = ["linear_attention"] * 3 + ["full_attention"]
_SIX = ["sliding_attention"] * 5 + ["full_attention"]

CARDS = {
    # 21 layers keep an entry of 512 and an index key of 128 for 4 tokens, 20 an entry for 128; all have a window.
    "deepseek-ai/DeepSeek-V4-Flash": Card(
        {**_V4, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "moe_intermediate_size": 2048,
         "n_routed_experts": 256, "q_lora_rank": 1024, "o_groups": 8,
         "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]},
        2 * (21 * 640 / 4 + 20 * 512 / 128), 2 * 43 * 512, 290.9,
    ),
    "deepseek-ai/DeepSeek-V4-Pro": Card(
        {**_V4, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
         "moe_intermediate_size": 3072, "n_routed_experts": 384, "q_lora_rank": 1536, "o_groups": 16,
         "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0]},
        2 * (30 * 640 / 4 + 31 * 512 / 128), 2 * 61 * 512, 1600,
    ),
    "deepseek-ai/DeepSeek-V3": Card(_DEEPSEEK, 2 * 61 * 576, 0, 684.5),
    # 128 bytes and a scale of 4 for each index key
    "deepseek-ai/DeepSeek-V3.2": Card(
        {**_DEEPSEEK, "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64},
        61 * (2 * 576 + 132), 0, 685.4,
    ),
    "zai-org/GLM-5.1": Card(_GLM, 78 * (2 * 576 + 132), 0, 754),
    # 21 layers have an indexer; the others share that of a layer before
    "zai-org/GLM-5.2": Card(
        {**_GLM, "indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3},
        78 * 2 * 576 + 21 * 132, 0, 754,
    ),
    # No rotary part, 11 of 45 layers with attention
    "zai-org/GLM-5.3-Flash": Card(
        {"model_type": "glm5_next_text", "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288,
         "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 0,
         "moe_intermediate_size": 2048, "n_routed_experts": 288, "n_shared_experts": 1, "kv_lora_rank": 512,
         "q_lora_rank": 1536, "qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "v_head_dim": 256,
         "index_head_dim": 128, "index_n_heads": 32, "linear_attn_config": {"num_heads": 64, "head_dim": 128},
         "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
         "layer_types": [*(["linear_attention"] * 3 + ["deepseek_sparse_attention"]) * 11, "linear_attention"]},
        11 * (2 * 512 + 132), 0, 316, _kda(34, 64),
    ),
    # KDA, but for each sixth layer
    "inclusionAI/Ling-3.0-flash": Card(
        {**_LATENT, "model_type": "bailing_hybrid", "vocab_size": 157184, "hidden_size": 2560,
         "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 42, "num_attention_heads": 32,
         "num_key_value_heads": 32, "head_dim": 128, "num_shared_experts": 1, "num_experts": 512, "q_lora_rank": None,
         "first_k_dense_replace": 2, "layer_group_size": 6},
        7 * 2 * 576, 0, 124, _kda(35, 32),
    ),
    # An index key of 128 in 57 of 60 layers
    "MiniMaxAI/MiniMax-M3": Card(
        {"model_type": "minimax_m3", "vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 3072,
         "dense_intermediate_size": 12288, "shared_intermediate_size": 3072, "num_hidden_layers": 60,
         "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 128,
         "moe_layer_freq": [0] * 3 + [1] * 57,
         "sparse_attention_config": {"sparse_attention_freq": [0] * 3 + [1] * 57, "sparse_index_dim": 128}},
        2 * (60 * 2 * 4 * 128 + 57 * 128), 0, 428,
    ),
    "MiniMaxAI/MiniMax-M2.7": Card(
        {"model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
         "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
         "num_local_experts": 256, "shared_intermediate_size": 0},
        62 * 2 * 8 * 128 * 2, 0, 228.7,
    ),
    "moonshotai/Kimi-K3": Card(
        {**_LATENT, "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 33792,
         "num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96, "moe_intermediate_size": 3072,
         "num_experts": 896, "num_shared_experts": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
         "q_lora_rank": 1536, "routed_expert_hidden_size": 3584,
         "linear_attn_config": {"full_attn_layers": [*range(4, 93, 4), 93], "head_dim": 128, "num_heads": 96}},
        24 * 2 * 576, 0, 2777, _kda(69, 96),
    ),
    "moonshotai/Kimi-K2.5": Card(
        {**_DEEPSEEK, "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64,
         "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
        2 * 61 * 576, 0, 1026.4,
    ),
    # 31 of 80 layers without attention
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": Card(
        {"model_type": "nemotron-nas", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": None,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": None,
         "block_configs": _blocks(
             (8, 2.625, 1), (8, 5.25, 5), (0, 2.625, 2), (8, 5.25, 3), (0, 3.28125, 1), (8, 5.25, 30),
             (0, 1.3125, 1), (0, 2.625, 2), (0, 1.3125, 1), (0, 5.25, 1), (0, 1.3125, 1), (0, 2.625, 1),
             (0, 1.3125, 3), (8, 5.25, 1), (0, 1.3125, 1), (0, 1.0, 2), (0, 1.3125, 1), (0, 1.0, 3),
             (0, 1.3125, 2), (0, 0.5, 2), (0, 1.0, 2), (0, 0.5, 2), (0, 1.0, 1), (0, 0.5, 2), (8, 5.25, 9)
          )},
        49 * 2 * 8 * 128 * 2, 0, 49.87,
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B": Card(
        {**_NEMOTRON3, "hidden_size": 4096, "intermediate_size": 2688, "num_hidden_layers": 88,
         "num_attention_heads": 32, "moe_intermediate_size": 2688, "n_routed_experts": 512, "mamba_num_heads": 128,
         "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024, "num_nextn_predict_layers": 1,
         "hybrid_override_pattern": "MEMEMEM*E" * 3 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME"},
        8 * 2 * 2 * 128 * 2, 0, 123.6, _mamba(40, 128),
    ),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B": Card(
        {**_NEMOTRON3, "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52,
         "num_attention_heads": 32, "moe_intermediate_size": 1856, "n_routed_experts": 128, "mamba_num_heads": 64,
         "moe_shared_expert_intermediate_size": 3712, "moe_latent_size": None,
         "layers_block_type": [{"M": "mamba", "E": "moe", "*": "attention"}[letter] for letter in
                               "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"]},
        6 * 2 * 2 * 128 * 2, 0, 31.6, _mamba(23, 64),
    ),
    "nvidia/Nemotron-H-56B-Base-8K": Card(
        {"model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 8192, "intermediate_size": 32768,
         "num_hidden_layers": 118, "num_attention_heads": 64, "num_key_value_heads": 8, "mamba_head_dim": 64,
         "mamba_num_heads": 256, "n_groups": 8, "ssm_state_size": 256, "sliding_window": None,
         "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"},
        10 * 2 * 8 * 128 * 2, 0, 56.3, _mamba(54, 256, 256),
    ),
    "stepfun-ai/Step-3.7-Flash": Card(
        {"model_type": "step3p7", "vocab_size": 128896, "hidden_size": 4096, "intermediate_size": 11264,
         "num_hidden_layers": 45, "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128,
         "moe_intermediate_size": 1280, "num_experts": 288, "share_expert_dim": 1280, "first_k_dense_replace": 3,
         "sliding_window": 512,
         "layer_types": [*["full_attention", *["sliding_attention"] * 3] * 11, "full_attention"]},
        12 * 2 * 8 * 128 * 2, 33 * 2 * 8 * 128 * 2, 196,
    ),
    # Keys of 192, values of 128
    "XiaomiMiMo/MiMo-V2-Flash": Card(
        {"model_type": "mimo_v2_flash", "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384,
         "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192,
         "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": None, "v_head_dim": 128,
         "moe_layer_freq": [0] + [1] * 47, "sliding_window": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
         "swa_v_head_dim": 128, "hybrid_layer_pattern": [0, *[1] * 4, *[0, *[1] * 5] * 7, 0]},
        9 * 4 * (192 + 128) * 2, 39 * 8 * (192 + 128) * 2, 309,
    ),
    "Qwen/Qwen3.5-397B-A17B": Card(
        {**_QWEN35, "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32,
         "moe_intermediate_size": 1024, "num_experts": 512, "shared_expert_intermediate_size": 1024,
         "linear_num_value_heads": 64, "layer_types": _FOUR * 15},
        15 * 2 * 2 * 256 * 2, 0, 397, _gdn(45, 64),
    ),
    "Qwen/Qwen3.5-122B-A10B": Card(
        {**_QWEN35, "hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32,
         "moe_intermediate_size": 1024, "num_experts": 256, "shared_expert_intermediate_size": 1024,
         "linear_num_value_heads": 64, "layer_types": _FOUR * 12},
        12 * 2 * 2 * 256 * 2, 0, 122, _gdn(36, 64),
    ),
    "Qwen/Qwen3.5-27B": Card(
        {**_QWEN35, "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
         "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48},
        16 * 2 * 4 * 256 * 2, 0, 27, _gdn(48, 48),
    ),
    "Qwen/Qwen3.6-35B-A3B": Card(
        {**_QWEN35, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
         "moe_intermediate_size": 512, "num_experts": 256, "shared_expert_intermediate_size": 512,
         "linear_num_value_heads": 32, "layer_types": _FOUR * 10},
        10 * 2 * 2 * 256 * 2, 0, 35, _gdn(30, 32),
    ),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": Card(
        {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 6144, "intermediate_size": 8192,
         "num_hidden_layers": 62, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
         "moe_intermediate_size": 2560, "num_experts": 160, "sliding_window": None, "decoder_sparse_step": 1,
         "shared_expert_intermediate_size": 0},
        62 * 2 * 8 * 128 * 2, 0, 480,
    ),
    "google/gemma-4-26B-A4B": Card(
        {"model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112,
         "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
         "tie_word_embeddings": True, "moe_intermediate_size": 704, "num_experts": 128, "sliding_window": 1024,
         "layer_types": _SIX * 5, "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
         "enable_moe_block": True},
        5 * 2 * 2 * 512 * 2, 25 * 2 * 8 * 256 * 2, 25.2,
    ),
    "google/gemma-4-31B-it": Card(
        {"model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504,
         "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
         "tie_word_embeddings": True, "num_experts": None, "sliding_window": 1024, "layer_types": _SIX * 10,
         "global_head_dim": 512, "num_global_key_value_heads": 4,
         "attention_k_eq_v": True, "enable_moe_block": False},
        10 * 2 * 4 * 512 * 2, 50 * 2 * 16 * 256 * 2, 30.7,
    ),
    "openai/gpt-oss-120b": Card(
        {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
         "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
         "num_local_experts": 128, "sliding_window": 128},
        18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * 64 * 2, 116.8,
    ),
    "meta-llama/Llama-4-Maverick-17B-128E": Card(
        {"model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
         "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
         "head_dim": 128, "num_local_experts": 128, "interleave_moe_layer_step": 2, "attention_chunk_size": 8192},
        12 * 2 * 8 * 128 * 2, 36 * 2 * 8 * 128 * 2, 400.7,
    ),
    "meta-llama/Llama-3.1-405B": Card(
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
         "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8},
        126 * 2 * 8 * 128 * 2, 0, 405.9,
    ),
    # 16 global layers
    "LGAI-EXAONE/EXAONE-4.0-32B": Card(
        {"model_type": "exaone4", "vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 27392,
         "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
         "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
        16 * 2 * 8 * 128 * 2, 48 * 2 * 8 * 128 * 2, 32,
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": Card(
        {"model_type": "exaone4", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 4096,
         "num_hidden_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
         "tie_word_embeddings": True, "sliding_window": None, "sliding_window_pattern": None},
        30 * 2 * 8 * 64 * 2, 0, 1.28,
    ),
}  # fmt: skip
