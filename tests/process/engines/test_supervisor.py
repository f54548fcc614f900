"""An engine's process: its end with all that it started, and a worker that will not start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

from handler.config.config import Config
from handler.core.errors import GenerationFailed
from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor, LoopHooks, State
from tests.doubles import dying_engine
from tests.servers import LiveServer, ServerProcess, options, serve, wait_for
from tests.unit.engines.pooling_models import GOLDEN, TEXTS, write_model

# -- what an operator sees of a worker that will not start -------------------------------------------------------------


def test_a_first_load_that_fails_says_why_and_is_not_tried_again() -> None:
    engine = EngineSupervisor(Spec("openvino", EngineConfig(model=None)))
    with pytest.raises(GenerationFailed, match=r"^engine failure: it raised an error$"):
        engine.step(timeout=60)
    assert engine.reason == "AssertionError"
    assert engine.state is State.CLOSED
    assert engine.step() == []


def test_a_load_that_takes_too_long_is_given_up() -> None:
    engine = EngineSupervisor(Spec("echo", EngineConfig()), load_timeout=0.0)
    with pytest.raises(GenerationFailed, match="model_loading_timeout"):
        engine.step()
    assert engine.state is State.CLOSED


@pytest.mark.parametrize("ending", ["length", "cancelled", "refused"])
def test_an_engine_at_rest_is_not_hung(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """However its last request ended, nothing more is due."""
    engine = EngineSupervisor(Spec("echo", EngineConfig(Config(engine_options={"echo_cues": 1}))), timeout=30)
    while engine.state is State.LOADING:
        engine.step(timeout=1)
    engine.add(
        EngineRequest(
            1, [3 if ending == "refused" else 4], Sampling(max_new_tokens=2 if ending == "length" else 1 << 19)
        )
    )
    if ending == "cancelled":
        engine.step(timeout=1)
        engine.cancel(1)
    else:
        while not any(output.finish for step in engine.step(timeout=1) for output in step.others):
            pass
    clock = time.monotonic
    monkeypatch.setattr("handler.engines.base._STANDSTILL", 3600)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 60)
    for _ in range(3):
        engine.step(timeout=0.05)
    assert (engine.state, engine.restarts) == (State.READY, 0)
    engine.close()


def test_closing_ends_the_worker() -> None:
    engine = EngineSupervisor(Spec("echo", EngineConfig()))
    while engine.state is State.LOADING:
        engine.step(timeout=1)
    engine.close()
    assert engine.step() == []
    assert (engine.state, engine.pid) == (State.CLOSED, None), "it is not started again"
    engine.close()


@pytest.mark.parametrize("isolated", [True, False], ids=["process", "thread"])
def test_an_engine_that_is_to_be_renewed_is_when_nothing_is_in_flight(isolated: bool) -> None:
    engine = EngineSupervisor(Spec("echo", EngineConfig()), isolated=isolated)
    seen: list[State] = []
    engine.attach(LoopHooks(on_change=seen.append))
    while engine.state is State.LOADING:
        engine.step(timeout=1)
    first = engine.pid
    engine.add(EngineRequest(1, [4], Sampling(max_new_tokens=1 << 19)))
    engine.restart_when_idle()
    for _ in range(20):
        engine.step(timeout=1)
    assert engine.ready
    engine.cancel(1)
    deadline = time.monotonic() + 20
    while engine.restarts == 0 or not engine.ready:
        assert time.monotonic() < deadline
        engine.step(timeout=0.1)
    assert seen == [State.LOADING, State.READY, State.RESTARTING, State.READY]
    assert first is None or engine.pid != first
    engine.add(EngineRequest(2, [4], Sampling(max_new_tokens=3)))
    ids: list[int] = []
    while len(ids) < 3:
        for step in engine.step(timeout=1):
            ids += [*step.ids, *(id for output in step.others for id in output.ids)]
    for _ in range(5):
        engine.step(timeout=0.05)
    assert engine.restarts == 1
    engine.close()


# -- the reason of a death, which only the engine's output tells -------------------------------------------------------


def run_first_request(engine: EngineSupervisor) -> None:
    while engine.state is State.LOADING:
        engine.step(timeout=1)
    engine.add(EngineRequest(1, [4], Sampling(max_new_tokens=2)))
    while True:
        engine.step(timeout=1)


@pytest.mark.parametrize("output", ["output1", "output2", "output1 output2"])
@pytest.mark.parametrize("manner", ["step raises", "step exits", "load raises"])
def test_the_reason_of_a_death_is_told_though_many_lines_follow_it(
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    caplog: pytest.LogCaptureFixture,
    manner: str,
    output: str,
) -> None:
    monkeypatch.setattr("handler.engines.process.supervisor._MAIN", dying_engine.MAIN)
    monkeypatch.setenv(dying_engine.MANNER, f"{manner} {output}")
    engine = EngineSupervisor(Spec("echo", EngineConfig()))
    with pytest.raises(GenerationFailed) as failure:
        run_first_request(engine)
    engine.close()
    how = "it exited with code 1: " if manner == "step exits" else ""
    assert engine.reason == how + dying_engine.REASON
    assert f"engine lost: {engine.reason}" in caplog.text
    assert "CUDA out of memory. Tried to allocate 2.00 GiB" in failure.value.message
    assert "/srv" not in failure.value.message
    written = capfdbinary.readouterr()
    for descriptor, text in ((1, written.out), (2, written.err)):
        assert (dying_engine.words(descriptor) in text) == (f"output{descriptor}" in output), "it is passed on whole"


def test_an_engine_that_dies_without_a_word_is_told_by_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.engines.process.supervisor._MAIN", dying_engine.MAIN)
    for manner, reason in (
        ("step raises", f"EngineDeadError: {dying_engine.DEAD}"),
        ("step exits", "it exited with code 1"),
        ("load raises", f"RuntimeError: {dying_engine.NOT_STARTED}"),
    ):
        monkeypatch.setenv(dying_engine.MANNER, manner)
        engine = EngineSupervisor(Spec("echo", EngineConfig()))
        with pytest.raises(GenerationFailed):
            run_first_request(engine)
        engine.close()
        assert engine.reason == reason


# -- process group -----------------------------------------------------------------------------------------------------
# An engine's process ends with those that it has started; vLLM's and TensorRT-LLM's are tried in their own tests.


_PROGRAM = """
import multiprocessing, os, subprocess, sys, time
from handler.engines.process.supervisor import end_with_children, end_with_descendants

