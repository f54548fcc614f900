"""Files of JSON: CreateModel's, a package's, JumpStart's, recommendations, and files that are none of these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.adopt.files import read_file, written
from deploy.adopt.specification import Wishes, adopted
from deploy.errors import DeployError, Refused, SpecError
from deploy.spec.reading import read_spec
from tests.deploy.public_endpoints import PUBLIC, ROLE

PLAIN = PUBLIC["Phi-3-mini"]
WISHES = Wishes(name="chat", role=ROLE)


def file(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "model.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def made(path: Path, wishes: Wishes = WISHES, number: int = 1) -> dict[str, Any]:
    """The specification, which is read as every other."""
    text = written(adopted(read_file(path, number), wishes), "lmi deploy adopt --file model.json")
    out = path.with_suffix(".yaml")
    out.write_text(text)
    read_spec(out)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_a_model_alone(tmp_path: Path) -> None:
    said = made(file(tmp_path, PLAIN.model))
    assert said["model"] == {"id": "microsoft/Phi-3-mini-4k-instruct", "context": 4096}
    assert said["options"]["max_rolling_batch_size"] == 8
    assert said["options"]["lmi_version"] == "0.32"


def test_a_model_with_its_configuration_and_tags(tmp_path: Path) -> None:
    content = {"Model": PLAIN.model, "EndpointConfig": PLAIN.endpoint_config, "Tags": [{"Key": "a", "Value": "b"}]}
    said = made(file(tmp_path, content), Wishes(name="chat"))
    assert said["instance"]["type"] == "ml.g5.2xlarge"
    assert said["timeouts"] == {"download": 900, "startup": 600}
    assert (said["role"], said["tags"]) == (ROLE, {"a": "b"})


def test_a_package_of_a_registry_and_one_of_the_marketplace(tmp_path: Path) -> None:
    container = {"Image": PLAIN.model["PrimaryContainer"]["Image"], "Environment": PLAIN.environment}
    content = {
        "ModelPackageArn": "arn:aws:sagemaker:eu-west-1:123456789012:model-package/phi/1",
        "InferenceSpecification": {
            "Containers": [container],
            "SupportedRealtimeInferenceInstanceTypes": ["ml.g5.2xlarge"],
            "SupportedContentTypes": [],
            "SupportedResponseMIMETypes": [],
        },
    }
    said = made(file(tmp_path, content))
    assert (said["region"], said["instance"]["type"]) == ("eu-west-1", "ml.g5.2xlarge")
    container["ProductId"] = "prod-1"
    with pytest.raises(Refused, match="is the Marketplace product prod-1"):
        read_file(file(tmp_path, content))


JUMPSTART: dict[str, Any] = {
    "model_id": "meta-textgeneration-llama-3-1-8b",
    "hosting_ecr_uri": "763104351884.dkr.ecr.us-west-2.amazonaws.com/djl-inference:0.31.0-lmi13.0.0-cu124",
    "default_inference_instance_type": "ml.g5.4xlarge",
    "hosting_artifact_uri": "s3://jumpstart-private/meta-textgeneration/artifacts/1.0.0/",
    "inference_environment_variables": [
        {"name": "OPTION_MAX_MODEL_LEN", "type": "text", "default": "8192", "scope": "container"},
        {"name": "HF_MODEL_ID", "type": "text", "default": "/opt/ml/model", "scope": "container"},
        {"name": "SAGEMAKER_PROGRAM", "type": "text", "default": "inference.py", "scope": "container"},
        {"name": "region", "type": "text", "default": "x", "scope": "algorithm"},
    ],
    "deploy_kwargs": {"container_startup_health_check_timeout": 1200, "model_data_download_timeout": 1200},
}


def test_a_specification_of_jumpstart_and_its_form_in_a_hub(tmp_path: Path) -> None:
    said = made(file(tmp_path, JUMPSTART))
    assert said["model"] == {"s3": JUMPSTART["hosting_artifact_uri"], "context": 8192}
    assert said["instance"]["type"] == "ml.g5.4xlarge"
    assert said["timeouts"] == {"download": 1200, "startup": 1200}
    assert "environment" not in said
    document = {
        "HostingEcrUri": JUMPSTART["hosting_ecr_uri"],
        "DefaultInferenceInstanceType": "ml.g5.4xlarge",
        "HostingArtifactUri": JUMPSTART["hosting_artifact_uri"],
        "InferenceEnvironmentVariables": [{"Name": "OPTION_MAX_MODEL_LEN", "Default": "8192", "Scope": "container"}],
    }
    answer = {
        "HubContentArn": "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/llama/1",
        "HubContentDocument": json.dumps(document),
    }
    again = made(file(tmp_path, answer))
    assert (again["model"], again["region"]) == (said["model"], "us-west-2")


def test_the_second_recommendation_of_a_job(tmp_path: Path) -> None:
    def one(kind: str, batch: str) -> dict[str, Any]:
        tuned = [{"Key": "OPTION_MAX_ROLLING_BATCH_SIZE", "ValueType": "String", "Value": batch}]
        endpoint = {"EndpointName": "e", "VariantName": "v", "InstanceType": kind, "InitialInstanceCount": 2}
        return {"EndpointConfiguration": endpoint, "ModelConfiguration": {"EnvironmentParameters": tuned}}

    content = {
        "JobArn": "arn:aws:sagemaker:us-east-1:123456789012:inference-recommendations-job/x",
        "RoleArn": ROLE,
        "InferenceRecommendations": [one("ml.g5.2xlarge", "16"), one("ml.g6e.xlarge", "64")],
    }
    path = file(tmp_path, content)
    said = made(path, Wishes(name="chat", container="lmi", model="Qwen/Qwen3-8B"), 2)
    assert (said["instance"]["type"], said["instance"]["count"]) == ("ml.g6e.xlarge", 2)
    assert said["options"]["max_rolling_batch_size"] == 64
    with pytest.raises(SpecError, match="--recommendation 3: the job has 2"):
        read_file(path, 3)
    with pytest.raises(Refused, match="not one that lmi deploy can replace"):
        adopted(read_file(path), Wishes(name="chat", model="Qwen/Qwen3-8B"))


def test_a_recommendation_with_image_and_variables_of_its_own(tmp_path: Path) -> None:
    content = {
        "AIRecommendationJobArn": "arn:aws:sagemaker:us-east-1:123456789012:ai-recommendation-job/x",
        "RoleArn": ROLE,
        "ModelSource": {"S3": {"S3Uri": "s3://by-hand/qwen/"}},
        "Recommendations": [
            {
                "DeploymentConfiguration": {
                    "ImageUri": PLAIN.model["PrimaryContainer"]["Image"],
                    "InstanceType": "ml.g6e.2xlarge",
                    "InstanceCount": 1,
                    "EnvironmentVariables": {"OPTION_MAX_ROLLING_BATCH_SIZE": "32", "HF_MODEL_ID": "/opt/ml/model"},
                }
            }
        ],
    }
    said = made(file(tmp_path, content), Wishes(name="chat"))
    assert said["model"] == {"s3": "s3://by-hand/qwen/"}
    assert said["options"]["max_rolling_batch_size"] == 32


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ({"a": 1}, "is none of the forms"),
        ({"PrimaryContainer": []}, "Model.PrimaryContainer: must be an object"),
        ({"PrimaryContainer": {"Environment": {"A": 1}}}, "Model.PrimaryContainer.Environment.A: must be a text"),
        ({"Model": PLAIN.model, "EndpointConfig": {"ProductionVariants": {}}}, "ProductionVariants: must be an array"),
        ({"Model": PLAIN.model, "Components": [{}]}, "Components.InferenceComponentName: must be given"),
        ({"Model": PLAIN.model, "Tags": [{"Key": "a"}]}, "Tags[0].Value: must be given"),
        ({"Model": 3}, "Model: must be an object"),
        ({"Models": 3}, "Models: must be an array"),
        ({"HubContentDocument": "{"}, "HubContentDocument is not JSON"),
        (
            {**JUMPSTART, "inference_environment_variables": [3]},
            "inference_environment_variables[0]: must be an object",
        ),
        ({"InferenceRecommendations": 3}, "InferenceRecommendations: must be an array"),
        ({"Recommendations": []}, "the job has 0"),
    ],
)
def test_a_file_with_something_wrong_is_refused_with_its_place(tmp_path: Path, content: Any, why: str) -> None:
    with pytest.raises(DeployError) as caught:
        made(file(tmp_path, content))
    assert why in str(caught.value)


def test_what_the_file_does_not_tell_must_be_said(tmp_path: Path) -> None:
    path = file(tmp_path, {"PrimaryContainer": PLAIN.model["PrimaryContainer"]})
    with pytest.raises(SpecError, match="names no endpoint"):
        made(path, Wishes())
    with pytest.raises(SpecError, match="no execution role is known"):
        made(path, Wishes(name="chat"))


def test_a_file_that_is_too_long_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has more than 4 MiB"):
        read_file(file(tmp_path, " " * (5 << 20)))
    with pytest.raises(SpecError, match="No such file"):
        read_file(tmp_path / "none.json")
