"""`bench/cpu_peers.py` from end to end, with echo as our engine and a stand-in for the others' servers."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from handler.core.errors import ConfigError

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.long]

BENCH = Path(__file__).parents[2] / "bench"
STAND_IN = Path(__file__).with_name("completions_server.py")


@pytest.fixture
def cpu_peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("cpu_peers")


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The stand-in as a command that takes the others' flags, the port last."""
    command = tmp_path / "server"
    command.write_text(f'#!/bin/sh\nfor port; do :; done\nexec {sys.executable} {STAND_IN} "$port" 1 apart\n')
    command.chmod(0o755)
    return command


def test_ours_and_two_others_in_turns(
    cpu_peers: Any, server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    arguments = ["--llama", server, "--vllm", server, "--vllm-model", "m", "--model", model]
    arguments += ["--clients", "1,2", "--rounds", "2", "--tokens", "16", "--repeat", "1", "--quiet", "99"]
    given = cpu_peers.parser().parse_args([*map(str, arguments), "-o", "option.llm_engine=echo"])
    assert cpu_peers.run(given) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["results"]
    assert [value["clients"] for value in found] == [1, 2]
    for value in found:
        servers = value["servers"]
        assert list(servers) == [cpu_peers.OURS, cpu_peers.LLAMA, cpu_peers.VLLM]
        for name in (cpu_peers.LLAMA, cpu_peers.VLLM):
            ours, other = servers[cpu_peers.OURS], servers[name]
            rate = ours["tokens_per_second"] / other["tokens_per_second"]
            assert value["over"][name]["tokens_per_second"] == pytest.approx(rate)
            assert value["over"][name]["cpu"] == pytest.approx(ours["cpu_ms"] / other["cpu_ms"])
    assert sum("llama.cpp" in line for line in lines) == 2 * 2, "in both tables, at both numbers of clients"


def test_vllm_needs_a_model_of_its_own(cpu_peers: Any) -> None:
    with pytest.raises(ConfigError, match="--vllm-model"):
        cpu_peers.run(cpu_peers.parser().parse_args(["--vllm", "vllm"]))
