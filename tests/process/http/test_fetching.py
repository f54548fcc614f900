"""The embedded server while a slow hub sends its model: a signal ends it at once, and whole files stay."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.doubles.hub import Hub, serve_hub
from tests.environment import clean_environment
from tests.process_tree import alive, descendants
from tests.servers import PATIENCE, wait_for

RATE = 100_000
SECONDS = 100
"""How long the whole download would take."""
NAME = "someone/slow"
SMALL = {"config.json": b"{}", "openvino_model.xml": b"<net/>", "openvino_tokenizer.bin": b"small"}
LARGE = {f"openvino_{part}.bin": bytes(RATE * SECONDS) for part in ("model", "detokenizer")}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve_hub({NAME: SMALL | LARGE}, rate=RATE) as hub:
        yield hub


@contextlib.contextmanager
def fetching(hub: Hub, home: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server that has the small files and waits for the large ones, and the process that downloads them."""

    def waits() -> bool:
        whole = {path.name for path in home.rglob("snapshots/*/*")}
        return process.poll() is not None or (whole == SMALL.keys() and len(unfinished(home)) == len(LARGE))

    process = subprocess.Popen(
        [sys.executable, "-m", "handler", "serve", NAME, "--port", "0"],
        env={**clean_environment(), **hub.environment(home)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(waits, 60, "nothing comes")
        [child] = descendants(process.pid)
        yield process, child
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def unfinished(home: Path) -> list[Path]:
    folders = os.walk(home)  # unlike rglob, it may see a folder vanish
    return [Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".incomplete")]


# A terminal's Ctrl-C goes to the whole group.
@pytest.mark.parametrize(("number", "send"), [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)])
def test_a_signal_ends_it_at_once_and_the_next_start_goes_on(
    hub: Hub, tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    with fetching(hub, tmp_path) as (process, child):
        began = time.monotonic()
        send(process.pid, number)
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - began < SECONDS / 4
        wait_for(lambda: not alive(child), 10, "the download goes on")
        assert process.stderr is not None
        log = process.stderr.read()
        assert "Traceback" not in log
        assert log.count(NAME) == 1, log
    assert unfinished(tmp_path) == []
    asked = len(hub.asked)
    with fetching(hub, tmp_path):
        assert {path.rpartition("/")[2] for path in hub.asked[asked:] if "/resolve/" in path} == LARGE.keys()


def test_a_download_ends_with_a_server_that_is_killed(hub: Hub, tmp_path: Path) -> None:
    with fetching(hub, tmp_path) as (process, child):
        process.kill()
        wait_for(lambda: not alive(child), 10, "the download goes on")
    assert unfinished(tmp_path) == []
