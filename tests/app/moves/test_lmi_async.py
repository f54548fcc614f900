"""A move from LMI 0.36's async mode with chats and tools: the environment, and a client with boto3.

The old answers are those of DJL Serving 0.36 with its own lmi_vllm handler, over the services of vLLM 0.32 on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.moves.exchanges import Ask, Reason, by_boto3, check_documented, compare, endpoint
from tests.app.server import serve

ENVIRONMENT = {
    "OPTION_ENTRYPOINT": "djl_python.lmi_vllm.vllm_async_service",
    "OPTION_ASYNC_MODE": "true",
    "OPTION_ROLLING_BATCH": "disable",
    "OPTION_TENSOR_PARALLEL_DEGREE": "1",
    "OPTION_MAX_ROLLING_BATCH_SIZE": "32",
    "OPTION_MAX_MODEL_LEN": "1024",
    "OPTION_ENABLE_AUTO_TOOL_CHOICE": "true",
    "OPTION_TOOL_CALL_PARSER": "hermes",
}

PROMPT = "one two three four five six"
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    "max_tokens": 6,
}
# Greedy: a sampled answer may end early, and its end has no text, of which `bytes` is null.
LOGPROBS = {**CHAT, "logprobs": True, "top_logprobs": 1, "temperature": 0}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Today's weather", "parameters": PARAMETERS}}
ASKS_TOOL = {
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "tools": [TOOL],
    "max_tokens": 60,
    "temperature": 0,
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
AFTER_TOOL = {
    "messages": [
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ],
    "tools": [TOOL],
    "max_tokens": 6,
}
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}}


def prompt(*, stream: bool = False, **parameters: object) -> Ask:
    body: dict[str, object] = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, **parameters}}
    return Ask({**body, "stream": True} if stream else body)


ASKED = {
    "plain": prompt(),
    "without parameters": Ask({"inputs": PROMPT}),
    "greedy": prompt(do_sample=False),
    "sampled": prompt(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.1, seed=7),
    "details": prompt(details=True, seed=7),
    "details, prompt's tokens": prompt(details=True, decoder_input_details=True),
    "full text": prompt(return_full_text=True),
    "stop": prompt(details=True, stop=[" x"], ignore_eos_token=True),
    "stream": prompt(stream=True, ignore_eos_token=True),
    "stream, details": prompt(stream=True, details=True, ignore_eos_token=True),
    "stream, full text": prompt(stream=True, return_full_text=True, ignore_eos_token=True),
    "with a model's name": Ask({"inputs": PROMPT, "model": "lmi", "parameters": {"max_new_tokens": 3}}),
    "completion": Ask({"prompt": PROMPT, "max_tokens": 5}),
    "completion, logprobs": Ask({"prompt": PROMPT, "max_tokens": 5, "logprobs": 1}),
    "completion, echo": Ask({"prompt": PROMPT, "max_tokens": 5, "echo": True}),
    "completion, several": Ask({"prompt": [PROMPT, "two"], "max_tokens": 5, "n": 2, "temperature": 1, "seed": 7}),
    "completion, stream": Ask({"prompt": PROMPT, "max_tokens": 5, "stream": True, "ignore_eos": True}),
    "chat": Ask(CHAT),
    "chat, model": Ask({**CHAT, "model": "lmi"}),
    "chat, logprobs": Ask(LOGPROBS),
    "chat, choices": Ask({**CHAT, "n": 2, "temperature": 1, "seed": 7}),
    "chat, stop": Ask({**CHAT, "stop": ["xyz"], "stop_token_ids": [7], "seed": 3}),
    "chat, stream": Ask({**CHAT, "stream": True, "ignore_eos": True}),
    "chat, stream, usage": Ask({**CHAT, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}),
    "chat, stream, logprobs": Ask({**LOGPROBS, "stream": True, "ignore_eos": True}),
    "tools, none called": Ask({**ASKS_TOOL, "tool_choice": "none", "max_tokens": 5}),
    "tools, auto": Ask({**ASKS_TOOL, "max_tokens": 5}),
    "tools, auto, stream": Ask({**ASKS_TOOL, "max_tokens": 5, "stream": True, "ignore_eos": True}),
    "tools, required": Ask({**ASKS_TOOL, "tool_choice": "required"}),
    "tools, required, stream": Ask({**ASKS_TOOL, "tool_choice": "required", "stream": True}),
    "tools, named": Ask({**ASKS_TOOL, "tool_choice": NAMED}),
    "tools, named, stream": Ask({**ASKS_TOOL, "tool_choice": NAMED, "stream": True}),
    "tools, answered": Ask(AFTER_TOOL),
    "schema": Ask({**CHAT, "response_format": SCHEMA, "max_tokens": 30}),
    "not JSON": Ask('{"inputs": '),
    "no field": Ask({"text": "hello"}),
    "unknown adapter": Ask({"inputs": PROMPT, "adapters": "nobody"}),
    "unknown model": Ask({**CHAT, "model": "nobody"}),
    "unknown model, prompt": Ask({"inputs": PROMPT, "model": "nobody"}),
    "wrong type": prompt(temperature="hot"),
    "wrong chat": Ask({"messages": "hello"}),
    "wrong chat, stream": Ask({"messages": "hello", "stream": True}),
    "out of range": Ask({**CHAT, "temperature": -1}),
    "too long": Ask({**CHAT, "max_tokens": 100000}),
    "unknown tool": Ask({**ASKS_TOOL, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
}

_README, _ASYNC = "migrating/README.md", "wire/async.md"
VLLMS = [
    Reason(_README, "fields that are always null in vLLM's answers", (r".*: null -> absent",)),
    Reason(
        _README,
        "chunks of OpenAI's streams",
        (r".*\.system_fingerprint: absent -> string", r".*\.usage: absent -> null"),
        ".*stream.*",
    ),
]
REASONS = [
    *VLLMS,
    Reason(
        _README,
        "the first chunk of a streamed chat",
        (
            r"first\.choices\[\]\.logprobs: null -> object",
            r"first\.choices\[\]\.delta\.(content: string -> null|tool_calls: absent -> list)",
            r"between\.choices\[\]\.delta\.tool_calls\[\]\.(function\.name|id|type): string -> absent",
        ),
        ".*stream.*",
    ),
    Reason(
        _ASYNC, "`finish_reason` of whole answers", (r"\$\.details\.finish_reason: null -> string",), "details.*|stop"
    ),
    Reason(
        _ASYNC,
        "a wrong type gets 500",
        ("status: 500 -> 424", r"\$\.error: absent -> string", r"\$\.(message|type): string -> absent", "glue: .*"),
        "wrong.*|out of range",
    ),
    Reason(
        _ASYNC,
        "an unknown model gets 500 or 424",
        (
            "status: (500|424) -> (404|400)",
            r"\$\.error: absent -> string",
            r"\$\.(cancelled|content|message|properties): .* -> absent",
        ),
        "unknown model.*|too long",
    ),
]
OF_A_MODEL = [
    Reason(
        _README,
        "text beside a forced tool call in async mode",
        (r"\$.*\.content: string -> null",),
        "tools.*",
    )
]
NEED_A_MODEL = {
    "schema",
    "details, prompt's tokens",
    *(name for name in ASKED if "required" in name or "named" in name),
}
"""What the engine echo refuses: it repeats the prompt, and computes nothing of it."""


def test_the_client_finds_the_shapes_that_it_had() -> None:
    asked = {name: ask for name, ask in ASKED.items() if name not in NEED_A_MODEL}
    with serve("some/model", "--engine", "echo", env=ENVIRONMENT) as server, endpoint(server) as runtime:
        used = compare("lmi_0.36_async", {each: by_boto3(runtime, ask) for each, ask in asked.items()}, REASONS)
    check_documented(REASONS, used)
    assert "WARNING" not in server.log


@pytest.mark.model
def test_so_does_one_of_a_model(demo_model: Path) -> None:
    reasons = [*REASONS, *OF_A_MODEL]
    exact = {**ENVIRONMENT, "OPTION_DTYPE": "fp32"}  # at bf16 the model calls on and on
    with serve(str(demo_model), "--engine", "openvino", env=exact) as server, endpoint(server) as runtime:
        used = compare("lmi_0.36_async", {each: by_boto3(runtime, ask) for each, ask in ASKED.items()}, reasons)
    check_documented(reasons, used)
