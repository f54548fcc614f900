"""Permissions that a deployment needs: by AWS's authorization reference, and by IAM's simulation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from deploy.aws import Aws
from deploy.emulator.authorization import (
    Permission,
    Unexplained,
    Where,
    allowed,
    needs_of_action,
    needs_of_invocation,
    needs_of_s3,
    reference,
)
from deploy.errors import DeployError, NotAllowed
from deploy.iam.policies import policies
from deploy.iam.simulation import Denial, denials
from deploy.resolve.images import registry_suffix
from deploy.spec.components import servers
from tests.deploy.cases import CASES, KEY, decision, execution_role, invoker, spec
from tests.one_test import in_one_test

# -- the printed policies held against what AWS's authorization reference asks for, and the evaluation itself ----------


ACCOUNT = "123456789012"
IRELAND = Where("eu-west-1", ACCOUNT)
PARTITIONS = {
    "eu-west-1": "aws",
    "cn-north-1": "aws-cn",
    "us-gov-west-1": "aws-us-gov",
    "eusc-de-east-1": "aws-eusc",
    "us-iso-east-1": "aws-iso",
    "us-isob-east-1": "aws-iso-b",
    "eu-isoe-west-1": "aws-iso-e",
    "us-isof-south-1": "aws-iso-f",
}


def statement(**changes: Any) -> dict[str, Any]:
    given = {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": ["arn:aws:s3:::b/*"], **changes}
    return {"Version": "2012-10-17", "Statement": [given]}


OBJECT = Permission("s3:GetObject", "arn:aws:s3:::b/k", {"s3:authType": "REST"})


@in_one_test(("changes", "yes"), [
    ({}, True),
    ({"Action": ["S3:getobject"]}, True),  # IAM heeds no case of actions,
    ({"Action": ["s3:Get*"]}, True),
    ({"Action": ["s3:Ge?Object"]}, True),
    ({"Action": ["s3:GetObjectVersion"]}, False),
    ({"Resource": "*"}, True),
    ({"Resource": ["arn:aws:s3:::B/*"]}, False),  # but of resources,
    ({"Resource": ["arn:aws:s3:*"]}, False),  # where a wildcard stands for what is between two colons.
    ({"Resource": ["arn:aws-cn:s3:::b/*"]}, False),
    ({"Effect": "Deny"}, False),
    ({"Condition": {"StringEquals": {"S3:AuthType": "REST"}}}, True),
    ({"Condition": {"StringEquals": {"s3:authType": ["POST", "REST"]}}}, True),
    ({"Condition": {"StringEquals": {"s3:authType": "POST"}}}, False),
    ({"Condition": {"StringLike": {"s3:prefix": "*"}}}, False),  # a key that the request has not
    ({"Condition": {"StringLikeIfExists": {"s3:prefix": "x"}}}, True),
])  # fmt: skip
def test_the_evaluation(changes: dict[str, Any], yes: bool) -> None:
    assert allowed([statement(**changes)], OBJECT) is yes


def test_a_denial_wins_and_policies_add_up() -> None:
    other = statement(Action=["s3:PutObject"])
    assert allowed([other, statement()], OBJECT)
    assert not allowed([statement(), statement(Effect="Deny", Action="*", Resource="*")], OBJECT)


def test_what_takes_no_resource_is_asked_for_as_a_star() -> None:
    assert list(needs_of_action("logs:DescribeLogGroups", {"logGroupName": "g"}, IRELAND)) == [
        Permission("logs:DescribeLogGroups", "*")
    ]
    scoped = statement(Action="logs:*", Resource="arn:aws:logs:eu-west-1:123456789012:log-group:*")
    assert not allowed([scoped], Permission("logs:DescribeLogGroups", "*"))


def test_an_action_that_is_none_and_a_resource_that_is_not_told_are_errors() -> None:
    with pytest.raises(Unexplained, match="is not in the service authorization reference"):
        list(needs_of_action("sagemaker:CreateEndpoints", {}, IRELAND))
    with pytest.raises(Unexplained, match="the request names no endpoint"):
        list(needs_of_action("sagemaker:DescribeEndpoint", {}, IRELAND))


UNLISTED = {"CallWithBearerToken", "InvokeEndpointWithBidirectionalStream"}
"""Actions of AWS's guides that the packaged reference lacks."""


@in_one_test("case", CASES)
def test_every_printed_action_is_one(case: str) -> None:
    """IAM takes a policy with a misspelt action without a word."""
    said = spec(case)
    for who, policy in policies(said, decision(case)).items():
        for one in policy["Statement"]:
            for action in [one["Action"]] if who == "trust" else one["Action"]:
                prefix, _, name = action.partition(":")
                assert name in reference()[prefix]["privileges"] or name in UNLISTED, action


