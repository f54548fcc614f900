"""The types of TEI's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from typing import TypedDict

from handler.protocols.kernel.schema.types import Count, NotRequired

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
