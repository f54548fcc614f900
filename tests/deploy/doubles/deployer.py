"""Somebody who has the policies that `lmi deploy iam` prints for a specification, and no other permission."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from deploy.emulator.authorization import Need
from deploy.errors import DeployError
from deploy.iam.policies import Policy, parts, policies
from deploy.resolve.resolver import resolve
from deploy.spec import Spec
from deploy.spec.reading import read_spec
from tests.deploy.doubles.aws import CALLER, Cloud


def printed(
    content: Mapping[str, Any] | Spec, who: str = "deployer", region: str = "us-east-1", *, adopt: bool = False
) -> Policy:
    """The policy of one party, as it is printed without asking AWS; `adopt` as `iam --adopt`."""
    spec = content if isinstance(content, Spec) else Spec.model_validate(content)
    return policies(spec, resolve(spec, spec.region or region).decision, adopt=adopt)[who]


def permit(cloud: Cloud, *contents: Mapping[str, Any] | Spec) -> None:
    """Give the caller the deployer's printed policies of these specifications, and nothing else."""
    cloud.policies[CALLER] = [printed(content) for content in contents]


class Deployer:
    """Runs commands with the printed policy of the file that they name, or of the last one that another named."""

    def __init__(self, cloud: Cloud, main: Any) -> None:
        self._cloud, self._main = cloud, main
        cloud.policies[CALLER] = ()

    def __call__(self, command: list[str]) -> int:
        for word in command:
            if word.endswith((".yaml", ".json")) and Path(word).exists():
                settings = [setting for word, setting in pairwise(command) if word == "--set"]
                self.takes(word, settings)
        return int(self._main(command))

    def asked(self) -> list[Need]:
        """What the calls of the commands needed."""
        return [need for caller, need in self._cloud.asked if caller == CALLER]

    def takes(self, file: str, settings: list[str] | None = None) -> None:
        """Have the printed policy of a file. One that cannot be read leaves what was."""
        try:
            self._cloud.policies[CALLER] = parts(printed(read_spec(Path(file), settings or [])))
        except DeployError:
            return
