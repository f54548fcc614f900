"""What becomes of each parameter of each API in front of llama.cpp and SGLang."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from handler.core.errors import ServingError
from handler.core.text import Vocabulary
from handler.engines.base import Capabilities
from handler.engines.llamacpp.parameters import CAPABILITIES as LLAMACPP
from handler.engines.openai.sglang.api import SGLANG
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.registry import INVOCATIONS, ROUTES
from tests.parameter_matrix import SCHEMA, VALUES

SERVERS: Mapping[str, Capabilities] = {"llama.cpp": LLAMACPP, "SGLang": SGLANG}
Values = Mapping[str, tuple[Any, Mapping[str, Any]]]

# LMI's "Inference API schema": the common parameters, those of vLLM and LMI Dist, and those of TensorRT-LLM.
_LMI = (
    "do_sample", "seed", "temperature", "repetition_penalty", "top_k", "top_p", "max_new_tokens", "details",
    "return_full_text", "stop_sequences", "decoder_input_details", "typical_p", "truncate", "ignore_eos_token", "min_p",
    "presence_penalty", "frequency_penalty", "n", "best_of", "num_beams", "length_penalty", "early_stopping",
    "stop_token_ids", "include_stop_str_in_output", "logprobs", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens", "min_length", "bad_sequences", "stop",
)  # fmt: skip

_TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
_FLAT = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}
_TOOLS = {"tools": [_TOOL]}
_SAME: Values = {
    "frequency_penalty": (0.5, {}),
    "presence_penalty": (0.5, {}),
    "logit_bias": ({"5": 1.0}, {}),
    "max_tokens": (2, {}),
    "metadata": ({"a": "b"}, {}),
    "n": (2, {}),
    "prompt_cache_key": ("a", {}),
    "prompt_cache_options": ({"mode": "explicit"}, {}),
    "prompt_cache_retention": ("24h", {}),
    "safety_identifier": ("a", {}),
    "seed": (7, {}),
    "service_tier": ("auto", {}),
    "stop": (["b"], {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "user": ("a", {}),
}
_CHAT: Values = {
    **_SAME,
    "audio": ({"format": "wav", "voice": "alloy"}, {}),
    "function_call": ("auto", {"functions": [_TOOL["function"]]}),
    "functions": ([_TOOL["function"]], {}),
    "logprobs": (True, {}),
    "max_completion_tokens": (2, {}),
    "modalities": (["text", "audio"], {}),
    "moderation": ({"model": "x"}, {}),
    "parallel_tool_calls": (False, _TOOLS),
    "prediction": ({"type": "content", "content": "a"}, {}),
    "reasoning_effort": ("low", {}),
    "response_format": ({"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}, {}),
    "store": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "tool_choice": ("required", _TOOLS),
    "tools": ([_TOOL], {}),
    "top_logprobs": (2, {"logprobs": True}),
    "verbosity": ("low", {}),
    "web_search_options": ({"search_context_size": "low"}, {}),
}
_COMPLETIONS: Values = {
    **{name: value for name, value in _SAME.items() if name in (
        "frequency_penalty", "presence_penalty", "logit_bias", "max_tokens", "n", "seed", "stop", "temperature",
        "top_p", "user",
    )},
    "best_of": (2, {}),
    "echo": (True, {}),
    "logprobs": (2, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "suffix": ("b", {}),
}  # fmt: skip
_RESPONSES: Values = {
    **{name: value for name, value in _SAME.items() if name in (
        "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
        "service_tier", "temperature", "top_p", "user",
    )},
    "context_management": ([{"type": "compaction", "compact_threshold": 1000}], {}),
    "include": (["message.output_text.logprobs"], {}),
    "instructions": ("a", {}),
    "max_output_tokens": (2, {}),
    "max_tool_calls": (2, {}),
    "moderation": ({"model": "x"}, {}),
    "parallel_tool_calls": (False, {"tools": [_FLAT]}),
    "prompt": ({"id": "a"}, {}),
    "reasoning": ({"effort": "low"}, {}),
    "stream_options": ({"include_obfuscation": False}, {"stream": True}),
    "text": ({"format": {"type": "json_schema", "name": "f", "schema": SCHEMA}}, {}),
    "tool_choice": ("required", {"tools": [_FLAT]}),
    "tools": ([_FLAT], {}),
    "top_logprobs": (2, {}),
    "truncation": ("auto", {}),
}  # fmt: skip
_ANTHROPIC_TOOL = {"name": "f", "input_schema": SCHEMA}
_MESSAGES: Values = {
    "cache_control": ({"type": "ephemeral"}, {}),
    "container": ("a", {}),
    "inference_geo": ("us", {}),
    "max_tokens": (2, {}),
    "metadata": ({"user_id": "a"}, {}),
    "output_config": ({"format": {"type": "json_schema", "schema": SCHEMA}}, {}),
    "service_tier": ("auto", {}),
    "stop_sequences": (["b"], {}),
    "system": ("a", {}),
    "temperature": (0.5, {}),
    "thinking": ({"type": "enabled", "budget_tokens": 1024}, {"max_tokens": 2048}),
    "tool_choice": ({"type": "any"}, {"tools": [_ANTHROPIC_TOOL]}),
    "tools": ([_ANTHROPIC_TOOL], {}),
    "top_k": (3, {}),
    "top_p": (0.5, {}),
    "user_profile_id": ("a", {}),
}
_ASK = {"messages": [{"role": "user", "content": "a b c"}]}
APIS: Mapping[str, tuple[Dialect, Mapping[str, Any], Values]] = {
    "LMI": (INVOCATIONS["lmi"], {"inputs": "a b c"}, {name: VALUES[name] for name in _LMI}),
    "OpenAI's chats": (ROUTES["/v1/chat/completions"], _ASK, _CHAT),
    "OpenAI's completions": (ROUTES["/v1/completions"], {"prompt": "a b c"}, _COMPLETIONS),
    "OpenAI's Responses": (ROUTES["/v1/responses"], {"input": "a b c", "store": False}, _RESPONSES),
    "Anthropic's messages": (ROUTES["/v1/messages"], {**_ASK, "max_tokens": 4}, _MESSAGES),
}
"""An API, with its dialect, a request without parameters, and a value of each parameter.

