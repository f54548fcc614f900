"""All kinds of servers by URL, and how the kind of a server is found out."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from handler.engines.openai.client import HttpClient, HttpModel, ask_each
from handler.engines.openai.kind import ServerKind
from handler.engines.remote.servers import common_kind, kinds_of

KINDS: Mapping[str, ServerKind] = kinds_of("openai")
"""Maps each value of option.base_url_kind to its kind."""


@functools.lru_cache
def find_kind(urls: tuple[str, ...]) -> str:
    """Find out the kind of the servers from their models' `owned_by` values. This blocks for up to 5 s.

    Raises:
        ConfigError: the kind of no server can be determined, or the kinds differ.
    """
    models = dict(zip(urls, ask_each(urls, HttpClient.models), strict=True))
    kinds = {url: kind for url in models if (kind := _common_kind(models[url]))}
    return common_kind(kinds, [_reason(url, models[url]) for url in models if url not in kinds], KINDS)


def _common_kind(models: Sequence[HttpModel] | BaseException) -> str:
    """Return the only kind of server that may have all these models, or "" if no kind or several kinds may."""
    owners = set() if isinstance(models, BaseException) else {model.owner for model in models}
    kinds = {tuple(name for name, kind in KINDS.items() if owner.startswith(kind.owner)) for owner in owners}
    match list(kinds):
        case [(kind,)]:
            return kind
    return ""


def _reason(url: str, models: Sequence[HttpModel] | BaseException) -> str:
    """Return why a server's kind is unknown."""
    if isinstance(models, BaseException):
        ending = "" if url.endswith("/v1") or "ends with /v1" in str(models) else "; it must end with /v1"
        return f"{url}: {models}{ending}"
    owners = sorted({model.owner for model in models})
    return f"{url}: its models are owned by {', '.join(owners) or 'nobody'}"
