"""Images for llama-server: their files, and the texts around them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import pytest
from PIL import Image

from handler.core.media import MediaPrompt, Medium
from handler.core.values import Finish, Sampling
from handler.engines.base import EngineRequest
from handler.engines.llamacpp import media
from handler.engines.llamacpp.answer import Tokens
from handler.engines.llamacpp.pieces import Pieces
from handler.engines.remote.servers import Failed, Part, Refused
from tests.one_test import in_one_test


def picture(width: int, height: int) -> Medium:
    data = random.Random(width).randbytes(width * height * 3)
    return Medium("image", (width, height), data, sha256(data).hexdigest())


@in_one_test(
    "data", [b'{"tokens": "1"}', b'{"tokens": [1, true]}', b'{"tokens": [1.0]}', b'{"ids": [1]}', b"[1]", b"?"]
)
def test_ids_of_a_text_that_cannot_be_read_are_a_failure(data: bytes) -> None:
    async def tokenize(body: object) -> bytes:
        return data

    with pytest.raises(Failed, match="sent token ids that cannot be read"):
        asyncio.run(media.tokenized(tokenize, "text"))


def test_an_image_file_has_the_very_pixels() -> None:
    for medium in (picture(27, 47), picture(1, 1), picture(1200, 1201), picture(1, 1_500_000)):
        data = media.image_file(medium)
        assert data.startswith(b"P6" if len(medium.data) <= 4 << 20 else b"\x89PNG")
        with Image.open(io.BytesIO(data)) as image:
            assert (image.size, image.convert("RGB").tobytes()) == (medium.size, medium.data)


FORMS = media.MarkedForms(text=True, parts=False, placeholders={"image": "<image>"})


def test_markers_and_texts_stand_in_the_order_of_the_parts() -> None:
    """Texts that follow each other are separated by a line break, as llama-server does; a marker joins without one."""
    image, text = {"type": "image"}, [{"type": "text", "text": word} for word in "abc"]
    for parts, expected in (
        ([image], "<image>"),
        ([text[0], image, text[1]], "a<image>b"),
        ([text[0], text[1], image, image, text[2]], "a\nb<image><image>c"),
        ([image, text[0], text[1]], "<image>a\nb"),
    ):
        assert FORMS.adapt([{"role": "user", "content": parts}]) == [{"role": "user", "content": expected}]
    for content in ("plain", None):
        assert FORMS.adapt([{"role": "user", "content": content}])[0]["content"] == content
    assert FORMS.adapt([{"role": "user", "content": text}])[0]["content"] == "a\nb\nc"


def test_only_a_server_with_a_projector_reads_images() -> None:
    without, with_one = media.no_media(projector=False), media.no_media(projector=True)
    assert without.keys() == with_one.keys()
    assert all(without.values())
    assert [kind for kind, reason in with_one.items() if not reason] == ["image"]


def test_a_projector_is_read_from_what_the_server_reports() -> None:
    props = {"modalities": {"vision": True}, "media_marker": "<m>", "bos_token": "<s>"}
    assert media.Projector.read(props) == media.Projector("<m>", (), "<s>")
    assert media.Projector.read({**props, "bos_token": None}) == media.Projector("<m>")
    others: tuple[Any, ...] = (None, [], {}, {"vision": 1}, {"vision": False})
    changes: list[dict[str, Any]] = [
        *({"modalities": modalities} for modalities in others),
        *({"media_marker": marker} for marker in (None, "", 7)),
    ]
    for change in changes:
        assert media.Projector.read({**props, **change}) is None, change


PLACEHOLDER = 999


async def bytes_of(body: Mapping[str, Any]) -> bytes:
    """A server whose tokens are bytes."""
    content = body["content"] if isinstance(body["content"], list) else [body["content"]]
    ids = [id for part in content for id in ([part] if isinstance(part, int) else part.encode())]
    return json.dumps({"tokens": ids}).encode()


async def all_bytes() -> Pieces | None:
    return Pieces([bytes([byte]) for byte in range(256)])


def prompt_of(text: str, ids: list[int], projector: media.Projector, *, count: int = 1, kind: str = "image") -> Any:
    prompt = media.ImagePrompt(MediaPrompt(text, (picture(2, 3)._replace(kind=kind),) * count))
    first = asyncio.run(prompt.prompt(ids, projector, bytes_of, all_bytes))
    assert asyncio.run(prompt.prompt(ids, projector, bytes_of, all_bytes)) == first, "it can be asked again"
    return first


def ids_of(*texts: str) -> list[int]:
    return [id for text in texts for id in (PLACEHOLDER, *text.encode())][1:]


def test_a_prompt_has_the_servers_marker_for_each_image_and_a_begun_response_after_it() -> None:
    draw = random.Random(31)
    for count in range(1, 4):
        texts = ["".join(draw.choices("ab é", k=draw.randrange(5))) for _ in range(count + 1)]
        for begun in ("", "more"):
            ids = [*ids_of(*texts), *begun.encode()]
            body = prompt_of(media.MARKER.join(texts), ids, media.Projector("<m>"), count=count)
            assert body["prompt_string"] == "<m>".join([*texts[:-1], texts[-1] + begun])
            files = [base64.b64decode(data) for data in body["multimodal_data"]]
            assert files == [media.image_file(picture(2, 3))] * count


def test_a_token_that_the_server_adds_is_not_sent_twice() -> None:
    projector = media.Projector("<m>", (7,), "<s>")
    body = prompt_of(f"<s>a{media.MARKER}b", [7, *ids_of("a", "b")], projector)
    assert body["prompt_string"] == "a<m>b"
    body = prompt_of(f"a{media.MARKER}b", [7, *ids_of("a", "b")], projector)
    assert body["prompt_string"] == "a<m>b"


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (ids_of("a", "c"), "divides the text of this prompt into other tokens"),
        (ids_of("a", "b")[:-1], "divides the text of this prompt into other tokens"),
        ([1, *ids_of("a", "b")], "divides the text of this prompt into other tokens"),
        ([*b"ab"], "divides the text of this prompt into other tokens"),
        ([*ids_of("a", "b"), 0xC3], "this response was interrupted"),
        ([*ids_of("a", "b"), 500], "this response was interrupted"),
    ],
)
def test_other_ids_than_the_servers_are_refused(ids: list[int], words: str) -> None:
    with pytest.raises(Refused) as refused:
        prompt_of(f"a{media.MARKER}b", ids, media.Projector("<m>"))
    assert words in refused.value.words
    assert refused.value.status == 400


def test_images_with_different_placeholders_or_more_of_them_are_refused() -> None:
    text, ids = media.MARKER.join("abc"), ids_of("a", "b", "c")
    other = [*ids]
    other[1] = PLACEHOLDER + 1
    ambiguous = ids_of(*["", "", ""])
    for wrong in (other, [*b"a", PLACEHOLDER, *b"b"]):
        with pytest.raises(Refused, match="400"):
            prompt_of(text, wrong, media.Projector("<m>"), count=2)
    assert prompt_of(media.MARKER * 2, ambiguous, media.Projector("<m>"), count=2)["prompt_string"] == "<m><m>"
    with pytest.raises(Refused, match="400"):  # a placeholder that is a token of a text
        prompt_of(media.MARKER.join("aba"), [97, 97, 98, 97, 97], media.Projector("<m>"), count=2)


def test_what_cannot_be_an_image_of_the_prompt_is_refused() -> None:
    projector = media.Projector("<m>")
    with pytest.raises(Refused) as refused:
        prompt_of(f"<m>{media.MARKER}", ids_of("<m>", ""), projector)
    assert "must not contain the text by which llama-server recognizes images" in refused.value.words
    with pytest.raises(ValueError, match="the prompt has 1 markers for images, but 2 images"):
        prompt_of(media.MARKER, [PLACEHOLDER], projector, count=2)
    with pytest.raises(ValueError, match="audio has not been tested"):
        prompt_of(media.MARKER, [PLACEHOLDER], projector, kind="audio")


def call(**fields: Any) -> media.ImageCall:
    sampling = Sampling(**{"max_new_tokens": 9, "logprobs": False, **fields})
    prompt = MediaPrompt(media.MARKER, (picture(2, 2),))
    return media.ImageCall(EngineRequest(1, [PLACEHOLDER], sampling), prompt, {2}, 100)


def tokens(ids: list[int], number: int, stop_type: str = "", **more: Any) -> Tokens:
    return Tokens(ids, (), "", number, stop_type, **more)


def test_a_repeated_response_is_not_sent_again_however_its_tokens_arrive() -> None:
    draw = random.Random(32)
    response = [11, 12, 13, 14, 15, 16, 17, 18, 2]
    for _ in range(40):
        found, part, known = call(), Part(), draw.randint(0, 8)
        found.begin()
        if known:
            assert found.take_tokens(tokens(response[:known], known), part, None)
            body = found.next_body()
            assert (body["n_predict"], found.prefix([])) == (9, [PLACEHOLDER]), "each completion begins anew"
            found.begin()
        at = 0
        while at < len(response):
            end = draw.randint(at + 1, len(response))
            event = tokens(response[at:end], end, "eos" if end == len(response) else "", num_prompt=5)
            assert found.take_tokens(event, part, None)
            assert found.take_plain(b"") is None
            at = end
        assert (part.ids, found.finish_reason, found.resumes) == (response, Finish.EOS, True)
        assert part.extras is not None
        assert part.extras.num_media_tokens == 4, "the server's prompt has five tokens, ours has one"


@pytest.mark.parametrize("event", [tokens([11, 99], 2), tokens([11], 1, "eos")])
def test_another_response_than_the_repeated_one_is_a_failure(event: Tokens) -> None:
    found = call()
    found.begin()
    found.take_tokens(tokens([11, 12, 13], 3), Part(), None)
    found.next_body()
    found.begin()
    with pytest.raises(Failed, match="sent other tokens when it repeated a response"):
        found.take_tokens(event, Part(), None)


def test_what_needs_a_prompt_of_ids_is_refused_and_a_sample_can_be_repeated() -> None:
    for field in ("min_new_tokens", "presence_penalty", "frequency_penalty"):
        with pytest.raises(ValueError, match=rf"{field}.*cannot be combined with images"):
            call(**{field: 1})
    assert call(do_sample=True, seed=7).next_body()["seed"] == call(do_sample=True, seed=7).next_body()["seed"]
    sampled = call(do_sample=True)
    assert sampled.next_body()["seed"] == sampled.next_body()["seed"]
