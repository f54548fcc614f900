"""The expected values of tests/model/openvino/test_decoders.py, computed again by the installed transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.decoders import CASES, GOLDEN, transformers_values, write_checkpoint

pytestmark = pytest.mark.vllm

WANTED = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", CASES)
def test_the_golden_file_is_what_transformers_computes(tmp_path: Path, name: str) -> None:
    found = transformers_values(write_checkpoint(tmp_path, name), name)
    assert found["ids"] == WANTED[name]["ids"]
    assert found["logprobs"] == pytest.approx(WANTED[name]["logprobs"], abs=1e-3)
