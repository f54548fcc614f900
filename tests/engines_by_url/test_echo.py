"""The engine openai in front of `lmi serve --engine echo`: every golden request is answered as by that server itself.

Both have one tokenizer, so that only ids, times, seeds and the engines' names differ.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.app.server import AppServer, serve
from tests.app.test_http import CANCELLED
from tests.doubles import tiny
from tests.servers import http, options, wait_for
from tests.unit.protocols.openai.test_golden import CASES as OPENAI_CASES
from tests.unit.protocols.test_golden import CASES

VARYING = (
    r'"(?:id|item_id|tool_call_id|call_id)":"[^"]*"',
    r'"(?:created|created_at|completed_at|seed)":\d+',
    r'"(?:seed)":\[[^]]*\]',
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}",
    r"lmi-[\d.]+-(?:echo|openai)",
    r"x-(?:compute|total|queue|inference|validation|time)[^\n]*",
    r'"(?:prefill_time|decode_time_arr|queue_wait_time)":[^]}]*',
)
OTHER_ABILITIES = re.compile(
    r"the engine (?:echo|openai) (?:lacks|is|has)|engine echo|engine openai|failed in the engine"
)
"""What the engines themselves have and lack is another test's; here both refuse."""

REFUSED = {"tgi/lacking": "typical_p"}
"""What echo takes, as it has no effect there."""

MIXED = {"openai chat/stream_n", "openai completion/stream_prompts", "chat/stream_n"}
"""Streams of several answers, which come in any order."""

PATHS = {
    "tgi": "/",
    "mindie": "/",
    "tgi_generate": "/generate",
    "tgi_generate_stream": "/generate_stream",
    "triton_generate": "/v2/models/model/generate",
    "triton_generate_stream": "/v2/models/model/generate_stream",
    "anthropic_messages": "/v1/messages",
    "anthropic_count": "/v1/messages/count_tokens",
    "openai_responses": "/v1/responses",
}
MODES = {
    "rolling": [],
    "tgi": options("option.tgi_compat=true", "option.root_schema=mindie"),
    "dynamic": options("option.rolling_batch=disable"),
}
MODE_OF = {"tgi_compat": "tgi", "mindie": "tgi", "dynamic_batch": "dynamic"}


class Asked(NamedTuple):
    """A golden request; `mode` is that of its servers."""

    mode: str
    path: str
    body: Any


def _golden() -> dict[str, Asked]:
    found = {}
    for name, (schema, body, _) in CASES.items():
        dialect = re.sub("_(streaming|sse|thinking|reasoning)$", "", schema)
        found[name] = Asked(MODE_OF.get(dialect, "rolling"), PATHS.get(dialect, "/invocations"), body)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for name, (body, _) in OPENAI_CASES.items():
        if name.startswith("chat/"):
            found[f"openai {name}"] = Asked("rolling", "/v1/chat/completions", {**chat, **body})
        else:
            found[f"openai {name}"] = Asked("rolling", "/v1/completions", {"prompt": "hi", **body})
    return found


GOLDEN = _golden()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def pairs(model: Path) -> Iterator[dict[str, tuple[AppServer, AppServer]]]:
    """By mode: the engine itself, and one that reaches it by URL."""
    echo = ("--engine", "echo", *options(f"option.echo_tokenizer={model}", f"option.max_model_len={tiny.CONTEXT}"))
    with contextlib.ExitStack() as stack:
        found = {}
        url = ""
        for mode, given in MODES.items():
            direct = stack.enter_context(serve(*echo, *given))
            url = url or f"option.base_url={direct.url}/v1"
            direct.wait_ready()
            place = "process" if mode == "rolling" else "thread"
            more = options(url, f"option.engine_isolation={place}")
            found[mode] = direct, stack.enter_context(serve(str(model), "--engine", "openai", *more, *given))
        for _, by_url in found.values():
            by_url.wait_ready()
        yield found


def ask(server: AppServer, asked: Asked) -> httpx.Response:
    data = asked.body if isinstance(asked.body, bytes) else json.dumps(asked.body).encode()
    return http.post(server.url + asked.path, content=data, headers={"content-type": "application/json"})


def steady(answer: httpx.Response) -> str:
    text = answer.text
    for pattern in VARYING:
        text = re.sub(pattern, "~", text)
    return f"{answer.status_code} {answer.headers.get('content-type')}\n{text}"


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_request_is_answered_as_by_the_engine_itself(
    pairs: dict[str, tuple[AppServer, AppServer]], name: str
) -> None:
    asked = GOLDEN[name]
    direct, by_url = (ask(server, asked) for server in pairs[asked.mode])
    if name in REFUSED or OTHER_ABILITIES.search(direct.text):
        assert OTHER_ABILITIES.search(by_url.text) or (name in REFUSED and REFUSED[name] in by_url.text), by_url.text
    elif name in MIXED:
        assert sorted(steady(by_url).splitlines()) == sorted(steady(direct).splitlines())
    else:
        assert steady(by_url) == steady(direct)


def test_who_leaves_frees_the_place_there(model: Path) -> None:
    echo = options(f"option.echo_tokenizer={model}", "option.echo_tokens_per_second=20", "option.max_model_len=20000")
    with (
        serve("--engine", "echo", *echo) as direct,
        serve(str(model), "--engine", "openai", *options(f"option.base_url={direct.url}/v1")) as by_url,
    ):
        by_url.wait_ready()
        body = {"prompt": "Once upon a time", "max_tokens": 10_000, "stream": True}

        def begin(_: int) -> None:
            with http.stream("POST", f"{by_url.url}/v1/completions", json=body) as answer:
                next(answer.iter_lines())

        with ThreadPoolExecutor(8) as clients:
            list(clients.map(begin, range(8)))
        wait_for(lambda: direct.metric(CANCELLED) == by_url.metric(CANCELLED) == 8, 10, "a request goes on")
