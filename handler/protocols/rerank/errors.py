"""Cohere's errors: `{"message"}` under OpenAI's statuses, by which its client too chooses an exception (cohere 7)."""

from __future__ import annotations

from typing import TypedDict

from handler.core.errors import ServingError
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.openai.errors import OpenAiErrors


class RerankError(TypedDict):
    message: str


class RerankErrors(ErrorFormat):
    statuses = OpenAiErrors.statuses

    def body(self, error: ServingError) -> RerankError:
        return {"message": error.message}


ERRORS = RerankErrors()
