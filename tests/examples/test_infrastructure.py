"""The specifications of examples/, and examples/infrastructure: CDK, Terraform, Kubernetes, GitHub's workflow."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli.main import main, make_parser
from deploy.export.cloudformation import cloudformation_template
from deploy.iam.policies import policies
from deploy.resolve.resolver import resolve
from deploy.resources.build import resources
from deploy.resources.environment import environment
from deploy.resources.resource import Kind
from deploy.spec.reading import read_spec
from tests.clients import toolchains
from tests.clients.driver import skipped_without
from tests.container.images.dockerfile import ROOT, read
from tests.docs.blocks import programs
from tests.examples import kubernetes_environment
from tests.examples.programs import EXAMPLES, run

# -- the files of examples/infrastructure: against what `lmi deploy export` writes, and clusters' schemas --------------


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
def test_a_cluster_s_container_has_the_endpoint_s_image_and_variables(
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
        [str(toolchains.python("infrastructure")), "-c", program], input=text, capture_output=True, text=True
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
@pytest.mark.nightly  # tests/deploy/test_cloudformation.py has AWS's linter read the same
@pytest.mark.timeout(600)
def test_cdk_synthesizes_what_is_exported(template: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with skipped_without():
        toolchains.require("node", "nodejs")
    path, expected = template
    program, python = INFRASTRUCTURE / "cdk" / "app.py", str(toolchains.python("infrastructure"))
    run(program, path, "--stack", "endpoint", python=python, CDK_OUTDIR=str(tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "endpoint.template.json").read_text())
    resources = found["Resources"]
    [callers] = (resources.pop(name) for name in [*resources] if resources[name]["Type"] == _CALLERS)
    assert resources == expected["Resources"]
    assert found["Outputs"] == expected["Outputs"]
    [statement] = callers["Properties"]["PolicyDocument"]["Statement"]
    assert statement["Resource"] == {"Ref": "Endpoint"}


# -- the specifications in examples/, each a deployment ----------------------------------------------------------------


DEPLOYMENTS = sorted(EXAMPLES.glob("*.yaml"))
DEPLOYMENTS_KINDS = {
    "adapters": {Kind.COMPONENT},
    "llama-3-8b-g6": set(),
    "llama-3-8b-g6e": set(),
    "llama-3-8b-isolated": set(),
    "llama-3-8b-scale-to-zero": {Kind.COMPONENT, Kind.SCALABLE_TARGET, Kind.SCALING_POLICY},
    "llamacpp-graviton": set(),
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
        Kind.MODEL, Kind.ENDPOINT_CONFIG, Kind.ENDPOINT, Kind.ALARM, *DEPLOYMENTS_KINDS[path.stem],
    }  # fmt: skip
    assert cloudformation_template(made)["Resources"]
    assert policies(spec, decision)["deployer"]["Statement"]


def test_every_example_is_expected() -> None:
    assert {path.stem for path in DEPLOYMENTS} == set(DEPLOYMENTS_KINDS)


def test_the_first_endpoint_shows_its_example() -> None:
    _, _, example = (EXAMPLES / "llama-3-8b-g6.yaml").read_text().partition("\n")
    assert f"```yaml\n{example}```" in (EXAMPLES.parent / "docs" / "first-endpoint.md").read_text()


# -- github ------------------------------------------------------------------------------------------------------------
# examples/infrastructure/github: each command against the Dockerfile and `lmi deploy`, as no runner is here.


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
        arguments = make_parser("lmi deploy").parse_args(words)
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
