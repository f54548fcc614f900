"""Every field of vLLM 0.33's request classes: obeyed, refused by name, or known to have no effect.

Source: the classes of the same names in vllm/entrypoints/**/protocol.py, 0.33.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import ServingError
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.openapi import DESCRIPTIONS
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, DIALECTS

SEEING = replace(
    CAPABLE, no_media={"image": "", "audio": ""}, chat_template="{{ documents }}{{ a }}{{ reasoning_effort }}"
)

REFUSED: dict[str, Any] = {
    "watermarking": True, "truncation_side": "right", "logprob_token_ids": [1], "prompt_logprobs": 1,
    "use_beam_search": True, "return_tokens_as_token_ids": True, "return_weight_versions": True,
    "kv_transfer_params": {"a": 1}, "ec_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1},
    "repetition_detection": {"max_pattern_size": 2},
}  # fmt: skip
OF_CHATS: dict[str, Any] = {
    **REFUSED, "echo": True, "add_special_tokens": True, "chat_template": "a", "media_io_kwargs": {"image": {}},
    "mm_processor_kwargs": {"a": 1}, "return_token_ids": True, "return_prompt_text": True,
}  # fmt: skip
OF_COMPLETIONS: dict[str, Any] = {
    **REFUSED, "suffix": "a", "prompt_embeds": "a", "add_special_tokens": False, "thinking_token_budget": 4,
}  # fmt: skip
NO_EFFECT: dict[str, Any] = {
    "user": "a", "request_id": "a", "session_id": "a", "routed_experts_prompt_start": 1, "return_token_offsets": True,
    "mm_payload": "none", "return_mm_kwargs": False, "stream_interval": 4,
}  # fmt: skip
OBEYED: dict[str, Any] = {
    "frequency_penalty": 0.5, "logit_bias": {"1": 1.0}, "max_tokens": 3, "n": 2, "presence_penalty": 0.5,
    "response_format": {"type": "json_object"}, "seed": 7, "stop": ["a"], "temperature": 0.5, "top_p": 0.5, "top_k": 2,
    "min_p": 0.1, "repetition_penalty": 1.5, "stop_token_ids": [1], "include_stop_str_in_output": True,
    "ignore_eos": True, "min_tokens": 1, "skip_special_tokens": False, "truncate_prompt_tokens": 3,
    "allowed_token_ids": [1], "bad_words": ["a"], "priority": 1, "cache_salt": "a",
    "structured_outputs": {"regex": "a"},
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}
POOLED: dict[str, Any] = {"truncate_prompt_tokens": 2, "use_activation": False, "priority": 1, "cache_salt": "a"}
POOLED_REFUSED: dict[str, Any] = {"padding": "longest", "mm_processor_kwargs": {"a": 1}}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "openai_chat": (
        {**OBEYED, "max_completion_tokens": 16, "documents": [{"text": "a"}], "chat_template_kwargs": {"a": 1},
         "add_generation_prompt": False, "reasoning_effort": "low"},
        OF_CHATS,
        NO_EFFECT,
    ),
    "openai_completions": (OBEYED, OF_COMPLETIONS, NO_EFFECT),
    "openai_responses": (
        {**{name: value for name, value in OBEYED.items() if name in (
            "logit_bias", "top_k", "min_p", "skip_special_tokens", "include_stop_str_in_output", "presence_penalty",
            "frequency_penalty", "priority", "cache_salt", "structured_outputs", "repetition_penalty", "seed",
            "stop", "stop_token_ids", "ignore_eos", "temperature", "top_p")},
         "chat_template_kwargs": {"a": 1}, "max_output_tokens": 3},
        {"background": True, "prompt": {"id": "a"}, "top_logprobs": 2, "truncation": "auto", "include_reasoning": False,
         "watermarking": True, "media_io_kwargs": {"image": {}}, "mm_processor_kwargs": {"a": 1},
         "enable_response_messages": True, "previous_input_messages": [{"role": "user"}], "vllm_xargs": {"a": 1},
         "kv_transfer_params": {"a": 1}, "ec_transfer_params": {"a": 1}},
        {"request_id": "a", "session_id": "a", "mm_payload": "none", "return_mm_kwargs": False, "user": "a",
         "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "a", "prompt_cache_options": {"a": 1},
         "prompt_cache_retention": "24h", "safety_identifier": "a"},
    ),
    "anthropic_messages": (
        {"stop_sequences": ["a"], "temperature": 0.5, "top_k": 2, "top_p": 0.5, "cache_salt": "a", "system": "a",
         "chat_template_kwargs": {"a": 1}},
        {"watermarking": True, "vllm_xargs": {"a": 1}, "kv_transfer_params": {"a": 1}, "ec_transfer_params": {"a": 1}},
        {"metadata": {"user_id": "a"}, "mm_payload": "none", "return_mm_kwargs": False},
    ),
    "openai_embeddings": (
        {**POOLED, "dimensions": 2},
        {**POOLED_REFUSED, "embed_dtype": "float16", "endianness": "big", "add_special_tokens": False,
         "messages": [{"role": "user", "content": "a"}]},
        {"user": "a", "request_id": "a"},
    ),
    "rerank": (
        POOLED,
        {**POOLED_REFUSED, "max_tokens_per_query": 2, "instruction": "a", "chat_template_kwargs": {"a": 1}},
        {"user": "a", "request_id": "a"},
    ),
    "openai_transcriptions": (
        {"language": "en", "prompt": "a", "response_format": "text", "temperature": 0.5},
        {"hotwords": "a", "to_language": "de", "use_beam_search": True, "n": 2, "length_penalty": 2,
         "include_stop_str_in_output": True, "watermarking": True, "top_p": 0.5, "top_k": 2, "min_p": 0.1, "seed": 7,
         "frequency_penalty": 0.5, "repetition_penalty": 1.5, "presence_penalty": 0.5, "max_completion_tokens": 3,
         "stream_continuous_usage_stats": True, "vllm_xargs": {"a": 1}},
        {},
    ),
}  # fmt: skip
"""A dialect -> fields that are obeyed, refused and without effect, with a value that is not neutral."""


def parse(dialect: str, **more: Any) -> ParsedRequest:
    return DIALECTS[dialect].parse(copy.deepcopy({**DESCRIPTIONS[dialect].example, **more}), SEEING)


@in_one_test("dialect", [*CASES])
def test_each_field_is_obeyed_refused_or_without_effect(dialect: str) -> None:
    obeyed, refused, without = CASES[dialect]
    plain = parse(dialect)
    for name, value in obeyed.items():
        found = parse(dialect, **{name: value})
        assert name not in found.ignored, name
        assert found.requests != plain.requests or found.reply.content_type != plain.reply.content_type, name
    for name, value in refused.items():
        with pytest.raises(ServingError, match=name):
            parse(dialect, **{name: value})
    for name, value in without.items():
        found = parse(dialect, **{name: value})
        assert (list(found.ignored), found.requests) == ([name], plain.requests), name


def test_neutral_values_in_a_form_are_text() -> None:
    neutral = {"n": "1", "top_p": "1.0", "top_k": "-1", "min_p": "0", "use_beam_search": "false", "vllm_xargs": "{}"}
    assert list(parse("openai_transcriptions", **neutral).ignored) == []


def test_structured_outputs_may_have_neutral_fields_beside() -> None:
    """A client that sends its whole StructuredOutputsParams has them."""
    given = {"json": None, "regex": "a", "json_object": False, "disable_any_whitespace": False, "structural_tag": None}
    (request,) = parse("openai_chat", structured_outputs=given).requests
    assert request.sampling.structured_output is not None
    assert request.sampling.structured_output.value == "a"


def test_the_number_of_allowed_tokens_is_bounded() -> None:
    most = [1] * (1 << 14)
    assert len(parse("openai_chat", allowed_token_ids=most).requests[0].sampling.allowed_token_ids or ()) == 1 << 14
    with pytest.raises(ServingError, match="must be a list of 1 to 16384 token ids"):
        parse("openai_chat", allowed_token_ids=[*most, 1])
