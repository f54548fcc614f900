"""The types of rerank's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from typing import Any, TypedDict

from handler.core.errors import ServingError
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.schema import Count, NotRequired
from handler.protocols.openai.api import OpenAiErrors


class RankedDocument(TypedDict):
    """One of the ranked documents, the best first; with `text`, and the fields of a document that was an object."""

    index: Count
    relevance_score: float | None
    document: NotRequired[dict[str, Any]]


class RerankUsage(TypedDict):
    prompt_tokens: Count
    total_tokens: Count


class RerankAnswer(TypedDict):
    """Cohere's `id` and `results`; vLLM's `model` and `usage`."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RerankUsage


# -- Cohere's errors: `{"message"}` under OpenAI's statuses ------------------------------------------------------------


class RerankError(TypedDict):
    message: str


class RerankErrors(ErrorFormat):
    statuses = OpenAiErrors.statuses

    def body(self, error: ServingError) -> RerankError:
        return {"message": error.message}


ERRORS = RerankErrors()
