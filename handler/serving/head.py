"""The head of a request: the dialect of its route and the values from its headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from handler.core.errors import InvalidPayload
from handler.core.owners import Everyone, owner_by_key
from handler.core.values import Adapter, new_uuid
from handler.plugins.api import Session
from handler.plugins.functions import Formatters
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.kernel.readers import merge_adapters, named_adapter, quote
from handler.serving.compression import content_encoding
from handler.serving.request.plan import Decoded, Stage

Headers = Mapping[str, str]
"""Headers of a request, by name in lower case."""

NO_FORMATTERS = Formatters()

OWNER = "?owner"
"""Pseudo-header for the owner of a request, set by the host. No real header can have this name."""

QUERY_ADAPTER = "?adapter"
"""Pseudo-header for the adapter in the query string, set by the host. No real header can have this name."""

PATH_MODEL = "?model"
"""Pseudo-header for the model name in the path, set by the host. No real header can have this name."""

DETACHES = "?background"
"""Pseudo-header of a request whose response may be generated in the background, set by the host."""

KEY_HEADERS = ("authorization", "x-api-key")
"""Headers with API keys: `Bearer KEY`, and Anthropic's."""

ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"

_ADAPTER = ("x-amzn-sagemaker-adapter-identifier", "adapter")
"""Headers of SageMaker and DJL that name the LoRA adapter of a request."""

ADAPTER_HEADERS = frozenset((*_ADAPTER, ATTRIBUTES, QUERY_ADAPTER))
"""All headers that may name an adapter."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Head(NamedTuple):
    """The head of a request. `Plan.read_head` sets all attributes except the headers.

    Attributes:
        headers: headers by name in lower case.
        dialect: dialect of the body. Until the head is read, None stands for the configured dialect.
        media_type: content type in lower case without its parameters, or "" if it is missing.
        adapter: the LoRA adapter from the headers or the query string.
        formatters: formatters of the adapter, or else of the model.
        session: session from the headers.
        owner: name of the owner of the request, or "" for everyone. A key cannot be derived from the name.
        is_configured: whether the route uses the configured dialect.
        read: decodes a body of this dialect and content type.
        stages: the stages that only requests with these headers pass.
    """

    headers: Headers = MappingProxyType({})
    dialect: Dialect | None = None
    media_type: str = ""
    adapter: Adapter | None = None
    formatters: Formatters = NO_FORMATTERS
    session: Session | None = None
    owner: str = ""
    is_configured: bool = False
    read: Callable[[bytes, Head], Decoded] | None = None
    stages: Sequence[Stage] = ()

    @property
    def encoding(self) -> str:
        """The Content-Encoding of the body, or "" if the body is not encoded."""
        return content_encoding(self.headers)

    @property
    def is_prompt(self) -> bool:
        """Whether the body is a plain-text prompt, which only the configured dialect accepts."""
        return self.is_configured and self.media_type == "text/plain"


def owner_of(headers: Headers) -> str:
    """Return the owner of a request, as its host has named it, or "" for everyone."""
    return headers.get(OWNER, "")


def unchecked_owner(headers: Headers, header: str | None) -> str:
    """Return the owner of a request whose key the host does not check.

    Args:
        header: header in which a gateway names the owner. One of `KEY_HEADERS` stands for the key in either of them,
            first in that header, as the gateway may not check the other. None: all requests have the same owner.
    """
    if header and header not in KEY_HEADERS:
        name = headers.get(header, "").strip()
        return owner_by_key(f"{header}: {name}") if name else ""
    keys = [bearer_token(headers.get("authorization", "")), headers.get("x-api-key", "").strip()]
    key = keys[header != "authorization"] or "".join(keys)
    if not key:
        return ""
    return owner_by_key(key) if header else Everyone(owner_by_key(key))


def bearer_token(authorization: str) -> str:
    """Return the token in the value `Bearer TOKEN` of an Authorization header, or "" for other values."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def request_id(headers: Headers) -> str:
    """Return the request id set by DJL, SageMaker or the client, or a new id if no valid id is set."""
    for name in ("requestid", "x-amzn-sagemaker-inference-id", "x-request-id"):
        if (value := headers.get(name)) and _REQUEST_ID.fullmatch(id := value.strip()):
            return id
    return new_uuid()


def media_type(headers: Headers) -> str:
    """Return the content type in lower case without its parameters, or "" if it is missing."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def in_attributes(headers: Headers, name: str) -> str | None:
    """Return the value of `name=` in the SageMaker custom attributes, or None if it is missing.

    DJL's front end reads custom attributes itself and forwards them as headers.
    """
    attributes = headers.get(ATTRIBUTES)
    match = re.search(rf"(?:^|[\s,;]){name}=([^\s,;]*)", attributes) if attributes else None
    return None if match is None else match[1]


def adapter_of(headers: Headers, context: ServerContext) -> Adapter | None:
    """Return the adapter from the headers or the query string, or None if neither names an adapter.

    Raises:
        InvalidPayload: the adapter is unknown, or the request names two different adapters.
    """
    adapter = None
    fields = [(f"header {name}", headers.get(name)) for name in _ADAPTER]
    fields.append(("header adapter", in_attributes(headers, "adapter")))
    fields.append(("query parameter adapter", headers.get(QUERY_ADAPTER)))
    for field, value in fields:
        if not value:
            continue
        try:
            header_adapter = named_adapter(value, context)
        except ValueError as error:
            raise InvalidPayload(f"{field}: {quote(value)}: {error}") from None
        adapter = merge_adapters(adapter, header_adapter, field)
    return adapter
