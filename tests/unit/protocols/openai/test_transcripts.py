"""Segments of transcripts: whatever times a model writes, they go forward within the clip, and no text is lost."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as some

from handler.core.values import Delta, Extras, Finish, Heard, Token
from handler.protocols.openai.api import ERRORS
from handler.protocols.openai.audio import TranscriptReply, TranscriptStream, segments

_PIECES = ((0.0, 29.5), (29.5, 40.0))


def _time(seconds: float) -> Token:
    return Token(9, f"<|{seconds:.2f}|>", None, True)


_TOKENS = some.one_of(
    some.floats(0, 30).map(_time),
    some.sampled_from([" a", "b", "\n", "\ufffd<|"]).map(lambda text: Token(1, text, -1, False)),
    some.just(Token(2, "<|nospeech|>", None, True)),
)


@given(some.lists(_TOKENS, max_size=30), some.integers(0, 30))
def test_times_go_forward_and_no_text_is_lost(tokens: list[Token], first: int) -> None:
    first = min(first, len(tokens))
    pieces = [(number, Heard(*place, "en")) for number, place in zip((0, first), _PIECES, strict=True)]
    found = list(segments(tokens, pieces))
    times = [time for segment in found for time in (segment.start, segment.end)]
    assert times == sorted(times)
    assert all(0 <= time <= 40 for time in times)
    shown = "".join(token.text for token in tokens if not token.special)
    assert "".join(segment.text for segment in found).split() == shown.split()


@given(some.lists(some.text(" \n\tab", max_size=4), max_size=20))
def test_the_deltas_of_a_stream_are_its_text(texts: list[str]) -> None:
    stream = TranscriptStream(ERRORS)
    tokens = [Token(1, text, None, False) for text in texts]
    data = b"".join(stream.feed(0, Delta(1, 0, (token,))) for token in tokens)
    data += stream.feed(0, Delta(1, 0, (), Finish.EOS))
    reply = TranscriptReply("text", "transcribe", 0)
    whole = reply.feed(0, Delta(1, 0, tokens, Finish.EOS)).decode()
    *events, end = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    assert end == b"[DONE]"
    *deltas, done = map(orjson.loads, events)
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == whole


def test_a_subtitle_is_one_line_whatever_its_text() -> None:
    tokens = [Token(1, " a\n\n1\n00:00:00,000 --> 00:00:01,000\r\nb\u2028", None, False)]
    for form in ("srt", "vtt"):
        reply = TranscriptReply(form, "transcribe", 0)
        text = reply.feed(0, Delta(1, 0, tokens, Finish.EOS, extras=Extras(heard=Heard(0, 3700.5, "en")))).decode()
        assert text.count("-->") == 1
        assert "01:01:40" in text
        assert len(text.strip().split("\n\n")) == (1 if form == "srt" else 2)
