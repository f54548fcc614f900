"""The types of TEI's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, TypedDict

from handler.core.errors import InvalidParameter, InvalidPayload, NotJson, Overloaded, ServingError, TooLong
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.schema import Count, NotRequired
from handler.protocols.kernel.texts import NoTexts, TooManyTexts

TeiVectors = list[list[float]]
"""A vector for each text, of one text too."""


class TeiRank(TypedDict):
    """One of the ranked texts, the best first."""

    index: Count
    text: NotRequired[str]
    score: float | None


class TeiPrediction(TypedDict):
    """One of a text's labels, the most likely first."""

    score: float | None
    label: str


# -- TEI's errors: statuses and `error_type` (text-embeddings-inference 1, router/src/http) ----------------------------


TeiErrorType = Annotated[str, ("enum", ("Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"))]


class TeiError(TypedDict):
    error: str
    error_type: TeiErrorType


class TeiErrors(ErrorFormat):
    """The messages are this server's own."""

    statuses = MappingProxyType(
        {
            NoTexts: 400,
            TooManyTexts: 413,
            TooLong: 413,
            NotJson: 400,
            InvalidPayload: 422,
            InvalidParameter: 422,
            Overloaded: 429,
        }
    )

    def body(self, error: ServingError) -> TeiError:
        return {"error": error.message, "error_type": self._type(error)}

    def _type(self, error: ServingError) -> TeiErrorType:
        if isinstance(error, NoTexts):
            return "Empty"
        status = self.status(error)
        if status in (429, 503):
            return "Overloaded" if status == 429 else "Unhealthy"
        return "Backend" if error.kind == "generation" else "Validation"


ERRORS = TeiErrors()
