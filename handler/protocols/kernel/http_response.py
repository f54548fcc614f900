"""A whole HTTP response, and the headers that say when to come again."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

Headers = Sequence[tuple[str, str]]


class HttpResponse(NamedTuple):
    """A whole HTTP response.

    Attributes:
        retry_after: seconds after which the client may come again; 0 where nobody knows.
        headers: the dialect's own.
    """

    status: int
    content_type: str
    body: bytes
    retry_after: float = 0.0
    headers: Headers = ()


_BUSY = frozenset({429, 503, 529})
_WAIT = (1.0, 4.0)  # seconds


def retry_headers(status: int, retry_after: float = 0.0) -> Headers:
    """Return the headers that say when to come again; none for statuses that time does not heal.

    A time that nobody knows is random, as clients add nothing to it: those that were refused together would come
    together again. OpenAI's and Anthropic's clients read the milliseconds, others whole seconds.

    Args:
        retry_after: seconds; 0 where nobody knows.
    """
    if status not in _BUSY:
        return ()
    seconds = retry_after or random.uniform(*_WAIT)
    return ("retry-after", str(math.ceil(seconds))), ("retry-after-ms", str(math.ceil(seconds * 1000)))
