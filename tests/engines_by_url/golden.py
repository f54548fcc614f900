"""The golden requests of every dialect, to be asked of servers by URL; what differs between two that say the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import httpx

from handler.protocols.registry import ROOTS, ROUTES
from tests.servers import LiveServer, http
from tests.unit.protocols.test_golden import CASES, schema_of
from tests.unit.protocols.test_golden import OPENAI_CASES as OPENAI_CASES

VARYING = (
    r'"(?:id|item_id|tool_call_id|call_id)":"[^"]*"',
    r'"(?:created|created_at|completed_at|seed)":\d+',
    r'"(?:seed)":\[[^]]*\]',
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}",
    r"lmi-[\d.]+-(?:echo|openai)",
    r"x-(?:compute|total|queue|inference|validation|time)[^\n]*",
    r'"(?:prefill_time|decode_time_arr|queue_wait_time)":[^]}]*',
)
SILENCE = re.compile(r'^(?:event: ping\ndata: {"type":"ping"}|:)\n\n', re.MULTILINE)
"""What a stream says after 15 s without a token: a machine that stands still for so long makes a server say it."""

OTHER_ABILITIES = re.compile(
    r"the engine (?:echo|openai) (?:lacks|is|has)|engine echo|engine openai|failed in the engine"
)
"""What the engines themselves have and lack is another test's; here both refuse."""

REFUSED = {"tgi/lacking": "typical_p"}
"""What echo takes, as it has no effect there."""

MIXED = {"openai chat/stream_n", "openai completion/stream_prompts", "chat/stream_n"}
"""Streams of several answers, which come in any order."""

PATHS = {schema.name: "/" for schema in ROOTS.values()}
for _path, _schema in ROUTES.items():
    PATHS.setdefault(_schema.name, _path.replace("{model}", "model"))
MODE_OF = {"tgi_compat": "tgi", "mindie": "tgi", "dynamic_batch": "dynamic"}


class Asked(NamedTuple):
    """A golden request; `mode` is that of its servers."""

    mode: str
    path: str
    body: Any


def _golden() -> dict[str, Asked]:
    found = {}
    for name, (_, body, _) in CASES.items():
        dialect = schema_of(name)
        found[name] = Asked(MODE_OF.get(dialect, "rolling"), PATHS.get(dialect, "/invocations"), body)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for name, (body, _) in OPENAI_CASES.items():
        if name.startswith("chat/"):
            found[f"openai {name}"] = Asked("rolling", "/v1/chat/completions", {**chat, **body})
        else:
            found[f"openai {name}"] = Asked("rolling", "/v1/completions", {"prompt": "hi", **body})
    return found


GOLDEN = _golden()
ALTERNATIVES = {"chat/top_logprobs", "chat/stream_top_logprobs"}
"""Echo has none but the chosen token."""

BY_ROLLING_BATCH = {
    name: asked for name, asked in GOLDEN.items() if asked.mode == "rolling" and name not in {*ALTERNATIVES, *REFUSED}
}
"""What a server that echoes elsewhere is asked too."""


def one_of_each(names: Iterable[str]) -> list[str]:
    """Of each dialect a request that is answered whole, one as a stream, and one of either that fails.

    For what carries bytes whose dialect it does not know, or of which others ask all.
    """
    found: dict[tuple[str, bool, bool], str] = {}
    for name in names:
        dialect, _, case = name.partition("/")
        found.setdefault((dialect, "stream" in case, re.search("fails|bad|wrong", case) is not None), name)
    return list(found.values())


def ask(server: LiveServer, asked: Asked) -> httpx.Response:
    data = asked.body if isinstance(asked.body, bytes) else json.dumps(asked.body).encode()
    return http.post(server.url + asked.path, content=data, headers={"content-type": "application/json"})


def steady(answer: httpx.Response) -> str:
    text = SILENCE.sub("", answer.text)
    for pattern in VARYING:
        text = re.sub(pattern, "~", text)
    return f"{answer.status_code} {answer.headers.get('content-type')}\n{text}"


def check(name: str, echo: LiveServer, by_url: LiveServer) -> None:
    """Whether a server that echoes elsewhere answers as echo does."""
    expected, found = (ask(server, GOLDEN[name]) for server in (echo, by_url))
    if OTHER_ABILITIES.search(expected.text):  # what echo lacks and the other has, or lacks too
        assert found.status_code in (200, expected.status_code)
    else:
        assert_equal(name, expected, found)


def assert_equal(name: str, expected: httpx.Response, found: httpx.Response) -> None:
    if name in MIXED:
        assert sorted(steady(found).splitlines()) == sorted(steady(expected).splitlines())
    else:
        assert steady(found) == steady(expected)
