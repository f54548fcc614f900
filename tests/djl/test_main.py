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

from tests.djl import home, jars
from tests.djl.servers import skipped_without_java
from tests.servers import wait_for

pytestmark = [pytest.mark.djl, pytest.mark.model]


@pytest.fixture(autouse=True)
def java() -> None:
    with skipped_without_java():
        if not home.find():
            jars.front(jars.VERSIONS[-1])


def make_djl(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, "-m", "tests.djl", "--port=0", *arguments], stderr=out)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
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
