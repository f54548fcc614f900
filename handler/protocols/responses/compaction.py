"""Compaction of a conversation: the model summarizes it, and an item with the summary replaces it in later requests.

Sources: OpenAI's guide "Compaction"; the types of its Python client, 3.57. Codex ends its requests with the item
`compaction_trigger`. The summary is encrypted, because the model reads it as part of the conversation.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import GenerationFailed, InvalidPayload
from handler.core.framing import dumps, loads
from handler.core.sealing import Sealer
from handler.core.values import Finish, Request, Token
from handler.protocols.assistant.answer import read_whole
from handler.protocols.assistant.events import Event
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

COMPACTION, TRIGGER = "compaction", "compaction_trigger"
"""The types of the item with a summary, and of the last item of a request for one."""

_MAX_TOKENS = 8192
"""The maximum number of tokens of a summary, unless the request limits its output."""

PROMPT = (
    "Summarize our conversation so far, so that you can continue the work from the summary alone. Keep: what the user "
    "asked for, and each constraint; decisions and their reasons; facts, names, paths, commands, numbers and errors "
    "that matter; what has been done, and with which result; what remains to be done, and the next step. Write only "
    "the summary, as plain text. Do not call tools."
)
"""The last message of a request for a summary."""

_BEFORE = "Summary of the earlier conversation, which it replaces:\n\n"
_EMPTY = "the model returned no summary of the conversation"


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

    def message(self, item: Mapping[str, Any], at: str) -> str:
        """Return the message to the model that an item stands for.

        Raises:
            InvalidPayload: another server wrote the item, or it was written for another API key.
        """
        content = item.get("encrypted_content")
        try:
            if not isinstance(content, str):
                raise TypeError
            text: str = loads(self.sealer.open(content, self.owner))["text"]
        except (ValueError, TypeError):
            raise InvalidPayload(
                f"{at}.encrypted_content: cannot be read: another server, or this server before its last start "
                "(option.compaction_key_file), or the request of another API key wrote it; send the items that it "
                "stands for"
            ) from None
        return _BEFORE + text


def of_bounded_length(request: Request) -> Request:
    """Return a request for a summary whose length is limited, by the room in the model's context too."""
    limit = min(request.sampling.max_new_tokens, _MAX_TOKENS)
    return request._replace(sampling=request.sampling._replace(max_new_tokens=limit), fill_context=True)


def after_compaction(items: Sequence[Any]) -> Sequence[Any]:
    """Return the items of a stored conversation that later requests contain: of those before its last compaction, only
    the messages of users, developers and the system.
    """
    last = max((index for index, item in enumerate(items) if item["type"] == COMPACTION), default=0)
    kept = [item for item in items[:last] if item["type"] == "message" and item["role"] != "assistant"]
    return [item for item in [*kept, *items[last:]] if item["type"] != TRIGGER]


def _text_of(events: Iterable[Event]) -> str:
    """Return the text of a response without its reasoning and calls."""
    return "".join(event for event in events if isinstance(event, str))


class CompactionStream(ResponseStream):
    """Streams a response that consists of a summary. The summary is sent in one piece at the end of the stream."""

    def __init__(self, settings: ResponseSettings, summaries: Summaries) -> None:
        super().__init__(settings)
        self._summaries = summaries
        self._id = _item_id(settings)
        self._texts: list[str] = []

    def token_encoder(self) -> TokenEncoder | None:
        return None

    def _head(self) -> bytes:
        head = super()._head()
        empty: CompactionItem = {"id": self._id, "type": "compaction", "encrypted_content": ""}
        added = self._items.whole("response.output_item.added", empty)
        return head + self._encode([added, self._items.compacting(self._id)])

    def _token(self, position: int, token: Token) -> bytes:
        self._texts.append(_text_of([token.text] if self._reader is None else self._reader.feed(token)))
        return b""

    def _last(self, position: int, token: Token, finish: Finish) -> bytes:
        if token.text or self._reader is not None:
            self._token(position, token)
        if self._reader is not None:
            self._texts.append(_text_of(self._reader.flush(finish)))
        text = "".join(self._texts).strip()
        if not text:
            return self._broken_off(GenerationFailed(_EMPTY))
        item = self._summaries.item(self._id, text)
        done = self._encode([self._items.whole("response.output_item.done", item)])
        counts = usage(self._num_prompt_tokens, self._num_cached_tokens, self._num_tokens, self._num_reasoning)
        response = self._settings.response([item], Finish.EOS, usage=counts)
        return done + self._stored(response)


class CompactionDocument(ResponseDocument):
    """A response that consists of a summary, not as a stream."""

    def __init__(self, settings: ResponseSettings, summaries: Summaries) -> None:
        super().__init__(settings)
        self._summaries = summaries

    def _document(self) -> OpenAiResponse:
        (sequence,) = self._sequences
        events, num_reasoning = read_whole(self._settings.form, sequence)
        text = _text_of(events).strip()
        if not text:
            raise GenerationFailed(_EMPTY)
        item = self._summaries.item(_item_id(self._settings), text)
        num_cached = sequence.extras.num_cached_tokens or 0
        counts = usage(self._num_prompt_tokens, num_cached, sequence.num_tokens, num_reasoning)
        return self._settings.store(self._settings.response([item], Finish.EOS, usage=counts))


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
