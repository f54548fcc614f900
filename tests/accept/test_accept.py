"""`make accept-aws` and `make accept-vllm` themselves: what they do, in which order, and what they lack."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.errors import DeployError
from deploy.spec.reading import read_spec
from tests.accept import aws, vllm_environment
from tests.accept.aws import FAIL, PASS, Ran, accept
from tests.deploy.doubles.aws import ACCOUNT

# -- aws ---------------------------------------------------------------------------------------------------------------
# `make accept-aws` itself: what it does in which order, that it ends in `down`, and all of it on doubles of AWS.


CONTENT: dict[str, Any] = {
    "name": "accepted",
    "region": "us-east-1",
    "role": f"arn:aws:iam::{ACCOUNT}:role/lmi",
    "image": {"uri": f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/lmi:1-cu130"},
    "model": {"id": "org/model", "shape": {"parameters": 1e9, "layers": 16, "kv_heads": 8, "head_dim": 64}},
    "instance": {"type": "ml.g6e.xlarge"},
}
ALL = ["doctor", "plan", "up", "up again changes nothing", "status: it serves", "invoke", "invoke: a chat", "stream",
       "logs", "scale up", "scale back", "update", "invoke", "stream", "down", "gone"]  # fmt: skip


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(CONTENT))
    return path


class Commands:
    """In place of the commands: all succeed but `failing`; `breaking` ends the run."""

    def __init__(self, failing: str = "", breaking: str = "") -> None:
        self.ran: list[str] = []
        self._failing, self._breaking = failing, breaking

    def __call__(self, command: Sequence[str]) -> Ran:
        self.ran.append(command[0])
        if command[0] == self._breaking:
            raise KeyboardInterrupt
        if command[0] == "status":
            there = "up" in self.ran and "down" not in self.ran
            return Ran(0 if there else 4, "", 1)
        if command[0] == self._failing:
            return Ran(5, "", 1)
        again = self.ran.count("up") > 1
        return Ran(0, "accepted: nothing to do" if again else "accepted", 1)


def test_every_point_and_then_down(spec: Path) -> None:
    results = accept(read_spec(spec), [str(spec)], Commands())
    assert [result.point for result in results] == ALL
    assert {result.verdict for result in results} == {PASS}


def test_a_failed_up_goes_straight_down(spec: Path) -> None:
    commands = Commands(failing="up")
    results = accept(read_spec(spec), [str(spec)], commands)
    assert [(result.point, result.verdict) for result in results] == [
        ("doctor", PASS), ("plan", PASS), ("up", FAIL), ("down", PASS), ("gone", PASS),
    ]  # fmt: skip
    assert results[2].why == "exit status 5, not 0"


def test_another_failure_goes_on(spec: Path) -> None:
    results = accept(read_spec(spec), [str(spec)], Commands(failing="stream"))
    assert [result.point for result in results] == ALL
    assert [result.point for result in results if result.verdict == FAIL] == ["stream", "stream"]


def test_an_interruption_ends_in_down(spec: Path) -> None:
    commands = Commands(breaking="invoke")
    with pytest.raises(KeyboardInterrupt):
        accept(read_spec(spec), [str(spec)], commands)
    assert commands.ran[-2:] == ["down", "status"]


def test_an_endpoint_that_is_there_is_left_alone(spec: Path) -> None:
    def there(command: Sequence[str]) -> Ran:
        assert command[0] == "status"
        return Ran(0, "", 1)

    with pytest.raises(DeployError, match="there is an endpoint accepted"):
        accept(read_spec(spec), [str(spec)], there)


def test_nothing_is_done_unless_it_is_allowed(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = Commands()
    assert aws.main([str(spec)], {}, commands) == 2
    assert aws.main([str(spec)], {"LMI_ACCEPT_AWS": "1"}, commands) == 2
    assert commands.ran == []
    assert "LMI_ACCEPT_AWS=yes allows it" in capsys.readouterr().err
    assert aws.main([str(spec)], {"LMI_ACCEPT_AWS": "yes"}, commands) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"] == PASS


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"scaling": {"max": 3, "concurrency": 4}}, ["scale: bounds", "scale: bounds back"]),
        ({"components": [{"name": "a"}]}, ["scale"]),
        ({"components": [{"name": "a"}], "instance": {"type": "ml.g6e.xlarge", "managed": {"max": 2}}},
         ["scale up", "scale back"]),
    ],
)  # fmt: skip
def test_what_scales_by_itself_is_scaled_by_its_bounds(spec: Path, more: dict[str, object], wanted: list[str]) -> None:
    spec.write_text(yaml.safe_dump({**CONTENT, **more}))
    found = aws.points(read_spec(spec), [str(spec)])
    names = [point.point if isinstance(point, aws.Result) else point.name for point in found]
    assert [name for name in names if name.startswith("scale")] == wanted


# -- where acceptance's vLLM comes from, and what is said where it cannot be had ---------------------------------------


def refused(directory: Path) -> str:
    with pytest.raises(SystemExit) as found:
        vllm_environment.main(directory)
    return str(found.value)


def test_another_python_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    assert "needs Python 3.11 to 3.13, this is 3.10: make accept-vllm PYTHON=" in refused(tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_python_of_ones_own_is_told_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    monkeypatch.setattr(vllm_environment, "IMPORTED", ("pytest", "no_such_module"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "vllm.py").touch()
    said = refused(tmp_path)
    assert f"lacks no_such_module; in this directory: {sys.executable} -m pip install -e . pytest" in said


def test_a_python_with_all_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    monkeypatch.setattr(vllm_environment, "IMPORTED", ("pytest",))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "vllm.py").touch()
    vllm_environment.main(tmp_path)
    assert capsys.readouterr().out == f"{sys.executable}\n"


def test_an_interpreter_that_is_none_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "python"))
    assert "cannot be run: No such file" in refused(tmp_path)
