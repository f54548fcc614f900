"""TEI's bodies in the API's document."""

from __future__ import annotations

from collections.abc import Mapping

from handler.protocols.kernel.base import ServerContext
from handler.protocols.kernel.json_schema import Shape, listing, record
from handler.protocols.kernel.parameters import Table
from handler.protocols.kernel.schema.description import Description, RequestShape, parameters
from handler.protocols.kernel.schema.texts import NON_EMPTY, text_list, texts
from handler.protocols.tei import request
from handler.protocols.tei.answers import TeiError, TeiPrediction, TeiRank, TeiVectors

SENTENCES: Shape = record({"source_sentence": NON_EMPTY, "sentences": text_list(NON_EMPTY)})

_PAIR: Shape = listing(NON_EMPTY, minItems=1, maxItems=2)


def _request(table: Table, **fields: Shape) -> RequestShape:
    def shape(context: ServerContext) -> Shape:
        return record(fields, parameters(table.parameters, context))

    return shape


def _similarity_request(context: ServerContext) -> Shape:
    more = {**record({}, parameters(request.SIMILARITY.parameters, context)), "type": ["object", "null"]}
    return record({"inputs": SENTENCES}, {"parameters": more})


DESCRIPTIONS: Mapping[str, Description] = {
    "tei_embed": Description(
        "TEI embed", "TeiEmbedRequest", _request(request.EMBED, inputs={"anyOf": [*texts()["anyOf"], SENTENCES]}),
        TeiError,
        {"inputs": "What is deep learning?", "normalize": True}, TeiVectors | list[float], [[0.6, -0.8]],
    ),
    "tei_similarity": Description(
        "TEI similarity", "TeiSimilarityRequest", _similarity_request, TeiError,
        {"inputs": {"source_sentence": "A cat", "sentences": ["A kitten", "A car"]}}, list[float], [0.9, 0.2],
    ),
    "tei_rerank": Description(
        "TEI rerank", "TeiRerankRequest", _request(request.RERANK, query=NON_EMPTY, texts=text_list(NON_EMPTY)),
        TeiError, {"query": "What is deep learning?", "texts": ["A cheese", "A kind of machine learning"]},
        list[TeiRank], [{"index": 1, "score": 0.9}, {"index": 0, "score": 0.1}],
    ),
    "tei_predict": Description(
        "TEI predict", "TeiPredictRequest",
        _request(request.PREDICT, inputs={"anyOf": [NON_EMPTY, _PAIR, text_list(_PAIR)]}), TeiError,
        {"inputs": "I like you."}, list[TeiPrediction] | list[list[TeiPrediction]],
        [{"score": 0.9, "label": "POSITIVE"}, {"score": 0.1, "label": "NEGATIVE"}],
    ),
}  # fmt: skip
"""By the dialect's name."""
