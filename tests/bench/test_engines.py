"""`bench/engines.py` from end to end, with echo as our engine and a stand-in for vLLM's server."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from proof.bench.client import Target
from proof.bench.processes import lmi_serve

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.long]

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
STAND_IN = Path(__file__).with_name("completions_server.py")
MODEL = EngineConfig(Config(tensor_parallel_degree="1"), model=Path("/nowhere"))


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


class Engine:
    """An engine without a server, at a pace of its own."""

    pid = 1

    def __init__(self) -> None:
        self.about = {"version": "1"}

    def measure(self, work: Any) -> Any:
        from systems.base import Sample

        tokens = work.clients * work.rounds * work.tokens
        return Sample(tokens, tokens / 100)


def stand_in(monkeypatch: pytest.MonkeyPatch, together: int = 1) -> Any:
    """`vllm_serve`, with another program started."""
    vllm_serve = importlib.import_module("systems.vllm_serve")

    def command(config: EngineConfig, num_devices: int, url: str) -> list[str]:
        return [sys.executable, str(STAND_IN), url.rpartition(":")[2], str(together)]

    monkeypatch.setattr(vllm_serve, "_command", command)
    monkeypatch.setattr(vllm_serve.vllm_settings, "named_vllm", lambda directory: False)
    return vllm_serve.vllm_serve


@contextlib.contextmanager
def engine() -> Iterator[Any]:
    yield Engine()


@contextlib.contextmanager
def ours(kind: type[Target]) -> Iterator[Any]:
    from systems.served import Served

    with lmi_serve(["--engine", "echo", "-o", "option.echo_tokens_per_second=200"]) as server:
        yield Served(server.url, server.pid, kind, ())


@pytest.mark.parametrize("api", ["chat", "text"])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_all_systems_in_turns(
    apart: bool, api: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines, vllm = importlib.import_module("engines"), importlib.import_module("systems.vllm")
    peer = stand_in(monkeypatch)
    apis = importlib.import_module("systems.apis").APIS[api]
    starts = {
        vllm.OFFLINE: engine,
        vllm.OURS: lambda: ours(apis.ours),
        vllm.PEER: lambda: peer(MODEL, 0, apis.peers),
    }
    monkeypatch.setattr(vllm, "find_devices", lambda: vllm.Devices(()))
    monkeypatch.setattr(vllm, "starts", lambda *arguments, **more: starts)
    short = ["--clients", "1,2", "--rounds", "2", "--tokens", "16", "--repeat", "1", "--quiet", "99"]
    given = engines.parser().parse_args(["demo", "--api", api, *short, *(["--apart"] if apart else [])])
    status = engines.run(given)
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert [value["clients"] for value in found["results"]] == [1, 2]
    for value in found["results"]:
        systems = value["systems"]
        assert list(systems) == [vllm.OFFLINE, vllm.OURS, vllm.PEER]
        assert systems[vllm.OURS]["errors"] == systems[vllm.PEER]["errors"] == {}
        assert systems[vllm.OURS]["num_requests"] == systems[vllm.PEER]["num_requests"] == 2 * value["clients"]
        assert systems[vllm.OURS]["itl_ms"]["mean"] > 2.5, "milliseconds, at 5 or more each"
        assert systems[vllm.OURS]["host_cpu_us"] > 0
        assert systems[vllm.PEER]["engine_cpu_us"] < systems[vllm.PEER]["host_cpu_us"]
        rates = [systems[name]["tokens_per_second"] for name in (vllm.OURS, vllm.OFFLINE, vllm.PEER)]
        assert value["rate_over_offline"] == pytest.approx(rates[0] / rates[1])
        assert value["rate_over_peer"] == pytest.approx(rates[0] / rates[2])
    assert found["settings"][vllm.OFFLINE] == {"version": "1"}
    met = [target["met"] for target in found["targets"]]
    assert [line.startswith("met: ") for line in lines if "met: " in line.casefold()] == met
    assert status == (0 if all(met) else 1)


def test_tokens_that_came_together_count_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from systems.base import Work

    text = importlib.import_module("systems.apis").PeerText
    with stand_in(monkeypatch, together=4)(MODEL, 0, text) as server:
        sample = server.measure(Work(clients=1, rounds=2, tokens=10, prompt_words=4))
    assert [result.error for result in sample.results] == ["", ""]
    assert [len(result.arrivals) for result in sample.results] == [10, 10]
    assert sample.tokens == 20


def test_a_peer_that_does_not_come_up_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    start = stand_in(monkeypatch)
    monkeypatch.setattr(sys.modules["systems.vllm_serve"], "_command", lambda *_: [sys.executable, "-c", "1 / 0"])
    with pytest.raises(ConfigError, match="ZeroDivisionError"), start(MODEL, 0, Target):
        pass


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, vllm = importlib.import_module("engines"), importlib.import_module("systems.vllm")
    monkeypatch.setattr(vllm, "find_devices", lambda: vllm.Devices(()))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = engines.parser().parse_args(["demo"])
    with pytest.raises(ConfigError, match="'vllm' is not installed"):
        engines.run(given)


def test_stdout_is_the_tables_own(tmp_path: Path) -> None:
    code = (
        "import engines, os, sys; engines._keep_stdout(); os.system('echo engine'); print('table'); sys.stdout.flush()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": f"{ROOT}:{BENCH}"}, capture_output=True
    )
    assert (done.stdout, done.stderr) == (b"table\n", b"engine\n")


def test_without_vllm_it_says_so() -> None:
    """As a command, in an environment that has none."""
    if importlib.util.find_spec("torch"):
        pytest.skip("torch is here")
    done = subprocess.run([sys.executable, str(BENCH / "engines.py"), "demo"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "run this with the Python that has it" in done.stderr


@pytest.mark.parametrize(
    "wrong", [["--only", "ours,theirs"], ["--clients", "8,x"], ["--repeat", "0"], ["--engine", "echo"]]
)
def test_what_makes_no_sense_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser: argparse.ArgumentParser = importlib.import_module("engines").parser()
    with pytest.raises(SystemExit):
        parser.parse_args(["demo", *wrong])
    assert wrong[0] in capsys.readouterr().err
