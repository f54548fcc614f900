"""`capture`, `shadow` and `reservation` as commands, by a deployer with the printed policies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.aws.test_permissions import prepared
from tests.deploy.doubles.aws import ACCOUNT, Cloud
from tests.deploy.doubles.deployments import NAME, PLAIN, Deployer, printed

pytestmark = pytest.mark.usefixtures("only_aws")

PLAN = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-plan/llama"
CONTENT = {**PLAIN, "alarms": None, "scaling": None}


@pytest.fixture
def quotas() -> dict[str, float]:
    return {f"ml.g6e.{size} for endpoint usage": 3.0 for size in ("2xlarge", "4xlarge")}


@pytest.fixture
def content(cloud: Cloud) -> dict[str, Any]:
    """The specification, with what it needs in the account."""
    found = prepared(cloud, "us-east-1", CONTENT)
    cloud.calls.clear()
    return found


def file(tmp_path: Path, content: dict[str, Any], **changes: Any) -> str:
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}))
    return str(path)


def bucket(cloud: Cloud, name: str, region: str = "us-east-1") -> None:
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    cloud.client("s3", region).create_bucket(Bucket=name, **where)
    cloud.calls.clear()


def config(cloud: Cloud) -> dict[str, Any]:
    """The endpoint's configuration as it was asked for."""
    name = cloud.sagemaker.things["endpoint", NAME].request["EndpointConfigName"]
    return cloud.sagemaker.things["endpoint-config", name].request


def statements(content: dict[str, Any], who: str, **changes: Any) -> dict[str, Any]:
    return {one["Sid"]: one for one in printed({**content, **changes}, who)["Statement"]}


CAPTURE = {"capture": {"output": "s3://captured/llama/", "percent": 20, "content": "input"}}


def test_requests_are_captured_and_plan_says_what_it_costs(
    cloud: Cloud, content: dict[str, Any], main: Deployer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket(cloud, "captured")
    path = file(tmp_path, content, **CAPTURE)
    assert main(["plan", path]) == 0
    said = capsys.readouterr().out
    cost = "a million requests of 10 kB, responses included, need about 1 GB ($0.023 per month in us-east-1)"
    assert cost in " ".join(said.split())
    assert "ok      places: capture.output: s3://captured/llama/" in said
    assert main(["up", path, "--yes"]) == 0
    assert config(cloud)["DataCaptureConfig"] == {
        "EnableCapture": True,
        "InitialSamplingPercentage": 20,
        "DestinationS3Uri": "s3://captured/llama/",
        "CaptureOptions": [{"CaptureMode": "Input"}],
        "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
    }
    role = statements(content, "execution-role", **CAPTURE)
    assert role["Capture"]["Resource"] == ["arn:aws:s3:::captured/llama/*"]
    capsys.readouterr()
    assert main(["up", path, "--yes"]) == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        CAPTURE,
        {"sagemaker": {"variant": {"CoreDumpConfig": {"DestinationS3Uri": "s3://captured/dumps/"}}}},
        {
            "sagemaker": {
                "model": {
                    "PrimaryContainer": {
                        "AdditionalModelDataSources": [
                            {
                                "ChannelName": "draft",
                                "S3DataSource": {
                                    "S3Uri": "s3://captured/draft/",
                                    "S3DataType": "S3Prefix",
                                    "CompressionType": "None",
                                },
                            }
                        ]
                    }
                }
            }
        },
        {"async": {"output": "s3://captured/answers/"}},
        {"async": {"output": "s3://models/answers/", "failures": "s3://captured/failures/"}},
    ],
)
def test_a_bucket_of_another_region_is_refused_before_anything_is_created(
    cloud: Cloud,
    content: dict[str, Any],
    main: Deployer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
) -> None:
    bucket(cloud, "captured", "eu-west-1")
    assert main(["up", file(tmp_path, content, **changes), "--yes"]) == 2
    assert "the bucket captured is in eu-west-1, but SageMaker is in us-east-1" in capsys.readouterr().err
    assert cloud.changes() == []


