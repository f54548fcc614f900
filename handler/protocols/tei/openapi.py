"""TEI's bodies in the API's document."""

from __future__ import annotations

from collections.abc import Mapping

from handler.protocols.kernel.dialect import ServerContext
from handler.protocols.kernel.parameters import Description, RequestShape, parameters, request_shape
from handler.protocols.kernel.schema import Shape, record
from handler.protocols.tei.api import TeiError, TeiPrediction, TeiRank, TeiVectors
from handler.protocols.tei.request import Tei, TeiEmbed, TeiPredict, TeiRerank, TeiSimilarity


def nested_request(dialect: type[Tei]) -> RequestShape:
    """Make the schema of a body with its parameters under `parameters`."""

    def shape(context: ServerContext) -> Shape:
        more = {**record({}, parameters(dialect.table.parameters, context)), **dialect.fields["parameters"]}
        return record({"inputs": dialect.fields["inputs"]}, {"parameters": more})

    return shape


def _request(dialect: type[Tei]) -> RequestShape:
    return request_shape(dialect.fields, dialect.table, *dialect.fields)


DESCRIPTIONS: Mapping[str, Description] = {
    "tei_embed": Description(
        "TEI embed", "TeiEmbedRequest", _request(TeiEmbed),
        TeiError,
        {"inputs": "What is deep learning?", "normalize": True}, TeiVectors | list[float], [[0.6, -0.8]],
    ),
    "tei_similarity": Description(
        "TEI similarity", "TeiSimilarityRequest", nested_request(TeiSimilarity), TeiError,
        {"inputs": {"source_sentence": "A cat", "sentences": ["A kitten", "A car"]}}, list[float], [0.9, 0.2],
    ),
    "tei_rerank": Description(
        "TEI rerank", "TeiRerankRequest", _request(TeiRerank),
        TeiError, {"query": "What is deep learning?", "texts": ["A cheese", "A kind of machine learning"]},
        list[TeiRank], [{"index": 1, "score": 0.9}, {"index": 0, "score": 0.1}],
    ),
    "tei_predict": Description(
        "TEI predict", "TeiPredictRequest",
        _request(TeiPredict), TeiError,
        {"inputs": "I like you."}, list[TeiPrediction] | list[list[TeiPrediction]],
        [{"score": 0.9, "label": "POSITIVE"}, {"score": 0.1, "label": "NEGATIVE"}],
    ),
}  # fmt: skip
"""By the dialect's name."""
