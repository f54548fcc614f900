"""Components with models of their own, from the plan to the end, by somebody with the printed policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.iam.policies import MOST, length, parts
from tests.deploy.aws.test_lifecycle import MODEL
from tests.deploy.aws.test_permissions import prepared
from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.deployments import NAME, PLAIN, Deployer, printed

pytestmark = pytest.mark.usefixtures("only_aws")

SHAPE = PLAIN["model"]["shape"]


def three(cloud: Cloud, directory: Path) -> dict[str, Any]:
    """Three components: the top level's model, one that is uploaded, one of the hub in another image."""
    cloud.push("other", "2-cu130", "us-east-1")
    content = prepared(cloud, "us-east-1", {**PLAIN, "scaling": None, "instance": {"type": "ml.g6e.12xlarge"}})
    directory.mkdir()
    for name, data in MODEL.items():
        (directory / name).write_bytes(data)
    secret = cloud.client("secretsmanager").create_secret(Name="hub", SecretString="never read")["ARN"]
    content["components"] = [
        {"name": "base", "copies": 2},
        {"name": "mine", "model": {"path": str(directory), "upload": "s3://models/mine/", "shape": SHAPE}},
        {
            "name": "hub",
            "model": {"id": "org/model", "shape": SHAPE, "token_secret": secret},
            "image": {"uri": content["image"]["uri"].replace("lmi:1-cu130", "other:2-cu130")},
            "options": {"max_rolling_batch_size": 8},
        },
    ]
    return content


def written(tmp_path: Path, content: dict[str, Any], name: str = "deployment.yaml") -> str:
    path = tmp_path / name
    path.write_text(yaml.safe_dump(content))
    return str(path)


def served(cloud: Cloud, component: str) -> dict[str, Any]:
    things = cloud.sagemaker.things
    model = things["inference-component", component].request["Specification"]["ModelName"]
    return dict(things["model", model].request["PrimaryContainer"])


