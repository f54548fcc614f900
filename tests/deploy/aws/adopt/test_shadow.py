"""`up --shadow`, `promote` and `down --shadow`: beside an endpoint of another owner, by what `iam --adopt` prints.

Nothing of the serving endpoint changes, however a run ends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli.main import main as run
from deploy.spec.reading import read_spec
from tests.deploy.aws.adopt.conftest import NAME, by_hand
from tests.deploy.aws.test_killed import Killed, changing, killed_at
from tests.deploy.doubles.aws import CALLER, Call, Cloud
from tests.deploy.doubles.deployments import printed
from tests.deploy.public_endpoints import PUBLIC

CAPTURE = {
    "DataCaptureConfig": {
        "EnableCapture": True,
        "InitialSamplingPercentage": 20,
        "DestinationS3Uri": "s3://captured/chat/",
        "CaptureOptions": [{"CaptureMode": "InputAndOutput"}],
    }
}
PLAIN = PUBLIC["Zephyr-7B"].but(variant={"InitialInstanceCount": 2}, config=CAPTURE)


@pytest.fixture
def path(cloud: Cloud, adopt: Callable[..., int], tmp_path: Path) -> Path:
    """The file of an endpoint with data capture, that its owner has scaled from two instances to three."""
    cloud.client("s3").create_bucket(Bucket="captured")
    by_hand(cloud, PLAIN)
    sagemaker = cloud.client("sagemaker")
    wanted = [{"VariantName": "AllTraffic", "DesiredInstanceCount": 3, "DesiredWeight": 2.0}]
    sagemaker.update_endpoint_weights_and_capacities(EndpointName=NAME, DesiredWeightsAndCapacities=wanted)
    while sagemaker.describe_endpoint(EndpointName=NAME)["EndpointStatus"] != "InService":
        pass
    file = tmp_path / "chat.yaml"
    assert adopt("--output", str(file)) == 0
    cloud.calls.clear()
    return file


@pytest.fixture
def lmi(cloud: Cloud, path: Path) -> Callable[..., int]:
    """`lmi deploy COMMAND FILE ...` by somebody who has what `lmi deploy iam FILE --adopt` prints, and nothing else."""

    def call(command: str, *arguments: str) -> int:
        cloud.policies[CALLER] = [printed(read_spec(path), adopt=True)]
        return run([command, str(path), *arguments])

    return call


def up(lmi: Callable[..., int], *arguments: str) -> int:
    return lmi("up", "--shadow", "--yes", *arguments)


def config_of(cloud: Cloud) -> dict[str, Any]:
    name = cloud.sagemaker.things["endpoint", NAME].request["EndpointConfigName"]
    return cloud.sagemaker.things["endpoint-config", name].request


def everything(cloud: Cloud) -> dict[str, Any]:
    return copy.deepcopy(cloud.everything())


def said(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


def test_a_shadow_comes_changes_and_goes_and_the_endpoint_stays_as_it_was(
    cloud: Cloud, lmi: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(cloud)
    assert lmi("plan", "--shadow") == 0
    assert "ShadowProductionVariants: (none) -> " in said(capsys)
    assert cloud.changes() == []
    assert up(lmi, "--shadow-percent", "25", "--shadow-count", "2") == 0
    by_hand_config = before["endpoint-config/by-hand-config"]
    config = config_of(cloud)
    assert config["ProductionVariants"] == by_hand_config["ProductionVariants"]
    assert config["DataCaptureConfig"] == CAPTURE["DataCaptureConfig"]
    (shadow,) = config["ShadowProductionVariants"]
    assert shadow["VariantName"].startswith("Shadow-")
    assert (shadow["InitialInstanceCount"], shadow["InitialVariantWeight"]) == (2, 0.5)  # the serving weight is 2
    container = cloud.sagemaker.things["model", shadow["ModelName"]].request["PrimaryContainer"]
    assert "/lmi-handler@sha256:" in container["Image"]
    endpoint = cloud.sagemaker.things["endpoint", NAME]
    assert endpoint.tags == {}
    live = cloud.client("sagemaker").describe_endpoint(EndpointName=NAME)
    assert (live["ProductionVariants"][0]["DesiredInstanceCount"], live["ProductionVariants"][0]["DesiredWeight"]) == (
        3, 2.0,
    )  # fmt: skip
    capsys.readouterr()
    assert up(lmi, "--shadow-percent", "25", "--shadow-count", "2") == 0
    assert "nothing to do" in said(capsys)
    assert up(lmi) == 0  # with other shares, in its place
    (other,) = config_of(cloud)["ShadowProductionVariants"]
    assert other["VariantName"] != shadow["VariantName"]
    live = cloud.client("sagemaker").describe_endpoint(EndpointName=NAME)
    assert live["ShadowProductionVariants"][0]["DesiredWeight"] == 0.2
    assert len(cloud.sagemaker.names("endpoint-config")) == len(cloud.sagemaker.names("model")) == 2
    assert run(["status", NAME]) == 0
    assert lmi("down", "--yes") == 2
    assert "`lmi deploy down --shadow`" in said(capsys)
    assert lmi("down", "--shadow", "--yes") == 0
    assert everything(cloud) == before
    assert lmi("down", "--shadow", "--yes") == 0
    assert "has no shadow in" in said(capsys)


def test_a_promoted_shadow_serves_with_the_instances_that_there_are(
    cloud: Cloud, lmi: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert lmi("promote", "--yes") == 4
    assert cloud.changes() == []
    assert up(lmi) == 0
    (shadow,) = config_of(cloud)["ShadowProductionVariants"]
    assert lmi("promote", "--yes", "--set", "options.max_rolling_batch_size=9") == 2
    assert "the running shadow differs from the file" in said(capsys)
    assert lmi("promote", "--yes") == 0
    assert "aws sagemaker update-endpoint --endpoint-name chat --endpoint-config-name by-hand-config" in said(capsys)
    config = config_of(cloud)
    assert "ShadowProductionVariants" not in config
    assert config["DataCaptureConfig"] == CAPTURE["DataCaptureConfig"]
    (variant,) = config["ProductionVariants"]
    assert (variant["VariantName"], variant["ModelName"]) == ("AllTraffic", shadow["ModelName"])
    live = cloud.client("sagemaker").describe_endpoint(EndpointName=NAME)["ProductionVariants"][0]
    assert (live["DesiredInstanceCount"], live["DesiredWeight"]) == (3, 2.0)
    assert cloud.sagemaker.things["endpoint", NAME].tags["lmi:deployment"] == NAME
    assert len(cloud.sagemaker.names("endpoint-config")) == 2  # and by-hand-config, the way back
    for command in ("promote", "up"):
        assert lmi(command, "--yes") == 0
        assert "nothing to do" in said(capsys)
    assert up(lmi) == 2
    assert "belongs to this deployment" in said(capsys)
    assert lmi("down", "--shadow", "--yes") == 2
    assert lmi("down", "--yes") == 0
    assert cloud.sagemaker.names("endpoint-config") == ["by-hand-config"]


def test_a_promotion_to_another_instance_type_keeps_the_owners_scaling(cloud: Cloud, lmi: Callable[..., int]) -> None:
    """AWS refuses the update while the variant is registered."""
    assert up(lmi, "--set", "instance.type=ml.g6e.2xlarge") == 0
    scaling = cloud.client("application-autoscaling")
    variant = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{NAME}/variant/AllTraffic",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
    tracking = {
        "TargetValue": 5.0,
        "PredefinedMetricSpecification": {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"},
    }
    scaling.register_scalable_target(**variant, MinCapacity=1, MaxCapacity=7, Tags={"team": "search"})
    scaling.put_scaling_policy(
        **variant,
        PolicyName="owner",
        PolicyType="TargetTrackingScaling",
        TargetTrackingScalingPolicyConfiguration=tracking,
    )
    before = everything(cloud)
    assert lmi("promote", "--yes", "--set", "instance.type=ml.g6e.2xlarge") == 0
    assert [item["InstanceType"] for item in _variants(cloud)] == ["ml.g6e.2xlarge"]
    after = everything(cloud)
    kept = {key: value for key, value in before.items() if key.startswith(variant["ResourceId"])}
    assert len(kept) == 2
    assert {key: value for key, value in after.items() if key.startswith(variant["ResourceId"])} == kept
    assert list(cloud.scaling.tags.values()) == [{"team": "search"}]


def _variants(cloud: Cloud) -> list[dict[str, Any]]:
    variants: list[dict[str, Any]] = config_of(cloud)["ProductionVariants"]
    return variants


def _tagged(**tags: str) -> Callable[[Cloud], None]:
    return lambda cloud: cloud.sagemaker.things["endpoint", NAME].tags.update(tags)


def _changing(cloud: Cloud) -> None:
    cloud.sagemaker.things["endpoint", NAME].status = "Updating"


def _shadowed(cloud: Cloud) -> None:
    config_of(cloud)["ShadowProductionVariants"] = [{**_variants(cloud)[0], "VariantName": "theirs"}]


def _containers(cloud: Cloud) -> None:
    model = cloud.sagemaker.things["model", "by-hand-model"].request
    model["Containers"] = [model.pop("PrimaryContainer")] * 2


def _of_many_models(cloud: Cloud) -> None:
    cloud.sagemaker.things["model", "by-hand-model"].request["PrimaryContainer"]["Mode"] = "MultiModel"


def _weightless(cloud: Cloud) -> None:
    cloud.sagemaker.things["endpoint", NAME].request["Weights"] = {"AllTraffic": 0.0}


def _with_component(cloud: Cloud) -> None:
    request = {"InferenceComponentName": "ic", "EndpointName": NAME, "Specification": {"ModelName": "by-hand-model"}}
    cloud.sagemaker.create("inference-component", "ic", request, "us-east-1")


REFUSED: dict[str, tuple[Callable[[Cloud], Any], str]] = {
    "another deployment's": (_tagged(**{"lmi:deployment": "other"}), "belongs to another deployment of lmi"),
    "own": (_tagged(**{"lmi:deployment": NAME}), "belongs to this deployment"),
    "a stack's": (_tagged(**{"aws:cloudformation:stack-name": "s"}), "belongs to the CloudFormation stack s"),
    "changing": (_changing, "is Updating, and only an endpoint in service"),
    "asynchronous": (lambda cloud: config_of(cloud).update(AsyncInferenceConfig={}), "is asynchronous"),
    "serverless": (lambda cloud: _variants(cloud)[0].update(ServerlessConfig={"MemorySizeInMB": 1}), "is serverless"),
    "components": (_with_component, "has inference components"),
    "no model": (lambda cloud: _variants(cloud)[0].pop("ModelName"), "has inference components"),
    "two variants": (
        lambda cloud: _variants(cloud).append({**_variants(cloud)[0], "VariantName": "b"}),
        "has 2 production variants (AllTraffic, b)",
    ),
    "another variant": (lambda cloud: _variants(cloud)[0].update(VariantName="b"), "Set instance.variant: b"),
    "a shadow": (_shadowed, "already has a shadow of its owner, theirs"),
    "containers": (_containers, "which has several containers or models"),
    "many models": (_of_many_models, "which has several containers or models"),
    "no weight": (_weightless, "the weight of AllTraffic is 0"),
    "no configuration": (
        lambda cloud: cloud.sagemaker.things.pop(("endpoint-config", "by-hand-config")),
        "serves the configuration by-hand-config, which was deleted or cannot be read",
    ),
}  # fmt: skip


def test_an_endpoint_without_shadow_support_is_refused_before_any_creation(
    cloud: Cloud, lmi: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    things = copy.deepcopy(cloud.sagemaker.things)
    for case, (make, why) in REFUSED.items():
        put_back(cloud, things)
        make(cloud)
        before = everything(cloud)
        assert up(lmi) == 2, case
        assert why in said(capsys), case
        assert everything(cloud) == before, case
        assert cloud.changes() == [], case


@pytest.mark.parametrize("kind", ["model", "endpoint-config"])
@pytest.mark.parametrize("command", [("up", "--shadow"), ("promote",)], ids=["shadow", "promotion"])
def test_a_part_of_that_name_that_another_made_is_not_taken(
    cloud: Cloud, lmi: Callable[..., int], capsys: pytest.CaptureFixture[str], *, command: tuple[str, ...], kind: str
) -> None:
    assert up(lmi) == 0
    things = copy.deepcopy(cloud.sagemaker.things)
    if command == ("promote",):
        assert lmi("promote", "--yes") == 0
    made = config_of(cloud)
    (variant,) = made.get("ShadowProductionVariants", made["ProductionVariants"])
    name = made["EndpointConfigName"] if kind == "endpoint-config" else variant["ModelName"]
    part = copy.deepcopy(cloud.sagemaker.things[kind, name])
    part.tags = {"owner": "another"}
    put_back(cloud, things)
    if command == ("up", "--shadow"):
        cloud.sagemaker.things["endpoint", NAME].request["EndpointConfigName"] = "by-hand-config"
    cloud.sagemaker.things[kind, name] = part
    before, changes = everything(cloud), cloud.changes()
    capsys.readouterr()
    assert lmi(*command, "--yes") == 2
    text = said(capsys)
    assert f"{kind}/{name} exists and was not created by this deployment" in text
    assert "have its owner delete it" in text.lower()
    # The name of a shadow's configuration follows from what serves, so that AWS tells that it is taken.
    tried = ["CreateEndpointConfig"] if (command[0], kind) == ("up", "endpoint-config") else []
    assert (everything(cloud), cloud.changes()) == (before, [*changes, *tried])


def put_back(cloud: Cloud, things: dict[tuple[str, str], Any]) -> None:
    cloud.sagemaker.things.clear()
    cloud.sagemaker.things.update(copy.deepcopy(things))
    cloud.calls.clear()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ("--set", "components=[{name: a}]"),
            "components: SageMaker does not support shadow variants with inference components",
        ),
        (
            ("--set", "async.output=s3://captured/"),
            "async: SageMaker does not support shadow variants of async endpoints",
        ),
        (("--set", "shadow={percent: 5, count: 2, type: ml.g5.4xlarge}"), "shadow: with --shadow the file"),
        (("--adopt",), "--adopt takes over the endpoint, but --shadow leaves it to its owner"),
    ],
)
def test_a_file_that_makes_no_shadow_is_refused(
    cloud: Cloud, lmi: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    assert up(lmi, *arguments) == 2
    assert why in said(capsys)
    assert cloud.changes() == []
    assert lmi("up", "--shadow-percent", "5") == 2
    assert "--shadow-percent applies only with --shadow" in said(capsys)
    assert lmi("plan", "--shadow", "--offline") == 2


def test_a_shadow_that_does_not_start_leaves_nothing_behind(
    cloud: Cloud, lmi: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(cloud)
    cloud.sagemaker.fate(NAME, "RolledBack", "the container did not pass its ping")
    assert up(lmi) == 5
    assert "the update was rolled back to by-hand-config: the container did not pass its ping" in said(capsys)
    assert everything(cloud) == before
    assert up(lmi) == 0
    beside = everything(cloud)
    for command in (("promote", "--yes"), ("down", "--shadow", "--yes")):
        cloud.sagemaker.fate(NAME, "RolledBack", "no capacity")
        assert lmi(*command) == 5
        assert everything(cloud) == beside, command
    assert lmi("down", "--shadow", "--yes") == 0
    assert everything(cloud) == before


def test_an_update_that_cannot_be_rolled_back_is_ended_by_down(cloud: Cloud, lmi: Callable[..., int]) -> None:
    before = everything(cloud)
    cloud.sagemaker.fate(NAME, "UpdateRollbackFailed", "no capacity")
    assert up(lmi) == 5
    assert lmi("down", "--shadow", "--yes") == 0
    assert everything(cloud) == before


def once(cloud: Cloud, operation: str, do: Callable[[], Any]) -> None:
    """Do something right after the next call of an operation by the commands."""

    def after(call: Call) -> None:
        if call.operation == operation:
            cloud.after = None
            do()

    cloud.after = after


def test_what_its_owner_changed_meanwhile_is_not_undone(
    cloud: Cloud, lmi: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as somebody reads the plan, or AWS makes the configuration."""
    sagemaker = cloud.client("sagemaker")

    def update(name: str) -> None:
        sagemaker.create_endpoint_config(**{**PLAIN.endpoint_config, "EndpointConfigName": name})
        sagemaker.update_endpoint(EndpointName=NAME, EndpointConfigName=name)
        while sagemaker.describe_endpoint(EndpointName=NAME)["EndpointStatus"] != "InService":
            pass

    once(cloud, "CreateEndpointConfig", lambda: update("theirs"))
    assert up(lmi) == 2
    assert (
        "endpoint/chat has changed since the plan was made: it served by-hand-config, but is now InService with theirs"
        in (said(capsys))
    )
    assert cloud.sagemaker.things["endpoint", NAME].request["EndpointConfigName"] == "theirs"
    assert cloud.sagemaker.names("model") == ["by-hand-model"]
    assert cloud.sagemaker.names("endpoint-config") == ["by-hand-config", "theirs"]
    assert up(lmi) == 0
    once(cloud, "CreateEndpointConfig", lambda: update("theirs-2"))
    assert lmi("promote", "--yes") == 2
    assert cloud.sagemaker.things["endpoint", NAME].tags == {}
    assert lmi("down", "--shadow", "--yes") == 0  # only what was made: the endpoint serves something else
    assert cloud.sagemaker.things["endpoint", NAME].request["EndpointConfigName"] == "theirs-2"
    assert cloud.sagemaker.names("model") == ["by-hand-model"]


