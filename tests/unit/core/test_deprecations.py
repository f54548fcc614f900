"""Each deprecated name works, warns once with its successor, is in the changelog, and leaves with its release."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

import pytest

from deploy.cli.main import add_commands
from deploy.spec import Spec
from deploy.spec.options import deprecated
from deploy.spec.reading import FILLERS
from handler.cli import main, make_parser
from handler.config.engines import ENGINES
from handler.config.options.names import LMI_VARIABLES, find_option
from handler.config.options.option import Gone
from handler.core import deprecations
from handler.core.command_line import Parser
from handler.core.deprecations import DEPRECATIONS, Deprecation
from tests.docs.pages import ROOT
from tests.release import images

VERSION = images.version(ROOT)
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
ROW = Deprecation("2.1.0", "3.0.0", "option.new")


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """Yield a command with its subcommands, and each of them with each of its flags."""
    yield name
    for action in parser._actions:
        yield from (f"{name} {flag}" for flag in action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from commands(below, f"{name} {word}")


def is_known(name: str) -> bool:
    """Return whether a name of ours still works."""
    if name.startswith("LMI_"):
        return name in LMI_VARIABLES
    if name.startswith("lmi "):
        deploy = argparse.ArgumentParser()
        add_commands(deploy)
        return name in {*commands(make_parser(), "lmi"), *commands(deploy, "lmi deploy")}
    options = [option for engine in ENGINES if (option := find_option(name, engine)) is not None]
    return any(not isinstance(option.parse, Gone) for option in options)


def numbers(version: str) -> list[int]:
    return [*map(int, version.split("."))]


def faults(name: str, row: Deprecation, version: str = VERSION, changelog: str = CHANGELOG) -> Iterator[str]:
    """Yield what is wrong with a row of the table."""
    if numbers(version) >= numbers(row.removed):
        yield f"{version} removes {name}: delete the name and its row"
        return
    if numbers(row.since)[:2] >= numbers(row.removed)[:2]:
        yield f"{name} leaves in the release that announces it"
    if not is_known(name):
        yield f"{name} does not work any more"
    heading = row.since if f"\n## [{row.since}]" in changelog else "Unreleased"
    section = changelog.partition(f"\n## [{heading}]")[2].partition("\n## ")[0]
    lines = section.partition("\n### Deprecated\n")[2].partition("\n### ")[0].splitlines()
    if not any(f"`{name}`" in line and row.instead in line and row.removed in line for line in lines):
        yield f"CHANGELOG.md lacks a line under Deprecated of {heading}: `{name}`, {row.instead}, {row.removed}"


def test_each_deprecated_name_works_and_is_announced() -> None:
    assert [fault for name, row in DEPRECATIONS.items() for fault in faults(name, row)] == []


LINE = "\n## [Unreleased]\n### Deprecated\n- `{}` leaves in 3.0.0: use option.new.\n\n## [2.0.0] - 2026-12-01\n"


@pytest.mark.parametrize("name", ["option.max_rolling_batch_size", "LMI_HOST", "lmi bench", "lmi deploy plan --json"])
def test_a_row_needs_its_name_its_line_and_a_later_release(name: str) -> None:
    changelog = LINE.format(name)
    assert [*faults(name, ROW, "2.0.0", changelog)] == []
    assert [*faults(name, ROW, "3.0.0", changelog)] == [f"3.0.0 removes {name}: delete the name and its row"]
    assert [fault[:17] for fault in faults(name, ROW, "2.0.0", "\n## [Unreleased]\n")] == ["CHANGELOG.md lack"]
    assert len([*faults(name, ROW._replace(removed="2.1.1"), "2.0.0", changelog.replace("3.0.0", "2.1.1"))]) == 1
    assert [*faults(f"{name}x", ROW, "2.0.0", LINE.format(f"{name}x"))] == [f"{name}x does not work any more"]


def deprecate(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    rows: Mapping[str, Deprecation] = dict.fromkeys(names, ROW)
    monkeypatch.setattr(deprecations, "DEPRECATIONS", rows)


def test_an_option_and_a_variable_warn_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deprecate(monkeypatch, "option.max_rolling_batch_size", "LMI_HOST")
    monkeypatch.setenv("LMI_HOST", "127.0.0.1")
    monkeypatch.setenv("OPTION_MAX_ROLLING_BATCH_SIZE", "4")
    assert main(["serve", "--engine", "echo", "--check", "-o", "option.max_rolling_batch_size=4"]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if "deprecated" in line]
    assert found == [
        "deprecated: option.max_rolling_batch_size (-o option.max_rolling_batch_size=4); "
        "3.0.0 removes it, use option.new instead",
        "deprecated: LMI_HOST; 3.0.0 removes it, use option.new instead",
    ]


def test_an_option_of_a_deployment_warns_in_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    deprecate(monkeypatch, "option.max_rolling_batch_size")
    content = {**FILLERS, "options": {"max_rolling_batch_size": 4}}
    assert [line.partition(" (")[0] for line in deprecated(Spec.model_validate(content))] == [
        "deprecated: option.max_rolling_batch_size"
    ]


def test_a_command_and_a_flag_warn_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    deprecate(monkeypatch, "lmi old", "lmi bench --plot")
    parser = Parser(prog="lmi")
    below = parser.add_subparsers()
    below.add_parser("old")
    below.add_parser("bench").add_argument("--plot", action="append")
    parser.parse_args(["bench", "--plot=a", "--plot", "b"])
    assert capsys.readouterr().err == "deprecated: lmi bench --plot; 3.0.0 removes it, use option.new instead\n"
    parser.parse_args(["old"])
    assert capsys.readouterr().err == "deprecated: lmi old; 3.0.0 removes it, use option.new instead\n"
