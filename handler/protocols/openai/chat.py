"""OpenAI's chat completions at /v1/chat/completions, with vLLM's and TGI's additions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter
from handler.core.framing import JSON, JSON_TEXTS, SLOT, SSE_DONE, Framing, template
from handler.core.text import Prompt
from handler.core.values import Adapter, Finish, Request, Token, keep_last
from handler.protocols.assistant.answer import ResponseForm, ResponseReader, response_form
from handler.protocols.assistant.events import Arguments, CallEnd, CallStart, Event, LeadingSpace, Reasoning
from handler.protocols.assistant.template import read_template
from handler.protocols.assistant.tools.request import (
    TOOL_FIELDS,
    ChatTools,
    Tools,
    arrange,
    choose_format,
    lay_out,
    read_tools,
)
from handler.protocols.kernel.context import GenerationDefaults, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, ParsedRequest, prompt_request
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.messages import MESSAGES, ChatMessages, check_number, read_messages
from handler.protocols.kernel.parameters import STRICT, Parameter, ParsedParameters, read_sampled, request_shape
from handler.protocols.kernel.reply import SequenceOutput
from handler.protocols.kernel.schema import Shape
from handler.protocols.openai.api import (
    ChatLogprobs,
    ChosenLogprob,
    FunctionCall,
    MessageParts,
    OpenAiChatAnswer,
    OpenAiChatChoice,
    OpenAiChatChunk,
    OpenAiChatPart,
    OpenAiError,
    OpenAiMessagePart,
    StopReason,
    TokenLogprob,
    ToolCallPart,
)
from handler.protocols.openai.request import (
    CHAT,
    MODEL,
    OPENAI_NAMES,
    REASONS,
    STREAM,
    Choice,
    OpenAiDialect,
    OpenAiHead,
    Stream,
    Usage,
    WholeResponse,
    identity,
    names,
    read_stream,
    stop_reason,
    streaming,
)


class Logprobs(NamedTuple):
    """The log-probabilities that a response shows.

    Attributes:
        chosen: whether to show the log-probabilities of the chosen tokens.
        alternatives: whether to also show alternatives to the chosen tokens.
        refusal: whether to add OpenAI's `refusal` field.
    """

    chosen: bool = False
    alternatives: bool = False
    refusal: bool = False

    def of(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if not self.chosen:
            return None
        content = [self._token(token) for token in tokens if token.id >= 0]
        return {"content": content, "refusal": None} if self.refusal else {"content": content}

    def _token(self, token: Token) -> ChosenLogprob:
        """Render one token. If the engine reports no alternatives, only the chosen token is listed, as in LMI."""
        chosen = _logprob(token)
        tops = ([_logprob(alternative) for alternative in token.top] or [chosen]) if self.alternatives else []
        return {"token": chosen["token"], "logprob": chosen["logprob"], "bytes": chosen["bytes"], "top_logprobs": tops}


def _logprob(token: Token) -> TokenLogprob:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()) or None}


class ChatFormat(NamedTuple):
    """The options of chat responses.

    Attributes:
        form: the settings for parsing the model's responses.
        every_role: whether to put the role and `tool_calls` into every chunk, as TGI's clients expect.
        shows_reasoning: whether to show the reasoning.
    """

    logprobs: Logprobs
    form: ResponseForm
    every_role: bool = False
    shows_reasoning: bool = True

    def stopped(self, finish: Finish | None, stop: str | None, last_id: int) -> StopReason:
        """Return vLLM's `stop_reason` field, which a choice has in addition to `finish_reason`."""
        return {"stop_reason": stop_reason(finish, stop, last_id)}

    def delta(self, text: str, finish: Finish | None) -> OpenAiMessagePart:
        """Return the `delta` with the text of a token. As in OpenAI's API, a chunk that only ends a choice has none."""
        return {"content": text} if text or finish is None or self.every_role else {}

    @property
    def named(self) -> bool:
        return bool(self.form.tools.name)

    def reason(self, finish: Finish | None, *, called: bool, broken: bool = False) -> str | None:
        """Return the finish reason for the client, or None if the response has not ended.

        If the request names the tool to call, OpenAI reports `stop` instead of `tool_calls`.

        Args:
            called: whether the response has tool calls.
            broken: whether a call is incomplete, in which case the reason must not say that the calls can be executed.
        """
        reason = REASONS[finish]
        if not called or reason != "stop":
            return reason
        if broken:
            return "length" if self.named else "stop"
        return "stop" if self.named else "tool_calls"

    def selects(self, event: Event) -> bool:
        """Return whether an event is shown to the client."""
        if isinstance(event, str):
            return True
        if isinstance(event, Reasoning):
            return self.shows_reasoning
        return not (self.form.tools.single and event.number)


