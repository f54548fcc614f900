"""The embedded server while its model is being converted: it listens, refuses with 503, and can be stopped.

The conversion is a process of our own that waits, in the place of the converter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.environment import clean_environment
from tests.model.openvino.test_gguf_weights import write_small
from tests.ports import free_port
from tests.servers import http, wait_for

SERVE = """
import sys
from handler.engines.openvino import gguf as gguf_weights
gguf_weights.SCRIPT = 'import os, sys, time; os.mkdir(sys.argv[2]); time.sleep({}); sys.exit("no # {{!r}}")'
from handler.cli import main
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def converting(tmp_path: Path, *, seconds: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server whose conversion takes `seconds` and then fails; and its address."""
    source, cache = tmp_path / "small.gguf", tmp_path / "cache"
    write_small(source, Kind.Q8_0)
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE.format(seconds), "serve", str(source), "--port", str(port)],
        env={**clean_environment(), "LMI_CACHE": str(cache)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: process.poll() is not None or list(cache.glob("converted/*.partial")), 60, "nothing converts")
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_it_answers_503_while_a_model_is_converted(tmp_path: Path) -> None:
    with converting(tmp_path, seconds=60) as (_, url):
        ping = http.get(f"{url}/ping")
        assert (ping.status_code, ping.json()) == (503, {"status": "Unhealthy", "state": "loading"})
        answer = http.post(f"{url}/invocations", json={"inputs": "x"})
        assert answer.status_code == 503
        assert answer.json()["message"].startswith("Model is not ready")
        assert answer.json()["error"] == answer.json()["message"], "TGI's clients read `error`"
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_with_the_conversion(tmp_path: Path, number: signal.Signals) -> None:
    with converting(tmp_path, seconds=600) as (process, _):
        children = Path(f"/proc/{process.pid}/task").glob("*/children")
        [converter] = [int(pid) for file in children for pid in file.read_text().split()]
        process.send_signal(number)
        assert process.wait(30) == 0  # the conversion would take ten minutes
        with pytest.raises(ProcessLookupError):
            os.kill(converter, 0)
        assert [path.name for path in (tmp_path / "cache" / "converted").iterdir()] == ["lock"]
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_conversion_that_fails_ends_it_with_the_reason(tmp_path: Path) -> None:
    with converting(tmp_path, seconds=0.2) as (process, _):
        assert process.wait(30) == 2
        assert process.stderr is not None
        text = process.stderr.read()
        assert "cannot convert" in text
        assert all(line.isprintable() for line in text.splitlines()), "a pipe gets no control characters"
        assert "Traceback" not in text
