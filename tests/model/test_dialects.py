"""One request of each dialect on the demo model, which `make test` has too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.server import serve
from tests.servers import LiveServer

pytestmark = pytest.mark.long  # it would be the last file

PROMPT = "The capital of France is"
PARAMETERS = {"max_new_tokens": 8}
CHAT = {
    "messages": [{"role": "user", "content": "Complete the sentence: The capital of France is"}],
    "max_tokens": 16,
    "temperature": 0,
}
GENERATE = "/v2/models/model/generate"

DIALECTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], str]]] = {
    "LMI": ("/invocations", {"inputs": PROMPT, "parameters": PARAMETERS}, lambda answer: answer["generated_text"]),
    "LMI's chat": ("/invocations", CHAT, lambda answer: answer["choices"][0]["message"]["content"]),
    "OpenAI's chat": ("/v1/chat/completions", CHAT, lambda answer: answer["choices"][0]["message"]["content"]),
    "OpenAI's completions": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 8, "temperature": 0},
        lambda answer: answer["choices"][0]["text"],
    ),
    "TGI": ("/generate", {"inputs": PROMPT, "parameters": PARAMETERS}, lambda answer: answer["generated_text"]),
    "TGI's root": ("/", {"inputs": PROMPT, "parameters": PARAMETERS}, lambda answer: answer[0]["generated_text"]),
    "Triton": (GENERATE, {"text_input": PROMPT, "max_tokens": 8}, lambda answer: answer["text_output"]),
    "tensors": (
        "/invocations",
        {"inputs": PROMPT, "parameters": {"request_output_len": [[8]]}},
        lambda answer: answer["generated_text"],
    ),
}


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[LiveServer]:
    with serve(str(demo_model)) as found:
        yield found


@pytest.mark.parametrize("name", DIALECTS)
def test_the_model_answers_in_each_dialect(server: LiveServer, name: str) -> None:
    path, body, text = DIALECTS[name]
    found = server.post(body, path)
    assert found.status_code == 200, found.text
    assert "Paris" in text(found.json())


def test_a_stream_is_the_whole_answer(server: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    [whole] = [choice["text"] for choice in server.post(body, "/v1/completions").json()["choices"]]
    lines = server.post({**body, "stream": True}, "/v1/completions").text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole
