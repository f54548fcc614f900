"""The dialects of Anthropic's endpoints /v1/messages and /v1/messages/count_tokens, and their responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import JSON, SSE
from handler.core.values import Sampling, new_secret
from handler.protocols.anthropic.api import ERRORS, AnthropicCount, AnthropicError, AnthropicMessage, MessageEvent
from handler.protocols.anthropic.chat import (
    MessagesReader,
    Thinking,
    Translator,
    read_thinking,
    summarizing,
    user_message,
)
from handler.protocols.anthropic.compaction import (
    CompactingMessageDocument,
    CompactingMessageStream,
    Signer,
    SummaryDocument,
    SummaryStream,
    check_summarizable,
)
from handler.protocols.anthropic.edits import ContextEdits, Edit, read_edits
from handler.protocols.anthropic.response import (
    THREAD,
    MessageDocument,
    MessageSettings,
    MessageStream,
    ThreadKeeping,
    continued,
    encode,
    make_keeping,
    read_wanted,
)
from handler.protocols.anthropic.types import ACCEPTED, COMPACTION, FIELDS, NO_EFFECT, SUMMARIZE, TABLE
from handler.protocols.assistant.summary import PROMPT
from handler.protocols.kernel.context import RequestContext, RequestShape, ServerContext
from handler.protocols.kernel.dialect import Description, FollowUp, ParsedRequest
from handler.protocols.kernel.objects import reader_of
from handler.protocols.kernel.parameters import request_shape
from handler.protocols.kernel.readers import NamedValue
from handler.protocols.kernel.reply import PromptOnly, Reply
from handler.protocols.kernel.stored import Wanted
from handler.protocols.openai.chat import CHAT_EXAMPLE, ParsedChat, counted
from handler.protocols.openai.request import OpenAiDialect

PING = encode({"type": "ping"})
"""The event that keeps a silent stream open."""

_read_summarize = reader_of(SUMMARIZE)


def _body(*required: str) -> RequestShape:
    """Return a function that builds a body's schema. The schema includes `thread` if the server stores responses."""
    with_thread = request_shape({**FIELDS, "thread": THREAD}, TABLE, *required)
    without_thread = request_shape(FIELDS, TABLE, *required)
    return lambda context: (with_thread if context.config.stores_responses else without_thread)(context)


