"""What each route without a body costs the event loop by the largest inputs it takes, counted in calls of functions.

The counts depend on neither the machine nor its load. 10,000 calls take about a millisecond.
"""

from __future__ import annotations

import sys
from typing import Any

from handler.http.app import MountedApp
from tests.unit.http.mounted import call, in_app, own_environment

__all__ = ["own_environment"]

LINE = 8192 - len("GET  HTTP/1.1")  # bytes of a path and a query
HEAD = 60_000  # bytes of headers
QUERIES = {
    "many parameters": b"a&" * (LINE // 2),
    "many parameters with escapes": b"a=%41&" * (LINE // 6),
    "separated escapes": b"limit=" + b"a%ff" * (LINE // 4 - 2),
    "broken escapes": b"after=" + b"%" * (LINE - 6),
    "digits": b"limit=" + b"9" * (LINE - 6),
}
HEADERS = {
    "many headers": [(b"x-%d" % number, b"a" * 400) for number in range(128)],
    "a long Accept": [(b"accept", b"text/" * (HEAD // 5))],
    "a long If-None-Match": [(b"if-none-match", b'"a",' * (HEAD // 4))],
    "a long key": [(b"authorization", b"Bearer " + b"k" * HEAD)],
    "long custom attributes": [(b"x-amzn-sagemaker-custom-attributes", b" route" * (HEAD // 6))],
    "a long host": [(b"host", b"localhost:" + b"1" * HEAD)],
    "a long origin": [(b"origin", b"http://" + b"a" * HEAD)],
}
MOST, METRICS = 10_000, 25_000
"""Calls for any input, and for /metrics, which has a budget of its own (`Budgeted`)."""


async def calls_of(app: MountedApp, path: str, **scope: Any) -> int:
    """Count the calls of Python and C functions while the application answers."""
    number = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        answer = await call(app, path, **scope)
    finally:
        sys.setprofile(before)
    assert answer.status in (200, 400, 401, 403, 404, 503), (path, answer.status)
    return number


def test_no_input_of_a_route_without_a_body_is_costly() -> None:
    async def story(app: MountedApp) -> None:
        document = (await call(app, "/api-doc/openapi.json")).value
        paths = [path for path, item in document["paths"].items() if "get" in item]
        assert {
            "/metrics",
            "/adapters",
            "/v1/files",
            "/v1/responses/{response}",
            "/v1/conversations/{conversation}",
        } < {*paths}
        found = {}
        for template in paths:
            path = template.replace("{model}", "model")
            for name, query in QUERIES.items():
                found[template, name] = await calls_of(app, path, query_string=query)
            for name, headers in HEADERS.items():
                found[template, name] = await calls_of(app, path, headers=headers)
            long = template.partition("{")[0] + "a/" * (LINE // 2)
            found[template, "a long path"] = await calls_of(app, long)
        limits = {"/metrics": METRICS}
        assert not {place: number for place, number in found.items() if number > limits.get(place[0], MOST)}

    in_app(story, "option.enable_lora=true", "option.responses_store=memory")


def test_the_api_document_is_built_once() -> None:
    async def story(app: MountedApp) -> None:
        first = await call(app, "/api-doc/openapi.json")
        assert await calls_of(app, "/api-doc/openapi.json") < 500
        assert (await call(app, "/api-doc/openapi.json")).body == first.body

    in_app(story)
