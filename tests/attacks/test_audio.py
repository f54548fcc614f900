"""One client's audio that is long to decode, or lies, while a neighbour sends small clips and pings."""

from __future__ import annotations

import base64
import functools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy
import pytest

from handler.serving.media.loader import THREADS
from tests.app.media.clips import clip_file, flac, id3, ogg, tone, wav
from tests.app.server import BY_KEY, AppServer
from tests.app.server import serve as serve_here
from tests.attacks.watch import NEIGHBOUR, Watch, answering, counted
from tests.servers import LiveServer, http, options, serve

TRANSCRIPTIONS = "/v1/audio/transcriptions"
REQUESTS = 8
SMALL = base64.b64encode(clip_file()).decode()
OPTIONS = options("option.task=transcription", "option.max_model_len=8")
ECHO = "user: <audio> assistant: user: <audio>"


def silence(seconds: int, kind: str, rate: int = 4000) -> bytes:
    return clip_file(numpy.zeros(seconds * rate, numpy.float32), rate, kind)


def mp3(seconds: int) -> bytes:
    """Frames may follow one another without end; the first says how many there are."""
    file = clip_file(tone(10, 8000), 8000, "MP3")
    return file[file.index(file[:2], 2) :] * (seconds // 10)


def opus(seconds: int) -> bytes:
    return clip_file(tone(seconds), kind="OGG", subtype="OPUS")


FILES: dict[str, tuple[Callable[[], bytes], set[int]]] = {
    "a WAV that names more than follows": (lambda: wav(bytes(99), named=1 << 30), {400}),
    "a WAV of a billion samples a second": (lambda: wav(bytes(1 << 16), rate=1_000_000_000), {400}),
    "a WAV of no samples": (lambda: wav(b""), {400}),
    "a WAV of 8 MB": (lambda: wav(bytes(8 << 20)), {200}),
    "a FLAC that names 2^36 samples": (lambda: flac((1 << 36) - 1), {400}),
    "an hour of silence": (lambda: silence(3600, "FLAC"), {400}),
    "half an hour of silence": (lambda: silence(1790, "FLAC"), {200}),
    "an hour of MP3": (lambda: mp3(3600), {200, 400}),
    "an Ogg that names an hour": (lambda: ogg(3600 * 48_000, opus(1)), {400}),
    "an Ogg that names fewer than it has": (lambda: ogg(48, opus(20)), {200, 400}),
    "an Ogg of heads of pages": (lambda: opus(1) + b"OggS" * (1 << 19), {400}),
    "an MP3 of many texts": (lambda: id3(80_000, b"TXXX", b"\0%\0a"), {400}),
    "a FLAC of nothing but padding": (lambda: clip_file(kind="FLAC")[:42] + b"\1\0\0\0" * (1 << 20), {400}),
    "bytes after a head": (lambda: b"OggS" + bytes(range(256)) * 4096, {400}),
}  # fmt: skip
"""Each with the statuses that it may have, beside 429 on a busy machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve("--engine", "echo", *BY_KEY, *OPTIONS) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def server_here() -> Iterator[AppServer]:
    with serve_here("--engine", "echo", *BY_KEY, *OPTIONS) as server:
        yield server


def small(server: LiveServer) -> None:
    answer = server.post({"file": SMALL}, TRANSCRIPTIONS, headers=NEIGHBOUR)
    assert answer.json()["text"] == ECHO, answer.text


def attack(server: LiveServer, name: str) -> None:
    make, statuses = FILES[name]
    file, headers = make(), {"Authorization": "Bearer attacker"}

    def send(_: int) -> int:
        url, files = server.url + TRANSCRIPTIONS, {"file": ("a", file)}
        return http.post(url, files=files, headers=headers, timeout=300).status_code

    with ThreadPoolExecutor(REQUESTS) as clients:
        assert set(clients.map(send, range(REQUESTS))) <= {*statuses, 429}


@pytest.mark.parametrize("name", FILES)
def test_a_neighbours_small_clip_is_next(server_here: AppServer, name: str) -> None:
    """Of the attacker's clips, each thread may begin one more."""
    with counted() as waits, Watch(functools.partial(small, server_here)):
        attack(server_here, name)
    assert waits
    assert max(waits) <= THREADS


@pytest.mark.parametrize("name", FILES)
def test_the_loop_does_not_stand_still_in_audio(server: LiveServer, name: str) -> None:
    with answering(server):
        attack(server, name)


def test_clients_that_leave_while_their_clips_are_decoded(server: LiveServer) -> None:
    file = silence(1790, "FLAC")
    head = '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    body = head.encode() + file + b"\r\n--x--\r\n"
    lines = [f"POST {TRANSCRIPTIONS} HTTP/1.1", "Host: x", "Content-Type: multipart/form-data; boundary=x"]
    request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body

    place = urlsplit(server.url)
    with answering(server):
        for _ in range(REQUESTS):
            with socket.create_connection((place.hostname or "", place.port or 0), timeout=60) as connection:
                connection.sendall(request)
    small(server)
