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

from handler.serving.media.loader import THREADS
from tests.app.media.files import data_url, image_file, png
from tests.app.server import BY_KEY, AppServer
from tests.app.server import serve as serve_here
from tests.attacks.watch import NEIGHBOUR, Watch, answering, counted
from tests.servers import LiveServer, serve

CHAT = "/v1/chat/completions"
REQUESTS = 8


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


def attack(server: LiveServer, name: str) -> None:
    body = ATTACKS[name]()

    def send(_: int) -> int:
        return server.post(body, CHAT, headers={"Authorization": "Bearer attacker"}).status_code

    with ThreadPoolExecutor(REQUESTS) as clients:
        assert set(clients.map(send, range(REQUESTS))) <= {200, 400, 429}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve("--engine", "echo", *BY_KEY) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def server_here() -> Iterator[AppServer]:
    with serve_here("--engine", "echo", *BY_KEY) as server:
        yield server


@pytest.mark.parametrize("name", ATTACKS)
def test_a_neighbours_small_image_is_next(server_here: AppServer, name: str) -> None:
    """Of the attacker's images, each thread may begin one more."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image_file()).decode()}
    body = {"model": "model", "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}

    def small() -> None:  # without the engine, which reads the attack's pixels
        answer = server_here.post(body, "/v1/messages/count_tokens", headers=NEIGHBOUR)
        assert answer.json() == {"input_tokens": 3}

    with counted() as waits, Watch(small):
        attack(server_here, name)
    assert waits
    assert max(waits) <= THREADS


AT_NIGHT = ("as many pixels as the memory", "many of middle size")
"""What is decoded in the same place as another, and takes longest."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in AT_NIGHT else name for name in ATTACKS]
)
def test_the_loop_does_not_stand_still_in_media(server: LiveServer, name: str) -> None:
    with answering(server):
        attack(server, name)
