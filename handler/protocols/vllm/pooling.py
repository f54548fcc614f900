"""vLLM's routes /pooling, /classify and /score, which return embeddings, labels or scores of texts.

Source: vllm/entrypoints/pooling/*/protocol.py.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.values import FieldNames, Pooling, Request, Task, new_uuid
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Description
from handler.protocols.kernel.parameters import Parameter, Table, request_shape, unsupported
from handler.protocols.kernel.readers import show, string
from handler.protocols.kernel.reply import VectorReply, Vectors
from handler.protocols.kernel.schema import Shape
from handler.protocols.kernel.texts import (
    MAX_QUERIES,
    NON_EMPTY,
    VLLM_POOLING,
    TooManyTexts,
    cosine,
    read_string,
    read_strings,
    score_request,
    text_list,
)
from handler.protocols.openai.completions import (
    FOR_TEXTS,
    InputDialect,
    OpenAiEmbeddings,
    PooledDialect,
    PoolingOptions,
    encoder_of,
)
from handler.protocols.openai.request import MODEL
from handler.protocols.rerank import request as rerank
from handler.protocols.vllm.api import (
    ERRORS,
    VllmError,
    VllmHead,
    VllmLabels,
    VllmPooled,
    VllmScore,
    VllmScores,
    VllmUsage,
)

_OF_TEXTS = {**VLLM_POOLING, **FOR_TEXTS}
_OF_ENCODING = ("encoding_format", "embed_dtype", "endianness")
_OF_TOKENS = ("token_embed", "token_classify")


class VllmClassify(InputDialect):
    """The dialect of /classify, which returns the most likely label of each text, and all label probabilities."""

    name = "vllm_classify"
    errors = ERRORS
    parameters_first = True
    table = Table(_OF_TEXTS)
    description = Description(
        title="vLLM classification",
        request="VllmClassifyRequest",
        request_shape=request_shape(InputDialect.fields, table),
        error=VllmError,
        example={"model": "", "input": "I like you."},
        response=VllmLabels,
    )

    def reply(self, num_texts: int, options: PoolingOptions, context: ServerContext) -> VectorReply:
        def render(vectors: Vectors, num_tokens: int) -> VllmLabels:
            best = [max(range(len(probs)), key=probs.__getitem__) for probs in vectors]
            return {
                **_head("classify", options.model),
                "data": [
                    {
                        "index": index,
                        "label": context.labels[label] if label < len(context.labels) else None,
                        "probs": list(probs),
                        "num_classes": len(probs),
                    }
                    for index, (probs, label) in enumerate(zip(vectors, best, strict=True))
                ],
                "usage": usage_of(num_tokens),
            }

        return VectorReply(num_texts, render)


class VllmPoolingDialect(InputDialect):
    """The dialect of /pooling, which returns the output of the pooler: embeddings or label probabilities."""

    name = "vllm_pooling"
    errors = ERRORS
    parameters_first = True
    table = Table(
        {
            **_OF_TEXTS,
            **{name: OpenAiEmbeddings.table.parameters[name] for name in _OF_ENCODING},
            "dimensions": unsupported("call /v1/embeddings"),
            "task": Parameter("task", string),
            "data": unsupported("the engines have no plugins that accept it; send texts as input"),
        }
    )
    description = Description(
        title="vLLM pooling",
        request="VllmPoolingRequest",
        request_shape=request_shape(InputDialect.fields, table),
        error=VllmError,
        example={"model": "", "input": ["A cat"]},
        response=VllmPooled,
    )

    def reply(self, num_texts: int, options: PoolingOptions, context: ServerContext) -> VectorReply:
        _check_task(options.others.get("task"), "classify" if context.task is Task.CLASSIFICATION else "embed")

        def render(vectors: Vectors, num_tokens: int) -> VllmPooled:
            return {
                **_head("pooling", options.model),
                "data": [{"index": index, "object": "pooling", "data": data} for index, data in enumerate(vectors)],
                "usage": usage_of(num_tokens),
            }

        return VectorReply(num_texts, render, encoder_of(options.others))


def _head(kind: str, model: str) -> VllmHead:
    return {"id": f"{kind}-{new_uuid()}", "object": "list", "created": int(time.time()), "model": model}


def usage_of(num_tokens: int) -> VllmUsage:
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def _check_task(value: str | None, supported: str) -> None:
    if value in (None, supported):
        return
    reason = (
        "the engines return one vector per text, not per token"
        if value in _OF_TOKENS
        else f"the model's task is {supported}"
    )
    raise InvalidParameter(f"task={show(value)}: is not supported: {reason}")


# -- scores of pairs of texts ------------------------------------------------------------------------------------------
# Source: vllm/entrypoints/pooling/scoring/protocol.py.

_OF_RERANK = ("max_tokens_per_doc", "max_tokens_per_query", "instruction", "chat_template_kwargs")

PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""The fields for the first and second texts of pairs, in the order in which vLLM checks them."""

