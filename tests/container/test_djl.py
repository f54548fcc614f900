"""DJL Serving as the front: what is made for it, and a real Java engine behind the supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from handler.config import user_files
from handler.config.loader import read_config
from handler.container import djl
from handler.container.arguments import ContainerArguments, ModelSource
from handler.core.errors import ConfigError
from tests.container.processes import Container, container, model_data
from tests.djl import jars, launch
from tests.djl.processes import group_members, only
from tests.djl.servers import newer, skipped_without_java
from tests.servers import http, wait_for

NOTHING = ContainerArguments(8080, ())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "scratch" / "model"


def properties(target: Path) -> list[str]:
    return (target / "serving.properties").read_text().split()


def test_requirements_are_installed_before_java_starts(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[Path] = []
    monkeypatch.setattr(user_files, "install", lambda file, environ: installed.append(file))
    data = model_data(tmp_path, "")
    for name in ("config.json", "requirements.txt"):
        (data / name).touch()
    for options in ((), ("option.install_requirements=false",)):
        djl.make_model(ContainerArguments(8080, options), ModelSource(data, str(data), {}), {}, target, (0, 36, 0))
    assert installed == [data / "requirements.txt"]
    assert not (target / "requirements.txt").exists()


def test_model_directory_holds_links_and_the_file_s_own_lines(tmp_path: Path, target: Path) -> None:
    data = model_data(tmp_path, "option.dtype=fp16\noption.modelName=llama\n")
    for name in ("config.json", "model.safetensors", "requirements.txt"):
        (data / name).touch()
    arguments = ContainerArguments(8080, ("option.max_model_len=99",))
    assert djl.make_model(arguments, ModelSource(data, str(data), {}), {}, target, (0, 36, 0)) == "llama"
    assert properties(target) == [
        "engine=Python",
        "minWorkers=1",
        "maxWorkers=1",
        "option.entryPoint=handler.entry",
        f"option.model_id={data}",
        "option.async_mode=true",
        "option.rolling_batch=disable",
        "option.dtype=fp16",
        "option.modelName=llama",
        "option.max_model_len=99",
    ]
    links = {entry.name: entry.readlink() for entry in target.iterdir() if entry.is_symlink()}
    assert links == {name: data / name for name in ("config.json", "model.safetensors")}
    djl.make_model(arguments, ModelSource(data, str(data), {}), {}, target, (0, 36, 0))  # a second start


_LMIS = "djl_python.lmi_vllm.vllm_async_service"
_HANDLE = "def handle(inputs): ...\n"


@pytest.mark.parametrize(
    ("own", "environ", "code", "entry"),
    [
        (f"option.entryPoint={_LMIS}\n", {}, _HANDLE, "handler.entry"),
        ("", {"OPTION_ENTRYPOINT": _LMIS}, _HANDLE, "handler.entry"),
        ("option.entryPoint=djl_python.huggingface\n", {}, None, "handler.entry"),
        ("option.entryPoint=mine.py\n", {}, None, "mine.py"),
        ("option.entryPoint=mine.py\n", {}, "", "mine.py"),
        ("", {}, _HANDLE, None),
        ("option.entryPoint=model.py\n", {}, _HANDLE, "model.py"),
        ("", {}, "def formatter(): ...\n", "handler.entry"),
        ("", {}, "from djl_python.huggingface import handle\n", "handler.entry"),
    ],
)
def test_lmis_own_handlers_are_not_started(
    tmp_path: Path, target: Path, own: str, environ: dict[str, str], code: str | None, entry: str | None
) -> None:
    data = model_data(tmp_path, own)
    (data / "config.json").touch()
    if code is not None:
        (data / "model.py").write_text(code)
    djl.make_model(NOTHING, ModelSource(data, str(data), {}), environ, target, (0, 36, 0))
    named = [line.partition("=")[2] for line in properties(target) if line.startswith("option.entryPoint=")]
    assert (named[-1] if named else None) == entry  # the last counts, as in Java


@pytest.mark.parametrize("size", ["", "batch_size=8\n"])
def test_an_engine_of_djls_own_that_embeds_is_python_here(tmp_path: Path, target: Path, size: str) -> None:
    data = model_data(tmp_path, f"engine=Rust\n{size}option.task=text-embedding\n")
    (data / "config.json").write_text('{"architectures": ["BertModel"]}')
    djl.make_model(NOTHING, ModelSource(data, str(data), {}), {}, target, (0, 36, 0))
    lines = properties(target)
    found = dict(line.split("=", 1) for line in lines)
    assert (found["engine"], found["option.task"]) == ("Python", "pooling")
    assert found.get("option.rolling_batch") == ("disable" if size else "scheduler")
    assert "option.async_mode" not in found
    config = read_config(properties=target / "serving.properties", environ={}, java=True).checked()
    assert (config.task, config.batch_size, config.async_schema) == ("pooling", 8 if size else 1, False)


@pytest.mark.parametrize(
    ("own", "environ", "since"),
    [
        ("option.rolling_batch=trtllm\n", {}, (0, 36, 0)),
        ("", {"OPTION_ROLLING_BATCH": "auto"}, (0, 36, 0)),
        ("", {"OPTION_ASYNC_MODE": "false"}, (0, 36, 0)),
    ],
)
def test_mode_is_the_user_s_where_one_is_named(
    tmp_path: Path, target: Path, own: str, environ: dict[str, str], since: tuple[int, ...]
) -> None:
    data = model_data(tmp_path, own)
    djl.make_model(NOTHING, ModelSource(data, "a/b", {}), environ, target, since)
    assert "option.async_mode=true" not in properties(target)


@pytest.mark.parametrize(
    ("asked", "engine"),
    [("auto", []), ("trtllm", ["option.llm_engine=trtllm"]), ("lmi-dist", ["option.llm_engine=vllm"])],
)
@pytest.mark.parametrize("in_file", [True, False])
def test_java_gets_a_rolling_batch_that_it_leaves_alone(
    tmp_path: Path, target: Path, asked: str, engine: list[str], in_file: bool
) -> None:
    """Where there is a config.json it would make dynamic batching of `auto`, and MPI of `trtllm`."""
    data = model_data(tmp_path, f"option.rolling_batch={asked}\n" if in_file else "")
    environ = {} if in_file else {"OPTION_ROLLING_BATCH": asked}
    djl.make_model(NOTHING, ModelSource(data, "a/b", {}), environ, target, (0, 36, 0))
    assert properties(target)[-1 - len(engine) :] == ["option.rolling_batch=scheduler", *engine]


@pytest.mark.parametrize("asked", ["vllm", "disable"])
def test_other_modes_are_handed_to_java_as_they_are(tmp_path: Path, target: Path, asked: str) -> None:
    data = model_data(tmp_path, f"option.rolling_batch={asked}\n")
    djl.make_model(NOTHING, ModelSource(data, "a/b", {}), {}, target, (0, 36, 0))
    assert properties(target)[-1] == f"option.rolling_batch={asked}"


@pytest.mark.parametrize(
    ("own", "environ", "lines"),
    [
        ("batch_size=4\n", {}, ["option.rolling_batch=disable", "batch_size=4"]),
        ("max_dynamic_batch_size=4\n", {}, ["option.rolling_batch=disable", "batch_size=4"]),
        ("batch_size=4\noption.rolling_batch=auto\n", {}, ["option.rolling_batch=disable", "batch_size=4"]),
        (
            "batch_size=4\noption.rolling_batch=vllm\n",
            {},
            ["option.rolling_batch=disable", "batch_size=4", "option.llm_engine=vllm"],
        ),
        ("", {"SERVING_BATCH_SIZE": "4"}, ["option.rolling_batch=disable", "batch_size=4"]),
        ("batch_size=4\n", {"OPTION_ASYNC_MODE": "true"}, ["batch_size=1"]),
        ("batch_size=4\noption.async_mode=true\noption.rolling_batch=disable\n", {}, ["batch_size=1"]),
        ("option.async_mode=true\n", {"SERVING_BATCH_SIZE": "4"}, ["batch_size=1"]),
    ],
)
def test_java_collects_batches_for_dynamic_batching_alone(
    tmp_path: Path, target: Path, own: str, environ: dict[str, str], lines: list[str]
) -> None:
    """In any other mode, it would fail them."""
    data = model_data(tmp_path, own)
    djl.make_model(NOTHING, ModelSource(data, "a/b", {}), environ, target, (0, 36, 0))
    assert properties(target)[-len(lines) :] == lines


def test_before_async_mode_it_is_rolling_batch(tmp_path: Path, target: Path) -> None:
    djl.make_model(NOTHING, ModelSource(None, "a/b", {}), {}, target, (0, 28, 0))
    assert properties(target)[-1] == "option.rolling_batch=scheduler"
    assert "option.async_mode=true" not in properties(target)


def test_tgi_compat_is_of_rolling_batch(tmp_path: Path, target: Path) -> None:
    data = model_data(tmp_path, "option.tgi_compat=true\n")
    djl.make_model(NOTHING, ModelSource(data, "a/b", {}), {}, target, (0, 36, 0))
    assert "option.rolling_batch=scheduler" in properties(target)


def test_a_file_is_linked_into_a_directory(tmp_path: Path, target: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    djl.make_model(NOTHING, ModelSource(None, str(model), {}), {}, target, (0, 36, 0))
    config = read_config(properties=target / "serving.properties", environ={}, java=True).checked()
    assert config.model_id == str(target.parent / "weights")
    assert (target.parent / "weights" / "model.gguf").resolve() == model


@pytest.mark.parametrize("key", ["option.model_id", "option.speculative_draft_model"])
def test_models_of_s3_are_left_to_java_where_it_can_download_them(
    tmp_path: Path, target: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = model_data(tmp_path, f"option.llm_engine=vllm\n{key}=s3://bucket/llama/\n")
    source = ModelSource(data, None if key == "option.model_id" else "a/b", {})
    with pytest.raises(ConfigError, match=f"^{key}=s3://bucket/llama/: DJL .* has neither; .* as ModelDataSource"):
        djl.make_model(NOTHING, source, {"PATH": str(tmp_path)}, target, (0, 36, 0))
    (tmp_path / "aws").touch(0o755)
    djl.make_model(NOTHING, source, {"PATH": str(tmp_path)}, target, (0, 36, 0))
    assert f"{key}=s3://bucket/llama/" in properties(target)
    (tmp_path / "aws").rename(tmp_path / "s5cmd")
    monkeypatch.setattr(djl, "S5CMD", tmp_path / "s5cmd")
    djl.make_model(NOTHING, source, {"PATH": str(tmp_path)}, target, (0, 36, 0))


def test_wrong_options_are_refused_before_java(tmp_path: Path, target: Path) -> None:
    data = model_data(tmp_path, "option.max_rolling_batch_sise=4\n")
    with pytest.raises(ConfigError, match=r"did you mean 'option\.max_rolling_batch_size'"):
        djl.make_model(NOTHING, ModelSource(data, "a/b", {}), {}, target, (0, 36, 0))


def test_both_of_java_s_interfaces_are_on_sagemaker_s_port(tmp_path: Path) -> None:
    file = djl.make_configuration(tmp_path, ContainerArguments(8090))
    assert file.read_text() == "inference_address=http://0.0.0.0:8090\nmanagement_address=http://0.0.0.0:8090\n"
    home, model = tmp_path / "djl", tmp_path / "model"
    for gpu, engine in ((True, "Python"), (False, "Python:-1")):
        command = djl.command(home, file, "llama", model, gpu=gpu)
        assert command == [f"{home}/bin/serving", "-f", str(file), "-m", f"llama::{engine}=file:{model}"]


def test_java_is_not_given_a_second_model(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    environ = djl.environment(tmp_path, {"HF_MODEL_ID": "a/b", "OPTION_DTYPE": "fp16"}, tmp_path / "scratch")
    assert environ == {
        "DJL_CACHE_DIR": str(tmp_path / "scratch" / "djl"),
        "MODEL_SERVER_HOME": str(tmp_path),
        "PYTHON_EXECUTABLE": sys.executable,
        "SERVING_RETRY_THRESHOLD": "10",
        "OPTION_DTYPE": "fp16",
    }


def test_the_user_may_say_how_often_the_worker_may_die(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    asked = {"SERVING_RETRY_THRESHOLD": "2"}
    assert djl.environment(tmp_path, asked, tmp_path / "scratch")["SERVING_RETRY_THRESHOLD"] == "2"


def serving_home(directory: Path, version: str) -> Path:
    """A home as DJL Serving has it, with our front end over DJL's own Python engine for its program."""
    with skipped_without_java():
        java = shlex.join(launch.java(version, directory))
    for name in ("bin", "lib", "plugins"):
        (directory / name).mkdir(parents=True)
    (directory / "lib" / f"serving-{version}.jar").touch()
    program = directory / "bin" / "serving"
    program.write_text(
        f"""#!/bin/sh
# serving -f FILE -m NAME::Python=file:DIRECTORY
port=$(sed -n 's/^inference_address=.*://p' "$2")
exec {java} Front "$port" "${{4##*=file:}}"
"""
    )
    program.chmod(0o755)
    return directory


