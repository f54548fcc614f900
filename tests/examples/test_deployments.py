"""The specifications in examples/, each a deployment."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.export.cloudformation import cloudformation_template
from deploy.iam.policies import policies
from deploy.resolve.resolver import resolve
from deploy.resources.build import resources
from deploy.resources.resource import Kind
from deploy.spec.reading import read_spec
from tests.examples.programs import EXAMPLES

DEPLOYMENTS = sorted(EXAMPLES.glob("*.yaml"))
KINDS = {
    "adapters": {Kind.COMPONENT},
    "llama-3-8b-g6": set(),
    "llama-3-8b-g6e": set(),
    "llama-3-8b-isolated": set(),
    "llama-3-8b-scale-to-zero": {Kind.COMPONENT, Kind.SCALABLE_TARGET, Kind.SCALING_POLICY},
    "qwen3-aws-image": set(),
    "smollm2-cpu": set(),
}


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.stem)
def test_an_example_is_a_deployment(path: Path) -> None:
    spec = read_spec(path)
    assert spec.region is not None
    decision = resolve(spec, spec.region).decision
    made = resources(spec, decision)
    assert {one.kind for one in made} == {
        Kind.MODEL, Kind.ENDPOINT_CONFIG, Kind.ENDPOINT, Kind.ALARM, *KINDS[path.stem],
    }  # fmt: skip
    assert cloudformation_template(made)["Resources"]
    assert policies(spec, decision)["deployer"]["Statement"]


def test_every_example_is_expected() -> None:
    assert {path.stem for path in DEPLOYMENTS} == set(KINDS)


def test_the_first_endpoint_shows_its_example() -> None:
    _, _, example = (EXAMPLES / "llama-3-8b-g6.yaml").read_text().partition("\n")
    assert f"```yaml\n{example}```" in (EXAMPLES.parent / "docs" / "first-endpoint.md").read_text()
