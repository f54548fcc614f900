"""Moves from LMI 0.28, from LMI 0.36's async mode and from AWS's vLLM image."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.app.moves.exchanges import Ask, Reason, by_boto3, by_http, check_documented, compare, endpoint
from tests.app.server import serve
from tests.servers import http
from tests.user_files import write_adapter

# -- a move from LMI 0.28's rolling batch: serving.properties, adapters, and a client with boto3 -----------------------
# The old answers are those of djl_python 0.28's own handler and vLLM rolling batch, on a double of vLLM 0.4.2's
# engine.


PROPERTIES = """\
engine=Python
option.model_id={model}
option.rolling_batch=vllm
option.tensor_parallel_degree=1
option.max_rolling_batch_size=16
option.dtype=fp16
option.max_model_len=1024
option.enable_lora=true
option.max_loras=2
"""

PROMPT = 'one two "three" four five six'
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}], "max_tokens": 5}


def prompt(*, stream: bool = False, **parameters: object) -> Ask:
    body: dict[str, object] = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, **parameters}}
    return Ask({**body, "stream": True} if stream else body)


ASKED = {
    "plain": prompt(),
    "without parameters": Ask({"inputs": PROMPT}),
    "sampled": prompt(do_sample=True, temperature=0.7, top_p=0.9, top_k=20, repetition_penalty=1.1, seed=7),
    "details": prompt(details=True),
    "details, prompt's tokens": prompt(details=True, decoder_input_details=True),
    "full text": prompt(return_full_text=True),
    "stop": prompt(details=True, stop_sequences=[" three", '"three']),
    "stream": prompt(stream=True),
    "stream, details": prompt(stream=True, details=True),
    "stream, prompt's tokens": prompt(stream=True, details=True, decoder_input_details=True),
    "stream, full text": prompt(stream=True, return_full_text=True),
    "stream by a parameter": prompt(output_formatter="jsonlines"),
    "stream as json": prompt(stream=True, output_formatter="json"),
    "sse by a parameter": prompt(stream=True, output_formatter="sse"),
    "adapter": Ask({"inputs": PROMPT, "parameters": {"max_new_tokens": 5}, "adapters": "french"}),
    "adapter, stream": Ask(
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 5}, "adapters": ["french"], "stream": True}
    ),
    "chat": Ask(CHAT),
    "chat, stream": Ask({**CHAT, "stream": True}),
    "chat, logprobs": Ask({**CHAT, "logprobs": True, "top_logprobs": 1, "temperature": 0}),
    "chat, logprobs, stream": Ask({**CHAT, "logprobs": True, "top_logprobs": 1, "temperature": 0, "stream": True}),
    "chat, sampled": Ask({**CHAT, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["xyz"]}),
    "not JSON": Ask('{"inputs": '),
    "bad parameter": prompt(seed="abc"),
    "bad parameter, details": prompt(seed="abc", details=True),
    "bad parameter, stream": prompt(seed="abc", stream=True),
    "unknown adapter": Ask({"inputs": PROMPT, "adapters": "nobody"}),
    "bad chat": Ask({"messages": "hello"}),
}
BY_OPTION = {name: ASKED[name] for name in ("plain", "details", "stream", "stream, details", "chat", "chat, stream")}

_PAGE = "migrating/README.md"
_FAILED = (
    "status: 200 -> 424",
    "content-type: .* -> None",  # boto3 does not tell it of an error
    r".*\.(code|error): absent -> (integer|string)",
    r".*\.details\.(generated_tokens|inputs|tokens): .* -> null",
)
REASONS = [
    Reason(_PAGE, "a failed request", _FAILED, "(not|bad|unknown).*"),
    Reason(_PAGE, "`return_full_text` of a prompt with quotes", ("(text|glue|documents): .*",), "full text"),
    Reason(_PAGE, "log-probabilities of a streamed chat", (r".*\.logprobs: list -> object",), "chat, logprobs, stream"),
]
AS_TGI = Reason(
    _PAGE,
    "`option.tgi_compat=true`: fields",
    (r".*\.(index|special|seed|prefill|input_length|details|generated_text): absent -> .*",),
    "plain|details|stream.*",
)
ENGINE_LACKS = {name for name in ASKED if "prompt's tokens" in name}
"""What the engine echo refuses, as it computes nothing of a prompt."""


def user(directory: Path, model: object, *more: str) -> str:
    (directory / "serving.properties").write_text(
        PROPERTIES.format(model=model) + "".join(f"{line}\n" for line in more)
    )
    for name in ("french", "german"):
        write_adapter(directory / "adapters" / name)
    return str(directory)


@pytest.mark.parametrize(
    ("name", "option", "asked", "reasons"),
    [
        ("lmi_0.28", (), {name: ask for name, ask in ASKED.items() if name not in ENGINE_LACKS}, REASONS),
        ("lmi_0.28_sse", ("option.output_formatter=sse",), BY_OPTION, []),
        ("lmi_0.28_tgi", ("option.tgi_compat=true",), BY_OPTION, [AS_TGI]),
    ],
)
def test_the_client_finds_the_shapes_that_it_had(
    name: str, option: tuple[str, ...], asked: Mapping[str, Ask], reasons: list[Reason], tmp_path: Path
) -> None:
    with serve(user(tmp_path, "some/model", *option), "--engine", "echo") as server, endpoint(server) as runtime:
        used = compare(name, {each: by_boto3(runtime, ask) for each, ask in asked.items()}, reasons)
    check_documented(reasons, used)
    assert "WARNING" not in server.log


@pytest.mark.model
@pytest.mark.nightly
def test_so_does_one_of_a_model(demo_model: Path, tmp_path: Path) -> None:
    """On OpenVINO, without what is vLLM's alone: its name, its precision, adapters, which the demo model has not."""
    user(tmp_path, demo_model)
    properties = tmp_path / "serving.properties"
    lines = properties.read_text().splitlines()
    properties.write_text("\n".join(line for line in lines if not re.search("lora|=vllm|dtype", line)))
    asked = {name: ask for name, ask in ASKED.items() if not name.startswith("adapter")}
    with serve(str(tmp_path), "--engine", "openvino") as server, endpoint(server) as runtime:
        used = compare("lmi_0.28", {each: by_boto3(runtime, ask) for each, ask in asked.items()}, REASONS)
    check_documented(REASONS, used)


