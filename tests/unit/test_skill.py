"""`lmi skill install`, and that the skill has the open format of Agent Skills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from handler.cli import main
from handler.launch import AGENTS
from handler.skill import SKILLS

ROOT = Path(__file__).parents[2]
FILES = sorted(SKILLS.rglob("SKILL.md"))
INSTALLED = {
    "claude": ".claude/skills",
    "codex": ".agents/skills",
    "opencode": ".opencode/skills",
    "goose": ".agents/skills",
    "aider": "",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_the_skill_has_the_open_format(file: Path) -> None:
    text = file.read_text()
    _, head, body = text.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert {"name", "description"} <= fields.keys() <= {"name", "description", "license", "compatibility", "metadata"}
    assert fields["name"] == file.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert 0 < len(fields["description"]) <= 1024
    assert body.startswith("# ")
    assert len(text.splitlines()) <= 120


def test_the_skills_are_also_where_agents_look_for_those_of_a_repository() -> None:
    for file in FILES:
        assert (ROOT / "skills" / file.relative_to(SKILLS)).read_bytes() == file.read_bytes()
    assert sorted(path.parent.name for path in (ROOT / "skills").rglob("SKILL.md")) == [f.parent.name for f in FILES]


def test_every_agent_that_is_launched_has_its_directory(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert INSTALLED.keys() == AGENTS.keys()
    for agent, folder in INSTALLED.items():
        assert main(["skill", "install", agent]) == (0 if folder else 2)
        for file in FILES if folder else ():
            assert (project / folder / file.relative_to(SKILLS)).read_bytes() == file.read_bytes()
    assert f"aider reads no skills; pass it the file instead: {FILES[0]}" in capsys.readouterr().err


def test_a_changed_file_is_kept_unless_it_is_to_be_replaced(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project / "home/.claude/skills" / FILES[0].relative_to(SKILLS)
    assert main(["skill", "install", "claude", "--user"]) == 0
    assert main(["skill", "install", "claude", "--user"]) == 0
    assert f"already installed: {path}" in capsys.readouterr().out
    path.write_text("mine")
    assert main(["skill", "install", "claude", "--user"]) == 2
    assert "--replace replaces it" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main(["skill", "install", "claude", "--user", "--replace"]) == 0
    assert path.read_bytes() == FILES[0].read_bytes()
    (project / ".claude").write_text("a file")
    assert main(["skill", "install", "claude"]) == 2
    assert ".claude" in capsys.readouterr().err
