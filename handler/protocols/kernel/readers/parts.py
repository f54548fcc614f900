"""Readers of a content's parts: the texts and media of OpenAI's chats and Responses, and of vLLM's chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from handler.core.errors import InvalidPayload
from handler.core.media import MEDIA, MediaSource
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.readers.media import check_taken, only_in, read_base64, read_url, taken_media
from handler.protocols.kernel.schema.shapes import NULL, TEXT, Shape, listing, nullable, record

_TEXTS = {
    "text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text", "thinking": "thinking",
    "reasoning_text": "text", "summary_text": "text",
}  # fmt: skip
"""Types of parts with text, and the field that has it. Of all, vLLM takes the first five, as text (chat_utils.py)."""

_PERHAPS_NULL = ("text", "refusal")
"""Types of parts that are left out where they have no text, as in vLLM."""

_URLS = {"image_url": "image", "audio_url": "audio"}
"""Types of parts with a URL in a field of the same name, and the kind of their media."""

_IMAGE, _AUDIO = "input_image", "input_audio"
"""The types of Responses for an image, and of OpenAI's chats for an audio clip."""

AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus")
"""Formats of audio clips; OpenAI has the first two. The file itself says which one it is."""

_KINDS = {**_URLS, _IMAGE: "image", _AUDIO: "audio"}
"""Types of parts with media, and their kinds."""

_UNREAD = {"video_url": "video", "input_video": "video", "file": "files", "input_file": "files"}
"""Types of parts that other servers read, each with what it brings."""

_WHY = {
    "image": "write it as an 'image_url'",
    "image_pil": "write it as an 'image_url'",
    "image_embeds": "send the image itself, as an 'image_url'",
    "audio_embeds": "send the audio clip itself, as an 'input_audio'",
    "prompt_embeds": "send the text itself",
    "tool_reference": "there is no search among tools",
    "computer_screenshot": "send the image itself, as an 'input_image'",
}
"""Further types, each with what to do instead."""

PARTS: Shape = listing(
    {
        "anyOf": [
            TEXT,
            record(
                {"type": {"enum": [*_TEXTS, *_KINDS]}},
                {
                    **dict.fromkeys(_TEXTS.values(), nullable(TEXT)),
                    **{name: {"anyOf": [TEXT, record({"url": TEXT}), NULL]} for name in _URLS},
                    _AUDIO: nullable(record({"data": TEXT}, {"format": nullable({"enum": [*AUDIO_FORMATS]})})),
                },
            ),
        ]
    },
    minItems=1,
)


class PartReader(NamedTuple):
    """Reads the parts of a request.

    Attributes:
        path: of parts in general, as `messages[].content[]`.
        unknown: gets names that have no effect.
    """

    context: ServerContext
    path: str
    unknown: dict[str, None]

    def read(self, content: Any, at: str, *, media: bool) -> list[str | MediaSource]:
        """Read a string or a list of parts, which may have a MediaSource as it is.

        Args:
            at: the content's own path.
            media: they may be among the parts.

        Raises:
            InvalidPayload: naming the wrong part, with its type and what would be right; it quotes no content.
        """
        if isinstance(content, str):
            return [content]
        if not isinstance(content, list) or not content:
            raise InvalidPayload(f"{at} must be a string or a non-empty list of parts")
        parts = [self._part(part, f"{at}[{index}]", media=media) for index, part in enumerate(content)]
        return [part for part in parts if part is not None]

    def _part(self, part: Any, at: str, *, media: bool) -> str | MediaSource | None:
        if isinstance(part, str | MediaSource):
            return part
        word = _type(part)
        if not isinstance(word, str):
            raise InvalidPayload(f"{at} must be a string, or an object with a 'type', such as 'text'")
        if (kind := _KINDS.get(word)) is not None:
            check_taken(kind, word, at, self.context)
            if not media:
                raise InvalidPayload(f"{at}: {word!r} is not supported: {only_in(kind)}")
            return self._medium(part, word, at)
        if word not in _TEXTS:
            raise InvalidPayload(f"{at}: {word[:64]!r} is not supported: {self._reason(word)}")
        text = part.get(field := _TEXTS[word])
        if isinstance(text, str):
            return text
        if text is None and word in _PERHAPS_NULL:
            self.unknown[f"{self.path}.{field}"] = None
            return None
        raise InvalidPayload(f"{at}: {word!r} must have a string '{field}'")

    def _reason(self, word: str) -> str:
        """Say what to send instead of a part of a type that is not read."""
        if word in _UNREAD:
            taken = ["text", *(MEDIA[kind] for kind in taken_media(self.context))]
            read = " and ".join(filter(None, (", ".join(taken[:-1]), taken[-1])))
            return f"the engine reads {read}, no {_UNREAD[word]}"
        return _WHY.get(word, f"it must be one of {', '.join((*_TEXTS, *_KINDS))}")

    def _medium(self, part: Mapping[str, Any], word: str, at: str) -> MediaSource:
        """Read a medium; the field of a URL may also be the URL itself, as in vLLM."""
        field = "image_url" if word == _IMAGE else word
        if part.get("file_id") is not None:
            raise InvalidPayload(f"{at}.file_id is not supported: no files are kept; send {field}")
        given, read = part.get(field), ("data", "format") if word == _AUDIO else ("url",)
        self._note(self.path, part, ("type", field))
        if isinstance(given, dict):
            self._note(f"{self.path}.{field}", given, read)
        if word == _AUDIO:
            return _input_audio(given, f"{at}.{word}")
        return read_url(_KINDS[word], given.get("url") if isinstance(given, dict) else given, f"{at}.{field}")

    def _note(self, path: str, value: Mapping[str, Any], read: tuple[str, ...]) -> None:
        """List names that have no effect; an image's `detail` may be "auto", as if it was left out."""
        names = [name for name, item in value.items() if name not in read and item is not None]
        self.unknown.update({f"{path}.{name}": None for name in names if (name, value[name]) != ("detail", "auto")})


def _type(part: Any) -> Any:
    """Return a part's type; without one that of its medium, as in vLLM."""
    if not isinstance(part, dict):
        return None
    return part["type"] if part.get("type") is not None else next((word for word in _KINDS if word in part), None)


def _input_audio(given: Any, at: str) -> MediaSource:
    if not isinstance(given, dict):
        raise InvalidPayload(f"{at} must be an object with 'data', the file in base64, and 'format'")
    if (name := given.get("format")) is not None and name not in AUDIO_FORMATS:
        raise InvalidPayload(f"{at}.format must be one of {', '.join(AUDIO_FORMATS)}")
    return read_base64("audio", given.get("data"), f"{at}.data")
