"""The dialects of OpenAI's endpoints /v1/responses, /v1/responses/input_tokens and /v1/responses/compact.

A response is stored if option.responses_store is set and the body does not have `store=false`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from handler.core.errors import InvalidParameter
from handler.core.framing import JSON, SSE
from handler.core.values import Request
from handler.protocols.assistant.summary import Summarizing, SummaryRequest, unshaped
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, FollowUp, ParsedRequest
from handler.protocols.kernel.readers import NamedValue
from handler.protocols.kernel.stored import Keeping, Wanted
from handler.protocols.openai.api import OpenAiError
from handler.protocols.openai.chat import ParsedChat, counted
from handler.protocols.openai.request import OpenAiDialect, streaming
from handler.protocols.responses.api import (
    CompactedResponse,
    ConversationName,
    OpenAiResponse,
    OpenAiResponseEvent,
    ResponseHead,
    ResponseStart,
    ResponseTokens,
)
from handler.protocols.responses.background import detached, read_background
from handler.protocols.responses.chat import UNHEEDED, InputReader, Translated, check_names, translate
from handler.protocols.responses.compaction import (
    CompactedDocument,
    CompactingDocument,
    CompactingStream,
    CompactionDocument,
    read_threshold,
)
from handler.protocols.responses.response import (
    NUM_STATES,
    ResponseDocument,
    ResponseSettings,
    ResponseStream,
    encode_head,
    new_id,
    read_head,
    secret_id,
    without_strict,
)
from handler.protocols.responses.stored import (
    conversation_in,
    make_keeping,
    read_store,
    read_wanted,
    with_ids,
)
from handler.protocols.responses.types import (
    BACKGROUND,
    FIELDS,
    NO_EFFECT,
    STORED_FIELDS,
    TABLE,
    TRIGGER,
    body_shape,
    user_message,
)


class OpenAiResponses(OpenAiDialect):
    """The dialect of OpenAI's Responses API. Tokens are sampled unless `temperature` is 0.

    Without `max_output_tokens`, the length of a response is limited by the model's default limit or its context.
    """

    name = "openai_responses"
    needed = "a JSON object with 'input'"
    table, fields, harmless = TABLE, FIELDS, NO_EFFECT
    appends = True
    """Whether a response is appended to its conversation."""

    description = Description(
        title="OpenAI responses",
        request="OpenAiResponsesRequest",
        request_shape=body_shape,
        error=OpenAiError,
        example={"model": "", "input": "Name the capital of France.", "max_output_tokens": 16},
        response=OpenAiResponse,
        chunk=OpenAiResponseEvent,
        streams=(SSE.content_type,),
    )

    def wanted(self, body: Any) -> Wanted | None:
        return read_wanted(self._relax()(body), keeps=self.computes, appends=self.appends)

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        check_names(body)
        keeps = read_store(body, context, request_context) and self.computes
        in_background = self.computes and read_background(body, request_context)
        threshold = NamedValue("context_management", body.get("context_management")).optional(
            partial(read_threshold, context_length=context.most_tokens())
        )
        translated = translate(body, context, request_context)
        ignored = self.unknown(body, context, *translated.input.unknown, *translated.tools.ignored)
        head = read_head(body, context.generation, store=keeps, background=in_background)
        if request_context.keeper and conversation_in(body):
            head["conversation"] = ConversationName(id=conversation_in(body))
        reader, keeper = translated.input, request_context.keeper if self.appends else None
        keeping = make_keeping(keeper, head, reader.items, reader.history, stores=keeps or in_background)
        if UNHEEDED in translated.chat.ignored:
            head["tools"] = [*map(without_strict, head["tools"])]
            ignored += ["tools[].format"] if translated.tools.formats else []
        ignored += [*translated.chat.ignored, *self.no_effect(body)]
        translated = translated._replace(chat=translated.chat._replace(ignored=ignored))
        summarizing = None
        if threshold is not None and self.computes and translated.input.may_compact:
            summarizing = _summarizing(threshold, body, translated.input, context, request_context)
        return self._respond(translated, head, keeping, summarizing)

    def _respond(
        self,
        translated: Translated,
        repeated: ResponseHead,
        keeping: Keeping | None,
        summarizing: Summarizing | None,
    ) -> ParsedRequest:
        """Return the parsed request with its reply.

        Args:
            repeated: the fields of the request that the response repeats.
            keeping: the object that stores the response, or None if it is not stored.
            summarizing: summarizes a conversation that has become too long, or None if this is not requested.
        """
        chat, reader = translated.chat, translated.input
        head: ResponseStart = {
            "id": new_id("resp") if keeping is None else secret_id("resp"),
            "object": "response",
            "created_at": chat.head.created,
            "model": chat.head.model,
            **encode_head(repeated),
        }
        in_background = repeated["background"]
        settings = ResponseSettings(head, chat.format.form, translated.tools.origins, keeping)
        requests = (chat.request if summarizing is None else chat.request._replace(edit=summarizing.edit),)
        if chat.framing is JSON and not in_background:
            parsed = ParsedRequest(requests, self._document(settings, reader, summarizing), self.errors, chat.ignored)
            times = 1
        else:
            parsed = streaming(requests, _stream(settings, reader, summarizing), self.errors, chat.ignored)
            times = NUM_STATES
        if in_background and keeping is not None:
            unlimited = [request._replace(time_limit=math.inf) for request in requests]  # its host has a limit
            ending = detached(settings.response(), keeping, streams=chat.framing is not JSON)
            parsed = parsed._replace(requests=unlimited, detached=ending)
        if summarizing is not None:
            parsed = parsed._replace(course=FollowUp(summarizing.follow_up))
        repeated_size = (1 + times) * len(JSON.encode(head))  # one copy is kept until the reply is rendered
        keeps = keeping is not None and not in_background  # a background response is stored by its host
        return parsed._replace(keeps=keeps, num_repeated=repeated_size)

    def _document(
        self, settings: ResponseSettings, reader: InputReader, summarizing: Summarizing | None
    ) -> ResponseDocument:
        if summarizing is not None:
            return CompactingDocument(settings, reader.summaries, summarizing)
        return CompactionDocument(settings, reader.summaries) if reader.compacts else ResponseDocument(settings)


def _summarizing(
    threshold: int,
    body: Mapping[str, Any],
    reader: InputReader,
    context: ServerContext,
    request_context: RequestContext,
) -> Summarizing:
    """Return the object that summarizes the conversation if its prompt exceeds a threshold.

    Args:
        reader: reader that has read the input of the body.
    """

    def chat(item: Mapping[str, Any], **fields: Any) -> ParsedChat:
        return translate({**body, "input": [*reader.items, item], **fields}, context, request_context).chat

    def ask() -> SummaryRequest:
        asking = chat({"type": TRIGGER}, max_output_tokens=None)  # it limits the response after the summary
        return SummaryRequest(unshaped(asking.request), asking.format.form)

    def go_on(summary: str) -> Request:
        return chat(reader.summaries.item("", summary)).request

    return Summarizing(threshold, context.most_tokens, ask, go_on, reader.last_summary)


def _stream(settings: ResponseSettings, reader: InputReader, summarizing: Summarizing | None) -> ResponseStream:
    if reader.compacts or summarizing is not None:
        return CompactingStream(settings, reader.summaries, summarizing)
    return ResponseStream(settings)


class ResponsesCount(OpenAiResponses):
    """The dialect of OpenAI's token counts. Fields that affect only a response are checked, but have no effect."""

    name = "openai_responses_count"
    computes = appends = False
    description = Description(
        title="OpenAI response token count",
        request="OpenAiResponsesCountRequest",
        request_shape=body_shape,
        error=OpenAiError,
        example={"model": "", "input": "Name the capital of France."},
        response=ResponseTokens,
    )

    def _respond(
        self,
        translated: Translated,
        repeated: ResponseHead,
        keeping: Keeping | None,
        summarizing: Summarizing | None,
    ) -> ParsedRequest:
        return counted(
            translated.chat,
            self.errors,
            lambda number: ResponseTokens(object="response.input_tokens", input_tokens=number),
        )


class ResponsesCompaction(OpenAiResponses):
    """The dialect of OpenAI's compaction, whose response replaces the conversation in later requests."""

    name = "openai_responses_compact"
    needed = "a JSON object with 'input', 'previous_response_id' or both"
    appends = False
    description = Description(
        title="OpenAI compaction",
        request="OpenAiCompactionRequest",
        request_shape=body_shape,
        error=OpenAiError,
        example={"model": "", "input": "Name the capital of France."},
        response=CompactedResponse,
    )

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        if body.get("stream"):
            raise InvalidParameter("stream: is not supported: the response is one document; omit stream")
        if body.get(BACKGROUND):
            raise InvalidParameter("background: is not supported for summaries; omit background")
        input = body.get("input")
        if input is None and any(body.get(name) is not None for name in STORED_FIELDS[1:]):
            input = []
        items = [user_message(input)] if isinstance(input, str) and input else input
        if isinstance(items, list):
            input = [*items, {"type": TRIGGER}]
        return super().read({**body, "input": input, "store": False}, context, request_context)

    def _document(
        self, settings: ResponseSettings, reader: InputReader, summarizing: Summarizing | None
    ) -> ResponseDocument:
        return CompactedDocument(settings, reader.summaries, with_ids(reader.user_messages()))
