"""The embedded server while its model comes from a hub or from S3, or is converted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.app.server import run_to_end
from tests.checkpoints.small_gguf import write_small
from tests.doubles.downloads import Bucket, Hub, serve_bucket, serve_hub
from tests.environment import clean_environment
from tests.process_tree import alive, descendants
from tests.servers import PATIENCE, free_port, http, wait_for

# -- the embedded server while a slow hub sends its model: a signal ends it at once, and whole files stay --------------


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


# -- the embedded server while S3 sends its model slowly: it is not ready, a signal ends it, whole files stay ----------


S3_SMALL = {"a/config.json": b"{}", "a/openvino_model.xml": b"<net/>", "a/openvino_tokenizer.bin": b"small"}
S3_LARGE = {"a/openvino_model.bin": bytes(RATE * 100)}


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with serve_bucket(S3_SMALL | S3_LARGE, rate=RATE) as bucket:
        yield bucket


def command(url: str, port: int = 0) -> list[str]:
    return [sys.executable, "-m", "handler", "serve", url, "--port", str(port)]


def environment(bucket: Bucket, home: Path) -> dict[str, str]:
    return {**clean_environment(), **bucket.environment(), "SERVING_DOWNLOAD_DIR": str(home)}


@contextlib.contextmanager
def s3_fetching(bucket: Bucket, home: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server that has the small files and waits for the large one, and the process that downloads them."""

    def waits() -> bool:
        try:
            whole = {f"a/{path.name}" for path in home.rglob("*.part/*") if int(path.stat().st_mtime) == 1772359200}
        except FileNotFoundError:  # a file has got its last name meanwhile
            return False
        large_asked = any(one.startswith("a/openvino_model.bin") for one in bucket.asked[before:])
        return process.poll() is not None or (whole == S3_SMALL.keys() and large_asked)

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
    with s3_fetching(bucket, tmp_path, port):
        ping = http.get(f"http://127.0.0.1:{port}/ping")
        assert (ping.status_code, ping.json()["state"]) == (503, "loading")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_and_the_next_start_keeps_whole_files(
    bucket: Bucket, tmp_path: Path, number: signal.Signals
) -> None:
    with s3_fetching(bucket, tmp_path) as (process, child):
        os.kill(process.pid, number)
        assert process.wait(PATIENCE) == (0 if number is signal.SIGTERM else -number)
        wait_for(lambda: not alive(child), 10, "the download goes on")
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert sorted(path.suffix for path in (tmp_path / "download").iterdir() if path.is_dir()) == [".part"]
    bucket.asked.clear()
    with s3_fetching(bucket, tmp_path):
        assert {one.partition(" ")[0] for one in bucket.asked} == {"?list", *S3_LARGE}


def test_what_cannot_start_is_one_line(bucket: Bucket, tmp_path: Path) -> None:
    ended = subprocess.run(
        command("s3://b/none/"), env=environment(bucket, tmp_path), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "lmi: s3://b/none/: there are no files below it"
    assert "Traceback" not in ended.stderr


def test_hf_model_id_is_the_directory_whose_options_count(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "handler", "serve", "--port", "0"]
    with serve_bucket({**S3_SMALL, "a/serving.properties": b"\noption.max_model_len=none"}) as bucket:
        environ = {**environment(bucket, tmp_path), "HF_MODEL_ID": "s3://b/a"}
        ended = subprocess.run(serve, env=environ, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "lmi: serving.properties, line 2: option.max_model_len=none: must be a whole" in ended.stderr
    assert sorted(bucket.asked) == ["?list", "?list", "a/config.json", "a/serving.properties"]


@pytest.mark.parametrize("engine", ["openvino", "echo"])
def test_a_check_says_what_a_start_downloads(tmp_path: Path, engine: str) -> None:
    ended = run_to_end("--engine", engine, "--check", env={"OPTION_MODEL_ID": "s3://b/a"})
    assert ended.returncode == 0
    assert ("option.model_id=s3://b/a: not checked; it is downloaded" in ended.stdout) is (engine == "openvino")


# -- the embedded server while its model is being converted: it listens, refuses with 503, and can be stopped ----------
# The conversion is a process of our own that waits, in the place of the converter.


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
