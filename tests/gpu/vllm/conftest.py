"""The server that all of vLLM's HTTP tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import vllm_forks
from tests.app.server import serve
from tests.servers import LiveServer, options

SMALL = (
    "--engine",
    "vllm",
    *options("option.enforce_eager=true", "option.kv_cache_gib=1"),
    *options("option.max_model_len=2048", "option.model_loading_timeout=600"),
    *options("option.gpu_memory_utilization=0.15"),  # of a GPU that others share; vLLM asks for nine tenths to be free
    *options("option.dtype=fp32"),  # in the file's bfloat16 this CPU takes many times as long
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Have transformers compute on one thread: two wait for one another on a busy machine, which costs as much."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def server(hf_demo: Path) -> Iterator[LiveServer]:
    """vLLM behind the embedded server, ready, also to try guides."""
    with vllm_forks.engines(), serve(str(hf_demo), *SMALL) as found:
        found.wait_ready(280)
        tried = {"guided_grammar": 'root ::= "a"', "max_new_tokens": 1}  # waits for the process that tries guides
        assert found.post({"inputs": "a", "parameters": tried}).status_code == 200
        yield found