if sys.argv[1] == "children":
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), name="core")
    child.start()
    leave = end_with_children()
else:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "the core"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    leave = end_with_descendants("the core")
    other.kill()  # it is not watched
    other.wait()
    time.sleep(0.3)
if sys.argv[2] == "closing":
    leave()
child.kill()
child.wait() if isinstance(child, subprocess.Popen) else child.join()
time.sleep(1 if sys.argv[2] == "closing" else 20)
print("it went on")
"""


@pytest.mark.parametrize(("kind", "name"), [("children", "core"), ("descendants", "the core (pid ")])
def test_a_death_ends_this_process_unless_it_was_called_off(kind: str, name: str) -> None:
    for when, status, said in (("running", 1, ""), ("closing", 0, "it went on\n")):
        command = [sys.executable, "-c", _PROGRAM, kind, when]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (status, said), done.stderr
        assert (f"the engine's process {name}" in done.stderr) == (when == "running"), done.stderr


# -- a small BERT behind the real server: many requests at once, and the death of the engine ---------------------------


WANTED = json.loads(GOLDEN.read_text())["bert"]["mean"]
WORDS = [" ".join(f"w{id}" for id in ids[1:-1]) for ids in TEXTS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = write_model(tmp_path_factory.mktemp("bert"), "bert")
    with serve(str(model), *options("option.dtype=fp32", "option.predict_timeout=30")) as found:
        found.wait_ready()
        yield found


def embedded(server: LiveServer, texts: Any) -> Any:
    answer = server.post({"inputs": texts, "normalize": False}, "/embed")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_requests_at_once_share_steps_and_more_than_the_engine_takes_wait(server: LiveServer) -> None:
    with ThreadPoolExecutor(len(WORDS)) as threads:
        alone = [vector for (vector,) in threads.map(lambda text: embedded(server, text), WORDS)]
    numpy.testing.assert_allclose(numpy.array(alone), WANTED, atol=1e-4)
    numpy.testing.assert_allclose(numpy.array(embedded(server, [WORDS[2]] * 40)), [WANTED[2]] * 40, atol=1e-4)


def test_a_lost_engine_is_started_again(server: ServerProcess) -> None:
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_for(lambda: server.metric("lmi_engine_restarts_total") == 1 and server.ping() == 200, 60, "no new engine")
    numpy.testing.assert_allclose(numpy.array(embedded(server, WORDS[0])), [WANTED[0]], atol=1e-4)
