"""LMI's embeddings of a single text or a list of texts.

/invocations returns one embedding for one text, and a list of embeddings for a list. Source: docs.djl.ai, "LMI Text
Embedding User Guide". Hugging Face's container for SageMaker accepts TEI's bodies on this path: a body with a field
that only TEI knows gets TEI's response, as on /embed. For a list, both responses are the same. LMI's async mode embeds
texts since LMI v25, and always returns a list of embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidPayload
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, ParsedRequest
from handler.protocols.kernel.errors import ErrorFormat, FrontEndError
from handler.protocols.kernel.parameters import Table
from handler.protocols.kernel.reply import VectorReply, json_of
from handler.protocols.kernel.schema import Shape
from handler.protocols.lmi.api import AsyncErrors, EmbeddingErrors, LmiPayloadError
from handler.protocols.lmi.request import read_parameters_field
from handler.protocols.tei.request import EMBED, TeiEmbed, TeiError, TeiVectors, nested_request

_TEI = TeiEmbed()
_ASYNC_ERRORS = AsyncErrors()
_EMBEDS_ASYNC_SINCE = (0, 36)  # LMI v25; earlier LMI releases with DJL Serving 0.36 do not embed in async mode


class LmiEmbedding(TeiEmbed):
    """The dialect of LMI's embeddings. LMI itself has only `inputs`. `parameters` may contain the parameters of TEI."""

    name = "lmi_embedding"
    errors: ErrorFormat = EmbeddingErrors()
    unique_keys = False
    table = Table(EMBED.parameters, "parameters.")
    fields: Mapping[str, Shape] = {**TeiEmbed.fields, "parameters": {"type": ["object", "null"]}}
    description = Description(
        title="LMI embedding",
        request="LmiEmbeddingRequest",
        request_shape=nested_request(fields, table),
        error=LmiPayloadError | FrontEndError | TeiError,
        example={"inputs": "What is deep learning?"},
        response=list[float] | TeiVectors,
    )

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        if _is_of_tei(body):
            return _TEI.parse(body, context)
        if not isinstance(body, dict) or body.get("inputs") is None:
            raise InvalidPayload("the body has no 'inputs': this server embeds texts (option.task=text-embedding)")
        return super().parse({**body, "parameters": read_parameters_field(body)}, context, request_context)

    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        inputs = body.get("inputs")
        requests = self.requests(inputs, body["parameters"], context)
        alone = len(requests) == 1 and not (isinstance(inputs, list) and isinstance(inputs[0], str | list))
        bare = alone and not _is_async(context)
        reply = VectorReply(len(requests), lambda vectors, _: vectors[0] if bare else vectors, json_of)
        return ParsedRequest(requests, reply, self.errors_of(body, context))

    def errors_of(self, body: Any, context: ServerContext) -> ErrorFormat:
        if _is_of_tei(body):
            return _TEI.errors
        return _ASYNC_ERRORS if _is_async(context) else self.errors


def _is_async(context: ServerContext) -> bool:
    return context.config.async_schema and context.config.lmi_version >= _EMBEDS_ASYNC_SINCE


def _is_of_tei(body: Any) -> bool:
    if not isinstance(body, dict):
        return False
    return isinstance(body.get("inputs"), dict) or not EMBED.parameters.keys().isdisjoint(body)
