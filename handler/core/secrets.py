"""Secrets: forms of tokens, which are hidden wherever they stand; and headers and queries without credentials."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl, urlencode

TOKENS = (
    r"\b(?:hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_[A-Za-z0-9_]{30,}|xox[abprs]-[A-Za-z0-9-]{20,}|nvapi-[A-Za-z0-9_-]{20,}"
    r"|sagemaker-api-key-[A-Za-z0-9+/=_-]{20,}|glpat-[A-Za-z0-9_-]{20,}|AIza[A-Za-z0-9_-]{35}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+)"
)
"""Tokens and keys of the services that models come from or run on, as a regular expression without groups."""

# -- credentials of requests, which no recording has -------------------------------------------------------------------

_CREDENTIALS = re.compile(
    r"auth|cookie|token|secret|signature|credential|passw|api[-_]?key|subscription-key|(?:^|[-_.])(?:key|sig|jwt)$",
    re.IGNORECASE,
)
"""Names of headers, and of parameters of a query, whose values are credentials."""

_OF_THE_CONNECTION = frozenset(
    {
        "host", "connection", "content-length", "transfer-encoding", "keep-alive", "trailer", "upgrade", "expect",
        "accept-encoding", "origin", "referer", "via", "forwarded", "priority", "pragma", "cache-control", "dnt",
    }
)  # fmt: skip
_PREFIXES_OF_THE_CONNECTION = (":", "sec-", "proxy-", "x-forwarded-", "x-amz-", "cf-", "access-control-")

_KNOWN = re.compile(
    r"accept|accept-language|content-type|content-encoding|adapter"
    r"|x-amzn-sagemaker-[a-z-]+|anthropic-(?:version|beta)|openai-beta"
)
"""Headers that a server records: any other may be a credential under a custom name."""


def is_credential(name: str) -> bool:
    """Return whether a header or a parameter of a query is a credential, by its name."""
    return _CREDENTIALS.search(name) is not None


def without_credentials(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers to send again, names in lower case: no credentials, and no headers of the connection."""
    kept = {}
    for given, value in headers:
        name = given.strip().lower()
        if not (is_credential(name) or name in _OF_THE_CONNECTION or name.startswith(_PREFIXES_OF_THE_CONNECTION)):
            kept[name] = value
    return kept


def known_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that a server may record.

    Args:
        headers: names in lower case.
    """
    return {
        name: value for name, value in headers.items() if _KNOWN.fullmatch(name) is not None and not is_credential(name)
    }


def path_without_credentials(path: str) -> str:
    """Return a path without the parameters of its query that are credentials."""
    path, mark, query = path.partition("?")
    if not mark:
        return path
    given = parse_qsl(query, keep_blank_values=True)
    kept = [(name, value) for name, value in given if not is_credential(name)]
    if len(kept) < len(given):
        query = urlencode(kept)
    return f"{path}?{query}" if query else path
