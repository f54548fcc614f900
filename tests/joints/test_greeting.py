"""The requests that a start prints are answered by the same server, on every API of its task."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.servers import http, options, serve, wait_for


@pytest.mark.parametrize(
    ("task", "paths"),
    [
        (
            "text-generation",
            "/invocations /v1/chat/completions /v1/responses /v1/messages /v1/systemone /generate "
            "/v2/models/my%20model/generate",
        ),
        ("feature-extraction", "/invocations /v1/embeddings"),
        ("classify", "/invocations /classify"),
        ("rerank", "/invocations /v1/rerank"),
    ],
)
def test_every_request_that_the_start_prints_is_answered(task: str, paths: str) -> None:
    arguments = ["--engine", "echo", *options(f"option.task={task}", "option.modelName=my model"), "--api-key", "KEY"]
    with serve(*arguments) as server:
        lines: list[str] = []

        def printed() -> bool:
            lines[:] = re.findall(r"^  (curl .*)\n", server.log, re.MULTILINE)
            return len(lines) >= len(paths.split())

        wait_for(printed, 10, "not every API is printed")
        assert [shlex.split(line)[2].removeprefix(server.url) for line in lines] == paths.split()
        for line in lines:
            _, _, url, _, key, _, body = shlex.split(line)
            form = {"content-type": "application/x-www-form-urlencoded"}  # as curl sends
            answer = http.post(url, content=body, headers={**form, "authorization": key.partition(": ")[2]})
            assert (answer.status_code, bool(json.loads(answer.text))) == (200, True), (line, answer.text)
