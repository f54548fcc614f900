"""The command `lmi skill`, which installs skills for coding agents, in the open format of Agent Skills."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from handler.core.errors import ConfigError
from handler.launch import AGENTS

SKILLS = Path(__file__).parent / "skills"
"""The skills: a folder for each, with SKILL.md."""


def add_parser(commands: Any) -> None:
    skill = commands.add_parser("skill", help="install the skills for coding agents")
    actions = skill.add_subparsers(required=True, metavar="install", prog="lmi skill")
    install = actions.add_parser(
        "install",
        help="install the skills for an agent",
        description="Install the skills for an agent in the working directory, or with --user for all projects. Exit "
        "status: 0 if they are installed, 2 if the agent reads no skills, or if a file there differs.",
    )
    install.add_argument("agent", choices=[*AGENTS], metavar="AGENT", help=", ".join(AGENTS))
    install.add_argument("--user", action="store_true", help="install below your home directory, for all projects")
    install.add_argument("--replace", action="store_true", help="replace files that differ, such as an older release's")
    install.set_defaults(run=_install)


def _install(arguments: argparse.Namespace) -> int:
    agent, files = AGENTS[arguments.agent], sorted(SKILLS.rglob("SKILL.md"))
    if agent.skills is None:
        paths = " ".join(map(str, files))
        raise ConfigError(f"lmi skill: {agent.title} reads no skills; pass it the file instead: {paths}")
    folder = Path.home() / agent.skills[1] if arguments.user else Path(agent.skills[0])
    for file in files:
        path = folder / file.relative_to(SKILLS)
        try:
            print(f"{_copy(file, path, replace=arguments.replace)}: {path}")
        except OSError as error:
            raise ConfigError(f"lmi skill: {path}: {error.strerror}") from None
    return 0


def _copy(file: Path, path: Path, *, replace: bool) -> str:
    """Copy a file, and return what was done.

    Raises:
        ConfigError: a file with other content is there, and is not to be replaced.
        OSError: the file cannot be written.
    """
    content = file.read_bytes()
    if path.is_file():
        if path.read_bytes() == content:
            return "already installed"
        if not replace:
            raise ConfigError(f"lmi skill: {path} differs from this release's; --replace replaces it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return "installed"