def test_one_without_copies_is_not_created(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {**three(cloud, tmp_path / "mine"), "components": [{"name": "base", "copies": 0}]}
    assert main(["up", written(tmp_path, content), "--yes"]) == 2
    assert "components base: AWS cannot create a component with copies: 0" in capsys.readouterr().err
    assert not cloud.sagemaker.things
    for copies in (1, 0):
        content["components"] = [{"name": "base", "copies": copies}]
        assert main(["up", written(tmp_path, content), "--yes"]) == 0
    runtime = cloud.sagemaker.get("inference-component", "base").request["RuntimeConfig"]
    assert runtime["DesiredCopyCount"] == 0


def test_their_whole_life(cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]) -> None:
    content = three(cloud, tmp_path / "mine")
    path = written(tmp_path, content)
    assert main(["doctor", path]) == 0
    said = capsys.readouterr().out
    for line in (
        "image: lmi@",
        "image: other@",
        "s3://models/llama/",
        "s3://models/mine/",
        "org/model",
        "ok      secret",
    ):
        assert line in said
    assert main(["plan", path]) == 0
    said = capsys.readouterr().out
    assert (
        "The components' first copies on 1 x ml.g6e.12xlarge: 4 of 4 GPUs, 4096 of 393216 MB of memory: they fit."
        in said
    )
    assert main(["up", path, "--yes"]) == 0
    objects = cloud.client("s3").list_objects_v2(Bucket="models", Prefix="mine/")["Contents"]
    assert {one["Key"] for one in objects} == {f"mine/{name}" for name in MODEL}
    assert len(cloud.sagemaker.names("model")) == 3
    data = [served(cloud, name).get("ModelDataSource") for name in ("base", "mine", "hub")]
    assert [one and one["S3DataSource"]["S3Uri"] for one in data] == ["s3://models/llama/", "s3://models/mine/", None]
    assert served(cloud, "hub")["Environment"]["OPTION_MODEL_ID"] == "org/model"
    assert "/other@sha256:" in served(cloud, "hub")["Image"]
    assert main(["status", NAME, "--region", "us-east-1"]) == 0
    capsys.readouterr()
    assert main(["up", path, "--yes"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["down", path, "--yes", "--logs", "--data"]) == 0
    assert not cloud.sagemaker.things
    assert "Contents" not in cloud.client("s3").list_objects_v2(Bucket="models", Prefix="mine/")


def test_others_scaling_of_a_component_goes_with_it_and_is_said(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    content = three(cloud, tmp_path / "mine")
    assert main(["up", written(tmp_path, content), "--yes"]) == 0
    scaling = cloud.client("application-autoscaling")
    where = {
        "ServiceNamespace": "sagemaker", "ScalableDimension": "sagemaker:inference-component:DesiredCopyCount",
    }  # fmt: skip
    for name in ("base", "mine", "hub"):
        scaling.register_scalable_target(
            ResourceId=f"inference-component/{name}", MinCapacity=1, MaxCapacity=2, **where
        )
    capsys.readouterr()
    content["components"].pop()
    path = written(tmp_path, content)
    for command, left in (("up", ["base", "mine"]), ("down", [])):
        assert main([command, path, "--yes"]) == 0
        assert "scalable-target/" in capsys.readouterr().out
        found = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
        assert sorted(one["ResourceId"] for one in found) == [f"inference-component/{name}" for name in left]


def test_a_change_of_one_renews_its_model_only_and_the_plan_shows_it(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    content = three(cloud, tmp_path / "mine")
    assert main(["up", written(tmp_path, content), "--yes"]) == 0
    before = {name: served(cloud, name) for name in ("base", "mine")}
    content["components"][2]["options"] = {"max_rolling_batch_size": 16}
    path = written(tmp_path, content)
    capsys.readouterr()
    assert main(["plan", path]) == 0
    said = capsys.readouterr().out
    assert "PrimaryContainer.Environment.OPTION_MAX_ROLLING_BATCH_SIZE: 8 -> 16" in said
    assert said.count("replace model/") == 1
    assert said.count("update inference-component/") == 1
    assert main(["update", path, "--yes"]) == 0
    assert served(cloud, "hub")["Environment"]["OPTION_MAX_ROLLING_BATCH_SIZE"] == "16"
    assert {name: served(cloud, name) for name in ("base", "mine")} == before
    # Earlier models are kept as many as the present ones at most: three and one more.
    assert len(cloud.sagemaker.names("model")) == 4


def test_one_that_fails_takes_nothing_of_the_others(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    content = three(cloud, tmp_path / "mine")
    hub = content["components"].pop()
    assert main(["up", written(tmp_path, content), "--yes"]) == 0
    models = cloud.sagemaker.names("model")
    content["components"].append(hub)
    cloud.sagemaker.fate("hub", "Failed", "The primary container did not pass the ping health check.")
    assert main(["up", written(tmp_path, content), "--yes"]) == 5
    assert cloud.sagemaker.names("inference-component") == ["base", "mine"]
    assert cloud.sagemaker.names("model") == models, "what was made for it goes with it"
    assert main(["up", written(tmp_path, content), "--yes"]) == 0
    assert cloud.sagemaker.names("inference-component") == ["base", "hub", "mine"]


def test_what_does_not_fit_is_refused_before_anything_is_made(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    content = three(cloud, tmp_path / "mine")
    main.takes(written(tmp_path, content))
    large = {**SHAPE, "parameters": 7e10}
    content["components"][2]["model"]["shape"] = large
    calls = len(cloud.calls)
    assert main(["up", written(tmp_path, content), "--yes"]) == 2
    assert "component hub: instance.type: ml.g6e.12xlarge: weights of 130" in capsys.readouterr().err
    content["components"][2]["model"]["shape"] = SHAPE
    content["components"][0]["copies"] = 3
    assert main(["up", written(tmp_path, content), "--yes"]) == 2
    assert "the initial copies need 5 GPUs, but 1 x ml.g6e.12xlarge have 4" in capsys.readouterr().err
    made = [call.operation for call in cloud.calls[calls:] if call.operation.startswith(("Create", "Put"))]
    assert not made
    assert not cloud.sagemaker.things


def test_the_policies_fit_into_what_aws_takes(cloud: Cloud, tmp_path: Path) -> None:
    """A document that is too long is printed in parts, each of which AWS takes."""
    content = three(cloud, tmp_path / "mine")
    for who in ("execution-role", "deployer", "invoker"):
        policy = printed(content, who)
        assert all(length(part) <= MOST for part in parts(policy))
        role = json.dumps(policy)
        assert ("s3:PutObject" in role) == (who == "deployer")
    deployer = {one["Sid"]: one["Resource"] for one in printed(content)["Statement"]}
    assert deployer["ModelData"] == ["arn:aws:s3:::models/mine/*"]
    assert deployer["ModelDataRead"] == ["arn:aws:s3:::models/llama/*"]
