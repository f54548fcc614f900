"""Images with OpenVINO: tokens as transformers has them, alone, in company, and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError, InvalidPayload
from handler.core.media import MediaSource
from handler.core.values import Request, Sampling
from handler.engines.base import EngineConfig
from handler.engines.openvino.engine import check
from handler.serving.media.loader import place_media
from tests.checkpoints.vision import CASES, FAMILIES
from tests.checkpoints.vision_over_http import check_over_http
from tests.process.engines.test_conformance import ids, start
from tests.random_models import Answer, Compared, unpack
from tests.servers import serve

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "vision"


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    unpack(GOLDEN / f"{request.param}.tar.xz", directory)
    return directory / str(request.param)


@pytest.fixture(scope="module")
def vision(model: Path) -> Iterator[Compared]:
    answers = json.loads((GOLDEN / "answers.json").read_text())[model.name]
    driver = start("openvino", model)
    yield Compared(driver, CASES, [Answer(**answer) for answer in answers])
    driver.engine.close()


def test_tokens_are_those_of_transformers_alone_and_in_company(vision: Compared) -> None:
    for case in CASES:
        vision.check([case])
    vision.check([*CASES, *reversed(CASES)])


def test_over_http_in_openvino_images(model: Path, vision: Compared) -> None:
    with serve(str(model), "-o", "option.dtype=fp32") as server:
        check_over_http(server, vision)


# -- what GenAI would read otherwise -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("see <ov_genai_image_0>", "'<ov_genai_image_', which OpenVINO GenAI would replace with an image"),
        ([104, 101, 300], "no text has exactly the tokens of this prompt"),
    ],
)
def test_a_prompt_that_genai_would_read_otherwise_is_refused_alone(
    vision: Compared, prompt: str | list[int], reason: str
) -> None:
    driver = vision.driver
    encoded = driver.tokenizer.encode(prompt if isinstance(prompt, str) else "he")
    if not isinstance(prompt, str):
        encoded = encoded._replace(ids=prompt, media=None)
    bad = driver.batcher.submit(Request("", Sampling(max_new_tokens=2)), encoded)
    good = vision.submit(CASES[1])
    found = driver.run()
    assert reason in str(found[bad][-1].error)
    assert ids(found[good]) == vision.expected(CASES[1]).ids


def test_prompts_of_ids_are_served_where_a_text_has_them(vision: Compared) -> None:
    driver = vision.driver
    encoded = driver.tokenizer.encode("What is in this image?")
    answers = []
    for prompt in (encoded, encoded._replace(media=None)):
        id = driver.batcher.submit(Request("", Sampling(max_new_tokens=4, ignore_eos=True)), prompt)
        answers.append(ids(driver.run()[id]))
    assert answers[0] == answers[1]


def test_images_that_do_not_fit_are_refused_by_name(vision: Compared) -> None:
    tokens = vision.driver.tokenizer.media_tokens
    request = Request("", media=tuple(MediaSource("image", b"", "", f"images[{number}]") for number in range(2)))
    prompt = vision.driver.tokenizer.encode_chat(CASES[1].messages)
    with pytest.raises(InvalidPayload, match="writes 1 placeholders for 2 images"):
        place_media(request, prompt, CASES[4].media[:2], tokens)


def test_the_prefix_cache_stays_off(model: Path) -> None:
    """GenAI finds blocks by a few numbers of each embedding, without positions (sequence_group.cpp)."""
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        check(str(model), EngineConfig(Config(enable_prefix_caching=True)))
    check(str(model), EngineConfig(Config(enable_prefix_caching=False)))
