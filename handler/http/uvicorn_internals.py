"""The attributes of uvicorn classes that `http/protocol.py` uses beyond the documented API of uvicorn."""

from __future__ import annotations

from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

VERSIONS = "0.45 to 0.54"
"""Versions of uvicorn that are known to have all attributes. Before 0.45, requests could not begin in turns."""

ATTRIBUTES: tuple[tuple[type, str], ...] = (
    (HttpToolsProtocol, "loop logger transport scheme"),  # of the connection
    (HttpToolsProtocol, "flow"),  # the flow control, which requests receive when they begin
    (HttpToolsProtocol, "parser"),  # httptools' parser, None after the connection is lost
    (HttpToolsProtocol, "scope url headers cycle"),  # of the newest request
    (HttpToolsProtocol, "pipeline"),  # pairs of a waiting request and its application, the newest first
    (HttpToolsProtocol, "timeout_keep_alive timeout_keep_alive_task"),  # of an idle connection: seconds and timer
    (HttpToolsProtocol, "timeout_keep_alive_handler _unset_keepalive_if_required"),  # close it, and stop the timer
    (HttpToolsProtocol, "_start_asgi_task"),  # creates the task in which the application responds (0.45)
    (RequestResponseCycle, "scope transport flow send"),  # of a request
    (RequestResponseCycle, "message_event"),  # set when the body continues or ends, or the client disconnects
    (RequestResponseCycle, "disconnected keep_alive waiting_for_100_continue"),  # state of the connection
    (RequestResponseCycle, "response_started response_complete chunked_encoding"),  # state of the response
    (RequestResponseCycle, "expected_content_length"),  # bytes that are still to be sent if there are no chunks
    (FlowControl, "_transport read_paused write_paused drain resume_reading"),
)
"""Classes and their attributes on which `Protocol` depends. Comments describe the meaning of the attributes."""


def missing() -> Iterator[str]:
    """Yield the attributes that a class of the installed uvicorn neither defines nor sets in a method."""
    for owner, names in ATTRIBUTES:
        codes = [method.__code__ for method in vars(owner).values() if hasattr(method, "__code__")]
        existing = {*dir(owner), *(name for code in codes for name in code.co_names)}
        yield from (f"{owner.__name__}.{name}" for name in names.split() if name not in existing)


if absent := ", ".join(missing()):
    raise ImportError(f"uvicorn {uvicorn.__version__} has no {absent}; install a version from {VERSIONS}")
