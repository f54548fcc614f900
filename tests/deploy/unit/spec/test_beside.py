"""`capture`, `shadow` and `reservation`: what they do not go with, and what an export makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.deployer.wait import time_limit
from deploy.export.cloudformation import cloudformation_template
from deploy.iam.policies import policies
from deploy.resources.build import resources, warnings
from tests.deploy.cases import KEY, decision, spec
from tests.deploy.strict import wrong_in
from tests.deploy.unit.spec.test_passthrough import refused
from tests.one_test import in_one_test

PLAN = "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/llama"
CAPTURE = {"output": "s3://captured/llama/"}
SHADOW: dict[str, Any] = {"percent": 10, "options": {"max_rolling_batch_size": 8}}
NAMED = {"instance": {"type": "ml.g6e.xlarge"}}
COMPONENTS = {"components": [{"name": "chat"}]}


@in_one_test(
    ("content", "line"),
    [
        ({"capture": {**CAPTURE, "percent": 0}}, "capture.percent: must be at least 1 (given: 0)"),
        ({"capture": {**CAPTURE, "content": "all"}}, "capture.content: must be both, input or output"),
        ({"capture": {"output": "captured"}}, "capture.output: must be written as s3://bucket/answers/"),
        ({"capture": CAPTURE, "async": {"output": "s3://answers/"}}, "capture does not go with async"),
        ({"encryption": {"capture_key": KEY}}, "encryption.capture_key is for the files of capture"),
        (
            {"capture": CAPTURE, "sagemaker": {"endpoint_config": {"DataCaptureConfig": {
                "InitialSamplingPercentage": 1, "DestinationS3Uri": "s3://b/x",
                "CaptureOptions": [{"CaptureMode": "Input"}]}}}},
            "sagemaker.endpoint_config.DataCaptureConfig: belongs to capture",
        ),
        ({"shadow": {"percent": 10}}, "shadow: is what serves: give its image, model, options, environment or type"),
        (
            {"shadow": {"percent": 10, "model": {"path": "models", "upload": "s3://models/x/"}}},
            "shadow: model.path is for the serving model",
        ),
        ({"shadow": {"percent": 10, "model": {}}}, "shadow.model: give exactly one of id, s3, path"),
        (
            {"shadow": SHADOW, "instance": {"type": "ml.g6e.xlarge", "variant": "Shadow"}},
            "instance.variant: Shadow is the name of the shadow's own variant",
        ),
        ({"shadow": SHADOW, **COMPONENTS}, "shadow does not go with components"),
        ({"shadow": SHADOW, "async": {"output": "s3://answers/"}}, "shadow does not go with async"),
        ({"shadow": SHADOW, "instance": {"pools": [{"type": "ml.g6e.xlarge"}]}}, "shadow.type: must be given"),
        (
            {"shadow": {"percent": 1, "model": {"id": "a/b"}}, "network": {"isolated": True},
             "model": {"s3": "s3://models/x/"}},
            "network.isolated: the container cannot reach the hub; give shadow.model.s3",
        ),
        (
            {"shadow": SHADOW, "sagemaker": {"endpoint_config": {"ShadowProductionVariants": [{"VariantName": "S"}]}}},
            "sagemaker.endpoint_config.ShadowProductionVariants: belongs to shadow",
        ),
        ({"reservation": "llama", **NAMED}, "reservation: must be written as arn:aws:sagemaker:"),
        ({"reservation": PLAN, "region": "us-east-1", **NAMED}, "reservation: is in eu-west-1, and the endpoint in us"),
        ({"reservation": PLAN}, "reservation: belongs to one instance type; name it in instance.type"),
        (
            {"reservation": PLAN, **NAMED, "sagemaker": {"variant": {"CapacityReservationConfig": {}}}},
            "sagemaker.variant.CapacityReservationConfig: belongs to reservation",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said(content: dict[str, Any], line: str, tmp_path: Path) -> None:
    lines = refused(content, tmp_path)
    assert [one for one in lines if one.startswith(line)] != [], lines


def test_all_three_are_valid_requests_and_a_template() -> None:
    said = spec("plain", capture=CAPTURE, shadow=SHADOW, reservation=PLAN, encryption={"capture_key": KEY})
    decided = decision("plain", shadow=decision("plain"))
    made = resources(said, decided)
    assert [line for item in made for line in wrong_in(item)] == []
    properties = cloudformation_template(made)["Resources"]["EndpointConfig"]["Properties"]
    (shadow,) = properties["ShadowProductionVariants"]
    assert shadow["ModelName"] == {"Fn::GetAtt": ["ModelX", "ModelName"]}
    assert "CapacityReservationConfig" not in shadow
    assert properties["DataCaptureConfig"]["KmsKeyId"] == KEY
    assert [one.partition(":")[0] for one in warnings(said, decided)] == ["capture", "shadow", "reservation"]
    role = {one["Sid"]: one for one in policies(said, decided)["execution-role"]["Statement"]}
    assert role["CaptureKey"]["Resource"] == [KEY]
    deployer = {one["Sid"]: one for one in policies(said, decided)["deployer"]["Statement"]}
    assert deployer["ReservationChecked"]["Resource"] == [PLAN]
    assert deployer["PlacesChecked"]["Condition"] == {"StringLike": {"s3:prefix": ["llama/*"]}}


def test_a_shadow_has_options_and_variables_over_those_of_what_serves() -> None:
    shadow = {"percent": 10, "options": {"job_queue_size": 9}, "environment": {"MODE": "next"}}
    made = resources(spec("plain", shadow=shadow), decision("plain", shadow=decision("plain")))
    serving, other = (item.request["PrimaryContainer"]["Environment"] for item in made[:2])
    assert (serving["SERVING_JOB_QUEUE_SIZE"], other["SERVING_JOB_QUEUE_SIZE"]) == ("200", "9")
    assert (serving.get("MODE"), other["MODE"]) == (None, "next")
    assert other["OPTION_LLM_ENGINE"] == serving["OPTION_LLM_ENGINE"]


def test_updates_wait_for_the_slower_start() -> None:
    alone, slow = decision("plain"), decision("plain", download=3600, startup=3600)
    beside = decision("plain", shadow=slow)
    assert (alone.start, beside.start) == (1500, 7200)
    assert time_limit(beside) - time_limit(alone) == 5700.0
