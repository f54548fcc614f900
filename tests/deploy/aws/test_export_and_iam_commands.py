"""`lmi deploy export` and `lmi deploy iam`, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.aws import Aws
from deploy.cli import iam
from deploy.cli.main import main
from deploy.errors import DeployError, NotAllowed
from deploy.export.cloudformation import cloudformation_template
from deploy.iam.simulation import Denial, caller, denials
from deploy.resources.build import resources
from tests.deploy.cases import decision, spec
from tests.deploy.doubles.aws import CALLER, Cloud
from tests.deploy.doubles.deployments import PLAIN, printed

EXAMPLES = Path(__file__).parents[3] / "examples"
LLAMA = str(EXAMPLES / "llama-3-8b-g6e.yaml")


def commands_printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_cloudformation_is_yaml_and_asks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = yaml.safe_load(commands_printed(capsys, "export", LLAMA))
    assert found["AWSTemplateFormatVersion"] == "2010-09-09"
    variant = found["Resources"]["EndpointConfig"]["Properties"]["ProductionVariants"][0]
    assert variant["InstanceType"] == "ml.g6e.xlarge"
    assert variant["InferenceAmiVersion"] == "al2023-ami-sagemaker-inference-gpu-4-1"
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] >= 600
    assert json.loads(commands_printed(capsys, "export", LLAMA, "--to", "cloudformation-json")) == found


def test_what_the_user_should_know_is_no_part_of_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", LLAMA]) == 0
    assert "note: a single instance cannot be updated in batches" in capsys.readouterr().err


def test_terraform_into_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "main.tf.json"
    assert commands_printed(capsys, "export", LLAMA, "--to", "terraform", "--output", str(file)) == ""
    found = json.loads(file.read_text())
    assert found["provider"] == {"aws": {"region": "us-east-1"}}
    stack = found["resource"]["aws_cloudformation_stack"]["endpoint"]
    template = json.loads(stack["template_body"])
    assert template == json.loads(commands_printed(capsys, "export", LLAMA, "--to", "cloudformation-json"))
    assert template["Resources"]["Endpoint"]["Properties"]["EndpointName"] == "llama-3-8b"


def test_terraform_has_what_cloudformation_has(capsys: pytest.CaptureFixture[str]) -> None:
    found = commands_printed(capsys, "export", str(EXAMPLES / "qwen3-aws-image.yaml"), "--to", "terraform")
    assert "PrefixAwareRoutingConfig" in found


def test_a_program_of_the_sdk(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", LLAMA, "--format", "sdk"]) == 0
    told = capsys.readouterr()
    assert 'endpoint_name="llama-3-8b",' in told.out
    assert "note: a single instance cannot be updated in batches" in told.err
    assert "CloudFormation" not in told.err


def test_a_stack_of_it_is_made(cloud: Cloud) -> None:
    """moto knows SageMaker's three, no alarms, and only instance types without a GPU."""
    said = spec("cpu", instance={"type": "ml.c5.2xlarge"}, alarms=None)
    stacks = cloud.client("cloudformation")
    body = json.dumps(cloudformation_template(resources(said, decision("cpu", instance_type="ml.c5.2xlarge"))))
    stacks.create_stack(StackName="smollm2", TemplateBody=body)
    stack = stacks.describe_stacks(StackName="smollm2")["Stacks"][0]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    assert stack["Outputs"][0]["OutputValue"].startswith("smollm2-Endpoint-")  # moto calls things otherwise
    made = {
        one["LogicalResourceId"] for one in stacks.list_stack_resources(StackName="smollm2")["StackResourceSummaries"]
    }
    assert made == {"Model", "EndpointConfig", "Endpoint"}


def test_a_secret_is_refused_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    setting = ["--set", "environment.HF_TOKEN=abcdefgh"]
    assert main(["export", LLAMA, *setting]) == 2
    assert "abcdefgh" not in capsys.readouterr().err
    assert "abcdefgh" in commands_printed(capsys, "export", LLAMA, *setting, "--allow-plaintext-secret")


def test_policies_all_and_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(commands_printed(capsys, "iam", LLAMA))
    assert list(found) == ["trust", "execution-role", "deployer", "invoker", "checker"]
    assert json.loads(commands_printed(capsys, "iam", LLAMA, "--who", "invoker")) == found["invoker"]


MANY = [{"name": f"adapter-{number:03}", "artifact": f"s3://models/{number:03}.tar.gz"} for number in range(60)]