def of_the_role(case: str, where: Where, image: str, **changes: Any) -> Iterator[Permission]:
    """What SageMaker and the container do with the role: the developer guide's list, and the container's own call."""
    said, decided = spec(case, **changes), decision(case)
    yield from needs_of_action("ecr:GetAuthorizationToken", {}, where)
    images = [image, *(decided.of(server).image for server in servers(said) if decided.components)]
    for uri, verb in product(images, ("BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer")):
        pull = {"repositoryName": uri.partition("/")[2].partition("@")[0].partition(":")[0], "registryId": uri[:12]}
        yield from needs_of_action(f"ecr:{verb}", pull, where)
    own = [f"Endpoints/{said.name}"] if said.endpoint is None else []
    for name in (*own, *(f"InferenceComponents/{item.name}" for item in said.components)):
        log = {"logGroupName": f"/aws/sagemaker/{name}", "logStreamName": "AllTraffic/i-1"}
        for verb in ("CreateLogGroup", "CreateLogStream", "DescribeLogStreams", "PutLogEvents"):
            yield from needs_of_action(f"logs:{verb}", log, where)
    yield from needs_of_action("cloudwatch:PutMetricData", {}, where)
    for data in {decided.of(server).model_data for server in servers(said)} - {None}:
        bucket, _, prefix = str(data).removeprefix("s3://").partition("/")
        yield from needs_of_action("s3:GetObject", {"Bucket": bucket, "Key": f"{prefix}config.json"}, where)
        yield from needs_of_action("s3:ListBucket", {"Bucket": bucket}, where, **{"s3:prefix": prefix})
    if (key := said.encryption.model_key) is not None:
        via = {"kms:ViaService": f"s3.{where.region}.{where.suffix}"}
        yield from needs_of_action("kms:Decrypt", {"KeyId": key}, where, **via)
    if said.alarms is not None:
        yield from needs_of_action("cloudwatch:DescribeAlarms", {"AlarmName": f"{said.name}/5xx"}, where)
    for secret in {server.model.token_secret for server in servers(said)} - {None}:
        yield from needs_of_action("secretsmanager:GetSecretValue", {"SecretId": secret}, where)
        if (key := said.encryption.secret_key) is not None:
            via = {"kms:ViaService": f"secretsmanager.{where.region}.{where.suffix}"}
            yield from needs_of_action("kms:Decrypt", {"KeyId": key}, where, **via)
    if said.asynchronous is not None:
        for verb in ("PutObject", "GetObject"):
            yield from needs_of_action(f"s3:{verb}", {"Bucket": "answers", "Key": "llama/1.out"}, where)
        for topic in said.asynchronous.topics:
            yield from needs_of_action("sns:Publish", {"TopicArn": topic}, where)
        for verb, (key, service) in product(
            ("Decrypt", "GenerateDataKey"),
            ((said.encryption.output_key, "s3"), (said.encryption.topic_key, "sns")),
        ):
            if key is not None:
                via = {"kms:ViaService": f"{service}.{where.region}.{where.suffix}"}
                yield from needs_of_action(f"kms:{verb}", {"KeyId": key}, where, **via)
    if said.encryption.volume_key is not None:
        grant = {"kms:GrantIsForAWSResource": "true"}
        yield from needs_of_action("kms:CreateGrant", {"KeyId": said.encryption.volume_key}, where, **grant)


@in_one_test("case", CASES)
def test_the_role_may_do_what_is_done_with_it(case: str) -> None:
    policy = execution_role(spec(case), decision(case))
    needs = list(of_the_role(case, IRELAND, decision(case).image))
    assert [str(need) for need in needs if not allowed([policy], need)] == []


@in_one_test("region", PARTITIONS)
def test_the_role_in_every_partition(region: str) -> None:
    where = Where(region, ACCOUNT)
    assert where.partition == PARTITIONS[region]
    image = f"{ACCOUNT}.dkr.ecr.{region}.{registry_suffix(region)}/lmi@sha256:{'ab' * 32}"
    key = f"arn:{where.partition}:kms:{region}:{ACCOUNT}:key/11111111-2222-3333-4444-555555555555"
    encryption = {"model_key": key}
    said = spec("components", role=f"arn:{where.partition}:iam::{ACCOUNT}:role/lmi", encryption=encryption)
    policy = execution_role(said, decision("components", region=region, image=image))
    needs = list(of_the_role("components", where, image, encryption=encryption))
    assert [str(need) for need in needs if not allowed([policy], need)] == []


@in_one_test("region", PARTITIONS)
def test_the_role_of_an_asynchronous_endpoint_in_every_partition(region: str) -> None:
    """With a key for each thing that it reads, writes and publishes."""
    where = Where(region, ACCOUNT)
    image = f"{ACCOUNT}.dkr.ecr.{region}.{registry_suffix(region)}/lmi@sha256:{'ab' * 32}"
    head = f"arn:{where.partition}:%s:{region}:{ACCOUNT}"
    keys = [f"{head % 'kms'}:key/11111111-2222-3333-4444-55555555555{number}" for number in range(4)]
    said = spec("asynchronous")
    changes = {
        "role": f"arn:{where.partition}:iam::{ACCOUNT}:role/lmi",
        "model": {"id": "org/model", "token_secret": f"{head % 'secretsmanager'}:secret:hub-AbCdEf"},
        "async": {"output": said.asynchronous.output, "notify_error": f"{head % 'sns'}:bad"}
        if said.asynchronous
        else {},
        "encryption": dict(zip(("secret_key", "volume_key", "output_key", "topic_key"), keys, strict=True)),
    }
    policy = execution_role(spec("asynchronous", **changes), decision("asynchronous", region=region, image=image))
    needs = list(of_the_role("asynchronous", where, image, **changes))
    assert len([need for need in needs if need.action.startswith("kms:")]) == 6
    assert [str(need) for need in needs if not allowed([policy], need)] == []


