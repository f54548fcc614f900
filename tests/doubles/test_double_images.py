"""Images to the double of each version: what is taken, confused, ignored and fatal, as in TensorRT-LLM's source."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import tiny, using
from tests.doubles.using import Double

TEXT = "<|vision_start|><|image_pad|><|vision_end|>What is it?"
PAD = 6
VERSIONS = ["1.0.0", "1.1.0", "1.2.1", "1.3.0rc29"]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("vision"), vision=True)


@pytest.fixture(params=VERSIONS)
def each(request: pytest.FixtureRequest, vision: Path) -> Iterator[Double]:
    with using.tensorrt_llm(f"version={request.param}"):
        found = Double(vision)
        yield found
        found.llm.shutdown()


def picture(width: int, height: int, colour: str = "red") -> Any:
    from PIL import Image

    return Image.new("RGB", (width, height), colour)


def inputs(*images: Any, text: str = TEXT) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def answer(double: Double, given: Any) -> list[int]:
    ids: list[int] = double.ask(given, max_tokens=12, end_id=-1)[1].outputs[0].token_ids
    return ids


def test_ids_of_images_are_beyond_the_vocabulary_before_1_3(each: Double) -> None:
    _, result = each.ask(inputs(picture(56, 84)), max_tokens=2)
    vocabulary = each.llm.model.vocabulary
    pad = PAD if each.package.MANNERS.release >= (1, 3) else vocabulary + 1
    assert result.prompt_token_ids[:8] == [5, *[pad] * 6, 7]


def test_ids_with_images_are_read_as_text_and_need_arguments_before_1_3(each: Double) -> None:
    given = {**inputs(picture(56, 84)), "prompt_token_ids": each.llm.tokenizer(TEXT)["input_ids"]}
    del given["prompt"]
    if each.package.MANNERS.release < (1, 3):
        with pytest.raises(TypeError):
            each.ask(given)
    _, result = each.ask({**given, "mm_processor_kwargs": {}}, max_tokens=2)
    assert len(result.prompt_token_ids) == len(given["prompt_token_ids"]) + 5


def test_images_of_as_many_bytes_and_tokens_are_one_to_its_cache(each: Double) -> None:
    wide, high, other = picture(280, 140), picture(140, 280), picture(140, 280, "blue")
    first = answer(each, inputs(wide))
    assert answer(each, inputs(high)) == first  # wrongly
    assert answer(each, inputs(other)) != first


def test_one_image_that_cannot_be_hashed_ends_hashing(each: Double) -> None:
    with pytest.raises(IndexError):
        each.ask(inputs(picture(280, 140), text=TEXT + TEXT))  # two placeholders, one image
    first = answer(each, inputs(picture(280, 140, "red")))
    assert answer(each, inputs(picture(280, 140, "blue"))) == first  # wrongly


def test_an_image_without_a_place_ends_the_engine(each: Double) -> None:
    with pytest.raises(Exception, match="cannot be broadcast"):
        each.ask(inputs(picture(56, 84), picture(56, 84)), max_tokens=2)
    with pytest.raises(RuntimeError, match="LLM is shutting down"):
        each.ask("text")


def test_prompts_of_ids_beside_texts_end_the_engine_before_1_3(each: Double) -> None:
    async def run() -> list[Any]:
        def ask(given: Any) -> Any:
            params = each.package.SamplingParams(max_tokens=200, end_id=-1, detokenize=False)
            return each.llm.generate_async(given, sampling_params=params, streaming=True).aresult()

        asked = [ask(inputs(picture(56, 84))), ask([30, 31, 32])]
        return await asyncio.gather(*asked, return_exceptions=True)

    failed = [isinstance(one, RuntimeError) for one in asyncio.run(run())]
    assert failed == [each.package.MANNERS.release < (1, 3)] * 2


def test_a_model_of_texts_ignores_images(model: Path) -> None:
    with using.tensorrt_llm():
        found = Double(model)
        with_image = {"prompt": "Once upon a time", "multi_modal_data": {"image": ["no image at all"]}}
        assert answer(found, with_image) == answer(found, "Once upon a time")
        found.llm.shutdown()
