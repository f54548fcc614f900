"""Images with the adapter on the double: Qwen2-VL of random answers, in each version."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.media import Medium, SharedMedia
from handler.core.values import Finish, Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.trtllm import engine as trtllm
from tests.doubles import tiny, using
from tests.doubles.requests import environment
from tests.gpu.trtllm.cases import PROMPT, Loaded, joined, loaded
from tests.servers import serve

QUESTION = "What is in this image?"


def picture(width: int, height: int, *colours: int) -> Medium:
    pixels = bytes(colours[at % len(colours)] for at in range(width * height * 3))
    return Medium("image", (width, height), pixels, sha256(f"{width}x{height}".encode() + pixels).hexdigest())


RED, BLUE = picture(280, 140, 255, 0, 0), picture(140, 280, 0, 0, 255)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("vision"), vision=True)


@pytest.fixture(params=["1.0.0", "1.1.0", "1.2.1", "1.3.0rc29"])
def each(request: pytest.FixtureRequest, vision: Path) -> Iterator[Loaded]:
    cached = request.param >= "1.2"
    with loaded(vision, f"version={request.param}", enable_prefix_caching=cached) as found:
        yield found


@pytest.fixture
def now(vision: Path) -> Iterator[Loaded]:
    """1.2.1."""
    with loaded(vision) as found:
        yield found


def seen(found: Loaded, key: int) -> list[int]:
    return joined(found.run(key)[key]).ids


def test_an_image_is_seen_alone_and_in_company(each: Loaded) -> None:
    assert each.capabilities.no_media == {"image": "", "audio": "the model accepts no audio clips"}
    asked = [(RED,), (BLUE,), (RED, BLUE), (BLUE, RED), ()]
    alone = [seen(each, each.look(QUESTION, *images)) for images in asked]
    assert len({tuple(ids) for ids in alone}) == len(asked)  # which images, and in which order
    text = each.one(ignore_eos=True).ids
    keys = [each.look(QUESTION, *images) for images in asked] + [each.add(ignore_eos=True)]
    answers = each.run(*keys)  # prompts of texts beside them, which must not be sent as ids
    assert [joined(answers[key]).ids for key in keys] == [*alone, text]


def test_ids_are_those_that_were_counted(now: Loaded) -> None:
    tokens = now.tokenizer.media_tokens["image"]
    assert tokens is not None
    key = now.look(QUESTION, RED, BLUE)
    ids = now.engine._requests.running[key].result.prompt_token_ids
    seen(now, key)
    beyond = now.double.model.vocabulary + 1
    assert ids.count(beyond) == tokens.count((280, 140)) + tokens.count((140, 280)) == 2 * 50
    assert ids.index(beyond) == len(now.tokenizer.encode("<|im_start|>user\n").ids) + 1


def test_equal_images_hit_the_prefix_cache_and_others_never_with_trtllm(now: Loaded) -> None:
    """Of one colour and as many pixels: TensorRT-LLM hashes both the same."""
    wide, high = picture(280, 140, 7), picture(140, 280, 7)
    first, other = seen(now, now.look(QUESTION, wide)), seen(now, now.look(QUESTION, high))
    assert first != other
    assert seen(now, now.look(QUESTION, wide)) == first
    caches = [salt for salt in now.double.cached if salt]
    assert [len(now.double.cached[salt]) for salt in caches] == [2, 1]


def test_images_that_cannot_be_hashed_are_not_confused(now: Loaded) -> None:
    now.engine._llm.input_processor.hashes = False  # what one bad image may do, for good
    one, other = picture(280, 140, 1, 2, 3), picture(280, 140, 4, 5, 6)
    assert seen(now, now.look(QUESTION, one)) != seen(now, now.look(QUESTION, other))


@pytest.mark.parametrize("change", ["longer", "other"])
def test_other_ids_than_counted_end_their_request_alone(
    now: Loaded, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = now.look(QUESTION, BLUE, max_new_tokens=30)
    processor = now.engine._llm.input_processor
    real = type(processor).__call__

    def other(self: Any, text: str, *more: Any) -> Any:
        found = real(self, text, *more)
        ids = [*found.ids, 9] if change == "longer" else [9, *found.ids[1:]]
        return found._replace(ids=ids)

    with monkeypatch.context() as patch:
        patch.setattr(type(processor), "__call__", other)
        with pytest.raises(ValueError, match=r"TensorRT-LLM computes .*, which is a bug"):
            now.look(QUESTION, RED)
    assert joined(now.run(beside)[beside]).finish is Finish.LENGTH
    assert len(now.double.aborted) == 1
    assert now.heard_of == set()


@pytest.mark.parametrize(
    ("text", "images", "error"),
    [
        ("<|image_pad|>", (), "the number of placeholders"),
        ("<|image_pad|><|image_pad|>", (RED,), "the number of placeholders"),
        ("none", (RED,), "the number of placeholders"),
    ],
)
def test_wrong_numbers_of_placeholders_do_not_reach_it(
    now: Loaded, text: str, images: tuple[Medium, ...], error: str
) -> None:
    ids, shared = now.tokenizer.encode(text).ids, SharedMedia(text, images)
    with pytest.raises(ValueError, match=error):
        now.engine.add(EngineRequest(7, ids, Sampling(), media=shared.file))
    assert now.engine._llm.input_processor.hashes is None


def test_a_prompt_of_ids_that_no_text_has_is_refused(now: Loaded) -> None:
    whole = now.tokenizer.encode(PROMPT).ids
    assert now.one(whole).finish
    letters = [id for letter in "the" for id in now.tokenizer.encode(letter).ids]
    assert letters != now.tokenizer.encode("the").ids
    with pytest.raises(ValueError, match="no text has exactly the tokens of this prompt"):
        now.add(letters)


def test_an_image_that_it_cannot_process_is_refused_and_the_engine_goes_on(
    now: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = seen(now, now.look(QUESTION, RED))

    def broken(*given: Any) -> Any:
        raise OSError("image file is truncated")

    with monkeypatch.context() as patch:
        patch.setattr(type(now.engine._llm.input_processor), "__call__", broken)
        with pytest.raises(OSError, match="truncated"):
            now.look(QUESTION, RED)
    assert seen(now, now.look(QUESTION, RED)) == before


def test_prompt_log_probabilities_of_a_prompt_with_an_image(now: Loaded) -> None:
    key = now.look(QUESTION, RED, prompt_logprobs=True)
    found = now.run(key)[key][0].prompt_logprobs
    assert found is not None
    assert len(found) > 50
    assert found[0] is None


def test_a_chat_over_http_counts_an_images_tokens(vision: Path) -> None:
    from PIL import Image as Pillow

    file = io.BytesIO()
    Pillow.new("RGB", (280, 140), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    text = {"type": "text", "text": QUESTION}
    asked: Any = {"max_tokens": 3, "messages": [{"role": "user", "content": [text]}]}
    with serve(str(vision), "--engine", "trtllm", env=environment("version=1.2.1")) as server:
        server.wait_ready()
        plain = server.post(asked, path="/v1/chat/completions").json()
        asked["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": url}}, text]
        answer = server.post(asked, path="/v1/chat/completions")
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 50 + 2


@pytest.mark.parametrize(
    ("version", "change", "prefix_cache", "why"),
    [
        ("1.1.0", {}, True, "before TensorRT-LLM 1.2, images need option.enable_prefix_caching=false"),
        ("1.1.0", {}, False, ""),
        (
            "1.2.1",
            {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}},
            True,
            "support model_type llava",
        ),
        ("1.2.1", {"model_type": "gemma3"}, True, "images are not supported for model_type gemma3"),
        ("1.2.1", {"model_type": "llama", "vision_config": None}, True, "the model accepts text only"),
    ],
)
def test_what_takes_no_images_says_why(
    vision: Path, tmp_path: Path, version: str, change: dict[str, Any], prefix_cache: bool, why: str
) -> None:
    for file in vision.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = {**json.loads((vision / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps({name: one for name, one in config.items() if one is not None}))
    with using.tensorrt_llm(f"version={version}"):
        found = trtllm.capabilities(EngineConfig(Config(enable_prefix_caching=prefix_cache), model=tmp_path)).no_media[
            "image"
        ]
    assert (why in found) if why else found == ""
