"""The server that all of vLLM's HTTP tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import LiveServer, options, serve, wait_for

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
        wait_for(
            lambda: "schemas and grammars are tried by process" in found.log, 60, "schemas and grammars cannot be tried"
        )
        yield found
