"""`make djl` as its user sees it: a start, a request, an end; and a start that fails."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import extras
from tests.djl import home, jars
from tests.djl.servers import skipped_without_java
from tests.environment import clean_environment
from tests.servers import http, wait_for
from tests.user_files import PAYLOADS

pytestmark = [pytest.mark.djl, pytest.mark.model]


@pytest.fixture(autouse=True)
def java() -> None:
    with skipped_without_java():
        if not home.find():
            jars.front(jars.VERSIONS[-1])


def make_djl(log: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.djl", "--port=0", *arguments]
    packages = extras.only(("cpu", "deploy", "djl"), log.parent / "packages")
    with log.open("wb") as out:
        return subprocess.Popen(command, stderr=out, env={**clean_environment(), **packages, **(env or {})})


@pytest.mark.parametrize("end", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM])
def test_curl_lines_work_until_it_is_ended(tmp_path: Path, demo_model: Path, end: signal.Signals) -> None:
    log = tmp_path / "log"
    process = make_djl(log)
    try:
        wait_for(lambda: '"stream":true' in log.read_text() or process.poll() is not None, 90, "no curl lines")
        lines = re.findall(r"^(curl .*\\\n.*)$", log.read_text(), re.MULTILINE)
        assert [re.findall(r"\d(/\S+)", line)[0] for line in lines] == ["/invocations", "/predictions/model"]
        replies = [subprocess.run(shlex.split(line), capture_output=True, timeout=60).stdout for line in lines]
        assert replies[0].startswith(b'{"generated_text":')
        assert replies[1].count(b'{"token":') == 8
    finally:
        process.send_signal(end)
    assert process.wait(30) == 0, log.read_text()
    assert log.read_text().endswith("ending DJL ...\n")


def test_failing_start_says_why_in_its_last_line(tmp_path: Path, demo_model: Path) -> None:
    log = tmp_path / "log"
    assert make_djl(log, "-o", "option.dtype=nonsense").wait(60) == 1
    assert re.match(r"djl: .*option\.dtype=nonsense: must be one of", log.read_text().splitlines()[-1])


def test_unknown_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert make_djl(log, "/no/such/model").wait(30) == 1
    assert log.read_text().startswith("djl: there is no model at '/no/such/model'")


def test_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert make_djl(log, f"--port={taken.getsockname()[1]}").wait(30) == 1
    assert re.fullmatch(r"djl: .*Address already in use.*\n", log.read_text())


def test_a_directory_of_ones_own_is_taken_as_it_is(tmp_path: Path) -> None:
    """Its serving.properties, its model.py, and the environment's options."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "serving.properties").write_text(
        "option.llm_engine=echo\noption.rolling_batch=auto\noption.tgi_compat=true\n"
    )
    (model / "model.py").write_text("from handler.entry import handle\n" + PAYLOADS.partition("@output_formatter")[0])
    log = tmp_path / "log"
    process = make_djl(log, str(model), env={"OPTION_UNKNOWN_PARAMETERS": "refuse"})
    try:
        wait_for(lambda: '"stream":true' in log.read_text() or process.poll() is not None, 90, "no curl lines")
        url = re.findall(r"ready on (http://\S+):", log.read_text())[-1]
        answer = http.post(url + "/invocations", json={"inputPrompt": "a b", "parameters": {"details": False}})
        assert answer.json() == [{"generated_text": " a b a"}]
        refused = http.post(url + "/invocations", json={"inputPrompt": "a b", "nonsense": 1})
        assert "option.unknown_parameters=refuse" in refused.json()["error"]
    finally:
        process.send_signal(signal.SIGHUP)  # the terminal is closed
    assert process.wait(30) == 0, log.read_text()


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("option.max_rolling_batch_sise=3", "djl: -o option.max_rolling_batch_sise=3: unknown option"),
        ("option.max_rolling_batch_size=none", "djl: -o option.max_rolling_batch_size=none: must be a whole number"),
    ],
)
def test_a_wrong_option_is_said_before_java_starts(tmp_path: Path, option: str, told: str) -> None:
    log = tmp_path / "log"
    assert make_djl(log, "-o", option).wait(30) == 1
    assert log.read_text().startswith(told)