class VllmChatFormat(ChatFormat):
    """The format of chats that vLLM and LMI write: the last chunk of a stream of text has content, perhaps empty."""

    __slots__ = ()

    def delta(self, text: str, finish: Finish | None) -> OpenAiMessagePart:
        return {"content": text}


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatChoice(Choice):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.reader: ResponseReader | None = None
        self.space: LeadingSpace | None = None  # None if the request has no tools
        self.reasoning_event: bytes | None = None  # the template of a chunk with only reasoning
        self.called = False
        self.broken = False  # True if a tool call is incomplete
        self.waiting: list[Token] = []  # tokens whose text and log-probabilities are not sent yet


class ChatStream(Stream[ChatChoice]):
    kind = "chat.completion.chunk"

    def __init__(self, chat: ParsedChat, errors: ErrorFormat) -> None:
        choices = [ChatChoice(index) for index in range(chat.request.sampling.n)]
        super().__init__(chat.head, choices, chat.usage, framing=chat.framing, errors=errors)
        self._format = chat.format
        self._is_read = not chat.format.form.is_text
        self._is_text = self._is_text and not self._is_read

    def start(self, index: int, num_prompt_tokens: int) -> None:
        super().start(index, num_prompt_tokens)
        for choice in self._choices:
            choice.reader = self._format.form.reader()
            if self._format.form.tools.parser() is not None:
                choice.space = LeadingSpace()

    @property
    def _is_plain(self) -> bool:
        return not self._format.logprobs.chosen and not (self._is_read and self._usage.always)

    def _text_part(self, choice: ChatChoice, text: str) -> OpenAiChatPart:
        return self._choice_part(choice, {"content": text}, [], None)

    def _token(self, position: int, token: Token) -> bytes:
        choice = self._choices[position]
        if choice.reader is None or choice.text_event is None:
            return super()._token(position, token)
        events = choice.reader.feed(token)
        if choice.space is not None:
            events = choice.space.read(events)
        if not events:
            return b""
        if len(events) == 1:
            if isinstance(event := events[0], str):
                return self._text_chunk(choice.text_event, event)
            if isinstance(event, Reasoning) and self._format.shows_reasoning:
                return self._reasoning_chunk(choice, event.text)
        delta = self._message_delta(choice, events)
        return self._chunk(JSON.encode(self._choice_part(choice, delta, [], None))) if delta else b""

    def _reasoning_chunk(self, choice: ChatChoice, reasoning: str) -> bytes:
        if choice.reasoning_event is None:
            part = self._choice_part(choice, {"reasoning": SLOT, "reasoning_content": SLOT}, [], None)
            choice.reasoning_event = template(self._chunk(JSON.encode(part)))
        text = JSON_TEXTS[reasoning]
        return choice.reasoning_event % (text, text)

    def _part(self, choice: ChatChoice, token: Token, finish: Finish | None) -> OpenAiChatPart | None:
        if choice.reader is None:
            delta = self._format.delta(token.text, finish)
            return self._ended(choice, self._choice_part(choice, delta, [token], finish), token, finish)
        events = choice.reader.feed(token)
        if self._format.shows_reasoning or not choice.reader.thinking:
            choice.waiting.append(token)
        if finish is not None:
            events += choice.reader.flush(finish)
        if choice.space is not None:
            events = choice.space.read(events)
            events += choice.space.flush() if finish is not None else []
        delta = self._message_delta(choice, events)
        if not delta and finish is None:
            return None
        tokens, choice.waiting = choice.waiting, []
        return self._ended(choice, self._choice_part(choice, delta, tokens, finish), token, finish)

    def _ended(self, choice: ChatChoice, part: OpenAiChatPart, token: Token, finish: Finish | None) -> OpenAiChatPart:
        return part if finish is None else {**part, **self._format.stopped(finish, choice.stop, token.id)}

    def _choice_part(
        self, choice: ChatChoice, delta: OpenAiMessagePart, tokens: list[Token], finish: Finish | None
    ) -> OpenAiChatPart:
        return {
            "index": choice.index,
            "delta": self._message_part(choice, delta),
            "logprobs": self._format.logprobs.of(tokens),
            "finish_reason": self._format.reason(finish, called=choice.called, broken=choice.broken),
        }

    def _message_part(self, choice: Choice, delta: OpenAiMessagePart) -> OpenAiMessagePart:
        """Add the role to the first part of a choice, and null for missing content.

        With `every_role`, add both to every part, together with null for missing `tool_calls`.
        """
        if not choice.begun or self._format.every_role:
            delta = {"role": "assistant", "content": None, **delta}
        if self._format.every_role:
            delta.setdefault("tool_calls", None)
        return delta

    def _message_delta(self, choice: ChatChoice, events: Iterable[Event]) -> OpenAiMessagePart:
        """Build the `delta` for events of the parser. It is empty if there are no events to show."""
        delta: OpenAiMessagePart = {}
        calls: dict[int, ToolCallPart] = {}
        for event in filter(self._format.selects, events):
            if isinstance(event, str):
                delta["content"] = (delta.get("content") or "") + event
            elif isinstance(event, Reasoning):
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + event.text
            elif isinstance(event, CallStart):
                calls[event.number] = {
                    "index": event.number,
                    "id": call_id(),
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
            elif isinstance(event, Arguments):
                call = calls.setdefault(event.number, {"index": event.number, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text
            elif not event.whole:
                choice.broken = True
        if calls:
            choice.called = True
            delta["tool_calls"] = list(calls.values())
        return delta

    def _count_reasoning(self) -> int | None:
        if self._format.form.thinking is None:
            return None
        return sum(choice.reader.num_reasoning for choice in self._choices if choice.reader is not None)


class ChatDocument(WholeResponse):
    """A non-streaming response. The choices are in the order of their seeds."""

    def __init__(self, chat: ParsedChat) -> None:
        super().__init__(chat.head, 1, chat.request.sampling.n, chat.framing)
        self._format = chat.format
        self._num_reasoning = None if chat.format.form.thinking is None else 0

    def _document(self) -> Mapping[str, object]:
        choices = [self._choice(sequence) for sequence in self._sequences]
        head = self._head.value("chat.completion")
        value: OpenAiChatAnswer = {**head, "choices": choices, "usage": self._usage(self._num_reasoning)}
        return value

    def _choice(self, sequence: SequenceOutput) -> OpenAiChatChoice:
        """Parse the response of a sequence, and count its reasoning tokens."""
        reader, tokens = self._format.form.reader(), sequence.tokens
        if reader is None:
            events: list[Event] = [sequence.text]
        else:
            events, text_tokens = reader.read(tokens, sequence.finish)
            tokens = tokens if self._format.shows_reasoning else text_tokens
            if self._num_reasoning is not None:
                self._num_reasoning += reader.num_reasoning
        selected = [event for event in events if self._format.selects(event)]
        content, parts = _gather(selected)
        broken = any(isinstance(event, CallEnd) and not event.whole for event in selected)
        return {
            "index": sequence.index,
            "message": {"role": "assistant", "content": content, "refusal": None, **parts},
            "logprobs": self._format.logprobs.of(tokens),
            "finish_reason": self._format.reason(sequence.finish, called="tool_calls" in parts, broken=broken),
            **self._format.stopped(sequence.finish, sequence.extras.stop, sequence.last_id),
        }


def _gather(events: Sequence[Event]) -> tuple[str | None, MessageParts]:
    """Return the text and the other parts of a message. The text is None if there is only reasoning or tool calls."""
    content: list[str] = []
    reasoning_texts: list[str] = []
    functions: dict[int, FunctionCall] = {}
    for event in events:
        if isinstance(event, str):
            content.append(event)
        elif isinstance(event, Reasoning):
            reasoning_texts.append(event.text)
        elif isinstance(event, CallStart):
            functions[event.number] = {"name": event.name, "arguments": ""}
        elif isinstance(event, Arguments):
            functions[event.number]["arguments"] += event.text
    text, reasoning = "".join(content), "".join(reasoning_texts)
    parts: MessageParts = {}
    if reasoning:
        parts["reasoning"] = parts["reasoning_content"] = reasoning
    if functions:
        parts["tool_calls"] = [
            {"id": call_id(), "type": "function", "function": function} for function in functions.values()
        ]
    return None if (functions and not text.strip()) or (reasoning and not text) else text, parts


class ParsedChat(NamedTuple):
    """The parsed body of a chat, from which the reply is built.

    Attributes:
        framing: the framing of the response. If it is the dialect's `whole`, the response is not streamed.
        ignored: the fields that have no effect.
    """

    request: Request
    head: OpenAiHead
    format: ChatFormat
    framing: Framing
    usage: Usage
    ignored: Sequence[str]


def counted(chat: ParsedChat, errors: ErrorFormat, document: Callable[[int], Mapping[str, Any]]) -> ParsedRequest:
    """Return a parsed request whose response is the number of tokens in the prompt.

    Args:
        document: builds the response from the number of tokens.
    """

    def render(prompt: Prompt) -> list[bytes]:
        return [JSON.encode(document(len(prompt.ids)))]

    return prompt_request(chat.request, render, errors, chat.ignored)


_TGI = "tgi"
"""The name of the model with which a client asks for TGI's behavior."""


def continued(body: Mapping[str, Any], conversation: ChatMessages) -> tuple[Mapping[str, Any], ChatMessages]:
    """If the last message is text from the assistant, return a chat whose response continues it, as in TGI.

    TGI strips spaces at the end of the prompt. The parameters of other servers take precedence over this rule.
    """
    *earlier, last = conversation.messages
    text = last["content"] if last["role"] == "assistant" and not last.get("tool_calls") else None
    if not isinstance(text, str) or not text.strip() or any(body.get(name) is not None for name in _CONTINUING):
        return body, conversation
    messages = (*earlier, {**last, "content": text.rstrip()})
    return {**body, "continue_final_message": True}, conversation._replace(messages=messages)


_CONTINUING = ("add_generation_prompt", "continue_final_message")

CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "Name the capital of France."}], "max_tokens": 16}
"""The example body in the OpenAPI document for all chat dialects, without `model`."""