def test_a_policy_that_is_too_long_is_printed_in_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = ["--set", f"components={json.dumps([{'name': 'chat', 'adapters': MANY}])}"]
    assert main(["iam", LLAMA, *many]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert {"trust", "execution-role-1", "deployer-1", "deployer-2", "invoker-1"} <= found.keys()
    assert not {"execution-role", "deployer", "invoker"} & found.keys()
    assert "note: deployer: " in said.err
    assert "a managed policy may have at most 6,144. It is split into" in said.err
    assert main(["iam", LLAMA, *many, "--who", "deployer"]) == 2
    assert "Print the first part with --who deployer-1." in capsys.readouterr().err
    assert json.loads(commands_printed(capsys, "iam", LLAMA, *many, "--who", "deployer-2")) == found["deployer-2"]
    assert main(["iam", LLAMA, "--who", "deployer-2"]) == 2
    assert "there is no such policy or part" in capsys.readouterr().err
    assert main(["iam", LLAMA, "--check", "--who", "deployer-2"]) == 2
    assert "Pass --who deployer." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["iam", LLAMA, "--who", "somebody"])
    assert "must be one of trust" in capsys.readouterr().err


def test_a_printed_policy_is_one_that_iam_takes(capsys: pytest.CaptureFixture[str], cloud: Cloud) -> None:
    """moto checks a policy's grammar as IAM does."""
    client = cloud.client("iam")
    for example in sorted(EXAMPLES.glob("*.yaml")):
        found = json.loads(commands_printed(capsys, "iam", str(example)))
        name = example.stem
        client.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(found["trust"]))
        for who in ("execution-role", "deployer", "invoker", "checker"):
            client.create_policy(PolicyName=f"{name}-{who}", PolicyDocument=json.dumps(found[who]))


def test_the_check_says_what_is_denied_and_to_whom(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def denied(aws: Any, principal: str, policy: dict[str, Any]) -> tuple[Denial, ...]:
        asked.append((principal, policy["Statement"][0]["Sid"]))
        return (Denial("iam:PassRole", "arn:x", "implicitDeny"),) if principal.endswith("user/ann") else ()

    monkeypatch.setattr(iam, "denials", denied)
    monkeypatch.setattr(iam, "caller", lambda aws: "arn:aws:iam::123456789012:user/ann")
    assert main(["iam", LLAMA, "--check"]) == 3
    said = capsys.readouterr().out
    assert "execution-role: arn:aws:iam::123456789012:role/lmi-endpoint: all allowed" in said
    assert "deployer: arn:aws:iam::123456789012:user/ann: 1 denied" in said
    assert "  iam:PassRole on arn:x: implicitDeny" in said
    assert asked == [
        ("arn:aws:iam::123456789012:role/lmi-endpoint", "Metrics"),
        ("arn:aws:iam::123456789012:user/ann", "SageMaker"),
    ]
    other = "arn:aws:iam::123456789012:role/other"
    assert main(["iam", LLAMA, "--check", "--who", "invoker", "--principal", other]) == 0
    assert asked[-1] == (other, "Invoke")


@pytest.mark.parametrize(("who", "allowed"), [("checker", True), ("deployer", False)])
def test_the_check_needs_its_own_policy(cloud: Cloud, who: str, allowed: bool) -> None:
    """moto simulates nothing, but IAM's decision comes first."""
    cloud.policies[CALLER] = [printed(PLAIN, who)]
    with pytest.raises(
        DeployError, match="moto does not support it" if allowed else "SimulatePrincipalPolicy"
    ) as raised:
        denials(Aws("us-east-1"), f"arn:aws:iam::123456789012:user/{CALLER}", printed(PLAIN))
    assert isinstance(raised.value, NotAllowed) is not allowed
    assert ("--who checker" in raised.value.advice) is not allowed
    assert [need.action for need in cloud.denied] == ["iam:SimulatePrincipalPolicy"] * (not allowed)
    cloud.denied.clear()


def test_trust_cannot_be_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["iam", LLAMA, "--check", "--who", "trust"]) == 2
    assert "trust" in capsys.readouterr().err


# -- the caller, as STS and IAM name it --------------------------------------------------------------------------------


@pytest.mark.parametrize(("arn", "path", "who"), [
    ("arn:aws:iam::123456789012:user/ann", None, "arn:aws:iam::123456789012:user/ann"),
    ("arn:aws:sts::123456789012:assumed-role/Dev/ann", "/sso/", "arn:aws:iam::123456789012:role/sso/Dev"),
    ("arn:aws:sts::123456789012:assumed-role/Dev/ann", None, "arn:aws:iam::123456789012:role/Dev"),
])  # fmt: skip
def test_the_caller_of_a_session_is_its_role(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, arn: str, path: str | None, who: str
) -> None:
    if path is not None:
        cloud.client("iam").create_role(RoleName="Dev", Path=path, AssumeRolePolicyDocument="{}")
    # The deployer's own role is in no specification: who has one with a path needs this beside the printed policy.
    own = {"Effect": "Allow", "Action": "iam:GetRole", "Resource": "arn:aws:iam::123456789012:role/*"}
    cloud.policies[CALLER] = [printed(PLAIN), {"Statement": [own]}]
    aws = Aws("us-east-1")
    monkeypatch.setattr(aws.client("sts"), "get_caller_identity", lambda: {"Arn": arn})
    assert caller(aws) == who
