"""Bad input by class: the client is told, with a status of 400 to 499, and nobody else loses anything."""

from __future__ import annotations

import asyncio
import json

from handler.conform import sources
from handler.conform.dialects import change, text_of
from handler.conform.exchange import Answer
from handler.conform.rule import expect, expect_answer, rule, skip
from handler.conform.server import Server

_DEEP = 50_000
"""Objects within objects."""

_LONG = 3_000_000
"""Words, more than contexts hold."""


async def _refuses(server: Server, data: bytes) -> None:
    """Send a bad body; the next good one must be answered."""
    answer = await server.post(await server.path(), data)
    expect(answer.refused, "a status of 400 to 499", answer)
    await _expect_alive(server, answer)


async def _survives(server: Server, data: bytes) -> None:
    """Send a doubtful body, which may be refused or answered; the next good one must be answered."""
    answer = await server.post(await server.path(), data)
    _expect_refused_or_answered(answer)
    await _expect_alive(server, answer)


def _expect_refused_or_answered(answer: Answer) -> None:
    expect(answer.refused or answer.ok, "an answer, or a status of 400 to 499", answer)


async def _expect_alive(server: Server, before: Answer) -> None:
    after = await server.generate(tokens=2)
    expect(after.ok, f"an answer to a good request after {before.asked}", after)


@rule("bad.not-json", "A body that is not JSON is refused.", sources.HTTP)
async def not_json(server: Server) -> None:
    await _refuses(server, b'{"inputs": "one two", "messages": [')


@rule("bad.empty", "An empty body is refused.", sources.HTTP)
async def empty(server: Server) -> None:
    await _refuses(server, b"")


@rule("bad.not-an-object", "JSON that is not an object is refused.", sources.HTTP)
async def not_an_object(server: Server) -> None:
    await _refuses(server, b"[1, 2, 3]")


@rule("bad.utf-8", "A body that is not UTF-8 is refused.", sources.JSON)
async def not_utf_8(server: Server) -> None:
    data = json.dumps(await server.body("one \ufffd two")).encode()
    await _refuses(server, data.replace(b"\\ufffd", b"\xff\xfe"))


@rule("bad.surrogate", "Half of a surrogate pair is refused or answered, and does not fail the server.", sources.JSON)
async def surrogate(server: Server) -> None:
    data = json.dumps(await server.body("one \ufffd two")).encode().replace(b"\\ufffd", b"\\ud800")
    await _survives(server, data)


@rule("bad.deep", f"JSON of {_DEEP:,} levels is refused or answered, and does not fail the server.", sources.JSON)
async def deep(server: Server) -> None:
    data = json.dumps(await server.body()).encode()
    nested = b'{"a":' * _DEEP + b"1" + b"}" * _DEEP
    await _survives(server, data[:-1] + b', "conform": ' + nested + b"}")


@rule("bad.no-prompt", "A body without its prompt is refused.", sources.HTTP)
async def no_prompt(server: Server) -> None:
    body = await server.body()
    body.pop((await server.dialect()).prompt)
    await _refuses(server, json.dumps(body).encode())


@rule("bad.prompt-type", "A prompt that is a number is refused.", sources.HTTP)
async def prompt_type(server: Server) -> None:
    body = change(await server.body(), ((await server.dialect()).prompt,), 7)
    await _refuses(server, json.dumps(body).encode())


@rule("bad.parameter-type", "A token limit that is not a number is refused.", sources.HTTP)
async def parameter_type(server: Server) -> None:
    body = change(await server.body(), (await server.dialect()).tokens, "many")
    await _refuses(server, json.dumps(body).encode())


@rule("bad.parameter-range", "A limit of -1 tokens is refused.", sources.HTTP)
async def parameter_range(server: Server) -> None:
    body = change(await server.body(), (await server.dialect()).tokens, -1)
    await _refuses(server, json.dumps(body).encode())


@rule(
    "bad.parameter-huge", "A limit of 10^30 tokens is refused or reached, and does not fail the server.", sources.HTTP
)
async def parameter_huge(server: Server) -> None:
    body = change(await server.body(), (await server.dialect()).tokens, 10**30)
    async with server.asking_for(await server.path(), body) as (_, task):
        done, _ = await asyncio.wait([task], timeout=min(5.0, server.limits.answer))
        if done:
            _expect_refused_or_answered(task.result())
    await _expect_alive(server, task.result())


@rule("bad.too-long", "A prompt that is longer than the model's context is refused.", sources.HTTP)
async def too_long(server: Server) -> None:
    body = await server.body("a " * _LONG)
    answer = await server.post(await server.path(), body)
    expect(answer.refused, f"a status of 400 to 499 for {_LONG:,} words", answer)


@rule("bad.told", "A refusal has a body that explains it.", sources.INVOKE)
async def told(server: Server) -> None:
    body = change(await server.body(), (await server.dialect()).tokens, "many")
    answer = await server.post(await server.path(), body)
    if not answer.refused:
        skip("nothing was refused: see bad.parameter-type")
    expect(len(answer.text.strip()) >= 8, "a body that says what is wrong", answer)


@rule("bad.alone", "Bad requests do not disturb those that run beside them.", sources.HTTP)
async def alone(server: Server) -> None:
    wanted = text_of(expect_answer(await server.generate(tokens=16)).value)
    dialect, path = await server.dialect(), await server.path()
    bad = change(await server.body(), dialect.temperature, -1)
    worse = change(await server.body(), dialect.tokens, "many")
    good = [server.generate(tokens=16) for _ in range(4)]
    asked = [server.post(path, bad), *good[:2], server.post(path, worse), *good[2:], server.post(path, b"{")]
    answers = await asyncio.gather(*asked)
    for answer in (*answers[1:3], *answers[4:6], await server.generate(tokens=16)):
        expect(answer.ok and text_of(answer.value) == wanted, f"the text {wanted!r}", answer)
