"""The printed policies, whole and in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import deploy
from deploy.deployer.calls import CALLS
from deploy.iam.policies import MOST, Policy, length, parts, policies
from deploy.resolve.decision import Decision
from deploy.resolve.images import registry_suffix
from deploy.spec import Spec
from tests.deploy.cases import CASES, KEY, ROLE, SECRET, TOPIC, decision, deployer, execution_role, invoker, spec
from tests.one_test import in_one_test

ACCOUNT = "123456789012"


def statement(policy: Policy, sid: str) -> dict[str, Any]:
    (found,) = [one for one in policy["Statement"] if one["Sid"] == sid]
    return dict(found)


def sids(policy: Policy) -> set[str]:
    return {one["Sid"] for one in policy["Statement"]}


def actions(policy: Policy) -> set[str]:
    return {action for one in policy["Statement"] for action in one["Action"]}


def test_only_sagemaker_of_this_account_may_be_the_role() -> None:
    (only,) = policies(spec("plain"), decision("plain"))["trust"]["Statement"]
    assert only["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    assert only["Condition"] == {"StringEquals": {"aws:SourceAccount": ACCOUNT}}


def test_the_role_of_a_model_of_the_hub() -> None:
    policy = execution_role(spec("plain"), decision("plain"))
    assert sids(policy) == {"Metrics", "Logs", "ImageLogin", "Image", "Rollback", "HubToken"}
    assert statement(policy, "HubToken")["Resource"] == [SECRET]
    assert statement(policy, "Image")["Resource"] == [f"arn:aws:ecr:eu-west-1:{ACCOUNT}:repository/lmi-handler"]
    group = f"arn:aws:logs:eu-west-1:{ACCOUNT}:log-group:/aws/sagemaker/Endpoints/llama"
    assert statement(policy, "Logs")["Resource"] == [group, f"{group}:*"]
    assert statement(policy, "Rollback")["Resource"] == [f"arn:aws:cloudwatch:eu-west-1:{ACCOUNT}:alarm:llama/*"]


def test_the_role_of_components_reads_their_data_and_nothing_else() -> None:
    policy = execution_role(spec("components"), decision("components"))
    assert "HubToken" not in sids(policy)
    assert statement(policy, "ModelData")["Resource"] == [
        "arn:aws:s3:::models/llama-3-8b/*",
        "arn:aws:s3:::models/adapters/french.tar.gz",
        "arn:aws:s3:::models/adapters/legal.tar.gz",
    ]
    listed = statement(policy, "ModelDataListed")
    assert listed["Resource"] == ["arn:aws:s3:::models"]
    assert "llama-3-8b/*" in listed["Condition"]["StringLike"]["s3:prefix"]
    assert any("/aws/sagemaker/InferenceComponents/llama-chat" in one for one in statement(policy, "Logs")["Resource"])


def test_the_role_of_a_network_and_a_key_of_ones_own() -> None:
    policy = execution_role(spec("isolated"), decision("isolated"))
    assert len([one for one in statement(policy, "Network")["Action"] if one.startswith("ec2:")]) == 9
    grant = statement(policy, "VolumeKey")
    assert grant["Action"] == ["kms:CreateGrant"]
    assert grant["Resource"] == [KEY]
    assert grant["Condition"] == {"Bool": {"kms:GrantIsForAWSResource": "true"}}


def test_the_key_of_the_models_bucket_is_for_s3_alone() -> None:
    said = spec("isolated", encryption={"model_key": KEY})
    role, ours = (policy(said, decision("isolated")) for policy in (execution_role, deployer))
    via = {"StringLike": {"kms:ViaService": "s3.eu-west-1.*"}}
    assert statement(role, "ModelKey") == {
        "Sid": "ModelKey", "Effect": "Allow", "Action": ["kms:Decrypt"], "Resource": [KEY], "Condition": via
    }  # fmt: skip
    assert statement(ours, "ModelKey")["Action"] == ["kms:Decrypt", "kms:GenerateDataKey"]
    in_s3 = spec("components", encryption={"model_key": "alias/models"})
    reading = statement(deployer(in_s3, decision("components")), "ModelKey")
    assert reading["Action"] == ["kms:Decrypt"]
    assert reading["Condition"] == {**via, "ForAnyValue:StringEquals": {"kms:ResourceAliases": "alias/models"}}


def test_a_key_by_its_alias_or_id() -> None:
    said = spec("isolated", encryption={"volume_key": "alias/lmi"})
    grant = statement(execution_role(said, decision("isolated")), "VolumeKey")
    assert grant["Resource"] == [f"arn:aws:kms:eu-west-1:{ACCOUNT}:key/*"]
    assert grant["Condition"]["ForAnyValue:StringEquals"] == {"kms:ResourceAliases": "alias/lmi"}
    said = spec("isolated", encryption={"volume_key": "11111111-2222-3333-4444-555555555555"})
    assert statement(execution_role(said, decision("isolated")), "VolumeKeyShown")["Resource"] == [KEY]


def test_the_keys_of_secret_and_topics_are_for_their_services_alone() -> None:
    said = spec("asynchronous", encryption={"secret_key": KEY, "topic_key": "alias/topics"})
    role = execution_role(said, decision("asynchronous"))
    secret, topics = statement(role, "HubTokenKey"), statement(role, "NoticesKey")
    assert (secret["Action"], secret["Resource"]) == (["kms:Decrypt"], [KEY])
    assert secret["Condition"] == {"StringLike": {"kms:ViaService": "secretsmanager.eu-west-1.*"}}
    assert topics["Action"] == ["kms:Decrypt", "kms:GenerateDataKey"]
    assert topics["Condition"]["StringLike"] == {"kms:ViaService": "sns.eu-west-1.*"}
    assert topics["Condition"]["ForAnyValue:StringEquals"] == {"kms:ResourceAliases": "alias/topics"}
    # The deployer reads neither the secret nor publishes: it looks which keys there are.
    ours = deployer(said, decision("asynchronous"))
    assert {"kms:Decrypt", "kms:GenerateDataKey"} & actions(ours) == set()
    assert {"kms:DescribeKey", "sns:GetTopicAttributes", "secretsmanager:DescribeSecret"} <= actions(ours)


def test_the_role_of_an_asynchronous_endpoint() -> None:
    policy = execution_role(spec("asynchronous"), decision("asynchronous"))
    assert statement(policy, "Answers")["Resource"] == [
        "arn:aws:s3:::answers/llama/*",
        "arn:aws:s3:::answers/failed/*",
    ]
    assert statement(policy, "Notices")["Resource"] == [TOPIC]
    assert statement(policy, "AnswersKey")["Action"] == ["kms:Decrypt", "kms:GenerateDataKey"]


def test_the_deployer_may_pass_this_role_to_sagemaker_only() -> None:
    role = statement(deployer(spec("plain"), decision("plain")), "Role")
    assert role["Resource"] == [ROLE]
    assert role["Condition"] == {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}


def test_the_deployer_touches_this_deployment_only() -> None:
    resources = statement(deployer(spec("components"), decision("components")), "SageMaker")["Resource"]
    base = f"arn:aws:sagemaker:eu-west-1:{ACCOUNT}"
    assert resources == [
        f"{base}:model/llama-*",
        f"{base}:endpoint-config/llama-*",
        f"{base}:endpoint/llama",
        *(
            f"{base}:inference-component/{name}"
            for name in ("llama-chat", "llama-french", "llama-legal", "llama-batch")
        ),
    ]


def test_names_with_capitals_are_allowed_as_arns_spell_them() -> None:
    resources = statement(deployer(spec("plain", name="Llama"), decision("plain")), "SageMaker")["Resource"]
    assert {one.rsplit(":", 1)[1] for one in resources} >= {"endpoint/Llama", "endpoint/llama", "model/llama-*"}


@in_one_test("kind", CALLS)
def test_the_deployer_may_make_every_call_of_the_table(kind: Any) -> None:
    calls = CALLS[kind]
    allowed = {action.lower() for action in actions(deployer(spec("components"), decision("components")))}
    for call in {calls.create, calls.update or calls.create, calls.describe, calls.delete}:
        assert f"{calls.service}:{call.replace('_', '')}" in allowed


PLAN = "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/llama"
_SERVICES = {"service-quotas": "servicequotas"}
_OF_S3 = {
    "list_objects_v2": "ListBucket",
    "head_bucket": "ListBucket",
    "head_object": "GetObject",
    "get_bucket_encryption": "GetEncryptionConfiguration",
    "delete_objects": "DeleteObject",
    "create_multipart_upload": "PutObject",
    "upload_part": "PutObject",
    "complete_multipart_upload": "PutObject",
    "list_multipart_uploads": "ListBucketMultipartUploads",
    "list_parts": "ListMultipartUploadParts",
}  # operations that IAM calls otherwise
_OPERATION = r'\.(?:get_paginator\("(\w+)"\)|(\w+)\()'
_AT_ONCE = re.compile(r'client\("([a-z0-9-]+)"\)' + _OPERATION)
_OF_NAMED = re.compile(r"\b(\w+)" + _OPERATION)
_NAMED = re.compile(r'(\w+)(?:: Any)? = (?:\w+\.)*client\("([a-z0-9-]+)"\)$', re.MULTILINE)


def called(source: str) -> Iterator[tuple[str, str]]:
    """Service and operation of the AWS calls that a module makes by their names."""
    clients = dict(_NAMED.findall(source))
    calls = [(service, *operation) for service, *operation in _AT_ONCE.findall(source)]
    calls += [(clients[name], *operation) for name, *operation in _OF_NAMED.findall(source) if name in clients]
    for service, paginated, plain in calls:
        if plain != "get_paginator":
            yield service, paginated or plain


def test_the_deployer_may_make_every_call_that_the_source_names() -> None:
    said = spec("isolated", model={"path": "models/llama", "upload": "s3://models/llama/"}, **_EVERYTHING)
    allowed = {action.lower() for action in actions(deployer(said, decision("isolated")))}
    batch = {"input": "s3://data/in/", "output": "s3://data/out/"}
    for case in ("plain", "asynchronous"):  # with a secret, and with topics
        allowed |= {action.lower() for action in actions(deployer(spec(case, batch=batch), decision(case)))}
    allowed |= {action.lower() for action in actions(deployer(spec("plain", reservation=PLAN), decision("plain")))}
    modules = [module for module in Path(deploy.__file__).parent.rglob("*.py") if module.name != "doctor.py"]
    found = {call for module in modules for call in called(module.read_text())}
    assert ("sts", "get_caller_identity") in found
    assert ("s3", "list_multipart_uploads") in found
    for service, operation in sorted(found):
        if service == "sts":  # needs no permission
            continue
        action = _OF_S3.get(operation) if service == "s3" else None
        name = f"{_SERVICES.get(service, service)}:{action or operation.replace('_', '')}".lower()
        assert name in allowed, f"{service}.{operation}"


_BESIDE = {
    "cloudwatch:PutMetricAlarm", "iam:CreateServiceLinkedRole", "iam:PassRole", "kms:CreateGrant", "kms:Decrypt",
    "kms:GenerateDataKey",  # what AWS does in the caller's name
    "ecr:BatchCheckLayerAvailability", "ecr:CompleteLayerUpload", "ecr:GetAuthorizationToken",
    "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart",  # `docker push`
}  # fmt: skip
"""What no call of ours is named after."""


@in_one_test("case", CASES)
def test_the_deployer_may_do_nothing_that_no_call_needs(case: str) -> None:
    """Every action is that of an operation which the source names."""
    root = Path(deploy.__file__).parent
    modules = [one for one in root.rglob("*.py") if one.relative_to(root).parts[0] not in ("iam", "rehearsal")]
    words = set(re.findall(r"\w+", "\n".join(one.read_text() for one in (*modules, root / "iam" / "simulation.py"))))
    batch = {"input": "s3://data/in/", "output": "s3://data/out/"}
    needless = []
    said = spec(case, **({"batch": batch} if case in ("plain", "isolated") else {}))
    for action in actions(deployer(said, decision(case))) - _BESIDE:
        service, _, name = action.partition(":")
        operations = [operation for operation, of in _OF_S3.items() if service == "s3" and of == name]
        if not {re.sub("(?<!^)([A-Z])", r"_\1", name).lower(), *operations} & words:
            needless.append(action)
    assert needless == []


_EVERYTHING: dict[str, Any] = {
    "components": [{"name": "chat"}],
    "scaling": {"min": 1, "max": 2, "concurrency": 4},
}


def test_pushing_is_for_ones_own_repository() -> None:
    assert "ecr:PutImage" in actions(deployer(spec("plain"), decision("plain")))
    awss = deployer(spec("aws-image"), decision("aws-image"))
    assert "ecr:PutImage" not in actions(awss)
    assert "ecr:DescribeImages" in actions(awss)
    assert "ecr:GetAuthorizationToken" not in actions(awss)
    assert "Image" not in sids(deployer(spec("plain"), decision("plain", image="registry.example.com/lmi:1")))


def test_uploading_is_for_a_path_here() -> None:
    assert "s3:PutObject" in actions(deployer(spec("isolated"), decision("isolated")))
    assert "s3:PutObject" not in actions(deployer(spec("components"), decision("components")))


def test_the_invoker() -> None:
    policy = invoker(spec("components"), decision("components"))
    assert sids(policy) == {"Invoke", "ComponentsListed", "ComponentsShown", "OpenAiRoute"}
    assert len(statement(policy, "Invoke")["Resource"]) == 5
    asynchronous = invoker(spec("asynchronous"), decision("asynchronous"))
    assert actions(asynchronous) == {
        "sagemaker:InvokeEndpointAsync", "s3:GetObject", "s3:ListBucket", "s3:PutObject", "kms:Decrypt",
        "kms:GenerateDataKey",
    }  # fmt: skip


def test_chinas_partition_is_kept() -> None:
    said = spec("components", role="arn:aws-cn:iam::123456789012:role/lmi")
    policy = execution_role(said, decision("components", region="cn-north-1"))
    resources = [one for each in policy["Statement"] for one in each["Resource"] if one != "*"]
    assert all(one.startswith("arn:aws-cn:") for one in resources)


@in_one_test("case", CASES)
def test_statements_have_names_of_their_own(case: str) -> None:
    for policy in policies(spec(case), decision(case)).values():
        names = [one["Sid"] for one in policy["Statement"] if "Sid" in one]
        assert len(set(names)) == len(names)
        assert all(name.isalnum() for name in names)


# -- policies that are longer than AWS takes come in parts, which together allow the same ------------------------------


REGION, PARTITION = "us-isof-south-1", "aws-iso-f"
"""The longest names that ARNs have: of region and partition together."""

SHAPE = {"parameters": 8e9, "layers": 32, "kv_heads": 8, "head_dim": 128}


def arn(service: str, rest: str) -> str:
    return f"arn:{PARTITION}:{service}:{REGION}:{ACCOUNT}:{rest}"


def key(number: int) -> str:
    return arn("kms", f"key/mrk-{number:032x}")


IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.{registry_suffix(REGION)}/lmi-handler@sha256:{'ab' * 32}"


def given(**content: Any) -> tuple[Spec, Decision]:
    role = f"arn:{PARTITION}:iam::{ACCOUNT}:role/service-role/lmi-endpoint"
    base = {"name": "llama-3-8b-Chat", "region": REGION, "role": role, "image": {"uri": IMAGE}, "alarms": {}}
    said = Spec.model_validate({**base, **content})
    data = said.model.s3 or said.model.upload
    return said, decision("components", region=REGION, image=IMAGE, model_data=data)


def with_components(adapters: int, long: bool = False) -> tuple[Spec, Decision]:
    """Components with their adapters, on a network and under keys of one's own; `long`: as names may be at most."""
    fill = "N" * 40 if long else ""
    pieces = [
        {"name": f"Adapter-{number:03}{fill}", "artifact": f"s3://adapters-of-ours-{number % 3}/{fill}{number}.tar.gz"}
        for number in range(adapters)
    ]
    return given(
        model={"path": "m", "upload": "s3://models-of-ours/llama-3-8b-instruct/", "shape": SHAPE},
        components=[{"name": f"Chat{fill}", "adapters": pieces}, {"name": f"Batch{fill}"}],
        scaling={"min": 1, "max": 4, "concurrency": 8},
        network={"subnets": ["subnet-1"], "security_groups": ["sg-1"]},
        encryption={"model_key": key(1), "volume_key": key(2)},
    )


