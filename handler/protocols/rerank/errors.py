"""Cohere's errors: `{"message"}` under OpenAI's statuses, by which its client too chooses an exception (cohere 7)."""

from __future__ import annotations

from handler.core.errors import ServingError
from handler.core.framing import JSON
from handler.protocols.kernel.base import HttpResponse
from handler.protocols.openai.errors import status
from handler.protocols.rerank.answers import RerankError


def refused(error: ServingError) -> HttpResponse:
    value: RerankError = {"message": error.message}
    return HttpResponse(status(error), JSON.content_type, JSON.encode(value))
