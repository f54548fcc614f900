"""Adoption of endpoints: files of JSON, and a container's variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.adopt.files import read_file, written
from deploy.adopt.specification import Wishes, adopted
from deploy.adopt.triton import read_repository
from deploy.adopt.variables import KINDS, Container, Variables, container_kind, typed, variables
from deploy.errors import DeployError, Refused, SpecError
from deploy.s3.archive import Artifact
from deploy.spec.options import settings_of
from deploy.spec.reading import read_spec
from handler.config.loader import read_config
from handler.core.tgi_version import NEWEST, read_tgi_version
from tests.deploy.public_endpoints import PUBLIC, ROLE
from tests.one_test import in_one_test

# -- files of JSON: CreateModel's, a package's, JumpStart's, recommendations, and files that are none of these ---------


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


def test_the_data_of_a_file_s_model_is_said_to_stay_behind(tmp_path: Path) -> None:
    container = {**PLAIN.model["PrimaryContainer"], "ModelDataUrl": "s3://data/code.tar.gz"}
    made(file(tmp_path, {**PLAIN.model, "PrimaryContainer": container}))
    assert "#   ModelDataUrl=s3://data/code.tar.gz: it was not read" in (tmp_path / "model.yaml").read_text()


def test_a_model_with_its_configuration_and_tags(tmp_path: Path) -> None:
    content = {"Model": PLAIN.model, "EndpointConfig": PLAIN.endpoint_config, "Tags": [{"Key": "a", "Value": "b"}]}
    said = made(file(tmp_path, content), Wishes(name="chat"))
    assert said["instance"]["type"] == "ml.g5.2xlarge"
    assert said["timeouts"] == {"download": 900, "startup": 600}
    assert (said["role"], said["tags"]) == (ROLE, {"a": "b"})


def test_a_field_that_aws_does_not_have_is_said(tmp_path: Path) -> None:
    container = {**PLAIN.model["PrimaryContainer"], "Imagee": "x"}
    variant = {"VariantName": "AllTraffic", "InstanceType": "ml.g5.2xlarge", "Count": 2}
    path = file(
        tmp_path,
        {"Model": {**PLAIN.model, "PrimaryContainer": container}, "EndpointConfig": {"ProductionVariants": [variant]}},
    )
    made(path)
    text = path.with_suffix(".yaml").read_text()
    for place in ("Model.PrimaryContainer.Imagee", "EndpointConfig.ProductionVariants[0].Count"):
        assert f"#   {place}: AWS's API has no such field" in text
    made(file(tmp_path, {**PLAIN.model, "ResponseMetadata": {}, "Comment": "x"}))
    text = path.with_suffix(".yaml").read_text()
    assert "#   Model.Comment: AWS's API" in text
    assert "ResponseMetadata" not in text


def role(name: str) -> str:
    return f"arn:aws:iam::123456789012:role/{name}"


@in_one_test(
    ("roles", "chosen"),
    [
        ({"model": "m"}, "m"),
        ({"config": "c"}, "c"),
        ({"variant": "v"}, "v"),
        ({"model": "m", "config": "c"}, "m"),
        ({"variant": "v", "model": "m", "config": "c"}, "v"),
        ({"model": "m", "config": "m"}, "m"),
        ({"model": "m", "other": "o", "config": "c"}, "m"),
    ],
)
def test_no_role_is_dropped_without_a_word(roles: dict[str, str], chosen: str, tmp_path: Path) -> None:
    def with_role(name: str, **fields: Any) -> dict[str, Any]:
        return {**fields, **({"ExecutionRoleArn": role(roles[name])} if name in roles else {})}

    container = PLAIN.model["PrimaryContainer"]
    models = [with_role("model", ModelName="a", PrimaryContainer=container)]
    components, of_variant = [], {"ModelName": "a"}
    if "other" in roles:
        changed = {**container, "Environment": {**container["Environment"], "OPTION_MAX_ROLLING_BATCH_SIZE": "9"}}
        models.append(with_role("other", ModelName="b", PrimaryContainer=changed))
        components = [
            {"InferenceComponentName": name, "Specification": {
                "ModelName": name, "ComputeResourceRequirements": {"MinMemoryRequiredInMb": 1024}}}
            for name in "ab"
        ]  # fmt: skip
        of_variant = {}
    variant = with_role("variant", VariantName="AllTraffic", InstanceType="ml.g5.2xlarge", **of_variant)
    content = {
        **({"Models": models, "Components": components} if components else {"Model": models[0]}),
        "EndpointConfig": with_role("config", ProductionVariants=[variant]),
    }
    path = file(tmp_path, content)
    assert made(path, Wishes(name="chat"))["role"] == role(chosen)
    text = path.with_suffix(".yaml").read_text()
    for name in {*roles.values()} - {chosen}:
        assert f"ExecutionRoleArn={role(name)} of the" in text
    assert made(path, Wishes(name="chat", role=role("mine")))["role"] == role("mine")


def test_a_component_without_copies_gets_one_as_aws_creates_none_with_0(tmp_path: Path) -> None:
    component = {
        "InferenceComponentName": "ic",
        "Specification": {"ModelName": "by-hand-model", "ComputeResourceRequirements": {"MinMemoryRequiredInMb": 1024}},
        "RuntimeConfig": {"CopyCount": 0},
    }
    config = {"ProductionVariants": [{"VariantName": "AllTraffic", "InstanceType": "ml.g5.2xlarge"}]}
    path = file(tmp_path, {"Model": PLAIN.model, "EndpointConfig": config, "Components": [component]})
    assert made(path)["components"][0]["copies"] == 1
    assert "#   components ic: 0 copies: AWS cannot create a component" in path.with_suffix(".yaml").read_text()


def test_names_of_one_option_are_compared_as_that_option() -> None:
    found = variables({"OPTION_MODEL": "a/b", "HF_MODEL_ID": "c/d", "OPTION_DTYPE": "bf16"}, LMI)
    assert (found.model_id, names(found.idle)) == ("a/b", ["HF_MODEL_ID"])


def test_prefix_caching_of_tgi_is_compared_as_the_option_that_it_is() -> None:
    given = {"USE_PREFIX_CACHING": "0", "PREFIX_CACHING": "true", "ATTENTION": "flashinfer"}
    found = variables(given, container_kind("text-generation-inference:3.0", None))
    assert (found.options["enable_prefix_caching"], found.environment) == (True, {})
    assert [name for name, _ in found.unmapped] == ["USE_PREFIX_CACHING=0"]
    assert names(found.idle) == ["ATTENTION"]


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


def _component(framework: str, version: str, draft: str, **more: Any) -> dict[str, Any]:
    """A configuration's fields, as JumpStart's bucket has them."""
    data = {"s3_uri": draft, "s3_data_type": "S3Prefix", "compression_type": "None"}
    provider = {"name": "JumpStart", "classification": "gated"}
    source = {"channel_name": "draft", "provider": provider, "s3_data_source": data}
    return {
        "hosting_ecr_specs": {"framework": framework, "framework_version": version, "py_version": "py312"},
        "hosting_prepacked_artifact_key": "llama/inference-prepack/v2.0.0/",
        "hosting_additional_data_sources": {"speculative_decoding": [source]},
        **more,
    }


IN_ITS_BUCKET: dict[str, Any] = {
    "model_id": "meta-llama",
    "gated_bucket": True,
    "hosting_eula_key": "eula.txt",
    "hosting_artifact_key": "llama/inference/v2.0.0/",
    "hosting_ecr_specs": {"framework": "huggingface-llm", "framework_version": "2.0.0"},
    "inference_volume_size": 256,
    "inference_enable_network_isolation": True,
    "inference_environment_variables": [
        {"name": "OPTION_MAX_MODEL_LEN", "default": 4096, "scope": "container"},
        {"name": "OPTION_DTYPE", "default": None, "scope": "container"},
        {"name": "OPTION_TENSOR_PARALLEL_DEGREE", "default": "1", "scope": "container"},
    ],
    "inference_configs": {"slow": {"component_names": ["slow"]}, "fast": {"component_names": ["fast"]}},
    "inference_config_rankings": {"overall": {"rankings": ["fast", "slow"]}},
    "inference_config_components": {
        "slow": _component("huggingface-llm", "2.0.0", "slow/"),
        "fast": _component(
            "djl-lmi",
            "0.28.0",
            "draft/",
            default_inference_instance_type="ml.g5.48xlarge",
            gated_bucket=False,
            hosting_instance_type_variants={
                "regional_aliases": {
                    "us-west-2": {"one": "763104351884.dkr.ecr.us-west-2.amazonaws.com/djl-inference:0.36.0-lmi18"}
                },
                "variants": {
                    "g5": {
                        "regional_properties": {"image_uri": "$one"},
                        "properties": {
                            "environment_variables": {"OPTION_TENSOR_PARALLEL_DEGREE": "4", "OPTION_DTYPE": "bf16"}
                        },
                    },
                    "ml.g5.48xlarge": {"properties": {"environment_variables": {"OPTION_TENSOR_PARALLEL_DEGREE": "8"}}},
                },
            },
        ),
    },
}


def in_region(path: Path, region: str) -> tuple[dict[str, Any], str]:
    found = adopted(read_file(path, region=region), WISHES)
    return found.content, written(found, "x")


def test_jumpstart_s_document_has_its_first_configuration_and_default_type(tmp_path: Path) -> None:
    content, text = in_region(file(tmp_path, IN_ITS_BUCKET), "us-west-2")
    bucket = "s3://jumpstart-private-cache-prod-us-west-2/"
    assert content["model"] == {"s3": f"{bucket}llama/inference-prepack/v2.0.0/", "context": 4096}
    assert (content["region"], content["network"]) == ("us-west-2", {"isolated": True})
    assert content["options"] == {
        "lmi_version": "0.36", "dtype": "bf16", "tensor_parallel_degree": 8, "llm_engine": "vllm"
    }  # fmt: skip
    assert content["instance"] == {"type": "ml.g5.48xlarge", "unchecked": True}  # NVMe: no volume
    (source,) = content["sagemaker"]["model"]["PrimaryContainer"]["AdditionalModelDataSources"]
    assert (source["ChannelName"], source["S3DataSource"]["S3Uri"]) == ("draft", f"{bucket}draft/")
    assert "JumpStart's hosting_eula_key: read the licence" in text
    needs = {"hosting_resource_requirements": {"num_accelerators": 8}, "hosting_script_key": ""}
    _, text = in_region(file(tmp_path, {**IN_ITS_BUCKET, **needs}), "us-west-2")
    assert "JumpStart's hosting_resource_requirements: adopt ignores this field" in text
    assert text.count("adopt ignores this field") == 1


def test_jumpstart_s_image_is_known_by_its_framework_without_a_variant(tmp_path: Path) -> None:
    content = json.loads(json.dumps(IN_ITS_BUCKET))
    del content["inference_config_components"]["fast"]["hosting_instance_type_variants"]
    assert in_region(file(tmp_path, content), "eu-west-1")[0]["options"]["lmi_version"] == "0.28"
    del content["inference_config_rankings"]  # without one, the first by name
    assert "container is LMI" in in_region(file(tmp_path, content), "eu-west-1")[1]
    content["inference_config_components"]["fast"]["hosting_ecr_specs"] = {"framework": "huggingface"}
    with pytest.raises(Refused, match=r"the image huggingface:2\.0\.0 cannot be replaced"):
        in_region(file(tmp_path, content), "eu-west-1")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"hosting_ecr_specs": {}, "hosting_artifact_key": "a/"}, "the document names no image"),
        (
            {"hosting_ecr_uri": "x/tgi:2", "hosting_model_package_arns": {"us-east-1": "arn"}},
            "container and weights are in a Marketplace package",
        ),
        (IN_ITS_BUCKET, "the bucket with the weights depends on the region"),
        (
            {**IN_ITS_BUCKET, "inference_config_rankings": {"overall": {"rankings": [{}]}}},
            "the bucket with the weights depends on the region",
        ),
        (
            {**IN_ITS_BUCKET, "inference_configs": {"fast": {"component_names": [{}]}}},
            "the bucket with the weights depends on the region",
        ),
        ({**IN_ITS_BUCKET, "inference_configs": [3]}, "inference_configs: must be an object"),
        ({**IN_ITS_BUCKET, "inference_config_components": {"fast": 3}}, "components.fast: must be an object"),
        (
            {
                "hosting_ecr_specs": {"framework": "vllm"},
                "hosting_additional_data_sources": {"speculative_decoding": 1},
            },
            "speculative_decoding: must be an array",
        ),
    ],
)
def test_a_jumpstart_document_that_lacks_something_is_refused_by_name(tmp_path: Path, content: Any, why: str) -> None:
    with pytest.raises(DeployError, match=why):
        in_region(file(tmp_path, content), "")


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
    with pytest.raises(Refused, match="cannot be replaced by lmi deploy"):
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


def test_the_tags_of_each_request_come_along(tmp_path: Path) -> None:
    def tagged(request: Any, value: str) -> Any:
        return {**request, "Tags": [{"Key": "all", "Value": value}, {"Key": value, "Value": "1"}]}

    content = {
        "Model": tagged(PLAIN.model, "model"),
        "EndpointConfig": tagged(PLAIN.endpoint_config, "config"),
        "Endpoint": {"Tags": [{"Key": "all", "Value": "endpoint"}]},
    }
    assert made(file(tmp_path, content), Wishes(name="chat"))["tags"] == {
        "all": "endpoint", "model": "1", "config": "1",
    }  # fmt: skip
    alone = tagged(PLAIN.model, "model")
    assert read_file(file(tmp_path, alone)).tags == {"all": "model", "model": "1"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ({"a": 1}, "adopt does not support this format"),
        ({"PrimaryContainer": []}, "Model.PrimaryContainer: must be an object"),
        (
            {"PrimaryContainer": {"Environment": {"A": 1}}},
            "Model.PrimaryContainer.Environment.A: must be a string (quote numbers",
        ),
        ({"Model": PLAIN.model, "EndpointConfig": {"ProductionVariants": {}}}, "ProductionVariants: must be an array"),
        ({"Model": PLAIN.model, "Components": [{}]}, "Components.InferenceComponentName: must be given"),
        ({"Model": PLAIN.model, "Tags": [{"Key": "a"}]}, "Tags[0].Value: must be given"),
        ({"Model": PLAIN.model, "InferenceComponents": []}, "unknown fields: InferenceComponents"),
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
    with pytest.raises(SpecError, match="is larger than 4 MiB"):
        read_file(file(tmp_path, " " * (5 << 20)))
    with pytest.raises(SpecError, match="No such file"):
        read_file(tmp_path / "none.json")


# -- what becomes of a container's variables ---------------------------------------------------------------------------


LMI = Container("lmi", "vllm", "0.36")
TGI = Container("tgi", "vllm")
VLLM = Container("vllm", "vllm")


def names(items: list[tuple[str, str]]) -> list[str]:
    return [what.partition("=")[0] for what, _ in items]


def everywhere(found: Variables) -> str:
    return repr(found)


def test_options_keep_their_values_and_lmi_s_release_is_written() -> None:
    given = {"OPTION_MAX_ROLLING_BATCH_SIZE": "64", "OPTION_DTYPE": "bf16", "SERVING_JOB_QUEUE_SIZE": "500"}
    found = variables({**given, "HF_MODEL_ID": "Qwen/Qwen3-8B", "OPTION_MAX_MODEL_LEN": "8192"}, LMI)
    assert found.options == {
        "lmi_version": "0.36", "max_rolling_batch_size": 64, "dtype": "bf16", "job_queue_size": 500,
        "llm_engine": "vllm", "tensor_parallel_degree": "max",
    }  # fmt: skip
    assert (found.model_id, found.context, found.unmapped, found.idle) == ("Qwen/Qwen3-8B", 8192, [], [])
    written = {setting.name: setting.value for setting in settings_of(found.options, {})}
    assert {name: written[name] for name in given} == given


def test_a_release_that_is_given_stays() -> None:
    assert variables({"OPTION_LMI_VERSION": "0.30"}, LMI).options["lmi_version"] == "0.30"


def test_names_of_tgi_become_options() -> None:
    given = {"MODEL_ID": "a/b", "NUM_SHARD": "4", "MAX_INPUT_TOKENS": "1024", "MAX_TOTAL_TOKENS": "2048"}
    found = variables({**given, "QUANTIZE": "awq", "CUDA_MEMORY_FRACTION": "0.8"}, TGI)
    assert found.options == {
        "tensor_parallel_degree": 4, "max_input_len": 1024, "quantize": "awq", "gpu_memory_utilization": 0.8,
        "llm_engine": "vllm", "job_queue_size": 128,
        "tgi_version": "3.3", "served_model_name": "a/b,*", "generation_config": "vllm",
    }  # fmt: skip
    assert str(read_tgi_version(str(found.options["tgi_version"]))) == str(NEWEST)
    assert (found.model_id, found.context) == ("a/b", 2048)


@in_one_test(
    ("release", "prompt", "total"),
    [
        ("0.8", 1024, 2048),
        ("1.4", 1024, 2048),
        ("2.4.0", 4095, 4096),
        ("2.4.1", None, None),
        ("3.3.6", None, None),
        ("3.3.7", None, None),
        ("", None, None),
    ],
)
def test_tgi_s_own_limits_are_written_down(release: str, prompt: int | None, total: int | None) -> None:
    container = Container("tgi", "vllm", release, release)
    found = variables({"HF_MODEL_ID": "a/b"}, container)
    assert (found.options.get("max_input_len"), found.context) == (prompt, total)
    assert (found.options["tgi_version"], found.options["job_queue_size"]) == (release or "3.3", 128)
    assert found.options.get("tensor_parallel_degree") == {"3.3.7": "max", "": None}.get(release, 1)
    assert len(found.defaults) == 4 + 2 * (total is not None) + bool(release)
    given = {"MAX_INPUT_LENGTH": "100", "MAX_TOTAL_TOKENS": "200", "MAX_CONCURRENT_REQUESTS": "7", "SM_NUM_GPUS": "4"}
    found = variables(given, container)
    assert (found.options["max_input_len"], found.context, found.options["job_queue_size"]) == (100, 200, 7)
    assert found.options["tensor_parallel_degree"] == 4
    assert [place for place, _ in found.defaults] == [
        "options.served_model_name: /opt/ml/model,*",
        f"options.tgi_version: {release or '3.3'}",
        "options.generation_config: vllm",
    ]


def test_vllm_s_image_answers_as_openai_without_any_of_its_variables() -> None:
    found = variables({"HF_MODEL_ID": "a/b"}, VLLM)
    assert found.options["openai_compat"] is True
    assert [place for place, _ in found.defaults] == ["options.openai_compat: true", "options.served_model_name: a/b"]
    assert [place for place, _ in variables({"SM_VLLM_MODEL": "a/b"}, VLLM).defaults] == [
        "options.served_model_name: a/b"
    ]
    assert variables({"SM_VLLM_MODEL": "a/b", "SM_VLLM_SERVED_MODEL_NAME": "c"}, VLLM).defaults == []


@in_one_test(
    ("container", "given"),
    [
        (LMI, {"MAX_TOTAL_TOKENS": "8192", "SM_VLLM_MODEL": "a/b", "MESSAGES_API_ENABLED": "true", "QUANTIZE": "awq",
               "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true", "HF_MODEL_REVISION": "main"}),
        (TGI, {"OPTION_DTYPE": "fp16", "SERVING_JOB_QUEUE_SIZE": "9", "TENSOR_PARALLEL_DEGREE": "2", "HF_TASK": "x",
               "OPTION_NO_SUCH": "1", "SM_VLLM_MODEL": "a/b", "HF_REVISION": "main"}),
        (VLLM, {"OPTION_DTYPE": "fp16", "SM_NUM_GPUS": "8", "MAX_TOTAL_TOKENS": "8192", "HF_TASK": "x"}),
    ],
)  # fmt: skip
def test_a_variable_that_its_container_does_not_read_has_no_effect(container: Container, given: dict[str, str]) -> None:
    found = variables(given, container)
    assert names(found.idle) == [*given]
    assert {why for _, why in found.idle} == {f"{KINDS[container.kind]} does not read it"}
    untold = variables({}, container)
    assert (found.options, found.environment, found.unmapped) == (untold.options, {}, [])
    assert (found.model_id, found.context) == ("", untold.context)


def test_ours_reads_every_name() -> None:
    given = {"MAX_TOTAL_TOKENS": "8192", "SM_VLLM_DTYPE": "bfloat16", "OPTION_MAX_ROLLING_BATCH_SIZE": "8"}
    found = variables(given, Container("ours", "vllm"))
    assert (found.context, found.options["dtype"], found.options["max_rolling_batch_size"]) == (8192, "bfloat16", 8)
    assert found.idle == []


def test_variables_of_vllm_s_image_become_options_and_what_they_set_beside() -> None:
    found = variables({"SM_VLLM_MODEL": "a/b", "SM_VLLM_MAX_NUM_SEQS": "32", "VLLM_USE_V1": "1"}, VLLM)
    assert found.options["openai_compat"] is True
    assert found.options["llm_engine"] == "vllm"
    assert found.environment == {"VLLM_USE_V1": "1"}
    assert found.model_id == "a/b"


AS_LLAMA_SERVER = {
    "openai_compat": True,
    "llm_engine": "llamacpp",
    "override_generation_config": '{"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}',
}


@in_one_test(
    ("image", "given", "wanted"),
    [
        (
            "sglang:server-sagemaker-cuda-v1.4",
            {"SM_SGLANG_MODEL_PATH": "a/b", "SM_SGLANG_TP_SIZE": "4", "SM_SGLANG_TOOL_CALL_PARSER": "qwen25"},
            {"openai_compat": True, "llm_engine": "vllm", "tensor_parallel_degree": 4, "tool_call_parser": "hermes",
             "served_model_name": "a/b"},
        ),
        (
            "llama-cpp:server-sagemaker-cpu-v1.0.1",
            {"SM_LLAMA_CPP_MODEL": "a/b", "SM_LLAMA_CPP_PARALLEL": "4", "LLAMA_ARG_ALIAS": "chat"},
            {**AS_LLAMA_SERVER, "max_rolling_batch_size": 4, "served_model_name": "chat"},
        ),
        (
            "llama-cpp:server-sagemaker-cuda-v1", {"SM_LLAMA_CPP_MODEL": "a/b"},
            AS_LLAMA_SERVER,
        ),
        (
            "llama-cpp-arm64:server-sagemaker-cpu-v1", {"SM_LLAMA_CPP_MODEL": "a/b", "SM_LLAMA_CPP_NUMA": "isolate"},
            {**AS_LLAMA_SERVER, "llama_server_args": "--numa isolate"},
        ),
    ],
)  # fmt: skip
def test_variables_of_aws_s_other_images_become_options(
    image: str, given: dict[str, str], wanted: dict[str, Any]
) -> None:
    found = variables(given, container_kind(f"727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/{image}", None))
    assert (found.options, found.unmapped, found.idle, found.environment) == (wanted, [], [], {})
    assert found.model_id == ("a/b" if given else "")


def test_what_aws_s_other_images_do_not_read_or_know_is_reported() -> None:
    given = {"SM_SGLANG_MODEL_PATH": "a/b", "SM_SGLANG_FOO": "1", "SM_VLLM_DTYPE": "half", "HF_MODEL_ID": "c/d"}
    found = variables(given, container_kind("1.dkr.ecr.us-east-1.amazonaws.com/sglang:0.5.20", None))
    assert names(found.unmapped) == ["SM_SGLANG_FOO"]
    assert names(found.idle) == ["SM_VLLM_DTYPE", "HF_MODEL_ID"]
    assert found.model_id == "a/b"


def test_a_variable_of_aws_s_images_with_another_effect_here_is_mapped_with_the_difference(tmp_path: Path) -> None:
    given = {"SM_SGLANG_MODEL_PATH": "a/b", "SM_SGLANG_MEM_FRACTION_STATIC": "0.8"}
    container = {"Image": "1.dkr.ecr.us-east-1.amazonaws.com/sglang:0.5.20", "Environment": given}
    said = made(file(tmp_path, {**PLAIN.model, "PrimaryContainer": container}))
    assert said["options"]["gpu_memory_utilization"] == 0.8
    text = (tmp_path / "model.yaml").read_text()
    assert "# Mapped, with another effect here:\n#   SM_SGLANG_MEM_FRACTION_STATIC=0.8: vLLM's share" in text


def test_a_refused_option_with_a_value_that_changes_nothing_is_left_out() -> None:
    found = variables({"SM_VLLM_MODEL": "a/b", "SM_VLLM_HOST": "0.0.0.0", "SM_VLLM_PORT": "8080"}, VLLM)
    assert names(found.idle) == ["SM_VLLM_HOST", "SM_VLLM_PORT"]
    assert "host" not in found.options


def test_a_handler_of_lmi_tells_its_mode() -> None:
    found = variables({"OPTION_ENTRYPOINT": "djl_python.lmi_vllm.vllm_async_service"}, LMI)
    assert found.options["async_mode"] is True


def test_an_engine_that_the_container_names_is_not_named_twice() -> None:
    given = {"OPTION_ROLLING_BATCH": "trtllm", "OPTION_MAX_NUM_TOKENS": "8192", "TENSOR_PARALLEL_DEGREE": "2"}
    found = variables(given, LMI)
    assert found.options == {
        "lmi_version": "0.36", "rolling_batch": "trtllm", "max_num_tokens": 8192, "tensor_parallel_degree": 2,
    }  # fmt: skip
    assert found.defaults == []


def test_lmi_takes_all_gpus_where_no_variable_says_how_many() -> None:
    found = variables({"HF_MODEL_ID": "a/b"}, LMI)
    assert found.options["tensor_parallel_degree"] == "max"
    assert [name for name, _ in found.defaults] == ["options.tensor_parallel_degree: max"]
    for given in ({"OPTION_PIPELINE_PARALLEL_DEGREE": "2"}, {"OPTION_TENSOR_PARALLEL_SIZE": "4"}):
        assert variables(given, LMI).options.get("tensor_parallel_degree") != "max"
    assert "tensor_parallel_degree" not in variables({"HF_MODEL_ID": "a/b"}, VLLM).options


def test_an_empty_token_is_dropped() -> None:
    found = variables({"HF_MODEL_ID": "a/b", "HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": ""}, LMI)
    assert (found.hub_token, found.unmapped, found.environment) == ([], [], {})


def test_what_is_refused_unknown_or_wrong_does_not_map_with_the_reason() -> None:
    given = {
        "SAGEMAKER_MULTI_MODEL": "true",  # refused
        "OPTION_NO_SUCH_THING": "1",  # nobody's
        "OPTION_MAX_ROLLING_BATCH": "32",  # near a known one
        "OPTION_DTYPE": "fp17",  # a wrong value
        "OPTION_MAX_BEAM_WIDTH": "2",  # another engine's
        "SERVING_NO_SUCH_THING": "1",
    }
    found = variables(given, LMI)
    assert sorted(names(found.unmapped)) == sorted(given)
    assert all(why for _, why in found.unmapped)
    assert set(found.options) == {"lmi_version", "llm_engine", "tensor_parallel_degree"}


def test_what_has_no_effect_is_listed_and_left_out() -> None:
    given = {
        "SERVING_FAIL_FAST": "true",
        "SAGEMAKER_PROGRAM": "inference.py",
        "OPTION_PARALLEL_LOADING": "true",
    }
    found = variables(given, LMI)
    assert sorted(names(found.idle)) == sorted(given)
    assert (found.unmapped, found.environment) == ([], {})


def test_two_names_of_one_option_with_two_values_are_said() -> None:
    found = variables({"SM_NUM_GPUS": "8", "OPTION_TENSOR_PARALLEL_DEGREE": "4"}, LMI)
    assert found.options["tensor_parallel_degree"] == 4
    assert names(found.idle) == ["SM_NUM_GPUS"]


def test_no_secret_is_written_anywhere() -> None:
    token, key, address = "hf_0123456789abcdefghijklmn", "sk-0123456789abcdefghijklmn", "https://me:secret@host/"
    found = variables(
        {"HF_TOKEN": token, "HUGGING_FACE_HUB_TOKEN": token, "OPENAI_API_KEY": key, "PROXY": address, "NOTE": token},
        TGI,
    )
    assert found.hub_token == ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]
    assert variables({"SM_VLLM_HF_TOKEN": token}, VLLM).hub_token == ["SM_VLLM_HF_TOKEN"]
    assert variables({"HF_TOKEN": "", "NOTHING": ""}, TGI).idle == [("NOTHING=", "it is empty")]
    assert names(found.unmapped) == ["OPENAI_API_KEY", "PROXY", "NOTE"]
    said = everywhere(found)
    assert not [secret for secret in (token, key, "secret@host") if secret in said]


def test_lmis_earlier_name_of_the_model_is_its_model() -> None:
    found = variables({"OPTION_S3URL": "s3://my-models/gpt-neox/"}, LMI)
    assert (found.model_id, found.unmapped) == ("s3://my-models/gpt-neox/", [])


@in_one_test("text", ["0", "8", "0.9", "0.90", "007", "1e3", "true", "True", "-1", "9" * 20, "max", "1_000", ""])
def test_a_typed_value_gives_the_same_variable(text: str) -> None:
    ((_, value, _),) = settings_of({"dtype": typed(text)}, {})
    assert value == text


@in_one_test(
    ("image", "kind", "engine", "release"),
    [
        ("763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.36.0-lmi20.0.0-cu128", "lmi", "vllm", "0.36"),
        ("763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.30.0-tensorrtllm0.12.0-cu125", "lmi", "trtllm",
         "0.30"),
        ("1.dkr.ecr.us-east-1.amazonaws.com/huggingface-pytorch-tgi-inference:2.4.0-tgi2.3.1-gpu", "tgi", "vllm",
         "2.3.1"),
        ("ghcr.io/huggingface/text-generation-inference:3.3.4", "tgi", "vllm", "3.3.4"),
        ("1.dkr.ecr.us-east-1.amazonaws.com/text-generation-inference:latest", "tgi", "vllm", ""),
        ("1.dkr.ecr.us-east-1.amazonaws.com/vllm:0.19.0-gpu", "vllm", "vllm", ""),
        ("1.dkr.ecr.us-east-1.amazonaws.com/mirror/vllm-openai@sha256:00", "vllm", "vllm", ""),
        ("1.dkr.ecr.us-east-1.amazonaws.com/lmi-handler:1", "ours", "vllm", ""),
        ("763104351884.dkr.ecr.us-east-1.amazonaws.com/sagemaker-tritonserver:25.09-py3", "triton", "vllm", ""),
        ("nvcr.io/nvidia/tritonserver:25.08-trtllm-python-py3", "triton", "vllm", ""),
    ],
)  # fmt: skip
def test_a_container_is_known_by_its_image(image: str, kind: str, engine: str, release: str) -> None:
    assert container_kind(image, None) == Container(kind, engine, release, release)


def test_a_release_that_is_too_old_is_told_beside_the_oldest_that_is_known() -> None:
    found = container_kind("1.dkr.ecr.us-east-1.amazonaws.com/djl-inference:v0.26.0-deepspeed0.12.6-cu121", None)
    assert (found.tagged_release, found.release) == ("0.26", "0.28")


@in_one_test(
    "image",
    [
        "x/huggingface-sglang:1",
        "x/huggingface-llamacpp:1",
        "x/huggingface-pytorch-inference:2",
        "x/tritonserver2:24",
        "",
        "vllmish:1",
    ],
)
def test_another_container_is_refused_unless_the_user_says_what_it_is(image: str) -> None:
    with pytest.raises(Refused, match="cannot be replaced by lmi deploy"):
        container_kind(image, None)
    assert container_kind(image, "vllm").kind == "vllm"


def test_neuron_is_refused_whatever_the_user_says() -> None:
    with pytest.raises(Refused, match="Neuron"):
        container_kind("x/djl-inference:0.30.0-neuronx-sdk2.20.1", "lmi")


# -- repositories of Triton --------------------------------------------------------------------------------------------


TRTLLM = """
backend: "tensorrtllm"
parameters: { key: "gpt_model_path" value: { string_value: "/opt/ml/model/tensorrt_llm/1" } }
parameters {
  key: "max_tokens_in_paged_kv_cache"
  value: {
    string_value: "4096"
  }
}
parameters: { key: "kv_cache_free_gpu_mem_fraction" value: { string_value: "${kv_cache_free_gpu_mem_fraction}" } }
parameters: { key: "enable_chunked_context" value: { string_value: "true" } }
parameters: { key: "batching_strategy_of_mine" value: { string_value: "V1" } }
parameters: { key: "gpt_model_type" value: { string_value: "V1" } }
parameters: { key: "sink_token_length" value: { string_value: "" } }
"""
VLLM_MODEL = {"a/config.pbtxt": 'backend: "vllm"', "a/1/model.json": '{"model": "o/m", "enforce_eager": true}'}


def of_triton(files: dict[str, str], name: str = "", model: str | None = "a/b") -> Variables:
    engine, repository = read_repository(Artifact(repository=files), name, model)
    container = Container("triton", engine, repository=repository)
    return variables({"OPTION_DTYPE": "fp16", "SAGEMAKER_TRITON_LOG_INFO": "true"}, container)


def test_parameters_of_tensorrt_llm_s_backend_become_options() -> None:
    found = of_triton({"ensemble/config.pbtxt": 'platform: "ensemble"', "tensorrt_llm/config.pbtxt": TRTLLM})
    assert found.options == {"max_tokens": 4096, "enable_chunked_prefill": True, "llm_engine": "trtllm"}
    assert found.environment == {}
    assert [what for what, _ in found.unmapped] == [
        "OPTION_BATCHING_STRATEGY_OF_MINE=V1",
        "gpt_model_path=/opt/ml/model/tensorrt_llm/1",
    ]
    assert names(found.idle) == ["OPTION_DTYPE", "SAGEMAKER_TRITON_LOG_INFO", "gpt_model_type"]


def test_arguments_of_vllm_s_backend_are_options() -> None:
    found = of_triton({**VLLM_MODEL, "b/1/model.json": '{"model": "p/q", "seed": 7}'}, name="a")
    assert (found.model_id, found.options) == ("o/m", {"model_name": "a", "enforce_eager": True, "llm_engine": "vllm"})


def test_arguments_of_the_llm_api_are_options() -> None:
    text = "model: o/m\ntensor_parallel_size: 2\nkv_cache_config: {dtype: fp8}\ntriton_config: {decoupled: true}\n"
    found = of_triton({"tensorrt_llm/config.pbtxt": 'backend: "python"', "tensorrt_llm/1/model.yaml": text})
    assert (found.model_id, found.options["tensor_parallel_size"]) == ("o/m", 2)
    assert (found.options["kv_cache_config"], found.options["llm_engine"]) == ('{"dtype": "fp8"}', "trtllm")
    assert "triton_config" in names(found.idle)


@in_one_test(
    ("artifact", "model", "why"),
    [
        (Artifact(repository={"a/config.pbtxt": 'platform: "onnxruntime_onnx"'}), "a/b", "backend onnxruntime_onnx"),
        (Artifact(), "a/b", "was not read: no archive has a config.pbtxt"),
        (Artifact(problem="it is gone"), "a/b", "was not read: it is gone"),
        (Artifact(repository={"a/config.pbtxt": TRTLLM}), None, "whose TensorRT engine runs only in Triton"),
        (Artifact(weights="a/1/rank0.engine"), None, "whose TensorRT engine runs only in Triton"),
        (Artifact(repository={"a/1/model.json": "[1]"}), "a/b", "a/1/model.json cannot be read"),
        (Artifact(repository={"a/1/model.yaml": "a: {b"}), "a/b", "a/1/model.yaml cannot be read"),
        (Artifact(repository={"a/1/model.yaml": "a: &x [1]\nb: [*x, *x]"}), "a/b", "it has YAML aliases"),
        (Artifact(repository={"a/1/model.yaml": "[" * 100_000}), "a/b", "a/1/model.yaml cannot be read"),
    ],
)
def test_a_repository_is_refused_by_name(artifact: Artifact, model: str | None, why: str) -> None:
    with pytest.raises(Refused, match=why):
        read_repository(artifact, "", model)


# -- dotted names, as vLLM's parser joins them -----------------------------------------------------------------------


@in_one_test(
    ("given", "options", "idle"),
    [
        ({"SM_VLLM_LIMIT_MM_PER_PROMPT.IMAGE": "5"}, {"limit_mm_per_prompt": '{"image": 5}'}, []),
        (
            {"SM_VLLM_LIMIT_MM_PER_PROMPT.IMAGE": "5", "SM_VLLM_LIMIT_MM_PER_PROMPT.AUDIO": "1"},
            {"limit_mm_per_prompt": '{"image": 5, "audio": 1}'},
            [],
        ),
        (
            {"SM_VLLM_COMPILATION_CONFIG.PASS_CONFIG.FUSE_NORM_QUANT": "true"},
            {"compilation_config": '{"pass_config": {"fuse_norm_quant": true}}'},
            [],
        ),
        (
            {"SM_VLLM_COMPILATION_CONFIG": '{"mode": 0}', "SM_VLLM_COMPILATION_CONFIG.MODE": "3"},
            {"compilation_config": '{"mode": 3}'},
            [('SM_VLLM_COMPILATION_CONFIG={"mode": 0}', "variables with dotted names override it, as in vLLM")],
        ),
    ],
)
def test_dotted_names_become_one_option(
    given: dict[str, str], options: dict[str, str], idle: list[tuple[str, str]]
) -> None:
    found = variables({"SM_VLLM_MODEL": "a/b", **given}, Container("vllm", "vllm"))
    assert {name: found.options.get(name) for name in options} == options
    assert (found.unmapped, found.idle, found.environment) == ([], idle, {})
    own = {**{f"OPTION_{name.upper()}": text for name, text in options.items()}, "OPTION_LLM_ENGINE": "vllm"}
    both = [read_config(environ=environ, auto="").config for environ in (own, {"SM_VLLM_MODEL": "a/b", **given})]
    assert both[0].engine_options == both[1].engine_options, "the server reads the variables in another way"


def test_dotted_names_that_are_no_option_are_told() -> None:
    lmi = variables({"OPTION_NO_SUCH.A": "1", "OTHER.NAME": "x"}, Container("lmi", "vllm"))
    assert [name for name, _ in lmi.unmapped] == ["OPTION_NO_SUCH.A=1"]
    assert lmi.environment == {"OTHER.NAME": "x"}


def test_every_variable_of_tgi_s_launcher_and_server_is_told() -> None:
    """Read from their source (text-generation-inference 3.3: launcher/src/main.rs, server/ and router/)."""
    names = [
        "DISABLE_EXLLAMA", "EXLLAMA_VERSION", "FLASH_DECODING", "FLASH_INFER", "GRACEFUL_TERMINATION_TIMEOUT",
        "LOG_COLORIZE", "PREFILL_CHUNKING", "REQUEST_LOGPROBS", "ROCM_USE_CUSTOM_PAGED_ATTN",
        "ROCM_USE_FLASH_ATTN_V2_TRITON", "ROCM_USE_SKINNY_GEMM", "TGI_WIGGLE_ROOM", "USE_FLASH_ATTENTION",
        "XPU_MEMORY_FRACTION",
    ]  # fmt: skip
    found = variables({"HF_MODEL_ID": "a/b", **dict.fromkeys(names, "1")}, Container("tgi", "vllm", "3.3.6"))
    assert sorted(name for name, _ in found.idle) == [f"{name}=1" for name in names]
    assert found.environment == {}


def test_the_fast_model_loader_s_prefix_is_told_to_have_no_model() -> None:
    given = {"HF_MODEL_ID": "/opt/ml/model", "OPTION_LOAD_FORMAT": "sagemaker_fast_model_loader"}
    ((name, why),) = variables(given, Container("lmi", "vllm", "0.33")).unmapped
    assert name == "OPTION_LOAD_FORMAT=sagemaker_fast_model_loader"
    assert "serve the model's original files" in why


def test_what_an_unknown_variable_does_in_the_original_container_is_true() -> None:
    """AWS's vLLM image passes each to `vllm serve`, which ends at an unknown argument; LMI ignores unknown options."""
    [(_, of_vllm)] = variables({"SM_VLLM_MODEL": "a/b", "SM_VLLM_NOSUCH": "1"}, VLLM).unmapped
    assert of_vllm.endswith("the original container does not start, unless its vLLM has this argument")
    [(_, of_lmi)] = variables({"HF_MODEL_ID": "a/b", "OPTION_NOSUCH": "1"}, LMI).unmapped
    assert of_lmi.endswith("the original container silently ignores it")
