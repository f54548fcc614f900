"""One client's images that are small to send and large to decode, while a neighbour sends small ones and pings."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import PIL.Image
import pytest

from tests.app.media.files import data_url, image_file, png
from tests.attacks.watch import hold, pings
from tests.servers import LiveServer, serve

CHAT = "/v1/chat/completions"
REQUESTS = 30
LONGEST_IMAGE = 1.0  # seconds that a neighbour's image may take


def solid(side: int) -> str:
    """Some hundred bytes, however large the image is."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (side, side)).save(file, "WEBP", lossless=True)
    return data_url(file.getvalue(), "webp")


def noisy(side: int) -> str:
    file = io.BytesIO()
    PIL.Image.effect_noise((side, side), 90).convert("RGB").save(file, "WEBP", lossless=True, method=0)
    return data_url(file.getvalue(), "webp")


def profiles(number: int) -> str:
    """One pixel, and a MiB a profile where they are unpacked."""
    profile, pixel = (b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 20))), (b"IDAT", zlib.compress(bytes(4)))
    return data_url(png(1, 1, *[profile] * number, pixel))


def ask(urls: list[str]) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


ATTACKS = {
    "more pixels than the memory": lambda: ask([solid(5700)] * 32),
    "as many pixels as the memory": lambda: ask([solid(5700)] * 10),
    "many of middle size": lambda: ask([solid(2000)] * 8),
    "small ones that take long": lambda: ask([noisy(1000)] * 2),
    "one pixel with many profiles": lambda: ask([profiles(300)] * 2),
    "very many tiny ones": lambda: ask([solid(16)] * 32),
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve("--engine", "echo") as server:
        server.wait_ready()
        assert server.post(ask([data_url(image_file())]), CHAT).status_code == 200  # the decoders' process has started
        yield server


@pytest.mark.parametrize("name", ATTACKS)
def test_a_neighbours_small_image_is_answered_at_once(server: LiveServer, name: str) -> None:
    body = ATTACKS[name]()
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image_file()).decode()}
    counted = {"model": "model", "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}

    def small() -> None:  # without the engine, which reads the attack's pixels
        assert server.post(counted, "/v1/messages/count_tokens").json() == {"input_tokens": 3}

    def attack() -> None:
        with ThreadPoolExecutor(REQUESTS) as clients:
            answers = clients.map(lambda _: server.post(body, CHAT), range(REQUESTS))
            assert {answer.status_code for answer in answers} <= {200, 400, 429}

    hold({"image": (small, LONGEST_IMAGE), **pings(server.url)}, attack)
