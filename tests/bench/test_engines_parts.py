"""What `bench/engines.py` is made of: whose CPU it is, who goes first, ratios and verdicts, options as flags."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.engines.base import EngineConfig
from proof.bench.load import Result

BENCH = Path(__file__).parents[2] / "bench"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


# -- the peer's answers ----------------------------------------------------------------------------------------------


def read(*events: bytes, kind: str = "UsageReader") -> Any:
    reader = getattr(importlib.import_module("systems.apis"), kind)()
    for at, event in enumerate(events):
        line = b"data: " + event + b"\n\n"
        chunk = b"%x\r\n%s\r\n" % (len(line), line)
        reader.feed((HEAD if at == 0 else b"") + chunk, float(at))
    reader.feed(b"0\r\n\r\n", 9.0)
    assert reader.complete
    return reader


TOKEN = b'{"choices":[{"text":"a"}]}'


def usage(tokens: int) -> bytes:
    return b'{"choices":[],"usage":{"completion_tokens":%d}}' % tokens


def test_a_chats_first_event_has_no_token() -> None:
    role = b'{"choices":[{"delta":{"role":"assistant","content":""}}]}'
    chat = read(role, TOKEN, TOKEN, usage(2), b"[DONE]", kind="UsageChatReader")
    assert chat.verdict(2) == ""
    assert list(chat.arrivals) == [1.0, 2.0]


def test_the_answers_own_count_is_what_counts() -> None:
    whole = read(TOKEN, TOKEN, usage(2), b"[DONE]")
    assert whole.verdict(2) == ""
    assert list(whole.arrivals) == [0.0, 1.0]
    joined = read(TOKEN, TOKEN, usage(4), b"[DONE]")
    assert joined.verdict(4) == ""
    assert list(joined.arrivals) == [0.0, 1.0, 1.0, 1.0]
    assert read(TOKEN, usage(1)).verdict(2) == "wrong number of tokens"


def test_a_failure_in_the_peers_stream_is_one() -> None:
    assert read(TOKEN, b'{"error":{"message":"no"}}', b"[DONE]").verdict(2) == "failed in the stream"
    assert read(TOKEN, TOKEN, b"[DONE]").verdict(3) == "wrong number of tokens"


# -- whose CPU it is -------------------------------------------------------------------------------------------------

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
        processes = importlib.import_module("systems.processes")
        for found in reversed(list(processes.tree(process.pid))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.pid, 9)


def test_the_engines_processes_are_told_by_their_names(parent: int) -> None:
    processes = importlib.import_module("systems.processes")
    found = list(processes.tree(parent, ("VLLM::",)))
    assert [process.is_core for process in found].count(True) == 1
    assert [process.name for process in found if process.is_core] == ["VLLM::EngineCore 60"]
    assert all(process.is_core for process in processes.tree(parent, (found[0].name,)))  # and all that they start
    assert 0.3 <= sum(processes.cpu_seconds(process.pid) for process in found) < 5
    assert processes.tree_seconds(parent) == pytest.approx(
        sum(processes.cpu_seconds(process.pid) for process in found), abs=0.05
    )


def test_only_what_was_used_meanwhile_counts(parent: int) -> None:
    processes = importlib.import_module("systems.processes")
    meter = processes.UsedMeter(parent, ("VLLM::",))
    meter.start()
    used = meter.stop()
    assert len(used.host) == 2
    assert sum(used.host.values()) < 0.1
    with pytest.raises(RuntimeError, match=r"core \(NOBODY::\)"):
        processes.UsedMeter(parent, ("NOBODY::",)).start()


def ended() -> int:
    """The id of a process that is there no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_process_that_ends_while_it_is_looked_at_is_passed_over(parent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = importlib.import_module("systems.processes")
    children, gone = processes.children, ended()
    core = next(process.pid for process in processes.tree(parent, ("VLLM::",)) if process.is_core)
    meter = processes.UsedMeter(parent, ("VLLM::",))
    monkeypatch.setattr(processes, "children", lambda pid: [*children(pid), *([gone] if pid == parent else [])])
    meter.start()
    assert len(meter.stop().host) == 2
    assert processes.tree_seconds(parent) >= 0.3
    monkeypatch.setattr(processes, "children", lambda pid: [*children(pid), *([gone] if pid == core else [])])
    for read in (meter.start, meter.stop):  # but not the engine's
        with pytest.raises(FileNotFoundError):
            read()
    with pytest.raises(FileNotFoundError):
        processes.tree_seconds(gone)


def test_one_that_ends_between_its_name_and_its_clock_is_passed_over_too(parent: int) -> None:
    processes = importlib.import_module("systems.processes")
    assert processes.spent_by(processes.Process(ended(), "python", False)) is None
    with pytest.raises(OSError, match="Invalid argument"):
        processes.spent_by(processes.Process(ended(), "VLLM::EngineCore", True))


def test_children_are_listed_again_where_a_thread_has_ended(parent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = importlib.import_module("cpu")
    there, threads = cpu.children(parent), Path.iterdir
    looks: list[Path] = []

    def with_an_ended_one(directory: Path) -> Iterator[Path]:
        looks.append(directory)
        yield from threads(directory)
        if len(looks) == 1:
            yield directory / str(ended())

    monkeypatch.setattr(Path, "iterdir", with_an_ended_one)
    assert cpu.children(parent) == there
    assert (len(there), len(looks)) == (2, 2)
    assert cpu.children(ended()) == []


def test_a_module_that_a_program_starts_is_its_name() -> None:
    processes = importlib.import_module("systems.processes")
    code = "import sys; from json.decoder import scanstring; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert processes.name_of(process.pid) == "json.decoder"
        process.communicate(b"")


# -- turns -----------------------------------------------------------------------------------------------------------


def fakes(log: list[str]) -> dict[str, Any]:
    from systems.base import Sample

    class Fake:
        pid = 1

        def __init__(self, name: str) -> None:
            self.name, self.about = name, dict[str, str]()

        def measure(self, work: Any) -> Any:
            log.append(f"{self.name}{work.clients}" + ("" if work.rounds > 1 else "?"))
            return Sample(100, 1.0)

    @contextlib.contextmanager
    def start(name: str) -> Iterator[Any]:
        log.append(f"+{name}")
        yield Fake(name)
        log.append(f"-{name}")

    return {name: lambda name=name: start(name) for name in "abc"}


def plan(**changes: Any) -> Any:
    turns = importlib.import_module("systems.turns")
    given = {"clients": [1], "rounds": 2, "tokens": 4, "prompt_words": 4, "processes": 2, "repeat": 2, "quiet": 0.2}
    return turns.Plan(**{**given, "together": True, **changes})


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What other processes take in each measurement to come; nothing at the end of the list."""
    turns, busy = importlib.import_module("systems.turns"), list[float]()

    class Meter:
        def cores(self) -> float:
            return busy.pop(0) if busy else 0.0

    monkeypatch.setattr(turns, "OthersMeter", Meter)
    monkeypatch.setattr(turns, "tree_seconds", lambda pid: 0.0)
    return busy


def test_everyone_is_first_in_some_turn(others: list[float]) -> None:
    log: list[str] = []
    points, _ = importlib.import_module("systems.turns").run(plan(clients=[1, 8], repeat=2), fakes(log))
    one = "a1? b1? c1? a1 b1 c1 b1 c1 a1"
    assert " ".join(log) == f"+a +b +c {one} {one.replace('1', '8')} -c -b -a"
    assert [len(point.turns) for point in points] == [2, 2]


def test_apart_one_system_is_up_at_a_time(others: list[float]) -> None:
    log: list[str] = []
    points, _ = importlib.import_module("systems.turns").run(plan(clients=[1, 8], together=False), fakes(log))
    a, b, c = (f"+{name} {name}1? {name}1 {name}8? {name}8 -{name}" for name in "abc")
    assert " ".join(log) == " ".join([a, b, c, b, c, a])
    assert [(point.clients, len(point.turns)) for point in points] == [(1, 2), (8, 2)]


def test_a_disturbed_turn_is_made_again(others: list[float]) -> None:
    others += [0.0, 0.9, 0.0]  # the first turn's three measurements
    log: list[str] = []
    (point,), _ = importlib.import_module("systems.turns").run(plan(), fakes(log))
    assert point.disturbed == 1
    assert all(sample.others == 0 for turn in point.turns for sample in turn.values())
    assert len([name for name in log if name == "a1"]) == 3
    others += [0.5, 0, 0, 0.9, 0, 0, 0.4, 0, 0, 0.3, 0, 0]
    (point,), _ = importlib.import_module("systems.turns").run(plan(), fakes(log))
    assert [max(sample.others for sample in turn.values()) for turn in point.turns] == [0.3, 0.4]  # the least


# -- figures ---------------------------------------------------------------------------------------------------------


def sample(rate: float, gap: float = 0.01, **host: float) -> Any:
    from systems.base import CpuSeconds, Sample

    results = [Result(0.0, array("d", [0.1, 0.1 + gap, 0.1 + 2 * gap]), 1.0, "")]
    return Sample(1000, 1000 / rate, results, CpuSeconds(host, engine=9.0))


def summarized(*turns: dict[str, Any]) -> dict[str, Any]:
    summary, point = importlib.import_module("systems.summary"), importlib.import_module("systems.turns").Point
    found: dict[str, Any] = summary.summarize(point(8, list(turns)), summary.Names("bare", "ours", "peer"))
    return found


def test_ratios_are_of_turns() -> None:
    from systems.base import Sample

    value = summarized(
        {"bare": Sample(1000, 10.0), "ours": sample(90, a=0.1, b=0.3), "peer": sample(60, gap=0.02, p=0.8)},
        {"bare": Sample(1000, 5.0), "ours": sample(190, a=0.2, b=0.2), "peer": sample(200, gap=0.02, p=0.8)},
        {"bare": Sample(1000, 20.0), "ours": sample(55, a=0.1, b=0.2), "peer": sample(50, gap=0.02, p=1.0)},
    )
    assert value["rate_over_offline_each"] == pytest.approx([0.9, 0.95, 1.1])
    assert value["rate_over_offline"] == pytest.approx(0.95)
    assert value["rate_over_peer"] == pytest.approx(1.1)
    assert value["itl_over_peer"] == pytest.approx(0.5)
    assert value["host_cpu_over_peer_each"] == pytest.approx([0.5, 0.5, 0.3])
    assert value["largest_cpu_over_peer_each"] == pytest.approx([0.375, 0.25, 0.2])
    assert value["systems"]["ours"]["host_cpu_us"] == pytest.approx(400)
    assert value["systems"]["ours"]["largest_process"] == "b"
    assert value["systems"]["peer"]["engine_cpu_us"] == pytest.approx(9000)


def test_a_target_counts_where_it_is_set_and_is_not_met_unmeasured() -> None:
    summary = importlib.import_module("systems.summary")
    values = [{"clients": 32, "x": 0.5}, {"clients": 256, "x": 0.99}]
    somewhere, everywhere = summary.Target("x", at_least=0.98, clients=(256,)), summary.Target("x", at_least=0.98)
    missing = summary.Target("x", at_least=0.1, clients=(128,))
    below = summary.Target("x", at_most=0.99)
    assert [met for _, met in summary.verdicts(values, [somewhere, everywhere, missing, below])] == [
        True,
        False,
        False,
        True,
    ]
    assert str(somewhere) == "x >= 0.98 at 256 clients"
    without = summarized({"ours": sample(90, a=0.1)})
    assert without["rate_over_peer"] is None
    assert not summary.Target("rate_over_peer", at_least=0).met(None)
    assert summary.verdicts([without], summary.ON_CPU) == [(str(target), False) for target in summary.ON_CPU]
    assert " - " in summary.show_ratios([without], summary.Names("bare", "ours", "peer"))


# -- options ---------------------------------------------------------------------------------------------------------


def test_keywords_are_flags_too() -> None:
    settings = importlib.import_module("systems.vllm_settings")
    arguments = {"model": "m", "max_model_len": 9, "enforce_eager": True, "enable_lora": False, "x": {"a": [1]}}
    assert settings.flags(arguments) == [
        *("--max-model-len", "9", "--enforce-eager", "--no-enable-lora", "--x", '{"a": [1]}')
    ]


def test_the_cache_is_of_the_same_size_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = importlib.import_module("systems.vllm_settings")
    config = EngineConfig(Config(kv_cache_gib=2), model=Path("m"))
    assert settings.environment(config)["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "kv_cache_memory_bytes" not in settings.keywords(config, 0)
    assert settings.keywords(config, 1)["kv_cache_memory_bytes"] == 2 << 30


def test_a_build_of_another_name_passes_as_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = importlib.import_module("systems.vllm_settings")
    version = importlib.metadata.version

    def versions(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", versions)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    assert settings.named_vllm(tmp_path)
    assert settings.named_vllm(tmp_path)  # again is no fault
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert done.stdout.strip() == b"0.32.0+cpu"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0")
    assert not settings.named_vllm(tmp_path / "never made")


def test_prompts_of_turns_differ() -> None:
    work = plan(clients=[4])
    first, second = work.work(4, 0).prompts(), work.work(4, 1).prompts()
    assert len({*first, *second}) == len(first) + len(second) == 16
    assert work.work(1, 0).processes == 1
