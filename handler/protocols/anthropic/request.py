"""Anthropic's messages at /v1/messages, and their count at /v1/messages/count_tokens.

A body is translated to that of a chat, which the chat's own readers read.
Source: Anthropic's API reference, "Messages", and the types of its Python package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload, ServingError
from handler.core.framing import JSON, Framing
from handler.core.values import Request
from handler.protocols.anthropic import errors
from handler.protocols.anthropic.events import PING
from handler.protocols.anthropic.messages import MessagesReader
from handler.protocols.anthropic.parameters import ACCEPTED, NO_EFFECT, TABLE
from handler.protocols.anthropic.response import CountDocument, MessageDocument, MessageStream, Settings
from handler.protocols.anthropic.tools import in_own_words, read_choice, read_tools
from handler.protocols.base import HttpResponse, ParsedRequest, ServerContext
from handler.protocols.openai.chat import OpenAiChat
from handler.protocols.openai.chat_response import ChatFormat
from handler.protocols.openai.response import Head, Usage
from handler.protocols.readers.body import report_unknown
from handler.protocols.validation import Named

_READ = {"messages", "system", "tools", "tool_choice", "thinking"} | ACCEPTED | NO_EFFECT
_SAME = TABLE.parameters.keys() | {"model", "stream"}
"""Names that the chat reads as they are."""

_DISPLAYS = (None, "summarized", "omitted")


class Thinking(NamedTuple):
    """`thinking`.

    Attributes:
        enabled: None leaves it to the model's template.
        budget: tokens of thoughts.
        show: thinking blocks have a text.
    """

    enabled: bool | None = None
    budget: int | None = None
    show: bool = True


class AnthropicMessages:
    """It samples unless `temperature` is 0. Tokens beyond the model's context are cut off, and the answer says so."""

    name = "anthropic_messages"
    any_media = False

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        if isinstance(body, dict) and body.get("max_tokens") is None:
            raise InvalidPayload("'max_tokens' is required")
        return self._parse(body, context, _Chat)

    def _parse(self, body: Any, context: ServerContext, chat: type[_Chat]) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload("the body must be a JSON object with 'messages' and 'max_tokens'")
        thinking = _read_thinking(Named("thinking", body.get("thinking")))
        reader = MessagesReader()
        reader.read(body)
        translated = {
            **{name: body[name] for name in _SAME if name in body},
            **read_choice(body.get("tool_choice"), body.get("tools")),
            "messages": reader.chat,
            "tools": read_tools(body.get("tools")),
        }
        unknown = [name for name in body if name not in _READ | _SAME and body[name] is not None]
        ignored = report_unknown([*unknown, *reader.unknown], body, context)
        try:
            parsed = chat(thinking).parse(translated, context)
        except (InvalidParameter, InvalidPayload) as error:
            raise type(error)(in_own_words(error.message)) from None
        no_effect = [name for name in body if name in NO_EFFECT and body[name] is not None]
        return parsed._replace(ignored=[*ignored, *map(in_own_words, parsed.ignored), *no_effect])

    def refused(self, error: ServingError, body: Any = None, context: ServerContext | None = None) -> HttpResponse:
        return errors.refused(error)


class AnthropicCount(AnthropicMessages):
    """The tokens of the same prompt; what shapes an answer is checked and has no effect."""

    name = "anthropic_count"

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        return self._parse(body, context, _CountedChat)


class _Chat(OpenAiChat):
    """One translated body."""

    table = TABLE
    fields = frozenset({"messages", "model", "stream", "tools", "tool_choice", "parallel_tool_calls"})

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking

    def answer(
        self,
        request: Request,
        head: Head,
        format: ChatFormat,
        framing: Framing,
        usage: Usage,
        ignored: Sequence[str],
    ) -> ParsedRequest:
        sampling = request.sampling
        request = replace(request, sampling=sampling._replace(include_stop=bool(sampling.stop)), min_free_tokens=1)
        id = head.id.replace("chatcmpl-", "msg_")
        settings = Settings(id, head.model, format, sampling.max_new_tokens, sampling.stop, self._thinking.show)
        if framing is JSON:
            return ParsedRequest((request,), MessageDocument(settings), ignored)
        return ParsedRequest(
            (request,), MessageStream(settings), ignored, streams=True, keep_alive=PING, failed=errors.stream_end
        )


class _CountedChat(_Chat):
    def answer(
        self,
        request: Request,
        head: Head,
        format: ChatFormat,
        framing: Framing,
        usage: Usage,
        ignored: Sequence[str],
    ) -> ParsedRequest:
        return ParsedRequest((request,), CountDocument(), ignored, counts=True)


def _read_thinking(given: Named) -> Thinking:
    """Read `thinking`.

    Raises:
        InvalidParameter: naming what would be right.
    """
    value = given.value
    if value is None:
        return Thinking()
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("enabled", "disabled", "adaptive") or value.keys() - {"type", "budget_tokens", "display"}:
        raise given.refused("must be an object with a 'type' that is enabled, adaptive or disabled")
    budget = value.get("budget_tokens")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise given.refused("'budget_tokens' must be an integer of at least 1")
    if kind == "enabled" and budget is None:
        raise given.refused("'budget_tokens' is required")
    if value.get("display") not in _DISPLAYS:
        raise given.refused("'display' must be summarized or omitted")
    enabled = {"enabled": True, "adaptive": None, "disabled": False}[kind]
    return Thinking(enabled, budget if kind == "enabled" else None, value.get("display") != "omitted")
