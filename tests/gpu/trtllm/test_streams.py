"""No request is without an end, however many there are: TensorRT-LLM tells of results from a thread of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.trtllm.streams import measure

pytestmark = pytest.mark.long


@pytest.mark.parametrize("manners", ["pause=0", "version=1.0.0;pause=0"])
def test_every_request_ends(model: Path, manners: str) -> None:
    """A loop that says that it rests loses the end of one in ten with the first, and the LLM with the second."""
    found = measure(model, streams=128, seconds=2, manners=manners)
    assert found.begun >= 128
    assert (found.failed, found.never_ended) == (0, 0), found


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_every_request_ends_of_256_at_once_for_twenty_seconds(model: Path) -> None:
    found = measure(model, streams=256, seconds=20, manners="pause=0.01")
    print(found)
    assert found.begun > 512
    assert (found.failed, found.never_ended) == (0, 0), found