@pytest.mark.parametrize("whole", [True, False])
def test_two_at_once_are_one(cloud: Cloud, lmi: Callable[..., int], *, whole: bool) -> None:
    """The other one has ended, or has begun the update, when this one comes to it."""

    def other() -> None:
        if whole:
            assert up(lmi) == 0
            return
        (name,) = set(cloud.sagemaker.names("endpoint-config")) - {"by-hand-config"}
        sagemaker = cloud.client("sagemaker")
        sagemaker.update_endpoint(EndpointName=NAME, EndpointConfigName=name, RetainAllVariantProperties=True)

    once(cloud, "CreateEndpointConfig", other)
    assert up(lmi) == 0
    assert cloud.count("UpdateEndpoint") == 1
    assert "ShadowProductionVariants" in config_of(cloud)


def test_a_deleted_configuration_is_made_anew_without_the_shadow(cloud: Cloud, lmi: Callable[..., int]) -> None:
    assert up(lmi) == 0
    before = cloud.sagemaker.things.pop(("endpoint-config", "by-hand-config")).request
    assert lmi("down", "--shadow", "--yes") == 0
    config = config_of(cloud)
    assert {**config, "EndpointConfigName": "by-hand-config"} == before
    assert cloud.sagemaker.names("model") == ["by-hand-model"]
    assert up(lmi) == 0
    assert lmi("down", "--shadow", "--yes") == 0
    assert config_of(cloud) == config


