"""TGI's /tokenize and /chat_tokenize: a prompt's tokens, with their places in its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from handler.core.errors import InvalidParameter
from handler.core.framing import JSON
from handler.core.media import MEDIA
from handler.core.text import Prompt, spans
from handler.core.values import Request
from handler.protocols.assistant.template import READERS, read_template
from handler.protocols.assistant.tools.prompt import lay_out
from handler.protocols.assistant.tools.request import choose_format
from handler.protocols.kernel.base import Dialect, ParsedRequest
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.readers.body import report_unknown
from handler.protocols.kernel.readers.messages import read_messages
from handler.protocols.kernel.reply import PromptDocument, list_parts
from handler.protocols.kernel.validation import show
from handler.protocols.openai.parameters import CHAT, HARMLESS
from handler.protocols.tgi.answers import TgiPiece
from handler.protocols.tgi.errors import OutOfRange, TgiErrors, WrongType
from handler.protocols.tgi.request import read_body, unknown

_SHAPING = ("add_special_tokens", "chat_template", *READERS)
"""What changes a chat's prompt, as in OpenAI's chat."""

_NO_EFFECT = HARMLESS | {"model", "stream", "stream_options", "tool_choice", "parallel_tool_calls"}
_NO_EFFECT |= CHAT.parameters.keys() - {*_SHAPING, "truncate_prompt_tokens"}
"""What does not change it."""


class _TgiTokenize(Dialect):
    """Of a generate body only `inputs` counts; as in TGI, `truncate` has no effect."""

    name = "tgi_tokenize"
    unique_keys = True
    errors = TgiErrors()

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        inputs = read_body(body).inputs
        if not inputs:
            raise OutOfRange("`inputs` cannot be empty")
        reply = PromptDocument(_tokens)
        return ParsedRequest((Request(inputs),), reply, self.errors, unknown(body, context), take_prompt=reply.take)


class _TgiChatTokenize(_TgiTokenize):
    """A chat as /v1/chat/completions lays it out."""

    name = "tgi_chat_tokenize"

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        if not isinstance(body, dict) or "messages" not in body:
            raise WrongType("missing field `messages`")
        if body.get("tools"):
            raise OutOfRange("`tools` are not laid out by this route")  # they would change the text
        given = {name: value for name, value in body.items() if value is not None and name not in ("messages", "tools")}
        options = {name: _read(name, given.pop(name)) for name in _SHAPING if name in given}
        text_only = replace(context, no_media=dict.fromkeys(MEDIA, "this route lays out text only"))
        messages, _, ignored = read_messages(body["messages"], text_only)
        try:
            template, unread = read_template(options, messages, context)
        except InvalidParameter as error:
            raise OutOfRange(error.message) from None
        others = [name for name in given if name not in _NO_EFFECT]
        ignored = report_unknown([*ignored, *unread, *others], body, context)
        laid, _ = lay_out(messages, (), context.chat_template, choose_format(context))
        reply = PromptDocument(_chat_tokens)
        request = Request("", messages=tuple(laid), template=template)
        return ParsedRequest((request,), reply, self.errors, ignored, take_prompt=reply.take)


TOKENIZE, CHAT_TOKENIZE = _TgiTokenize(), _TgiChatTokenize()


def _read(name: str, value: Any) -> Any:
    try:
        return CHAT.parameters[name].read(value)
    except ValueError as error:
        raise OutOfRange(f"{name}={show(value)}: {error}") from None


def _chat_tokens(prompt: Prompt) -> Iterator[bytes]:
    """Yield an object's JSON, in parts."""
    yield b'{"tokenize_response":'
    yield from _tokens(prompt)
    yield b',"templated_text":' + JSON.encode(prompt.text) + b"}"


def _tokens(prompt: Prompt) -> Iterator[bytes]:
    """Return a list's JSON, in parts: each token with its place in the text, in bytes.

    A token that has no such place has no text and (0, 0).
    """
    data = prompt.text.encode()
    places = zip(prompt.ids, spans(prompt) or [(0, 0)] * len(prompt.ids), strict=True)
    pieces: Iterator[TgiPiece] = (
        {"id": id, "text": data[start:stop].decode(), "start": start, "stop": stop} for id, (start, stop) in places
    )
    return list_parts(pieces)
