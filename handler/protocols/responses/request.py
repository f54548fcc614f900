"""OpenAI's responses at /v1/responses, and their count at /v1/responses/input_tokens.

A body is translated to that of a chat, which the chat's own readers read. A response is kept where the server keeps any
and the body does not say otherwise: `stored.py`.
Source: OpenAI's API reference, "Responses", and the types of its Python package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import JSON
from handler.protocols.assistant.template import EFFORTS
from handler.protocols.kernel.base import Dialect, ParsedRequest
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.kept import Keeping, Wanted
from handler.protocols.kernel.parameters import Table
from handler.protocols.kernel.readers.body import report_unknown
from handler.protocols.kernel.readers.lax import PYDANTIC, relaxed_by
from handler.protocols.kernel.schema.shapes import Shape, nullable, record
from handler.protocols.kernel.validation import Named
from handler.protocols.openai.chat import OpenAiChat, ParsedChat, counted
from handler.protocols.openai.errors import ERRORS
from handler.protocols.openai.parameters import CHAT
from handler.protocols.openai.request import streaming
from handler.protocols.responses.answers import ResponseHead, ResponseStart, ResponseTokens
from handler.protocols.responses.head import encode_head, read_head, without_strict
from handler.protocols.responses.items import new_id, secret_id
from handler.protocols.responses.messages import INPUT, InputReader
from handler.protocols.responses.parameters import NO_EFFECT, TABLE
from handler.protocols.responses.response import NUM_STATES, ResponseDocument, ResponseStream, Settings
from handler.protocols.responses.stored import KEPT, make_keeping, read_kept, read_wanted
from handler.protocols.responses.tools import TOOLS, ToolsReader, read_choice

_OWN = {"messages": "input", "reasoning_effort": "reasoning.effort"}
"""The chat's names of what has another one here."""

_OF_CHAT = {name: OpenAiChat.fields[name] for name in ("model", "stream", "parallel_tool_calls")}
_SAME = (TABLE.parameters.keys() - _OWN.keys()) | _OF_CHAT.keys()
"""Names that the chat reads as they are."""

_WORDS = {"].function.": "].", "reasoning_effort": "reasoning.effort", "messages[].reasoning": "input[].reasoning"}
_REASONING: Mapping[str, Shape] = {"effort": {"enum": [*EFFORTS, None]}, "summary": {}, "generate_summary": {}}

FIELDS: Mapping[str, Shape] = {
    **INPUT,
    **_OF_CHAT,
    **TOOLS,
    "reasoning": nullable(record({}, _REASONING, additionalProperties=False)),
}
_UNHEEDED = "tools[].function.strict"
"""How the chat's reader says that nothing enforces the tools' schemas."""

_READ = FIELDS.keys() | TABLE.parameters.keys() | NO_EFFECT
_relax = relaxed_by(PYDANTIC, {**FIELDS, **TABLE.shapes})


class OpenAiResponses(Dialect):
    """It samples unless `temperature` is 0. An answer without a limit fills the model's context."""

    name = "openai_responses"
    errors = ERRORS

    def wanted(self, body: Any) -> Wanted | None:
        return read_wanted(_relax(body), keeps=True)

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        return self._parse(body, context, _Chat)

    def _parse(self, body: Any, context: ServerContext, chat: type[_Chat]) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload("the body must be a JSON object with 'input'")
        body = _relax(body)
        for name, own in _OWN.items():
            if body.get(name) is not None:
                raise InvalidParameter(f"{name}: is not supported: write {own}")
        keeps = read_kept(body, context) and chat is _Chat
        reader, tools, effort = InputReader(context), ToolsReader(), _effort(body)
        reader.read(body)
        tools.read(body.get("tools"))
        translated = {
            **{name: body[name] for name in _SAME if name in body and not (context.keeper and name in KEPT)},
            "messages": reader.chat,
            "tools": tools.tools,
            "tool_choice": read_choice(body.get("tool_choice"), tools.tools),
            "reasoning_effort": effort,
        }
        unknown = [name for name in body if name not in _READ and body[name] is not None]
        ignored = report_unknown([*unknown, *reader.unknown], body, context)
        try:
            head = read_head(body, context.generation, store=keeps)
            keeping = make_keeping(context.keeper, head, reader.items) if context.keeper and keeps else None
            parsed = chat(head, tools.namespaces, keeping).parse(translated, context)
        except (InvalidParameter, InvalidPayload) as error:
            raise type(error)(_in_own_words(error.message)) from None
        no_effect = [name for name in body if name in NO_EFFECT and body[name] is not None]
        return parsed._replace(ignored=[*ignored, *map(_in_own_words, parsed.ignored), *no_effect])


