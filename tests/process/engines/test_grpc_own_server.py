"""A server by gRPC that the engine starts itself: its command, its death, and its end with the engine's."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from handler import engines
from handler.config.config import Config
from handler.core.errors import ConfigError, GenerationFailed
from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.grpc.client import CONTRACTS
from handler.engines.grpc.engine import GrpcEngine, command
from handler.engines.process import own_server
from handler.engines.process.engine_process import Spec
from handler.engines.process.own_server import OwnServer
from handler.engines.process.supervisor import EngineSupervisor, State
from handler.engines.remote.servers import Failed, Lost, Silent
from tests import process_tree
from tests.doubles import tiny
from tests.doubles.grpc_servers import listening
from tests.one_test import in_one_test
from tests.servers import wait_for

ROOT = Path(__file__).parents[3]
PROMPT = [301, 302, 303]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands for an environment's Python: the three systems' modules are doubles there."""
    program = tmp_path_factory.mktemp("bin") / "python"
    boot = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.doubles.grpc_servers import main; main()"
    program.write_text(f"#!{sys.executable}\n{boot}\n")
    program.chmod(0o755)
    return program


def config(model: Path, python: Path, kind: str, **options: Any) -> EngineConfig:
    given = {
        "engine_python": str(python),
        "base_url_kind": kind,
        "base_url_connect_timeout": 5.0,
        "base_url_timeout": 30.0,
        "trust_remote_code": True,
        **options,
    }
    dtype = "auto" if kind == "trtllm" else "bf16"
    return EngineConfig(Config(max_model_len=48, dtype=dtype, engine_options=given), model=model)


@pytest.fixture
def engine(
    model: Path, python: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EngineSupervisor]:
    monkeypatch.chdir(model.parent)
    Path("socket.py").touch()  # a module of this server's working directory
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of this server: it has other packages
    monkeypatch.setenv("LMI_API_KEY", "key-of-clients")
    model, python = Path(model.name), Path(os.path.relpath(python))
    found = EngineSupervisor(Spec("grpc", config(model, python, request.param)), load_timeout=60)
    yield found
    found.close()


def answer(engine: EngineSupervisor, key: int) -> list[int]:
    engine.add(EngineRequest(key, PROMPT, Sampling(max_new_tokens=4, logprobs=False)))
    ids: list[int] = []
    while True:
        for step in engine.step(timeout=1):
            ids += step.ids
            for output in step.others:
                ids += output.ids
                assert output.error is None
                if output.finish is not None:
                    return ids


def load(engine: EngineSupervisor) -> None:
    while engine.state is not State.READY:
        engine.step(timeout=1)


def step_while_ready(engine: EngineSupervisor) -> None:
    while engine.state is State.READY:
        engine.step(timeout=1)


def server(pid: int) -> int:
    """Find the server's process in the engine's session."""
    return next(one for one, command in process_tree.in_session(pid).items() if "--port" in command)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"], indirect=True)
