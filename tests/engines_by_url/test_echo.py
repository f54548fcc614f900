"""The engine openai in front of `lmi serve --engine echo`: every golden request is answered as by that server itself.

Both have one tokenizer, so that only ids, times, seeds and the engines' names differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.app.server import AppServer, serve
from tests.app.test_http import CANCELLED
from tests.doubles import tiny
from tests.engines_by_url.golden import GOLDEN, OTHER_ABILITIES, REFUSED, ask, assert_equal
from tests.servers import http, options, wait_for

MODES = {
    "rolling": [],
    "tgi": options("option.tgi_compat=true", "option.root_schema=mindie"),
    "dynamic": options("option.rolling_batch=disable"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With both of its end tokens."""
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


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_request_is_answered_as_by_the_engine_itself(
    pairs: dict[str, tuple[AppServer, AppServer]], name: str
) -> None:
    asked = GOLDEN[name]
    direct, by_url = (ask(server, asked) for server in pairs[asked.mode])
    if name in REFUSED or OTHER_ABILITIES.search(direct.text):
        assert OTHER_ABILITIES.search(by_url.text) or (name in REFUSED and REFUSED[name] in by_url.text), by_url.text
    else:
        assert_equal(name, direct, by_url)


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