_TEXTS: Shape = {"anyOf": [NON_EMPTY, text_list(NON_EMPTY)]}


Pairs = tuple[Sequence[tuple[str, str]], str]
"""Pairs of texts, and the name of the field that contains the second texts."""


class VllmScoring(PooledDialect):
    """The dialect of /score. An embedding model scores a pair by the cosine similarity of its texts."""

    name = "vllm_score"
    errors = ERRORS
    needed = "a JSON object with 'text_1' and 'text_2'"
    table = Table({**VLLM_POOLING, **{name: rerank.TABLE.parameters[name] for name in _OF_RERANK}})
    fields: Mapping[str, Shape] = {**dict.fromkeys((name for pair in PAIRS for name in pair), _TEXTS), **MODEL}
    description = Description(
        title="vLLM score",
        request="VllmScoreRequest",
        request_shape=request_shape(fields, table),
        error=VllmError,
        example={"model": "", "text_1": "What is deep learning?", "text_2": ["A cheese", "A kind of machine learning"]},
        response=VllmScores,
    )

    def read_texts(self, body: Mapping[str, Any]) -> Pairs:
        return _read_pairs(body)

    def pool(self, texts: Pairs, options: PoolingOptions, context: ServerContext) -> tuple[list[Request], VectorReply]:
        pairs, name = texts
        indices = dict[str, int]()
        if context.task is Task.EMBEDDING:
            indices = {text: index for index, text in enumerate(dict.fromkeys(itertools.chain(*pairs)))}
            request = Request("", pooling=Pooling("embed"), names=FieldNames(prompt=name), **options.fields)
            requests = [request._replace(prompt=text) for text in indices]
        else:
            pooling = Pooling("score", normalize=options.others.get("normalize", True))
            requests = [
                score_request(pair, f"{name}[{index}]", pooling, **options.fields) for index, pair in enumerate(pairs)
            ]
        return requests, VectorReply(len(requests), functools.partial(_scores, options.model, pairs, indices))


def _scores(
    model: str, pairs: Sequence[tuple[str, str]], indices: Mapping[str, int], vectors: Vectors, num_tokens: int
) -> VllmScores:
    """Render the scores of pairs.

    Args:
        indices: maps each text to the index of its embedding. If it is empty, `vectors` contains a score for each pair.
    """
    scores = [float(item[0]) for item in vectors]
    if indices:
        scores = [cosine(vectors[indices[first]], vectors[indices[second]]) for first, second in pairs]
    data: list[VllmScore] = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return {**_head("score", model), "data": data, "usage": usage_of(num_tokens)}


def _read_pairs(body: Mapping[str, Any]) -> Pairs:
    """Read the pairs of texts. A single first text is paired with each second text."""
    names = next((pair for pair in PAIRS if all(body.get(name) is not None for name in pair)), None)
    if names is None:
        raise InvalidPayload("'text_1' and 'text_2', or 'queries' and 'documents', must be strings or lists of strings")
    first, second = (_read_side(body[name], name) for name in names)
    if len(first) > 1 and len(first) != len(second):
        raise InvalidPayload(
            f"'{names[0]}' has {len(first)} texts and '{names[1]}' has {len(second)}; '{names[0]}' must have one text, "
            f"or as many as '{names[1]}'"
        )
    if len(first) == 1 and len(first[0]) * len(second) > MAX_QUERIES:
        raise TooManyTexts(
            f"'{names[0]}' has {len(first[0])} characters for each of {len(second)} texts; the maximum is "
            f"{MAX_QUERIES} in all"
        )
    return [*zip(first * len(second) if len(first) == 1 else first, second, strict=True)], names[1]


def _read_side(value: Any, name: str) -> list[str]:
    if isinstance(value, str):
        return [read_string(value, name)]
    return read_strings(value, name, "must be a string or a list of strings")
