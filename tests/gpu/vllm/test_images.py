"""Images in vLLM: tokens as transformers has them, alone and in company; the prefix cache mixes no images."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from handler.engines.base import EngineStatistics
from tests.process.engines.test_conformance import start
from tests.servers import wait_for
from tests.vision.models import CASES, FAMILIES, Reference, Vision, write_model

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=FAMILIES)
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    model = write_model(tmp_path_factory.mktemp("vision") / request.param, request.param)
    answers = [Reference(model).answer(case) for case in CASES]
    driver = start("vllm", model, enforce_eager=True, max_model_len=256)
    yield Vision(driver, answers)
    driver.engine.close()


def test_tokens_are_those_of_transformers_alone_and_in_company(vision: Vision) -> None:
    for case in CASES:
        vision.check([case])
    vision.check([*CASES, *reversed(CASES)])


def test_equal_images_hit_the_prefix_cache_and_others_never(vision: Vision) -> None:
    def hits() -> int:
        vision.driver.engine.step(timeout=0.1)  # the statistics come after the last tokens
        found = vision.driver.engine.statistics
        assert isinstance(found, EngineStatistics)
        return found.prefix_cache_hits or 0

    first, other = CASES[-1], CASES[3]  # a prompt of over 32 tokens, which is a block of the CPU's cache
    vision.check([first])
    before = hits()
    vision.check([first])
    wait_for(lambda: hits() > before, 10, "the prefix cache has no hit")
    vision.check([other])
