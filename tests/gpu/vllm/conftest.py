"""The server that all of vLLM's HTTP tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import LiveServer, serve, wait_for

SMALL = ("--engine", "vllm", "-o", "option.enforce_eager=true", "-o", "option.kv_cache_gib=1")
SMALL = (*SMALL, "-o", "option.max_model_len=2048", "-o", "option.model_loading_timeout=600")


@pytest.fixture(scope="session")
def server(hf_demo: Path) -> Iterator[LiveServer]:
    """vLLM behind the embedded server, ready, also to try guides."""
    with serve(str(hf_demo), *SMALL) as found:
        found.wait_ready(170)
        wait_for(lambda: "guides are tried by process" in found.log, 60, "guides cannot be tried")
        yield found
