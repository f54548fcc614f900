"""The endpoints of docs/migrating/: their variables start the server, their clients' requests are answered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.servers import http, serve

PAGES = Path(__file__).parents[3] / "docs" / "migrating"
CARDS = {
    name: dict(line.strip().split("=", 1) for line in text.splitlines() if line.strip())
    for page in ("lmi", "tgi", "aws-vllm", "aws-sglang", "aws-llama-cpp")
    for name, text in re.findall(
        r"<!-- file: (\w+)\.env -->\n *```sh\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL
    )
}
CHAT = {"model": "qwen", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
PROMPT = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}
LONG = {"inputs": "a " * 1100, "parameters": {"max_new_tokens": 2}}


@pytest.mark.parametrize(
    ("card", "requests", "logged"),
    [
        (
            "lmi",
            [("/invocations", PROMPT, 200), ("/v1/chat/completions", {**CHAT, "model": "model"}, 200)],
            "enable_auto_tool",
        ),
        ("tgi", [("/generate", PROMPT, 200), ("/generate", LONG, 422)], "MAX_STOP_SEQUENCES has no effect here"),
        ("vllm", [("/invocations", PROMPT, 200), ("/v1/chat/completions", CHAT, 200)], "enable_auto_tool_choice"),
        ("sglang", [("/invocations", CHAT, 200)], "SM_SGLANG_ENABLE_METRICS has no effect here"),
        ("llama", [("/invocations", CHAT, 200)], "SM_LLAMA_CPP_THREADS has no effect here"),
    ],
)
def test_an_endpoint_runs_unchanged(card: str, requests: list[tuple[str, dict[str, Any], int]], logged: str) -> None:
    """With echo in the engine's place."""
    with serve("--engine", "echo", env=CARDS[card]) as server:
        server.wait_ready(60)
        for path, body, status in requests:
            answer = http.post(server.url + path, json=body, timeout=30)
            assert answer.status_code == status, answer.text
    assert logged in server.log
