"""LMI's chat completions: any inference body with `messages` (docs.djl.ai, "Chat Completions API Schema")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from handler.core.errors import InvalidParameter, ServingError
from handler.core.framing import JSON, JSONLINES, SSE_DONE, Framing
from handler.core.values import FieldNames, Request
from handler.protocols.base import HttpResponse, ParsedRequest, ServerContext
from handler.protocols.lmi.body import read_stream
from handler.protocols.lmi.chat_response import ChatDocument, ChatStream, Failures, LmiHead
from handler.protocols.openai.chat_response import Logprobs
from handler.protocols.openai.parameters import CHAT_OF_LMI
from handler.protocols.openai.request import read_usage
from handler.protocols.openai.response import Usage, identity
from handler.protocols.parameters import Parameter, ParsedParameters, Table, read_all, unsupported
from handler.protocols.readers.adapters import read_adapters
from handler.protocols.readers.body import report_unknown
from handler.protocols.readers.messages import read_messages
from handler.protocols.readers.values import string
from handler.protocols.validation import show

TABLE = Table(
    {
        **CHAT_OF_LMI,
        # OpenAI's, which its clients send to LMI too: to leave them out would change the answer
        "max_completion_tokens": CHAT_OF_LMI["max_tokens"],
        "stream_options": Parameter("usage", read_usage),
        "model": Parameter("", string),
        "user": Parameter("", string),
        "tools": unsupported("LMI's form has no tool calls; /v1/chat/completions has", []),
    }
)

# `inputs` is null, or the body would be no chat.
_READ = {*TABLE.parameters, "messages", "stream", "adapters", "inputs"}
_NAMES = FieldNames(
    prompt="messages", max_new_tokens="max_tokens", logit_bias="logit_bias", structured_output="response_format"
)
_FRAMINGS = {JSONLINES.name: JSONLINES, SSE_DONE.name: SSE_DONE}


class Mode(Failures, Protocol):
    """The framing and the errors that a chat shares with the dialect beside it."""

    name: str
    stream_framing: Framing


class Chat:
    """The chat dialect beside one mode. It samples unless `temperature` is 0; an answer has 30 tokens by default."""

    any_media = False

    def __init__(self, mode: Mode) -> None:
        self.name = f"{mode.name}_chat"
        self._mode = mode

    def parse(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        messages, unknown = read_messages(body["messages"])
        framing = self._framing(read_stream(body, {}), context)
        ignored = report_unknown([*(name for name in body if name not in _READ), *unknown], body, context)
        parameters = _read_parameters(body, context)
        sampling, usage = parameters.sampling, parameters.others.get("usage", Usage())
        (adapter,) = read_adapters(body, 1, context)
        names = _NAMES._replace(max_new_tokens=parameters.names.get("max_new_tokens", _NAMES.max_new_tokens))
        request = Request("", sampling, messages=messages, adapter=adapter, names=names)
        head = LmiHead(*identity("chatcmpl"))
        logprobs = Logprobs(bool(body.get("logprobs")), bool(body.get("top_logprobs")))
        if framing is JSON:
            if "usage" in parameters.others:
                raise InvalidParameter(f"stream_options={show(body['stream_options'])}: needs stream=true")
            return ParsedRequest((request,), ChatDocument(self._mode, head, logprobs, sampling.num_sequences), ignored)
        if sampling.n > 1:
            raise InvalidParameter(f"n={sampling.n}: must be 1 when streaming: only whole answers hold more")
        return ParsedRequest((request,), ChatStream(self._mode, head, logprobs, framing, usage), ignored, streams=True)

    def _framing(self, stream: bool, context: ServerContext) -> Framing:
        """Choose the framing: `option.output_formatter` beats the client's `stream`, except that `json` leaves it to
        the client.
        """
        if context.output_formatter in _FRAMINGS:
            return _FRAMINGS[context.output_formatter]
        return _FRAMINGS[self._mode.stream_framing.name] if stream else JSON

    def refused(self, error: ServingError, body: Any = None, context: ServerContext | None = None) -> HttpResponse:
        return self._mode.refused(error)


def _read_parameters(body: Mapping[str, Any], context: ServerContext) -> ParsedParameters:
    """Read the chat's parameters. `ServerContext.sampling_defaults` apply to LMI's `parameters` only."""
    defaults = {"do_sample": body.get("temperature") != 0}  # of what is no number, nothing comes but a refusal
    parameters = read_all(body, context, defaults=defaults, table=TABLE)
    if (count := body.get("top_logprobs")) and not body.get("logprobs"):
        raise InvalidParameter(f"top_logprobs={count}: needs logprobs=true")
    wanted = bool(body.get("logprobs")) or parameters.sampling.num_sequences > 1  # which are ranked by them
    return parameters._replace(sampling=parameters.sampling._replace(logprobs=wanted))
