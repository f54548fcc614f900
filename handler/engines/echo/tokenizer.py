"""Echo's tokenizer: a word is a token."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from handler.core.errors import PromptTooLong
from handler.core.media import MEDIA, MediaTokens
from handler.core.text import Prompt, Vocabulary, cut_after
from handler.core.values import PLAIN_TEMPLATE, TemplateOptions
from handler.engines.echo.cues import CUES
from handler.engines.huggingface.pooling_tokenizer import fit

CONTEXT = 1 << 20  # tokens

_SHORT = 1 << 16  # characters; a longer text is split by short calls, as other threads need the GIL
_MEDIA = {kind: f"<{kind}>" for kind in MEDIA}  # words that come next, in prompts with media


class OneWord:
    """Each medium is one word."""

    def __init__(self, kind: str) -> None:
        self.placeholder, self.text = len(CUES) + list(_MEDIA).index(kind), _MEDIA[kind]

    def count(self, size: Sequence[int]) -> int:
        return 1


class EchoTokenizer:
    """Numbers words in the order of their first appearance, so each prompt has its own vocabulary."""

    vocabulary: Vocabulary | None = None
    chat_template = ""
    media_tokens: Mapping[str, MediaTokens] = MappingProxyType({kind: OneWord(kind) for kind in MEDIA})

    def encode(self, text: str, *, media: bool = False) -> Prompt:
        ids = {word: id for id, word in enumerate((*CUES, *_MEDIA.values()) if media else CUES)}
        indices = []
        short = len(text) < _SHORT
        for word in text.split() if short else (match[0] for match in re.finditer(r"\S+", text)):
            indices.append(ids.setdefault(word, len(ids)))
            if len(indices) > CONTEXT:
                raise PromptTooLong("inputs", len(indices), CONTEXT - 1, exact=False)
        words = [f" {word}" for word in ids]
        return Prompt(text, indices, Vocabulary([word.encode() for word in words], texts=[*words]))

    def encode_pooled(self, texts: Sequence[str], most: int | None, side: str | None) -> tuple[Prompt, int | None]:
        """Encode the words of one text or two; a word's id is its hash, so that it is the same in every text."""
        words = [text.split() for text in texts]
        lengths = [len(one) for one in words]
        if most is not None and sum(lengths) > most:
            if side is None:
                raise PromptTooLong("inputs", sum(lengths), most)
            lengths = fit(lengths, most)
            words = [
                one[:length] if side == "right" else one[len(one) - length :]
                for one, length in zip(words, lengths, strict=True)
            ]
        cues = {cue: id for id, cue in enumerate(CUES)}
        ids = [cues.get(word, len(cues) + zlib.crc32(word.encode())) for one in words for word in one]
        return Prompt(texts[0], ids, Vocabulary([])), lengths[0] if len(texts) > 1 else None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions = PLAIN_TEMPLATE,
    ) -> Prompt:
        """Encode a line `role: content` for each message, and `assistant:` at the end."""
        lines = [f"{message['role']}: {_written(message['content'])}" for message in messages]
        if options.add_generation_prompt:
            lines.append("assistant:")
        text = "\n".join(lines)
        if options.continue_final_message:
            text = cut_after(text, messages[-1]["content"])
        try:
            return self.encode(text, media=any(isinstance(message["content"], list) for message in messages))
        except PromptTooLong as error:
            raise error.named("messages") from None


def _written(content: str | Sequence[Mapping[str, Any]]) -> str:
    return (
        content
        if isinstance(content, str)
        else " ".join([part["text"] if part["type"] == "text" else _MEDIA[part["type"]] for part in content])
    )
