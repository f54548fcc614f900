"""A move from AWS's vLLM image with code of one's own: a handler of /invocations, and middleware before and after vLLM.

The old answers are those of vLLM 0.32's own server on a CPU with model-hosting-container-standards 0.1.16, as in that
image: the same model.py and middleware.py ran there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.app.moves.exchanges import Ask, Reason, by_http, check_documented, compare
from tests.app.moves.test_lmi_async import VLLMS
from tests.app.server import serve
from tests.servers import http

USER = Path(__file__).parent / "users" / "aws_vllm"

ENVIRONMENT = {
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

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "model": "lmi"}
COMPLETION = {"prompt": "one two three four five six", "model": "lmi", "max_tokens": 5}

MIDDLEWARE = {
    "ping": Ask(None, "/ping"),
    "models": Ask(None, "/v1/models"),
    "chat": Ask(CHAT),
    "chat without a model": Ask({"messages": CHAT["messages"]}),
    "chat, stream": Ask({**CHAT, "stream": True, "ignore_eos": True}),
    "chat, stream, usage": Ask({**CHAT, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}),
    "chat, OpenAI's route": Ask({**CHAT, "max_tokens": 4}, "/v1/chat/completions"),
    "completion": Ask(COMPLETION),
    "completion, stream": Ask({**COMPLETION, "stream": True, "ignore_eos": True}),
    "completion, OpenAI's route": Ask(COMPLETION, "/v1/completions"),
    "unknown model": Ask({**CHAT, "model": "nobody"}),
    "wrong type": Ask({**CHAT, "temperature": "hot"}),
    "not JSON": Ask('{"messages": ', "/v1/chat/completions"),
    "middleware fails": Ask('{"messages": '),
    "no field": Ask({"text": "hello"}),
    "too long": Ask({**CHAT, "max_tokens": 100000}),
    "no route": Ask({"a": 1}, "/v1/nothing"),
}
HANDLER = {
    "ping": Ask(None, "/ping"),
    "question": Ask({"question": "What is the capital of France?"}),
    "question, stream": Ask({"question": "What is the capital of France?", "stream": True}),
    "not JSON": Ask('{"question": '),
    "no question": Ask({"text": "hello"}),
    "the handler raises": Ask({"question": {"of": "another type"}}),
    "chat, OpenAI's route": Ask({**CHAT, "max_tokens": 4}, "/v1/chat/completions"),
}

HANDLER_ENVIRONMENT = {"CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE": "middleware.py:count"}

_PAGE = "migrating/aws-vllm.md"
ALL = [VLLMS[0]]
MIDDLEWARE_REASONS = [
    *VLLMS,
    Reason(
        _PAGE,
        "a stream's content type",
        ("content-type: text/event-stream; charset=utf-8 -> text/event-stream",),
        ".*stream.*",
    ),
    Reason(_PAGE, "`/ping`", ("content-type: None -> application/json", "(glue|text|documents): .*"), "ping"),
    Reason(
        _PAGE,
        "`/v1/models`",
        (r"\$\.data\[\]\.(permission: list -> absent|input_modalities: absent -> list)",),
        "models",
    ),
    Reason(
        _PAGE,
        "`error.code`",
        (r"\$\.error\.code: number -> (null|string)", r"\$\.error\.param: string -> null"),
        "wrong type|no field|too long",
    ),
    Reason(
        _PAGE,
        "an unknown route",
        (r"\$\.detail: string -> absent", r"\$\.error: absent -> object"),
        "no route",
    ),
]
HANDLER_REASONS = [
    *ALL,
    Reason(_PAGE, "a handler that raises", ("x-service: None -> questions",), "the handler raises"),
]


def test_the_models_name_is_the_one_that_vllm_was_told() -> None:
    named = {**ENVIRONMENT, "SM_VLLM_SERVED_MODEL_NAME": '["questions", "other"]', "SM_VLLM_MODEL": "some/model"}
    chat = {"messages": CHAT["messages"], "max_tokens": 1}
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
def test_the_client_finds_the_shapes_that_it_had(
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
    with serve("--engine", engine, env={**ENVIRONMENT, **more}) as server:
        server.wait_ready()
        used = compare(name, {each: by_http(server, ask) for each, ask in asked.items()}, reasons)
    check_documented(reasons, used)