def _updates(cloud: Cloud) -> list[dict[str, Any]]:
    return [call.parameters for call in cloud.calls if call.operation == "UpdateEndpoint"]


EXCLUDED = [{"VariantPropertyType": "DataCaptureConfig"}]


def test_a_capture_of_the_specification_comes_with_the_shadow_and_goes_with_it(
    cloud: Cloud, path: Path, lmi: Callable[..., int]
) -> None:
    cloud.client("s3").create_bucket(Bucket="compared")
    assert up(lmi) == 0  # the owner's capture stays, also in AWS's hands
    assert config_of(cloud)["DataCaptureConfig"] == CAPTURE["DataCaptureConfig"]
    assert "ExcludeRetainedVariantProperties" not in _updates(cloud)[-1]
    file = yaml.safe_load(path.read_text())
    file["sagemaker"].pop("endpoint_config")
    path.write_text(yaml.safe_dump({**file, "capture": {"output": "s3://compared/chat/", "percent": 50}}))
    assert up(lmi) == 0
    capture = config_of(cloud)["DataCaptureConfig"]
    assert (capture["DestinationS3Uri"], capture["InitialSamplingPercentage"]) == ("s3://compared/chat/", 50)
    assert _updates(cloud)[-1]["ExcludeRetainedVariantProperties"] == EXCLUDED
    assert _updates(cloud)[-1]["RetainAllVariantProperties"] is True
    count = len(_updates(cloud))
    assert up(lmi) == 0
    assert len(_updates(cloud)) == count
    assert lmi("down", "--shadow", "--yes") == 0
    assert config_of(cloud)["DataCaptureConfig"] == CAPTURE["DataCaptureConfig"]
    assert _updates(cloud)[-1]["ExcludeRetainedVariantProperties"] == EXCLUDED


