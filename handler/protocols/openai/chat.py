"""OpenAI's chat completions at /v1/chat/completions, with vLLM's and TGI's additions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import JSON, SSE_DONE, Framing
from handler.core.text import Prompt
from handler.core.values import Adapter, Request, keep_last
from handler.protocols.assistant.answer import answer_form
from handler.protocols.assistant.template import read_template
from handler.protocols.assistant.tools.prompt import lay_out
from handler.protocols.assistant.tools.request import FIELDS, Tools, choose_format, read_tools
from handler.protocols.kernel.base import Dialect, ParsedRequest
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.generation import GenerationDefaults
from handler.protocols.kernel.parameters import Parameter, ParsedParameters, Table, read_sampled
from handler.protocols.kernel.readers.body import report_unknown
from handler.protocols.kernel.readers.lax import PYDANTIC, relaxed_by
from handler.protocols.kernel.readers.messages import MESSAGES, read_messages
from handler.protocols.kernel.reply import PromptDocument
from handler.protocols.kernel.schema.shapes import Shape
from handler.protocols.openai.chat_response import ChatDocument, ChatFormat, ChatStream, Logprobs
from handler.protocols.openai.errors import ERRORS
from handler.protocols.openai.parameters import CHAT, MODEL, harmless, read_model
from handler.protocols.openai.request import STREAM, names, read_stream, streaming, unknown_fields
from handler.protocols.openai.response import Head, Usage, identity


class ParsedChat(NamedTuple):
    """What a body says, for the reply that renders its answer.

    Attributes:
        framing: of the answer; the dialect's `whole` for a whole one.
        ignored: as in `ParsedRequest`.
    """

    request: Request
    head: Head
    format: ChatFormat
    framing: Framing
    usage: Usage
    ignored: Sequence[str]


def counted(chat: ParsedChat, errors: ErrorFormat, document: Callable[[int], Mapping[str, Any]]) -> ParsedRequest:
    """Answer with the number of the prompt's tokens alone.

    Args:
        document: makes the answer.
    """

    def render(prompt: Prompt) -> list[bytes]:
        return [JSON.encode(document(len(prompt.ids)))]

    reply = PromptDocument(render)
    return ParsedRequest((chat.request,), reply, errors, chat.ignored, take_prompt=reply.take)


class OpenAiChat(Dialect):
    """It samples unless `temperature` is 0.

    Subclasses change the fields and the format (`lmi/chat.py`), not the flow.

    Attributes:
        table: the fields that set parameters.
        fields: the others, with what they take.
        whole, stream: the framings of whole answers and of streams.
        refusal: `logprobs` has the field, as OpenAI's have.
    """

    name = "openai_chat"
    errors: ErrorFormat = ERRORS
    table = CHAT
    fields: Mapping[str, Shape] = {"messages": MESSAGES, **MODEL, **STREAM, **FIELDS}
    format: type[ChatFormat] = ChatFormat
    whole: Framing = JSON
    stream: Framing = SSE_DONE
    refusal = True

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload("the body must be a JSON object with 'messages'")
        body = self._relax()(body)
        model, adapter = self.read_model(body, context)
        messages, media, unknown = read_messages(body.get("messages"), context)
        tools = read_tools(body, context)
        framing, usage = self.read_framing(body, context)
        parameters = self._read_parameters(body, tools, context)
        template, unread = read_template(parameters.others, messages, context)
        ignored = [
            *report_unknown([*unknown_fields(body, self._known), *unknown, *tools.unknown, *unread], body, context),
            *harmless(body, self._known),
            *tools.unheeded,
        ]
        prefix = messages[-1]["content"] if template.continue_final_message else None
        form = answer_form(tools, context, dict(template.arguments), prefix)
        sampling = form.sampling(parameters.sampling, context)
        messages, shown = lay_out(messages, tools.shown, context.chat_template, choose_format(context))
        request = Request(
            "",
            sampling,
            truncation=keep_last(parameters.others.get("truncate")),
            messages=messages,
            media=tuple(media),
            tools=shown,
            template=template,
            read_prompt=None if form.thinking is None else form.thinking.read_prompt,
            adapter=adapter,
            priority=parameters.others.get("priority", 0),
            fill_context=self.max_new_tokens(context) is None and "max_new_tokens" not in parameters.names,
            names=names("messages", parameters),
        )
        for_tgi = model == "tgi"
        format = self.format(
            Logprobs(sampling.logprobs, bool(body.get("top_logprobs")), self.refusal),
            form,
            every_role=for_tgi,
            thoughts=parameters.others.get("include_reasoning", True),
        )
        head = Head(*identity("chatcmpl"), model, context.fingerprint)
        if for_tgi:
            usage = usage._replace(null=True)
        return self.answer(ParsedChat(request, head, format, framing, usage, ignored))

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.fields) | self.table.parameters.keys()

    @classmethod
    @functools.cache
    def _relax(cls) -> Callable[[Any], Any]:
        """Return what puts the body's numbers and flags right."""
        return relaxed_by(PYDANTIC, {**cls.fields, **cls.table.shapes})

    def read_model(self, body: Mapping[str, Any], context: ServerContext) -> tuple[str, Adapter | None]:
        """Read the model's name for the answer, and the LoRA adapter."""
        return read_model(body, context)

    def generation(self, context: ServerContext) -> GenerationDefaults:
        """Return the values of parameters that the client leaves out."""
        return context.generation

    def max_new_tokens(self, context: ServerContext) -> int | None:
        """Return the tokens of an answer without a limit; None: the model's own default, else it fills the context."""
        return None

    def read_framing(self, body: Mapping[str, Any], context: ServerContext) -> tuple[Framing, Usage]:
        """Read `stream` and `stream_options`."""
        stream, usage = read_stream(body, context)
        return self.stream if stream else self.whole, usage

    def answer(self, chat: ParsedChat) -> ParsedRequest:
        """Return the request with the reply that renders its answer."""
        requests, num_sequences = (chat.request,), chat.request.sampling.n
        if chat.framing is self.whole:
            document = ChatDocument(chat.head, chat.format, num_sequences, chat.framing)
            return ParsedRequest(requests, document, self.errors, chat.ignored)
        stream = ChatStream(chat.head, chat.format, num_sequences, chat.usage, chat.framing, self.errors)
        return streaming(requests, stream, self.errors, chat.ignored, chat.framing)

    def _read_parameters(self, body: Mapping[str, Any], tools: Tools, context: ServerContext) -> ParsedParameters:
        table, rule = self.table, tools.structured_output
        if rule is not None and not rule.allows_text:
            table = Table({**table.parameters, "tool_choice": Parameter("structured_output", lambda value: rule)})
        parameters = read_sampled(
            body,
            context,
            generation=self.generation(context),
            max_new_tokens=self.max_new_tokens(context),
            defaults={"logprobs": bool(body.get("logprobs")), "structured_output": rule},
            table=table,
        )
        if (count := body.get("top_logprobs")) and not body.get("logprobs"):
            raise InvalidParameter(f"top_logprobs={count}: needs logprobs=true")
        return parameters