The parameters are those of the clients openai 3.57 and anthropic 2.14, without the model, the input, `stream`, and
those of stored responses, which do not reach an engine.
"""

HERE = {
    "n", "best_of", "stop", "stop_sequences", "include_stop_str_in_output", "skip_special_tokens", "details", "echo",
    "return_full_text", "truncate", "tools", "tool_choice", "functions", "function_call", "parallel_tool_calls",
    "reasoning_effort", "reasoning", "thinking", "instructions", "system", "stream_options", "suffix", "truncation",
    "context_management", "max_tool_calls",
}  # fmt: skip
"""Parameters that this handler implements, so that they are the same with each server."""

_CACHED = "accepted; prompts are cached in any case"
NOTES = {
    "llama.cpp": {
        "min_length": "emulated: a completion without end tokens, then another",
        "stop_token_ids": "emulated: this handler ends the response",
        "cache_control": _CACHED,
    },
    "SGLang": {
        "seed": "yes, with `--enable-deterministic-inference`; otherwise only if decoding is greedy",
        "repetition_penalty": "yes, for generated tokens only",
        "min_p": "yes; refused with `--speculative-algorithm`, which ignores it",
        "min_length": "yes; refused with `--skip-tokenizer-init`",
        "stop_token_ids": "yes; emulated with `ignore_eos`: this handler ends the response",
        "cache_control": _CACHED,
    },
}
"""The outcome of an accepted parameter that is not simply "yes"."""


DEPENDS = {
    "seed": ("yes", "yes, with `--enable-deterministic-inference`; otherwise only if decoding is greedy"),
    "repetition_penalty": ("yes", "yes, for generated tokens only"),
    "decoder_input_details, prompt_logprobs": ("refused", "yes"),
    "typical_p": ("yes", "refused"),
    "min_p": ("yes", "yes; refused with `--speculative-algorithm`, which ignores it"),
    "num_beams, length_penalty, early_stopping, bad_sequences": ("refused", "refused"),
    "stop_token_ids": ("emulated", "yes; emulated with `ignore_eos`"),
    "min_length": ("emulated", "yes; refused with `--skip-tokenizer-init`"),
}
"""The outcomes of the parameters whose outcomes depend on the server: with llama.cpp, with SGLang."""


def context(able: Capabilities) -> ServerContext:
    return ServerContext(
        engine="openai",
        unsupported=able.unsupported,
        limits=able.limits,
        no_adapters=able.no_adapters,
        sampling_defaults=able.sampling_defaults,
        vocabulary=Vocabulary([b"%d" % number for number in range(10)]),
    )


def cell(api: str, name: str, server: str) -> str:
    """What becomes of a parameter."""
    dialect, plain, values = APIS[api]
    value, beside = values[name]
    given = {**beside, name: value}
    body = {**plain, "parameters": given} if api == "LMI" else {**plain, **given}
    try:
        parsed = dialect.parse(body, context(SERVERS[server]))
    except ServingError as error:
        return "refused: " + re.split(r"does not support it: |is not supported: ", str(error))[-1]
    if any(one.rpartition(".")[2] == name or one.startswith(f"{name}.") for one in parsed.ignored):
        return "no effect, reported"
    if name in HERE:
        return "yes, by this handler"
    return NOTES[server].get(name, "yes")


def rows() -> list[tuple[str, tuple[str, ...]]]:
    """Parameters whose outcomes depend on the server, with their outcomes. Those with the same ones are together."""
    same: dict[tuple[str, ...], dict[str, None]] = {}
    for api, (_, _, values) in APIS.items():
        for name in values:
            cells = tuple(cell(api, name, server) for server in SERVERS)
            if len({*cells}) > 1:
                same.setdefault(tuple(text.partition(":")[0] for text in cells), {})[name] = None
    return [(", ".join(names), cells) for cells, names in same.items()]


def test_the_outcomes_that_depend_on_the_server_are_known() -> None:
    assert dict(rows()) == DEPENDS


@pytest.mark.parametrize("api", APIS)
def test_a_refusal_names_the_parameter(api: str) -> None:
    dialect, plain, values = APIS[api]
    for server, able in SERVERS.items():
        for name, (value, beside) in values.items():
            if not cell(api, name, server).startswith("refused"):
                continue
            given = {**beside, name: value}
            with pytest.raises(ServingError) as refused:
                dialect.parse({**plain, "parameters": given} if api == "LMI" else {**plain, **given}, context(able))
            assert any(one in str(refused.value) for one in (name, *beside)), (server, name, str(refused.value))