def test_the_parts_of_a_shadow_have_the_specifications_tags(cloud: Cloud, lmi: Callable[..., int]) -> None:
    for value in ("1", "2"):  # a change of the tags alone is an update of the tags
        assert up(lmi, "--set", f"tags={{cost: '{value}'}}") == 0
        (shadow,) = config_of(cloud)["ShadowProductionVariants"]
        for tags in (_tags_of_config(cloud), cloud.sagemaker.things["model", shadow["ModelName"]].tags):
            assert (tags["cost"], tags["lmi:deployment"]) == (value, NAME)
        assert cloud.sagemaker.things["endpoint", NAME].tags == {}
    assert cloud.count("UpdateEndpoint") == 1


def test_a_configuration_made_anew_without_the_shadow_keeps_its_tags(cloud: Cloud, lmi: Callable[..., int]) -> None:
    assert up(lmi, "--set", "tags={app: chat}") == 0
    del cloud.sagemaker.things["endpoint-config", "by-hand-config"]
    assert lmi("down", "--shadow", "--yes") == 0
    assert _tags_of_config(cloud) == {"app": "chat", "lmi:deployment": NAME}


def test_a_promoted_configuration_and_its_model_have_the_specifications_tags(
    cloud: Cloud, lmi: Callable[..., int]
) -> None:
    given = ("--set", "tags={app: chat}")
    assert up(lmi, *given) == 0
    assert lmi("promote", "--yes", *given) == 0
    (variant,) = config_of(cloud)["ProductionVariants"]
    for tags in (_tags_of_config(cloud), cloud.sagemaker.things["model", variant["ModelName"]].tags):
        assert (tags["app"], tags["lmi:deployment"]) == ("chat", NAME)
    assert cloud.sagemaker.things["endpoint", NAME].tags["app"] == "chat"


