"""vLLM's routes /pooling, /classify and /score, which compute numbers for texts.

Source: vllm/entrypoints/pooling/*/protocol.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.media import new_uuid
from handler.core.values import FieldNames, Pooling, Request, Task
from handler.protocols.kernel.dialect import Description, ParsedRequest, ServerContext
from handler.protocols.kernel.parameters import Parameter, Table, read_all, request_shape, unsupported
from handler.protocols.kernel.readers import show, string
from handler.protocols.kernel.reply import VectorReply, Vectors, json_of
from handler.protocols.kernel.schema import Shape
from handler.protocols.kernel.texts import (
    MAX_QUERIES,
    MAX_TEXTS,
    NON_EMPTY,
    VLLM_POOLING,
    TooManyTexts,
    cosine,
    embedding_requests,
    read_list,
    read_string,
    read_texts,
    text_list,
    texts_shape,
    vllm_fields,
)
from handler.protocols.openai.completions import OpenAiEmbeddings, base64_of
from handler.protocols.openai.request import MODEL, OpenAiDialect
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

_OF_TEXTS = {
    **VLLM_POOLING,
    **{name: OpenAiEmbeddings.table.parameters[name] for name in ("add_special_tokens", "messages")},
}
_OF_ENCODING = ("encoding_format", "embed_dtype", "endianness")
_OF_TOKENS = ("token_embed", "token_classify")


class VllmNumbers(OpenAiDialect):
    """Base class of the routes that compute a vector or probabilities for each text of `input`."""

    errors = ERRORS
    needed = "a JSON object with 'input'"
    fields: Mapping[str, Shape] = {"input": texts_shape(), **MODEL}

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        model, adapter = self.read_model(body, context)
        parameters = read_all(body, context, defaults={}, table=self.table)
        others = parameters.others
        texts = read_texts(body.get("input"), "input")
        ignored = self.ignored(body, context)
        task = _task(context)
        normalize = others.get("normalize", task == "classify" or context.config.normalize)
        requests = embedding_requests(
            texts,
            "input",
            Pooling(task, normalize=normalize),
            context,
            **vllm_fields(parameters, adapter),
        )
        reply = self.reply(len(requests), model, others, context)
        return ParsedRequest(requests, reply, self.errors, ignored)

    def reply(self, num_texts: int, model: str, others: Mapping[str, Any], context: ServerContext) -> VectorReply:
        raise NotImplementedError


class VllmClassify(VllmNumbers):
    """The dialect of /classify, which answers with the most likely label of each text and all probabilities."""

    name = "vllm_classify"
    table = Table(_OF_TEXTS)
    description = Description(
        title="vLLM classification",
        request="VllmClassifyRequest",
        request_shape=request_shape(VllmNumbers.fields, table),
        error=VllmError,
        example={"model": "", "input": "I like you."},
        answer=VllmLabels,
    )

    def reply(self, num_texts: int, model: str, others: Mapping[str, Any], context: ServerContext) -> VectorReply:
        def render(vectors: Vectors, num_tokens: int) -> VllmLabels:
            best = [max(range(len(probs)), key=probs.__getitem__) for probs in vectors]
            return {
                **_head("classify", model),
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


class VllmPoolingDialect(VllmNumbers):
    """The dialect of /pooling, which answers with the output of the pooler: vectors or the labels' probabilities."""

    name = "vllm_pooling"
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
        request_shape=request_shape(VllmNumbers.fields, table),
        error=VllmError,
        example={"model": "", "input": ["A cat"]},
        answer=VllmPooled,
    )

    def reply(self, num_texts: int, model: str, others: Mapping[str, Any], context: ServerContext) -> VectorReply:
        _check_task(others.get("task"), _task(context))

        def render(vectors: Vectors, num_tokens: int) -> VllmPooled:
            return {
                **_head("pooling", model),
                "data": [{"index": index, "object": "pooling", "data": data} for index, data in enumerate(vectors)],
                "usage": usage_of(num_tokens),
            }

        in_base64 = others.get("encoding_format") == "base64"
        return VectorReply(num_texts, render, base64_of if in_base64 else json_of)


