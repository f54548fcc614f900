"""Cohere's rerank, versions 1 and 2, with the additions of vLLM and Jina AI.

Sources: docs.cohere.com, "Rerank API" v1 and v2; vllm/entrypoints/pooling/scoring/protocol.py; jina.ai/reranker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from handler.core.errors import InvalidPayload, ServingError
from handler.core.framing import encoded
from handler.core.values import Pooling, Request, Task, Truncation, new_uuid
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Description
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.parameters import Parameter, Table, request_shape, unsupported
from handler.protocols.kernel.readers import boolean, integer
from handler.protocols.kernel.reply import VectorReply, Vectors
from handler.protocols.kernel.schema import Count, NotRequired, Shape, accepts, record
from handler.protocols.kernel.texts import (
    NON_EMPTY,
    VLLM_POOLING,
    cosine,
    embedding_requests,
    read_list,
    read_string,
    score_requests,
    text_list,
)
from handler.protocols.openai.api import OpenAiErrors
from handler.protocols.openai.completions import PooledDialect, PoolingOptions
from handler.protocols.openai.request import MODEL

# -- responses ---------------------------------------------------------------------------------------------------------


class RankedDocument(TypedDict):
    """A ranked document. The results are sorted by relevance, with the best document first.

    `document` contains `text`, and all other fields if the client sent the document as an object.
    """

    index: Count
    relevance_score: float | None
    document: NotRequired[dict[str, Any]]


class RerankUsage(TypedDict):
    prompt_tokens: Count
    total_tokens: Count


class RerankAnswer(TypedDict):
    """The response, with `id` and `results` as in Cohere's API, and `model` and `usage` as in vLLM."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RerankUsage


# -- Cohere's errors, `{"message"}`, with OpenAI's statuses ------------------------------------------------------------


class RerankError(TypedDict):
    message: str


class RerankErrors(ErrorFormat):
    statuses = OpenAiErrors.statuses

    def body(self, error: ServingError) -> RerankError:
        return {"message": error.message}


ERRORS = RerankErrors()


_COHERES_DEFAULT = 4096


@accepts(type="integer", minimum=0)
def _max_tokens_per_doc(value: Any, context: ServerContext) -> None:
    """Refuse a limit on tokens per document that is below the model's own limit. 0 means no limit, as in vLLM.

    Cohere's default of 4096 has the same effect as no value, for any model.
    """
    tokens, most = integer(0)(value), context.most_tokens()
    if tokens not in (0, _COHERES_DEFAULT) and most is not None and tokens < most:
        raise ValueError(f"must not be below the model's limit of {most} tokens; use truncate_prompt_tokens instead")


TABLE = Table(
    {
        "top_n": Parameter("top_n", integer(0)),
        "return_documents": Parameter("return_documents", boolean),
        "max_tokens_per_doc": Parameter("", _max_tokens_per_doc, informed=True),
        "rank_fields": unsupported("documents are ranked by their field text only", ["text"]),
        "max_chunks_per_doc": unsupported("a document is scored as a whole", 1),
        "relevant_spans": unsupported("a document is scored as a whole"),
        **VLLM_POOLING,
        "max_tokens_per_query": unsupported("use truncate_prompt_tokens", 0),
        "instruction": unsupported("add it to the query", ""),
        "chat_template_kwargs": unsupported("no chat template is applied to queries and documents", {}),
        "raw_scores": unsupported("send use_activation=false", False),
        "return_text": unsupported("use return_documents"),
    }
)
"""The parameters of Cohere, vLLM and Jina AI."""

FIELDS: Mapping[str, Shape] = {
    "query": NON_EMPTY,
    "documents": {"anyOf": [NON_EMPTY, text_list({"anyOf": [NON_EMPTY, record({"text": NON_EMPTY})]})]},
    **MODEL,
}

_DESCRIPTION = Description(
    title="",
    request="RerankRequest",
    request_shape=request_shape(FIELDS, TABLE, "query", "documents"),
    error=RerankError,
    example={"model": "", "query": "What is deep learning?", "documents": ["A cheese", "A kind of machine learning"]},
    response=RerankAnswer,
)


class Rerank(PooledDialect):
    """The dialect that ranks documents by relevance to a query. An embedding model ranks by cosine similarity.

    Args:
        title: the title of the dialect in the OpenAPI document.
        return_documents: the default of the field `return_documents`: true in vLLM and Jina AI, false in Cohere's
            version 2.
        truncation: how to truncate pairs that are too long, or None to refuse them. Cohere's version 2 truncates them.
    """

    errors = ERRORS
    needed = "a JSON object with 'query' and 'documents'"
    table = TABLE
    fields = FIELDS

    def __init__(self, name: str, title: str, *, return_documents: bool, truncation: Truncation | None) -> None:
        self.name = name
        self.description = _DESCRIPTION._replace(title=title)
        self._return_documents = return_documents
        self.truncation = truncation

    def read_texts(self, body: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        return read_string(body.get("query"), "query"), _read_documents(body.get("documents"))

    def pool(self, texts: Any, options: PoolingOptions, context: ServerContext) -> tuple[list[Request], VectorReply]:
        query, documents = texts
        texts, others = [document["text"] for document in documents], options.others
        embeds = context.task is Task.EMBEDDING
        if embeds:
            requests = [
                *embedding_requests([query], "query", Pooling("embed"), context, **options.fields),
                *embedding_requests(texts, "documents", Pooling("embed"), context, **options.fields),
            ]
        else:
            pooling = Pooling("score", normalize=others.get("normalize", True))
            requests = score_requests(query, texts, "documents", pooling, **options.fields)
        repeated = _encode(documents) if others.get("return_documents", self._return_documents) else None
        most = others.get("top_n") or len(documents)

        def render(vectors: Vectors, num_tokens: int) -> RerankAnswer:
            query, *texts = vectors
            scores = [cosine(query, text) for text in texts] if embeds else [item[0] for item in vectors]
            best_first = sorted(enumerate(scores), key=lambda item: -item[1])[:most]
            results: list[RankedDocument] = [{"index": index, "relevance_score": score} for index, score in best_first]
            if repeated is not None:
                for result in results:
                    result["document"] = repeated[result["index"]]
            return {
                "id": f"rerank-{new_uuid()}",
                "model": options.model,
                "results": results,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }

        return requests, VectorReply(len(requests), render)


def _read_documents(value: Any) -> list[dict[str, Any]]:
    """Return the documents, each as an object with `text`."""
    expected = "must be a list of strings, or of objects with 'text'"
    items = read_list([value] if isinstance(value, str) else value, "documents", expected, noun="documents")
    documents = [item if isinstance(item, dict) else {"text": item} for item in items]
    for index, document in enumerate(documents):
        at = f"documents[{index}]"
        read_string(document.get("text"), f"{at}.text" if isinstance(items[index], dict) else at)
    return documents


def _encode(documents: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Encode the documents for the response.

    This happens while the request is parsed, because large documents would block the event loop later.

    Raises:
        InvalidPayload: a document cannot be encoded.
    """
    try:
        return [encoded(document, depth=3) for document in documents]
    except TypeError as error:
        raise InvalidPayload(f"'documents' cannot be repeated in the response: {error}") from None