def test_the_invoker_of_a_bucket_with_a_key() -> None:
    """A request is stored beside the answers, and the bucket may encrypt both with the answers' key."""
    policy = invoker(spec("asynchronous"), decision("asynchronous"))
    for method in ("PUT", "GET"):
        needs = list(needs_of_s3(method, "answers", "llama/1.out", {}, b"", IRELAND, KEY))
        assert len(needs) == 2
        assert [str(need) for need in needs if not allowed([policy], need)] == []


@pytest.mark.parametrize("path", [
    "/endpoints/llama/invocations",
    "/endpoints/llama/invocations-response-stream",
    "/endpoints/llama/inference-components/llama-chat/openai/v1/chat/completions",
])  # fmt: skip
def test_the_invoker_may_send_every_request(path: str) -> None:
    policy = invoker(spec("components"), decision("components"))
    needs = list(needs_of_invocation(path, "llama-french", IRELAND, bearer="openai" in path))
    assert [str(need) for need in needs if not allowed([policy], need)] == []


# -- moto does not simulate policies: botocore's own stub stands for IAM, and validates what it is asked ---------------


ROLE = "arn:aws:iam::123456789012:role/lmi"


POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Sid": "Role",
            "Effect": "Allow",
            "Action": ["iam:PassRole"],
            "Resource": [ROLE],
            "Condition": {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}},
        },
        {
            "Sid": "Data",
            "Effect": "Allow",
            "Action": ["s3:GetObject"],
            "Resource": ["arn:aws:s3:::b/*", "arn:aws:s3:::c/*"],
        },
    ],
}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> tuple[Aws, Stubber]:
    aws = Aws("us-east-1")
    client = boto3.client("iam")
    monkeypatch.setattr(aws, "client", lambda service: client)
    stubber = Stubber(client)
    stubber.activate()
    return aws, stubber


def result(action: str, resource: str, decision: str, **more: Any) -> dict[str, Any]:
    return {"EvalActionName": action, "EvalResourceName": resource, "EvalDecision": decision, **more}


def test_what_is_denied_is_named_with_its_resource(stub: tuple[Aws, Stubber]) -> None:
    aws, stubber = stub
    stubber.add_response(
        "simulate_principal_policy",
        {"EvaluationResults": [result("iam:PassRole", ROLE, "explicitDeny")]},
        {
            "PolicySourceArn": ROLE,
            "ActionNames": ["iam:PassRole"],
            "ResourceArns": [ROLE],
            "ContextEntries": [
                {
                    "ContextKeyName": "iam:PassedToService",
                    "ContextKeyValues": ["sagemaker.amazonaws.com"],
                    "ContextKeyType": "string",
                }
            ],
        },
    )
    each = [
        {"EvalResourceName": "arn:aws:s3:::b/x", "EvalResourceDecision": "allowed"},
        {"EvalResourceName": "arn:aws:s3:::c/x", "EvalResourceDecision": "implicitDeny"},
    ]
    stubber.add_response(
        "simulate_principal_policy",
        {"EvaluationResults": [result("s3:GetObject", "*", "implicitDeny", ResourceSpecificResults=each)]},
        {
            "PolicySourceArn": ROLE,
            "ActionNames": ["s3:GetObject"],
            "ResourceArns": ["arn:aws:s3:::b/x", "arn:aws:s3:::c/x"],
            "ContextEntries": [],
        },
    )
    assert denials(aws, ROLE, POLICY) == (
        Denial("iam:PassRole", ROLE, "explicitDeny"),
        Denial("s3:GetObject", "arn:aws:s3:::c/x", "implicitDeny"),
    )
    stubber.assert_no_pending_responses()


def test_who_may_not_simulate_is_told_what_that_needs(stub: tuple[Aws, Stubber]) -> None:
    aws, stubber = stub
    stubber.add_client_error("simulate_principal_policy", "AccessDenied", "no", expected_params=None)
    with pytest.raises(NotAllowed) as raised:
        denials(aws, ROLE, POLICY)
    assert "iam:SimulatePrincipalPolicy" in raised.value.advice


def test_a_role_that_is_not_there(stub: tuple[Aws, Stubber]) -> None:
    aws, stubber = stub
    stubber.add_client_error("simulate_principal_policy", "NoSuchEntity", "cannot be found")
    with pytest.raises(DeployError, match="role/lmi: SimulatePrincipalPolicy: NoSuchEntity"):
        denials(aws, ROLE, POLICY)
