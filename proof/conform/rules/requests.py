"""Rules for every API: streams, invalid requests, and clients that disconnect."""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import re
import time
from collections.abc import Awaitable, Callable

from proof.conform import sources
from proof.conform.dialects import Body, GenerationApi, change, piece_of, text_of
from proof.conform.exchange import Response, excerpt
from proof.conform.rule import Failed, expect, expect_refused, expect_response, greedy, rule, skip, succeeded
from proof.conform.rules.hosting import samples
from proof.conform.server import PROMPT, Server
from proof.replay.comparison import Class, Seen, Traits, class_of, findings
from proof.replay.exchange import Recorded, recorded
from proof.routes import ROUTES, Source

_ENOUGH = 0.05
"""Minimum duration, in seconds, of a stream whose pace can be measured."""


async def stream(server: Server, tokens: int = 8) -> Response:
    response = await succeeded(server.generate(tokens=tokens, stream=True))
    expect(response.events, "a stream of JSON lines or events", response)
    return response


@rule("stream.token-by-token", "A stream is sent token by token, not held back until its end.", sources.STREAM)
async def token_by_token(server: Server) -> None:
    response = None
    for tokens in (16, 64, 256):
        candidate = await server.generate(tokens=tokens, stream=True)
        if not candidate.ok or len(candidate.arrivals) < 4:
            break
        response = candidate
        total, middle = response.arrivals[-1], response.arrivals[len(response.arrivals) // 2]
        if total >= _ENOUGH and total - middle >= 0.2 * total:
            return
    if response is None:
        raise Failed("a stream of several tokens", candidate)
    if response.arrivals[-1] < _ENOUGH:
        skip(
            f"{len(response.arrivals)} tokens arrived within {1000 * response.arrivals[-1]:.0f} ms, too fast to measure"
        )
    half, total = response.arrivals[len(response.arrivals) // 2], response.arrivals[-1]
    raise Failed(
        f"half of the {len(response.arrivals)} events well before the end; they came after {half:.3f} of {total:.3f} s",
        response,
    )


@rule("stream.one-a-token", "A stream has an event for each token, not a few large events.", sources.STREAM)
async def event_per_token(server: Server) -> None:
    response = await stream(server, 16)
    count = len([event for event in response.events if piece_of(event) or "token" in event])
    expect(count >= 8, f"about 16 events with text for 16 tokens, not {count}", response)


@rule("stream.chunked", "A stream is chunked: it has no Content-Length.", sources.HTTP_1_1)
async def chunked(server: Server) -> None:
    response = await stream(server)
    expect("content-length" not in response.headers, "no Content-Length", response)
    expect("chunked" in response.headers.get("transfer-encoding", ""), "Transfer-Encoding: chunked", response)


@rule("stream.content-type", "A stream's content type matches its framing.", sources.STREAM)
async def content_type(server: Server) -> None:
    response = await stream(server)
    declared = (await server.dialect()).content_type
    accepted = (declared,) if declared else ("application/jsonlines", "application/x-ndjson", "text/event-stream")
    expect(response.content_type in accepted, f"the content type {' or '.join(accepted)}", response)
    lines = [line for line in response.text.split("\n") if line.strip()]
    is_sse = response.content_type == "text/event-stream"
    fields = ("data:", "event:", ":", "id:", "retry:")
    framed = [line for line in lines if line.startswith(fields)]
    expect(len(framed) == (len(lines) if is_sse else 0), f"lines framed as {response.content_type}", response)


@rule("stream.clean-end", "A stream ends with HTTP's last chunk: it is not cut off.", sources.STREAM)
async def clean_end(server: Server) -> None:
    response = await server.generate(tokens=8, stream=True)
    expect(response.status == 200 and response.is_uncut, "status 200 and a last chunk", response)


@rule("stream.same-text", "The pieces of a greedy stream add up to the whole text.", sources.STREAM)
async def same_text(server: Server) -> None:
    whole = await greedy(server, 12)
    response = await stream(server, 12)
    text = text_of(whole.value)
    expect(text is not None, "a non-streaming response with text", whole)
    pieces = "".join(map(piece_of, response.events))
    generated = (text or "").removeprefix(PROMPT)
    expect(
        pieces.strip() in (generated.strip(), (text or "").strip()),
        f"pieces that add up to {text!r}, not to {pieces!r}",
        response,
    )


@rule("stream.characters", "Every event is valid UTF-8: no character is split over two events.", sources.SSE)
async def characters(server: Server) -> None:
    prompt = "日本語 ünï 👩‍🚀 façade 東京 🙂 naïve Ω " * 2
    response = await succeeded(server.generate(prompt, 24, stream=True))
    try:
        codecs.decode(response.body, "utf-8", "strict")
    except UnicodeDecodeError as error:
        raise Failed(f"UTF-8; byte {error.start} is invalid", response) from None
    pieces = list(map(piece_of, response.events))
    for piece in pieces[:-1]:  # max_tokens may cut the last one within a character
        expect("\ufffd" not in piece, f"whole characters, not {piece!r}", response)


@rule("stream.refused-before", "A stream with an invalid parameter is refused before it starts.", sources.STREAM)
async def refused_before(server: Server) -> None:
    dialect = await server.dialect()
    body = change(await server.body(stream=True), dialect.temperature, -1)
    response = await server.post(await server.path(stream=True), body)
    if dialect.refuses_in_stream:
        expect(response.ok and any("error" in event for event in response.events), "an event with the error", response)
    else:
        expect_refused(response)


# -- routes whose response is a function of the request ----------------------------------------------------------------


_MESSAGES = [{"role": "user", "content": PROMPT}]
_BODIES: tuple[Body, ...] = (
    {"inputs": PROMPT},
    {"model": "{model}", "messages": _MESSAGES},
    {"model": "{model}", "input": PROMPT},
    {"model": "{model}", "query": PROMPT, "documents": [PROMPT, "three"]},
    {"model": "{model}", "text_1": PROMPT, "text_2": "three"},
    {"model": "{model}", "state": PROMPT, "questions": {"q": {"type": "noul", "instructions": PROMPT}}},
    {"model": "{model}", "input": PROMPT, "questions": [{"type": "predicate", "name": "q", "instructions": PROMPT}]},
)
"""Bodies, of which each such route accepts one."""


@rule(
    "repeat.computed",
    "A route that samples nothing gives the same values to the same request, except ids and times.",
    sources.OURS,
    ("tgi", "openai", "anthropic", "decisions"),
)
async def computed(server: Server) -> None:
    paths = [path for (method, path), source in ROUTES.items() if method == "POST" and source is Source.REQUEST]
    answered = False
    for path in (path for path in paths if "{" not in path):
        for body in [await server.with_model(body) for body in _BODIES]:
            first = await server.post(path, body)
            if first.status in (404, 405, 501):
                break
            if first.ok:
                answered = True
                second = expect_response(await server.post(path, body))
                old, new = (recorded(Recorded(200, got.content_type, got.body)) for got in (first, second))
                changes = [item for item in findings(old, new, Traits(True), Seen()) if item.fresh is None]
                expect(class_of(changes) in (Class.EQUAL, Class.TIE), f"the values of {excerpt(first.body)}", second)
                break
    if not answered:
        skip("the server has no route that samples nothing")


# -- invalid requests: the client gets a status of 400 to 499, and no other request is affected -----------------------


_DEEP = 50_000
"""Number of nested objects."""

_LONG = 3_000_000
"""Number of words that exceeds the context of any model."""


async def _refuses(server: Server, data: Body | bytes) -> None:
    """Send an invalid body, which must be refused. The server must then respond to a valid request."""
    response = await server.post(await server.path(), data)
    expect_refused(response)
    await _expect_alive(server, response)


async def _survives(server: Server, data: bytes) -> None:
    """Send a body that may be refused or answered. The server must then respond to a valid request."""
    response = await server.post(await server.path(), data)
    _expect_complete(response)
    await _expect_alive(server, response)


def _expect_complete(response: Response) -> None:
    expect(response.refused or response.ok, "status 200, or a status of 400 to 499", response)


async def _expect_alive(server: Server, before: Response) -> None:
    after = await server.generate(tokens=2)
    expect(after.ok, f"a complete response to a valid request after {before.request}", after)


def _add_refused(id: str, sentence: str, invalid: Callable[[GenerationApi, Body], Body | bytes]) -> None:
    """Add a rule about an invalid body, which `invalid` makes from the API and a valid body."""

    async def check(server: Server) -> None:
        await _refuses(server, invalid(await server.dialect(), await server.body()))

    rule(id, sentence, sources.OURS)(check)


_add_refused("bad.not-json", "A body that is not JSON is refused.", lambda *_: b'{"inputs": "one two", "messages": [')
_add_refused("bad.empty", "An empty body is refused.", lambda *_: b"")
_add_refused("bad.not-an-object", "JSON that is not an object is refused.", lambda *_: b"[1, 2, 3]")


@rule("bad.utf-8", "A body that is not UTF-8 is refused.", sources.JSON)
async def not_utf_8(server: Server) -> None:
    data = json.dumps(await server.body("one \ufffd two")).encode()
    await _refuses(server, data.replace(b"\\ufffd", b"\xff\xfe"))


@rule("bad.surrogate", "A lone surrogate is refused or answered, and does not crash the server.", sources.JSON)
async def surrogate(server: Server) -> None:
    data = json.dumps(await server.body("one \ufffd two")).encode().replace(b"\\ufffd", b"\\ud800")
    await _survives(server, data)


@rule(
    "bad.deep",
    f"JSON nested {_DEEP:,} levels deep is refused or answered, and does not crash the server.",
    sources.JSON,
)
async def deep(server: Server) -> None:
    data = json.dumps(await server.body()).encode()
    nested = b'{"a":' * _DEEP + b"1" + b"}" * _DEEP
    await _survives(server, data[:-1] + b', "conform": ' + nested + b"}")


_add_refused(
    "bad.no-prompt",
    "A body without a prompt is refused.",
    lambda dialect, body: {name: value for name, value in body.items() if name != dialect.prompt},
)
_add_refused(
    "bad.prompt-type",
    "A prompt that is a number is refused.",
    lambda dialect, body: change(body, (dialect.prompt,), 7),
)
_add_refused(
    "bad.parameter-type",
    "A token limit that is not a number is refused.",
    lambda dialect, body: change(body, dialect.tokens, "many"),
)
_add_refused(
    "bad.parameter-range",
    "A limit of -1 tokens is refused.",
    lambda dialect, body: change(body, dialect.tokens, -1),
)


@rule("bad.parameter-huge", "A limit of 10^30 tokens does not crash the server.", sources.OURS)
async def parameter_huge(server: Server) -> None:
    body = change(await server.body(), (await server.dialect()).tokens, 10**30)
    async with server.asking_for(await server.path(), body) as (_, task):
        done, _ = await asyncio.wait([task], timeout=min(5.0, server.limits.response))
        if done:
            _expect_complete(task.result())
    await _expect_alive(server, task.result())


@rule("bad.too-long", "A prompt that is longer than the model's context is refused.", sources.OURS)
async def too_long(server: Server) -> None:
    body = await server.body("a " * _LONG)
    expect_refused(await server.post(await server.path(), body), f" for {_LONG:,} words")


@rule("bad.told", "A refusal has a body that explains it.", sources.INVOKE)
async def explained(server: Server) -> None:
    body = change(await server.body(), (await server.dialect()).tokens, "many")
    response = await server.post(await server.path(), body)
    if not response.refused:
        skip("the request was not refused: see bad.parameter-type")
    expect(len(response.text.strip()) >= 8, "a body that explains the error", response)


@rule("bad.alone", "Invalid requests do not affect other running requests.", sources.OURS)
async def alone(server: Server) -> None:
    beside = await asyncio.gather(*(server.generate(tokens=16) for _ in range(4)))
    texts = {text_of(expect_response(response).value) for response in (*beside, await greedy(server, 16))}
    if len(texts) > 1:
        skip("concurrent greedy responses differ")
    (expected_text,) = texts
    dialect, path = await server.dialect(), await server.path()
    bad = change(await server.body(), dialect.temperature, -1)
    worse = change(await server.body(), dialect.tokens, "many")
    good = [server.generate(tokens=16) for _ in range(4)]
    requests = [server.post(path, bad), *good[:2], server.post(path, worse), *good[2:], server.post(path, b"{")]
    responses = await asyncio.gather(*requests)
    for response in (*responses[1:3], *responses[4:6], await server.generate(tokens=16)):
        expect(response.ok and text_of(response.value) == expected_text, f"the text {expected_text!r}", response)


# -- clients that disconnect: a gauge of the metrics, or the server's speed, shows whether the engine stops -----------


_GAUGES = re.compile(
    r"vllm:num_requests_running|lmi_active_sequences|tgi_batch_current_size|llamacpp:requests_processing"
    r"|dynamo_(frontend|component)_inflight_requests|sglang:num_running_reqs|trtllm_num_requests_running"
)
"""Matches the names of gauges for running requests in known servers."""

_CROWD = 4
"""Number of requests to abandon at once on a server without a gauge for running requests."""


@rule("disconnect.stream", "The engine stops when the client of a stream disconnects.", sources.OURS)
async def disconnect_stream(server: Server) -> None:
    body, seconds = await server.long_stream(server.limits.long)
    await _abandon(server, await server.path(stream=True), body, seconds)


@rule("disconnect.whole", "The engine stops when the client of a non-streaming request disconnects.", sources.OURS)
async def disconnect_whole(server: Server) -> None:
    body, seconds = await server.long_stream(server.limits.long)
    body = {name: value for name, value in body.items() if name != "stream"}
    await _abandon(server, await server.path(), body, seconds)


async def _abandon(server: Server, path: str, body: Body, seconds: float) -> None:
    """Send a request, disconnect, and check that the engine stops early.

    Args:
        seconds: the duration of the response if the engine does not stop.
    """
    if await _running(server) is None:
        await _by_speed(server, path, body, seconds)
        return
    idle = await _steady(server)
    hidden = f"no gauge in {server.asking.metrics} shows the request"
    start = time.monotonic()
    async with server.asking_for(path, body) as (_, task):
        while (await _running(server) or 0.0) <= idle:
            if task.done():
                skip(f"{hidden}, which ended after {task.result().seconds:.1f} s")
            if time.monotonic() - start > server.limits.response:
                skip(hidden)
            await asyncio.sleep(0.01)
    gone = time.monotonic()
    until = min(gone + server.limits.abandoned, start + 0.8 * seconds)
    if until < gone + 0.1:
        skip(f"responses of {seconds:.1f} s are too short for this measurement")
    while (running := await _running(server) or 0.0) > idle:
        if time.monotonic() > until:
            raise Failed(
                f"the end of the request within {until - gone:.1f} s of its client's disconnection",
                request=f"POST {path}, a request of {seconds:.0f} s, cut off while it ran",
                got=f"{running - idle:g} more running requests than before, according to {server.asking.metrics}",
            )
        await asyncio.sleep(0.02)


async def _running(server: Server) -> float | None:
    """Return the number of running requests, or None if the metrics have no gauge for them."""
    response = await server.metrics()
    gauges = [value for name, value in samples(response).items() if _GAUGES.match(name)] if response.ok else []
    return max(gauges) if gauges else None


async def _steady(server: Server) -> float:
    """Wait up to a second for earlier requests to end, and return the lowest number of running requests."""
    lowest = await _running(server) or 0.0
    for _ in range(10):
        if not lowest:
            break
        await asyncio.sleep(0.1)
        lowest = min(lowest, await _running(server) or 0.0)
    return lowest


async def _by_speed(server: Server, path: str, body: Body, seconds: float) -> None:
    """Check, with two trials, that concurrent requests slow the server down only until their clients disconnect."""
    findings = [await _slow_after_a_crowd(server, path, body, seconds) for _ in range(2)]
    if all(findings):
        raise Failed(
            "the previous speed after the clients have disconnected",
            request=f"POST {path}, {_CROWD} requests of {seconds:.0f} s, cut off while they ran",
            got=findings[-1],
        )
    if any(findings):
        skip("only one of two trials failed; the machine was probably busy")


async def _slow_after_a_crowd(server: Server, path: str, body: Body, seconds: float) -> str:
    """Return evidence that the server continued to generate abandoned responses, or "" if it did not.

    A server that generates abandoned responses completely is slow at first and fast again later. A server that stays
    slow is probably busy with other requests.
    """

    async def seconds_once() -> float:
        return (await succeeded(server.generate(tokens=16))).seconds

    async def fastest() -> float:
        return min([await seconds_once() for _ in range(3)])

    alone = await fastest()
    start = time.monotonic()
    crowded = await _beside(server, path, body, fastest)
    if crowded < 1.5 * alone:
        skip(f"{server.asking.metrics} has no gauge of running requests, and {_CROWD} requests do not slow it down")
    gone = time.monotonic()
    left = seconds - (gone - start) * alone / crowded  # lower bound of the time that the crowd would still take
    await asyncio.sleep(min(0.5, server.limits.abandoned))
    fast = math.sqrt(alone * crowded)
    after: list[float] = []
    while len(after) < 3:
        after.append(await seconds_once())
        if after[-1] <= fast:
            if time.monotonic() > gone + 0.8 * left:
                skip(f"responses of {seconds:.1f} s are too short for this measurement")
            return ""
    until = gone + min(server.limits.patience, 2 * left * crowded / alone)
    while await seconds_once() > fast:
        if time.monotonic() > until:
            skip("the server stays slow after the responses must have ended: it is probably busy")
    return (
        f"a response took {alone:.2f} s alone, {crowded:.2f} s during the requests, and {min(after):.2f} s after "
        f"they were cut off; the server was fast again {time.monotonic() - gone:.0f} s later"
    )


async def _beside(server: Server, path: str, body: Body, measure: Callable[[], Awaitable[float]]) -> float:
    """Return the result of `measure`, called while `_CROWD` requests are running."""

    async def wait_until(until: asyncio.Event) -> None:
        async with server.asking_for(path, body):
            await until.wait()

    until = asyncio.Event()
    crowd = [asyncio.ensure_future(wait_until(until)) for _ in range(_CROWD)]
    try:
        await asyncio.sleep(0.1)
        return await measure()
    finally:
        until.set()
        await asyncio.gather(*crowd, return_exceptions=True)
