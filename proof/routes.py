"""What the response of each route is made from: the request alone, sampled tokens, or the state of the server.

`lmi replay` compares all values of a response that is a function of its request. `lmi conform` asks such routes twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import lru_cache


class Source(Enum):
    """What determines the response of a route to a request, for one server and one model."""

    REQUEST = "the request"
    SAMPLING = "sampled tokens"
    """Also of routes that sample only for some bodies, or only if the request asks for it."""
    STATE = "the server's state"


_SAMPLED = """
/ /invocations /predictions/{model} /predictions/{model}/{version} /models/{model}/invoke
/generate /generate_stream
/v1/chat/completions /chat/completions /v1/completions /v1/messages
/v1/responses /responses /v1/responses/compact
/v1/audio/transcriptions /audio/transcriptions /v1/audio/translations
/v2/models/{model}/generate /v2/models/{model}/generate_stream /v2/models/{model}/infer
/v2/models/{model}/versions/{version}/generate /v2/models/{model}/versions/{version}/generate_stream
/v2/models/{model}/versions/{version}/infer
"""
_COMPUTED = """
/tokenize /chat_tokenize /detokenize /apply-template
/v1/messages/count_tokens /v1/responses/input_tokens /responses/input_tokens
/v1/embeddings /embed /similarity /pooling /classify /predict /score /v1/score
/rerank /reranking /v1/rerank /v1/reranking /v2/rerank
/v1/systemone /v1/decisions

/embed_all /embed_sparse /decode /embeddings /embedding /api/embed /api/embeddings /v1/embed /v2/embed
/v1/tokenize /v1/detokenize /v1/classify /v1/pooling /v1/moderations
/v1/chat/completions/input_tokens /chat/completions/input_tokens
"""
"""After the empty line: routes of other servers."""
_CHANGES = """
/adapters /adapters/{adapter}/update /models/{model}/adapters /models/{model}/adapters/{adapter}/update
/v1/load_lora_adapter /v1/unload_lora_adapter /v2/repository/index
/v1/conversations /v1/conversations/{conversation} /v1/conversations/{conversation}/items
/v1/responses/{response}/cancel
/v1/files /v1/batches /v1/batches/{batch}/cancel /v1/messages/batches /v1/messages/batches/{batch}/cancel
/v2/systemsharedmemory/unregister /v2/systemsharedmemory/region/{region}/register
/v2/systemsharedmemory/region/{region}/unregister
/v2/cudasharedmemory/unregister /v2/cudasharedmemory/region/{region}/register
/v2/cudasharedmemory/region/{region}/unregister
"""
_DELETIONS = """
/adapters/{adapter} /models/{model}/adapters/{adapter} /v1/responses/{response}
/v1/conversations/{conversation} /v1/conversations/{conversation}/items/{item}
/v1/files/{file} /v1/messages/batches/{batch}
"""
_DESCRIPTIONS = """
/docs /api-doc/openapi.json /execution-parameters /v1/models /v1/models/{id} /info /version /tokenizer_info
/v2 /v2/models/{model} /v2/models/{model}/config
/v2/models/{model}/versions/{version} /v2/models/{model}/versions/{version}/config
"""
_STATES = """
/ /ping /health /v1/health /metrics /load /models /models/{model}
/adapters /adapters/{adapter} /models/{model}/adapters /models/{model}/adapters/{adapter}
/v1/conversations/{conversation} /v1/conversations/{conversation}/items
/v1/conversations/{conversation}/items/{item}
/v1/responses/{response} /v1/responses/{response}/input_items
/v1/files /v1/files/{file} /v1/files/{file}/content /v1/batches /v1/batches/{batch}
/v1/messages/batches /v1/messages/batches/{batch} /v1/messages/batches/{batch}/results
/v2/health/live /v2/health/ready /v2/models/stats /v2/systemsharedmemory/status /v2/cudasharedmemory/status
/v2/models/{model}/ready /v2/models/{model}/stats
/v2/models/{model}/versions/{version}/ready /v2/models/{model}/versions/{version}/stats
"""

ROUTES: Mapping[tuple[str, str], Source] = {
    (method, path): source
    for method, source, paths in (
        ("POST", Source.SAMPLING, _SAMPLED),
        ("POST", Source.REQUEST, _COMPUTED),
        ("POST", Source.STATE, _CHANGES),
        ("DELETE", Source.STATE, _DELETIONS),
        ("GET", Source.REQUEST, _DESCRIPTIONS),
        ("GET", Source.STATE, _STATES),
    )
    for path in paths.split()
}
"""Maps the method and the path of a route to what determines its response. Paths may contain `{name}`.

It contains all operations of our server's OpenAPI document, their other names, and routes of other servers that compute
without sampling.
"""

_PATTERNS = [
    (method, re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))), source)
    for (method, path), source in sorted(ROUTES.items(), key=lambda row: row[0][1].count("{"))
]
"""The routes, those without parameters first: /v2/models/stats is not a model."""


@lru_cache(maxsize=4096)
def source_of(method: str, path: str) -> Source | None:
    """Return what determines the response of a route, or None if the route is unknown.

    Args:
        path: the path without its query string. It may begin with a prefix that a proxy removes.
    """
    path = re.sub("/+", "/", path.rstrip("/")) or "/"
    routes = [(pattern, source) for name, pattern, source in _PATTERNS if name == method]
    return next((source for end in _ends(path) for pattern, source in routes if pattern.fullmatch(end)), None)


def _ends(path: str) -> Iterator[str]:
    """Yield the path, and then its ends, which begin at one of its slashes."""
    yield path
    starts = [match.start() for match in re.finditer("/(?=[^/])", path)]
    yield from (path[start:] for start in starts[1:8])