class AnthropicMessages(OpenAiDialect):
    """The dialect of Anthropic's Messages API. Tokens are sampled unless `temperature` is 0.

    A response that does not fit into the context of the model is truncated, and its stop reason says so.
    """

    name = "anthropic_messages"
    errors = ERRORS
    needed = "a JSON object with 'messages' and 'max_tokens'"
    table, fields, harmless, accepted = TABLE, FIELDS, NO_EFFECT, ACCEPTED | {"thread"}
    description = Description(
        title="Anthropic messages",
        request="AnthropicMessagesRequest",
        request_shape=_body("messages", "max_tokens"),
        error=AnthropicError,
        example={"model": "", **CHAT_EXAMPLE, "anthropic_version": "any"},
        response=AnthropicMessage,
        chunk=MessageEvent,
        streams=(SSE.content_type,),
    )
    unique_keys = True

    def wanted(self, body: Any) -> Wanted | None:
        return read_wanted(body, keeps=self.computes)

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        if not self.computes:
            body = {name: value for name, value in body.items() if name != "max_tokens"}
        elif body.get("max_tokens") is None:
            raise InvalidPayload("'max_tokens' is required")
        sent_body, body = body, continued(body, context, request_context)
        thinking = NamedValue("thinking", body.get("thinking")).optional(read_thinking) or Thinking()
        compaction = NamedValue(COMPACTION, body.get(COMPACTION)).optional(_read_summarize)
        if compaction is not None and self.computes:
            _check_alone(body)
            body = {**body, "messages": [*body["messages"], user_message(compaction["instructions"] or PROMPT)]}
        reader = MessagesReader(context, request_context.owner)
        reader.read(body, request_context.recalled.history)
        edits = NamedValue("context_management", body.get("context_management")).optional(read_edits)
        translator = Translator(body, thinking, reader, context, request_context)
        ignored = self.unknown(body, context, *reader.unknown, *translator.unheeded)
        keeping = make_keeping(sent_body, request_context.keeper) if self.computes else None
        summarizes = compaction is not None and self.computes
        chat = (translator.summary if summarizes else translator.chat)(reader.conversation())
        ignored += [*chat.ignored, *self.no_effect(body)]
        chat = chat._replace(ignored=ignored)
        if summarizes:
            return self._respond(chat, thinking, keeping, signer=reader.signer)
        if edits is None:
            return self._respond(chat, thinking, keeping)
        context_edits = self._context_edits(edits, translator, reader)
        if context_edits.needed:
            chat = chat._replace(request=chat.request._replace(edit=context_edits.edit))
        return self._respond(chat, thinking, keeping, context_edits)

    def _context_edits(self, edits: Sequence[Edit], translator: Translator, reader: MessagesReader) -> ContextEdits:
        """Return the edits of a request.

        Raises:
            InvalidPayload: there is no response that a summary could precede.
        """
        context_edits = ContextEdits(edits, translator.messages, reader.num_reasoning, translator.edited_request)
        if context_edits.compact is not None and self.computes:
            if translator.body["max_tokens"] == 0:
                raise InvalidPayload("max_tokens=0: there is no response that a summary could precede")
            context_edits.summarizing = summarizing(
                context_edits, context_edits.compact, translator, reader.last_summary
            )
        return context_edits

    def _respond(
        self,
        chat: ParsedChat,
        thinking: Thinking,
        keeping: ThreadKeeping | None,
        edits: ContextEdits | None = None,
        signer: Signer | None = None,
    ) -> ParsedRequest:
        """Return the parsed request with its reply.

        Args:
            signer: the signer of the summary that is the response, or None if the response is a message.
        """
        sampling = chat.request.sampling
        request = chat.request._replace(sampling=sampling._replace(include_stop=bool(sampling.stop)), min_free_tokens=1)
        id = chat.head.id.replace("chatcmpl-", "msg_") if keeping is None else f"msg_{new_secret()}"
        settings = MessageSettings(
            id, chat.head.model, chat.format.form, sampling.max_new_tokens, sampling.stop, thinking.show, keeping, edits
        )
        streams = chat.framing is not JSON
        reply = _reply(settings, signer, streams=streams)
        if sampling.max_new_tokens == 0:  # the prompt is only put into the engine's prefix cache
            alone = Sampling(max_new_tokens=1, logprobs=False, cache_salt=sampling.cache_salt)
            request = request._replace(sampling=alone, read_prompt=None)
            reply = PromptOnly(reply)
        parsed = ParsedRequest((request,), reply, self.errors, chat.ignored, streams=streams, keeps=keeping is not None)
        if edits is not None and edits.summarizing is not None:
            parsed = parsed._replace(course=FollowUp(edits.summarizing.follow_up))
        return parsed._replace(keep_alive=PING) if streams else parsed


def _check_alone(body: Mapping[str, Any]) -> None:
    """Check a body with `compaction`.

    Raises:
        InvalidParameter: another field contradicts it.
        CompactionRefused: there is nothing to summarize.
    """
    for name in ("context_management", "thread"):
        if body.get(name) is not None:
            raise InvalidParameter(f"{COMPACTION}: cannot be combined with {name}; omit one of them")
    if body["max_tokens"] == 0:
        raise InvalidParameter(f"{COMPACTION}: the summary needs tokens; set max_tokens")
    if not isinstance(body.get("messages"), list):
        raise InvalidPayload("'messages' must be a non-empty list")
    check_summarizable(body["messages"])


def _reply(settings: MessageSettings, signer: Signer | None, *, streams: bool) -> Reply:
    if signer is not None:
        return SummaryStream(settings, signer) if streams else SummaryDocument(settings, signer)
    edits = settings.edits
    if edits is not None and edits.compact is not None and edits.summarizing is not None:
        compacting = CompactingMessageStream if streams else CompactingMessageDocument
        return compacting(settings, edits.summarizing, pauses=edits.compact.pauses)
    return MessageStream(settings) if streams else MessageDocument(settings)


class AnthropicCountTokens(AnthropicMessages):
    """The dialect of Anthropic's token counts. Fields that affect only responses are checked, except `max_tokens`."""

    name = "anthropic_count"
    computes = False
    description = Description(
        title="Anthropic token count",
        request="AnthropicCountRequest",
        request_shape=_body("messages"),
        error=AnthropicError,
        example={"model": "", "messages": CHAT_EXAMPLE["messages"]},
        response=AnthropicCount,
    )

    def _respond(
        self,
        chat: ParsedChat,
        thinking: Thinking,
        keeping: ThreadKeeping | None,
        edits: ContextEdits | None = None,
        signer: Signer | None = None,
    ) -> ParsedRequest:
        def document(number: int) -> AnthropicCount:
            if edits is None:
                return {"input_tokens": number}
            original = number if edits.num_original is None else edits.num_original
            return {"input_tokens": number, "context_management": {"original_input_tokens": original}}

        return counted(chat, self.errors, document)
