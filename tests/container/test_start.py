"""What the entry point starts, and how it ends: prepared values, and the embedded server as a real process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from handler.container.start import prepare
from handler.core.devices import Driver
from handler.core.errors import ConfigError
from tests.container.processes import container, model_data
from tests.environment import clean_environment
from tests.servers import http

DRIVER = Driver("580.95.05", (13, 0), 1)


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
    with pytest.raises(ConfigError, match=r"HF_HOME=.*cannot be written to"):
        prepare([], environment(tmp_path, HF_HOME=str(data / "cache")), DRIVER)
    prepare([], environment(tmp_path), DRIVER)
    assert [entry.name for entry in data.iterdir()] == ["serving.properties"]


def test_a_model_py_needs_its_properties(tmp_path: Path) -> None:
    model_data(tmp_path, "").joinpath("serving.properties").rename(tmp_path / "ml" / "model" / "model.py")
    with pytest.raises(ConfigError, match=r"model\.py needs a serving\.properties beside it, which may be empty"):
        prepare([], environment(tmp_path, OPTION_MODEL_ID="a/b"), DRIVER)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"LMI_FRONT": "tomcat"}, "LMI_FRONT=tomcat: must be djl or embedded"),
        ({"LMI_FRONT": "djl"}, "there is no DJL Serving in this image; LMI_FRONT=embedded needs none"),
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
        f"environment variable HF_HOME={data / 'cache'}: SageMaker's model data cannot be written to",
        "environment variable OPTION_MAX_LORAS: option.max_loras=0: must be a whole number of at least 1",
        "serving.properties, line 2: option.dtype=int9: must be one of",
        "serving.properties, line 3: option.enable_streaming=true needs batch_size=1, but batch_size=2",
        *(["LMI_FRONT=djl: there is no DJL Serving in this image"] if front == "djl" else []),
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
        "leave one out\n"
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
    assert "SIGTERM: stopping; answers to finish: 1" in found.log


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
