"""The code that the chat page shows runs as it is, and prints the answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import Open
from tests.browser.test_page import code, ready
from tests.clients import toolchains
from tests.clients.toolchains import Unavailable
from tests.deploy.local.servers import emulated
from tests.environment import skipped_on
from tests.servers import LiveServer

pytestmark = pytest.mark.browser

ANSWER = " user: it's \"a"


@pytest.fixture(scope="module")
def runtime(slow_server: LiveServer) -> Iterator[str]:
    with emulated(slow_server, name="my-endpoint") as url:
        yield url


def node() -> str:
    path = shutil.which("node")
    if path is None:
        raise Unavailable("no node on PATH (Debian: apt install nodejs)")
    return path


def run(client: str, text: str, directory: Path, **environment: str) -> str:
    """What the code prints; only PATH and `environment` are set."""
    file = directory / ("sample.mjs" if client == "javascript" else "sample")
    file.write_text(text)
    if client == "javascript":
        with skipped_on(Unavailable):
            program = node()
    elif client in ("openai", "huggingface"):
        program = str(toolchains.python({"openai": "openai", "huggingface": "huggingface-hub"}[client]))
    else:
        program = {"curl": "bash", "boto3": sys.executable}[client]
    given = {"PATH": os.environ["PATH"], "HOME": str(directory), **environment}
    done = subprocess.run([program, str(file)], capture_output=True, text=True, timeout=60, env=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def content(client: str, printed: str, *, stream: bool) -> str:
    """The text; curl prints the answer's own bytes."""
    if client != "curl":
        return printed.removesuffix("\n")
    if not stream:
        return str(json.loads(printed)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in printed.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("client", ["curl", "boto3", "openai", "huggingface", "javascript"])
def test_it_runs(
    slow_server: LiveServer, runtime: str, open_page: Open, client: str, stream: bool, tmp_path: Path
) -> None:
    """With fields that a client's method has no argument for, and with a stop string."""
    page = open_page(slow_server)
    ready(page)
    page.fill("#prompt", 'it\'s "a test" of $HOME and `code`')
    page.fill("#p-max_tokens", "3")
    page.fill("#p-stop", "test")
    page.fill("#p-more", '{"min_tokens": 1, "metadata": null}')
    if not stream:
        page.uncheck("#p-stream")
    aws = {
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": runtime,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }
    printed = run(client, code(page, client), tmp_path, **(aws if client == "boto3" else {}))
    assert content(client, printed, stream=stream) == ANSWER


@pytest.mark.parametrize(
    "client",
    ["curl", "openai", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("huggingface", "javascript"))],
)
def test_it_runs_with_a_key(locked_server: LiveServer, open_page: Open, client: str, tmp_path: Path) -> None:
    page = open_page(locked_server)
    page.fill("#key-input", "second")
    page.click("#key-dialog .main")
    ready(page)
    page.problems.clear()  # the browser's own note of the 401
    page.fill("#prompt", 'it\'s "a test"')
    page.fill("#p-max_tokens", "3")
    printed = run(client, code(page, client), tmp_path, LMI_API_KEY="second,first")
    assert content(client, printed, stream=True) == ANSWER
