"""vLLM's /pooling and /classify: numbers of texts (vllm/entrypoints/pooling/pooling and classify, protocol.py)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from handler.core.errors import InvalidParameter
from handler.core.media import new_uuid
from handler.core.values import Pooling, Task
from handler.protocols.kernel.dialect import Description, ParsedRequest, ServerContext
from handler.protocols.kernel.parameters import Parameter, Table, read_all, request_shape, unsupported
from handler.protocols.kernel.readers import show, string
from handler.protocols.kernel.reply import VectorReply, Vectors, json_of
from handler.protocols.kernel.schema import Shape
from handler.protocols.kernel.texts import VLLM_POOLING, embedding_requests, read_texts, texts_shape, vllm_truncation
from handler.protocols.openai import embeddings
from handler.protocols.openai.request import MODEL, OpenAiDialect
from handler.protocols.vllm.api import ERRORS, VllmError, VllmLabels, VllmPooled, VllmUsage

_OF_TEXTS = {
    **VLLM_POOLING,
    **{name: embeddings.TABLE.parameters[name] for name in ("add_special_tokens", "messages")},
}
CLASSIFY = Table(_OF_TEXTS)
POOLING = Table(
    {
        **_OF_TEXTS,
        **{name: embeddings.TABLE.parameters[name] for name in ("encoding_format", "embed_dtype", "endianness")},
        "dimensions": unsupported("call /v1/embeddings"),
        "task": Parameter("task", string),
        "data": unsupported("the engines have no plugins that read it; send texts as input"),
    }
)
FIELDS: Mapping[str, Shape] = {"input": texts_shape(), **MODEL}

_OF_TOKENS = ("token_embed", "token_classify")


class VllmNumbers(OpenAiDialect):
    """Numbers of each text of `input`."""

    errors = ERRORS
    needed = "a JSON object with 'input'"
    fields = FIELDS

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        model, adapter = self.read_model(body, context)
        others = read_all(body, context, defaults={}, table=self.table).others
        texts = read_texts(body.get("input"), "input")
        ignored = self.ignored(body, context)
        task = _task(context)
        normalize = others.get("normalize", task == "classify" or context.config.normalize)
        requests = embedding_requests(
            texts,
            "input",
            Pooling(task, normalize=normalize),
            context,
            truncation=vllm_truncation(others),
            adapter=adapter,
            priority=others.get("priority", 0),
        )
        reply = self.reply(len(requests), model, others, context)
        return ParsedRequest(requests, reply, self.errors, ignored)

    def reply(self, num_texts: int, model: str, others: Mapping[str, Any], context: ServerContext) -> VectorReply:
        raise NotImplementedError


class VllmClassify(VllmNumbers):
    """The labels' probabilities, and the likeliest label."""

    name = "vllm_classify"
    table = CLASSIFY
    description = Description(
        title="vLLM's classification",
        request="VllmClassifyRequest",
        request_shape=request_shape(FIELDS, table),
        error=VllmError,
        example={"model": "", "input": "I like you."},
        answer=VllmLabels,
    )

    def reply(self, num_texts: int, model: str, others: Mapping[str, Any], context: ServerContext) -> VectorReply:
        def render(vectors: Vectors, num_tokens: int) -> VllmLabels:
            best = [max(range(len(probs)), key=probs.__getitem__) for probs in vectors]
            return {
                "id": f"classify-{new_uuid()}",
                "object": "list",
                "created": int(time.time()),
                "model": model,
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


class VllmPooling(VllmNumbers):
    """The result of the model's pooler: a vector, or the labels' probabilities."""

    name = "vllm_pooling"
    table = POOLING
    description = Description(
        title="vLLM's pooling",
        request="VllmPoolingRequest",
        request_shape=request_shape(FIELDS, table),
        error=VllmError,
        example={"model": "", "input": ["A cat"]},
        answer=VllmPooled,
    )

    def reply(self, num_texts: int, model: str, others: Mapping[str, Any], context: ServerContext) -> VectorReply:
        _check_task(others.get("task"), _task(context))

        def render(vectors: Vectors, num_tokens: int) -> VllmPooled:
            return {
                "id": f"pooling-{new_uuid()}",
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": [{"index": index, "object": "pooling", "data": data} for index, data in enumerate(vectors)],
                "usage": usage_of(num_tokens),
            }

        in_base64 = others.get("encoding_format") == "base64"
        return VectorReply(num_texts, render, embeddings.base64_of if in_base64 else json_of)


def _task(context: ServerContext) -> Literal["classify", "embed"]:
    return "classify" if context.task is Task.CLASSIFICATION else "embed"


def usage_of(num_tokens: int) -> VllmUsage:
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def _check_task(given: str | None, own: str) -> None:
    if given in (None, own):
        return
    why = "the engines return one vector for a whole text" if given in _OF_TOKENS else f"the model's is {own}"
    raise InvalidParameter(f"task={show(given)}: is not supported: {why}")
