"""Patterns for tokens to mask, and functions that remove credentials from headers and query strings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode

TOKENS = (
    r"\b(?:hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_[A-Za-z0-9_]{30,}|xox[abprs]-[A-Za-z0-9-]{20,}|nvapi-[A-Za-z0-9_-]{20,}"
    r"|sagemaker-api-key-[A-Za-z0-9+/=_-]{20,}|glpat-[A-Za-z0-9_-]{20,}|AIza[A-Za-z0-9_-]{35}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+)"
)
"""Regular expression, without capturing groups, for the keys of services that provide or run models."""

# -- credentials of requests, which are never recorded -----------------------------------------------------------------

_CREDENTIALS = re.compile(
    r"auth|cookie|token|secret|signature|credential|passw|api[-_]?key|subscription-key|session-id"
    r"|(?:^|[-_.])(?:key|sig|jwt)$",
    re.IGNORECASE,
)
"""Matches the names of headers and query parameters whose values are credentials."""

_PUBLIC = re.compile(
    r"accept|accept-language|content-type|content-encoding|adapter|inference-header-content-length"
    r"|x-amzn-sagemaker-[a-z-]+|anthropic-(?:version|beta)|openai-beta"
)
"""Matches the names of headers that a server may record. Any other header may be a credential with a custom name."""


def is_credential(name: str) -> bool:
    """Return whether a header or query parameter with this name contains a credential."""
    return _CREDENTIALS.search(name) is not None


def public_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that a server may record.

    Args:
        headers: headers by name in lower case.
    """
    return {name: value for name, value in headers.items() if _PUBLIC.fullmatch(name) and not is_credential(name)}


def path_without_credentials(path: str) -> str:
    """Return a path without the query parameters that are credentials."""
    path, mark, query = path.partition("?")
    if not mark:
        return path
    params = parse_qsl(query, keep_blank_values=True)
    public = [(name, value) for name, value in params if not is_credential(name)]
    if len(public) < len(params):
        query = urlencode(public)
    return f"{path}?{query}" if query else path
