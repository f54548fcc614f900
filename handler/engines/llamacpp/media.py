"""Images in chats for llama-server, which receives a prompt with images as text and not as token ids.

In the text, a marker stands for each image. llama-server tokenizes each text between two markers separately, and adds
the tokens around an image itself (`mtmd_tokenize` in tools/mtmd/mtmd.cpp). Each text is tokenized by llama-server's
/tokenize first: only if the result is exactly the ids of the prompt, the prompt is sent.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import struct
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from handler.core.errors import InvalidPayload
from handler.core.media import MEDIA, FixedTokens, MediaPrompt, Medium
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Extras
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.huggingface.files import load_tokenizer as load_hf
from handler.engines.huggingface.tokenizer import ContentForms, HfTokenizer, Messages, find_forms
from handler.engines.llamacpp.answer import LlamaCall, Tokens
from handler.engines.llamacpp.parameters import Leg, completion
from handler.engines.llamacpp.pieces import Pieces
from handler.engines.remote.servers import Failed, Part, Refused

MARKER = "<__media__>"
"""Stands for an image in the text of a prompt. It is llama.cpp's default marker."""

NO_PROJECTOR = "llama-server was started without a projector, which it needs for images (--mmproj)"
NO_AUDIO = "audio has not been tested with llama-server"

_MAX_BODY = 100 << 20  # bytes of a request that llama-server accepts (CPPHTTPLIB_PAYLOAD_MAX_LENGTH)
_MAX_PLAIN = 4 << 20  # bytes of an image that is not worth compressing
_SEPARATOR = -1  # separates texts in the result of /tokenize; no token has this id
_INEXACT = (
    "llama-server divides the text of this prompt into other tokens than this handler, so images are not possible in it"
)


# -- in the host: the placeholders of images ---------------------------------------------------------------------------


class MarkedForms(ContentForms):
    """The types of message content that a chat template supports. Images become markers in the text.

    llama-server writes the markers in the same way before it applies the template (`to_json_oaicompat` in
    common/chat.cpp).
    """

    def adapt(self, messages: Any) -> Messages:
        with_markers = [{**message, "content": self._with_markers(message["content"])} for message in messages]
        return super().adapt(with_markers)

    def _with_markers(self, content: Any) -> Any:
        """Join the parts of a content with media. Texts that follow each other are separated by a line break."""
        if isinstance(content, str) or not any(part["type"] in self.placeholders for part in content or ()):
            return content
        text, after_text = "", False
        for part in content:
            marker = self.placeholders.get(part["type"])
            if marker is None and after_text:
                text += "\n"
            text += part["text"] if marker is None else marker
            after_text = marker is None
        return text


class ImageTokenizer(HfTokenizer):
    """A tokenizer for chats with images. See `HfTokenizer`.

    An additional id, which no text contains, represents an image. Texts between images are tokenized separately.
    """

    def __init__(self, model: Path, *, content_format: str = "auto", **options: Any) -> None:
        super().__init__(model, content_format=content_format, **options)
        bos = self._tokenizer.bos_token_id
        self._begin = [bos] if self.ids("", add_special_tokens=True)[:1] == [bos] else []
        # The template writes a marker that no client knows.
        self._marker = f"<__media_{secrets.token_hex(16)}__>"
        self.vocabulary, placeholder = _with_image(self.vocabulary)
        self.media_tokens = {"image": FixedTokens(placeholder, self._marker)}
        if self.chat_template:
            self._forms = MarkedForms(*find_forms(self._render, self.media_tokens, content_format))

    def _encode(self, text: str, name: str, *, add_special_tokens: bool) -> Prompt:
        texts = text.split(self._marker)
        if len(texts) == 1:
            return super()._encode(text, name, add_special_tokens=add_special_tokens)
        if any(MARKER in part for part in texts):
            raise InvalidPayload(f"'{name}': a chat with images must not contain the text {MARKER}")
        ids = super()._encode(texts[0], name, add_special_tokens=False).ids
        if self._begin and ids[:1] != self._begin:  # llama-server adds the BOS token if the template has not
            ids = [*self._begin, *ids]
        for part in texts[1:]:
            ids.append(self.media_tokens["image"].placeholder)
            ids += super()._encode(part, name, add_special_tokens=False).ids
        return Prompt(MARKER.join(texts), ids, self.vocabulary)


def _with_image(vocabulary: Vocabulary) -> tuple[Vocabulary, int]:
    """Return a vocabulary with an additional special token that represents an image, and its id."""
    id = len(vocabulary)
    return Vocabulary([*vocabulary.pieces, MARKER.encode()], {*vocabulary.special, id}), id


def no_media(*, projector: bool) -> dict[str, str]:
    """Return the reason why messages may not contain media of each kind; "" if they may.

    Args:
        projector: whether the server has a projector for images.
    """
    return {**dict.fromkeys(MEDIA, NO_AUDIO if projector else NO_PROJECTOR), "image": "" if projector else NO_PROJECTOR}


