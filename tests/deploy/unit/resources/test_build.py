"""What the golden files cannot say: what a change changes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.errors import Refused, SpecError
from deploy.resources.build import resources, spec_digest, warnings
from deploy.resources.resource import Kind, Resource, refs
from deploy.resources.updating import endpoint_deployment, num_batches
from deploy.spec import Spec
from tests.deploy.cases import TOPIC, decision, spec
from tests.one_test import in_one_test


def made(case: str, said: Spec | None = None, **changes: Any) -> dict[Kind, list[Resource]]:
    found: dict[Kind, list[Resource]] = {kind: [] for kind in Kind}
    for resource in resources(said or spec(case), decision(case, **changes)):
        found[resource.kind].append(resource)
    return found


def names(resources: dict[Kind, list[Resource]]) -> tuple[str, str]:
    return resources[Kind.MODEL][0].name, resources[Kind.ENDPOINT_CONFIG][0].name


def test_only_what_a_thing_holds_renews_it() -> None:
    model, config = names(made("plain"))
    assert names(made("plain", spec("plain", alarms=None, tags={"team": "other"}))) == (model, config)
    other_model, other_config = names(made("plain", spec("plain", options={"dtype": "fp16"})))
    assert other_model != model
    assert other_config != config  # it names the model
    same_model, third_config = names(made("plain", spec("plain", routing="random")))
    assert same_model == model
    assert third_config != config


@pytest.mark.parametrize("case", ["plain", "components"])
def test_an_adopted_variant_keeps_its_name_everywhere(case: str) -> None:
    instance = spec(case).instance.model_copy(update={"variant": "primary"})
    scaled: dict[str, Any] = {} if case == "components" else {"scaling": {"max": 3, "concurrency": 8}}
    built = made(case, spec(case, **scaled).model_copy(update={"instance": instance}))
    text = repr([resource.request for found in built.values() for resource in found])
    assert "AllTraffic" not in text
    assert text.count("primary") > 1


def test_everything_taggable_bears_the_deployment_and_the_digest() -> None:
    said = spec("components")
    for resource in resources(said, decision("components")):
        marks: Any = resource.request.get("Tags")
        if resource.kind is Kind.SCALING_POLICY:
            assert marks is None
        elif resource.kind is Kind.SCALABLE_TARGET:
            assert marks == {"lmi:deployment": "llama", "lmi:spec": spec_digest(said)}
        else:
            assert {"Key": "lmi:deployment", "Value": "llama"} in marks
            assert {"Key": "lmi:spec", "Value": spec_digest(said)} in marks


def test_the_users_tags_are_there_too() -> None:
    said = spec("plain", tags={"team": "search"})
    marks = made("plain", said)[Kind.MODEL][0].request["Tags"]
    assert {mark["Key"]: mark["Value"] for mark in marks} == {
        "team": "search",
        "lmi:deployment": "llama",
        "lmi:spec": spec_digest(said),
    }


def test_waking_refers_to_the_policy_that_it_starts() -> None:
    wake = next(one for one in made("components")[Kind.ALARM] if one.name == "llama/llama-chat/no-capacity")
    (ref,) = refs(wake.request)
    assert (ref.key, ref.attribute) == ("scaling-policy/llama/llama-chat/wake", "PolicyARN")
    assert wake.needs == (ref.key,)


@pytest.mark.parametrize(
    ("name", "given", "cooldown"),
    [
        ("components", 60, 60),
        ("components", 400, 400),
        ("asynchronous-asleep", 60, 900),
        ("asynchronous-asleep", 1200, 1200),
    ],
)
def test_waking_heeds_the_cooldown_of_the_specification(name: str, given: int, cooldown: int) -> None:
    """The queue's own is longer than the default, or a start that is not over would add an instance."""
    scaling = {"min": 0, "max": 8, "concurrency": 4, "scale_out_cooldown": given}
    policies = made(name, spec(name, scaling=scaling))[Kind.SCALING_POLICY]
    rules = [one.request["StepScalingPolicyConfiguration"] for one in policies if one.name.endswith("wake")]
    assert {rule["Cooldown"] for rule in rules} == {cooldown}


def test_only_what_may_sleep_is_woken() -> None:
    awake = spec("components", scaling={"min": 1, "max": 8, "concurrency": 4})
    alarms = [one for one in made("components", awake)[Kind.ALARM] if "no-capacity" in one.name]
    assert [one.name for one in alarms] == ["llama/llama-chat/no-capacity", "llama/llama-batch/no-capacity"]
    assert not refs([one.request for one in alarms])  # they tell, and roll back, but start nothing
    assert len(made("components", awake)[Kind.SCALING_POLICY]) == 2


