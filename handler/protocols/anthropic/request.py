"""Anthropic's messages at /v1/messages, and their count at /v1/messages/count_tokens.

A body is translated to that of a chat, which the chat's own readers read.
Source: Anthropic's API reference, "Messages", and the types of its Python package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.framing import JSON
from handler.core.identifiers import new_secret
from handler.core.values import Sampling
from handler.protocols.anthropic.answers import AnthropicCount as AnthropicTokens
from handler.protocols.anthropic.errors import ERRORS
from handler.protocols.anthropic.messages import MESSAGES, MessagesReader
from handler.protocols.anthropic.parameters import ACCEPTED, NO_EFFECT, TABLE
from handler.protocols.anthropic.response import MessageDocument, MessageStream, Settings, encode
from handler.protocols.anthropic.thinking import THINKING, Thinking, read_effort, read_thinking, read_thoughts_kept
from handler.protocols.anthropic.threads import ThreadKeeping, continued, make_keeping, read_wanted
from handler.protocols.anthropic.tools import TOOLS, read_choice, read_tools
from handler.protocols.anthropic.words import in_own_words
from handler.protocols.kernel.base import Dialect, ParsedRequest, Reply
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.kept import Wanted
from handler.protocols.kernel.parameters import Table
from handler.protocols.kernel.readers.body import report_unknown
from handler.protocols.kernel.readers.lax import PYDANTIC, relaxed_by
from handler.protocols.kernel.reply import PromptOnly
from handler.protocols.kernel.schema.shapes import Shape
from handler.protocols.openai.chat import OpenAiChat, ParsedChat, counted
from handler.protocols.openai.parameters import CHAT

_OF_CHAT = {name: OpenAiChat.fields[name] for name in ("model", "stream")}
_SAME = TABLE.parameters.keys() | _OF_CHAT.keys()
"""Names that the chat reads as they are."""

FIELDS: Mapping[str, Shape] = {**MESSAGES, **_OF_CHAT, **TOOLS, **THINKING}
_READ = FIELDS.keys() | TABLE.parameters.keys() | ACCEPTED | NO_EFFECT | {"thread"}
_relax = relaxed_by(PYDANTIC, {**FIELDS, **TABLE.shapes})

PING = encode({"type": "ping"})
"""What a stream sends when it has been silent for a while."""

_TRANSLATED = ("chat_template_kwargs", "reasoning_effort", "continue_final_message", "thinking_token_budget")
"""The chat's names that a body's own are translated to, beside those of every chat."""


class AnthropicMessages(Dialect):
    """It samples unless `temperature` is 0. Tokens beyond the model's context are cut off, and the answer says so."""

    name = "anthropic_messages"
    errors = ERRORS
    unique_keys = True

    def wanted(self, body: Any) -> Wanted | None:
        return read_wanted(body, keeps=True)

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        if isinstance(body, dict) and body.get("max_tokens") is None:
            raise InvalidPayload("'max_tokens' is required")
        return self._parse(body, context, _Chat)

    def _parse(self, body: Any, context: ServerContext, chat: type[_Chat]) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload("the body must be a JSON object with 'messages' and 'max_tokens'")
        body = _relax(body)
        own, body = body, continued(body, context)
        thinking = read_thinking(body.get("thinking"))
        reader = MessagesReader(context)
        reader.read(body)
        reader.clear_thinking(read_thoughts_kept(body.get("context_management")))
        arguments, unheeded = thinking.template_arguments(context)
        translated = {
            **{name: body[name] for name in _SAME if name in body},
            **read_choice(body.get("tool_choice"), body.get("tools")),
            "messages": reader.chat,
            "tools": read_tools(body.get("tools")),
            "chat_template_kwargs": arguments,
            "reasoning_effort": read_effort(body),
            "continue_final_message": reader.continues,
            "thinking_token_budget": thinking.token_budget(context),
        }
        unknown = [name for name in body if name not in _READ and body[name] is not None]
        ignored = report_unknown([*unknown, *reader.unknown, *unheeded], body, context)
        keeping = make_keeping(own, context) if chat is _Chat else None
        parsed = chat(thinking, keeping).parse(translated, context)
        no_effect = [name for name in body if name in NO_EFFECT and body[name] is not None]
        return parsed._replace(ignored=[*ignored, *map(in_own_words, parsed.ignored), *no_effect])


class AnthropicCount(AnthropicMessages):
    """The tokens of the same prompt; what shapes an answer is checked and has no effect."""

    name = "anthropic_count"

    def wanted(self, body: Any) -> Wanted | None:
        return read_wanted(body, keeps=False)

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        if isinstance(body, dict):
            body = {name: value for name, value in body.items() if name != "max_tokens"}
        return self._parse(body, context, _CountedChat)


class _Chat(OpenAiChat):
    """One translated body.

    Args:
        keeping: keeps the answer; None where it is in no thread.
    """

    errors = ERRORS

    table = Table({**TABLE.parameters, **{name: CHAT.parameters[name] for name in _TRANSLATED}})
    fields: Mapping[str, Shape] = {name: shape for name, shape in OpenAiChat.fields.items() if name != "stream_options"}

    def __init__(self, thinking: Thinking, keeping: ThreadKeeping | None = None) -> None:
        self._thinking = thinking
        self._keeping = keeping

    def answer(self, chat: ParsedChat) -> ParsedRequest:
        sampling, form = chat.request.sampling, chat.format.form
        request = chat.request._replace(sampling=sampling._replace(include_stop=bool(sampling.stop)), min_free_tokens=1)
        id = chat.head.id.replace("chatcmpl-", "msg_") if self._keeping is None else f"msg_{new_secret()}"
        settings = Settings(
            id, chat.head.model, form, sampling.max_new_tokens, sampling.stop, self._thinking.show, self._keeping
        )
        streams = chat.framing is not JSON
        reply: Reply = MessageStream(settings) if streams else MessageDocument(settings)
        if sampling.max_new_tokens == 0:  # the prompt's prefix goes to the engine's cache
            request = request._replace(sampling=Sampling(max_new_tokens=1), read_prompt=None)
            reply = PromptOnly(reply)
        sign, keeps = PING if streams else b"", self._keeping is not None
        return ParsedRequest(
            (request,), reply, self.errors, chat.ignored, streams=streams, keep_alive=sign, keeps=keeps
        )


class _CountedChat(_Chat):
    def answer(self, chat: ParsedChat) -> ParsedRequest:
        return counted(chat, self.errors, _tokens)


def _tokens(number: int) -> AnthropicTokens:
    return {"input_tokens": number}