_RESPONSE_RULES = ("response_format", "text", "output_config", "output_format")
"""The fields for structured output in each API. If a tool call is required, the field is checked but has no effect."""


class OpenAiChat(OpenAiDialect):
    """The dialect of OpenAI's chat completions. Tokens are sampled unless `temperature` is 0.

    Subclasses change the fields and the format (`lmi/chat.py`), not the flow.

    Attributes:
        whole: the framing of non-streaming responses.
        stream: the framing of streams.
        refusal: whether `logprobs` in responses has a `refusal` field, as in OpenAI's API.
        field_names: the client's names for fields.
    """

    name = "openai_chat"
    needed = "a JSON object with 'messages'"
    table = CHAT
    fields: Mapping[str, Shape] = {"messages": MESSAGES, **MODEL, **STREAM, **TOOL_FIELDS}
    description = Description(
        title="OpenAI chat",
        request="OpenAiChatRequest",
        request_shape=request_shape(fields, table, "messages"),
        error=OpenAiError,
        example={"model": "", **CHAT_EXAMPLE},
        response=OpenAiChatAnswer,
        chunk=OpenAiChatChunk,
        streams=(SSE_DONE.content_type,),
    )
    format: type[ChatFormat] = ChatFormat
    whole: Framing = JSON
    stream: Framing = SSE_DONE
    refusal = True
    field_names = OPENAI_NAMES

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        model = self.read_model(body, context, request_context)
        conversation = read_messages(body.get("messages"), context)
        if model[0] == _TGI:
            body, conversation = continued(body, conversation)
        return self.respond(self.build(body, model, conversation, read_tools(body, context), context))

    def translate(
        self,
        body: Mapping[str, Any],
        fields: Mapping[str, Any],
        conversation: ChatMessages,
        chat_tools: ChatTools,
        context: ServerContext,
        request_context: RequestContext,
    ) -> ParsedChat:
        """Build the chat for the body of another API. The field `model` is read in the same way as in a chat.

        Args:
            body: the body as the client sent it.
            fields: the parameters under the chat's names for them, the keys of `table`.
            chat_tools: what the body says about tools.
        """
        model = self.read_model(body, context, request_context)
        check_number(conversation.media, context)
        fields = {**fields, "tool_choice": body.get("tool_choice")}  # the client's own value, for errors
        tools = arrange(chat_tools, context, self.table.path_of(STRICT))
        return self.build(fields, model, conversation, tools, context)

    def build(
        self,
        body: Mapping[str, Any],
        model: tuple[str, Adapter | None],
        conversation: ChatMessages,
        tools: Tools,
        context: ServerContext,
    ) -> ParsedChat:
        """Build the chat for a body whose model, messages and tools have been read, possibly from another API's fields.

        Args:
            body: the other fields, such as `stream` and those of `table`.
            model: the name of the model in the response, and the LoRA adapter.
        """
        name, adapter = model
        messages, media, unknown = conversation
        framing, usage = self.read_framing(body, context)
        parameters, tools = self._read_parameters(body, tools, context)
        template, unread = read_template(parameters.others, messages, context, self.field_names)
        ignored = [*self.ignored(body, context, *unknown, *tools.unknown, *unread), *tools.unheeded]
        prefix = messages[-1]["content"] if template.continue_final_message else None
        form = response_form(tools, context, dict(template.arguments), prefix)
        sampling = form.sampling(parameters.sampling, context, self.field_names)
        messages, prompt_tools = lay_out(messages, tools.shown, context.chat_template, choose_format(context))
        request = Request(
            "",
            sampling,
            truncation=keep_last(parameters.others.get("truncate")),
            messages=messages,
            media=tuple(media),
            tools=prompt_tools,
            template=template,
            read_prompt=None if form.thinking is None else form.thinking.read_prompt,
            adapter=adapter,
            priority=parameters.others.get("priority", 0),
            fill_context=self.max_new_tokens(context) is None and "max_new_tokens" not in parameters.names,
            names=names(self.field_names, parameters),
        )
        for_tgi = name == _TGI
        format = self.format(
            Logprobs(sampling.logprobs, bool(body.get("top_logprobs")), self.refusal),
            form,
            every_role=for_tgi,
            shows_reasoning=parameters.others.get("include_reasoning", True),
        )
        head = OpenAiHead(*identity("chatcmpl"), name, context.fingerprint)
        if for_tgi:
            usage = usage._replace(null=True)
        return ParsedChat(request, head, format, framing, usage, ignored)

    def generation(self, context: ServerContext) -> GenerationDefaults:
        """Return the defaults of parameters that the client omits."""
        return context.generation

    def max_new_tokens(self, context: ServerContext) -> int | None:
        """Return the default limit on new tokens. None means the default of the model, or the rest of the context."""
        return None

    def read_framing(self, body: Mapping[str, Any], context: ServerContext) -> tuple[Framing, Usage]:
        """Read `stream` and `stream_options`. Return the framing of the response and the settings for token counts."""
        stream, usage = read_stream(body, context)
        return self.stream if stream else self.whole, usage

    def respond(self, chat: ParsedChat) -> ParsedRequest:
        """Return the parsed request with a reply in the format of this dialect."""
        if chat.framing is self.whole:
            return ParsedRequest((chat.request,), ChatDocument(chat), self.errors, chat.ignored)
        return streaming((chat.request,), ChatStream(chat, self.errors), self.errors, chat.ignored, chat.framing)

    def _read_parameters(
        self, body: Mapping[str, Any], tools: Tools, context: ServerContext
    ) -> tuple[ParsedParameters, Tools]:
        """Read the parameters. Combine the requested structured output with the grammar for tool calls."""
        rule, table = tools.structured_output, self.table
        if rule is not None and not rule.allows_text:  # responses are tool calls, so a format for texts has no effect
            checked = {
                name: entry._replace(field="") for name, entry in table.parameters.items() if name in _RESPONSE_RULES
            }
            checked["tool_choice"] = Parameter("structured_output", lambda value: rule)
            table = replace(table, parameters={**table.parameters, **checked})
        parameters = read_sampled(
            body,
            context,
            generation=self.generation(context),
            max_new_tokens=self.max_new_tokens(context),
            defaults={"logprobs": bool(body.get("logprobs")), "structured_output": rule},
            table=table,
        )
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise InvalidParameter(f"top_logprobs={body['top_logprobs']}: needs logprobs=true")
        field, sampling = parameters.names.get("structured_output"), parameters.sampling
        if tools.choice == "auto" and field is not None and sampling.structured_output is not None:
            tools = tools.with_response(sampling.structured_output, field)
            rule = tools.structured_output or sampling.structured_output
            parameters = parameters._replace(sampling=sampling._replace(structured_output=rule))
        return parameters, tools
