"""TEI's routes /embed, /rerank, /predict and /similarity (text-embeddings-inference 1, router/src/http/types.rs)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypedDict

from handler.core.errors import InvalidParameter, InvalidPayload, NotJson, Overloaded, ServingError, TooLong
from handler.core.values import FieldNames, Pooling, Request, Truncation
from handler.protocols.kernel.body import report_unknown, unknown_parameters
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, RequestShape, ServerContext
from handler.protocols.kernel.dialect import Description, Dialect, ParsedRequest, Timing
from handler.protocols.kernel.errors import ErrorFormat, Headers
from handler.protocols.kernel.parameters import Parameter, Table, parameters, read_all, request_shape, unsupported
from handler.protocols.kernel.readers import boolean, integer, show, string
from handler.protocols.kernel.reply import VectorReply, Vectors, json_of
from handler.protocols.kernel.schema import Count, NotRequired, Shape, listing, record
from handler.protocols.kernel.texts import (
    NON_EMPTY,
    NoTexts,
    Text,
    TooManyTexts,
    cosine,
    embedding_requests,
    read_list,
    read_string,
    read_strings,
    read_texts,
    score_requests,
    text_list,
    texts_shape,
    truncation_side,
)

# -- responses ---------------------------------------------------------------------------------------------------------


TeiVectors = list[list[float]]
"""A list of one embedding per text, even for a single text."""


class TeiRank(TypedDict):
    """A ranked text. The results are sorted by relevance, with the best text first."""

    index: Count
    text: NotRequired[str]
    score: float | None


class TeiPrediction(TypedDict):
    """A label of a text, with its score. The results are sorted with the highest score first."""

    score: float | None
    label: str


# -- TEI's errors, with its statuses and `error_type` (text-embeddings-inference 1, router/src/http) -------------------


TeiErrorType = Annotated[str, ("enum", ("Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"))]


class TeiError(TypedDict):
    error: str
    error_type: TeiErrorType


class TeiErrors(ErrorFormat):
    """TEI's error format, with this server's own messages."""

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


_TRUNCATION: Mapping[str, Parameter] = {
    "truncate": Parameter("truncate", boolean),
    "truncation_direction": Parameter("side", truncation_side),
}
_PROMPT_NAME = Parameter("prompt_name", string)

EMBED = Table(
    {
        **_TRUNCATION,
        "prompt_name": _PROMPT_NAME,
        "normalize": Parameter("normalize", boolean),
        "dimensions": Parameter("dimensions", integer(1)),
        "encoding_format": unsupported("use /v1/embeddings", "float"),
    }
)
RERANK = Table(
    {
        **_TRUNCATION,
        "raw_scores": Parameter("raw_scores", boolean),
        "return_text": Parameter("return_text", boolean),
    }
)
PREDICT = Table({**_TRUNCATION, "raw_scores": Parameter("raw_scores", boolean)})
_INPUTS = "must be a string, a pair of strings [a, b], or a list of lists of one or two strings"
SIMILARITY = Table({**_TRUNCATION, "prompt_name": _PROMPT_NAME}, "parameters.")


SENTENCES: Shape = record({"source_sentence": NON_EMPTY, "sentences": text_list(NON_EMPTY)})

_PAIR: Shape = listing(NON_EMPTY, minItems=1, maxItems=2)


def nested_request(fields: Mapping[str, Shape], table: Table) -> RequestShape:
    """Return a function that builds the schema of a body whose parameters are under `parameters`."""

    def shape(context: ServerContext) -> Shape:
        more = {**record({}, parameters(table.parameters, context)), **fields["parameters"]}
        return record({"inputs": fields["inputs"]}, {"parameters": more})

    return shape


class Tei(Dialect):
    """Base class of TEI's dialects. As in TEI, texts with too many tokens are refused unless `truncate` is true.

    Attributes:
        table: the fields that set parameters.
        fields: the other fields, with their schemas.
    """

    errors: ErrorFormat = ERRORS
    unique_keys = True
    response_headers = (
        "x-compute-characters", "x-compute-tokens", "x-compute-time", "x-total-time", "x-tokenization-time",
        "x-queue-time", "x-inference-time",
    )  # fmt: skip
    table: Table
    fields: Mapping[str, Shape]

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload(f"the body must be a JSON object with {' and '.join(map(repr, sorted(self.fields)))}")
        own, nested = self.table.parameters, body.get("parameters")
        if self.table.prefix:
            paths = unknown_parameters(nested if isinstance(nested, dict) else (), own)
            ignored = report_unknown(body, self.fields, context, paths)
        else:
            ignored = report_unknown(body, {**self.fields, **own}, context)
        return self.read(body, context)._replace(ignored=ignored)

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        raise NotImplementedError

    def parameters(
        self, params: Mapping[str, Any], context: ServerContext
    ) -> tuple[Mapping[str, Any], Truncation | None]:
        """Return the values of the parameters in the table, and the truncation for texts."""
        others = read_all(params, context, defaults={}, table=self.table).others
        return others, Truncation(side=others.get("side", "right")) if others.get("truncate") else None

    def parsed(
        self,
        requests: Sequence[Request],
        render: Callable[[Vectors, int], Any],
        keep: Callable[[Sequence[float]], Any] = tuple,
    ) -> ParsedRequest:
        reply = VectorReply(len(requests), render, keep)
        return ParsedRequest(requests, reply, self.errors, headers=functools.partial(_headers, requests))


class TeiSimilarity(Tei):
    """The dialect of /similarity, which compares a sentence with others by the cosine of their embeddings."""

    name = "tei_similarity"
    table = SIMILARITY
    fields: Mapping[str, Shape] = {"inputs": SENTENCES, "parameters": {"type": ["object", "null"]}}
    description = Description(
        title="TEI similarity",
        request="TeiSimilarityRequest",
        request_shape=nested_request(fields, table),
        error=TeiError,
        example={"inputs": {"source_sentence": "A cat", "sentences": ["A kitten", "A car"]}},
        response=list[float],
    )

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        inputs, parameters = body.get("inputs"), body.get("parameters")
        if not isinstance(inputs, dict) or not isinstance(parameters, dict | None):
            raise InvalidPayload(
                "'inputs' must be an object with 'source_sentence' and 'sentences', and 'parameters' must be an object"
            )
        others, truncation = self.parameters(parameters or {}, context)
        texts: Sequence[Text] = [
            read_string(inputs.get("source_sentence"), "inputs.source_sentence"),
            *read_strings(inputs.get("sentences"), "inputs.sentences"),
        ]
        texts = _prompted(texts, others, context)
        requests = embedding_requests(texts, "inputs", Pooling("embed"), context, truncation=truncation)
        return self.parsed(requests, lambda vectors, _: [cosine(vectors[0], other) for other in vectors[1:]])


def _prompted(texts: Sequence[Text], others: Mapping[str, Any], context: ServerContext) -> Sequence[Text]:
    """Prepend the model prompt that `prompt_name` selects to each text. Token ids are left unchanged.

    Source: sentence-transformers' `prompts` in config_sentence_transformers.json.

    Raises:
        InvalidParameter: the model has no prompt with this name.
    """
    name = others.get("prompt_name")
    if name is None:
        return texts
    if name not in context.prompts:
        names = ", ".join(sorted(context.prompts))
        reason = f"no such prompt; its prompts are {names}" if names else "no prompts"
        raise InvalidParameter(f"prompt_name={show(name)}: the model has {reason}")
    return [context.prompts[name] + text if isinstance(text, str) else text for text in texts]


_SIMILARITY = TeiSimilarity()


class TeiEmbed(Tei):
    """The dialect of /embed, which returns embeddings.

    If `inputs` is an object, the response is that of /similarity, as for TEI's `/` with TASK=sentence-similarity.
    """

    name = "tei_embed"
    table = EMBED
    fields: Mapping[str, Shape] = {"inputs": {"anyOf": [*texts_shape()["anyOf"], SENTENCES]}}
    description = Description(
        title="TEI embed",
        request="TeiEmbedRequest",
        request_shape=request_shape(fields, table, *fields),
        error=TeiError,
        example={"inputs": "What is deep learning?", "normalize": True},
        response=TeiVectors | list[float],
    )

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        if isinstance(body, dict) and isinstance(body.get("inputs"), dict):
            return _SIMILARITY.parse(body, context)
        return super().parse(body, context, request_context)

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        return self.parsed(self.requests(body.get("inputs"), body, context), lambda vectors, _: vectors, json_of)

    def requests(self, inputs: Any, params: Mapping[str, Any], context: ServerContext) -> list[Request]:
        """Return one request for each text in `inputs`, with the parameters in `params`."""
        others, truncation = self.parameters(params, context)
        texts = _prompted(read_texts(inputs, "inputs"), others, context)
        pooling = Pooling("embed", others.get("dimensions"), others.get("normalize", context.config.normalize))
        return embedding_requests(texts, "inputs", pooling, context, truncation=truncation)


class TeiRerank(Tei):
    """The dialect of /rerank, which ranks texts by their scores. Scores are from 0 to 1 unless `raw_scores` is true."""

    name = "tei_rerank"
    table = RERANK
    fields: Mapping[str, Shape] = {"query": NON_EMPTY, "texts": text_list(NON_EMPTY)}
    description = Description(
        title="TEI rerank",
        request="TeiRerankRequest",
        request_shape=request_shape(fields, table, *fields),
        error=TeiError,
        example={"query": "What is deep learning?", "texts": ["A cheese", "A kind of machine learning"]},
        response=list[TeiRank],
    )

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        others, truncation = self.parameters(body, context)
        query = read_string(body.get("query"), "query")
        texts = read_strings(body.get("texts"), "texts")
        pooling = Pooling("score", normalize=not others.get("raw_scores"))
        repeated: Sequence[str] = texts if others.get("return_text") else ()
        requests = score_requests(query, texts, "texts", pooling, truncation=truncation)
        return self.parsed(requests, functools.partial(_ranks, repeated))


def _ranks(texts: Sequence[str], vectors: Vectors, num_tokens: int) -> list[TeiRank]:
    """Render the scores, with the best first.

    Args:
        texts: the texts to show, or an empty sequence to show none.
    """
    return [
        {"index": index, "text": texts[index], "score": score} if texts else {"index": index, "score": score}
        for index, (score,) in sorted(enumerate(vectors), key=lambda item: -item[1][0])
    ]


class TeiPredict(Tei):
    """The dialect of /predict, which returns the labels of texts with probabilities, or with raw scores on request."""

    name = "tei_predict"
    table = PREDICT
    fields: Mapping[str, Shape] = {"inputs": {"anyOf": [NON_EMPTY, _PAIR, text_list(_PAIR)]}}
    description = Description(
        title="TEI predict",
        request="TeiPredictRequest",
        request_shape=request_shape(fields, table, *fields),
        error=TeiError,
        example={"inputs": "I like you."},
        response=list[TeiPrediction] | list[list[TeiPrediction]],
    )

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        others, truncation = self.parameters(body, context)
        pooling = Pooling("classify", normalize=not others.get("raw_scores"))
        request = Request("", pooling=pooling, truncation=truncation, names=FieldNames(prompt="inputs"))
        inputs = body.get("inputs")
        if not isinstance(inputs, list) or not inputs or not isinstance(inputs[0], list):
            requests = [_with_texts(request, inputs, "inputs")]
            return self.parsed(requests, lambda vectors, _: _predictions(vectors[0], context.labels))
        requests = [
            _with_texts(request, item, f"inputs[{index}]")
            for index, item in enumerate(read_list(inputs, "inputs", _INPUTS))
        ]
        return self.parsed(requests, lambda vectors, _: [_predictions(scores, context.labels) for scores in vectors])


def _with_texts(request: Request, item: Any, name: str) -> Request:
    """Return the request for a text, or for a list of one or two texts."""
    if isinstance(item, list) and 1 <= len(item) <= 2:
        first, *second = (read_string(text, name) for text in item)
        return request._replace(prompt=first, pair=second[0] if second else None)
    if isinstance(item, str) and item:
        return request._replace(prompt=item)
    raise InvalidPayload(f"'{name}' {_INPUTS}")


def _predictions(scores: Sequence[float], labels: Sequence[str]) -> list[TeiPrediction]:
    names = [labels[index] if index < len(labels) else f"LABEL_{index}" for index in range(len(scores))]
    ranked = sorted(zip(scores, names, strict=True), key=lambda item: -item[0])
    return [{"score": score, "label": label} for score, label in ranked]


def _headers(requests: Sequence[Request], timing: Timing | None) -> Headers:
    """Return TEI's headers. Times are in whole milliseconds."""
    characters = sum(len(request.prompt) + len(request.pair or "") for request in requests)
    headers = [("x-compute-characters", str(characters))]
    if timing is None:
        return headers
    seconds = {
        "x-compute-time": timing.total,
        "x-total-time": timing.total,
        "x-tokenization-time": timing.validation,
        "x-queue-time": timing.queue,
        "x-inference-time": timing.inference,
    }
    times = [(name, str(int(value * 1000))) for name, value in seconds.items()]
    return [*headers, ("x-compute-tokens", str(timing.num_prompt_tokens)), *times]
