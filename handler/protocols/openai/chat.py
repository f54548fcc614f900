"""OpenAI's chat completions at /v1/chat/completions, with vLLM's and TGI's additions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload, ServingError
from handler.core.values import Request
from handler.protocols.base import HttpResponse, ParsedRequest, ServerContext
from handler.protocols.openai import errors
from handler.protocols.openai.chat_response import ChatDocument, ChatFormat, ChatStream, Logprobs
from handler.protocols.openai.parameters import CHAT, harmless, read_model
from handler.protocols.openai.request import defaults, names, read_stream, streaming, unknown_fields
from handler.protocols.openai.response import Head, identity
from handler.protocols.openai.tools.formats import plain_messages, takes_tools
from handler.protocols.openai.tools.request import Tools, read_tools
from handler.protocols.parameters import Parameter, ParsedParameters, Table, read_all
from handler.protocols.readers.body import report_unknown
from handler.protocols.readers.messages import read_messages

_READ = {
    *CHAT.parameters,
    "messages",
    "model",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
}

_ANY = 1 << 30  # new tokens: as many as there is room for


class OpenAiChat:
    """It samples unless `temperature` is 0. Without a limit an answer may fill the model's context."""

    name = "openai_chat"
    any_media = False

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload("the body must be a JSON object with 'messages'")
        model, adapter = read_model(body, context)
        messages, unknown = read_messages(body.get("messages"), tools=True)
        tools = read_tools(body, context)
        stream, usage = read_stream(body)
        parameters = _read_parameters(body, tools, context)
        ignored = [
            *report_unknown([*(unknown_fields(body, _READ)), *unknown, *tools.unknown], body, context),
            *harmless(body),
        ]
        marks = tools.format.special(context.vocabulary) if tools.format else frozenset[str]()
        sampling = parameters.sampling._replace(logprobs=bool(body.get("logprobs")))
        if marks:
            sampling = sampling._replace(skip_special_tokens=False)
        has_place = takes_tools(context.chat_template)
        request = Request(
            "",
            sampling,
            truncate=parameters.others.get("truncate"),
            messages=messages if has_place else tuple(plain_messages(messages, tools.shown)),
            tools=tuple(tools.shown) if has_place else (),
            adapter=adapter,
            fill_context="max_new_tokens" not in parameters.names,
            names=names("messages", parameters),
        )
        for_tgi = model == "tgi"
        id, created = identity("chatcmpl")
        format = ChatFormat(
            Logprobs(sampling.logprobs, bool(body.get("top_logprobs"))),
            tools.parser,
            single=tools.single,
            named=bool(tools.name),
            every_role=for_tgi,
            marks=marks,
        )
        head = Head(id, created, model, context.fingerprint)
        if not stream:
            return ParsedRequest((request,), ChatDocument(head, format, sampling.n), ignored)
        return streaming(
            (request,), ChatStream(head, format, sampling.n, usage._replace(null=usage.null or for_tgi)), ignored
        )

    def refused(self, error: ServingError, body: Any = None, context: ServerContext | None = None) -> HttpResponse:
        return errors.refused(error)


def _read_parameters(body: Mapping[str, Any], tools: Tools, context: ServerContext) -> ParsedParameters:
    table = CHAT
    if tools.structured_output is not None:
        structured_output = tools.structured_output
        table = Table(
            {**CHAT.parameters, "tool_choice": Parameter("structured_output", lambda value: structured_output)}
        )
    parameters = read_all(body, context, defaults=defaults(body, _ANY), table=table)
    if (count := body.get("top_logprobs")) and not body.get("logprobs"):
        raise InvalidParameter(f"top_logprobs={count}: needs logprobs=true")
    return parameters
