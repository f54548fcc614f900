"""OpenAI's /v1/audio/transcriptions and /v1/audio/translations: forms with a file, as its clients send them, or JSON.

Sources: OpenAI's API reference, "Create transcription"; vllm/entrypoints/openai/speech_to_text/protocol.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.media import MediaSource, Upload
from handler.core.values import Delta, FieldNames, Request, Sampling, TemplateOptions
from handler.protocols.kernel.base import Dialect, ParsedRequest
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import Parameter, Table, read_all, unsupported
from handler.protocols.kernel.readers.body import report_unknown
from handler.protocols.kernel.readers.media import place, read_base64
from handler.protocols.kernel.readers.values import number
from handler.protocols.kernel.reply import WholeReply
from handler.protocols.kernel.schema.readers import accepts
from handler.protocols.kernel.schema.shapes import TEXT, Shape
from handler.protocols.openai.answers import Transcription
from handler.protocols.openai.errors import ERRORS
from handler.protocols.openai.parameters import MODEL, harmless, read_model
from handler.protocols.openai.request import unknown_fields

_NO_TIMES = "the engine gives the text alone; write json or text"
_FORMATS = {"json": "", "text": "", **dict.fromkeys(("verbose_json", "srt", "vtt", "diarized_json"), _NO_TIMES)}
_SECONDS, _TOKENS = 30, 448  # of one of Whisper's windows
_MOST_PROMPT = 1 << 14  # characters


@accepts(enum=[name for name, why in _FORMATS.items() if not why])
def _response_format(value: Any) -> str:
    why = _FORMATS.get(value) if isinstance(value, str) else None
    if why is None:
        raise ValueError("must be json or text")
    if why:
        raise ValueError(f"is not supported: {why}")
    return str(value)


@accepts(type="string", maxLength=32)
def _language(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 32:
        raise ValueError("must be the language's code, as en")
    return value.lower()


@accepts(type="string", maxLength=_MOST_PROMPT)
def _prompt(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_PROMPT:
        raise ValueError(f"must be a string of at most {_MOST_PROMPT} characters")
    return value


@accepts(type="number", minimum=0, maximum=1)
def _temperature(value: Any) -> float:
    """Read OpenAI's temperature; in a form it is a text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError("must be a number") from None
    return number(0, 1)(value)


def _table(**more: Parameter) -> Table:
    return Table(
        {
            "prompt": Parameter("words", _prompt),
            "response_format": Parameter("format", _response_format),
            "temperature": Parameter("warmth", _temperature),
            "stream": unsupported("the engine gives the text at its end; leave it out", False, "false"),
            "timestamp_granularities": unsupported(_NO_TIMES, []),
            "timestamp_granularities[]": unsupported(_NO_TIMES, []),
            "include": unsupported("the engine gives the text alone", []),
            "include[]": unsupported("the engine gives the text alone", []),
            **more,
        }
    )


TABLES: Mapping[str, Table] = {
    "transcribe": _table(
        language=Parameter("language", _language),
        chunking_strategy=unsupported("clips are cut by Whisper's own windows", "auto"),
    ),
    "translate": _table(language=Parameter("language", _language), to_language=unsupported("it is English", "en")),
}
"""By Whisper's task."""

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
        _, adapter = read_model(body, context)
        others = read_all(body, context, defaults={}, table=TABLES[self.task]).others
        ignored = [*report_unknown(unknown_fields(body, self._read), body, context), *harmless(body, self._read)]
        source = _read_file(body.get("file"), context)
        asked = {"task": self.task, "language": others.get("language", ""), "prompt": others.get("words", "")}
        windows = -(-context.config.max_audio_seconds // _SECONDS)
        temperature = others.get("warmth", 0.0)
        request = Request(
            "",
            Sampling(max_new_tokens=windows * _TOKENS, do_sample=temperature > 0, temperature=temperature or 1.0),
            messages=({"role": "user", "content": [place(source)]},),
            media=(source,),
            transcribes=True,
            template=TemplateOptions(arguments=tuple(asked.items())),
            fill_context=True,
            adapter=adapter,
            names=FieldNames(prompt="file"),
        )
        return ParsedRequest([request], _Reply(plain=others.get("format") == "text"), self.errors, ignored)


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


class _Reply(WholeReply):
    """OpenAI's document; or the text alone."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__(1, special_in_text=False)
        self._plain = plain
        if plain:
            self.content_type = "text/plain; charset=utf-8"

    def feed(self, index: int, delta: Delta) -> bytes:
        data = super().feed(index, delta)
        return self._text.encode() if data and self._plain else data

    @property
    def _text(self) -> str:
        return self._sequences[0].text.strip()

    def _document(self) -> Transcription:
        tokens = len(self._sequences[0].tokens)
        return {
            "text": self._text,
            "usage": {
                "type": "tokens",
                "input_tokens": self._num_prompt_tokens,
                "output_tokens": tokens,
                "total_tokens": self._num_prompt_tokens + tokens,
            },
        }
