"""`plan`, `up`, `update` and `down` as they are typed: what they print, what they call, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from tests.deploy.cases import LLAMA_CONFIG
from tests.deploy.doubles.aws import ACCOUNT, Call, Cloud
from tests.deploy.doubles.deployments import COMPONENTS, NAME, PLAIN, Deployer
from tests.deploy.doubles.endpoints import listed_price
from tests.deploy.doubles.hub import safetensors_header, serving
from tests.servers import PATIENCE

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("only_aws")


MODEL = {
    "config.json": json.dumps(
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
        | {"architectures": ["LlamaForCausalLM"], "vocab_size": 9}
    ).encode(),
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "model.safetensors": (2).to_bytes(8, "little") + b"{}",
}
"""As small as model data can be."""


@pytest.fixture
def cloud(cloud: Cloud) -> Cloud:
    """With the image in it, the role, and the model's data."""
    cloud.push("lmi", "1-cu130")
    trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    cloud.client("iam").create_role(RoleName="model", AssumeRolePolicyDocument=document)
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="models")
    for name, content in MODEL.items():
        s3.put_object(Bucket="models", Key=f"llama/{name}", Body=content)
    cloud.calls.clear()
    return cloud


def file(tmp_path: Path, content: dict[str, Any] = PLAIN, **changes: Any) -> str:
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}))
    return str(path)


def test_plan_and_up_say_that_an_update_takes_back_what_was_scaled_by_hand(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, scaling=None)
    assert main(["up", path, "--yes"]) == 0
    cloud.sagemaker.things["endpoint", NAME].request["Counts"] = {"AllTraffic": 5}
    capsys.readouterr()
    for command in (["plan", path], ["up", path, "--yes"]):
        assert main(command) == 0
        assert "would scale it to instance.count, which is 2" in " ".join(capsys.readouterr().out.split())