# -- a move from LMI 0.36's async mode with chats and tools: the environment, and a client with boto3 ------------------
# The old answers are those of DJL Serving 0.36 with its own lmi_vllm handler, over the services of vLLM 0.32 on a CPU.


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

ASYNC_PROMPT = "one two three four five six"
ASYNC_CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    "max_tokens": 6,
}
# Greedy: a sampled answer may end early, and its end has no text, of which `bytes` is null.
LOGPROBS = {**ASYNC_CHAT, "logprobs": True, "top_logprobs": 1, "temperature": 0}
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


def async_prompt(*, stream: bool = False, **parameters: object) -> Ask:
    body: dict[str, object] = {"inputs": ASYNC_PROMPT, "parameters": {"max_new_tokens": 5, **parameters}}
    return Ask({**body, "stream": True} if stream else body)


ASYNC_ASKED = {
    "plain": async_prompt(),
    "without parameters": Ask({"inputs": ASYNC_PROMPT}),
    "greedy": async_prompt(do_sample=False),
    "sampled": async_prompt(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.1, seed=7),
    "details": async_prompt(details=True, seed=7),
    "details, prompt's tokens": async_prompt(details=True, decoder_input_details=True),
    "full text": async_prompt(return_full_text=True),
    "stop": async_prompt(details=True, stop=[" x"], ignore_eos_token=True),
    "stream": async_prompt(stream=True, ignore_eos_token=True),
    "stream, details": async_prompt(stream=True, details=True, ignore_eos_token=True),
    "stream, full text": async_prompt(stream=True, return_full_text=True, ignore_eos_token=True),
    "with a model's name": Ask({"inputs": ASYNC_PROMPT, "model": "lmi", "parameters": {"max_new_tokens": 3}}),
    "completion": Ask({"prompt": ASYNC_PROMPT, "max_tokens": 5}),
    "completion, logprobs": Ask({"prompt": ASYNC_PROMPT, "max_tokens": 5, "logprobs": 1}),
    "completion, echo": Ask({"prompt": ASYNC_PROMPT, "max_tokens": 5, "echo": True}),
    "completion, several": Ask({"prompt": [ASYNC_PROMPT, "two"], "max_tokens": 5, "n": 2, "temperature": 1, "seed": 7}),
    "completion, stream": Ask({"prompt": ASYNC_PROMPT, "max_tokens": 5, "stream": True, "ignore_eos": True}),
    "chat": Ask(ASYNC_CHAT),
    "chat, model": Ask({**ASYNC_CHAT, "model": "lmi"}),
    "chat, logprobs": Ask(LOGPROBS),
    "chat, choices": Ask({**ASYNC_CHAT, "n": 2, "temperature": 1, "seed": 7}),
    "chat, stop": Ask({**ASYNC_CHAT, "stop": ["xyz"], "stop_token_ids": [0], "seed": 3}),
    "chat, stream": Ask({**ASYNC_CHAT, "stream": True, "ignore_eos": True}),
    "chat, stream, usage": Ask(
        {**ASYNC_CHAT, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    ),
    "chat, stream, logprobs": Ask({**LOGPROBS, "stream": True, "ignore_eos": True}),
    "tools, none called": Ask({**ASKS_TOOL, "tool_choice": "none", "max_tokens": 5}),
    "tools, auto": Ask({**ASKS_TOOL, "max_tokens": 5}),
    "tools, auto, stream": Ask({**ASKS_TOOL, "max_tokens": 5, "stream": True, "ignore_eos": True}),
    "tools, required": Ask({**ASKS_TOOL, "tool_choice": "required"}),
    "tools, required, stream": Ask({**ASKS_TOOL, "tool_choice": "required", "stream": True}),
    "tools, named": Ask({**ASKS_TOOL, "tool_choice": NAMED}),
    "tools, named, stream": Ask({**ASKS_TOOL, "tool_choice": NAMED, "stream": True}),
    "tools, answered": Ask(AFTER_TOOL),
    "schema": Ask({**ASYNC_CHAT, "response_format": SCHEMA, "max_tokens": 30}),
    "not JSON": Ask('{"inputs": '),
    "no field": Ask({"text": "hello"}),
    "unknown adapter": Ask({"inputs": ASYNC_PROMPT, "adapters": "nobody"}),
    "unknown model": Ask({**ASYNC_CHAT, "model": "nobody"}),
    "unknown model, prompt": Ask({"inputs": ASYNC_PROMPT, "model": "nobody"}),
    "wrong type": async_prompt(temperature="hot"),
    "wrong chat": Ask({"messages": "hello"}),
    "wrong chat, stream": Ask({"messages": "hello", "stream": True}),
    "out of range": Ask({**ASYNC_CHAT, "temperature": -1}),
    "too long": Ask({**ASYNC_CHAT, "max_tokens": 100000}),
    "unknown tool": Ask({**ASKS_TOOL, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
}

_README, _ASYNC = "migrating/README.md", "wire/async.md"
VLLMS = [
    Reason(_README, "fields that are always null in vLLM's responses", (r".*: null -> absent",)),
    Reason(
        _README,
        "chunks of OpenAI's streams",
        (r".*\.system_fingerprint: absent -> string", r".*\.usage: absent -> null"),
        ".*stream.*",
    ),
]
ASYNC_REASONS = [
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
        _ASYNC,
        "`finish_reason` of non-streaming responses",
        (r"\$\.details\.finish_reason: null -> string",),
        "details.*|stop",
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
    *(name for name in ASYNC_ASKED if "required" in name or "named" in name),
}
"""What the engine echo refuses: it repeats the prompt, and computes nothing of it."""


def test_the_client_of_lmi_async_finds_the_shapes_that_it_had() -> None:
    asked = {name: ask for name, ask in ASYNC_ASKED.items() if name not in NEED_A_MODEL}
    with serve("some/model", "--engine", "echo", env=ENVIRONMENT) as server, endpoint(server) as runtime:
        used = compare("lmi_0.36_async", {each: by_boto3(runtime, ask) for each, ask in asked.items()}, ASYNC_REASONS)
    check_documented(ASYNC_REASONS, used)
    assert "WARNING" not in server.log


@pytest.mark.model
@pytest.mark.nightly
def test_so_does_one_of_lmi_async_of_a_model(demo_model: Path) -> None:
    reasons = [*ASYNC_REASONS, *OF_A_MODEL]
    exact = {**ENVIRONMENT, "OPTION_DTYPE": "fp32"}  # at bf16 the model calls on and on
    with serve(str(demo_model), "--engine", "openvino", env=exact) as server, endpoint(server) as runtime:
        used = compare("lmi_0.36_async", {each: by_boto3(runtime, ask) for each, ask in ASYNC_ASKED.items()}, reasons)
    check_documented(reasons, used)


# -- aws vllm ----------------------------------------------------------------------------------------------------------
# A move from AWS's vLLM image with code of one's own: a handler of /invocations, and middleware before and after vLLM.
#
# The old answers are those of vLLM 0.32's own server on a CPU with model-hosting-container-standards 0.1.16, as in
# that image: the same model.py and middleware.py ran there.


USER = Path(__file__).parent / "users" / "aws_vllm"

AWS_VLLM_ENVIRONMENT = {
    "SM_VLLM_MAX_MODEL_LEN": "1024",
    "SM_VLLM_MAX_NUM_SEQS": "4",
    "SM_VLLM_SERVED_MODEL_NAME": "lmi",
    "SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true",
    "SM_VLLM_TOOL_CALL_PARSER": "hermes",
}
MIDDLEWARE_ENVIRONMENT = {
    "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE": "middleware.py:count",
    "CUSTOM_PRE_PROCESS": "middleware.py:briefly",
    "CUSTOM_POST_PROCESS": "middleware.py:signed",
}

AWS_VLLM_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "model": "lmi"}
COMPLETION = {"prompt": "one two three four five six", "model": "lmi", "max_tokens": 5}

MIDDLEWARE = {
    "ping": Ask(None, "/ping"),
    "models": Ask(None, "/v1/models"),
    "chat": Ask(AWS_VLLM_CHAT),
    "chat without a model": Ask({"messages": AWS_VLLM_CHAT["messages"]}),
    "chat, stream": Ask({**AWS_VLLM_CHAT, "stream": True, "ignore_eos": True}),
    "chat, stream, usage": Ask(
        {**AWS_VLLM_CHAT, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    ),
    "chat, OpenAI's route": Ask({**AWS_VLLM_CHAT, "max_tokens": 4}, "/v1/chat/completions"),
    "completion": Ask(COMPLETION),
    "completion, stream": Ask({**COMPLETION, "stream": True, "ignore_eos": True}),
    "completion, OpenAI's route": Ask(COMPLETION, "/v1/completions"),
    "unknown model": Ask({**AWS_VLLM_CHAT, "model": "nobody"}),
    "wrong type": Ask({**AWS_VLLM_CHAT, "temperature": "hot"}),
    "not JSON": Ask('{"messages": ', "/v1/chat/completions"),
    "middleware fails": Ask('{"messages": '),
    "no field": Ask({"text": "hello"}),
    "too long": Ask({**AWS_VLLM_CHAT, "max_tokens": 100000}),
    "no route": Ask({"a": 1}, "/v1/nothing"),
}
HANDLER = {
    "ping": Ask(None, "/ping"),
    "question": Ask({"question": "What is the capital of France?"}),
    "question, stream": Ask({"question": "What is the capital of France?", "stream": True}),
    "not JSON": Ask('{"question": '),
    "no question": Ask({"text": "hello"}),
    "the handler raises": Ask({"question": {"of": "another type"}}),
    "chat, OpenAI's route": Ask({**AWS_VLLM_CHAT, "max_tokens": 4}, "/v1/chat/completions"),
}

HANDLER_ENVIRONMENT = {"CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE": "middleware.py:count"}

_AWS_VLLM_PAGE = "migrating/aws-vllm.md"
ALL = [VLLMS[0]]
MIDDLEWARE_REASONS = [
    *VLLMS,
    Reason(
        _AWS_VLLM_PAGE,
        "a stream's content type",
        ("content-type: text/event-stream; charset=utf-8 -> text/event-stream",),
        ".*stream.*",
    ),
    Reason(_AWS_VLLM_PAGE, "`/ping`", ("content-type: None -> application/json", "(glue|text|documents): .*"), "ping"),
    Reason(
        _AWS_VLLM_PAGE,
        "`/v1/models`",
        (
            r"\$\.data\[\]\.(permission: list -> absent|(input_modalities|supported_parameters): absent -> list)",
            r"\$\.models: absent -> list",
        ),
        "models",
    ),
    Reason(
        _AWS_VLLM_PAGE,
        "`error.code`",
        (r"\$\.error\.code: (number|integer) -> (null|string)", r"\$\.error\.param: string -> null"),
        "wrong type|no field|too long",
    ),
    Reason(
        _AWS_VLLM_PAGE,
        "an unknown route",
        (r"\$\.detail: string -> absent", r"\$\.error: absent -> object"),
        "no route",
    ),
]
HANDLER_REASONS = [
    *ALL,
    Reason(_AWS_VLLM_PAGE, "a handler that raises", ("x-service: None -> questions",), "the handler raises"),
]


def test_the_models_name_is_the_one_that_vllm_was_told() -> None:
    named = {
        **AWS_VLLM_ENVIRONMENT,
        "SM_VLLM_SERVED_MODEL_NAME": '["questions", "other"]',
        "SM_VLLM_MODEL": "some/model",
    }
    chat = {"messages": AWS_VLLM_CHAT["messages"], "max_tokens": 1}
    with serve("--engine", "echo", env=named) as server:
        assert http.get(server.url + "/v1/models").json()["data"][0]["id"] == "questions"
        for path in ("/invocations", "/v1/chat/completions"):
            assert server.post(chat, path).json()["model"] == "questions"
            assert server.post({**chat, "model": "other"}, path).json()["model"] == "other"
        assert server.post({"prompt": "a", "max_tokens": 1}, "/v1/completions").json()["model"] == "questions"


@pytest.mark.parametrize("engine", ["echo", pytest.param("openvino", marks=pytest.mark.model)])
@pytest.mark.parametrize(
    ("name", "files", "variables", "asked", "reasons"),
    [
        ("aws_vllm_middleware", ["middleware.py"], MIDDLEWARE_ENVIRONMENT, MIDDLEWARE, MIDDLEWARE_REASONS),
        ("aws_vllm_handler", ["model.py", "middleware.py"], HANDLER_ENVIRONMENT, HANDLER, HANDLER_REASONS),
    ],
    ids=["middleware", "handler"],
)
@pytest.mark.nightly
def test_the_client_of_aws_vllm_finds_the_shapes_that_it_had(
    name: str,
    files: list[str],
    variables: Mapping[str, str],
    asked: Mapping[str, Ask],
    reasons: list[Reason],
    engine: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    for file in files:
        shutil.copy(USER / file, tmp_path)
    model = "some/model" if engine == "echo" else str(request.getfixturevalue("demo_model"))
    more = {"SM_VLLM_MODEL": model, "SAGEMAKER_MODEL_PATH": str(tmp_path), **variables}
    with serve("--engine", engine, env={**AWS_VLLM_ENVIRONMENT, **more}) as server:
        server.wait_ready()
        used = compare(name, {each: by_http(server, ask) for each, ask in asked.items()}, reasons)
    check_documented(reasons, used)