class ResponsesCount(OpenAiResponses):
    """The tokens of the same prompt; what shapes an answer is checked and has no effect."""

    name = "openai_responses_count"

    def wanted(self, body: Any) -> Wanted | None:
        return read_wanted(body, keeps=False)

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        return self._parse(body, context, _CountedChat)


class _Chat(OpenAiChat):
    """One translated body.

    Args:
        head: what a response repeats of its request.
        namespaces: a tool's name in the prompt -> its namespace and its name there.
        keeping: keeps the response; None where it is not kept.
    """

    table = Table(
        {name: parameter for name, parameter in TABLE.parameters.items() if name not in _OWN}
        | {"reasoning_effort": CHAT.parameters["reasoning_effort"]}
    )
    fields: Mapping[str, Shape] = {name: shape for name, shape in OpenAiChat.fields.items() if name != "stream_options"}

    def __init__(
        self, head: ResponseHead, namespaces: Mapping[str, tuple[str, str]], keeping: Keeping | None = None
    ) -> None:
        self._head = head
        self._namespaces = namespaces
        self._keeping = keeping

    def answer(self, chat: ParsedChat) -> ParsedRequest:
        repeated = self._head
        if _UNHEEDED in chat.ignored:
            repeated["tools"] = without_strict(repeated["tools"])
        head: ResponseStart = {
            "id": new_id("resp") if self._keeping is None else secret_id("resp"),
            "object": "response",
            "created_at": chat.head.created,
            "model": chat.head.model,
            **encode_head(repeated),
        }
        settings, requests = Settings(head, chat.format.form, self._namespaces, self._keeping), (chat.request,)
        if chat.framing is JSON:
            parsed, times = ParsedRequest(requests, ResponseDocument(settings), self.errors, chat.ignored), 1
        else:
            parsed, times = streaming(requests, ResponseStream(settings), self.errors, chat.ignored), NUM_STATES
        repeated_size = (1 + times) * len(JSON.encode(head))  # and once until then
        return parsed._replace(keeps=self._keeping is not None, num_repeated=repeated_size)


class _CountedChat(_Chat):
    def answer(self, chat: ParsedChat) -> ParsedRequest:
        return counted(chat, self.errors, _tokens)


def _tokens(number: int) -> ResponseTokens:
    return {"object": "response.input_tokens", "input_tokens": number}


def _effort(body: Mapping[str, Any]) -> Any:
    """Read `reasoning`; return its effort, which the chat's table checks."""
    reasoning = body.get("reasoning")
    if reasoning is None:
        return None
    if not isinstance(reasoning, dict) or reasoning.keys() - _REASONING.keys():
        raise Named("reasoning", reasoning).refused("must be an object with 'effort', 'summary' or both")
    if (effort := reasoning.get("effort")) is not None and effort not in EFFORTS:
        raise Named("reasoning", reasoning).refused(f"'effort' must be one of {', '.join(EFFORTS)}")
    return effort


def _in_own_words(text: str) -> str:
    """Name the fields of a chat in a message, or in a list of names, as the Responses API does."""
    for name, own in _WORDS.items():
        text = text.replace(name, own)
    return text
