"""Compaction in Anthropic's API: the model summarizes the conversation, and a block stands for the messages before it.

Two features write such blocks: the edit `compact_20260112`, before a response to a long conversation, and the field
`compaction`, whose response consists only of the block. The blocks of the latter are signed.

Sources: "Compaction" in Anthropic's documentation; the types of its Python client, 2.14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from handler.core.errors import GenerationFailed, ServingError
from handler.core.sealing import NOT_OPENED, Sealer
from handler.core.values import Delta, Finish, Token
from handler.protocols.anthropic.api import (
    AnthropicCompaction,
    AnthropicIteration,
    AnthropicMessage,
    AnthropicStop,
    AnthropicUsage,
    BlockEvent,
    CompactionRefused,
    CompactionUnavailable,
)
from handler.protocols.anthropic.response import MessageDocument, MessageSettings, MessageStream, encode
from handler.protocols.anthropic.types import COMPACTION
from handler.protocols.assistant.answer import read_whole
from handler.protocols.assistant.events import Event
from handler.protocols.assistant.summary import Summarizing, SummaryReader, text_of
from handler.protocols.kernel.path import Path
from handler.protocols.kernel.reply import Reply, TokenEncoder

_PAUSED: AnthropicStop = {"stop_reason": "compaction", "stop_sequence": None}


class Signer(NamedTuple):
    """Writes and checks the signatures of summaries for the owner of an API key."""

    sealer: Sealer
    owner: str

    def signature(self, content: str) -> str:
        return self.sealer.seal(_digest(content), self.owner)

    def check(self, block: Mapping[str, Any], at: Path) -> None:
        """Check the signature of a block.

        Raises:
            CompactionRefused: another server signed the block, or its content has been changed.
        """
        try:
            digest = self.sealer.open(block["signature"], self.owner)
        except (ValueError, TypeError, AttributeError):
            raise CompactionRefused(
                "signature_invalid",
                f"{at}.signature: {NOT_OPENED}; send the messages that the block stands for",
            ) from None
        if digest != _digest(block["content"]):
            raise CompactionRefused("content_mismatch", f"{at}.content: is not the signed summary")


def _digest(content: str) -> bytes:
    return blake2b(content.encode(), digest_size=32, person=b"lmi.compaction").digest()


def read_summary(block: Mapping[str, Any], signer: Signer) -> str | None:
    """Return the summary in a block that has been read, or None if it contains none and has no effect.

    Raises:
        CompactionRefused: the block is invalid.
    """
    at, content = block["at"], block["content"]
    if block["tool_changes"]:
        raise CompactionRefused("tool_changes_mismatch", f"{at}.tool_changes: no summary of this server has any")
    if content is None:
        return None
    if not isinstance(content, str) or not content:
        raise CompactionRefused("content_mismatch", f"{at}.content: must be a string that is not empty, or null")
    if block["signature"] is not None:
        signer.check(block, at)
    return content


def check_signed(summaries: Sequence[Mapping[str, Any]], first: Path) -> None:
    """Check the positions of signed blocks. A signed block must be the first block of the first message, and no other
    block may have a summary.

    Args:
        summaries: the blocks with a summary, which have been read.
        first: the path of the first message.

    Raises:
        CompactionRefused: a signed block is elsewhere, or there is another block with a summary.
    """
    signed = next((block["at"] for block in summaries if block["signature"] is not None), None)
    if signed is not None and len(summaries) > 1:
        raise CompactionRefused("block_ambiguous", f"{signed}: must be the only summary in the messages")
    if signed not in (None, first.at("content", 0)):
        raise CompactionRefused("block_misplaced", f"{signed}: must be the first block of the first message")


def check_summarizable(messages: Sequence[Any]) -> None:
    """Check that there is a conversation to summarize, and that its last turn is complete.

    Raises:
        CompactionRefused: there is none, or the result of a tool is missing at its end.
    """
    if not all(isinstance(message, dict) for message in messages):
        return  # the reader of the messages reports it
    if not any(_says_something(message) for message in messages):
        raise CompactionRefused("nothing_to_summarize", "'messages' has nothing to summarize")
    last = messages[-1]
    calls = [block for block in _blocks(last) if block.get("type") == "tool_use"]
    if last.get("role") == "assistant" and calls:
        at = f"messages[{len(messages) - 1}]"
        raise CompactionRefused("incomplete_turn", f"{at}: the results of its tool_use are missing")


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if not isinstance(content, list):
        return bool(content)
    return any(not isinstance(block, dict) or block.get("type") != COMPACTION for block in content)


def _blocks(message: Mapping[str, Any]) -> Sequence[Any]:
    """Return the blocks of a message. The blocks of system messages may not have been read yet."""
    content = message.get("content")
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else ()


def _events(content: str | None, signature: str = "") -> list[BlockEvent]:
    """Return the events of a complete block. Clients keep a signature only from the start of the block."""
    block: AnthropicCompaction = {"type": "compaction", "content": None}
    if signature:
        block["signature"] = signature
    return [{"type": "content_block_start", "index": 0, "content_block": block}, *_ended(content)]


def _ended(content: str | None) -> list[BlockEvent]:
    return [
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "compaction_delta", "content": content, "encrypted_content": None},
        },
        {"type": "content_block_stop", "index": 0},
    ]


# -- `compaction`: the response is a summary alone ---------------------------------------------------------------------


class SummaryStream(MessageStream):
    """Streams a response that consists of a signed summary."""

    def __init__(self, settings: MessageSettings, signer: Signer) -> None:
        super().__init__(settings)
        self._signer = signer
        self._read: list[Event] = []

    def token_encoder(self) -> TokenEncoder | None:
        return None

    def _token(self, position: int, token: Token) -> bytes:
        self._read += [token.text] if self._reader is None else self._reader.feed(token)
        return b""

    def _last(self, position: int, token: Token, finish: Finish) -> bytes:
        self._token(position, token)
        if self._reader is not None:
            self._read += self._reader.flush(finish)
        try:
            content = text_of(self._read)
        except GenerationFailed as error:
            return self._broken_off(CompactionUnavailable(error.message))
        events = [encode(event) for event in _events(content, self._signer.signature(content))]
        return b"".join(events) + self._message_end(_PAUSED)

    def _broken_off(self, error: ServingError) -> bytes:
        return super()._broken_off(_unavailable(error))


class SummaryDocument(MessageDocument):
    """A non-streaming response that consists of a signed summary."""

    def __init__(self, settings: MessageSettings, signer: Signer) -> None:
        super().__init__(settings)
        self._signer = signer

    def _document(self) -> AnthropicMessage:
        (sequence,) = self._sequences
        events, num_reasoning = read_whole(self._settings.form, sequence)
        try:
            content = text_of(events)
        except GenerationFailed as error:
            raise _unavailable(error) from None
        block: AnthropicCompaction = {
            "type": "compaction",
            "content": content,
            "signature": self._signer.signature(content),
        }
        num_cached = sequence.extras.num_cached_tokens or 0
        counts = self._settings.usage(self._num_prompt_tokens, num_cached, sequence.num_tokens, num_reasoning)
        return {**self._settings.message(0), "content": [block], "usage": counts, **_PAUSED}


def _unavailable(error: ServingError) -> ServingError:
    return CompactionUnavailable(error.message) if isinstance(error, GenerationFailed) else error


# -- `compact_20260112`: a summary before the response -----------------------------------------------------------------


class _Pass:
    """The summary before a response.

    Args:
        pauses: whether the response ends after the summary.

    Attributes:
        reader: reads the tokens of the summary while the model writes it, otherwise None.
        iteration: the token counts of the summary, or None if there is none.
    """

    def __init__(self, summarizing: Summarizing, settings: MessageSettings, *, pauses: bool) -> None:
        self.summarizing = summarizing
        self._settings = settings
        self._pauses = pauses
        self._num_prompt_tokens = 0
        self.reader: SummaryReader | None = None
        self.iteration: AnthropicIteration | None = None

    def start(self, index: int, num_prompt_tokens: int) -> bool:
        """Return whether the model is writing the summary."""
        if not index and self.summarizing.due:
            self.reader, self._num_prompt_tokens = self.summarizing.reader(), num_prompt_tokens
        return self.reader is not None

    def end(self, reader: SummaryReader, finish: Finish) -> str | None:
        """Return the summary, or None if the model has written none."""
        try:
            self.summarizing.summary = reader.end(finish)
        except GenerationFailed:
            self.summarizing.failed = True
        self.reader = None
        num_prompt = self._num_prompt_tokens + reader.num_media_tokens
        counts = self._settings.usage(num_prompt, reader.num_cached_tokens, reader.num_tokens)
        self.iteration = _iteration("compaction", counts)
        return self.summarizing.summary or None

    @property
    def ends(self) -> bool:
        """Whether the response consists of the summary, which is written."""
        return self._pauses and bool(self.summarizing.summary)

    def added_to(self, counts: AnthropicUsage) -> AnthropicUsage:
        """Return the counts of the message with those of each pass."""
        if self.iteration is None:
            return counts
        return {**counts, "iterations": [self.iteration, *(() if self.ends else (_iteration("message", counts),))]}


def _iteration(kind: Any, counts: AnthropicUsage) -> AnthropicIteration:
    return {
        "type": kind,
        "input_tokens": counts["input_tokens"],
        "cache_creation_input_tokens": counts["cache_creation_input_tokens"],
        "cache_read_input_tokens": counts["cache_read_input_tokens"],
        "output_tokens": counts["output_tokens"],
    }


class _Compacting(Reply):
    """Base class of messages that begin with a summary if their prompt has become too long."""

    _pass: _Pass

    def start(self, index: int, num_prompt_tokens: int) -> None:
        if not self._pass.start(index, num_prompt_tokens):
            super().start(index, num_prompt_tokens)

    def token_encoder(self) -> TokenEncoder | None:
        return super().token_encoder() if self._pass.reader is None else None


class CompactingMessageStream(_Compacting, MessageStream):
    """Streams a message that begins with a summary if its prompt has become too long.

    Args:
        pauses: whether the response ends after the summary.
    """

    def __init__(self, settings: MessageSettings, summarizing: Summarizing, *, pauses: bool) -> None:
        super().__init__(settings)
        self._pass = _Pass(summarizing, settings, pauses=pauses)

    def feed(self, index: int, delta: Delta) -> bytes:
        reader = self._pass.reader
        if reader is None or delta.error is not None:
            return super().feed(0, delta)
        data = b"" if self._begun else self._head() + self._render(_events(None)[:1])
        self._begun = True
        reader.feed(delta)
        if delta.finish is None:
            return data
        content = self._pass.end(reader, delta.finish)
        self._blocks.index = 0
        data += self._render(_ended(content))
        if self._pass.ends:
            self.finished = True
            data += self._stored() + self._message_end(_PAUSED)
        return data

    def _counts(self) -> AnthropicUsage:
        return self._pass.added_to(super()._counts())


class CompactingMessageDocument(_Compacting, MessageDocument):
    """A non-streaming message that begins with a summary if its prompt has become too long.

    Args:
        pauses: whether the response ends after the summary.
    """

    def __init__(self, settings: MessageSettings, summarizing: Summarizing, *, pauses: bool) -> None:
        super().__init__(settings)
        self._pass = _Pass(summarizing, settings, pauses=pauses)

    def feed(self, index: int, delta: Delta) -> bytes:
        reader = self._pass.reader
        if reader is None:
            return super().feed(0, delta)
        reader.feed(delta)
        if delta.finish is not None:
            self._pass.end(reader, delta.finish)
        if not self._pass.ends:
            return b""
        self.finished = True
        return self._framing.encode(self._message([], self._settings.usage(0, 0, 0), _PAUSED))

    def _block(self) -> AnthropicCompaction:
        return {"type": "compaction", "content": self._pass.summarizing.summary or None}

    def _message(self, content: Any, counts: AnthropicUsage, stop: AnthropicStop) -> AnthropicMessage:
        if self._pass.iteration is None:
            return super()._message(content, counts, stop)
        return super()._message([self._block(), *content], self._pass.added_to(counts), stop)