def asynchronous() -> tuple[Spec, Decision]:
    topic = arn("sns", "endpoint-notices")
    return given(
        model={"id": "org/model", "shape": SHAPE, "token_secret": arn("secretsmanager", "secret:hugging-face-AbCdEf")},
        scaling={"max": 4, "concurrency": 8},
        alarms={"notify": topic},
        network={"subnets": ["subnet-1"], "security_groups": ["sg-1"]},
        encryption={"secret_key": key(1), "volume_key": key(2), "output_key": "alias/answers", "topic_key": key(3)},
        **{"async": {"output": "s3://answers-of-ours/a/", "failures": "s3://failures-of-ours/b/",
                     "notify_success": topic, "notify_error": arn("sns", "endpoint-failures")}},
    )  # fmt: skip


def triples(policy: Policy) -> Iterator[tuple[str, str, str]]:
    """Everything that a policy allows: actions, resources, and each value of a condition."""
    for one in policy["Statement"]:
        conditions = [
            [(operator, name, value) for value in (values if isinstance(values, list) else [values])]
            for operator, keys in one.get("Condition", {}).items()
            for name, values in keys.items()
        ]
        for action, resource, *condition in product(one["Action"], one["Resource"], *conditions):
            yield action, resource, str(condition)


@in_one_test("who", ["execution-role", "deployer", "invoker"])
@in_one_test("case", ["components", "asynchronous"])
def test_a_usual_deployment_with_all_its_keys_fits_into_one(case: str, who: str) -> None:
    """In the partition and the region with the longest names. Beyond it would be two policies to attach."""
    role = f"arn:{PARTITION}:iam::{ACCOUNT}:role/lmi"
    names = (
        ["model_key", "volume_key"] if case == "components" else ["secret_key", "volume_key", "output_key", "topic_key"]
    )
    said = spec(case, role=role, encryption={name: key(number) for number, name in enumerate(names)})
    policy = policies(said, decision(case, region=REGION, image=IMAGE))[who]
    assert parts(policy) == [policy]
    assert length(policy) < MOST - 100


