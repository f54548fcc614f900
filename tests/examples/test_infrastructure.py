"""What examples/infrastructure has for CDK, Terraform and Kubernetes, against what `lmi deploy export` writes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli.main import main
from tests.clients import toolchains, venvs
from tests.clients.driver import skipped_without
from tests.deploy.unit.export.test_schemas import verdicts
from tests.examples.programs import EXAMPLES, run

DEPLOYMENT = EXAMPLES / "smollm2-cpu.yaml"
INFRASTRUCTURE = EXAMPLES / "infrastructure"
TERRAFORM, KUBERNETES = INFRASTRUCTURE / "terraform", INFRASTRUCTURE / "kubernetes"
EXPORTED = {"terraform": TERRAFORM / "main.tf.json", "kubernetes": KUBERNETES / "smollm2.yaml"}
_CALLERS = "AWS::IAM::ManagedPolicy"


def exported(format: str, path: Path) -> str:
    assert main(["export", str(DEPLOYMENT), "--format", format, "--output", str(path)]) == 0
    return path.read_text()


@pytest.fixture
def template(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "endpoint.json"
    return path, json.loads(exported("cloudformation-json", path))


@pytest.mark.parametrize(("format", "path"), EXPORTED.items())
def test_a_file_is_what_export_writes(format: str, path: Path, tmp_path: Path) -> None:
    assert path.read_text() == exported(format, tmp_path / path.name)


@pytest.mark.clients
def test_kubernetes_takes_the_manifests() -> None:
    manifests = list(yaml.safe_load_all(EXPORTED["kubernetes"].read_text()))
    assert [manifest["kind"] for manifest in manifests] == ["ServiceAccount", "Deployment", "Service"]
    assert list(verdicts([manifests])) == [[]]


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
    configuration = json.loads(EXPORTED["terraform"].read_text())
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