def load_tokenizer(config: EngineConfig, *, projector: bool) -> HfTokenizer:
    """Load the tokenizer of a model. `projector` is whether its server has a projector for images."""
    return load_hf(config, ImageTokenizer if projector else HfTokenizer)


# -- in the engine: prompts with images --------------------------------------------------------------------------------


class Projector(NamedTuple):
    """What a server needs to know about images.

    Attributes:
        marker: the text that represents an image in a prompt. It changes when the server is restarted.
        begin: ids of the tokens that the server adds to the beginning of a prompt.
        bos: text of the BOS token.
    """

    marker: str
    begin: tuple[int, ...] = ()
    bos: str = ""

    @classmethod
    def read(cls, props: Mapping[str, Any]) -> Projector | None:
        """Read /props. Return None if the server has no projector for images."""
        modalities, marker, bos = (props.get(name) for name in ("modalities", "media_marker", "bos_token"))
        if not isinstance(modalities, dict) or modalities.get("vision") is not True:
            return None
        if not isinstance(marker, str) or not marker:
            return None
        return cls(marker, (), bos if isinstance(bos, str) else "")


Tokenize = Callable[[Mapping[str, Any]], Awaitable[bytes]]
"""Sends a body to /tokenize and returns the response."""


async def tokenized(tokenize: Tokenize, content: str | Sequence[str | int], *, add_special: bool = False) -> list[int]:
    """Tokenize a text, or several with `_SEPARATOR` between them.

    Raises:
        Refused: the server refuses the text.
        Failed: the server fails, or its response cannot be read.
    """
    data = await tokenize({"content": content, "add_special": add_special, "parse_special": True})
    try:
        ids = orjson.loads(data)["tokens"]
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise ValueError("no list of ids")
    except (ValueError, TypeError, KeyError) as error:
        raise Failed("sent token ids that cannot be read", repr(error)) from None
    return ids


class ImagePrompt:
    """The text and the images of a request's prompt.

    Args:
        prompt: the text, with a `MARKER` for each image.

    Raises:
        ValueError: the text does not have as many markers as there are images, or a medium is no image.
    """

    def __init__(self, prompt: MediaPrompt) -> None:
        self._texts = prompt.text.split(MARKER)
        self._media = prompt.media
        self._files: list[str] = []  # in base64
        if len(self._texts) != len(prompt.media) + 1:
            raise ValueError(
                f"the prompt has {len(self._texts) - 1} markers for images, but {len(prompt.media)} images"
            )
        if any(medium.kind != "image" for medium in prompt.media):
            raise ValueError(NO_AUDIO)

    async def prompt(
        self,
        ids: Sequence[int],
        projector: Projector,
        tokenize: Tokenize,
        load_pieces: Callable[[], Awaitable[Pieces | None]],
    ) -> Mapping[str, Any]:
        """Return the field `prompt` of a request for a completion.

        Args:
            ids: ids of the prompt with a placeholder for each image, and of a part of the response if the completion
                continues it.
            load_pieces: returns the vocabulary.

        Raises:
            Refused: llama-server would get other ids, or too many bytes.
            Failed: the server fails.
        """
        texts = [*self._texts]
        begin = list(projector.begin)
        if begin and projector.bos and texts[0].startswith(projector.bos):
            texts[0] = texts[0].removeprefix(projector.bos)
        if any(projector.marker in text for text in texts):
            raise Refused(400, "a chat with images must not contain the text by which llama-server recognizes images")
        rest = _remaining(ids, begin, await tokenized(tokenize, _content(texts)))
        if rest:
            pieces = await load_pieces()
            texts[-1] += (pieces.text(rest) if pieces is not None else None) or _refuse_rest()
            if _remaining(ids, begin, await tokenized(tokenize, _content(texts))):
                _refuse_rest()
        if not self._files:
            self._files = await asyncio.to_thread(_encoded, self._media)
            self._media = ()
        return {"prompt_string": projector.marker.join(texts), "multimodal_data": self._files}


def _refuse_rest() -> str:
    reason = "llama-server would divide the text so far into other tokens"
    raise Refused(400, f"this response was interrupted, and cannot be continued: {reason}; send the request again")


def _content(texts: Sequence[str]) -> list[str | int]:
    """Return the texts with `_SEPARATOR` between them."""
    return [part for text in texts for part in (_SEPARATOR, text)][1:]


