"""Deployments that several tests make, and their deployer, who has the printed policies and no other permission."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from deploy.aws import Aws
from deploy.deployer.apply import ApplyOptions, Run, apply, look_when_idle
from deploy.deployer.plan import Plan, plan, removal_of_all
from deploy.emulator.authorization import Permission
from deploy.errors import DeployError
from deploy.iam.policies import Policy, parts, policies
from deploy.resolve.decision import Decision
from deploy.resolve.resolver import resolve
from deploy.resources import build
from deploy.resources.resource import Resource
from deploy.spec import Spec
from deploy.spec.reading import read_spec
from tests.deploy.doubles.aws import CALLER, Cloud

# -- deployments -------------------------------------------------------------------------------------------------------
# Deployments that several tests make: specifications, decisions made by hand, and calls to the double of AWS.


NAME = "llama"

PLAIN: dict[str, Any] = {
    "name": NAME,
    "region": "us-east-1",
    "role": "arn:aws:iam::123456789012:role/model",
    "image": {"uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi:1-cu130"},
    "model": {"s3": "s3://models/llama/", "shape": {"parameters": 8e9, "layers": 32, "kv_heads": 8, "head_dim": 128}},
    "instance": {"type": "ml.g6e.2xlarge", "count": 2},
    "scaling": {"min": 1, "max": 4, "concurrency": 8},
}
"""An endpoint that holds its model, scaled: model, configuration, endpoint, two alarms, target, policy."""

COMPONENTS: dict[str, Any] = {
    **PLAIN,
    "instance": {"type": "ml.g6e.12xlarge", "count": 1, "managed": {"min": 0, "max": 2}},
    "components": [
        {"name": "base", "copies": 2, "adapters": [{"name": "french", "artifact": "s3://models/french.tar.gz"}]},
        {"name": "second"},
    ],
    "scaling": {"min": 0, "max": 4, "concurrency": 8},
}
"""Two components, an adapter on the first, both asleep when nobody asks."""

DECISION = Decision(
    region="us-east-1",
    account="123456789012",
    image=PLAIN["image"]["uri"],
    instance_type="ml.g6e.2xlarge",
    gpus=4,
    ami="al2023-ami-sagemaker-inference-gpu-4-1",
    model_data="s3://models/llama/",
    download=600,
    startup=900,
)


def wanted_of(content: dict[str, Any], **changes: Any) -> tuple[Resource, ...]:
    """The resources of a specification with `changes` laid over it."""
    spec = Spec.model_validate({**content, **changes})
    return build.resources(spec, replace(DECISION, image=str(spec.image.uri), instance_type=spec.instance.type))


def ways(said: list[str] | None = None, **how: Any) -> ApplyOptions:
    """Without pauses; `said` gets every line."""
    return ApplyOptions(say=(said if said is not None else []).append, report=lambda progress: None, every=0.0, **how)


@functools.lru_cache(maxsize=1)
def _aws(url: str) -> Aws:
    """Clients cost more than the calls: the same ones for all tests of a server."""
    return Aws("us-east-1")


def up(wanted: tuple[Resource, ...], *, keep: int = 2, adopt: bool = False, run: Run | None = None, **how: Any) -> Plan:
    """As `lmi deploy up` does it."""
    aws = _aws(os.environ["AWS_ENDPOINT_URL"])
    live = look_when_idle(aws, NAME, wanted, ways(**how))
    made = plan(wanted, live, keep=keep, adopt=adopt)
    apply(aws, made, wanted, ways(**how), run)
    return made


def down(**how: Any) -> Plan:
    """As `lmi deploy down` does it."""
    aws = _aws(os.environ["AWS_ENDPOINT_URL"])
    made = removal_of_all(look_when_idle(aws, NAME, (), ways(**how)))
    apply(aws, made, (), ways(**how))
    return made


# -- somebody who has the policies that `lmi deploy iam` prints for a specification, and no other permission -----------


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

    def asked(self) -> list[Permission]:
        """What the calls of the commands needed."""
        return [need for caller, need in self._cloud.asked if caller == CALLER]

    def takes(self, file: str, settings: list[str] | None = None) -> None:
        """Have the printed policy of a file. One that cannot be read leaves what was."""
        try:
            self._cloud.policies[CALLER] = parts(printed(read_spec(Path(file), settings or [])))
        except DeployError:
            return
