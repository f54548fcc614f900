"""OpenAI's embeddings at /v1/embeddings, with vLLM's additions (vllm/entrypoints/pooling/embed/protocol.py)."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.values import Pooling
from handler.protocols.kernel.dialect import Description, ParsedRequest, ServerContext
from handler.protocols.kernel.parameters import Parameter, Table, read_all, request_shape, unsupported
from handler.protocols.kernel.readers import integer
from handler.protocols.kernel.reply import VectorReply, Vectors, json_of
from handler.protocols.kernel.schema import Shape, accepts
from handler.protocols.kernel.texts import (
    VLLM_POOLING,
    embedding_requests,
    read_texts,
    texts_shape,
    vllm_truncation,
)
from handler.protocols.openai.api import EmbeddingAnswer, OpenAiError
from handler.protocols.openai.request import MODEL, OpenAiDialect


@accepts(enum=["float", "base64"])
def _encoding_format(value: Any) -> str:
    if value not in ("float", "base64"):
        raise ValueError("must be float or base64")
    return str(value)


TABLE = Table(
    {
        "dimensions": Parameter("dimensions", integer(1)),
        "encoding_format": Parameter("encoding_format", _encoding_format),
        **VLLM_POOLING,
        "add_special_tokens": unsupported("send token ids for a text without them", True),
        "embed_dtype": unsupported("numbers have 32 bits", "float32"),
        "endianness": unsupported("base64 is little-endian, as OpenAI's", "little", "native"),
        "messages": unsupported("send texts as input", []),
        "normalize": unsupported("write use_activation"),
    }
)


class OpenAiEmbeddings(OpenAiDialect):
    """A vector of length 1 for each text of `input`."""

    name = "openai_embeddings"
    needed = "a JSON object with 'input'"
    table = TABLE
    fields: Mapping[str, Shape] = {"input": texts_shape(), **MODEL}
    description = Description(
        title="OpenAI embeddings",
        request="OpenAiEmbeddingRequest",
        request_shape=request_shape(fields, table, "input"),
        error=OpenAiError,
        example={"model": "", "input": ["What is deep learning?"]},
        answer=EmbeddingAnswer,
    )

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        model, adapter = self.read_model(body, context)
        texts = read_texts(body.get("input"), "input")
        others = read_all(body, context, defaults={}, table=self.table).others
        ignored = self.ignored(body, context)
        requests = embedding_requests(
            texts,
            "input",
            Pooling("embed", others.get("dimensions"), others.get("normalize", context.config.normalize)),
            context,
            truncation=vllm_truncation(others),
            adapter=adapter,
            priority=others.get("priority", 0),
        )
        keep = base64_of if others.get("encoding_format") == "base64" else json_of

        def render(vectors: Vectors, num_tokens: int) -> EmbeddingAnswer:
            return {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
                ],
                "model": model,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }

        return ParsedRequest(requests, VectorReply(len(requests), render, keep), self.errors, ignored)


def base64_of(vector: Sequence[float]) -> str:
    """Encode a vector as OpenAI does: its numbers of 32 bits, little-endian."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
