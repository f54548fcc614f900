"""Models for engines to serve."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles import tiny, using


@pytest.fixture(scope="module")
def trtllm_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for TensorRT-LLM to serve: its double, unless `make accept-trtllm` names a model for the real one."""
    if real := os.environ.get("ACCEPT_TRTLLM_MODEL"):
        yield Path(real)
        return
    with using.tensorrt_llm("version=1.3.0"):
        yield tiny.make(tmp_path_factory.mktemp("model"))
