"""OpenAI's /v1/audio/transcriptions and /v1/audio/translations, which accept forms and JSON bodies.

Sources: OpenAI's API reference, "Create transcription"; vllm/entrypoints/speech_to_text/transcription/protocol.py.
"""

from __future__ import annotations

import html
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import SSE_DONE
from handler.core.media import MediaSource, Upload
from handler.core.values import Delta, FieldNames, Finish, Heard, Request, Sampling, TemplateOptions, Token
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, ParsedRequest
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.messages import media_part, read_base64
from handler.protocols.kernel.parameters import Parameter, Table, read_all, request_shape, unsupported
from handler.protocols.kernel.readers import boolean, number
from handler.protocols.kernel.reply import TokenStream, WholeReply
from handler.protocols.kernel.schema import TEXT, Shape, accepts
from handler.protocols.openai.api import (
    OpenAiError,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptionSegment,
    TranscriptionUsage,
    VerboseTranscription,
)
from handler.protocols.openai.request import MODEL, OpenAiDialect, streaming

_TIME = re.compile(r"<\|([0-9]{1,2}\.[0-9][0-9])\|>")
_UNKNOWN = Heard(0.0, 0.0, "")
_FRAME = 0.01  # seconds; Whisper's unit for `seek`


class Segment(NamedTuple):
    """A segment of a transcript. Times are seconds from the beginning of the audio.

    Attributes:
        piece: the start of the piece of audio that contains the segment.
        start: the start of the segment.
        end: the end of the segment.
    """

    piece: float
    start: float
    end: float
    tokens: Sequence[Token]

    @property
    def text(self) -> str:
        return "".join([token.text for token in self.tokens])


def segments(tokens: Sequence[Token], pieces: Sequence[tuple[int, Heard]]) -> Iterator[Segment]:
    """Split a transcript at its timestamp tokens. Times never decrease or exceed the end of the audio.

    Args:
        tokens: the tokens of the transcript.
        pieces: the pieces of the audio, each with the number of transcript tokens before it.
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
    """A transcript as a non-streaming response.

    Args:
        form: the value of `response_format`.
        task: whisper's task: transcribe or translate.
        temperature: the requested temperature.
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
            "segments": [_segment(number, segment, self._temperature) for number, segment in enumerate(self.segments)],
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
        f"{number}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{_line(s.text).replace('-->', '->')}\n\n"
        for number, s in enumerate(reply.segments, 1)
    )


def _vtt(reply: TranscriptReply) -> str:
    return "WEBVTT\n\n" + "".join(
        f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{html.escape(_line(s.text), quote=False)}\n\n"
        for s in reply.segments
    )


