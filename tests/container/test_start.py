"""The entry point: the processes it starts, its end, and its work as process 1."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from handler.container.start import prepare
from handler.core.devices import GpuDriver
from handler.core.errors import ConfigError
from tests.container.processes import container, model_data
from tests.environment import clean_environment
from tests.servers import free_port, http, wait_for

# -- what the entry point starts, and how it ends: prepared values, and the embedded server as a real process ----------


DRIVER = GpuDriver("580.95.05", (13, 0), 1)


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    places = {"SAGEMAKER_MODEL_PATH": str(tmp_path / "ml" / "model"), "LMI_SCRATCH": str(tmp_path / "scratch")}
    return {**places, "PATH": "/usr/bin", **more}


def test_embedded_server_takes_the_process_s_place(tmp_path: Path) -> None:
    environ = environment(tmp_path, HF_MODEL_ID="a/b", SM_NUM_GPUS="2", HF_HOME="/cache", CUDA_VISIBLE_DEVICES="0")
    start = prepare(["serve", "-o", "option.dtype=fp16"], environ, DRIVER)
    serve = [sys.executable, "-m", "handler", "serve", "--host", "0.0.0.0", "--port", "8080"]
    assert start.command == [*serve, "-o", "option.dtype=fp16", "a/b"]
    assert not start.supervised
    assert start.environ["TENSOR_PARALLEL_DEGREE"] == "2"
    assert start.environ["HF_HOME"] == "/cache"
    assert start.environ["LMI_CACHE"] == str(tmp_path / "scratch" / "lmi")


def test_echo_needs_no_model(tmp_path: Path) -> None:
    start = prepare(["--engine", "echo"], environment(tmp_path), DRIVER)
    assert start.command[-2:] == ["-o", "option.llm_engine=echo"]


@pytest.mark.parametrize("front", ["embedded", "djl"])
def test_a_check_is_lmi_serves(tmp_path: Path, front: str) -> None:
    environ = environment(tmp_path, OPTION_MODEL_ID="a/b", LMI_FRONT=front, HF_TOKEN_SECRET_ARN="not asked for")
    start = prepare(["serve", "--check"], environ, DRIVER)
    assert start.command[-2:] == ["--check", "a/b"]
    assert not start.supervised


def test_a_flag_names_the_model_before_the_environment(tmp_path: Path) -> None:
    start = prepare(["-o", "option.model_id=a/b"], environment(tmp_path, OPTION_MODEL_ID="c/d"), DRIVER)
    assert start.command[-1] == "a/b"


def test_model_data_are_never_written_to(tmp_path: Path) -> None:
    data = model_data(tmp_path, "option.llm_engine=echo\n")
    with pytest.raises(ConfigError, match=r"HF_HOME=.*is inside SageMaker's model data, which are read-only"):
        prepare([], environment(tmp_path, HF_HOME=str(data / "cache")), DRIVER)
    prepare([], environment(tmp_path), DRIVER)
    assert [entry.name for entry in data.iterdir()] == ["serving.properties"]


def test_a_model_py_needs_its_properties(tmp_path: Path) -> None:
    model_data(tmp_path, "").joinpath("serving.properties").rename(tmp_path / "ml" / "model" / "model.py")
    with pytest.raises(ConfigError, match=r"model\.py needs a serving\.properties next to it, which may be empty"):
        prepare([], environment(tmp_path, OPTION_MODEL_ID="a/b"), DRIVER)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"LMI_FRONT": "tomcat"}, "LMI_FRONT=tomcat: must be djl or embedded"),
        ({"LMI_FRONT": "djl"}, "DJL Serving is not installed in this image; set LMI_FRONT=embedded instead"),
        (
            {"LMI_FRONT": "djl", "SAGEMAKER_SECURE_MODE": "true"},
            "SAGEMAKER_SECURE_MODE=true: DJL Serving's secure mode refuses .* set LMI_FRONT=embedded",
        ),
        ({"CUDA_VERSION": "14.0.0"}, "the driver is too old for it"),
    ],
)
def test_what_cannot_start_is_refused_by_name(tmp_path: Path, more: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare([], environment(tmp_path, OPTION_MODEL_ID="a/b", **more), DRIVER)


@pytest.mark.parametrize("front", ["embedded", "djl"])
def test_all_that_cannot_start_is_refused_at_once(tmp_path: Path, front: str) -> None:
    data = model_data(tmp_path, "# of LMI\noption.dtype=int9\noption.enable_streaming=true\nbatch_size=2\n")
    names = {"CUDA_VERSION": "14.0.0", "SM_NUM_GPUS": "4", "TENSOR_PARALLEL_DEGREE": "2", "OPTION_MAX_LORAS": "0"}
    environ = environment(tmp_path, **names, LMI_FRONT=front, HF_HOME=str(data / "cache"))
    with pytest.raises(ConfigError) as caught:
        prepare(["--port", "0"], environ, DRIVER)
    texts = sorted(str(problem) for problem in caught.value.problems)
    wanted = [
        "--port=0: must be a number from 1 to 65535",
        "GPUs visible: 1; driver 580.95.05 with CUDA 13.0; CUDA 14.0 in the image: the driver is too old",
        "environment variables SM_NUM_GPUS and TENSOR_PARALLEL_DEGREE contradict each other (4 and 2)",
        f"environment variable HF_HOME={data / 'cache'}: is inside SageMaker's model data, which are read-only",
        "environment variable OPTION_MAX_LORAS: option.max_loras=0: must be a whole number of at least 1",
        "serving.properties, line 2: option.dtype=int9: must be one of",
        "serving.properties, line 3: option.enable_streaming=true needs batch_size=1, but batch_size=2",
        *(["LMI_FRONT=djl: DJL Serving is not installed in this image"] if front == "djl" else []),
    ]
    assert len(texts) == len(wanted), texts
    for text, start in zip(texts, sorted(wanted), strict=True):
        assert text.startswith(start)


def test_a_refusal_is_one_line_and_status_2(tmp_path: Path) -> None:
    names = {"OPTION_LLM_ENGINE": "echo", "HF_MODEL_ID": "a/b", "OPTION_MODEL_ID": "c/d"}
    with container(tmp_path, names) as found:
        assert found.wait_ended(20) == 2
    assert found.lines[-1].endswith(
        "cannot start: environment variables HF_MODEL_ID and OPTION_MODEL_ID contradict each other (a/b and c/d): "
        "remove one\n"
    )


def test_sigterm_lets_an_answer_finish(tmp_path: Path) -> None:
    model_data(tmp_path, "option.llm_engine=echo\noption.echo_tokens_per_second=20\n")
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 30, "details": True}, "stream": True}
    with container(tmp_path, {}) as found:
        found.wait_ready(30)
        with http.stream("POST", found.url + "/invocations", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            found.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            rest = list(lines)
        assert found.wait_ended(10) == 0
    assert len([first, *rest]) == 30
    assert json.loads(rest[-1])["details"]["finish_reason"] == "length"
    assert time.monotonic() - began < 25
    assert "SIGTERM: stopping; responses to finish: 1" in found.log


def test_sigterm_between_the_entry_point_and_the_server_is_not_lost(tmp_path: Path) -> None:
    """The kernel drops it where process 1 has no handler, and kills any other process."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nkill -TERM $$\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    code = f"import sys; sys.executable = {str(python)!r}; from handler.container.start import main; sys.exit(main())"
    environ = {**clean_environment(), **environment(tmp_path), "LMI_HOST": "127.0.0.1"}
    command = [sys.executable, "-c", code, "serve", "-o", "option.llm_engine=echo"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "listening on" not in done.stderr


# -- process one -------------------------------------------------------------------------------------------------------
# The entry point as process 1 of a PID namespace, as in a container: it waits for orphans and passes signals on.


# Its own /proc, so that it finds itself there; the mount goes with the namespace.
UNSHARE = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
ORPHAN = "import os, time\nif os.fork() == 0:\n    time.sleep(0.2)\n    os._exit(0)"


class ProcessOne:
    """`pid` is its number outside."""

    def __init__(self, port: int, environment: Mapping[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.unshare = subprocess.Popen(
            [*UNSHARE, sys.executable, "-m", "handler.container", "serve", "--engine", "echo"],
            env={**clean_environment(), "SAGEMAKER_BIND_TO_PORT": str(port), "LMI_HOST": "127.0.0.1", **environment},
            stderr=subprocess.DEVNULL,
        )
        wait_for(lambda: children(self.unshare.pid), 20, "there is no process 1")
        [self.pid] = children(self.unshare.pid)

    def ready(self) -> bool:
        assert self.unshare.poll() is None
        try:
            return http.get(self.url + "/ping", timeout=2).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def process_one(scratch: Path, **environment: str) -> Iterator[ProcessOne]:
    places = {"SAGEMAKER_MODEL_PATH": str(scratch / "ml" / "model"), "LMI_SCRATCH": str(scratch / "scratch")}
    found = ProcessOne(free_port(), {**places, **environment})
    try:
        yield found
    finally:
        found.unshare.kill()
        found.unshare.wait()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_orphans_are_waited_for(tmp_path: Path) -> None:
    with process_one(tmp_path) as one:
        wait_for(one.ready, 30, "it is not ready")
        before = set(children(one.pid))
        enter = ["nsenter", "--target", str(one.pid), "--user", "--pid", "--preserve-credentials"]
        subprocess.run([*enter, sys.executable, "-c", ORPHAN], check=True)
        wait_for(lambda: set(children(one.pid)) == before, 10, "an orphan that has died is still there")
        assert all(state(pid) != "Z" for pid in before)


def test_sigterm_lets_an_answer_of_process_one_finish(tmp_path: Path) -> None:
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 30, "details": True}, "stream": True}
    with process_one(tmp_path, OPTION_ECHO_TOKENS_PER_SECOND="20") as one:
        wait_for(one.ready, 30, "it is not ready")
        with http.stream("POST", one.url + "/invocations", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            os.kill(one.pid, signal.SIGTERM)
            assert len([first, *lines]) == 30
        assert one.unshare.wait(30) == 0


@pytest.mark.parametrize("later", [0, 0.2, 0.6])
def test_a_sigterm_that_comes_early_is_not_lost(tmp_path: Path, later: float) -> None:
    """From when process 1 has a handler: before, the kernel drops it."""
    with process_one(tmp_path) as one:
        wait_for(lambda: catches(one.pid, signal.SIGTERM), 20, "process 1 has no handler")
        time.sleep(later)
        os.kill(one.pid, signal.SIGTERM)
        assert one.unshare.wait(20) == 0


def catches(pid: int, number: signal.Signals) -> bool:
    found = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return bool(int(found[1], 16) >> number - 1 & 1)