def _task(context: ServerContext) -> Literal["classify", "embed"]:
    return "classify" if context.task is Task.CLASSIFICATION else "embed"


def _head(kind: str, model: str) -> VllmHead:
    return {"id": f"{kind}-{new_uuid()}", "object": "list", "created": int(time.time()), "model": model}


def usage_of(num_tokens: int) -> VllmUsage:
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def _check_task(value: str | None, own: str) -> None:
    if value in (None, own):
        return
    why = (
        "the engines return one vector per text, not per token" if value in _OF_TOKENS else f"the model's task is {own}"
    )
    raise InvalidParameter(f"task={show(value)}: is not supported: {why}")


# -- scores of pairs of texts ------------------------------------------------------------------------------------------
# Source: vllm/entrypoints/pooling/scoring/protocol.py.

_OF_RERANK = ("max_tokens_per_doc", "max_tokens_per_query", "instruction", "chat_template_kwargs")

PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""The fields for the first and second texts of pairs, in the order in which vLLM checks them."""

_TEXTS: Shape = {"anyOf": [NON_EMPTY, text_list(NON_EMPTY)]}


class VllmScoring(OpenAiDialect):
    """The dialect of /score. An embedding model scores a pair by the cosine of the texts' vectors."""

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
        answer=VllmScores,
    )

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        model, adapter = self.read_model(body, context)
        pairs, names = _read_pairs(body)
        parameters = read_all(body, context, defaults={}, table=self.table)
        others = parameters.others
        ignored = self.ignored(body, context)
        embeds = context.task is Task.EMBEDDING
        pooling = Pooling("embed") if embeds else Pooling("score", normalize=others.get("normalize", True))
        shared = {"pooling": pooling, **vllm_fields(parameters, adapter)}
        if embeds:
            places = {text: index for index, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
            requests = [Request(text, names=FieldNames(prompt=names[1]), **shared) for text in places]
        else:
            requests = [
                Request(first, pair=second, names=FieldNames(prompt=f"{names[1]}[{index}]"), **shared)
                for index, (first, second) in enumerate(pairs)
            ]

        def score(vectors: Vectors, index: int) -> float:
            if not embeds:
                return float(vectors[index][0])
            first, second = (vectors[places[text]] for text in pairs[index])
            return cosine(first, second)

        def render(vectors: Vectors, num_tokens: int) -> VllmScores:
            data: list[VllmScore] = [
                {"index": index, "object": "score", "score": score(vectors, index)} for index in range(len(pairs))
            ]
            return {
                **_head("score", model),
                "data": data,
                "usage": usage_of(num_tokens),
            }

        return ParsedRequest(requests, VectorReply(len(requests), render), self.errors, ignored)


def _read_pairs(body: Mapping[str, Any]) -> tuple[Sequence[tuple[str, str]], tuple[str, str]]:
    """Return the pairs of texts, and the names of their fields. A single first text is paired with each second text."""
    fields = {name for pair in PAIRS for name in pair if body.get(name) is not None}
    names = next((pair for pair in PAIRS if fields.issuperset(pair)), None)
    if names is None:
        raise InvalidPayload("'text_1' and 'text_2', or 'queries' and 'documents', must be strings or lists of strings")
    first, second = (_read_side(body[name], name) for name in names)
    if len(first) > 1 and len(first) != len(second):
        counts = f"'{names[0]}' has {len(first)} texts and '{names[1]}' has {len(second)}"
        raise InvalidPayload(f"{counts}; '{names[0]}' must have one text, or as many as '{names[1]}'")
    if len(first) == 1 and len(first[0]) * len(second) > MAX_QUERIES:
        each = f"'{names[0]}' has {len(first[0])} characters for each of {len(second)} texts"
        raise TooManyTexts(f"{each}; the maximum is {MAX_QUERIES} in all")
    return [(first[index if len(first) > 1 else 0], text) for index, text in enumerate(second)], names


def _read_side(value: Any, name: str) -> list[str]:
    if isinstance(value, str):
        return [read_string(value, name)]
    texts = read_list(value, name, "must be a string or a list of strings", MAX_TEXTS)
    return [read_string(text, f"{name}[{index}]") for index, text in enumerate(texts)]
