"""Rerank's bodies in the API's document."""

from __future__ import annotations

from collections.abc import Mapping

from handler.protocols.kernel.parameters import Description, request_shape
from handler.protocols.rerank.api import RerankAnswer, RerankError
from handler.protocols.rerank.request import FIELDS, TABLE


def _description(title: str, **fields: object) -> Description:
    return Description(
        title,
        "RerankRequest",
        request_shape(FIELDS, TABLE, "query", "documents"),
        RerankError,
        {"model": "", "query": "What is deep learning?", "documents": ["A cheese", "A kind of machine learning"]},
        RerankAnswer,
        {
            "id": "rerank-0",
            "model": "model",
            "results": [{"index": 1, "relevance_score": 0.9, **fields}],
            "usage": {"prompt_tokens": 20, "total_tokens": 20},
        },
    )


DESCRIPTIONS: Mapping[str, Description] = {
    "rerank": _description("Rerank", document={"text": "A kind of machine learning"}),
    "rerank_v2": _description("Rerank, version 2"),
}
"""By the dialect's name."""
