"""examples/infrastructure/github: each command against the Dockerfile and `lmi deploy`, as no runner is here."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from typing import Any

import yaml

from deploy.cli.main import _parser
from tests.container.images.dockerfile import ROOT, read
from tests.docs.blocks import programs
from tests.examples.programs import EXAMPLES

WORKFLOW: dict[Any, Any] = yaml.safe_load((EXAMPLES / "infrastructure/github/deploy.yaml").read_text())
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["deploy"]["steps"]
ENVIRONMENT: dict[str, str] = WORKFLOW["env"]


def commands() -> list[list[str]]:
    """Those of all steps, with the workflow's variables."""
    text = "\n".join(step["run"].replace("\\\n", " ") for step in STEPS if "run" in step)
    text = re.sub(r"\$(TARGET|SPEC|IMAGE)\b", lambda found: ENVIRONMENT[found[1]].partition(" #")[0], text)
    text = re.sub(r'"\$\([^\n]*?\)"', "made", re.sub(r"\$\{\{[^}]*\}\}", "given", text))
    return [words for line in text.splitlines() for words in programs(line)]


def test_it_builds_what_the_dockerfile_has() -> None:
    _, stages = read()
    builds = [words for words in commands() if words[:3] == ["docker", "buildx", "build"]]
    assert len(builds) == 2
    for words in builds:
        assert words[words.index("--target") + 1] in stages
        assert words[words.index("--platform") + 1] == "linux/amd64"
    image = builds[0]
    assert "--provenance=false" in image
    given = {words.partition("=")[0] for name, words in pairwise(image) if name == "--build-arg"}
    known = {value.partition("=")[0] for value in stages[ENVIRONMENT["TARGET"]].values("ARG")}
    assert given == {"VERSION", "REVISION", "SOURCE"} <= known


def test_its_commands_of_lmi_are_ones() -> None:
    found = [words[2:] for words in commands() if words[:2] == ["lmi", "deploy"]]
    assert [words[0] for words in found] == ["plan", "up"]
    for words in found:
        arguments = _parser("lmi deploy").parse_args(words)
        assert str(arguments.spec) == ENVIRONMENT["SPEC"]
    specification = yaml.safe_load((ROOT / ENVIRONMENT["SPEC"]).read_text())
    assert ENVIRONMENT["IMAGE"].startswith(f"{specification['image']['repository']}:")
    assert "--yes" in found[1]


def test_it_has_no_keys_and_only_main_changes_the_endpoint() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read", "id-token": "write"}
    assert "secrets." not in shlex.join(str(step) for step in STEPS)
    [last] = [step for step in STEPS if "lmi deploy up" in step.get("run", "")]
    assert last["if"] == "github.ref == 'refs/heads/main'"
    assert WORKFLOW["defaults"]["run"]["shell"] == "bash", "a failed plan would be hidden by tee"
    order = [
        index
        for index, step in enumerate(STEPS)
        if re.search("scan-action|docker push|deploy plan|deploy up", str(step))
    ]
    assert order == sorted(order)
    assert "scan-action" in STEPS[order[0]]["uses"]
