"""OpenAI's responses from tokens: as a whole, or as events with a running number."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from handler.core.errors import ServingError
from handler.core.framing import JSON_TEXTS, NUMBER, SLOT, named_event, template
from handler.core.values import Finish, Token
from handler.protocols.assistant.answer import AnswerForm
from handler.protocols.assistant.replies import BlockStream, read_whole
from handler.protocols.kernel.base import TokenLine
from handler.protocols.kernel.kept import Keeping
from handler.protocols.kernel.reply import WholeReply
from handler.protocols.openai.errors import ERRORS
from handler.protocols.responses.answers import (
    OpenAiResponse,
    OpenAiResponseEvent,
    ResponseEvent,
    ResponseFailure,
    ResponseItem,
    ResponseStart,
    ResponseState,
    ResponseUsage,
    Status,
)
from handler.protocols.responses.items import Items

_STATES: Mapping[Status, ResponseState] = {
    "in_progress": "response.in_progress",
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
}


NUM_STATES = 3
"""Events of a stream that tell the whole response."""


class Settings(NamedTuple):
    """What an answer's form depends on.

    Attributes:
        head: the fields of a response that do not change.
        namespaces: a tool's name in the prompt -> its namespace and its name there.
        keeping: keeps the response; None where it is not kept.
    """

    head: ResponseStart
    form: AnswerForm
    namespaces: Mapping[str, tuple[str, str]]
    keeping: Keeping | None = None

    def items(self) -> Items:
        most = self.head["max_tool_calls"]
        return Items(self.namespaces, 1 if self.form.tools.single else most, secret=self.keeping is not None)

    def response(
        self,
        output: Sequence[ResponseItem] = (),
        finish: Finish | None = None,
        *,
        broken: bool = False,
        usage: ResponseUsage | None = None,
        error: ResponseFailure | None = None,
    ) -> OpenAiResponse:
        """Return a response; without `finish` it is in progress. With a `broken` call it is incomplete."""
        ended: Status = "incomplete" if broken else "completed"
        others: Mapping[Finish | None, Status] = {
            None: "in_progress",
            Finish.LENGTH: "incomplete",
            Finish.ERROR: "failed",
        }
        status = others.get(finish, ended)
        return {
            **self.head,
            "status": status,
            "completed_at": now() if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if finish is Finish.LENGTH else None,
            "output": [*output],
            "usage": usage,
        }

    def kept(self, response: OpenAiResponse) -> OpenAiResponse:
        """Keep a response that has ended, where it is to be kept; return it, saying `store` false where it is not."""
        if self.keeping is None:
            return response
        head = {name: value for name, value in response.items() if name != "output"}
        kept = self.keeping.end(response["id"], head, response["output"], failed=response["status"] == "failed")
        return response if kept else {**response, "store": False}


def now() -> int:
    return int(time.time())


def usage(num_prompt_tokens: int, num_cached_tokens: int, num_tokens: int, num_thoughts: int) -> ResponseUsage:
    return {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_tokens,
        "output_tokens_details": {"reasoning_tokens": num_thoughts},
        "total_tokens": num_prompt_tokens + num_tokens,
    }


class ResponseStream(BlockStream):
    """`response.created`, `response.in_progress`, the events of each item, and how the response ended."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(ERRORS, settings.form)
        self._settings = settings
        self._items = settings.items()
        self._text_event: bytes | None = None  # the template of a delta of text, while a message is open

    def token_line(self) -> TokenLine | None:
        return None if self._text_event is None or not self._settings.form.is_text else self._text_token

    def _broken_off(self, error: ServingError) -> bytes:
        rest = self._encode(self._items.end(complete=False))
        failure: ResponseFailure = {
            "code": "rate_limit_exceeded" if ERRORS.status(error) == 429 else "server_error",
            "message": error.message,
        }
        response = self._settings.kept(self._settings.response(self._items.output, Finish.ERROR, error=failure))
        return rest + self._encode([self._told(response)])

    def _told(self, response: OpenAiResponse, kind: ResponseState | None = None) -> ResponseEvent:
        """Return the event that tells a response's state."""
        return {
            "type": kind or _STATES[response["status"]],
            "sequence_number": self._items.number(),
            "response": response,
        }

    def _head(self) -> bytes:
        response = self._settings.response()
        if self._settings.keeping is not None:
            self._settings.keeping.begin(response["id"], response)
        return self._encode([self._told(response, "response.created"), self._told(response)])

    def _token(self, place: int, token: Token) -> bytes:
        return self._encode(self._items.feed([token.text] if self._reader is None else self._reader.feed(token)))

    def _text_token(self, token: Token) -> bytes:
        """Encode a token of an answer that is nothing but text, amid a message."""
        self._num_tokens += token.id >= 0
        self._items.parts.append(token.text)
        return self._text(token.text, self._items.number())

    def _text(self, text: str, number: int) -> bytes:
        assert self._text_event is not None, "a message is open"
        return self._text_event % (number, JSON_TEXTS[text])

    def _encode(self, events: Sequence[OpenAiResponseEvent]) -> bytes:
        chunks = []
        for event in events:
            if self._text_event is not None and event["type"] == "response.output_text.delta":
                chunks.append(self._text(event["delta"], event["sequence_number"]))
                continue
            self._text_event = None
            chunks.append(named_event(event))
        item = self._items.open
        if self._text_event is None and item is not None and item["type"] == "message":
            self._text_event = template(named_event(self._items.delta(item, SLOT, NUMBER)))
        return b"".join(chunks)

    def _last(self, place: int, token: Token, finish: Finish) -> bytes:
        rest = self._token(place, token) if token.text or self._reader is not None else b""
        rest += self._encode(self._items.feed(self._reader.flush(finish))) if self._reader is not None else b""
        rest += self._encode(self._items.end(complete=finish is not Finish.LENGTH))
        counts = usage(self._num_prompt_tokens, self._num_cached_tokens, self._num_tokens, self._num_thoughts)
        response = self._settings.response(self._items.output, finish, broken=self._items.broken, usage=counts)
        return rest + self._encode([self._told(self._settings.kept(response))])


class ResponseDocument(WholeReply):
    """A whole response."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(1)
        self._settings = settings

    def _document(self) -> OpenAiResponse:
        (sequence,) = self._sequences
        items, answer = self._settings.items(), read_whole(self._settings.form, sequence)
        items.feed(answer.events)
        items.end(complete=sequence.finish is not Finish.LENGTH)
        counts = usage(
            self._num_prompt_tokens, sequence.extras.num_cached_tokens or 0, answer.num_tokens, answer.num_thoughts
        )
        response = self._settings.response(items.output, sequence.finish, broken=items.broken, usage=counts)
        return self._settings.kept(response)
