"""The dialects of SageMaker's /invocations in TGI: of prompts, chats and completions (router/src/sagemaker.rs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from handler.core.errors import ServingError
from handler.core.tgi_version import TgiVersion
from handler.core.values import Adapter
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.schema import Count
from handler.protocols.openai.chat import OpenAiChat
from handler.protocols.openai.completions import OpenAiCompletions
from handler.protocols.openai.request import OpenAiDialect, read_model
from handler.protocols.tgi.api import TgiError, TgiErrors
from handler.protocols.tgi.native import Tgi


class _StreamFailure(TypedDict):
    message: str
    http_status_code: Count


class TgiChatFailure(TypedDict):
    """The last event of a stream of chats or completions that failed."""

    error: _StreamFailure


class TgiChatErrors(TgiErrors):
    """TGI's errors of chats and completions, which have OpenAI's responses but TGI's statuses and error bodies."""

    def tail(self, error: ServingError) -> Any:
        message = self._failure(error, begun=True).error
        failure: TgiChatFailure = {"error": {"message": message, "http_status_code": 422}}
        return failure


_ERRORS = TgiChatErrors()


class _InTgi(OpenAiDialect):
    """The errors of TGI, and its names of the model: `tgi` in requests, and the model's own in responses."""

    errors = _ERRORS

    def read_model(
        self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext
    ) -> tuple[str, Adapter | None]:
        fields = {**body, "model": None} if body.get("model") == "tgi" else body
        own = "" if context.config.served_model_name else context.config.model_id or ""
        return read_model(fields, context, request_context, own)


class TgiChat(_InTgi, OpenAiChat):
    """The dialect of chats on /invocations."""

    name = "tgi_chat"
    description = OpenAiChat.description._replace(title="TGI chat", error=TgiError, failure=TgiChatFailure)


class TgiCompletions(_InTgi, OpenAiCompletions):
    """The dialect of completions on /invocations."""

    name = "tgi_completions"
    description = OpenAiCompletions.description._replace(
        title="TGI completions", error=TgiError, failure=TgiChatFailure
    )


def tgi_invocations(version: TgiVersion) -> tuple[Tgi, TgiChat, TgiCompletions]:
    """Return the dialects of prompts, chats and completions on /invocations in a release of TGI."""
    return Tgi("tgi_invocations", array=True, full_text=True, version=version), TgiChat(), TgiCompletions()
