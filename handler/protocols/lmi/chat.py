"""LMI's chat completions, used for every inference body with `messages`.

Requests and responses follow OpenAI's API, except for LMI's differences in the responses.
Source: docs.djl.ai, "Chat Completions API Schema".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.framing import JSON, JSONLINES, SSE_DONE, Framing
from handler.core.values import Adapter, Finish
from handler.protocols.kernel.context import NO_DEFAULTS, NO_REQUEST, GenerationDefaults, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, Formats, ParsedRequest
from handler.protocols.kernel.parameters import Parameter, Table, request_shape
from handler.protocols.kernel.readers import ADAPTERS, merge_adapters, read_adapters, string
from handler.protocols.kernel.reply import Reply, SequenceOutput
from handler.protocols.kernel.schema import NULL, Shape
from handler.protocols.lmi.api import LmiChatAnswer, LmiChatChunk
from handler.protocols.lmi.dynamic_batch import LmiDynamicBatch
from handler.protocols.lmi.request import Lmi
from handler.protocols.openai.api import OpenAiMessagePart, StopReason, StreamUsage
from handler.protocols.openai.chat import (
    CHAT_EXAMPLE,
    ChatDocument,
    ChatStream,
    OpenAiChat,
    ParsedChat,
    VllmChatFormat,
)
from handler.protocols.openai.request import CHAT, Choice, Usage, read_stream
from handler.protocols.openai.unsupported import FOREIGN

# -- LMI's parameter names in bodies with `messages` or `prompt` -------------------------------------------------------
# vLLM ignores unknown fields, and LMI's documented input formatters add `parameters` to every body.


_FOREIGN_NOTICE = (
    "{} has no effect in bodies with messages or prompt, as in LMI; send parameters at the top level under vLLM's "
    "names. The header x-lmi-ignored-parameters lists the ignored names"
)


def without_foreign(table: Table) -> Table:
    """Return the table without the names that OpenAI's routes refuse, so that they count as unknown."""
    return Table({name: parameter for name, parameter in table.parameters.items() if name not in FOREIGN}, table.prefix)


def noting_foreign(request: ParsedRequest, context: ServerContext) -> ParsedRequest:
    """Return the request unchanged. For each ignored name of `FOREIGN`, log once that it has no effect."""
    for name in FOREIGN.keys() & {*request.ignored}:
        context.notices.once(_FOREIGN_NOTICE.format(name))
    return request


# -- the chat dialect --------------------------------------------------------------------------------------------------


class LmiChatFormat(VllmChatFormat):
    __slots__ = ()

    def reason(self, finish: Finish | None, *, called: bool, broken: bool = False) -> str | None:
        reason = super().reason(finish, called=called, broken=broken)
        return finish.value if finish is not None and reason == "stop" else reason

    def stopped(self, finish: Finish | None, stop: str | None, last_id: int) -> StopReason:
        return {}


def _without_model(response: Mapping[str, object]) -> Mapping[str, object]:
    """Omit the fields that LMI's responses and chunks do not have."""
    return {name: value for name, value in response.items() if name not in ("model", "system_fingerprint")}


class LmiChatStream(ChatStream):
    def _value(self, choices: list[Any], counts: StreamUsage) -> Mapping[str, object]:
        return _without_model(super()._value(choices, counts))

    def _message_part(self, choice: Choice, delta: OpenAiMessagePart) -> OpenAiMessagePart:
        return delta if choice.begun else {**delta, "role": "assistant"}


class LmiChatDocument(ChatDocument):
    def _document(self) -> Mapping[str, object]:
        return _without_model(super()._document())

    def _choice(self, sequence: SequenceOutput) -> Any:
        """Render a choice. If it has no text, its content is "" if `tool_choice` names a function, or else None."""
        choice: Any = super()._choice(sequence)
        del choice["message"]["refusal"]
        if choice["message"]["content"] is None and self._format.named:
            choice["message"]["content"] = ""
        return choice


TABLE = Table(
    {**without_foreign(CHAT).parameters, "model": Parameter("", string), "user": Parameter("", string)},
)

_VLLMS_SINCE = (0, 32)
_EVENTS_SINCE = (0, 37)  # LMI v26


class Chat(OpenAiChat):
    """The chat dialect of an LMI mode, with the error format of the mode.

    Tokens are sampled unless `temperature` is 0. By default, a response has at most 30 tokens. If vLLM parses the
    chats, the model's default limit or the context limit applies instead.
    """

    table = TABLE
    fields: Mapping[str, Shape] = {**OpenAiChat.fields, **ADAPTERS, "inputs": NULL}  # `inputs` makes it a prompt
    format = LmiChatFormat
    refusal = False

    def __init__(self, mode: Lmi | LmiDynamicBatch) -> None:
        self.name = f"{mode.name}_chat"
        self.errors = mode.errors
        self.description = Description(
            title="Chat",
            request="ChatRequest",
            request_shape=request_shape(self.fields, self.table, "messages"),
            error=mode.description.error,
            example=CHAT_EXAMPLE,
            response=LmiChatAnswer,
            chunk=LmiChatChunk,
            failure=mode.description.failure,
            streams=(JSONLINES.content_type, SSE_DONE.content_type),
        )

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        return noting_foreign(super().parse(body, context, request_context), context)

    def read_model(
        self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext
    ) -> tuple[str, Adapter | None]:
        """Read the LoRA adapter from `adapters` or `model`. Ignore a `model` that is not the name of an adapter."""
        (adapter,) = read_adapters(body, 1, context, request_context.adapter)
        name = body.get("model")
        if isinstance(name, str) and not context.no_adapters:
            adapter = merge_adapters(adapter, context.adapters.find(name), "model")
        return context.model_names[0] if adapter is None else adapter.name, adapter

    def generation(self, context: ServerContext) -> GenerationDefaults:
        """Return the generation defaults of the model. These modes of LMI use them only in chats that vLLM parses."""
        return context.generation if _are_vllms(context) else NO_DEFAULTS

    def max_new_tokens(self, context: ServerContext) -> int | None:
        return None if _are_vllms(context) else 30

    def read_framing(self, body: Mapping[str, Any], context: ServerContext) -> tuple[Framing, Usage]:
        """Read `stream` and `stream_options`. `option.output_formatter` has no effect on the framing of chats."""
        stream, usage = read_stream(body, context)
        framing = SSE_DONE if context.config.lmi_version >= _EVENTS_SINCE else JSONLINES
        return framing if stream else JSON, usage

    def respond(self, chat: ParsedChat) -> ParsedRequest:
        requests = (chat.request,)

        def as_openai() -> Reply:
            """Return the reply in OpenAI's format. Unlike LMI's responses, it contains the model name."""
            return super(Chat, self).respond(chat).reply

        formats = Formats(as_openai=as_openai)
        if chat.framing is JSON:
            return ParsedRequest(requests, LmiChatDocument(chat), self.errors, chat.ignored, formats=formats)
        stream = LmiChatStream(chat, self.errors)
        return ParsedRequest(requests, stream, self.errors, chat.ignored, streams=True, formats=formats)


def _are_vllms(context: ServerContext) -> bool:
    """Return whether vLLM parses LMI's chats, as it does since LMI 0.32 except with TensorRT-LLM."""
    return context.config.lmi_version >= _VLLMS_SINCE and context.engine != "trtllm"
