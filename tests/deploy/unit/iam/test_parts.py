"""Policies that are longer than AWS takes come in parts, which together allow the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

from deploy.iam.policies import MOST, Policy, length, parts, policies
from deploy.resolve.decision import Decision
from deploy.resolve.images import registry_suffix
from deploy.spec import Spec
from tests.deploy.cases import decision, spec
from tests.one_test import in_one_test

ACCOUNT = "123456789012"
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