BODY = {"inputs": "a b c", "parameters": {"max_new_tokens": 60, "details": True}, "stream": True}


class Running(NamedTuple):
    container: Container
    version: str

    @property
    def worker(self) -> int:
        return only("djl_python_engine.py", group=_child(self.container.process.pid))

    @property
    def restarts(self) -> int:
        return self.container.log.count("restarting DJL Serving")

    @property
    def serves(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            ping = http.get(f"{self.container.url}/ping", timeout=5)
            answer = http.post(f"{self.container.url}/invocations", json={**BODY, "stream": False}, timeout=10)
            return (ping.status_code, answer.status_code) == (200, 200)
        return False


@pytest.fixture(scope="module", params=jars.VERSIONS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The container's own configuration, of a user who set nothing but the engine."""
    version, scratch = request.param, tmp_path_factory.mktemp("djl")
    home = serving_home(scratch / "djl", version)
    model_data(scratch, "option.llm_engine=echo\noption.echo_tokens_per_second=30\n")
    environ = {"LMI_FRONT": "djl", "DJL_SERVING_HOME": str(home), "DJL_CACHE_DIR": str(jars.engine(version))}
    with container(scratch, {**environ, "SERVING_CHUNKED_READ_TIMEOUT": "3"}) as found:
        found.wait_ready(60)
        yield Running(found, version)


@pytest.mark.djl
@pytest.mark.timeout(300)
def test_a_model_whose_worker_was_killed_is_served_again(running: Running) -> None:
    """Since 0.30 one death is enough for DJL Serving to give a model up, unless `retry_threshold` says otherwise.

    Where Java starts another worker late, on a busy machine, the supervisor starts all of it again, which serves too.
    """
    for _ in range(2):  # amid a request
        with http.stream("POST", running.container.url + "/invocations", json=BODY, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(running.worker, signal.SIGKILL)
            if newer(running.version, "0.33"):  # async mode, in which Java notices at once
                assert "Inference Engine Failure" in list(lines)[-1]
            else:  # Java lets a rolling batch's clients wait
                with pytest.raises(httpx.ReadError):
                    list(lines)
        wait_for(lambda: running.serves, 60, "the model is not served again")
    before = running.restarts
    os.kill(running.worker, signal.SIGKILL)  # at rest: only in async mode does Java notice
    if not newer(running.version, "0.33"):
        wait_for(lambda: running.restarts > before, 60, "DJL Serving is not started again")
    wait_for(lambda: running.serves, 60, "the model is not served again")


@pytest.mark.djl
def test_sigterm_lets_an_answer_finish_that_java_would_drop(running: Running) -> None:
    found = running.container
    with http.stream("POST", found.url + "/invocations", json=BODY, timeout=30) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        java = _child(found.process.pid)
        found.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert found.wait_ended(20) == 0
    assert len([first, *rest]) == 60
    assert json.loads(rest[-1])["details"]["finish_reason"] == "length"
    assert "SIGTERM: stopping; responses to finish: 1" in found.log
    wait_for(lambda: not group_members(java), 5, "something is left of DJL")


def _child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])
