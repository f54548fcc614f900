"""The embedded server while S3 sends its model slowly: it is not ready, a signal ends it, whole files stay."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.server import run_to_end
from tests.doubles.bucket import Bucket, serve_bucket
from tests.environment import clean_environment
from tests.ports import free_port
from tests.process_tree import alive, descendants
from tests.servers import PATIENCE, http, wait_for

RATE = 100_000
SMALL = {"a/config.json": b"{}", "a/openvino_model.xml": b"<net/>", "a/openvino_tokenizer.bin": b"small"}
LARGE = {"a/openvino_model.bin": bytes(RATE * 100)}


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with serve_bucket(SMALL | LARGE, rate=RATE) as bucket:
        yield bucket


def command(url: str, port: int = 0) -> list[str]:
    return [sys.executable, "-m", "handler", "serve", url, "--port", str(port)]


def environment(bucket: Bucket, home: Path) -> dict[str, str]:
    return {**clean_environment(), **bucket.environment(), "SERVING_DOWNLOAD_DIR": str(home)}


@contextlib.contextmanager
def fetching(bucket: Bucket, home: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server that has the small files and waits for the large one, and the process that downloads them."""

    def waits() -> bool:
        whole = {f"a/{path.name}" for path in home.rglob("*.part/*") if int(path.stat().st_mtime) == 1772359200}
        large_asked = any(one.startswith("a/openvino_model.bin") for one in bucket.asked[before:])
        return process.poll() is not None or (whole == SMALL.keys() and large_asked)

    before = len(bucket.asked)
    process = subprocess.Popen(
        command("s3://b/a/", port), env=environment(bucket, home), stderr=subprocess.PIPE, text=True
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


def test_it_is_not_ready_meanwhile(bucket: Bucket, tmp_path: Path) -> None:
    port = free_port()
    with fetching(bucket, tmp_path, port):
        ping = http.get(f"http://127.0.0.1:{port}/ping")
        assert (ping.status_code, ping.json()["state"]) == (503, "loading")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_and_the_next_start_keeps_whole_files(
    bucket: Bucket, tmp_path: Path, number: signal.Signals
) -> None:
    with fetching(bucket, tmp_path) as (process, child):
        os.kill(process.pid, number)
        assert process.wait(PATIENCE) == (0 if number is signal.SIGTERM else -number)
        wait_for(lambda: not alive(child), 10, "the download goes on")
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert sorted(path.suffix for path in (tmp_path / "download").iterdir() if path.is_dir()) == [".part"]
    bucket.asked.clear()
    with fetching(bucket, tmp_path):
        assert {one.partition(" ")[0] for one in bucket.asked} == {"?list", *LARGE}


def test_what_cannot_start_is_one_line(bucket: Bucket, tmp_path: Path) -> None:
    ended = subprocess.run(
        command("s3://b/none/"), env=environment(bucket, tmp_path), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "lmi: s3://b/none/: there are no files below it"
    assert "Traceback" not in ended.stderr


def test_hf_model_id_is_the_directory_whose_options_count(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "handler", "serve", "--port", "0"]
    with serve_bucket({**SMALL, "a/serving.properties": b"\noption.max_model_len=none"}) as bucket:
        environ = {**environment(bucket, tmp_path), "HF_MODEL_ID": "s3://b/a"}
        ended = subprocess.run(serve, env=environ, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "lmi: serving.properties, line 2: option.max_model_len=none: must be a whole" in ended.stderr
    assert sorted(bucket.asked) == ["?list", "?list", "a/config.json", "a/serving.properties"]


@pytest.mark.parametrize("engine", ["openvino", "echo"])
def test_a_check_says_what_a_start_downloads(tmp_path: Path, engine: str) -> None:
    ended = run_to_end("--engine", engine, "--check", env={"OPTION_MODEL_ID": "s3://b/a"})
    assert ended.returncode == 0
    assert ("option.model_id=s3://b/a: the start downloads it" in ended.stdout) is (engine == "openvino")
