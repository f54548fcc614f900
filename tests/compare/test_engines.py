"""`tests.compare.engines` from end to end, with echo as our engine and a stand-in for others' servers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.core.errors import ConfigError
from proof.bench import machine
from proof.bench.client import ResponseReader
from proof.bench.processes import Server
from tests.compare import engines, processes
from tests.compare.processes import Cpu

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.long]

STAND_IN = Path(__file__).with_name("completions_server.py")
SHORT = ["--rounds", "2", "--tokens", "16", "--repeat", "1", "--quiet", "99"]


def peer(together: int = 1, *more: str) -> str:
    return " ".join([sys.executable, str(STAND_IN), "{port}", str(together), *more])


def test_ours_and_two_others_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    peers = ["--peer", f"vllm serve={peer(4)}", "--peer", f"llama.cpp={peer(1, 'apart')}"]
    options = ["-o", "option.llm_engine=echo", "-o", "option.echo_tokens_per_second=200"]
    given = engines.parser().parse_args([*options, *peers, "--clients", "1,2", *SHORT])
    assert engines.run(given) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["results"]
    assert [value["clients"] for value in found] == [engines.FIRST, 1, 2]
    for value in found:
        servers = value["servers"]
        ours = servers.pop(engines.OURS)
        assert list(servers) == list(value["over"]) == ["vllm serve", "llama.cpp"]
        streams = 1 if value["clients"] == engines.FIRST else value["clients"]
        assert 0 < ours["tokens_per_second"] < 1.5 * 200 * streams, "no more than its pace, on any machine"
        assert list(servers) == list(value["over"]) == ["vllm serve", "llama.cpp"]
        for name, other in servers.items():
            assert ours["errors"] == other["errors"] == {}
            assert ours["engine_cpu_us"] == 0 <= other["engine_cpu_us"] < other["host_cpu_us"]
            for kind, figure in (("tokens_per_second", "tokens_per_second"), ("host_cpu", "host_cpu_us")):
                assert value["over"][name][kind] == pytest.approx(ours[figure] / other[figure])
    assert sum("llama.cpp" in line for line in lines) == 2 * 3, "in both tables: the first answer, and each load"


@pytest.mark.parametrize(
    "wrong", [["--clients", "8,x"], ["--repeat", "0"], ["--peer", "vllm"], ["--peer", "vllm=vllm serve"]]
)
def test_what_makes_no_sense_is_refused_in_engines(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engines.parser().parse_args(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_a_peer_that_does_not_come_up_says_why() -> None:
    with (
        pytest.raises(ConfigError, match="ZeroDivisionError"),
        processes.started([sys.executable, "-c", "1 / 0"], "http://127.0.0.1:1", 10),
    ):
        pass


# -- the peers' answers ------------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'{"choices":[{"text":"a"}]}'


def read(*events: bytes) -> ResponseReader:
    reader = engines.UsageReader()
    for at, event in enumerate(events):
        line = b"data: " + event + b"\n\n"
        chunk = b"%x\r\n%s\r\n" % (len(line), line)
        reader.feed((HEAD if at == 0 else b"") + chunk, float(at))
    reader.feed(b"0\r\n\r\n", 9.0)
    assert reader.complete
    return reader


def usage(tokens: int) -> bytes:
    return b'{"choices":[],"usage":{"completion_tokens":%d}}' % tokens


@pytest.mark.parametrize(
    ("events", "tokens", "error", "arrivals"),
    [
        ([TOKEN, TOKEN, usage(2), b"[DONE]"], 2, "", [0.0, 1.0]),
        ([TOKEN, TOKEN, usage(4), b"[DONE]"], 4, "", [0.0, 1.0, 1.0, 1.0]),
        ([TOKEN, usage(1)], 2, "wrong number of tokens", [0.0]),
        ([TOKEN, TOKEN, b"[DONE]"], 3, "wrong number of tokens", [0.0, 1.0]),
        ([TOKEN, b'{"error":{"message":"no"}}', b"[DONE]"], 2, "failed in the stream", [0.0, 1.0]),
    ],
)
def test_the_answers_own_count_of_tokens_is_what_counts(
    events: list[bytes], tokens: int, error: str, arrivals: list[float]
) -> None:
    reader = read(*events)
    assert reader.verdict(tokens) == error
    assert list(reader.arrivals) == arrivals


# -- whose CPU it is ---------------------------------------------------------------------------------------------------

_BUSY = "import time\nwhile time.process_time() < {seconds}: pass\nprint(flush=True)\ntime.sleep(60)"
_PARENT = """
import subprocess, sys
sleep, busy = sys.argv[1:]
subprocess.Popen(["VLLM::EngineCore", "60"], executable=sleep)
subprocess.run([sys.executable, "-c", busy])
"""


@pytest.fixture
def parent() -> Iterator[int]:
    """A process with two children: one named as vLLM's core, one that has been busy for 0.3 s."""
    sleep = shutil.which("sleep")
    assert sleep
    command = [sys.executable, "-c", _PARENT, sleep, _BUSY.format(seconds=0.3)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        for found in [*reversed(list(processes.descendants(process.pid))), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found, 9)


def ended() -> int:
    """The id of a process that is there no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_the_engines_processes_are_told_by_their_names(parent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, apart = processes.cpu_seconds(parent), processes.cpu_seconds(parent, engines.CORE)
    assert whole.engine == 0
    assert 0 < apart.engine < 0.3 <= apart.host < 5
    assert whole.host == pytest.approx(sum(apart), abs=0.05)
    everything = processes.cpu_seconds(parent, (sys.executable.encode(),))
    assert everything.host == 0, "and all that they start"
    assert processes.cpu_seconds(parent).since(whole).host < 0.1
    children, gone = processes.children, ended()
    monkeypatch.setattr(processes, "children", lambda pid: [*children(pid), gone])
    assert processes.cpu_seconds(parent).host >= 0.3, "one that ends while it is looked at is passed over"
    with pytest.raises(OSError, match="Invalid argument"):
        processes.cpu_seconds(gone)


def test_children_are_listed_again_where_a_thread_has_ended(parent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    there, threads = processes.children(parent), Path.iterdir
    looks: list[Path] = []

    def with_an_ended_one(directory: Path) -> Iterator[Path]:
        looks.append(directory)
        yield from threads(directory)
        if len(looks) == 1:
            yield directory / str(ended())

    monkeypatch.setattr(Path, "iterdir", with_an_ended_one)
    assert processes.children(parent) == there
    assert (len(there), len(looks)) == (2, 2)
    assert processes.children(ended()) == []


# -- turns -------------------------------------------------------------------------------------------------------------


def test_another_server_begins_each_turn_after_a_round_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []

    def measure(target: Any, load: Any, processes: int, began: Any) -> list[Any]:
        asked.append((target.url, load.requests, target.first))
        return []

    monkeypatch.setattr(engines, "measure", measure)
    monkeypatch.setattr(engines, "cpu_seconds", lambda pid, core: Cpu(0.0, 0.0))
    monkeypatch.setattr(engines.Sample, "rate", 1.0)
    given = engines.parser().parse_args(["--repeat", "2", "--rounds", "3", "--quiet", "99"])
    turns, disturbed = engines.turns(given, 1, {"a": Server("a", 1), "b": Server("b", 1)})
    assert [url + "?" * (rounds == 1) for url, rounds, _ in asked] == ["a?", "b?", "a", "b", "b", "a"]
    assert len({first for _, _, first in asked}) == 3, "prompts of turns differ"
    assert ([list(turn) for turn in turns], disturbed) == ([["a", "b"]] * 2, 0)


@pytest.mark.parametrize(
    ("others", "kept", "disturbed"),
    [([0.0, 0.1, 9.0], [0.0, 0.1], 0), ([5.0, 0.1, 0.0], [0.1, 0.0], 1), ([5.0, 3.0, 4.0, 0.1], [0.1, 3.0], 3)],
)
def test_disturbed_turns_are_made_again_and_kept_only_for_want_of_others(
    others: list[float], kept: list[float], disturbed: int
) -> None:
    assert machine.undisturbed(2, 0.2, others.__getitem__, float) == (kept, disturbed)