def test_everything_at_once_comes_in_two_parts() -> None:
    """Upload, components, adapters of three buckets, scaling, a network, keys, capitals in names."""
    policy = policies(*with_components(3))["deployer"]
    assert length(policy) > MOST
    assert len(parts(policy)) == 2
    whole = policies(*asynchronous())["deployer"]
    assert parts(whole) == [whole]


@in_one_test("who", ["execution-role", "deployer", "invoker"])
@in_one_test("adapters", [20, 100])
def test_many_long_names_come_in_parts_that_allow_the_same(adapters: int, who: str) -> None:
    policy = policies(*with_components(adapters, long=True))[who]
    found = parts(policy)
    assert 1 < len(found) <= length(policy) // (MOST - 600) + 1
    for part in found:
        assert length(part) <= MOST
        assert len(json.dumps(part, separators=(",", ":"))) == length(part)
    assert {one for part in found for one in triples(part)} == set(triples(policy))


def test_a_long_condition_is_divided_too() -> None:
    """As the list of prefixes of a bucket with many adapters: one resource, many values, any of which suffices."""
    prefixes = {"StringLike": {"s3:prefix": [f"adapters/{number}*" for number in range(900)]}}
    one = {"Sid": "L", "Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": ["arn:aws:s3:::b"]}
    policy = {"Version": "2012-10-17", "Statement": [{**one, "Condition": prefixes}]}
    found = parts(policy)
    assert len(found) == 3
    assert [one for part in found for one in triples(part)] == list(triples(policy))
