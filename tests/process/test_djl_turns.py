"""Each of DJL's calls gets its own answer, also where Java makes one before it has the answer to the one before.

Java is a double (one future a connection), and so is djl_python; the worker is a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.doubles.djl_java import Answer, PyProcess

Start = Callable[[], PyProcess]

OPTIONS = {"entryPoint": "handler.entry", "llm_engine": "echo", "rolling_batch": "auto", "lmi_version": "0.28"}
WAITS = """
import pathlib, time
directory = pathlib.Path(__file__).parent
while not (directory / "go").exists():
    time.sleep(0.005)
assert not (directory / "broken").exists(), "a broken model"
"""
SECONDS = 60  # for what must come


class Model:
    """A model directory, whose model.py waits as long as `hold` says."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        (directory / "model.py").write_text(WAITS)
        self.go()

    def go(self) -> None:
        (self.directory / "go").touch()

    def hold(self) -> None:
        (self.directory / "go").unlink()

    def break_down(self) -> None:
        (self.directory / "broken").touch()


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model")


@pytest.fixture
def start(model: Model) -> Iterator[Start]:
    started: list[PyProcess] = []

    def one() -> PyProcess:
        started.append(PyProcess("0.28.0", model.directory))
        return started[-1]

    yield one
    for java in started:
        java.kill()


@pytest.fixture
def restarted(start: Start, model: Model) -> PyProcess:
    """The worker that Java starts in place of one that was killed; its model does not load before `go`."""
    return restart(start, model, {})


def restart(start: Start, model: Model, options: dict[str, str]) -> PyProcess:
    java = start()
    assert java.load({**OPTIONS, **options}).result(SECONDS)[:2] == (200, "OK")
    java.kill()
    model.hold()
    return start()


def words(answer: Answer, *, number: int = 1) -> str:
    assert (answer.code, len(answer.contents)) == (200, number)
    return b"".join(answer.contents).decode(errors="replace")


def test_a_worker_that_replaces_another_answers_the_load_call_before_it_loads(
    restarted: PyProcess, model: Model
) -> None:
    assert restarted.load(OPTIONS).result(SECONDS) == (200, "OK", {}, [])
    alice = restarted.step("alice alpha", reset=True)
    model.go()
    assert " alice" in words(alice.result(SECONDS))
    bob = restarted.step("bob bravo", reset=True)
    assert " bob" in words(bob.result(SECONDS))


def test_a_step_that_comes_before_the_answer_to_the_load_call_gives_its_words_to_nobody(
    restarted: PyProcess, model: Model
) -> None:
    """Java takes the load call's answer for that to alice's step, and fails her; bob's step comes then."""
    with restarted.together():
        load = restarted.load(OPTIONS)
        alice = restarted.step("alice alpha", reset=True)
    assert alice.result(SECONDS).contents == []
    bob = restarted.step("bob bravo", reset=True)
    model.go()
    text = words(bob.result(SECONDS))
    assert (" bob" in text, "alice" in text) == (True, False)
    carl = restarted.step("carl carlo", reset=True)
    assert " carl" in words(carl.result(SECONDS))
    assert (load.done(), restarted.num_messages) == (False, 3)


def test_a_call_that_comes_before_the_load_call_is_not_answered(restarted: PyProcess, model: Model) -> None:
    with restarted.together():
        early = restarted.send({"handler": "register_adapter", "name": "a", "src": "a"})
        lost = restarted.step("alice alpha", reset=True)
    assert restarted.load(OPTIONS).result(SECONDS) == (200, "OK", {}, [])
    bob = restarted.step("bob bravo", reset=True)
    model.go()
    assert " bob" in words(bob.result(SECONDS))
    assert (early.done(), lost.done(), restarted.num_messages) == (False, False, 2)


def test_dynamic_batches_have_their_own_answers_too(start: Start, model: Model) -> None:
    options = {"rolling_batch": "disable"}
    java = restart(start, model, options)
    with java.together():
        java.load({**OPTIONS, **options})
        alice = java.send({"content-type": "application/json"}, {"data": b'{"inputs": "alice"}'})
    assert alice.result(SECONDS).contents == []
    bob = java.send({"content-type": "application/json"}, {"data": b'{"inputs": "bob"}'})
    model.go()
    text = words(bob.result(SECONDS))
    assert (" bob" in text, "alice" in text) == (True, False)


def test_the_first_worker_tells_that_it_cannot_load(start: Start, model: Model) -> None:
    model.break_down()
    answer = start().load(OPTIONS).result(SECONDS)
    assert (answer.code, "a broken model" in answer.message) == (500, True)


def test_a_worker_that_cannot_load_again_ends_with_the_first_call(restarted: PyProcess, model: Model) -> None:
    """Java starts another one if a process ends during a call, and only then."""
    assert restarted.load(OPTIONS).result(SECONDS).code == 200
    model.break_down()
    model.go()
    with pytest.raises(ConnectionError):
        restarted.step("alice alpha", reset=True).result(SECONDS)
    assert restarted.process.wait(SECONDS) == 1


def test_steps_are_refused_before_java_would_kill_the_worker_that_loads(start: Start, model: Model) -> None:
    options = {"predict_timeout": "1.2"}
    java = restart(start, model, options)
    java.load({**OPTIONS, **options}).result(SECONDS)
    refused = words(java.step("alice", "anna", reset=True).result(SECONDS), number=2)
    assert refused.count("the model is being loaded again; not ready after 0.2 s (option.predict_timeout)") >= 2
    assert "503" in refused
    model.go()
    while "503" in (text := words(java.step("bob bravo").result(SECONDS))):
        pass
    assert " bob" in text


def test_a_worker_that_java_will_kill_ends_during_a_step(start: Start, model: Model) -> None:
    """Java has lost the answer to the load call; if it kills the worker between two steps, it starts no other."""
    options = {"model_loading_timeout": "5"}
    java = restart(start, model, options)
    with java.together():
        java.load({**OPTIONS, **options})
        alice = java.step("alice alpha", reset=True)
    assert alice.result(SECONDS).contents == []
    bob = java.step("bob bravo", reset=True)
    model.go()
    with pytest.raises(ConnectionError):
        bob.result(SECONDS)


# -- adapters, in a rolling batch --------------------------------------------------------------------------------------


@pytest.fixture
def java(start: Start) -> PyProcess:
    java = start()
    assert java.load({**OPTIONS, "enable_lora": "true", "echo_tokens_per_second": "5"}).result(SECONDS).code == 200
    return java


REGISTER = {"handler": "register_adapter", "name": "a", "src": "none"}


def test_a_call_about_an_adapter_gets_no_words_of_the_step_before_it(java: PyProcess) -> None:
    with java.together():
        step = java.step("alice alpha")
        call = java.send(REGISTER)
    assert call.result(SECONDS).contents == []
    assert "arrived while requests were running, and is refused" in call.result().message
    assert (step.done(), java.num_messages) == (False, 2)


def test_a_step_gets_no_answer_of_the_call_about_an_adapter_before_it(java: PyProcess) -> None:
    with java.together():
        call = java.send(REGISTER)
        step = java.step("alice alpha")
    assert " alice" in words(step.result(SECONDS))
    assert (call.done(), java.num_messages) == (False, 2)


def test_a_call_about_an_adapter_alone_is_answered(java: PyProcess) -> None:
    answer = java.send(REGISTER).result(SECONDS)
    assert (answer.code, answer.contents) == (424, [])
    assert " alice" in words(java.step("alice alpha").result(SECONDS))
