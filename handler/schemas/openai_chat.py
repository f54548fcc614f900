"""OpenAI's chat completions at /v1/chat/completions, with vLLM's and TGI's additions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from handler.core import Names, Request
from handler.errors import InvalidParameter, InvalidPayload, ServingError
from handler.schemas import openai_errors
from handler.schemas.agreement import show
from handler.schemas.base import Answer, Call, Context
from handler.schemas.chat_replies import Completion
from handler.schemas.messages import read_messages
from handler.schemas.openai_chat_replies import ChatDocument, ChatStream, Form
from handler.schemas.openai_parameters import CHAT, HARMLESS, harmless, read_model
from handler.schemas.openai_replies import KEEP_ALIVE, Head, Usage, identity
from handler.schemas.parameters import Found, Parameter, Table, read_all
from handler.schemas.reading import reported
from handler.schemas.tool_calls.formats import plain_messages, takes_tools
from handler.schemas.tool_calls.reading import Tools, read_tools

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
    """Sampled unless `temperature` is 0; an answer is as long as the model's context lets it, unless limited."""

    name = "openai_chat"
    any_media = False

    def parse(self, body: Any, context: Context) -> Call:
        if not isinstance(body, dict):
            raise InvalidPayload("the body must be a JSON object with 'messages'")
        model, adapter = read_model(body, context)
        messages, unknown = read_messages(body.get("messages"), tools=True)
        tools = read_tools(body, context)
        stream, usage = read_stream(body)
        found = _read_parameters(body, tools, context)
        known = ["parallel_tool_calls"]
        ignored = [
            *reported([*(unread(body, _READ)), *unknown, *tools.unknown], body, context),
            *harmless(body, known),
        ]
        marks = tools.format.special(context.vocabulary) if tools.format else frozenset[str]()
        sampling = replace(found.sampling, logprobs=bool(body.get("logprobs")))
        if marks:
            sampling = replace(sampling, skip_special_tokens=False)
        has_place = takes_tools(context.chat_template)
        request = Request(
            "",
            sampling,
            truncate=found.others.get("truncate"),
            messages=messages if has_place else tuple(plain_messages(messages, tools.shown)),
            tools=tuple(tools.shown) if has_place else (),
            adapter=adapter,
            fill="max_new_tokens" not in found.names,
            names=names("messages", found),
        )
        id, created = identity("chatcmpl")
        form = Form(
            Completion(id, created, logprobs=sampling.logprobs, top_logprobs=bool(body.get("top_logprobs"))),
            tools.parser,
            single=tools.single,
            named=bool(tools.name),
            every_role=model == "tgi",
            marks=marks,
        )
        head = Head(id, created, model, context.fingerprint)
        if not stream:
            return Call((request,), ChatDocument(head, form, sampling.n), ignored)
        return streaming((request,), ChatStream(head, form, sampling.n, usage), ignored)

    def refused(self, error: ServingError, body: Any = None) -> Answer:
        return openai_errors.refused(error)


def _read_parameters(body: Mapping[str, Any], tools: Tools, context: Context) -> Found:
    table = CHAT
    if tools.guide is not None:
        guide = tools.guide
        table = Table({**CHAT.parameters, "tool_choice": Parameter("guide", lambda value: guide)})
    found = read_all(body, context, defaults=defaults(body, _ANY), table=table)
    if (count := body.get("top_logprobs")) and not body.get("logprobs"):
        raise InvalidParameter(f"top_logprobs={count}: needs logprobs=true")
    return found


# -- what both of OpenAI's kinds share -----------------------------------------------------------------------------


def defaults(body: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """`temperature` 0 is greedy; of what is no number, nothing comes but a refusal."""
    return {"do_sample": body.get("temperature") != 0, "max_new_tokens": max_new_tokens}


def unread(body: Mapping[str, Any], read: set[str]) -> list[str]:
    """The body's names that mean nothing here; null is absent."""
    return [name for name, value in body.items() if value is not None and name not in read and name not in HARMLESS]


def names(prompt: str, found: Found) -> Names:
    """What the client calls what is checked later on."""
    guide = found.names.get("guide", "response_format")
    return Names(
        prompt=prompt,
        max_new_tokens=found.names.get("max_new_tokens", "max_tokens"),
        stop_token_ids="stop_token_ids",
        bad_token_ids="bad_words",
        logit_bias="logit_bias",
        guide={"tool_choice": "tools"}.get(guide, guide),  # whose schemas it is made of
    )


def read_stream(body: Mapping[str, Any]) -> tuple[bool, Usage]:
    """`stream` and `stream_options`."""
    stream, options = body.get("stream"), body.get("stream_options")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidParameter(f"stream={show(stream)}: must be true or false")
    if options is None:
        return bool(stream), Usage()
    if not stream:
        raise InvalidParameter(f"stream_options={show(options)}: needs stream=true")
    if not isinstance(options, dict):
        raise InvalidParameter(f"stream_options={show(options)}: must be an object")
    for name, value in options.items():  # include_obfuscation: nothing is put beside the text here
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise InvalidParameter(f"stream_options.{name[:64]}: is not known")
        if value is not None and not isinstance(value, bool):
            raise InvalidParameter(f"stream_options.{name}={show(value)}: must be true or false")
    at_end = bool(options.get("include_usage"))
    return True, Usage(at_end, at_end and bool(options.get("continuous_usage_stats")))


def streaming(requests: tuple[Request, ...], reply: Any, ignored: list[str]) -> Call:
    return Call(requests, reply, ignored, streams=True, keep_alive=KEEP_ALIVE, failed=openai_errors.stream_end)
