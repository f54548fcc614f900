"""A hostile server beside a good one at option.base_url: every client is answered by the good one, and nobody waits."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from handler.engines.remote import servers
from tests.app.server import AppServer, serve
from tests.attacks.watch import answering
from tests.doubles import tiny
from tests.process.engines.openai.server import CHUNKED, DONE, HANG, HEAD, Server, event, listening, status
from tests.servers import options

CLIENTS = 8
MB = 1 << 20
KEY = "sk-proj-0123456789abcdef"
PAGE = f"<html><body>{KEY} http://10.1.2.3/v1 /opt/ml/model.py ValueError: no</body></html>"
BAD_ID = event(5).replace(b"[5]", b"[%d]")

HOSTILE = {
    "a page": (status(200, PAGE),),
    "a key that it lacks": (status(401, PAGE),),
    "a redirect to itself": (status(307, "", "Location: /v1/completions\r\nConnection: close\r\n"),),
    "an endless redirect": (status(302, "", f"Location: /{'x' * 8000}\r\nConnection: close\r\n"),),
    "busy for ever": (status(429, PAGE, f"Retry-After: {10**30}\r\nConnection: close\r\n"),),
    "busy since then": (status(503, PAGE, "Retry-After: Wed, 21 Oct 2015 07:28:00 GMT\r\nConnection: close\r\n"),),
    "a body without end": (b"HTTP/1.1 500 No\r\n\r\n" + b"x" * (8 * MB),),
    "headers without end": (HEAD[:-2] + b"X: y\r\n" * 100_000,),
    "a header without end": (HEAD[:-2] + b"X: " + b"y" * (8 * MB),),
    "interim answers": (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50_000,),
    "a status without end": (b"HTTP/1.1 " + b"2" * (4 * MB),),
    "a line without end": (HEAD + b"data: " + b"x" * (8 * MB),),
    "lines without end": (HEAD + b"data: x\n" * (MB // 8),),
    "comments": (HEAD + b": x\n\n" * (MB // 8),),
    "events without tokens": (HEAD + event() * 20_000,),
    "counts without end": (HEAD + b'data: {"choices": [], "usage": {"completion_tokens": -1}}\n\n' * 50_000,),
    "an event of ids": (HEAD + event(*[1] * 500_000),),
    "brackets": (HEAD + b"data: " + b"[" * MB + b"\n\n",),
    "a bomb": (HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(64 * MB)),),
    "chunks of a byte": (CHUNKED + b"1\r\nx\r\n" * 200_000,),
    "a chunk of no size": (CHUNKED + b"zz\r\nx",),
    "a chunk too large": (CHUNKED + b"f" * 16 + b"\r\nx",),
    "no length": (HEAD[:-2] + b"Content-Length: -1\r\n\r\n",),
    "nothing": (b"",),
    "no HTTP": (b"\x16\x03\x01" * 1000,),
    "no number": (HEAD + BAD_ID.replace(b"%d", b"NaN"),),
    "a number too large": (HEAD + BAD_ID.replace(b"%d", b"9" * 5000),),
    "an id below all": (HEAD + BAD_ID % -1,),
    "text alone": (HEAD + event(text="Hi", finish="stop"),),
    "an end at once": (HEAD + DONE,),
    "half an event": (HEAD + event(5)[:-3],),
    "an error under 200": (HEAD + f'data: {{"error": {{"message": "{KEY}", "code": 1e9}}}}\n\n'.encode(),),
    "a drip": (HEAD, *[b": x\n\n"] * 10, b""),
}
AFTER_A_TOKEN = {
    "an id of no token": (HEAD + event(10**9) + event(finish="stop") + DONE,),
    "an id of no number": (HEAD + event(2**62) + event(finish="stop") + DONE,),
    "tokens without end": (HEAD + event(5) * 20_000,),
    "a page amid": (HEAD + event(5) + PAGE.encode() * 10_000,),
    "the end again and again": (HEAD + event(5, finish="length") * 20_000,),
    "much after the end": (HEAD + event(5, finish="length") + b": x\n\n" * (MB // 8),),
    "silence amid": (HEAD + event(5), HANG),
}


@pytest.fixture(scope="module")
def hostile() -> Iterator[Server]:
    with listening(owner="lmi-handler") as server:
        server.models["data"][0] |= {"id": "model", "max_model_len": tiny.CONTEXT}
        yield server


@pytest.fixture(scope="module")
def front(hostile: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    model = tiny.make(tmp_path_factory.mktemp("tiny"))
    echo = options(f"option.echo_tokenizer={model}", f"option.max_model_len={tiny.CONTEXT}")
    with pytest.MonkeyPatch.context() as patch, serve("--engine", "echo", *echo) as good:
        patch.setattr(servers, "_PAUSE", 0.01)
        patch.setattr(servers, "_MOST_PAUSE", 0.01)  # else the hostile one would hardly be asked
        good.wait_ready()
        own = options(
            f"option.base_url={hostile.url},{good.url}/v1",
            "option.base_url_timeout=10",
            "option.engine_isolation=thread",
        )
        with serve(str(model), "--engine", "openai", *own) as server:
            server.wait_ready()
            yield server


def play(hostile: Server, front: AppServer, script: tuple[bytes, ...]) -> list[tuple[int, str]]:
    """Have clients ask while the hostile server plays its part; return their answers."""
    hostile.always = script

    def ask(number: int) -> tuple[int, str]:
        answer = front.post({"prompt": f"say {number}", "max_tokens": 4, "temperature": 0}, "/v1/completions")
        return answer.status_code, answer.text

    answers: list[tuple[int, str]] = []

    with answering(front), ThreadPoolExecutor(CLIENTS) as pool:
        before, deadline = len(hostile.received), time.monotonic() + 20
        while len(hostile.received) == before:
            assert time.monotonic() < deadline, "it is not asked"
            answers.extend(pool.map(ask, range(CLIENTS)))
    return answers


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_costs_nobody_an_answer(hostile: Server, front: AppServer, name: str) -> None:
    answers = play(hostile, front, HOSTILE[name])
    assert {code for code, _ in answers} == {200}, answers


@pytest.mark.parametrize("name", AFTER_A_TOKEN)
def test_a_failure_after_a_token_costs_its_requests_and_reveals_nothing(
    hostile: Server, front: AppServer, name: str
) -> None:
    for _, text in play(hostile, front, AFTER_A_TOKEN[name]):
        for secret in (KEY, "10.1.2.3", "localhost", "/opt", "Error:", "<html"):
            assert secret not in text
    hostile.always = (status(503, ""),)
    assert front.post({"prompt": "a", "max_tokens": 4}, "/v1/completions").status_code == 200
