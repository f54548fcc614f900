"""The map of `lmi --help`, and completion as bash does it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli.main import COMMANDS
from handler.cli import main

ROOT = Path(__file__).parents[2]
_COMPLETE = """source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_lmi lmi "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_the_map_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    named = re.findall(r"^  lmi (\w+)(?: ([\w|]+))?", shown, re.MULTILINE)
    with pytest.raises(SystemExit):
        main(["nonesuch"])
    known = re.findall(r"\w+", capsys.readouterr().err.partition("choose from")[2])
    assert {command for command, _ in named} == set(known)
    assert {name for command, below in named if command == "deploy" for name in below.split("|")} == set(COMMANDS)
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize("command", ["serve", "options", "bench", "conform", "completion"])
def test_a_commands_help_shows_how_to_call_it(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: lmi {command} [-h]")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    code = "from handler.cli import main; raise SystemExit(main(['completion', 'bash']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    path = tmp_path_factory.mktemp("completion") / "lmi.bash"
    path.write_text(done.stdout)
    return path


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["lmi", "s"], {"serve"}),
        (["lmi", "serve", "--eng"], {"--engine"}),
        (["lmi", "serve", "./pypr"], {"./pyproject.toml"}),
        (["lmi", "bench", "--compare", "./pypr"], {"./pyproject.toml"}),
        (["lmi", "deploy", "do"], {"down", "doctor"}),
        (["lmi", "deploy", "bench", "--plo"], {"--plot"}),
        (["lmi", "completion", ""], {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes(script: Path, words: list[str], completions: set[str]) -> None:
    command = ["bash", "-c", _COMPLETE, "bash", str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert set(done.stdout.split()) == completions, done.stderr


@pytest.mark.parametrize(("shell", "first"), [("zsh", "#compdef lmi"), ("fish", "complete -c lmi")])
def test_other_shells(shell: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert first in shown
    assert "doctor" in shown


def test_completion_without_shtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == ("lmi: lmi completion: needs shtab: pip install 'lmi-handler[cli]'\n")


def test_a_pipe_that_closes_is_no_failure() -> None:
    code = "from handler.cli import main; raise SystemExit(main(['options']))"
    command = f'{sys.executable} -c "{code}" | head -1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