def _tags_of_config(cloud: Cloud) -> dict[str, str]:
    return cloud.sagemaker.things["endpoint-config", config_of(cloud)["EndpointConfigName"]].tags


def test_a_shadow_whose_configuration_was_deleted_keeps_its_model(
    cloud: Cloud, lmi: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The endpoint serves on with it: without the model no instance of the shadow could start."""
    assert up(lmi) == 0
    name = config_of(cloud)["EndpointConfigName"]
    del cloud.sagemaker.things["endpoint-config", name]
    models, changes = cloud.sagemaker.names("model"), cloud.changes()
    assert len(models) == 2
    assert lmi("down", "--shadow", "--yes") == 2
    assert f"endpoint/chat serves the configuration {name}, which was deleted" in said(capsys)
    assert cloud.changes() == changes
    sagemaker = cloud.client("sagemaker")
    cloud.sagemaker.things["endpoint", NAME].request["EndpointConfigName"] = "by-hand-config"
    assert sagemaker.describe_endpoint(EndpointName=NAME)["EndpointConfigName"] == "by-hand-config"
    assert lmi("down", "--shadow", "--yes") == 0
    assert cloud.sagemaker.names("model") == ["by-hand-model"]


def test_a_caller_with_the_plain_policy_is_told_what_is_missing(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.policies[CALLER] = [printed(read_spec(path))]
    assert run(["up", str(path), "--shadow", "--yes"]) == 2
    assert "`lmi deploy iam FILE --adopt` prints the policy needed to read the configuration" in said(capsys)
    assert cloud.changes() == []
    cloud.denied.clear()


@pytest.mark.parametrize("last", [("promote", "--yes"), ("down", "--shadow", "--yes")], ids=["promoted", "ended"])
def test_killed_at_every_call_and_run_again(cloud: Cloud, lmi: Callable[..., int], last: tuple[str, ...]) -> None:
    """The same end as without, whichever call was the last."""
    things = copy.deepcopy(cloud.sagemaker.things)
    for command in (("up", "--shadow", "--yes", "--no-checks"), last):
        put_back(cloud, things)
        assert lmi(*command) == 0
        places, whole = changing(cloud), everything(cloud)
        assert len(places) >= 3
        for number in places:
            put_back(cloud, things)
            with killed_at(number, after=True), pytest.raises(Killed):
                lmi(*command)
            assert lmi(*command) == 0
            assert everything(cloud) == whole, (command, number)
        things = copy.deepcopy(cloud.sagemaker.things)
