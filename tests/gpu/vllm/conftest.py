"""The server that all of vLLM's HTTP tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import LiveServer, options, serve

SMALL = (
    "--engine",
    "vllm",
    *options("option.enforce_eager=true", "option.kv_cache_gib=1"),
    *options("option.max_model_len=2048", "option.model_loading_timeout=600"),
)


@pytest.fixture(scope="session")
def server(hf_demo: Path) -> Iterator[LiveServer]:
    """vLLM behind the embedded server, ready, also to try guides."""
    with serve(str(hf_demo), *SMALL) as found:
        found.wait_ready(170)
        tried = {"guided_grammar": 'root ::= "a"', "max_new_tokens": 1}  # waits for the process that tries guides
        assert found.post({"inputs": "a", "parameters": tried}).status_code == 200
        yield found
