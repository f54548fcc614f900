from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tools.mutate import Clone, Place, Recorded, check, covering, draw, places

SOURCE = '''"""Say 1 == 1."""

def top(values: list[1]) -> int:
    """Return 2."""
    best = 0
    for value in values:
        if value > best and not (
            value == 7
        ):
            best = value
    print(f"{best + 1}")
    return best

def unused():
    return True
'''


def changed(place: Place) -> str:
    whole = SOURCE.encode()
    return (whole[: place.begin] + place.text.encode() + whole[place.end :]).decode()


def test_each_place_is_one_change_of_code_that_still_parses() -> None:
    found = list(places("a.py", SOURCE))
    assert [(place.lines[0], place.text) for place in found] == [
        (5, "(1)"),
        (7, "(value > best or not value == 7)"),
        (7, "(value >= best)"),
        (7, "(value == 7)"),
        (8, "(value != 7)"),
        (8, "(8)"),
        (11, "pass"),
        (12, "return None"),
        (15, "return None"),
        (15, "False"),
    ]
    for place in found:
        compile(changed(place), "a.py", "exec")
        assert changed(place) != SOURCE


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """A repository with a module and a test of half of it, cloned."""
    repository = tmp_path / "repository"
    for name, text in {
        "handler/a.py": SOURCE,
        "tests/test_a.py": "from handler.a import top\n\ndef test_top():\n    assert top([3, 9, 7]) == 9\n\n"
        "def test_bad():\n    assert top([]) == 1\n",
    }.items():
        (repository / name).parent.mkdir(parents=True)
        (repository / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "a"]):
        subprocess.run([*git, *command], cwd=repository, check=True)
    return Clone(tmp_path / "clone", "HEAD", repository)


def test_a_change_is_caught_by_a_test_that_executes_its_line(clone: Clone) -> None:
    recorded = clone.record(["tests"])
    assert {name: test.passed for name, test in recorded.items()} == {
        "tests/test_a.py::test_top": True,
        "tests/test_a.py::test_bad": False,
    }
    check(clone, recorded)
    drawn = draw(clone.root, 100, 1)
    assert sorted(drawn, key=str) == sorted(places("handler/a.py", SOURCE), key=str)
    assert drawn == draw(clone.root, 100, 1) != draw(clone.root, 100, 2)
    tests = {place.text: covering(place, recorded, 10) for place in drawn}
    assert tests["False"] == []
    assert tests["(value != 7)"] == ["tests/test_a.py::test_top"]
    by_text = {place.text: place for place in drawn}
    assert clone.catches(by_text["(value != 7)"], tests["(value != 7)"], 60)
    assert not clone.catches(by_text["(8)"], tests["(8)"], 60)
    assert (clone.root / "handler/a.py").read_text() == SOURCE


def test_the_fastest_tests_run_first_within_the_budget() -> None:
    place = Place("a.py", range(3, 5), 0, 0, "")
    recorded = {
        "slow": Recorded(True, 9, {"a.py": [3]}),
        "fast": Recorded(True, 1, {"a.py": [4]}),
        "failed": Recorded(False, 0, {"a.py": [4]}),
        "elsewhere": Recorded(True, 0, {"a.py": [5], "b.py": [3]}),
    }
    assert covering(place, recorded, 10) == ["fast", "slow"]
    assert covering(place, recorded, 9) == ["fast"]
    assert covering(place, recorded, 0.5) == ["fast"]


def test_a_table_is_held_against_the_tests_of_its_module() -> None:
    source = "TABLE = {1: True}\n\ndef look(key: int = 3) -> bool:\n    return TABLE[key + 5]\n"
    places_of = {place.text: place for place in places("a.py", source)}
    assert {text: place.at_import for text, place in places_of.items()} == {
        "(2)": True, "False": True, "(4)": True, "return None": False, "(key - 5)": False, "(6)": False,
    }  # fmt: skip
    recorded = {"of a": Recorded(True, 1, {"a.py": [4]}), "of b": Recorded(True, 1, {"b.py": [1]})}
    assert covering(places_of["False"], recorded, 10) == ["of a"]
    assert covering(Place("a.py", range(2, 3), 0, 0, ""), recorded, 10) == []


def test_places_that_two_commits_share_are_drawn_alike(tmp_path: Path) -> None:
    """Though other lines were added before them, one was changed, and one is there a second time."""
    new = SOURCE.replace("    best = 0\n", "    other = 7\n    best = 3\n") + "\ndef more():\n    return True\n"
    for name, source in (("old", SOURCE), ("new", new)):
        (tmp_path / name / "handler").mkdir(parents=True)
        (tmp_path / name / "handler" / "a.py").write_text(source)
    old, new_root = tmp_path / "old", tmp_path / "new"
    before, after = draw(old, 100, 1, new_root), draw(new_root, 100, 1, old)
    assert [place.text for place in before] == [place.text for place in after]
    assert {after.lines[0] - before.lines[0] for before, after in zip(before, after, strict=True)} == {1}
    assert len(before) == len(list(places("a.py", SOURCE))) - 1
