"""Embeddings, rerank and labels through DJL in each of its modes, with `route=` for what is not at /invocations."""

from __future__ import annotations

from typing import Any

import pytest

from tests.djl.servers import djl, versions
from tests.servers import http, options, serve

pytestmark = pytest.mark.djl

ASYNC = {"option.rolling_batch": "disable", "option.async_mode": "true"}
LMIS = {"option.async_mode": "true", "option.lmi_version": "0.36"}
MODES = {
    "rolling": {"option.rolling_batch": "auto"},
    "async": ASYNC,
    "async schema": {**ASYNC, **LMIS},
    "dynamic": {"option.rolling_batch": "disable", "batch_size": "4", "max_batch_delay": "10"},
}
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "text-embedding": [
        ("", {"inputs": "a b"}),
        ("", {"inputs": ["a b", "c"]}),
        ("", {"inputs": "a b", "truncate": True}),
        ("/v1/embeddings", {"input": ["a b"], "encoding_format": "base64"}),
        ("/embed", {"inputs": "a b"}),
    ],
    "rerank": [("", {"query": "a", "texts": ["b", "c d"]})],
    "text-classification": [("/predict", {"inputs": [["a"], ["b", "c"]]})],
}


PAIRS = [("text-embedding", mode) for mode in MODES] + [("rerank", "rolling"), ("text-classification", "dynamic")]


PLACES = [(version, *pair) for pair in PAIRS for version in versions("0.31" if pair[1].startswith("async") else "0")]


@pytest.mark.parametrize(("version", "task", "mode"), PLACES)
def test_djl_answers_as_the_embedded_server(version: str, task: str, mode: str) -> None:
    handler = {"option.entryPoint": "handler.entry", "option.llm_engine": "echo", "option.task": task}
    release = LMIS if mode == "async schema" else {}
    own_options = options(f"option.task={task}", *(f"{key}={value}" for key, value in release.items()))
    with djl(version, {**handler, **MODES[mode]}) as server, serve("--engine", "echo", *own_options) as own:
        for route, body in CALLS[task]:
            headers = {ATTRIBUTES: f"route={route}"} if route else {}
            found, expected = (
                http.post(f"{one.url}/invocations", json=body, headers=headers, timeout=60) for one in (server, own)
            )
            assert (found.status_code, found.json()) == (200, expected.json())
            if not route and body == {"inputs": "a b"}:
                assert isinstance(found.json()[0], list) is (mode == "async schema")
        refused = server.post({"messages": []})
        assert refused.status_code >= 400
        assert "must be" in refused.text or "has no" in refused.text
