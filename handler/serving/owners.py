"""Whose a request is: the name of its API key's owner, which does not tell the key."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

OWNER = "?owner"
"""Where a host puts whose key it has found right, among a request's headers: no header is called so."""


def owner_of(headers: Mapping[str, str]) -> str:
    """Return whose a request is, by its API key, whether or not the host checks keys; "" where it has none."""
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