def test_a_server_is_started_and_ends_with_its_engine(engine: EngineSupervisor) -> None:
    load(engine)
    assert answer(engine, 1) == [301, 302, 303, 301]
    assert engine.info is not None
    assert engine.info.max_total_tokens == (42 if engine.info.version == "sglang" else 48), "SGLang keeps some back"
    pid = engine.pid
    assert pid is not None
    assert server(pid)
    engine.close()
    wait_for(lambda: not process_tree.in_session(pid), 30, "the server goes on")


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_a_server_that_dies_ends_its_requests_and_is_started_again(engine: EngineSupervisor) -> None:
    load(engine)
    pid = engine.pid
    assert pid is not None
    os.kill(server(pid), signal.SIGKILL)
    with pytest.raises(GenerationFailed, match=r"server of option\.engine_python was killed"):
        step_while_ready(engine)
    load(engine)
    assert answer(engine, 2) == [301, 302, 303, 301]
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not process_tree.in_session(pid), 30, "the server outlives its engine")


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_a_server_that_outlives_its_core_is_started_again(engine: EngineSupervisor) -> None:
    load(engine)
    pid = engine.pid
    assert pid is not None
    os.kill(server(pid), signal.SIGUSR1)
    with pytest.raises(GenerationFailed, match=r"option\.engine_python is not healthy: Engine is not alive"):
        answer(engine, 1)
    load(engine)
    assert answer(engine, 2) == [301, 302, 303, 301]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the processes with which this one would end."""
    names: list[str] = []

    def end_with_process(pid: int, name: str, grace: float) -> Callable[[], None]:
        names.append(name)
        return lambda: None

    monkeypatch.setattr(own_server, "end_with_process", end_with_process)
    monkeypatch.setattr(own_server, "end_with_this_process", lambda marker: None)
    return names


SHARES_PORT = """
import socket, sys, time
own = socket.socket()
own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
own.bind(("127.0.0.1", int(sys.argv[-1])))
own.listen()
time.sleep(60)
"""


def test_a_port_is_the_servers_alone(watched: list[str]) -> None:
    own = OwnServer("grpc", "a.module", [sys.executable, "-c", SHARES_PORT, "--key=secret"], os.environ)
    own.start()
    own.watch()
    try:
        wait_for(lambda: listens(own), 30, "it does not listen")
        port = int(own.url.rpartition(":")[2])
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
            with socket.socket(family) as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                stranger.bind((host, port))
                stranger.listen()
                with pytest.raises(Failed, match="another process listens on it too"):
                    own.check_port()
        with socket.create_connection(("127.0.0.1", port)):  # a connection is no listener
            own.check_port()
    finally:
        own.stop()
    assert watched == ["a.module"]


@pytest.mark.parametrize("boot", ["", "import socket, time; time.sleep(60)"], ids=["ended", "runs"])
def test_a_server_that_closes_its_port_is_no_stranger(
    watched: list[str], monkeypatch: pytest.MonkeyPatch, boot: str
) -> None:
    """Its socket was listed, but no longer among the files of its process."""
    own = OwnServer("grpc", "a.module", [sys.executable, "-c", boot], os.environ)
    listed = [{"socket:[1]"}] * (2 if boot else 10_000)
    monkeypatch.setattr(own_server, "_listeners", lambda port: listed.pop() if listed else set[str]())
    monkeypatch.setattr(own_server, "_CLOSING", 60.0)
    own.start()
    try:
        with pytest.raises(Silent if boot else Lost, match="accepts no connections" if boot else "ended with status 0"):
            own.check_port()
    finally:
        own.stop()


def listens(own: OwnServer) -> bool:
    try:
        own.check_port()
    except Failed as error:
        return not isinstance(error, Silent)
    return True


def test_a_stranger_at_the_port_gets_nothing(
    model: Path, tmp_path: Path, watched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = tmp_path / "python"
    sleeps.write_text(f"#!{sys.executable}\nimport time; time.sleep(60)\n")
    sleeps.chmod(0o755)
    start = OwnServer.start
    with listening() as stranger:
        stranger.stop()

        def start_second(own: OwnServer) -> None:
            stranger.port = int(own.url.rpartition(":")[2])
            stranger.start()
            start(own)

        monkeypatch.setattr(OwnServer, "start", start_second)
        with pytest.raises(ConfigError, match="another process listens on it too"):
            GrpcEngine(config(model, sleeps, "vllm", engine_flags=("--key=secret",)))
        assert stranger.num_asked == 0
    assert watched == ["vllm.entrypoints.grpc_server"]


def test_a_server_that_does_not_start_ends_the_start(model: Path, python: Path) -> None:
    spec = Spec("grpc", config(model, python, "vllm", engine_flags=("--no-such-flag",)))
    engine = EngineSupervisor(spec, load_timeout=60)
    try:
        reason = r"ended with status 2: python: error: unrecognized arguments: --no-such-flag$"
        with pytest.raises(GenerationFailed, match=rf"option\.engine_python {reason}"):
            load(engine)
    finally:
        engine.close()


@pytest.mark.vllm
@pytest.mark.nightly
def test_vllm_itself_is_started(hf_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMG_VLLM_SERVICER_WARMUP", "off")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    flags = ("--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28))
    spec = Spec("grpc", config(hf_demo, Path(sys.executable), "vllm", engine_flags=flags))
    engine = EngineSupervisor(spec, load_timeout=280)
    try:
        load(engine)
        pid = engine.pid
        assert pid is not None
        assert len(answer(engine, 1)) == 4
    finally:
        engine.close()
    wait_for(lambda: not process_tree.in_session(pid), 60, "vLLM goes on")


@in_one_test(
    ("options", "words"),
    [
        ({"base_url": ("grpc://x:1",)}, "option.engine_python starts a server, and option.base_url names another"),
        ({"base_url_kind": "auto"}, "needs option.base_url_kind, the kind of server to start: vllm, sglang, trtllm"),
        ({"engine_python": "/no/such/python"}, "option.engine_python=/no/such/python is not a program"),
        ({"engine_python": None, "engine_flags": ("--x",)}, "option.engine_flags needs option.engine_python"),
        ({"isolation": "thread"}, "option.engine_python cannot be combined with option.engine_isolation=thread"),
        ({"base_url_kind": "trtllm"}, "option.dtype=bf16: the trtllm server has no flag for it"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_grpc_own_server(
    model: Path, python: Path, options: dict[str, Any], words: str
) -> None:
    isolation = options.get("isolation", "auto")
    given = config(model, python, "vllm", **{name: value for name, value in options.items() if name != "isolation"})
    own = {name: value for name, value in given.options.engine_options.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        engines.check(
            "grpc", str(model), EngineConfig(Config(dtype="bf16", engine_options=own, engine_isolation=isolation))
        )


def test_options_are_flags_by_the_servers_own_names(model: Path, python: Path) -> None:
    found = {kind: command(CONTRACTS[kind], model, config(model, python, kind).options) for kind in CONTRACTS}
    assert {kind: words[words.index(str(model)) + 1 :] for kind, words in found.items()} == {
        "vllm": ["--dtype", "bfloat16", "--max-model-len", "48", "--trust-remote-code"],
        "sglang": ["--dtype", "bfloat16", "--context-length", "48", "--trust-remote-code"],
        "trtllm": ["--max_seq_len", "48", "--trust_remote_code"],
    }
