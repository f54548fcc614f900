"""Answers of transcriptions: OpenAI's documents, subtitles (SRT, WebVTT), and the events of a stream."""

from __future__ import annotations

import html
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from handler.core.framing import SSE_DONE
from handler.core.values import Delta, Finish, Heard, Token
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.reply import WholeReply
from handler.protocols.kernel.stream import TokenStream
from handler.protocols.openai.answers import (
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptionSegment,
    TranscriptionUsage,
    VerboseTranscription,
)

_TIME = re.compile(r"<\|(\d{1,2}\.\d\d)\|>")
_UNKNOWN = Heard(0.0, 0.0, "")
_FRAME = 0.01  # seconds: Whisper's own unit of `seek`


class Segment(NamedTuple):
    """A part of a transcript, with its seconds in the clip.

    Attributes:
        piece: where the piece of the clip begins that it was heard in.
    """

    piece: float
    start: float
    end: float
    tokens: Sequence[Token]

    @property
    def text(self) -> str:
        return "".join([token.text for token in self.tokens])


def segments(tokens: Sequence[Token], pieces: Sequence[tuple[int, Heard]]) -> Iterator[Segment]:
    """Split a transcript by its tokens of times. Times never go back, and never past the clip's end.

    Args:
        pieces: of the clip, each with the number of the tokens before it.
    """
    ends = [*pieces, (len(tokens), _UNKNOWN)]
    for (first, heard), (last, _) in pairwise(ends):
        for segment in _of_piece(tokens[first:last], heard):
            if segment.text.strip():
                yield segment


def _of_piece(tokens: Sequence[Token], heard: Heard) -> Iterator[Segment]:
    start, part = heard.start, list[Token]()
    for token in tokens:
        if not token.special:
            part.append(token)
        elif time := _TIME.search(token.text):
            at = min(max(heard.start + float(time[1]), start), heard.end)
            yield Segment(heard.start, start, at, part)
            start, part = at, []
    yield Segment(heard.start, start, heard.end, part)


class TranscriptReply(WholeReply):
    """A whole answer.

    Args:
        form: the response_format.
        task: transcribe or translate.
        temperature: as asked.
    """

    def __init__(self, form: str, task: str, temperature: float) -> None:
        super().__init__(1, special_in_text=False)
        self._task, self._temperature = task, temperature
        self._write = _WRITERS.get(form)
        self._verbose = form == "verbose_json"
        self._pieces: list[tuple[int, Heard]] = []
        if self._write is not None:
            self.content_type = "text/plain; charset=utf-8"

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.extras is not None and delta.extras.heard is not None:
            self._pieces.append((len(self._sequences[0].tokens) if self._pieces else 0, delta.extras.heard))
        data = super().feed(index, delta)
        return self._write(self).encode() if data and self._write is not None else data

    @property
    def text(self) -> str:
        return self._sequences[0].text.strip()

    @property
    def segments(self) -> Iterator[Segment]:
        return segments(self._sequences[0].tokens, self._pieces or [(0, _UNKNOWN)])

    def _document(self) -> Transcription | VerboseTranscription | None:
        if self._write is not None:
            return None
        if self._verbose:
            return self._verbose_document()
        return {"text": self.text, "usage": _usage(self._num_prompt_tokens, len(self._sequences[0].tokens))}

    def _verbose_document(self) -> VerboseTranscription:
        duration = self._pieces[-1][1].end if self._pieces else 0.0
        return {
            "task": self._task,
            "language": self._pieces[0][1].language if self._pieces else "",
            "duration": round(duration, 2),
            "text": self.text,
            "segments": [_segment(number, one, self._temperature) for number, one in enumerate(self.segments)],
            "usage": {"type": "duration", "seconds": math.ceil(duration)},
        }


def _usage(num_prompt: int, num_tokens: int) -> TranscriptionUsage:
    return {
        "type": "tokens",
        "input_tokens": num_prompt,
        "output_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
    }


def _segment(number: int, segment: Segment, temperature: float) -> TranscriptionSegment:
    scores = [token.logprob for token in segment.tokens if token.logprob is not None]
    data = segment.text.encode()
    return {
        "id": number,
        "seek": round(segment.piece / _FRAME),
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": segment.text,
        "tokens": [token.id for token in segment.tokens],
        "temperature": temperature,
        "avg_logprob": sum(scores) / len(scores) if scores else None,
        "compression_ratio": len(data) / len(zlib.compress(data)),
        "no_speech_prob": None,
    }


def _srt(reply: TranscriptReply) -> str:
    return "".join(
        f"{number}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{_line(one.text).replace('-->', '->')}\n\n"
        for number, one in enumerate(reply.segments, 1)
    )


def _vtt(reply: TranscriptReply) -> str:
    return "WEBVTT\n\n" + "".join(
        f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{html.escape(_line(one.text), quote=False)}\n\n"
        for one in reply.segments
    )


def _line(text: str) -> str:
    """Return the text in one line: an empty one would end it."""
    return " ".join(text.split())


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


_WRITERS: Mapping[str, Callable[[TranscriptReply], str]] = {"text": lambda reply: reply.text, "srt": _srt, "vtt": _vtt}
"""Formats that are no JSON."""


class TranscriptStream(TokenStream):
    """OpenAI's events. The texts of all deltas are the text of the last event."""

    def __init__(self, errors: ErrorFormat) -> None:
        super().__init__(errors, SSE_DONE)
        self._texts: list[str] = []
        self._spaces: list[str] = []  # after the text so far: they are shown once more text comes

    def _token(self, place: int, token: Token) -> bytes:
        text = "" if token.special else token.text
        words = text.rstrip()
        if not words:
            self._spaces.append(text)
            return b""
        shown = "".join([*self._spaces, words]) if self._texts else words.lstrip()
        self._spaces = [text[len(words) :]]
        self._texts.append(shown)
        delta: TranscriptDelta = {"type": "transcript.text.delta", "delta": shown}
        return self._framing.encode(delta)

    def _last(self, place: int, token: Token, finish: Finish) -> bytes:
        return self._token(place, token)

    def _end(self) -> bytes:
        usage = _usage(self._num_prompt_tokens, self._num_tokens)
        done: TranscriptDone = {"type": "transcript.text.done", "text": "".join(self._texts), "usage": usage}
        return self._framing.encode(done) + self._framing.end
