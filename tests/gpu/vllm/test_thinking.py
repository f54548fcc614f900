"""Structured output after a thought on vLLM, by every test of the demo model on OpenVINO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import vllm_forks
from tests.app.server import serve
from tests.gpu.vllm.conftest import SMALL
from tests.model.test_thinking import (
    OPTIONS,
    test_a_required_call_follows_a_thought,
    test_a_schema_holds_after_a_thought_that_ends_at_its_budget,
    test_a_stream_shows_no_seam,
    test_a_thought_without_an_end_has_the_whole_length,
    test_other_dialects_have_it_by_their_own_names,
    test_without_a_thought_the_schema_holds_at_once,
)
from tests.servers import LiveServer

__all__ = [
    "test_a_required_call_follows_a_thought",
    "test_a_schema_holds_after_a_thought_that_ends_at_its_budget",
    "test_a_stream_shows_no_seam",
    "test_a_thought_without_an_end_has_the_whole_length",
    "test_other_dialects_have_it_by_their_own_names",
    "test_without_a_thought_the_schema_holds_at_once",
]

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]


@pytest.fixture(scope="module")
def server(hf_demo: Path) -> Iterator[LiveServer]:
    with vllm_forks.engines(), serve(str(hf_demo), *SMALL, *OPTIONS) as found:
        found.wait_ready(280)
        yield found
