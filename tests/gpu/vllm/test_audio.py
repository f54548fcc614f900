"""Audio clips in vLLM: tokens as transformers has them, alone and in company; the prefix cache mixes no clips."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.engines.base import EngineStatistics
from tests import vllm_forks
from tests.checkpoints.audio import CASES, Reference, write_model
from tests.process.engines.test_conformance import start
from tests.random_models import Compared
from tests.servers import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("audio") / "qwen2_audio")


@pytest.fixture(scope="module")
def hearing(model: Path) -> Iterator[Compared]:
    answers = [Reference(model).answer(case) for case in CASES]
    with vllm_forks.engines():
        driver = start("vllm", model, enforce_eager=True, max_model_len=512)
    yield Compared(driver, CASES, answers)
    driver.engine.close()


def test_tokens_are_those_of_transformers_alone_and_in_company_in_audio(hearing: Compared) -> None:
    for case in CASES:
        hearing.check([case])
    hearing.check([*CASES, *reversed(CASES)])


def test_equal_clips_hit_the_prefix_cache_and_others_never(hearing: Compared) -> None:
    def hits() -> int:
        hearing.driver.engine.step(timeout=0.1)  # the statistics come after the last tokens
        found = hearing.driver.engine.statistics
        assert isinstance(found, EngineStatistics)
        return found.prefix_cache_hits or 0

    hearing.check([CASES[-1]])
    before = hits()
    hearing.check([CASES[-1]])
    wait_for(lambda: hits() > before, 10, "the prefix cache has no hit")
    hearing.check([CASES[1]])
    hearing.check([CASES[2]])
