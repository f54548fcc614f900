"""The prompts of one body, such as the questions of a decision, load an image that they share once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from handler.core.media import MediaSource, Medium
from handler.core.values import Request
from handler.serving.request.plan import Encoding, SharedMedia
from handler.serving.request.stages import MediaLoading


class Admission:
    """Loads media at once, and keeps what was asked of it."""

    def __init__(self) -> None:
        self.loaded: list[Sequence[MediaSource]] = []
        self.media = self
        self.preprocessor = None

    def load(self, sources: Sequence[MediaSource], owner: str) -> Future[Any]:
        self.loaded.append(sources)
        future: Future[Any] = Future()
        media = tuple(Medium("image", (1, 1), source.url.encode(), source.url) for source in sources)
        future.set_result(SimpleNamespace(media=media, reservation=SimpleNamespace(close=lambda: None)))
        return future

    def on_loop(self, work: Future[Any]) -> asyncio.Future[Any]:
        return asyncio.wrap_future(work)


def image(name: str) -> MediaSource:
    return MediaSource("image", None, f"https://example.com/{name}.png", f"images.{name}")


def test_each_set_of_images_is_loaded_once() -> None:
    async def story() -> None:
        admission: Any = Admission()
        stage = MediaLoading(admission)
        shared: SharedMedia = []
        held: list[Callable[[], object]] = []
        sets = [(image("a"),), (image("a"),), (image("a"), image("b")), (), (image("a"),)]
        encodings = [Encoding(Request("", media=media), 0, "", held.append, shared) for media in sets]
        for encoding in encodings:
            if (waiting := stage.encode(encoding)) is not None:
                await waiting
        assert admission.loaded == [sets[0], sets[2]]
        assert [[medium.data for medium in encoding.media] for encoding in encodings] == [
            [source.url.encode() for source in media] for media in sets
        ]
        assert len(held) == 2  # the memory of each loaded set is given back once

    asyncio.run(story())


def test_bodies_share_nothing() -> None:
    async def story() -> None:
        admission: Any = Admission()
        stage = MediaLoading(admission)
        for _ in range(2):
            waiting = stage.encode(Encoding(Request("", media=(image("a"),)), 0, "", lambda release: None))
            assert waiting is not None
            await waiting
        assert len(admission.loaded) == 2

    asyncio.run(story())