def test_up_prints_as_json_what_it_did_and_progress_beside_it(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path)
    assert main(["up", path, "--yes", "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["endpoint"], found["changed"], found["previous_config"]) == (NAME, True, None)
    assert {action["verb"] for action in found["actions"]} == {"create"}
    assert f"{NAME} is in service" in found["next"][0]
    assert found["next"][0] in shown.err
    assert main(["up", path, "--yes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["changed"], found["next"]) == (False, [])
    assert {action["verb"] for action in found["actions"]} == {"unchanged"}


LMI = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.36.0-lmi22.0.0-cu129"


def another_s_endpoint(cloud: Cloud, image: str, name: str = f"{NAME}-old") -> None:
    """As somebody made it by hand, with one of AWS's images."""
    sagemaker, role = cloud.client("sagemaker"), "arn:aws:iam::123456789012:role/model"
    sagemaker.create_model(ModelName=name, ExecutionRoleArn=role, PrimaryContainer={"Image": image})
    variant = {"VariantName": "AllTraffic", "ModelName": name, "InstanceType": "ml.g6e.2xlarge"}
    sagemaker.create_endpoint_config(
        EndpointConfigName=name, ProductionVariants=[{**variant, "InitialInstanceCount": 2}]
    )
    sagemaker.create_endpoint(EndpointName=NAME, EndpointConfigName=name)
    while sagemaker.describe_endpoint(EndpointName=NAME)["EndpointStatus"] != "InService":
        pass
    cloud.calls.clear()


def another_s_components(cloud: Cloud, *images: str, own_models: bool) -> None:
    """As somebody made them by hand, each with an image, in its own model or in the component itself."""
    sagemaker, role = cloud.client("sagemaker"), "arn:aws:iam::123456789012:role/model"
    variant = {"VariantName": "AllTraffic", "InstanceType": "ml.g6e.12xlarge", "InitialInstanceCount": 1}
    config = f"{NAME}-old"
    sagemaker.create_endpoint_config(EndpointConfigName=config, ProductionVariants=[variant], ExecutionRoleArn=role)
    sagemaker.create_endpoint(EndpointName=NAME, EndpointConfigName=config)
    while sagemaker.describe_endpoint(EndpointName=NAME)["EndpointStatus"] != "InService":
        pass
    for number, image in enumerate(images):
        name, needs = f"{NAME}-by-hand-{number}", {"MinMemoryRequiredInMb": 1024}
        what: dict[str, Any] = {"Container": {"Image": image}}
        if own_models:
            sagemaker.create_model(ModelName=name, ExecutionRoleArn=role, PrimaryContainer={"Image": image})
            what = {"ModelName": name}
        sagemaker.create_inference_component(
            InferenceComponentName=name, EndpointName=NAME, VariantName="AllTraffic", RuntimeConfig={"CopyCount": 1},
            Specification={**what, "ComputeResourceRequirements": needs},
        )  # fmt: skip
    cloud.calls.clear()


@pytest.mark.parametrize("own_models", [True, False])
def test_components_that_are_taken_over_keep_the_release_of_their_image(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str], own_models: bool
) -> None:
    another_s_components(cloud, LMI, LMI, own_models=own_models)
    path = file(tmp_path, COMPONENTS)
    assert main(["plan", path, "--adopt"]) == 0
    said = "llama keeps responding like LMI 0.36: set options.lmi_version: '0.36', or another release"
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["up", path, "--adopt", "--yes"]) == 0
    things = cloud.sagemaker.things
    made = [thing.request for (kind, name), thing in things.items() if kind == "model" and "by-hand" not in name]
    assert {model["PrimaryContainer"]["Environment"]["OPTION_LMI_VERSION"] for model in made} == {"0.36"}
    capsys.readouterr()
    assert main(["up", path, "--yes"]) == 0  # the same file changes nothing
    assert "nothing to do" in " ".join(capsys.readouterr().out.split())


def test_components_of_several_releases_are_said(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    another_s_components(cloud, LMI, LMI.replace("0.36.0-lmi22", "0.33.0-lmi15"), own_models=True)
    assert main(["plan", file(tmp_path, COMPONENTS), "--adopt"]) == 0
    said = "llama responds like LMI 0.33 and 0.36: set options.lmi_version"
    assert said in " ".join(capsys.readouterr().out.split())


def served(cloud: Cloud) -> Any:
    """The environment of the model that the endpoint has."""
    things = cloud.sagemaker.things
    config = things["endpoint-config", things["endpoint", NAME].request["EndpointConfigName"]].request
    model = things["model", config["ProductionVariants"][0]["ModelName"]].request
    return model["PrimaryContainer"].get("Environment", {}).get("OPTION_LMI_VERSION")


def test_an_endpoint_that_is_taken_over_keeps_the_release_of_its_image(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    another_s_endpoint(cloud, LMI)
    path = file(tmp_path, scaling=None)
    assert main(["plan", path, "--adopt"]) == 0
    said = "llama keeps responding like LMI 0.36: set options.lmi_version: '0.36', or another release"
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["up", path, "--adopt", "--yes"]) == 0
    assert served(cloud) == "0.36"
    capsys.readouterr()
    assert main(["up", path, "--yes"]) == 0  # the same file changes nothing
    assert "nothing to do" in " ".join(capsys.readouterr().out.split())
    assert main(["up", file(tmp_path, scaling=None, options={"lmi_version": "0.30"}), "--yes"]) == 0
    assert served(cloud) == "0.30"


def test_a_specification_that_names_a_release_has_that(cloud: Cloud, tmp_path: Path, main: Deployer) -> None:
    another_s_endpoint(cloud, LMI)
    assert main(["up", file(tmp_path, scaling=None, options={"lmi_version": "0.30"}), "--adopt", "--yes"]) == 0
    assert served(cloud) == "0.30"


@pytest.mark.parametrize("image", ["x", LMI.replace("0.36.0-lmi22.0.0-cu129", "latest")])
def test_an_image_that_tells_no_release_changes_nothing(
    cloud: Cloud, tmp_path: Path, main: Deployer, image: str
) -> None:
    another_s_endpoint(cloud, image)
    assert main(["up", file(tmp_path, scaling=None), "--adopt", "--yes"]) == 0
    assert served(cloud) is None


def test_an_image_that_may_not_be_read_is_said(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    another_s_endpoint(cloud, LMI, "by-hand")
    main(["plan", file(tmp_path, scaling=None), "--adopt"])
    said = "reading the image of llama is denied: set options.lmi_version to its LMI release"
    assert said in " ".join(capsys.readouterr().out.split())
    assert {need.action for need in cloud.denied} == {"sagemaker:DescribeEndpointConfig"}
    cloud.denied.clear()


def test_pools_are_created_shown_changed_and_deleted(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model for each degree of tensor parallelism; those of old versions go with their configurations."""
    shape = {"parameters": 8.03e9, "layers": 32, "kv_heads": 8, "head_dim": 128}
    pools = [{"type": "ml.g6e.2xlarge"}, {"type": "ml.g6e.12xlarge"}]
    changes: dict[str, Any] = {"scaling": None, "model": {"s3": "s3://models/llama/", "shape": shape, "context": 4096}}
    path = file(tmp_path, **changes, instance={"count": 2, "pools": pools}, update={"keep": 1})
    for changed in False, True:
        if changed:
            path = file(tmp_path, **changes, instance={"count": 2, "pools": pools[::-1]}, update={"keep": 1})
        assert main(["up", path, "--yes"]) == 0
        models = [name for kind, name in cloud.sagemaker.things if kind == "model"]
        (config,) = [thing for (kind, _), thing in cloud.sagemaker.things.items() if kind == "endpoint-config"]
        (variant,) = config.request["ProductionVariants"]
        first, second = variant["InstancePools"]
        assert first["InstanceType"] == pools[changed]["type"]
        assert {variant["ModelName"], second["ModelNameOverride"]} == set(models)
        assert main(["status", NAME]) == 0
        assert f"2 x {first['InstanceType']}" in " ".join(capsys.readouterr().out.split())
    cloud.calls.clear()
    assert main(["up", path, "--yes"]) == 0
    assert not [call for call in cloud.calls if call.operation.startswith(("Create", "Update", "Delete"))]
    assert main(["down", path, "--yes"]) == 0
    assert not cloud.sagemaker.things


def test_plan_shows_requests_and_changes_nothing(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", file(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"account {ACCOUNT}" in said
    assert "sagemaker.create_endpoint_config" in said
    assert "InstanceType: ml.g6e.2xlarge" in said
    assert "advice: ml.g6e.2xlarge has room for" in said
    assert "ml.g6e.2xlarge" in said
    assert "$" in said  # the class of the cost
    assert "7 to create." in said
    assert cloud.calls
    assert cloud.changes() == []


def test_up_says_what_will_cost_money_and_that_nothing_was_done(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(["up", file(tmp_path), "--set", "instance.price=3"]) == 1
    said = capsys.readouterr().out
    assert "2 x ml.g6e.2xlarge, $3" in said
    assert said.endswith("Nothing was changed.\n")
    assert cloud.changes() == []
    assert main(["up", file(tmp_path), "--yes"]) == 0
    assert "uploading" not in capsys.readouterr().out  # model.s3: there is nothing to upload


@pytest.mark.parametrize("command", ["plan", "up"])
def test_the_models_config_is_read_once_for_the_decision_and_the_table(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    checks = [] if command == "plan" else ["--no-checks"]
    assert main([command, file(tmp_path, model={"s3": "s3://models/llama/", "context": 2048}), *checks]) == 0
    own = 1 if command == "plan" else 0  # preflight reads it too
    assert cloud.count("GET /models/llama/config.json") == 1 + own


def test_plan_shows_the_difference(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", file(tmp_path)]) == 0
    capsys.readouterr()
    cloud.calls.clear()
    assert main(["plan", file(tmp_path, instance={"type": "ml.g6e.4xlarge", "count": 2}, scaling=None)]) == 0
    said = capsys.readouterr().out
    assert "ProductionVariants[0].InstanceType: ml.g6e.2xlarge -> ml.g6e.4xlarge" in said
    assert "- delete scalable-target/" in said  # its policies are deleted with it
    assert cloud.changes() == []


def test_plan_says_once_what_is_wrong_with_a_directory_and_what_to_do(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = {**PLAIN["model"], "s3": None, "path": str(tmp_path / "model"), "upload": "s3://models/new/"}
    assert main(["plan", file(tmp_path, model=model)]) == 0
    said = capsys.readouterr().out
    assert said.count("there are no weights") == 1
    assert said.count("Add the model's *.safetensors files, or a .gguf file.") == 1


def test_down_says_how_to_name_an_endpoint(main: Deployer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down", "nosuch-endpoint", "--yes"]) == 2
    assert "lmi deploy down --name nosuch-endpoint" in capsys.readouterr().err


def test_update_shows_the_difference_before_it_asks(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["up", file(tmp_path)]) == 0
    capsys.readouterr()
    cloud.calls.clear()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(capsys.readouterr().out)
        return "n"

    monkeypatch.setattr("builtins.input", answer)
    assert main(["update", file(tmp_path, instance={"type": "ml.g6e.4xlarge", "count": 2})]) == 1
    assert "ProductionVariants[0].InstanceType: ml.g6e.2xlarge -> ml.g6e.4xlarge" in asked[0]
    assert "sagemaker.create_endpoint_config" not in asked[0]  # requests are for `plan`
    assert cloud.changes() == []


def test_plan_as_json(cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", file(tmp_path, COMPONENTS), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["deployment"], said["region"], said["asked"], said["unasked"]) == (NAME, "us-east-1", True, None)
    assert {action["verb"] for action in said["actions"]} == {"create"}
    wake = next(action for action in said["actions"] if action["name"].endswith("second/no-capacity"))
    assert wake["request"]["AlarmActions"][0].startswith("<PolicyARN of scaling-policy/")


def test_plan_and_up_say_the_prices_of_the_pricing_api(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.price_list = [listed_price("Host:ml.g6e.2xlarge", "2.71828")]
    assert main(["plan", file(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "$2.71828/h" in said
    assert "cost: on-demand, us-east-1, from AWS's Pricing API" in said
    main(["up", file(tmp_path)])
    assert "2 x ml.g6e.2xlarge, $2.71828/h each" in capsys.readouterr().out


def test_up_says_the_price_of_the_pricing_api_for_a_model_of_unknown_size(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.price_list = [listed_price("Host:ml.g6e.2xlarge", "2.71828")]
    main(["up", file(tmp_path, model={"id": "me/mine"})])
    assert "2 x ml.g6e.2xlarge, $2.71828/h each" in capsys.readouterr().out


def test_a_deployer_who_may_not_ask_for_prices_plans_by_the_table(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.refuse("GetProducts", "AccessDeniedException", "no")
    assert main(["plan", file(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "as of 2026-09-27 (pricing:GetProducts is not allowed)" in said


def test_plan_asks_the_hub_for_a_model_that_nobody_listed(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"model.layers.{number}.w": ("BF16", (64, 1024, 1024)) for number in range(32)}
    main.takes(file(tmp_path, model={"id": "me/mine"}, scaling=None))  # the policies are those of any type
    given = file(tmp_path, model={"id": "me/mine", "context": 2048}, instance={"type": "auto"}, scaling=None)
    with serving() as hub:
        hub.add("me/mine", LLAMA_CONFIG, **{"model.safetensors": safetensors_header(tensors)})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        assert main(["plan", given]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2.15 billion weights in bf16 (its files on 127.0.0.1), context 2048: 4.0 GiB" in said
    assert main(["plan", given]) == 2  # the hub is gone, and the table does not know the model
    assert "instance.type: auto needs the model's size" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["offline", "no credentials", "no connection", "expired"])
def test_plan_without_aws_is_the_whole_plan(
    how: str,
    cloud: Cloud,
    tmp_path: Path,
    main: Deployer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = []
    if how == "offline":
        more = ["--offline"]
    elif how == "no credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    elif how == "no connection":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    else:
        cloud.refuse("DescribeModel", "ExpiredTokenException", "expired", times=9)
    assert main(["plan", file(tmp_path), *more]) == 0
    said = capsys.readouterr().out
    assert "AWS was not called" in said
    assert "7 to create." in said
    assert cloud.changes() == []
    if how != "expired":
        assert cloud.calls == []


def test_plan_that_aws_denies_is_an_error(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.refuse("DescribeModel", "AccessDeniedException", "not authorized to perform: sagemaker:DescribeModel")
    assert main(["plan", file(tmp_path)]) == 3
    assert "DescribeModel" in capsys.readouterr().err


def test_a_secret_is_never_shown(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    path = file(tmp_path, environment={"MY_TOKEN": secret})
    assert main(["plan", path]) == 2
    assert main(["up", path, "--allow-plaintext-secret"]) == 0
    other = file(tmp_path, environment={"MY_TOKEN": "hf_another0another0another0"})
    assert main(["plan", other, "--allow-plaintext-secret"]) == 0
    assert main(["plan", other, "--allow-plaintext-secret", "--json"]) == 0
    said = "".join(capsys.readouterr())
    assert "MY_TOKEN: ***" in said
    assert "MY_TOKEN: *** -> ***" in said
    assert "hf_a" not in said


def test_up_update_down(cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["update", file(tmp_path)]) == 4
    assert "there is no endpoint llama" in capsys.readouterr().err
    assert main(["up", file(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "create endpoint/llama" in said
    assert "lmi deploy chat llama" in said
    assert main(["up", file(tmp_path)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["update", file(tmp_path, options={"max_tokens": 3})]) == 0
    assert cloud.count("UpdateEndpoint") == 1
    assert main(["down", file(tmp_path), "--yes"]) == 0
    assert "llama is deleted." in capsys.readouterr().out
    assert cloud.everything() == {}
    assert main(["down", "--name", NAME, "--yes"]) == 0
    assert "llama has no resources in us-east-1." in capsys.readouterr().out


def test_up_looks_before_for_what_would_fail(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.client("s3").put_object(Bucket="models", Key="llama/folder/", Body=b"")
    cloud.calls.clear()
    assert main(["up", file(tmp_path)]) == 2
    assert "folder/" in capsys.readouterr().err
    assert cloud.changes() == []
    assert main(["up", file(tmp_path), "--no-checks"]) == 0
    assert cloud.sagemaker.names("endpoint") == [NAME]


def test_an_endpoint_that_fails_says_what_to_do_and_leaves_nothing(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.sagemaker.fate(NAME, "Failed", "The primary container did not pass the ping health check.")
    assert main(["up", file(tmp_path)]) == 5
    said = capsys.readouterr()
    assert "ping health check" in said.err
    assert len(said.err.splitlines()) > 1
    assert "deleted endpoint/llama" in said.out
    assert cloud.everything() == {}


def test_down_asks_and_without_an_answer_removes_nothing(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["up", file(tmp_path)])
    there = cloud.everything()
    assert main(["down", file(tmp_path)]) == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(["down", file(tmp_path)]) == 1
    assert cloud.everything() == there
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(["down", file(tmp_path)]) == 0
    assert cloud.everything() == {}


def test_down_needs_to_know_what(capsys: pytest.CaptureFixture[str], tmp_path: Path, main: Deployer) -> None:
    assert main(["down"]) == 2
    assert "--name" in capsys.readouterr().err
    assert main(["down", file(tmp_path), "--data"]) == 2
    assert "model.upload" in capsys.readouterr().err
    assert main(["down", file(tmp_path), "--name", "another"]) == 2
    assert "Pass only one of them" in capsys.readouterr().err


def test_up_sends_the_model_and_down_removes_it_with_the_logs(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    s3, logs = cloud.client("s3"), cloud.client("logs")
    model = tmp_path / "model"
    model.mkdir()
    for name, content in MODEL.items():
        (model / name).write_bytes(content)
    shape = PLAIN["model"]["shape"]
    path = file(tmp_path, model={"path": str(model), "upload": "s3://models/mine/", "shape": shape})
    assert main(["up", path]) == 0
    (model / "config.json").write_bytes(MODEL["config.json"] + b" ")
    assert main(["up", path]) == 2
    assert main(["plan", path]) == 2
    (model / "config.json").write_bytes(MODEL["config.json"])
    assert main(["up", path]) == 0
    keys = [one["Key"] for one in s3.list_objects_v2(Bucket="models")["Contents"]]
    assert "mine/model.safetensors" in keys
    s3.put_object(Bucket="models", Key="mine/notes.txt", Body=b"somebody's")
    group = f"/aws/sagemaker/Endpoints/{NAME}"
    logs.create_log_group(logGroupName=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.cli.down.delete_logs", Mock(side_effect=KeyboardInterrupt))
        assert main(["down", path, "--yes", "--data", "--logs"]) == 128 + signal.SIGINT
    told = f"run `lmi deploy down --logs --data` again; to delete everything, `lmi deploy down --name {NAME} --region "
    assert f"{told}us-east-1 --logs`." in capsys.readouterr().err
    assert main(["down", path, "--yes", "--data", "--logs"]) == 0
    keys = [one["Key"] for one in s3.list_objects_v2(Bucket="models")["Contents"]]
    assert keys == [*(f"llama/{name}" for name in sorted(MODEL)), "mine/notes.txt"]
    assert logs.describe_log_groups()["logGroups"] == []


@pytest.mark.parametrize("command", ["up", "update", "batch"])
def test_files_that_change_before_the_answer_do_not_come_under_what_serves(
    cloud: Cloud, tmp_path: Path, main: Deployer, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """What was compared may have changed while somebody read the plan."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name, content in MODEL.items():
        (directory / name).write_bytes(content)
    model = {**PLAIN["model"], "s3": None, "path": str(directory), "upload": "s3://models/mine/"}
    batch = {"input": "s3://models/in/", "output": "s3://models/out"}
    whole: dict[str, Any] = {"model": model, "batch": batch, "instance": {"type": "ml.g6e.2xlarge"}, "scaling": None}
    assert main(["up", file(tmp_path, **whole), "--yes", "--no-checks"]) == 0
    serves = cloud.everything()
    objects = cloud.client("s3").list_objects_v2(Bucket="models", Prefix="mine/")["Contents"]

    def answered(question: str, **how: bool) -> bool:
        (directory / "tokenizer.json").write_bytes(b"[]")
        return True

    monkeypatch.setattr(f"deploy.cli.{'batch' if command == 'batch' else 'up'}.confirm", answered)
    changed = file(tmp_path, **whole, options={"max_tokens": 2})
    assert main([command, changed, "--no-checks"]) == 2
    assert cloud.client("s3").list_objects_v2(Bucket="models", Prefix="mine/")["Contents"] == objects
    assert cloud.everything() == serves


INTERRUPTED = """
import sys
sys.path.insert(0, {root!r})
import deploy.deployer.apply
deploy.deployer.apply.EVERY = 0.05
from deploy.cli.main import main
raise SystemExit(main(["up", {file!r}, "--no-checks"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_says_where_it_stands(cloud: Cloud, tmp_path: Path, main: Deployer, number: int) -> None:
    cloud.sagemaker.fate(NAME, "InService", polls=1000)
    child: list[subprocess.Popen[str]] = []

    def interrupt(call: Call) -> None:
        if call.operation == "DescribeEndpoint" and cloud.count("CreateEndpoint"):
            cloud.after = None
            child[0].send_signal(number)

    cloud.after = interrupt
    main.takes(file(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(root=str(ROOT), file=file(tmp_path))],
        cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    child.append(process)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    assert "Current step: endpoint/llama. AWS finishes" in said
    assert "lmi deploy up" in said
    assert "lmi deploy down --name llama" in said
    assert cloud.sagemaker.things["endpoint", NAME].status == "Creating"
    change = cloud.sagemaker.things["endpoint", NAME].change
    assert change is not None
    change.left = 0
    assert main(["up", file(tmp_path)]) == 0
    assert main(["down", "--name", NAME, "--yes"]) == 0
    assert cloud.everything() == {}
