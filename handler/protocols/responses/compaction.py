"""Compaction of a conversation: the model summarizes it, and an item with the summary replaces it in later requests.

Sources: OpenAI's guide "Compaction"; the types of its Python client, 3.57. Codex ends its requests with the item
`compaction_trigger`. The summary is encrypted, because the model reads it as part of the conversation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from handler.core.errors import GenerationFailed, InvalidPayload
from handler.core.framing import dumps, loads
from handler.core.sealing import NOT_OPENED, Sealer
from handler.core.values import Delta, Finish
from handler.protocols.assistant.answer import read_whole
from handler.protocols.assistant.summary import Summarizing, SummaryReader, default_threshold, text_of
from handler.protocols.kernel.readers import integer, only
from handler.protocols.kernel.reply import TokenEncoder
from handler.protocols.responses.api import CompactedResponse, CompactionItem, OpenAiResponse
from handler.protocols.responses.response import (
    ResponseDocument,
    ResponseSettings,
    ResponseStream,
    new_id,
    now,
    secret_id,
    usage,
)
from handler.protocols.responses.types import COMPACTION

Key = TypeVar("Key")


class Summaries(NamedTuple):
    """Writes and reads the items with summaries.

    Attributes:
        owner: owner of the API key in the request, whose later requests may contain its items.
    """

    sealer: Sealer
    owner: str

    def item(self, id: str, text: str) -> CompactionItem:
        """Return the item with a summary."""
        value = dumps({"text": text, "created_at": int(time.time())})
        return {"id": id, "type": "compaction", "encrypted_content": self.sealer.seal(value, self.owner)}

    def read(self, item: Mapping[str, Any], at: str) -> str:
        """Return the summary in an item.

        Raises:
            InvalidPayload: another server wrote the item, or it was written for another API key.
        """
        content = item.get("encrypted_content")
        try:
            if not isinstance(content, str):
                raise TypeError
            text: str = loads(self.sealer.open(content, self.owner))["text"]
        except (ValueError, TypeError):
            raise InvalidPayload(f"{at}.encrypted_content: {NOT_OPENED}; send the items that it stands for") from None
        return text


def after_compaction(items: Sequence[tuple[Key, Any]]) -> Sequence[tuple[Key, Any]]:
    """Return the items of a conversation that the model reads.

    Of the items before the last compaction, the model reads only developer and system messages, and the most recent
    user messages with no response between them. Otherwise, older user messages would accumulate until no room is left
    for a response.

    Args:
        items: each item with a value before it, such as its path.
    """
    last = max((index for index, (_, item) in enumerate(items) if _type(item) == COMPACTION), default=0)
    roles = [_role(item) for _, item in items[:last]]
    newest = max((index for index, role in enumerate(roles) if role == "user"), default=last)
    while newest and roles[newest - 1] != "assistant":
        newest -= 1
    before = zip(items, roles, strict=False)
    stay = [
        entry
        for index, (entry, role) in enumerate(before)
        if role != "assistant" and (role != "user" or index >= newest)
    ]
    return [*stay, *items[last:]]


def has_replaceable(items: Sequence[tuple[object, Any]]) -> bool:
    """Return whether a summary would replace any of the items that the model reads, other than a summary."""
    *stay, _ = after_compaction([*items, ("", {"type": COMPACTION})])
    return len(stay) < len([item for _, item in items if _type(item) != COMPACTION])


def _type(item: Any) -> Any:
    """Return the type of an item. Messages may have none."""
    return (item.get("type") or "message") if isinstance(item, dict) else None


def _role(item: Any) -> Any:
    """Return the role of a message. Items of other types are parts of responses, or follow them."""
    return item.get("role") if _type(item) == "message" else "assistant"


def read_threshold(value: Any, context_length: int | None) -> int | None:
    """Read `context_management`.

    Args:
        context_length: the maximum number of tokens in a prompt and its response, or None while it is unknown.

    Returns:
        The number of tokens above which the conversation is summarized before the response, or None if it never is.

    Raises:
        ValueError: the value is invalid.
    """
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError("must be a list of objects")
    if not value:
        return None
    if len(value) > 1 or value[0].get("type") != COMPACTION:
        raise ValueError(f"must have one object with 'type': '{COMPACTION}'")
    only(value[0], "type", "compact_threshold")
    threshold = value[0].get("compact_threshold")
    if threshold is None:
        return default_threshold(context_length)
    return integer(1)(threshold)


class CompactionDocument(ResponseDocument):
    """A non-streaming response that consists of a summary."""

    def __init__(self, settings: ResponseSettings, summaries: Summaries) -> None:
        super().__init__(settings)
        self._summaries = summaries

    def _document(self) -> OpenAiResponse:
        (sequence,) = self._sequences
        events, num_reasoning = read_whole(self._settings.form, sequence)
        item = self._summaries.item(_item_id(self._settings), text_of(events))
        num_cached = sequence.extras.num_cached_tokens or 0
        counts = usage(self._num_prompt_tokens, num_cached, sequence.num_tokens, num_reasoning)
        return self._settings.store(self._settings.response([item], Finish.EOS, usage=counts))


class CompactingStream(ResponseStream):
    """Streams a response that begins with a summary, which is sent in one piece.

    Args:
        summarizing: summarizes a prompt that has become too long, or None if the response consists of a summary.
    """

    def __init__(self, settings: ResponseSettings, summaries: Summaries, summarizing: Summarizing | None) -> None:
        super().__init__(settings)
        self._summaries = summaries
        self._summarizing = summarizing
        self._id = _item_id(settings)
        self._summary: SummaryReader | None = None  # while the model writes it
        self._num_reasoning_before = 0

    def start(self, index: int, num_prompt_tokens: int) -> None:
        super().start(index, num_prompt_tokens)
        if self._summarizing is None:
            self._summary = SummaryReader(self._form)
        elif not index and self._summarizing.due:
            self._summary = self._summarizing.reader()

    def token_encoder(self) -> TokenEncoder | None:
        return super().token_encoder() if self._summary is None else None

    def feed(self, index: int, delta: Delta) -> bytes:
        if self._summary is None or delta.error is not None:
            return super().feed(0, delta)
        data = b"" if self._begun else self._head() + self._encode(self._items.summarizing(self._id))
        self._begun = True
        self._summary.feed(delta)
        if delta.finish is None:
            return data
        if self._summarizing is not None:
            return data + self._summarized(self._summary, delta.finish)
        self.finished = True
        try:
            data += self._summarized(self._summary, delta.finish)
        except GenerationFailed as error:
            return data + self._broken_off(error)
        return data + self._completed(Finish.EOS)

    def _summarized(self, summary: SummaryReader, finish: Finish) -> bytes:
        text = summary.end(finish)
        self._summary = None
        self._num_prompt_tokens += summary.num_media_tokens
        self._num_tokens += summary.num_tokens
        self._num_cached_tokens += summary.num_cached_tokens
        self._num_reasoning_before = summary.num_reasoning
        if self._summarizing is not None:
            self._summarizing.summary = text
        item = self._summaries.item(self._id, text)
        self._items.output.append(item)
        return self._encode([self._items.summarized(item)])

    @property
    def _num_reasoning(self) -> int:
        return self._num_reasoning_before + super()._num_reasoning


class CompactingDocument(CompactionDocument):
    """A non-streaming response that begins with a summary if its prompt has become too long."""

    def __init__(self, settings: ResponseSettings, summaries: Summaries, summarizing: Summarizing) -> None:
        super().__init__(settings, summaries)
        self._summarizing = summarizing
        self._summary: SummaryReader | None = None

    def start(self, index: int, num_prompt_tokens: int) -> None:
        super().start(index, self._num_prompt_tokens + num_prompt_tokens)
        if not index and self._summarizing.due:
            self._summary = self._summarizing.reader()

    def token_encoder(self) -> TokenEncoder | None:
        return super().token_encoder() if self._summary is None else None

    def feed(self, index: int, delta: Delta) -> bytes:
        if index or self._summary is None:
            return super().feed(0, delta)
        self._summary.feed(delta)
        if delta.finish is not None:
            self._num_prompt_tokens += self._summary.num_media_tokens
            self._summarizing.summary = self._summary.end(delta.finish)
        return b""

    def _document(self) -> OpenAiResponse:
        summary = self._summary
        if summary is None:
            return self._response()
        item = self._summaries.item(_item_id(self._settings), self._summarizing.summary)
        return self._response([item], summary.num_cached_tokens, summary.num_tokens, summary.num_reasoning)


class CompactedDocument(CompactionDocument):
    """The response of /v1/responses/compact: the items of the next request.

    Args:
        messages: the user's messages in the request.
    """

    def __init__(self, settings: ResponseSettings, summaries: Summaries, messages: Sequence[Any]) -> None:
        super().__init__(settings, summaries)
        self._messages = messages

    def _encode(self) -> bytes:
        response = self._document()
        compacted: CompactedResponse = {
            "id": response["id"],
            "object": "response.compaction",
            "created_at": now(),
            "output": [*self._messages, *response["output"]],
            "usage": response["usage"],
        }
        return self._framing.encode(compacted)


def _item_id(settings: ResponseSettings) -> str:
    return new_id("cmp") if settings.keeping is None else secret_id("cmp")
