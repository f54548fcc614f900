"""Parameters that OpenAI's routes accept only with a value that requests nothing, and why.

Ignoring another value would change the response without notice, so it is refused. Each line has a parameter, the
reason, which an error message repeats, and the neutral values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.protocols.kernel.parameters import Parameter, unsupported


def _refused(lines: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Parameter]:
    return {name: unsupported(*line) for name, line in lines.items()}


OF_VLLM = _refused(
    {
        "use_beam_search": ("beam search is not available on this route", False),
        "prompt_logprobs": ("use echo with logprobs on /v1/completions", [], {}),
        "return_tokens_as_token_ids": ("tokens are returned as text", False),
        "return_token_ids": ("tokens are returned as text", False),
        "logits_processors": ("requests cannot contain code", [], {}),
        "watermarking": ("no engine supports watermarks", False),
        "logprob_token_ids": ("use top_logprobs, or logprobs on /v1/completions", []),
        "repetition_detection": ("use repetition_penalty or frequency_penalty",),
        "return_weight_versions": ("the weights of a running server never change", False),
        "vllm_xargs": ("the engines have no extensions that read it", {}),
        "media_io_kwargs": ("media are always loaded in the same way", {}),
        "mm_processor_kwargs": ("media are always prepared in the same way", {}),
    }
)
"""Parameters of vLLM's requests (vllm/entrypoints/openai/*/protocol.py, 0.33)."""

OF_CHATS = _refused(
    {
        "functions": ("use tools", [], {}),
        "function_call": ("use tool_choice", [], {}),
        "modalities": ("responses are always text", ["text"]),
        "audio": ("responses are always text", [], {}),
        "web_search_options": ("web search is not available", [], {}),
        "echo": ("a response does not repeat messages", False),
        "add_special_tokens": ("the chat template adds all special tokens", False),
        "chat_template": ("set option.chat_template", [], {}),
    }
)
"""Parameters of OpenAI's and vLLM's chats."""

OF_COMPLETIONS = _refused(
    {
        "max_completion_tokens": ("use max_tokens",),
        "suffix": ("the engines only continue a prompt", ""),
        "prompt_embeds": ("a prompt must be text or token ids", []),
        "add_special_tokens": ("send token ids for a prompt without special tokens", True),
        "thinking_token_budget": ("reasoning is only limited in chats", -1),
    }
)
"""Parameters of OpenAI's and vLLM's completions."""

FOREIGN = _refused(
    {
        # LMI's and TGI's names
        "parameters": ("send the parameters at the top level", {}),
        "max_new_tokens": ("use max_tokens",),
        "max_output_tokens": ("use max_tokens",),
        "min_new_tokens": ("use min_tokens", 0),
        "min_length": ("use min_tokens", 0),
        "stop_sequences": ("use stop", [], ""),
        "ignore_eos_token": ("use ignore_eos", False),
        "do_sample": ("use temperature=0", True),
        "bad_sequences": ("use bad_words", [], ""),
        "num_return_sequences": ("use n", 1),
        "random_seed": ("use seed",),
        "truncate": ("use truncate_prompt_tokens",),
        "top_n_tokens": ("use logprobs", 0),
        "adapter_id": ("send the adapter's name as model", ""),
        "adapters": ("send the adapter's name as model", "", []),
        # parameters that only SGLang has (sglang/srt/entrypoints/openai/protocol.py)
        "stop_regex": ("use stop", [], ""),
        "custom_logit_processor": ("requests cannot contain code", [], ""),
        "custom_params": ("requests cannot contain code", {}),
        "input_ids": ("send token ids as prompt to /v1/completions", []),
        "lora_path": ("send the adapter's name as model", "", []),
        "task": ("no engine has special tasks",),
        "thinking": ("use chat_template_kwargs",),
        "watermark": ("no engine supports watermarks", False, {}),
        "separate_reasoning": ("the option reasoning_parser decides whether reasoning is separated", True),
        "stream_reasoning": ("reasoning is always streamed", True),
        "sampling_logprobs_mode": ("log-probabilities are those of the model",),
        **dict.fromkeys(
            ("return_hidden_states", "return_routed_experts", "return_sampling_mask", "return_meta_info"),
            ("the engines do not report it", False),
        ),
        **dict.fromkeys(
            ("return_prompt_token_ids", "return_input_ids_in_sglext", "return_output_ids_in_sglext"),
            ("use /tokenize", False),
        ),
        **dict.fromkeys(
            ("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64"),
            ("use logprobs", False),
        ),
        **dict.fromkeys(
            ("images_config", "video_config", "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video"),
            ("media are always prepared in the same way", {}, False),
        ),
        # llama.cpp's parameters that change its response (tools/server/server-schema.cpp)
        "n_predict": ("use max_tokens", -1),
        "n_cmpl": ("use n", 1),
        "n_probs": ("use logprobs", 0),
        "repeat_penalty": ("use repetition_penalty", 1),
        "typical_p": ("use top_p or min_p", 1),
        "top_n_sigma": ("use top_p or min_p", -1, 0),
        "xtc_probability": ("use temperature", 0),
        "dynatemp_range": ("use temperature", 0),
        "mirostat": ("use temperature", 0),
        "adaptive_target": ("use temperature", -1),
        "dry_multiplier": ("use frequency_penalty", 0),
        "min_keep": ("use top_k", 0),
        "n_indent": ("use structured output", 0),
        "samplers": ("the order of the samplers is fixed", []),
        "t_max_predict_ms": ("use max_tokens", -1, 0),
        "lora": ("send the adapter's name as model", []),
        "parse_tool_calls": ("the option tool_call_parser decides whether calls are parsed", True),
        "reasoning_format": ("the option reasoning_parser decides how reasoning is parsed", "auto", "deepseek"),
        "reasoning_budget_tokens": ("use thinking_token_budget", -1),
        "response_fields": ("a response always has all fields", []),
    }
)
"""Parameters of other APIs."""
