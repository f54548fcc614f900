"""One response for each call of DJL's, because Java does not say which call a response belongs to.

Java keeps one future per connection. A second call replaces the future of the first call, and gets the response to the
first call. If the worker answered both calls, one response would be left over, and each later call would get the
response to the previous call, which belongs to other clients. Up to 0.29, Java calls a worker that replaces another one
before the worker has answered the load call. In every version, Java makes calls about adapters during the steps of a
rolling batch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from djl_python import Output

log = logging.getLogger("handler.djl")

HasNext: TypeAlias = Callable[[float], bool]
"""A function that waits up to a number of seconds, and returns whether Java has made another call by then."""

_LOST = (
    "DJL Serving has made another call before the response to its last call, and no longer expects that response. "
    "It will restart this worker after option.predict_timeout or option.model_loading_timeout"
)

_LAST_SECONDS = 10.0
"""Seconds before Java stops waiting for the response to the load call. Java then kills the worker, and starts another
one only if it is waiting for the response to a step.
"""


class Unsent(Output):  # type: ignore[misc]
    """A response that is not sent, because Java does not expect it."""

    def send(self, cl_socket: Any) -> None:
        pass


class ResponseOrder:
    """Decides which responses are sent.

    Args:
        has_next: looks for Java's next call.
        end_of_load: a function that returns when Java stops waiting for the response to the load call, by the monotonic
            clock. It is only called if another call has come before a response.
    """

    def __init__(self, has_next: HasNext, end_of_load: Callable[[], float] = lambda: math.inf) -> None:
        self._has_next = has_next
        self._end_of_load = end_of_load
        self._has_lost = False

    def of(self, answer: Output, seconds: float = 0.0) -> Output:
        """Return a response, or `Unsent` if Java has made another call, or makes one within `seconds`.

        If Java may be about to kill this worker, end it during this call instead, so that Java starts another one.
        """
        if self._has_next(seconds):
            log.error("%s", _LOST)
            self._has_lost = True
            return Unsent()
        if self._has_lost and time.monotonic() > self._end_of_load() - _LAST_SECONDS:
            log.error("ending this worker, which DJL Serving would kill within %g s", _LAST_SECONDS)
            raise SystemExit(1)
        return answer


IN_ORDER = ResponseOrder(lambda seconds: False)
"""The order on a connection on which each call follows the response to the last call."""
