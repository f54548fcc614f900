"""A run that is killed at any call, and run again: the same end as without, and nothing left over after `down`.

In this process by an interruption after each call that changes something, and at some calls by SIGKILL of a process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.client import BaseClient

from tests.deploy.doubles.aws import Call, Cloud
from tests.deploy.doubles.deployments import COMPONENTS, PLAIN, down, permit, up, wanted_of
from tests.servers import PATIENCE

ROOT = Path(__file__).parents[3]


FEW = {**COMPONENTS, "components": COMPONENTS["components"][:1], "alarms": {"model_errors": 3}}
"""One component with its adapter: all kinds of resources, as few of each as can be."""


@pytest.fixture(autouse=True)
def _permitted(cloud: Cloud) -> None:
    permit(cloud, PLAIN, FEW)


class Killed(BaseException):
    """As KeyboardInterrupt: nothing of ours catches it."""


@contextmanager
def killed_at(number: int, *, after: bool) -> Iterator[None]:
    """Whoever makes the `number`-th call is killed before it, or when it is done."""
    calls = 0
    real = BaseClient._make_api_call

    def call(self: Any, operation: str, arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            raise Killed
        answer = real(self, operation, arguments)
        if calls == number:
            raise Killed
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseClient, "_make_api_call", call)
        yield


def changing(cloud: Cloud) -> list[int]:
    """The places of the calls that change something, from 1: what lies between two of them is the same to AWS."""
    return [number for number, call in enumerate(cloud.calls, start=1) if call.changes]


@pytest.mark.parametrize("content", [PLAIN, FEW], ids=["plain", "components"])
def test_up_killed_at_every_call_and_run_again(cloud: Cloud, content: dict[str, Any]) -> None:
    """And then `down`, killed and run again as well: at one call for each of up's, so at every one of its."""
    wanted = wanted_of(content)
    up(wanted)
    making = changing(cloud)
    whole = cloud.everything()
    assert len(making) == len(whole) == len(wanted)
    cloud.calls.clear()
    down()
    removing = changing(cloud)
    assert cloud.everything() == {}
    assert len(removing) == len(making)
    for number, back in zip(making, removing, strict=True):
        with killed_at(number, after=True), pytest.raises(Killed):
            up(wanted)
        up(wanted)
        assert cloud.everything() == whole, number
        with killed_at(back, after=True), pytest.raises(Killed):
            down()
        down()
        assert cloud.everything() == {}, back


def test_up_killed_at_every_call_and_taken_away(cloud: Cloud) -> None:
    """Whatever a killed run has made, `down` finds, without being told what was wanted."""
    wanted = wanted_of(FEW)
    up(wanted)
    for number in changing(cloud):
        cloud.reset()
        with killed_at(number, after=True), pytest.raises(Killed):
            up(wanted)
        assert cloud.everything() != {}
        down()
        assert cloud.everything() == {}, number


def test_an_update_killed_at_every_call_and_run_again(cloud: Cloud) -> None:
    def before() -> None:
        cloud.reset()
        up(wanted_of(PLAIN))
        cloud.calls.clear()

    wanted = wanted_of(PLAIN, options={"max_tokens": 2})
    before()
    up(wanted, keep=1)
    whole = cloud.everything()
    for number in changing(cloud):
        before()
        with killed_at(number, after=True), pytest.raises(Killed):
            up(wanted, keep=1)
        up(wanted, keep=1)
        assert cloud.everything() == whole, number


def test_killed_before_a_call_is_killed_after_the_one_before(cloud: Cloud) -> None:
    """Why the tests above kill after calls only."""
    wanted = wanted_of(PLAIN)
    up(wanted)
    number = changing(cloud)[2]
    states = []
    for at, after in ((number - 1, True), (number, False)):
        cloud.reset()
        with killed_at(at, after=after), pytest.raises(Killed):
            up(wanted)
        states.append(cloud.everything())
    assert states[0] != {}
    assert states[0] == states[1]


UP = """
import deploy.deployer.calls, sys
sys.path.insert(0, {root!r})
from tests.deploy.doubles.deployments import PLAIN, up, wanted_of
print("begun", flush=True)
up(wanted_of(PLAIN))
"""


@pytest.mark.parametrize(
    ("operation", "done"),
    [
        ("CreateEndpointConfig", False),
        *(pytest.param(name, True, marks=pytest.mark.nightly) for name in ("CreateEndpoint", "PutScalingPolicy")),
    ],
)
def test_a_process_that_is_killed_for_good_and_run_again(cloud: Cloud, operation: str, done: bool) -> None:
    wanted = wanted_of(PLAIN)
    up(wanted)
    whole = cloud.everything()
    cloud.reset()
    child: list[subprocess.Popen[bytes]] = []

    def kill(call: Call) -> None:
        if call.operation == operation:
            child[0].send_signal(signal.SIGKILL)
            child[0].wait()

    cloud.before, cloud.after = (None, kill) if done else (kill, None)
    command = [sys.executable, "-c", UP.format(root=str(ROOT))]
    process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.DEVNULL)
    child.append(process)
    assert process.wait(PATIENCE) == -signal.SIGKILL
    cloud.before = cloud.after = None
    up(wanted)
    assert cloud.everything() == whole
    down()
    assert cloud.everything() == {}
