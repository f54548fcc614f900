"""`lmi move` of an endpoint by its name, against its live responses."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from deploy.adopt.live import reading_policy
from deploy.emulator.endpoint import Endpoint
from deploy.emulator.runtime import RuntimeEmulator
from handler.cli import main
from tests.deploy.aws.adopt.conftest import NAME, by_hand
from tests.deploy.doubles.aws import CALLER, Cloud
from tests.deploy.local.servers import Loop
from tests.deploy.public_endpoints import PUBLIC
from tests.servers import serve

BODY = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}


@pytest.mark.timeout(300)
def test_an_endpoint_is_compared_live_and_nothing_is_changed(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand(cloud, PUBLIC["DeepSeek-R1-Distill-8B, TGI"])
    cloud.policies[CALLER] = [reading_policy(NAME, "us-east-1")]
    monkeypatch.chdir(tmp_path)
    Path("requests.jsonl").write_text("".join(f"{json.dumps({**BODY, 'stream': on})}\n" for on in (False, True)))
    loop = Loop()
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        old = stack.enter_context(serve("--engine", "echo", "-o", "option.tgi_version=2.3.1"))
        old.wait_ready()
        runtime = stack.enter_context(loop.serving(RuntimeEmulator(Endpoint(old.url, NAME)).app()))
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", runtime)
        words = ["--against", "endpoint", "--engine", "echo", "--rule", "ping.ready"]
        assert main(["move", NAME, "requests.jsonl", *words]) == 0
    report = json.loads(Path("lmi-move/move.json").read_text())
    proven = [f"{item['name']}: {item['text']}" for item in report["proven"]]
    assert any(
        "2 of 2 responses have the status, framing and fields of those of sagemaker:chat" in text for text in proven
    )
    assert f"AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME={runtime}" in [item["name"] for item in report["not_proven"]]
    assert cloud.changes() == []


def test_an_endpoint_that_is_not_there_has_its_own_status(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.policies[CALLER] = [reading_policy(NAME, "us-east-1")]
    monkeypatch.chdir(tmp_path)
    assert main(["move", NAME]) == 4