def _remaining(ids: Sequence[int], begin: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
    """Return the ids after those of the texts of a prompt.

    Args:
        ids: ids of the prompt, with a placeholder for each image.
        begin: ids before the first text.
        tokens: ids of the texts, with `_SEPARATOR` between them.

    Raises:
        Refused: the ids of the prompt are not those of the texts, with equal placeholders between them.
    """
    expected = [*begin, *tokens]
    positions = [index for index, id in enumerate(expected) if id == _SEPARATOR]
    placeholders = {ids[index] for index in positions if index < len(ids)}
    if len(placeholders) == 1:
        (placeholder,) = placeholders
        expected = [placeholder if id == _SEPARATOR else id for id in expected]
    if list(ids[: len(expected)]) != expected or len([id for id in expected if id in placeholders]) != len(positions):
        raise Refused(400, _INEXACT)
    return ids[len(expected) :]


def _encoded(media: Sequence[Medium]) -> list[str]:
    """Return the image files in base64.

    Raises:
        Refused: the files are larger than a request may be.
    """
    files = [base64.b64encode(image_file(medium)).decode() for medium in media]
    if (size := sum(map(len, files))) > _MAX_BODY - (8 << 20):  # the rest is for the text
        raise Refused(
            400, f"the images have {size:,} bytes in base64; with the text, llama-server accepts {_MAX_BODY:,}"
        )
    return files


def image_file(medium: Medium) -> bytes:
    """Write an image in a lossless format that llama-server reads: PNG if it is large, otherwise PPM."""
    width, height = medium.size
    if len(medium.data) <= _MAX_PLAIN:
        return b"P6 %d %d 255\n" % (width, height) + medium.data
    packer, row = zlib.compressobj(1), 3 * width
    packed = [packer.compress(b"\0" + medium.data[at : at + row]) for at in range(0, row * height, row)]
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", b"".join([*packed, packer.flush()])), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, chunks))


def _chunk(chunk: tuple[bytes, bytes]) -> bytes:
    kind, data = chunk
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# -- in the engine: requests with images -------------------------------------------------------------------------------


class ImageCall(LlamaCall):
    """A request with images, and its response.

    If it takes several completions, each begins with the prompt and repeats the response so far, because a prompt as
    text could not end within a character.

    Attributes:
        images: the text and the images of the prompt.
        marker: the text that represents an image in the last body.

    Raises:
        ValueError: llama-server does not support the request.
    """

    def __init__(self, request: EngineRequest, prompt: MediaPrompt, eos: Collection[int], context: int) -> None:
        sampling = request.sampling
        if sampling.min_new_tokens:
            raise ValueError("min_new_tokens cannot be combined with images on llama-server")
        if sampling.presence_penalty or sampling.frequency_penalty:
            raise ValueError("presence_penalty and frequency_penalty cannot be combined with images on llama-server")
        if sampling.do_sample and sampling.seed is None:  # repeated completions need the same seed
            sampling = sampling._replace(seed=secrets.randbits(31))
        self.images = ImagePrompt(prompt)
        self.marker = ""
        self._num_known = 0  # tokens of the response that the completion repeats
        self._is_counted = False
        super().__init__(request._replace(parameters=sampling), eos, context)

    def next_body(self) -> Mapping[str, Any]:
        body = super().next_body()
        if not self._legs.num:
            return body
        self._num_known = len(self._ids)
        self._leg = Leg(self._prompt, self._most, streamed=self._leg.streamed)
        return completion(self._sampling, self._leg, self._context)

    def prefix(self, ids: Sequence[int]) -> Sequence[int]:
        return [*self._prompt, *ids]  # each completion begins with the first token of the response

    @property
    def resumes(self) -> bool:
        return True

    def take_plain(self, data: bytes) -> int | None:
        return None  # its tokens may be known already, and its first event has the number of prompt tokens

    def take_tokens(self, tokens: Tokens, part: Part, pieces: Pieces | None) -> bool:
        if self._legs.num_ids < self._num_known:
            remaining = self._after_known(tokens)
            if remaining is None:
                return True
            tokens = remaining
        return super().take_tokens(tokens, part, pieces)

    def _after_known(self, tokens: Tokens) -> Tokens | None:
        """Return the part of an event after the tokens that are already known, or None if it has no others.

        Raises:
            Failed: the completion does not repeat the response.
        """
        start, num_known = tokens.num_tokens - len(tokens.ids), self._num_known
        known = self._ids[start:num_known][: len(tokens.ids)]
        if list(tokens.ids[: len(known)]) != known or (tokens.stop_type and tokens.num_tokens < num_known):
            raise Failed(
                "sent other tokens when it repeated a response", "responses that are computed at once may differ"
            )
        self._legs.num_ids = min(tokens.num_tokens, num_known)
        if tokens.num_tokens <= num_known and not tokens.stop_type:
            return None
        return tokens._replace(ids=tokens.ids[len(known) :], scores=tokens.scores[len(known) :])

    def count(self, tokens: Tokens, part: Part) -> None:
        if part.ids and tokens.num_prompt and not (self._is_counted or self._goes_on):
            self._is_counted = True
            part.extras = Extras(num_media_tokens=max(tokens.num_prompt - len(self._prompt), 0))
        super().count(tokens, part)
