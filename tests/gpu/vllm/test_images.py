"""Images in vLLM: tokens as transformers has them, alone and in company; the prefix cache mixes no images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.engines.base import EngineStatistics
from tests import vllm_forks
from tests.app.server import serve
from tests.checkpoints.vision import CASES, FAMILIES, Reference, write_model
from tests.checkpoints.vision_over_http import check_over_http
from tests.process.engines.test_conformance import start
from tests.random_models import Compared
from tests.servers import options, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


@pytest.fixture(scope="module")
def vision(model: Path) -> Iterator[Compared]:
    answers = [Reference(model).answer(case) for case in CASES]
    with vllm_forks.engines():
        driver = start("vllm", model, enforce_eager=True, max_model_len=256)
    yield Compared(driver, CASES, answers)
    driver.engine.close()


def test_tokens_of_images_are_those_of_transformers_with_vllm(vision: Compared) -> None:
    for case in CASES:
        vision.check([case])
    vision.check([*CASES, *reversed(CASES)])


def test_equal_images_hit_the_prefix_cache_and_others_never_with_vllm(vision: Compared) -> None:
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


@pytest.mark.parametrize("model", ["qwen2_vl"], indirect=True)  # one family: a start takes long
def test_over_http_with_vllm(model: Path, vision: Compared) -> None:
    small = (
        "dtype=fp32",
        "enforce_eager=true",
        "gpu_memory_utilization=0.15",
        "kv_cache_gib=1",
        "max_model_len=256",
        "model_loading_timeout=600",
    )
    given = ("--engine", "vllm", *options(*(f"option.{each}" for each in small)))
    with vllm_forks.engines(), serve(str(model), *given) as server:
        server.wait_ready(280)
        check_over_http(server, vision)
