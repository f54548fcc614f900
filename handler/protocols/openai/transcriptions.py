"""OpenAI's /v1/audio/transcriptions and /v1/audio/translations: forms with a file, as its clients send them, or JSON.

Sources: OpenAI's API reference, "Create transcription"; vllm/entrypoints/speech_to_text/transcription/protocol.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.media import MediaSource, Upload
from handler.core.values import FieldNames, Request, Sampling, TemplateOptions
from handler.protocols.kernel.base import Dialect, ParsedRequest
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import Parameter, Table, read_all, unsupported
from handler.protocols.kernel.readers.body import report_unknown
from handler.protocols.kernel.readers.lax import PYDANTIC, relaxed_by
from handler.protocols.kernel.readers.media import place, read_base64
from handler.protocols.kernel.readers.values import boolean, number
from handler.protocols.kernel.schema.readers import accepts
from handler.protocols.kernel.schema.shapes import TEXT, Shape
from handler.protocols.openai.errors import ERRORS
from handler.protocols.openai.parameters import MODEL, harmless, read_model
from handler.protocols.openai.request import streaming, unknown_fields
from handler.protocols.openai.transcripts import TranscriptReply, TranscriptStream

_TIMED = frozenset({"verbose_json", "srt", "vtt"})
_FORMATS = ("json", "text", *sorted(_TIMED))
_NO_WORDS = "the engine gives the times of segments; write segment"
_SECONDS, _TOKENS = 30, 448  # of one of Whisper's windows
_MOST_PROMPT = 1 << 14  # characters


@accepts(enum=[*_FORMATS])
def _response_format(value: Any) -> str:
    if value == "diarized_json":
        raise ValueError("is not supported: Whisper does not tell speakers apart")
    if value not in _FORMATS:
        raise ValueError(f"must be {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}")
    return str(value)


@accepts(anyOf=[{"const": "segment"}, {"type": "array", "items": {"const": "segment"}}])
def _granularities(value: Any) -> bool:
    named = value if isinstance(value, list) else [value]
    if "word" in named:
        raise ValueError(f"is not supported: {_NO_WORDS}")
    if any(one != "segment" for one in named):
        raise ValueError("must be a list with segment")
    return bool(named)


@accepts(type="string", maxLength=32)
def _language(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 32:
        raise ValueError("must be the language's code, such as en")
    return value.lower()


@accepts(type="string", maxLength=_MOST_PROMPT)
def _prompt(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_PROMPT:
        raise ValueError(f"must be a string of at most {_MOST_PROMPT} characters")
    return value


def _table(**more: Parameter) -> Table:
    return Table(
        {
            "prompt": Parameter("words", _prompt),
            "response_format": Parameter("format", _response_format),
            "temperature": Parameter("warmth", number(0, 1)),
            "stream": Parameter("stream", boolean),
            "timestamp_granularities": Parameter("granularities", _granularities),
            "timestamp_granularities[]": Parameter("granularities", _granularities),
            "include": unsupported("log-probabilities of tokens are not written", []),
            "include[]": unsupported("log-probabilities of tokens are not written", []),
            **more,
        }
    )


TABLES: Mapping[str, Table] = {
    "transcribe": _table(
        language=Parameter("language", _language),
        chunking_strategy=unsupported("clips are cut into pieces of 30 s", "auto"),
    ),
    "translate": _table(language=Parameter("language", _language), to_language=unsupported("it is English", "en")),
}
"""By Whisper's task."""

_RELAX = {task: relaxed_by(PYDANTIC, table.shapes) for task, table in TABLES.items()}  # in a form all are texts

FIELDS: Mapping[str, Shape] = {
    "file": {**TEXT, "description": "The audio file: a form's file, or its base64 in JSON"},
    **MODEL,
}


class Transcriptions(Dialect):
    """What a clip says; `task` is Whisper's: transcribe, or translate into English."""

    errors = ERRORS
    forms = True

    def __init__(self, name: str, task: str) -> None:
        self.name, self.task = name, task
        self._read = FIELDS.keys() | TABLES[task].parameters.keys()

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload("the body must be a form or a JSON object with 'file'")
        body = _RELAX[self.task](body)
        _, adapter = read_model(body, context)
        others = read_all(body, context, defaults={}, table=TABLES[self.task]).others
        ignored = [*report_unknown(unknown_fields(body, self._read), body, context), *harmless(body, self._read)]
        source = _read_file(body.get("file"), context)
        form, timed = _form(others)
        asked = {"task": self.task, "language": others.get("language", ""), "prompt": others.get("words", "")}
        windows = -(-context.config.max_audio_seconds // _SECONDS)
        temperature = others.get("warmth", 0.0)
        sampling = Sampling(
            max_new_tokens=windows * _TOKENS,
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            skip_special_tokens=not timed,  # times are such tokens
        )
        request = Request(
            "",
            sampling,
            messages=({"role": "user", "content": [place(source)]},),
            media=(source,),
            transcribes=True,
            template=TemplateOptions(arguments=(*asked.items(), *([("timestamps", True)] if timed else []))),
            fill_context=True,
            adapter=adapter,
            names=FieldNames(prompt="file"),
        )
        if others.get("stream"):
            return streaming((request,), TranscriptStream(self.errors), self.errors, ignored)
        return ParsedRequest([request], TranscriptReply(form, self.task, temperature), self.errors, ignored)


def _form(others: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the response_format, and whether it has times."""
    form = others.get("format", "json")
    if others.get("granularities") and form != "verbose_json":
        raise InvalidParameter("timestamp_granularities: needs response_format=verbose_json")
    if others.get("stream") and form in _TIMED:
        raise InvalidParameter(f"response_format={form}: a stream has no times; write json, or leave stream out")
    return form, form in _TIMED


def _read_file(value: Any, context: ServerContext) -> MediaSource:
    if value is None or value == "":
        raise InvalidPayload("'file' is required: the audio, as a form's file, or in base64 in JSON")
    if reason := context.no_media.get("audio", "the engine reads text only"):
        raise InvalidPayload(f"'file' is not supported: {reason}")
    source = read_base64("audio", value, "file") if isinstance(value, str) else None
    if source is None and isinstance(value, Upload):
        source = MediaSource("audio", value.data, "", "file")
    if source is None:
        raise InvalidPayload("'file' must be a form's file, or a string of base64")
    if (size := len(source.data or b"")) > (most := context.config.max_audio_bytes):
        raise InvalidPayload(f"'file' has {size} bytes; at most {most} (option.max_audio_bytes)")
    return source
