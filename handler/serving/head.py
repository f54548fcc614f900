"""A request's head: the route's dialect, and the values of its headers, read once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from handler.core.errors import InvalidPayload
from handler.core.media import new_uuid
from handler.core.values import Adapter
from handler.plugins.api import Session
from handler.plugins.functions import Formatters
from handler.protocols.kernel.dialect import Dialect, ServerContext
from handler.protocols.kernel.readers import merge_adapters, named_adapter, quote

Headers = Mapping[str, str]
"""A request's headers, names in lower case."""

NO_FORMATTERS = Formatters()

OWNER = "?owner"
"""Pseudo-header in which a host puts the owner of a valid key; no real header has this name."""

QUERY_ADAPTER = "?adapter"
"""Pseudo-header in which a host puts the adapter that the query names; no real header has this name."""

ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"

_ADAPTER = ("x-amzn-sagemaker-adapter-identifier", "adapter")
"""SageMaker's and DJL's headers that name the LoRA adapter of a request."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Head(NamedTuple):
    """Facts about a request that are known before its body. `Preprocessor.read_head` sets what follows `dialect`.

    Attributes:
        dialect: the route's own; None is the configured one.
        media_type: the body's, without its parameters, in lower case; "" if no header gives it.
        adapter: the LoRA adapter that headers or query name.
        formatters: the adapter's, or the model's own.
        session: that the headers name.
    """

    headers: Headers = MappingProxyType({})
    dialect: Dialect | None = None
    media_type: str = ""
    adapter: Adapter | None = None
    formatters: Formatters = NO_FORMATTERS
    session: Session | None = None

    @property
    def owner(self) -> str:
        """The name of the key's owner, from which the key cannot be derived; "" without a key."""
        return owner_of(self.headers)

    @property
    def is_prompt(self) -> bool:
        """Return whether the body is a prompt in plain text, which only the configured dialect reads."""
        return self.dialect is None and self.media_type == "text/plain"


def owner_of(headers: Headers) -> str:
    """Return the owner of a request, by its API key, whether or not the host checks keys; "" if it has none."""
    if (owner := headers.get(OWNER)) is not None:
        return owner
    key = headers.get("x-api-key", "").strip() or bearer_token(headers.get("authorization", ""))
    return owner_by_key(key) if key else ""


def owner_by_key(key: str) -> str:
    """Return the name of a key's owner."""
    return digest_of(key).hex()


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def bearer_token(authorization: str) -> str:
    """Return the token of a header `Authorization: Bearer TOKEN`; "" for another one."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def request_id(headers: Headers) -> str:
    """Return DJL's or SageMaker's id, or the client's where it is harmless, else a new one."""
    for name in ("requestid", "x-amzn-sagemaker-inference-id", "x-request-id"):
        if (given := headers.get(name)) and _REQUEST_ID.fullmatch(id := given.strip()):
            return id
    return new_uuid()


def media_type(headers: Headers) -> str:
    """Return the content type without its parameters, in lower case; "" if there is none."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def in_attributes(headers: Headers, name: str) -> str | None:
    """Return the value of `name=` in SageMaker's custom attributes; None if they do not have it.

    DJL's front end reads them itself, and passes them on as headers.
    """
    attributes = headers.get(ATTRIBUTES)
    match = re.search(rf"(?:^|[\s,;]){name}=([^\s,;]*)", attributes) if attributes else None
    return None if match is None else match[1]


def adapter_of(headers: Headers, context: ServerContext) -> Adapter | None:
    """Return the adapter that the headers name; None if they name none.

    Raises:
        InvalidPayload: there is none of that name, or two headers name two.
    """
    found = None
    for place, given in _named_adapters(headers):
        if not given:
            continue
        try:
            one = named_adapter(given, context)
        except ValueError as error:
            raise InvalidPayload(f"{place}: {quote(given)}: {error}") from None
        found = merge_adapters(found, one, place)
    return found


def _named_adapters(headers: Headers) -> Iterator[tuple[str, str | None]]:
    """Yield each place that may name an adapter, for messages, with its value."""
    for name in _ADAPTER:
        yield f"header {name}", headers.get(name)
    yield "header adapter", in_attributes(headers, "adapter")
    yield "query parameter adapter", headers.get(QUERY_ADAPTER)
