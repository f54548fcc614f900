"""Streams: token by token, framed, and the same text as a whole answer."""

from __future__ import annotations

import codecs

from handler.conform import sources
from handler.conform.dialects import change, piece_of, text_of
from handler.conform.exchange import Answer
from handler.conform.rule import Failed, expect, expect_answer, rule, skip
from handler.conform.server import PROMPT, Server

_ENOUGH = 0.05
"""Seconds of a stream whose pace can be seen."""


async def stream(server: Server, tokens: int = 8) -> Answer:
    answer = expect_answer(await server.generate(tokens=tokens, stream=True))
    expect(answer.events, "a stream of JSON lines or events", answer)
    return answer


@rule("stream.token-by-token", "A stream is sent token by token, not held back until its end.", sources.STREAM)
async def token_by_token(server: Server) -> None:
    answer = None
    for tokens in (16, 64, 256):
        found = await server.generate(tokens=tokens, stream=True)
        if not found.ok or len(found.arrivals) < 4:
            break
        answer = found
        total, middle = answer.arrivals[-1], answer.arrivals[len(answer.arrivals) // 2]
        if total >= _ENOUGH and total - middle >= 0.2 * total:
            return
    if answer is None:
        raise Failed("a stream of several tokens", found)
    if answer.arrivals[-1] < _ENOUGH:
        skip(f"{len(answer.arrivals)} tokens came within {1000 * answer.arrivals[-1]:.0f} ms: too fast to tell")
    half, total = answer.arrivals[len(answer.arrivals) // 2], answer.arrivals[-1]
    raise Failed(
        f"half of the {len(answer.arrivals)} events well before the end; they came after {half:.3f} s of {total:.3f}",
        answer,
    )


@rule("stream.one-a-token", "A stream has an event for each token, not a few large ones.", sources.STREAM)
async def one_a_token(server: Server) -> None:
    answer = await stream(server, 16)
    count = len([event for event in answer.events if piece_of(event) or "token" in event])
    expect(count >= 8, f"about 16 events with text for 16 tokens, not {count}", answer)


@rule("stream.chunked", "A stream is chunked: it has no Content-Length.", sources.HTTP_1_1)
async def chunked(server: Server) -> None:
    answer = await stream(server)
    expect("content-length" not in answer.headers, "no Content-Length", answer)
    expect("chunked" in answer.headers.get("transfer-encoding", ""), "Transfer-Encoding: chunked", answer)


@rule("stream.content-type", "A stream's content type is that of its framing.", sources.STREAM)
async def content_type(server: Server) -> None:
    answer = await stream(server)
    wanted = (await server.dialect()).content_type
    known = (wanted,) if wanted else ("application/jsonlines", "application/x-ndjson", "text/event-stream")
    expect(answer.content_type in known, f"the content type {' or '.join(known)}", answer)
    lines = [line for line in answer.text.split("\n") if line.strip()]
    is_sse = answer.content_type == "text/event-stream"
    fields = ("data:", "event:", ":", "id:", "retry:")
    framed = [line for line in lines if line.startswith(fields)]
    expect(len(framed) == (len(lines) if is_sse else 0), f"lines framed as {answer.content_type}", answer)


@rule("stream.clean-end", "A stream ends with HTTP's last chunk: it is not cut.", sources.STREAM)
async def clean_end(server: Server) -> None:
    answer = await server.generate(tokens=8, stream=True)
    expect(answer.status == 200 and answer.is_uncut, "status 200 and a last chunk", answer)


@rule("stream.same-text", "A greedy stream's pieces add up to the whole answer's text.", sources.STREAM)
async def same_text(server: Server) -> None:
    whole = expect_answer(await server.generate(tokens=12))
    if whole.value != (again := await server.generate(tokens=12)).value and text_of(whole.value) != text_of(
        again.value
    ):
        skip("two greedy answers differ")
    answer = await stream(server, 12)
    text = text_of(whole.value)
    expect(text is not None, "a whole answer with text", whole)
    pieces = "".join(map(piece_of, answer.events))
    wanted = (text or "").removeprefix(PROMPT)
    expect(
        pieces.strip() in (wanted.strip(), (text or "").strip()),
        f"pieces that make {text!r}; they make {pieces!r}",
        answer,
    )


@rule("stream.characters", "Every event is valid UTF-8: no character is split over two events.", sources.SSE)
async def characters(server: Server) -> None:
    prompt = "日本語 ünï 👩‍🚀 façade 東京 🙂 naïve Ω " * 2
    answer = expect_answer(await server.generate(prompt, 24, stream=True))
    try:
        codecs.decode(answer.body, "utf-8", "strict")
    except UnicodeDecodeError as error:
        raise Failed(f"UTF-8; byte {error.start} is none", answer) from None
    pieces = list(map(piece_of, answer.events))
    for piece in pieces[:-1]:  # the last one may end amid a character, as max_tokens ends it
        expect("\ufffd" not in piece, f"whole characters, not {piece!r}", answer)


@rule("stream.refused-before", "A bad parameter of a stream is refused before the stream begins.", sources.STREAM)
async def refused_before(server: Server) -> None:
    dialect = await server.dialect()
    body = change(await server.body(stream=True), dialect.temperature, -1)
    answer = await server.post(await server.path(stream=True), body)
    if dialect.refuses_in_stream:
        expect(answer.ok and any("error" in event for event in answer.events), "an event with the error", answer)
    else:
        expect(answer.refused, "a status of 400 to 499", answer)