def test_a_bucket_that_is_not_there_is_refused(
    cloud: Cloud, content: dict[str, Any], main: Deployer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", file(tmp_path, content, **CAPTURE), "--yes"]) == 2
    assert "capture.output: there is no bucket captured" in capsys.readouterr().err
    assert cloud.changes() == []


def shadow(**more: Any) -> dict[str, Any]:
    image = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/next:2-cu130"
    return {"shadow": {"percent": 25, "image": {"uri": image}, "options": {"max_rolling_batch_size": 8}, **more}}


def test_a_shadow_stands_beside_and_goes(
    cloud: Cloud, content: dict[str, Any], main: Deployer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.push("next", "2-cu130")
    assert main(["up", file(tmp_path, content), "--yes"]) == 0
    (serving,) = cloud.sagemaker.names("model")
    path = file(tmp_path, content, **shadow())
    assert main(["plan", path]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "you also pay for 1 instance of ml.g6e.2xlarge; 25 % of the requests" in said
    assert "ok image: shadow: next@sha256:" in said
    assert main(["up", path, "--yes"]) == 0
    (production,), (other,) = config(cloud)["ProductionVariants"], config(cloud)["ShadowProductionVariants"]
    assert (production["VariantName"], production["ModelName"]) == ("AllTraffic", serving)
    assert (other["VariantName"], other["InitialVariantWeight"], other["InitialInstanceCount"]) == ("Shadow", 0.25, 1)
    container = cloud.sagemaker.things["model", other["ModelName"]].request["PrimaryContainer"]
    assert "/next@sha256:" in container["Image"]
    assert container["Environment"]["OPTION_MAX_ROLLING_BATCH_SIZE"] == "8"
    assert container["ModelDataSource"]["S3DataSource"]["S3Uri"] == "s3://models/llama/"
    pulls = statements(content, "execution-role", **shadow())["Image"]["Resource"]
    assert [arn.rpartition("/")[2] for arn in pulls] == ["lmi", "next"]
    capsys.readouterr()
    assert main(["up", path, "--yes"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["status", NAME, "--region", "us-east-1"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"Shadow +1 +1 +instances ml\.g6e\.2xlarge", said), said
    assert main(["up", file(tmp_path, content), "--yes"]) == 0
    assert "ShadowProductionVariants" not in config(cloud)
    assert serving in cloud.sagemaker.names("model")
    assert main(["down", path, "--yes"]) == 0
    assert cloud.sagemaker.names("model") == []


def test_a_shadow_s_model_has_its_own_data(
    cloud: Cloud, content: dict[str, Any], main: Deployer, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        body = cloud.client("s3").get_object(Bucket="models", Key=f"llama/{name}")["Body"].read()
        cloud.client("s3").put_object(Bucket="models", Key=f"next/{name}", Body=body)
    changes = {"shadow": {"percent": 5, "model": {"s3": "s3://models/next/"}, "type": "ml.g6e.4xlarge", "count": 2}}
    assert main(["up", file(tmp_path, content, **changes), "--yes"]) == 0
    (other,) = config(cloud)["ShadowProductionVariants"]
    assert (other["InstanceType"], other["InitialInstanceCount"]) == ("ml.g6e.4xlarge", 2)
    read = statements(content, "execution-role", **changes)["ModelData"]["Resource"]
    assert read == ["arn:aws:s3:::models/llama/*", "arn:aws:s3:::models/next/*"]


def test_a_shadow_without_image_or_quota_is_refused_before_any_change(
    cloud: Cloud, content: dict[str, Any], main: Deployer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", file(tmp_path, content, **shadow()), "--yes"]) == 4
    assert "next:2-cu130" in capsys.readouterr().err
    cloud.push("next", "2-cu130")
    cloud.calls.clear()
    assert main(["up", file(tmp_path, content, **shadow(count=2)), "--yes"]) == 2
    assert "ml.g6e.2xlarge for endpoint usage: 3, but 4 are needed" in capsys.readouterr().err
    assert cloud.changes() == []


def reserve(cloud: Cloud, **changes: Any) -> None:
    summary = {"ReservedCapacityArn": PLAN, "InstanceType": "ml.g6e.2xlarge", "TotalInstanceCount": 4}
    plan = {
        "Status": "Active",
        "TargetResources": ["endpoint"],
        "AvailableInstanceCount": 4,
        "ReservedCapacitySummaries": [{**summary, "Status": "Active"}],
        **changes,
    }
    cloud.sagemaker.things.pop(("training-plan", "llama"), None)
    cloud.sagemaker.create("training-plan", "llama", plan, "us-east-1")


def test_instances_come_from_a_reservation(
    cloud: Cloud, content: dict[str, Any], main: Deployer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reserve(cloud)
    path = file(tmp_path, content, reservation=PLAN)
    assert main(["up", path, "--yes"]) == 0
    assert "reservation: llama: 4 free instances of ml.g6e.2xlarge" in capsys.readouterr().out
    assert config(cloud)["ProductionVariants"][0]["CapacityReservationConfig"] == {
        "CapacityReservationPreference": "capacity-reservations-only",
        "MlReservationArn": PLAN,
    }


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (None, "does not exist"),
        ({"Status": "Expired"}, "llama is Expired"),
        ({"TargetResources": ["training-job"]}, "llama is for training-job, not for endpoints"),
        (
            {"ReservedCapacitySummaries": [{"ReservedCapacityArn": PLAN, "InstanceType": "ml.p5.48xlarge",
                                            "TotalInstanceCount": 1, "Status": "Active"}]},
            "llama is for ml.p5.48xlarge, but the endpoint uses ml.g6e.2xlarge",
        ),
    ],
)  # fmt: skip
def test_a_reservation_that_cannot_serve_is_refused_before_any_creation(
    cloud: Cloud,
    content: dict[str, Any],
    main: Deployer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any] | None,
    line: str,
) -> None:
    if changes is not None:
        reserve(cloud, **changes)
    assert main(["up", file(tmp_path, content, reservation=PLAN), "--yes"]) == 2
    assert line in " ".join(capsys.readouterr().err.split())
    assert cloud.changes() == []
