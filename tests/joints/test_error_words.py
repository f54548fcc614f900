"""Errors in each dialect's own words, joined with what its clients look for in them.

`READ` states in our words how clients recognize an error. Sources: LiteLLM 1.106 and 1.110
(`litellm_core_utils/exception_mapping_utils.py`), langchain-openai 1.7 (`chat_models/base.py`), pydantic-ai 2.68
(`_model_errors.py`), strands-agents 1.62 (`models/_openai_errors.py`), opencode 1.18 and pi-ai 0.74 (`utils/overflow`),
qwen-code 0.15, Claude Code 2.1.330, huggingface_hub (`_text_generation.py`), tritonclient and TGI's Python
client. `tests/clients/test_errors.py` holds the same against the clients themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from handler.core.errors import ModelNotFound, Overloaded, RefusedByEngine, ServingError, Unavailable
from handler.protocols.anthropic.api import ERRORS as ANTHROPIC
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.openai.api import ERRORS as OPENAI
from handler.protocols.tgi.api import TgiErrors
from handler.protocols.triton.api import ERRORS as TRITON
from handler.protocols.vllm.api import ERRORS as VLLM
from tests.app.server import serve
from tests.one_test import in_one_test
from tests.servers import LiveServer, http


class Told(NamedTuple):
    """An error as a client receives it."""

    status: int
    text: str

    @property
    def error(self) -> Any:
        return json.loads(self.text)["error"]


def says(pattern: str, *, status: int = 400) -> Callable[[Told], bool]:
    return lambda told: told.status == status and re.search(pattern, told.text, re.IGNORECASE) is not None


def has(status: int, **fields: Any) -> Callable[[Told], bool]:
    return lambda told: told.status == status and fields.items() <= told.error.items()


READ: dict[str, Callable[[Told], bool]] = {
    # -- too long --
    "LiteLLM's ContextWindowExceededError": says("this model's maximum context length is"),
    "LangChain's OpenAIContextOverflowError": says(
        "Input tokens exceed the configured limit"  # its other word is the code, which openai 3 leaves out of the text
    ),
    "pydantic-ai's ModelContextWindowExceededError": says("maximum context length|reduce the length of the messages"),
    "opencode's and pi's overflow": says(r"maximum context length is \d+ tokens"),
    "code context_length_exceeded": has(400, code="context_length_exceeded", type="invalid_request_error"),
    "Claude Code's overflow": says(r'"message": ?"prompt is too long: \d+ tokens > \d+ maximum"'),
    "LangChain's AnthropicContextOverflowError": says("prompt is too long"),
    "LiteLLM's ContextWindowExceededError for SageMaker": says(
        "`inputs` tokens \\+ `max_new_tokens` must be <=", status=424
    ),
    "LiteLLM's ContextWindowExceededError for TGI": says("`inputs` tokens \\+ `max_new_tokens` must be", status=422),
    "a SageMaker chat's overflow": says("this model's maximum context length is", status=424),
    # -- other errors --
    "a rate limit of OpenAI's": has(429, code="rate_limit_exceeded", type="rate_limit_error"),
    "an overload of Anthropic's": has(529, type="overloaded_error"),
    "an overload of TGI's": lambda told: told.status == 429 and json.loads(told.text)["error_type"] == "overloaded",
    "a server that is down": lambda told: told.status == 503,
    "OpenAI's model_not_found": has(404, code="model_not_found", type="invalid_request_error"),
    "Claude Code's model_not_found": says('not_found_error.*"message": ?"model: ', status=404),
    "Triton's unknown model": says("unknown model: 'x' is not found", status=404),
    "vLLM's NotFoundError": has(404, type="NotFoundError"),
    "LiteLLM's AuthenticationError": says("incorrect api key provided", status=401),
    "Anthropic's authentication_error": has(401, type="authentication_error"),
}

ANSWERS = (
    "LiteLLM's ContextWindowExceededError", "pydantic-ai's ModelContextWindowExceededError",
    "opencode's and pi's overflow", "code context_length_exceeded",
)  # fmt: skip
OPENAIS = (*ANSWERS, "LangChain's OpenAIContextOverflowError")
ANTHROPICS = ("Claude Code's overflow", "LangChain's AnthropicContextOverflowError")

# -- a prompt, or a prompt with its answer, that does not fit ----------------------------------------------------------


LONG = "a " * 200
TURNS = [{"role": "user", "content": LONG}]
SHORT = [{"role": "user", "content": "a"}]
TOO_LONG: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "chat": ("/v1/chat/completions", {"messages": TURNS}, "messages", OPENAIS),
    "streamed chat": ("/v1/chat/completions", {"messages": TURNS, "stream": True}, "messages", OPENAIS),
    "chat's answer": ("/v1/chat/completions", {"messages": SHORT, "max_tokens": 99}, "max_tokens", ANSWERS),
    "chat's answer by its new name": (
        "/v1/chat/completions", {"messages": SHORT, "max_completion_tokens": 99}, "max_completion_tokens", ANSWERS,
    ),
    "completion": ("/v1/completions", {"prompt": LONG}, "prompt", OPENAIS),
    "completion's answer": ("/v1/completions", {"prompt": "a", "max_tokens": 99}, "max_tokens", ANSWERS),
    "response": ("/v1/responses", {"input": LONG}, "input", OPENAIS),
    "streamed response": ("/v1/responses", {"input": LONG, "stream": True}, "input", OPENAIS),
    "response's answer": ("/v1/responses", {"input": "a", "max_output_tokens": 99}, "max_output_tokens", ANSWERS),
    "message": ("/v1/messages", {"messages": TURNS, "max_tokens": 4}, "", ANTHROPICS),
    "prompt of LMI": (
        "/invocations", {"inputs": LONG}, "'inputs'", ("LiteLLM's ContextWindowExceededError for SageMaker",),
    ),
    "answer of LMI": (
        "/invocations", {"inputs": "a", "parameters": {"max_new_tokens": 99}}, "parameters.max_new_tokens=99",
        ("LiteLLM's ContextWindowExceededError for SageMaker",),
    ),
    "chat of LMI": ("/invocations", {"messages": TURNS}, "'messages'", ("a SageMaker chat's overflow",)),
    "prompt of TGI": (
        "/generate", {"inputs": LONG, "parameters": {"max_new_tokens": 4}}, "",
        ("LiteLLM's ContextWindowExceededError for TGI",),
    ),
}  # fmt: skip
"""Route, body, the field that the error names, and who must recognize it."""


@pytest.fixture(scope="module")
def short() -> Iterator[LiveServer]:
    with serve("--engine", "echo", "-o", "option.max_model_len=64") as server:
        yield server


@pytest.mark.parametrize("case", TOO_LONG)
def test_clients_recognize_an_overflow(short: LiveServer, case: str) -> None:
    path, body, field, readers = TOO_LONG[case]
    found = short.post(body, path)
    told = Told(found.status_code, found.text)
    assert not [reader for reader in readers if not READ[reader](told)], told
    if field.endswith(("9", "'")):
        assert field in told.text
    elif field:
        assert (told.error["param"], field in told.error["message"]) == (field, True)
    assert not re.search(
        r"rate[\s_-]*limit|too many requests", told.text, re.IGNORECASE
    )  # clients would wait and retry


# -- the other errors --------------------------------------------------------------------------------------------------


FULL, DOWN, UNKNOWN = Overloaded("the queue is full"), Unavailable("the engine is down"), ModelNotFound("x", served="y")
TGI = TgiErrors()


@in_one_test(
    ("errors", "error", "reader"),
    [
        (OPENAI, FULL, "a rate limit of OpenAI's"),
        (ANTHROPIC, FULL, "an overload of Anthropic's"),
        (TGI, FULL, "an overload of TGI's"),
        *[(errors, DOWN, "a server that is down") for errors in (OPENAI, ANTHROPIC, TGI, VLLM)],
        (OPENAI, UNKNOWN, "OpenAI's model_not_found"),
        (ANTHROPIC, UNKNOWN, "Claude Code's model_not_found"),
        (VLLM, UNKNOWN, "vLLM's NotFoundError"),
        (TRITON, UNKNOWN, "Triton's unknown model"),
    ],
)
def test_clients_recognize_an_error(errors: ErrorFormat, error: ServingError, reader: str) -> None:
    found = errors.whole(error)
    assert READ[reader](Told(found.status, found.body.decode())), found


@in_one_test(
    "words",
    [  # vLLM, SGLang (twice), TensorRT-LLM
        "This model's maximum context length is 64 tokens. However, your request has 201 input tokens.",
        "The input (201 tokens) is longer than the model's context length (64 tokens).",
        "Input length (201 tokens) exceeds the maximum allowed length (64 tokens).",
        "The sum of prompt length (201.0) and query length (0) max_tokens (16) should not exceed max_seq_len (64)",
    ],
)
def test_an_overflow_that_another_server_tells_is_told_as_ours(words: str) -> None:
    """A server at option.base_url may have less room than it said."""
    told = [
        Told(found.status, found.body.decode())
        for found in (errors.whole(RefusedByEngine(words)) for errors in (OPENAI, ANTHROPIC))
    ]
    assert READ["code context_length_exceeded"](told[0])
    assert READ["LangChain's AnthropicContextOverflowError"](told[1])
    assert all(words in one.text for one in told)


def test_another_refusal_of_another_server_is_no_overflow() -> None:
    found = OPENAI.whole(RefusedByEngine("temperature must be at most 2"))
    assert json.loads(found.body)["error"]["code"] is None


def test_a_wrong_key_is_told_in_each_apis_words() -> None:
    with serve("--engine", "echo", env={"LMI_API_KEY": "k"}) as server:
        for path, body, reader in (
            ("/v1/chat/completions", {"messages": SHORT}, "LiteLLM's AuthenticationError"),
            ("/v1/messages", {"messages": SHORT, "max_tokens": 1}, "Anthropic's authentication_error"),
        ):
            found = http.post(server.url + path, json=body, headers={"x-api-key": "wrong"})
            assert READ[reader](Told(found.status_code, found.text)), found.text
