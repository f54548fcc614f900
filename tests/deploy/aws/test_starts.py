"""What a rehearsal starts: every model of an endpoint or a component must have its image."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.emulator.account import Starts
from deploy.emulator.sagemaker import Fate
from tests.deploy.doubles.aws import ACCOUNT, Cloud

ABSENT = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/absent:1"
FROM_AWS = "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.36.0-lmi22.0.0-cu129"
SERVING = {"VariantName": "AllTraffic", "InitialInstanceCount": 1}
ONE_TYPE = {**SERVING, "InstanceType": "ml.g5.xlarge"}
POOLS = [
    {"InstanceType": "ml.g5.xlarge", "Priority": 1},
    {"InstanceType": "ml.g6.xlarge", "Priority": 2, "ModelNameOverride": "absent"},
]


@pytest.mark.parametrize(
    "wanted",
    [
        {"Specification": {"ModelName": "absent"}},
        {
            "Specifications": [
                {"InstanceType": "ml.g5.xlarge", "ModelName": "there"},
                {"InstanceType": "ml.g6.xlarge", "ModelName": "absent"},
            ]
        },
        {"ProductionVariants": [{**ONE_TYPE, "ModelName": "absent"}]},
        {"ProductionVariants": [{**SERVING, "ModelName": "there", "InstancePools": POOLS}]},
    ],
)
def test_a_start_needs_the_image_of_each_model(cloud: Cloud, wanted: dict[str, Any]) -> None:
    sagemaker = cloud.client("sagemaker")
    for name, image in (("there", FROM_AWS), ("absent", ABSENT)):
        role = f"arn:aws:iam::{ACCOUNT}:role/model"
        sagemaker.create_model(ModelName=name, PrimaryContainer={"Image": image}, ExecutionRoleArn=role)
    things = cloud.sagemaker.things
    kind = "inference-component"
    if "ProductionVariants" in wanted:
        kind = "endpoint"
        sagemaker.create_endpoint_config(EndpointConfigName="first", **wanted)
        wanted = {"EndpointConfigName": "first"}
    thing = cloud.sagemaker.create(kind, "new", dict(wanted), "us-east-1")
    assert Starts(cloud)(thing, wanted) == Fate("Failed", f"The requested image '{ABSENT}' could not be found.")
    del things["model", "absent"]
    assert Starts(cloud)(thing, wanted) == Fate("InService")
