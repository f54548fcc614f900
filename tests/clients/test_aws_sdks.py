"""AWS's SDKs for JavaScript and for Java, through SageMaker's emulator, whose parts end anywhere."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import toolchains
from tests.clients.checks import PARIS, UNICODE
from tests.clients.driver import Driver, driving_node, java_client, of_mode, skipped_without
from tests.deploy.local.servers import OTHER

pytestmark = pytest.mark.clients

_EXAMPLE = Path(__file__).parents[2] / "examples" / "sagemaker" / "stream.mjs"
_ERRORS = "software.amazon.awssdk.services.sagemakerruntime.model."

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def javascript() -> Iterator[Driver]:
    with driving_node("drive_aws") as driver:
        yield driver


@pytest.fixture(scope="module", params=[of_mode(mode, mode, mode) for mode in ("sync", "async")])
def java(request: pytest.FixtureRequest) -> Driver:
    return java_client(request.param)


def body(prompt: str, **more: Any) -> str:
    """What Java's takes for a prompt."""
    return json.dumps({"inputs": prompt, **more})


LONG: dict[str, Any] = {"parameters": {"max_new_tokens": 24}}
WRONG: dict[str, Any] = {"parameters": {"max_new_tokens": -1}}
REFUSED = "parameters.max_new_tokens=-1: must be an integer from 1"


@pytest.mark.parametrize("prompt", [PARIS, f"Repeat: {UNICODE} {UNICODE}"], ids=["paris", "unicode"])
def test_javascript_streams_what_it_answers(javascript: Driver, sagemaker_url: str, prompt: str) -> None:
    answer = javascript.generate(sagemaker_url, prompt, **LONG)
    events = javascript.stream(sagemaker_url, prompt, **LONG)
    assert len(events) == 24
    assert events[-1]["generated_text"] == answer["generated_text"]
    assert "".join(event["token"]["text"] for event in events) == answer["generated_text"]


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_javascript_shows_a_refusal(javascript: Driver, sagemaker_url: str, how: str) -> None:
    outcome = javascript.call(how, sagemaker_url, PARIS, **WRONG)
    assert outcome.error == "ModelError"
    assert REFUSED in outcome.message
    outcome = javascript.call(how, sagemaker_url, PARIS, endpoint="other")
    assert (outcome.error, outcome.message) == ("ValidationError", OTHER)


def test_the_example_runs(sagemaker_url: str, tmp_path: Path) -> None:
    with skipped_without():
        (tmp_path / "node_modules").symlink_to(toolchains.node_modules())
    (tmp_path / "example.mjs").write_text(_EXAMPLE.read_text().replace("my-endpoint", "local"))
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_ENDPOINT_URL": sagemaker_url}
    done = subprocess.run(
        ["node", "example.mjs"],
        cwd=tmp_path,
        env={**keys, "PATH": "/usr/local/bin:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
    )
    assert done.returncode == 0
    assert done.stdout.decode().startswith(" Paris.")


@pytest.mark.parametrize("prompt", [PARIS, f"Repeat: {UNICODE} {UNICODE}"], ids=["paris", "unicode"])
def test_java_streams_what_it_answers(java: Driver, sagemaker_url: str, prompt: str) -> None:
    answer = json.loads(java.generate(sagemaker_url, body(prompt, **LONG)))
    assert answer["generated_text"]
    if java.asynchronous:  # only that client has streams
        events = java.stream(sagemaker_url, body(prompt, stream=True, **LONG))
        assert len(events) == 24
        assert events[-1]["generated_text"] == answer["generated_text"]
        assert "".join(event["token"]["text"] for event in events) == answer["generated_text"]


def test_java_shows_a_refusal(java: Driver, sagemaker_url: str) -> None:
    for how in ("generate", "stream") if java.asynchronous else ("generate",):
        outcome = java.call(how, sagemaker_url, body(PARIS, **WRONG))
        assert outcome.error == f"{_ERRORS}ModelErrorException"
        assert REFUSED in outcome.message
        outcome = java.call(how, sagemaker_url, body(PARIS), endpoint="other")
        assert outcome.error == f"{_ERRORS}ValidationErrorException"
        assert outcome.message.startswith(OTHER)
