"""Reports: bars in a terminal, comparisons, and where a result goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handler.cli import main
from proof.bench import report
from proof.bench.curves import curve_of
from tests.bench.documents import endpoint, level, served
from tests.doubles import terminal

# -- comparisons, and where a result goes ------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_loses_no_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    below = tmp_path / "taken" / "x.json"
    assert report.print_result(below, served(1)) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == served(1)
    assert [line.partition(": ")[0] for line in err.splitlines()] == [f"cannot write {below}"]


def test_a_comparison_names_changes_and_what_may_be_chance() -> None:
    slow, near = served(1, 8, options=["option.a=1"]), served(1, 16, scale=1.05)
    far = endpoint({"clients": 8, **level(8, 2.0, errors={"Throttled": 3})})
    shown = report.compare([curve_of(slow, "slow"), curve_of(near, "near"), curve_of(far, "far")]).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown if line.startswith("|")]
    assert rows[0] == ["load", "", "slow", "near", "far"]
    assert rows[2] == ["1 client", "tokens/s", "100.0", "~ 105.0 (+5.0%)", "-"]
    assert rows[9] == ["8 clients", "tokens/s", "800.0", "-", "1,600.0 (+100.0%)"]
    assert ["", "failed requests", "0", "-", "3"] in rows
    assert ["16 clients", "tokens/s", "-", "1,680.0", "-"] in rows
    assert "slow, measured: tiny, engine vllm, option.a=1" in shown
    assert "far, requests: responses of 64 tokens, prompts of 100 words" in shown
    assert "far, machine: unknown" in shown


def test_a_comparison_marks_disturbed_runs_and_explains_its_marks() -> None:
    calm, busy = served(1, 8), served(1, 8, scale=1.3)
    busy["results"][1]["others_cores"], calm["results"][1]["others_cores"] = 0.21, 0.2
    shown = report.compare([curve_of(calm, "calm"), curve_of(busy, "busy")])
    assert " 800.0 | ! 1,040.0 (+30.0%) |" in shown
    assert "! disturbed: other processes kept more cores busy than --quiet allows; measure again" in shown
    assert "within noise" not in shown
    again = report.compare([curve_of(calm, "calm"), curve_of(served(1, scale=1.05), "again")])
    assert "~ within noise: the repetitions overlap with those of the first column" in again
    assert "disturbed" not in again
    once = report.compare([curve_of(endpoint({"clients": 1, **level(1)}), "once")])
    assert "noise unknown for once, because it was measured once" in once


def test_compare_reads_what_either_command_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.log"]
    files[0].write_text(json.dumps(served(1, 8), indent=1))
    files[1].write_text("a table\n" + json.dumps(endpoint({"clients": 1, **level(1, 3.0)})) + "\n")
    assert main(["bench", "--compare", *map(str, files)]) == 0
    assert "300.0 (+200.0%)" in capsys.readouterr().out


RATES = served(1, kind="rate")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nonsense", "the last line is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"a": 1}', "is not a result of `lmi bench` or `lmi deploy bench`"),
        ('{"levels": []}', "is not a result of `lmi bench` or `lmi deploy bench`"),
        ('{"levels": [{"clients": 1}]}', "does not have the field 'tokens_per_second'"),
        (json.dumps(RATES), "cannot compare rates with numbers of clients: a: concurrent clients, b: rates"),
        (None, "No such file"),
    ],
)
def test_what_cannot_be_compared_is_named(
    tmp_path: Path, text: str | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(served(1)))
    if text is not None:
        (tmp_path / "b.json").write_text(text)
    assert main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    message: Any = capsys.readouterr().err
    assert message.startswith("lmi: --compare: ")
    assert why in message


@pytest.mark.parametrize("more", [["http://127.0.0.1:1"], ["--engine", "echo"], ["--output", "b.json"]])
def test_compare_measures_nothing(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *more, "--compare", "a.json"]) == 2
    assert "omit the URL, --engine and --output" in capsys.readouterr().err


# -- the bar of a measurement: on a terminal it counts its steps and disappears; a pipe gets nothing of it -------------


_CODE = """
from proof.bench.report import progress_bar
with progress_bar(2) as advance:
    advance("1 client")
    advance("8 clients")
"""


def test_a_terminal_gets_a_bar() -> None:
    shown = terminal.shown(_CODE)
    assert "8 clients" in shown
    assert "1/2" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K"), "the line is cleared at the end"


def test_a_pipe_gets_nothing() -> None:
    assert terminal.piped(_CODE) == ""