def _line(text: str) -> str:
    """Return the text without line breaks, because an empty line would end the subtitle."""
    return " ".join(text.split())


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, remainder = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{remainder // 1000:02}{point}{remainder % 1000:03}"


_WRITERS: Mapping[str, Callable[[TranscriptReply], str]] = {"text": lambda reply: reply.text, "srt": _srt, "vtt": _vtt}
"""Maps response formats other than JSON to the functions that write them."""


class TranscriptStream(TokenStream):
    """A transcript as a stream of OpenAI events. The text of the last event is the concatenation of all deltas."""

    def __init__(self, errors: ErrorFormat) -> None:
        super().__init__(errors, SSE_DONE)
        self._texts: list[str] = []
        self._spaces: list[str] = []  # the whitespace after the last text, sent when more text follows

    def _token(self, position: int, token: Token) -> bytes:
        text = "" if token.special else token.text
        words = text.rstrip()
        if not words:
            self._spaces.append(text)
            return b""
        output = "".join([*self._spaces, words]) if self._texts else words.lstrip()
        self._spaces = [text[len(words) :]]
        self._texts.append(output)
        delta: TranscriptDelta = {"type": "transcript.text.delta", "delta": output}
        return self._framing.encode(delta)

    def _last(self, position: int, token: Token, finish: Finish) -> bytes:
        return self._token(position, token)

    def _end(self) -> bytes:
        usage = _usage(self._num_prompt_tokens, self._num_tokens)
        done: TranscriptDone = {"type": "transcript.text.done", "text": "".join(self._texts), "usage": usage}
        return self._framing.encode(done) + self._framing.end


_TIMED = frozenset({"verbose_json", "srt", "vtt"})
_FORMATS = ("json", "text", *sorted(_TIMED))
_NO_WORDS = 'the engine reports timestamps of segments, not of words; use "segment"'
_SECONDS, _TOKENS = 30, 448  # the length of Whisper's window, and its maximum number of tokens
_MOST_PROMPT = 1 << 14  # characters


@accepts(enum=[*_FORMATS])
def _response_format(value: Any) -> str:
    if value == "diarized_json":
        raise ValueError("is not supported: Whisper does not distinguish speakers")
    if value not in _FORMATS:
        raise ValueError(f"must be {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}")
    return str(value)


@accepts(anyOf=[{"const": "segment"}, {"type": "array", "items": {"const": "segment"}}])
def _granularities(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    if "word" in names:
        raise ValueError(f"is not supported: {_NO_WORDS}")
    if any(name != "segment" for name in names):
        raise ValueError("must be segment, or a list that contains only segment")
    return bool(names)


@accepts(type="string", maxLength=32)
def _language(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 32:
        raise ValueError("must be the code of a language, such as en")
    return value.lower()


@accepts(type="string", maxLength=_MOST_PROMPT)
def _prompt(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_PROMPT:
        raise ValueError(f"must be a string of at most {_MOST_PROMPT} characters")
    return value


_SINGLE_TRANSCRIPT = "a request gets exactly one transcript, without beam search"
_OF_VLLM: Mapping[str, Parameter] = {
    "hotwords": unsupported("add the words to prompt", ""),
    "max_completion_tokens": unsupported("a transcript is never cut off"),
    "n": unsupported(_SINGLE_TRANSCRIPT, 1),
    "use_beam_search": unsupported(_SINGLE_TRANSCRIPT, False),
    "length_penalty": unsupported(_SINGLE_TRANSCRIPT, 1),
    "top_p": unsupported("use temperature", 1),
    "top_k": unsupported("use temperature", 0, -1),
    "min_p": unsupported("use temperature", 0),
    "seed": unsupported("transcripts are reproducible only with temperature=0"),
    "repetition_penalty": unsupported("no engine supports it for transcripts", 1),
    "presence_penalty": unsupported("no engine supports it for transcripts", 0),
    "frequency_penalty": unsupported("no engine supports it for transcripts", 0),
    "include_stop_str_in_output": unsupported("a transcript has no stop strings", False),
    "stream_include_usage": Parameter("", boolean),  # the last event always has it
    "stream_continuous_usage_stats": unsupported("only the last event has the usage", False),
    "vllm_xargs": unsupported("the engines have no extensions that read it", {}, "", "{}"),
    "watermarking": unsupported("no engine supports watermarks", False),
}
"""vLLM's fields (vllm/entrypoints/speech_to_text/*/protocol.py, 0.33)."""


def _table(**more: Parameter) -> Table:
    return Table(
        {
            "prompt": Parameter("words", _prompt),
            "response_format": Parameter("format", _response_format),
            "temperature": Parameter("warmth", number(0, 1)),
            "stream": Parameter("stream", boolean),
            "timestamp_granularities": Parameter("granularities", _granularities),
            "timestamp_granularities[]": Parameter("granularities", _granularities),
            "include": unsupported("log-probabilities of tokens are not returned", []),
            "include[]": unsupported("log-probabilities of tokens are not returned", []),
            **_OF_VLLM,
            **more,
        }
    )


_SILENCE = "UklGRjQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YRAAAAAAAAAAAAAAAAAAAAAAAAAA"
"""A WAV file of one millisecond, in base64."""


class Transcriptions(OpenAiDialect):
    """The dialect that transcribes audio.

    Attributes:
        task: whisper's task: transcribe or translate.
    """

    name, task = "openai_transcriptions", "transcribe"
    forms = "with the audio clip as the file 'file'"
    needed = "a form or a JSON object with 'file'"
    table = _table(
        language=Parameter("language", _language),
        to_language=unsupported("use /v1/audio/translations", ""),
        chunking_strategy=unsupported("audio is always split into pieces of 30 s", "auto"),
    )
    fields: Mapping[str, Shape] = {
        "file": {**TEXT, "description": "The audio, as a file in a form or as base64 in JSON"},
        **MODEL,
    }
    description = Description(
        title="OpenAI transcription",
        request="OpenAiTranscriptionRequest",
        request_shape=request_shape(fields, table, "file"),
        error=OpenAiError,
        example={"model": "", "file": _SILENCE},
        response=Transcription | VerboseTranscription,
        chunk=TranscriptDelta | TranscriptDone,
        streams=(SSE_DONE.content_type,),
        texts=True,
    )

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        adapter = self.read_model(body, context, request_context)[1]
        others = read_all(body, context, defaults={}, table=self.table).others
        ignored = self.ignored(body, context)
        source = _read_file(body.get("file"), context)
        form = _form(others)
        arguments: dict[str, Any] = {
            "task": self.task,
            "language": others.get("language", ""),
            "prompt": others.get("words", ""),
        }
        if form in _TIMED:
            arguments["timestamps"] = True
        temperature = others.get("warmth", 0.0)
        request = Request(
            "",
            Sampling(
                max_new_tokens=_TOKENS * math.ceil(context.config.max_audio_seconds / _SECONDS),
                do_sample=temperature > 0,
                temperature=temperature or 1.0,
                logprobs=form == "verbose_json",
                skip_special_tokens=form not in _TIMED,  # timestamps are special tokens
            ),
            messages=({"role": "user", "content": [media_part(source)]},),
            media=(source,),
            transcribes=True,
            template=TemplateOptions(arguments=tuple(arguments.items())),
            fill_context=True,
            adapter=adapter,
            names=FieldNames(prompt="file"),
        )
        if others.get("stream"):
            return streaming((request,), TranscriptStream(self.errors), self.errors, ignored)
        return ParsedRequest([request], TranscriptReply(form, self.task, temperature), self.errors, ignored)


class Translations(Transcriptions):
    """The dialect that translates audio into English."""

    name, task = "openai_translations", "translate"
    table = _table(language=Parameter("language", _language), to_language=unsupported("the response is English", "en"))
    description = Transcriptions.description._replace(
        title="OpenAI translation",
        request="OpenAiTranslationRequest",
        request_shape=request_shape(Transcriptions.fields, table, "file"),
    )


def _form(others: Mapping[str, Any]) -> str:
    """Return `response_format`, after checking that other parameters do not contradict it."""
    form: str = others.get("format", "json")
    if others.get("granularities") and form != "verbose_json":
        raise InvalidParameter("timestamp_granularities: needs response_format=verbose_json")
    if others.get("stream") and form in _TIMED:
        raise InvalidParameter(f"response_format={form}: a stream has no timestamps; use json, or omit stream")
    return form


def _read_file(value: Any, context: ServerContext) -> MediaSource:
    if value is None or value == "":
        raise InvalidPayload("'file' is required: send the audio as a file in a form, or as base64 in JSON")
    if reason := context.no_media.get("audio", "the engine accepts only text"):
        raise InvalidPayload(f"'file' is not supported: {reason}")
    source = read_base64("audio", value, "file") if isinstance(value, str) else None
    if source is None and isinstance(value, Upload):
        source = MediaSource("audio", value.data, "", "file")
    if source is None:
        raise InvalidPayload("'file' must be a file in a form, or a base64 string")
    if (size := len(source.data or b"")) > (most := context.config.max_audio_bytes):
        raise InvalidPayload(f"'file' has {size} bytes; the maximum is {most} (option.max_audio_bytes)")
    return source