def test_a_single_instance_is_updated_beside_itself_and_the_user_is_told() -> None:
    deployment = made("single")[Kind.ENDPOINT][0].update["DeploymentConfig"]
    assert deployment["BlueGreenUpdatePolicy"]["TrafficRoutingConfiguration"]["Type"] == "ALL_AT_ONCE"
    assert "AutoRollbackConfiguration" not in deployment  # there are no alarms
    assert "a single instance cannot be updated in batches" in warnings(spec("single"), decision("single"))[0]
    assert warnings(spec("plain"), decision("plain", warnings=("dear",))) == ("dear",)


@pytest.mark.parametrize(("count", "percent", "size"), [(2, 50, 1), (3, 50, 1), (8, 25, 2), (8, 5, 1)])
def test_a_batch_is_whole_instances_and_at_most_half(count: int, percent: int, size: int) -> None:
    said = spec(
        "plain", instance={"type": "ml.g6e.xlarge", "count": count}, update={"batch_percent": percent, "wait": 60}
    )
    rolling = made("plain", said)[Kind.ENDPOINT][0].update["DeploymentConfig"]["RollingUpdatePolicy"]
    assert rolling["MaximumBatchSize"] == {"Type": "INSTANCE_COUNT", "Value": size}
    assert 600 <= rolling["MaximumExecutionTimeoutInSeconds"] <= 28800


def test_an_update_leaves_to_scaling_what_is_its() -> None:
    assert made("prefix-aware")[Kind.ENDPOINT][0].update["RetainAllVariantProperties"] is True
    assert made("plain")[Kind.ENDPOINT][0].update["RetainAllVariantProperties"] is False
    chat = made("components")[Kind.COMPONENT][0]
    assert "RuntimeConfig" not in chat.update
    assert chat.request["RuntimeConfig"] == {"CopyCount": 4}
    assert chat.update["DeploymentConfig"]["RollingUpdatePolicy"]["MaximumBatchSize"]["Type"] == "CAPACITY_PERCENT"


def test_endpoints_and_components_have_their_own_alarms_to_roll_back_by() -> None:
    found = made("components")
    assert found[Kind.ENDPOINT][0].needs[1:] == ("alarm/llama/5xx", "alarm/llama/model-errors")
    rollback = found[Kind.COMPONENT][0].update["DeploymentConfig"]["AutoRollbackConfiguration"]
    assert [one["AlarmName"] for one in rollback["Alarms"]] == ["llama/llama-chat/5xx", "llama/llama-chat/model-errors"]


def test_latency_is_in_microseconds_and_somebody_is_told() -> None:
    latency = next(one.request for one in made("plain")[Kind.ALARM] if one.name == "llama/latency")
    assert latency["Threshold"] == 20_000_000.0
    assert latency["ExtendedStatistic"] == "p95"
    assert latency["AlarmActions"] == [TOPIC]


def test_a_component_on_cpus_asks_for_no_accelerator() -> None:
    said = spec("cpu", components=[{"name": "one", "cpus": 2}])
    component = made("cpu", said)[Kind.COMPONENT][0].request["Specification"]
    assert component["ComputeResourceRequirements"] == {"MinMemoryRequiredInMb": 1024, "NumberOfCpuCoresRequired": 2.0}


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("components", {"components": [{"name": "a", "accelerators": 8}]},
     r"a: accelerators: 8, and ml\.g6e\.12xlarge has 4"),
    ("components", {"components": [{"name": "a", "adapters": [{"name": "b", "artifact": "s3://models/adapters/b"}]}]},
     r"b: artifact must end in \.tar\.gz"),
    ("components", {"instance": {"type": "ml.g6e.12xlarge", "count": 9, "managed": {"min": 0, "max": 4}}},
     r"instance\.count: 9 is above instance\.managed\.max"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_its_place(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resources(spec(case, **changes), decision(case))


def test_secrets_are_refused_unless_allowed() -> None:
    said = spec("plain", environment={"HF_TOKEN": "abc"})
    with pytest.raises(Refused):
        resources(said, decision("plain"))
    assert resources(said, decision("plain"), allow_plaintext_secret=True)


@in_one_test("count", [2, 3, 5, 19, 21, 39, 41, 99, 1000])
@in_one_test("percent", [5, 7, 49, 50])
def test_a_batch_is_5_to_50_percent_of_the_instances(count: int, percent: int) -> None:
    """RollingUpdatePolicy refuses what is less or more: 1 of 39 is."""
    said = spec("plain", instance={"type": "ml.g6e.xlarge", "count": count}, update={"batch_percent": percent})
    policy = endpoint_deployment(said, decision("plain"), [])["RollingUpdatePolicy"]
    size = policy["MaximumBatchSize"]["Value"]
    assert 0.05 <= size / count <= 0.5
    assert num_batches(said) == -(-count // size)
