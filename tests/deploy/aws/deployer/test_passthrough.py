"""Fields of `sagemaker:` put to AWS's double: made, found again, changed, and taken out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deploy.deployer.plan import Plan
from deploy.iam.policies import policies
from deploy.resources import build
from deploy.resources.resource import Resource
from tests.deploy.doubles.aws import CALLER, Cloud
from tests.deploy.doubles.deployments import NAME, down, up
from tests.deploy.passthrough import FIELDS, SHADOW, decided, specification


@pytest.fixture(autouse=True)
def _permitted(cloud: Cloud) -> None:
    """The deployer has the policies that are printed for each specification, and no other."""
    cloud.policies[CALLER] = []


def wanted(cloud: Cloud, field: str, **changes: Any) -> tuple[Resource, ...]:
    """The resources in the double's region and account, for a deployer with that specification's policy."""
    spec = specification(field, name=NAME, alarms=None, **changes)
    decision = replace(decided(field), region="us-east-1")
    cloud.policies[CALLER] = [policies(spec, decision)["deployer"]]
    return build.resources(spec, decision)


def bare(cloud: Cloud, field: str) -> tuple[Resource, ...]:
    """Without the field."""
    components = [
        {name: value for name, value in item.items() if name != "sagemaker"}
        for item in FIELDS[field][1].get("components", [])
    ]
    return wanted(cloud, field, sagemaker={}, components=components)


def places(plan: Plan) -> list[str]:
    return [change.path for action in plan.changing for change in action.changes]


def verbs(plan: Plan) -> list[tuple[str, str]]:
    return [(action.verb.value, action.kind.value) for action in plan.changing]


@pytest.mark.parametrize("field", FIELDS)
def test_it_is_made_found_again_and_taken_out(cloud: Cloud, field: str) -> None:
    if field == "shadow":
        cloud.sagemaker.create("model", SHADOW["ModelName"], {"ModelName": SHADOW["ModelName"]}, "us-east-1")
    up(wanted(cloud, field))
    assert verbs(up(wanted(cloud, field))) == []
    without = places(up(bare(cloud, field)))
    told = {
        "data-capture": "DataCaptureConfig",
        "shadow": "ShadowProductionVariants",
        "reservation": "ProductionVariants[0].CapacityReservationConfig",
        "partitions": "ProductionVariants[0].AcceleratorPartitionLayouts",
        "shell": "ProductionVariants[0].EnableSSMAccess",
        "core-dumps": "ProductionVariants[0].CoreDumpConfig",
        "scale-in": "ProductionVariants[0].ManagedInstanceScaling.ScaleInPolicy",
        "specifications": "Specification.ComputeResourceRequirements",
    }
    if field in told:
        assert [place for place in without if place.startswith(told[field])] != []
    assert [place for place in places(up(wanted(cloud, field))) if place != "Tags"] != []
    assert verbs(up(wanted(cloud, field))) == []
    down()


def test_a_changed_value_is_one_line_of_the_plan(cloud: Cloud) -> None:
    up(wanted(cloud, "data-capture"))
    fields = specification("data-capture").sagemaker.endpoint_config["DataCaptureConfig"]
    changed = {"endpoint_config": {"DataCaptureConfig": {**fields, "InitialSamplingPercentage": 30}}}
    plan = up(wanted(cloud, "data-capture", sagemaker=changed))
    (config,) = [action for action in plan.changing if action.kind.value == "endpoint-config"]
    assert [(one.path, one.before, one.after) for one in config.changes] == [
        ("DataCaptureConfig.InitialSamplingPercentage", 20, 30)
    ]


def test_specifications_in_another_order_are_no_change(cloud: Cloud) -> None:
    up(wanted(cloud, "specifications"))
    component = cloud.sagemaker.things["inference-component", "llama-chat"]
    component.request["Specifications"].reverse()
    assert verbs(up(wanted(cloud, "specifications"))) == []


def test_the_models_of_components_by_type_stay(cloud: Cloud) -> None:
    up(wanted(cloud, "specifications"))
    model = cloud.sagemaker.names("model")
    up(wanted(cloud, "specifications", options={"max_tokens": 1}), keep=1)
    assert cloud.sagemaker.names("model") != model
    assert verbs(up(wanted(cloud, "specifications", options={"max_tokens": 1}), keep=1)) == []
