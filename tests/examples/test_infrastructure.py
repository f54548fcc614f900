"""The files of examples/infrastructure: against what `lmi deploy export` writes, and clusters' schemas."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli.main import main
from deploy.resolve.resolver import resolve
from deploy.resources.environment import environment
from deploy.spec.reading import read_spec
from tests.clients import toolchains, venvs
from tests.clients.driver import skipped_without
from tests.examples import kubernetes_environment
from tests.examples.programs import EXAMPLES, run

DEPLOYMENT = EXAMPLES / "smollm2-cpu.yaml"
INFRASTRUCTURE = EXAMPLES / "infrastructure"
TERRAFORM, KUBERNETES = INFRASTRUCTURE / "terraform", INFRASTRUCTURE / "kubernetes"
KINDS = {
    "smollm2": ["ServiceAccount", "Deployment", "Service"],
    "kserve": ["ServiceAccount", "InferenceService", "HorizontalPodAutoscaler"],
    "hyperpod": ["ServiceAccount", "InferenceEndpointConfig"],
}
WRONG: list[tuple[str, int, list[Any]]] = [
    ("smollm2", 1, ["spec", "template", "spec", "containers", 0, "readyProbe"]),
    ("kserve", 1, ["spec", "predictor", "minReplica"]),
    ("kserve", 1, ["spec", "predictor", "containers", 0, "readyProbe"]),
    ("kserve", 2, ["spec", "minReplica"]),
    ("hyperpod", 1, ["spec", "worker", "ports"]),
    ("hyperpod", 1, ["spec", "instanceTyp"]),
]
"""Fields that no schema has: the file, the manifest's place in it, and the field's path."""
_CALLERS = "AWS::IAM::ManagedPolicy"


def exported(format: str, path: Path) -> str:
    assert main(["export", str(DEPLOYMENT), "--format", format, "--output", str(path)]) == 0
    return path.read_text()


@pytest.fixture
def template(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "endpoint.json"
    return path, json.loads(exported("cloudformation-json", path))


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / f"{name}.yaml").read_text()))


def at(manifest: Any, path: list[Any]) -> Any:
    for step in path:
        manifest = manifest[step]
    return manifest


def spoiled(name: str, place: int, path: list[Any]) -> list[dict[str, Any]]:
    manifest = manifests(name)[place]
    at(manifest, path[:-1])[path[-1]] = {}
    return [manifest]


def test_terraforms_file_is_what_export_writes(tmp_path: Path) -> None:
    assert (TERRAFORM / "main.tf.json").read_text() == exported("terraform", tmp_path / "main.tf.json")


@pytest.mark.parametrize(
    ("name", "deployment", "place", "only_there"),
    [
        ("smollm2", "smollm2-cpu", ["spec", "template", "spec", "containers", 0, "env"], {}),
        ("kserve", "llama-3-8b-g6e", ["spec", "predictor", "containers", 0, "env"], {"LMI_FRONT": "embedded"}),
        ("hyperpod", "llama-3-8b-g6e", ["spec", "worker", "environmentVariables"], {"LMI_FRONT": "embedded"}),
    ],
)
def test_a_cluster_s_container_has_the_endpoint_s_image_variables_and_ports(
    name: str, deployment: str, place: list[Any], only_there: dict[str, str]
) -> None:
    """The front end with /metrics is chosen where pods scale by them."""
    spec = read_spec(EXAMPLES / f"{deployment}.yaml")
    decision = resolve(spec, "us-east-1").decision
    _, manifest, *_ = manifests(name)
    found = {one["name"]: one["value"] for one in at(manifest, place)}
    assert found == {**environment(spec, decision), **only_there}
    container = at(manifest, place[:-1])
    assert container["image"] == decision.image
    assert container["resources"].get("limits", {}) == ({"nvidia.com/gpu": "1"} if decision.gpus else {})
    probes = container.get("probes", container)
    assert {probes[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")} == {"/ping"}


@pytest.mark.clients
def test_every_schema_takes_the_manifests_and_nothing_else() -> None:
    cases = [*map(manifests, KINDS), *(spoiled(*wrong) for wrong in WRONG)]
    program = [str(kubernetes_environment.python()), str(Path(__file__).with_name("kubernetes_schemas.py"))]
    done = subprocess.run(program, input=json.dumps(cases), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = iter(json.loads(done.stdout))
    for name, kinds in KINDS.items():
        assert [manifest["kind"] for manifest in manifests(name)] == kinds
        assert next(found) == [], name
    for wrong in WRONG:
        assert any(str(wrong[2][-1]) in text for text in next(found)), wrong


@pytest.mark.clients
@pytest.mark.timeout(600)
def test_terraforms_policy_refers_to_what_is_exported() -> None:
    """No provider can be had without a registry, so no Terraform validates it: the syntax, and each name."""
    text = (TERRAFORM / "callers.tf").read_text()
    program = "import hcl2, json, sys; print(json.dumps(hcl2.load(sys.stdin)))"
    done = subprocess.run(
        [str(venvs.python("infrastructure")), "-c", program], input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    blocks = json.loads(done.stdout)
    configuration = json.loads((TERRAFORM / "main.tf.json").read_text())
    stacks = configuration["resource"]["aws_cloudformation_stack"]
    assert {*re.findall(r"aws_cloudformation_stack\.(\w+)", text)} == stacks.keys()
    outputs = json.loads(stacks["endpoint"]["template_body"])["Outputs"]
    assert {*re.findall(r'outputs\["(\w+)"\]', text)} == outputs.keys()
    [names] = blocks["locals"]
    assert {*re.findall(r"local\.(\w+)", text)} == {name for name in names if not name.startswith("__")}


@pytest.mark.clients
@pytest.mark.timeout(600)
def test_cdk_synthesizes_what_is_exported(template: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with skipped_without():
        toolchains.require("node", "nodejs")
    path, expected = template
    program, python = INFRASTRUCTURE / "cdk" / "app.py", str(venvs.python("infrastructure"))
    run(program, path, "--stack", "endpoint", python=python, CDK_OUTDIR=str(tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "endpoint.template.json").read_text())
    resources = found["Resources"]
    [callers] = (resources.pop(name) for name in [*resources] if resources[name]["Type"] == _CALLERS)
    assert resources == expected["Resources"]
    assert found["Outputs"] == expected["Outputs"]
    [statement] = callers["Properties"]["PolicyDocument"]["Statement"]
    assert statement["Resource"] == {"Ref": "Endpoint"}
