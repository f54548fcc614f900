"""`lmi bench` end to end, on the echo engine."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from handler.cli import main
from tests.servers import LiveServer

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SHORT = ["--seconds", "1", "--repeat", "1", "--quiet", "99", "--tokens", "16", "--prompt-words", "8"]


def test_a_running_server(echo_server: LiveServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "a.json"
    assert main(["bench", echo_server.url, "--clients", "2", *SHORT, "--output", str(saved)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert saved.read_text().splitlines() == shown[-1:]
    assert main(["bench", "--compare", str(saved), str(saved)]) == 0
    assert "(+0.0%)" in capsys.readouterr().out
    (value,) = json.loads(shown[-1])["results"]
    assert value["errors"] == {}
    assert value["num_requests"] >= 2
    assert 0 < value["tokens_per_second"] < 16 * value["num_requests"] * 1.2, "it measured for a second or more"
    assert value["ttft_ms"]["p50"] <= value["ttft_ms"]["p99"]
    assert value["ttft_ms"]["p50"] < value["latency_ms"]["p50"]
    assert any("2 clients" in line for line in shown)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "x.gguf"], "omit --model and -o"),
        (["-o", "option.dtype=fp32"], "omit --model and -o"),
        (["--constant"], "--constant requires an open loop"),
        (["--clients", "1", "--rate", "5"], "--rate: not allowed with argument --clients"),
        (["--repeat", "0"], "--repeat: must be a whole number of at least 1"),
        (["--repeat", "two"], "--repeat: must be a whole number of at least 1"),
        (["--clients", "1,0"], "--clients: must be whole numbers of at least 1, such as 1,8,32"),
        (["--rate", "1,x"], "--rate: must be a number above 0"),
        (["--timeout", "nan"], "--timeout: must be a number above 0"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["bench", "http://127.0.0.1:1", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_open_loop_on_a_running_server(echo_server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", echo_server.url, "--rate", "20", "--constant", *SHORT]) == 0
    (value,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert value["num_requests"] == 20
    assert value["errors"] == {}


def test_served_over_engine(capsys: pytest.CaptureFixture[str]) -> None:
    pace = ["-o", "option.echo_tokens_per_second=200"]
    assert main(["bench", "--engine", "echo", *pace, "--clients", "4", *SHORT]) == 0
    (value,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert 0 < value["engine_tokens_per_second"] < 1000, "four clients at the echo engine's pace or less"
    served = value["tokens_per_second"] / value["engine_tokens_per_second"]
    assert value["served_over_engine"] == pytest.approx(served, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "URL"),
        (["--engine", "echo", "--rate", "2"], "--engine does not support an open loop"),
        (["--engine", "nonesuch"], "known engines: "),
        (["localhost:8080"], "http://host:port"),
    ],
)
def test_what_makes_no_sense_is_refused_in_bench(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert why in capsys.readouterr().err
