"""A headless Chromium, and pages in it that may neither err nor speak to any other host."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.servers import LiveServer, serve

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def chromium() -> str | None:
    """The path of CHROMIUM, or of the system's."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium: CI installs one (.ci/run), and fails without it."""
    path = chromium()
    if path is None and os.environ.get("CI"):
        pytest.fail("no Chromium: apt-get install chromium, or name one in CHROMIUM")
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium, or name one in CHROMIUM")
    with needed("playwright.sync_api").sync_playwright() as playwright:
        # The sandbox needs rights that containers lack; what is opened is our own page on loopback.
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


def needed(module: str) -> Any:
    """A module of the extra `browser`: without it a test is skipped, in CI it fails."""
    return importlib.import_module(module) if os.environ.get("CI") else pytest.importorskip(module)


class Watched:
    """What a page wrote to its console, raised, and asked other hosts for."""

    def __init__(self, page: Any, base: str) -> None:
        self.problems: list[str] = []
        page.on("console", lambda message: self._note(f"console: {message.text}", message.type in ("error", "warning")))
        page.on("pageerror", lambda error: self._note(f"exception: {error}"))
        page.on("request", lambda request: self._note(f"request to {request.url}", not request.url.startswith(base)))

    def _note(self, text: str, wrong: bool = True) -> None:
        if wrong:
            self.problems.append(text)


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a page of a server; afterwards nothing may have gone wrong in it but what the test expects.

    The page gets `problems`, a list from which a test takes what it has provoked.
    """
    opened: list[tuple[Any, Watched]] = []

    def opens(server: LiveServer, path: str = "/", **context: Any) -> Any:
        settings = {"viewport": {"width": 1280, "height": 800}, "ignore_https_errors": True, **context}
        page = browser.new_context(**settings).new_page()
        page.set_default_timeout(20_000)
        watched = Watched(page, server.url + "/")
        opened.append((page, watched))
        page.problems = watched.problems
        page.goto(server.url + path)
        return page

    yield opens
    for page, watched in opened:
        page.context.close()
        assert watched.problems == []


@pytest.fixture(scope="module")
def slow_server() -> Iterator[LiveServer]:
    """Ten tokens a second, so that what happens between them can be seen; with echo's cues for failures."""
    options = ("option.echo_tokens_per_second=10", "option.echo_cues=true", "option.model_name=mine")
    with serve("--engine", "echo", *(part for option in options for part in ("-o", option))) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def events_server() -> Iterator[LiveServer]:
    """Streams chats as server-sent events, as LMI does since v26."""
    with serve("--engine", "echo", "-o", "option.lmi_version=0.37", "-o", "option.rolling_batch=vllm") as server:
        yield server


@pytest.fixture(scope="module")
def locked_server() -> Iterator[LiveServer]:
    with serve("--engine", "echo", env={"LMI_API_KEY": "first,second"}) as server:
        yield server
