"""`lmi deploy adopt`: what is read, what is refused before a file is written, and that AWS stays as it is."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.adopt.live import reading_policy
from deploy.adopt.variables import container_kind, variables
from deploy.aws import Aws
from deploy.cli.main import main as run
from deploy.s3.archive import read_artifact
from deploy.spec.components import servers
from deploy.spec.reading import read_spec
from tests.deploy.aws.adopt.conftest import NAME, by_hand
from tests.deploy.doubles.archives import archive as packed
from tests.deploy.doubles.aws import CALLER, Cloud
from tests.deploy.public_endpoints import GRAVITON, OTHERS, PUBLIC, ROLE, Public

PLAIN = PUBLIC["Zephyr-7B"]
OF_LMI = PUBLIC["Phi-3-mini"]


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.yaml"


def refused(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """What adopt says when it refuses, after which nothing is written or changed."""
    before = cloud.everything()
    assert adopt("--output", str(path), *arguments) in (2, 4)
    assert not path.exists()
    assert cloud.everything() == before
    assert cloud.changes() == []
    return " ".join(capsys.readouterr().err.split())


def test_json_has_the_specification_and_every_comment(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(cloud, OF_LMI)
    assert adopt("--output", str(path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    text = path.read_text()
    assert found["specification"] == content(path)
    assert (found["output"], found["container"]["kind"]) == (str(path), "lmi")
    for kind in ("defaults", "unmapped", "differences", "idle"):
        assert all(f"#   {item['setting']}: {item['reason']}" in text for item in found[kind])
    assert adopt("--output", str(path), "--json") == 2
    assert capsys.readouterr().out == ""
    assert adopt("--json") == 0
    assert json.loads(capsys.readouterr().out) == {**found, "output": None}


def test_only_describe_and_list_calls_are_made_and_in_the_printed_policy(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(cloud, PUBLIC["Kimi-K2.5, component"])
    assert adopt("--output", str(path)) == 0
    assert {call.operation for call in cloud.calls} == {
        "DescribeEndpoint", "DescribeEndpointConfig", "DescribeModel", "DescribeInferenceComponent", "ListTags",
        "ListInferenceComponents", "DescribeScalableTargets",
    }  # fmt: skip
    capsys.readouterr()
    assert adopt("--policy") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == reading_policy(NAME, "us-east-1")
    actions = [action for statement in printed["Statement"] for action in statement["Action"]]
    assert all(action.partition(":")[2].startswith(("Describe", "List", "GetObject")) for action in actions)


def test_without_output_the_file_is_printed(
    cloud: Cloud, adopt: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(cloud, PLAIN)
    assert adopt("--image", "mine:7", "--role", "arn:aws:iam::123456789012:role/other") == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["image"] == {"repository": "mine", "tag": "7"}
    assert found["role"] == "arn:aws:iam::123456789012:role/other"
    assert found["model"] == {"id": "HuggingFaceH4/zephyr-7b-beta", "context": 2048}


def test_a_file_that_is_there_is_not_written_over(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(cloud, PLAIN)
    path.write_text("mine")
    assert adopt("--output", str(path)) == 2
    assert "already exists" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_a_file_that_cannot_be_written_is_one_line(
    cloud: Cloud, adopt: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(cloud, PLAIN)
    assert adopt("--output", str(tmp_path / "none" / "chat.yaml")) == 2
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("region", "partition"), [("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov"), ("us-iso-east-1", "aws-iso")]
)
def test_the_printed_policy_is_of_the_region_s_partition(
    region: str, partition: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adopt", NAME, "--policy", "--region", region]) == 0
    resources = json.loads(capsys.readouterr().out)["Statement"][0]["Resource"]
    assert resources == [f"arn:{partition}:sagemaker:{region}:*:endpoint/chat"]


def test_an_isolated_container_with_a_hub_s_model_is_refused(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(cloud, PLAIN)
    cloud.sagemaker.things["model", "by-hand-model"].request["EnableNetworkIsolation"] = True
    assert "network.isolated: the container cannot reach the hub" in refused(cloud, adopt, path, capsys)


def test_an_endpoint_without_a_model_is_refused(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(cloud, PUBLIC["Kimi-K2.5, component"])
    del cloud.sagemaker.things["inference-component", "ic-kimi"]
    assert "chat serves nothing" in refused(cloud, adopt, path, capsys)


def test_up_takes_over_an_adopted_endpoint_under_its_variant_s_name(
    cloud: Cloud,
    adopt: Callable[..., int],
    deploy: Callable[..., int],
    planned: Callable[[Path], dict[str, dict[str, Any]]],
    path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_hand(cloud, PLAIN.but(variant={"VariantName": "primary", "InitialInstanceCount": 2}), {"team": "search"})
    assert adopt("--output", str(path)) == 0
    said = content(path)
    assert said["instance"] == {"type": "ml.g5.2xlarge", "unchecked": True, "count": 2, "variant": "primary"}
    assert said["tags"] == {"team": "search"}
    changes = {change["place"] for action in planned(path).values() for change in action["changes"]}
    assert not [place for place in changes if "VariantName" in place or "Count" in place or place == "team"]
    assert deploy("up", path, "--adopt", "--yes") == 0
    endpoint = cloud.sagemaker.things["endpoint", NAME]
    config = cloud.sagemaker.things["endpoint-config", endpoint.request["EndpointConfigName"]].request
    (variant,) = config["ProductionVariants"]
    assert (variant["VariantName"], variant["InitialInstanceCount"]) == ("primary", 2)
    assert "RollingUpdatePolicy" in endpoint.request["LastDeploymentConfig"]
    assert ("endpoint-config", "by-hand-config") in cloud.sagemaker.things  # what served stays, to go back to
    capsys.readouterr()
    assert deploy("up", path, "--yes") == 0
    assert "nothing to do" in capsys.readouterr().out


def test_tokens_go_to_a_secret_and_other_secrets_are_left_out(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token, key = "hf_0123456789abcdefghijklmn", "sk-0123456789abcdefghijklmn"
    environment = {**PLAIN.environment, "HF_TOKEN": token, "OPENAI_API_KEY": key}
    by_hand(cloud, PLAIN.but(environment=environment))
    secret = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf"
    assert adopt("--output", str(path), "--token-secret", secret) == 0
    text, said = path.read_text(), capsys.readouterr()
    assert content(path)["model"]["token_secret"] == secret
    assert "#   OPENAI_API_KEY=***: anyone who may describe the model can read this secret" in text
    assert not [one for one in (token, key) if one in text + said.err + said.out]
    assert "note: OPENAI_API_KEY=*** cannot be mapped: " in said.err


def test_fields_without_a_setting_pass_as_they_are(
    cloud: Cloud,
    adopt: Callable[..., int],
    planned: Callable[[Path], dict[str, dict[str, Any]]],
    path: Path,
) -> None:
    capture = {
        "EnableCapture": True, "InitialSamplingPercentage": 20, "DestinationS3Uri": "s3://by-hand/captured",
        "CaptureOptions": [{"CaptureMode": "Input"}],
    }  # fmt: skip
    cloud.client("s3").create_bucket(Bucket="by-hand")
    public = PLAIN.but(
        variant={"EnableSSMAccess": True, "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}},
        container={"ContainerHostname": "serving"},
        config={"DataCaptureConfig": capture, "KmsKeyId": "11111111-2222-3333-4444-555555555555"},
    )
    by_hand(cloud, public)
    assert adopt("--output", str(path)) == 0
    said = content(path)
    assert said["sagemaker"] == {
        "endpoint_config": {"DataCaptureConfig": capture},
        "variant": {"EnableSSMAccess": True},
        "model": {"PrimaryContainer": {"ContainerHostname": "serving"}},
    }
    assert said["encryption"] == {"volume_key": "11111111-2222-3333-4444-555555555555"}
    assert said["routing"] == "least_outstanding"


def test_scaling_by_concurrent_requests_maps_and_other_rules_stay(
    cloud: Cloud, adopt: Callable[..., int], path: Path
) -> None:
    by_hand(cloud, PLAIN)
    where = {
        "ServiceNamespace": "sagemaker", "ResourceId": f"endpoint/{NAME}/variant/AllTraffic",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }  # fmt: skip
    scaling = cloud.client("application-autoscaling")
    scaling.register_scalable_target(**where, MinCapacity=1, MaxCapacity=6)

    def track(name: str, metric: str, value: float) -> None:
        tracking = {"TargetValue": value, "PredefinedMetricSpecification": {"PredefinedMetricType": metric}}
        scaling.put_scaling_policy(
            **where, PolicyName=name, PolicyType="TargetTrackingScaling",
            TargetTrackingScalingPolicyConfiguration={**tracking, "ScaleInCooldown": 600},
        )  # fmt: skip

    track("by-invocations", "SageMakerVariantInvocationsPerInstance", 70)
    cloud.calls.clear()
    assert adopt("--output", str(path)) == 0
    assert "scaling" not in content(path)
    assert "by-invocations of endpoint/chat/variant/AllTraffic: it is kept" in path.read_text()
    path.unlink()
    track("by-concurrency", "SageMakerVariantConcurrentRequestsPerModelHighResolution", 12.5)
    cloud.calls.clear()
    assert adopt("--output", str(path)) == 0
    assert content(path)["scaling"] == {
        "min": 1, "max": 6, "concurrency": 12.5, "scale_in_cooldown": 600, "scale_out_cooldown": 300,
    }  # fmt: skip
    assert cloud.changes() == []


def test_components_with_an_adapter_in_adopt(cloud: Cloud, adopt: Callable[..., int], path: Path) -> None:
    by_hand(cloud, PUBLIC["Kimi-K2.5, component"])
    cloud.client("sagemaker").create_inference_component(
        InferenceComponentName="ic-french", EndpointName=NAME,
        Specification={
            "BaseInferenceComponentName": "ic-kimi", "Container": {"ArtifactUrl": "s3://by-hand/french.tar.gz"}
        },
    )  # fmt: skip
    cloud.calls.clear()
    assert adopt("--output", str(path)) == 0
    assert content(path)["components"] == [
        {
            "name": "ic-kimi", "copies": 1, "accelerators": 8, "memory_mb": 10240, "cache": False,
            "adapters": [{"name": "ic-french", "artifact": "s3://by-hand/french.tar.gz"}],
        }
    ]  # fmt: skip


def test_a_component_with_a_model_of_its_own_says_what_differs(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = PUBLIC["Kimi-K2.5, component"]
    by_hand(cloud, first)
    sagemaker = cloud.client("sagemaker")
    environment = {**PLAIN.environment, "HF_TOKEN": "hf_0123456789abcdefghijklmn", "NO_SUCH": "1"}
    sagemaker.create_model(**{**PLAIN.but(environment=environment).model, "ModelName": "another"})
    sagemaker.create_inference_component(
        InferenceComponentName="ic-other", EndpointName=NAME, VariantName="AllTraffic", RuntimeConfig={"CopyCount": 1},
        Specification={"ModelName": "another", "ComputeResourceRequirements": {"MinMemoryRequiredInMb": 1024}},
    )  # fmt: skip
    while sagemaker.describe_inference_component(InferenceComponentName="ic-other")["InferenceComponentStatus"] != (
        "InService"
    ):
        pass
    cloud.calls.clear()
    assert adopt("--output", str(path)) == 0
    whole, (kimi, other) = content(path), content(path)["components"]
    assert "model" not in kimi
    assert other["model"] == {"id": "HuggingFaceH4/zephyr-7b-beta", "context": 2048}
    assert {name for name, value in other["options"].items() if value is None} <= whole["options"].keys()
    (server,) = [one for one in servers(read_spec(path)) if one.components[0].name == "ic-other"]
    alone = variables(environment, container_kind(PLAIN.model["PrimaryContainer"]["Image"], None))
    assert (server.options, server.environment) == (alone.options, {"NO_SUCH": "1"})
    assert "#   components ic-other: HF_TOKEN=***: put the token" in path.read_text()
    path.unlink()
    assert "--model applies only to an endpoint with one model" in refused(cloud, adopt, path, capsys, "--model", "a/b")


# -- model data: archives, and prefixes with a serving.properties ------------------------------------------------------


DATA = "/opt/ml/model"
PROPERTIES = b"""engine=Python
option.model_id=Qwen/Qwen3-8B
option.tensor_parallel_degree=2
option.max_model_len=8192
option.hf_token=hf_0123456789abcdefghijklmn
minWorkers=1
"""


def archive(**files: bytes | None) -> bytes:
    """A tar.gz of files, whose names have `__` for a slash and `_` for a dot before the suffix; None: a link."""
    return packed({name.replace("__", "/").replace("_", "."): data for name, data in files.items()})


def with_data(cloud: Cloud, key: str, data: bytes | None, environment: dict[str, str], public: Public = OF_LMI) -> None:
    """An endpoint whose container has an archive or, where the key is of a prefix's file, that prefix."""
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="by-hand")
    if data is not None:
        s3.put_object(Bucket="by-hand", Key=key, Body=data)
    uri = f"s3://by-hand/{key}"
    prefix = {"S3Uri": uri.rpartition("/")[0] + "/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    container: dict[str, Any] = {"ModelDataUrl": uri}
    if not key.endswith(".tar.gz"):
        container = {"ModelDataSource": {"S3DataSource": prefix}}
    by_hand(cloud, public.but(environment=environment, container=container))


@pytest.mark.parametrize("place", ["serving_properties", "mymodel__serving_properties"])
def test_an_archive_s_options_and_model_are_taken_and_beat_the_variables(
    cloud: Cloud, adopt: Callable[..., int], path: Path, place: str
) -> None:
    data = archive(**{"mymodel__model_py": b"x", place: PROPERTIES})
    with_data(cloud, "m/model.tar.gz", data, {"HF_MODEL_ID": "/opt/ml/model", "OPTION_TENSOR_PARALLEL_DEGREE": "8"})
    assert adopt("--output", str(path)) == 0
    said, text = content(path), path.read_text()
    assert said["model"] == {"id": "Qwen/Qwen3-8B", "context": 8192}
    assert said["options"]["tensor_parallel_degree"] == 2
    assert "#   ModelDataUrl=s3://by-hand/m/model.tar.gz: model.py is not carried over" in text
    assert "SERVING_MINWORKERS=1" in text
    assert "hf_0123" not in text
    assert "HF_TOKEN=***" in text


@pytest.mark.parametrize("host", ["by-hand.s3.us-east-1.amazonaws.com", "s3.amazonaws.com/by-hand"])
def test_an_archive_of_a_file_is_read_where_that_is_said(
    cloud: Cloud, adopt: Callable[..., int], path: Path, host: str
) -> None:
    with_data(cloud, "m/model.tar.gz", archive(serving_properties=PROPERTIES), {})
    own = {"Environment": {}, "ModelDataUrl": f"https://{host}/m/model.tar.gz"}
    file = path.with_suffix(".json")
    file.write_text(json.dumps(OF_LMI.but(container=own).model))
    given = ("--file", str(file), "--name", "chat", "--region", "us-east-1", "--output", str(path))
    assert adopt(*given) == 0
    assert content(path)["model"] == {"s3": "s3://by-hand/m/model.tar.gz"}
    assert (
        "#   ModelDataUrl=s3://by-hand/m/model.tar.gz: with --file, model data is read only with --read-data"
        in path.read_text()
    )
    path.unlink()
    assert adopt(*given, "--read-data") == 0
    assert content(path)["model"] == {"id": "Qwen/Qwen3-8B", "context": 8192}


def test_only_djl_serving_reads_serving_properties(cloud: Cloud, adopt: Callable[..., int], path: Path) -> None:
    with_data(cloud, "m/model.tar.gz", archive(serving_properties=PROPERTIES), {"HF_MODEL_ID": "a/b"}, PLAIN)
    assert adopt("--output", str(path)) == 0
    assert content(path)["model"]["id"] == "a/b"
    assert content(path)["options"]["tensor_parallel_degree"] == 1  # TGI's own
    assert "ModelDataUrl=s3://by-hand/m/model.tar.gz: serving.properties is not carried over" in path.read_text()


def test_a_prefix_of_tgi_with_a_serving_properties_is_said_to_be_read_here(
    cloud: Cloud, adopt: Callable[..., int], path: Path
) -> None:
    with_data(cloud, "m/serving.properties", PROPERTIES, {"HF_MODEL_ID": "/opt/ml/model"}, PLAIN)
    assert adopt("--output", str(path)) == 0
    assert content(path)["model"]["s3"] == "s3://by-hand/m/"
    assert "#   s3://by-hand/m/serving.properties: the original container ignores it" in path.read_text()


def test_model_data_beats_the_hub_s_name_on_vllm_s_image(cloud: Cloud, adopt: Callable[..., int], path: Path) -> None:
    with_data(cloud, "m/config.json", b"{}", {"HF_MODEL_ID": "a/b"}, PUBLIC["Llama-3.3-70B-FP8"].but(type=PLAIN.type))
    assert adopt("--output", str(path)) == 0
    assert content(path)["model"] == {"s3": "s3://by-hand/m/"}
    assert "#   HF_MODEL_ID=a/b: vLLM's image ignores it and serves the model data" in path.read_text()


def test_model_data_that_is_not_in_s3_is_said() -> None:
    assert read_artifact(Aws("us-east-1"), "https://example.com/model.tar.gz").problem == "its URL is not in S3"


LONG_NAME = tarfile.TarInfo("n" * 200).tobuf(tarfile.GNU_FORMAT)[:1024]
"""A member that names the next one."""


def digits(count: int) -> bytes:
    """An extended header whose size is a text of so many digits."""
    member = tarfile.TarInfo("model.py")
    member.pax_headers = {"size": "9" * count}
    return member.tobuf(tarfile.PAX_FORMAT)


def sparse(count: int) -> bytes:
    """A sparse file of GNU tar's version 1.0 whose map has so many parts."""
    member = tarfile.TarInfo("model.py")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "0"}
    places = b"".join([b"%d\n" % count, *[b"0\n"] * 2 * count])
    member.size = len(places)
    return member.tobuf(tarfile.PAX_FORMAT) + places + bytes(-len(places) % 512)


def old_sparse() -> bytes:
    member = tarfile.TarInfo("model.py")
    member.type = tarfile.GNUTYPE_SPARSE
    return member.tobuf(tarfile.GNU_FORMAT)


def early_sparse() -> bytes:
    """An empty file of GNU tar's version 0.1 that reads as a mebibyte."""
    member = tarfile.TarInfo("serving.properties")
    member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 20)}
    return member.tobuf(tarfile.PAX_FORMAT)


def common(count: int) -> bytes:
    """A header with so many fields for all members, and members after it."""
    head = tarfile.TarInfo.create_pax_global_header({f"x{n}": "1" for n in range(count)})
    return head + tarfile.TarInfo("model.py").tobuf() * 3


ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "zeros": (lambda: gzip.compress(bytes(65 << 20), 1), "the container's model is in the archive"),
    "link": (lambda: archive(model_safetensors=b"x", config_json=None), "its member 'config.json' is a link"),
    "outside": (lambda: archive(__model_safetensors=b"x"), "its member '/model.safetensors' is outside"),
    "no archive": (lambda: b"no archive", "it cannot be read as a tar.gz"),
    "cut": (lambda: archive(serving_properties=PROPERTIES)[:60], "it cannot be read as a tar.gz"),
    "utf-16": (lambda: archive(serving_properties=b"\xff\xfea\0"), "its serving.properties cannot be read"),
    "escape": (lambda: archive(serving_properties=b"a=\\u12"), "serving.properties, line 1"),
    "long": (lambda: archive(serving_properties=bytes((1 << 20) + 1)), "is larger than 1048576 bytes"),
    "nested": (lambda: gzip.compress(LONG_NAME * 5000), "it cannot be read as a tar.gz"),
    "digits": (lambda: gzip.compress(digits(1 << 20)), "an extended header of 1048590 bytes"),
    "sparse": (lambda: gzip.compress(sparse(1000)), "cannot be read as a tar.gz: it contains a sparse file"),
    "sparse, old": (lambda: gzip.compress(old_sparse()), "cannot be read as a tar.gz: it contains a sparse file"),
    "sparse, early": (lambda: gzip.compress(early_sparse()), "cannot be read as a tar.gz: it contains a sparse file"),
    "common": (lambda: gzip.compress(common(17)), "it has too many global header fields"),
    "no model": (lambda: archive(model_py=b"x"), "m/model.tar.gz: it contains no weights"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_cannot_serve_is_refused_unless_the_model_is_said(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    data, why = ARCHIVES[name]
    with_data(cloud, "m/model.tar.gz", data(), {})
    assert re.search(why, refused(cloud, adopt, path, capsys))
    assert adopt("--output", str(path), "--model", "a/b") == 0
    assert content(path)["model"] == {"id": "a/b"}
    assert name == "zeros" or "#   ModelDataUrl=s3://by-hand/m/model.tar.gz: " in path.read_text()


@pytest.mark.parametrize(
    ("files", "environment"),
    [
        ({"model_safetensors": b"x"}, {}),
        ({"config_json": b"{}", "serving_properties": PROPERTIES, "weights_dat": bytes(65 << 20)}, {}),
        ({"mymodel__config_json": b"{}", "mymodel__model_safetensors": b"x"}, {"OPTION_MODEL_ID": f"{DATA}/mymodel"}),
        ({"code__model_py": b"x", "model_safetensors": b"x"}, {}),
    ],
    ids=["weights", "much", "folder", "code"],
)
def test_an_archive_with_a_model_stays_sagemaker_s_to_unpack(
    cloud: Cloud,
    adopt: Callable[..., int],
    path: Path,
    planned: Callable[[Path], dict[str, dict[str, Any]]],
    files: dict[str, bytes],
    environment: dict[str, str],
) -> None:
    with_data(cloud, "m/model.tar.gz", archive(**files), {"HF_MODEL_ID": DATA})
    assert adopt("--output", str(path)) == 0
    assert content(path)["model"] == {"s3": "s3://by-hand/m/model.tar.gz"}
    assert content(path).get("environment", {}) == environment
    changes = [change["place"] for action in planned(path).values() for change in action["changes"]]
    assert not [place for place in changes if "ModelData" in place]


def test_an_unreadable_archive_is_left_to_sagemaker_with_the_reason(
    cloud: Cloud, adopt: Callable[..., int], path: Path
) -> None:
    with_data(cloud, "m/model.tar.gz", None, {"HF_MODEL_ID": DATA})
    assert adopt("--output", str(path)) == 0
    assert content(path)["model"] == {"s3": "s3://by-hand/m/model.tar.gz"}
    assert "ModelDataUrl=s3://by-hand/m/model.tar.gz: AccessDenied: not found, or s3:GetObject" in path.read_text()


def test_a_folder_s_name_is_written_for_lmi_only_which_looks_into_it(
    cloud: Cloud, adopt: Callable[..., int], path: Path
) -> None:
    with_data(cloud, "m/model.tar.gz", archive(m__model_safetensors=b"x"), {"HF_MODEL_ID": f"{DATA}/m"}, PLAIN)
    assert adopt("--output", str(path)) == 0
    assert content(path)["environment"] == {"OPTION_MODEL_ID": f"{DATA}/m"}
    cloud.sagemaker.things["model", "by-hand-model"].request["PrimaryContainer"]["Environment"] = {}
    path.unlink()
    assert adopt("--output", str(path)) == 0
    assert "environment" not in content(path)


TRITON = OF_LMI.but(image="sagemaker-tritonserver:25.09-py3")
ENGINE = b'backend: "tensorrtllm"\nparameters { key: "gpt_model_path" value { string_value: "/opt/ml/model/x/1" } }\n'
WINDOW = b'parameters { key: "max_attention_window_size" value { string_value: "4096" } }\n'


def test_a_repository_of_vllm_s_backend_is_adopted(cloud: Cloud, adopt: Callable[..., int], path: Path) -> None:
    arguments = {"model": "Qwen/Qwen3-8B", "gpu_memory_utilization": 0.5, "max_model_len": 4096, "max_num_seqs": 16}
    files = {"chat/config.pbtxt": b'backend: "vllm"\n', "chat/1/model.json": json.dumps(arguments).encode()}
    environment = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "chat", "SAGEMAKER_TRITON_LOG_VERBOSE": "true"}
    with_data(cloud, "m/model.tar.gz", packed(files), environment, TRITON)
    assert adopt("--output", str(path)) == 0
    assert content(path)["model"] == {"id": "Qwen/Qwen3-8B", "context": 4096}
    assert content(path)["options"] == {
        "model_name": "chat",
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 16,
        "llm_engine": "vllm",
    }
    assert "#   SAGEMAKER_TRITON_LOG_VERBOSE=true: LMI_LOG_LEVEL sets the log level" in path.read_text()
    assert "Cannot be mapped" not in path.read_text()
    read_spec(path)


def test_a_repository_with_a_tensorrt_engine_needs_another_model(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"x/config.pbtxt": ENGINE + WINDOW, "x/1/rank0.engine": b"engine"}
    with_data(cloud, "m/model.tar.gz", packed(files), {}, TRITON)
    assert "a Triton repository for TensorRT-LLM, whose" in refused(cloud, adopt, path, capsys)
    assert adopt("--output", str(path), "--model", "Qwen/Qwen3-8B") == 0
    assert content(path)["model"] == {"id": "Qwen/Qwen3-8B"}
    options = {"model_name": "x", "max_attention_window": 4096, "llm_engine": "trtllm"}
    assert content(path)["options"] == options
    assert "#   gpt_model_path=/opt/ml/model/x/1: TensorRT engines are no longer built" in path.read_text()


@pytest.mark.parametrize(
    ("key", "backend", "why"),
    [
        ("m/model.tar.gz", b'backend: "onnxruntime"', "archive holds a Triton repository for the backend onnxruntime"),
        ("m/serving.properties", b"", "Triton repository was not read: no archive has a config.pbtxt"),
    ],
)
def test_another_repository_is_refused_by_name(
    cloud: Cloud,
    adopt: Callable[..., int],
    path: Path,
    capsys: pytest.CaptureFixture[str],
    key: str,
    backend: bytes,
    why: str,
) -> None:
    data = packed({"resnet/config.pbtxt": backend}) if key.endswith(".tar.gz") else b"option.seed=1"
    with_data(cloud, key, data, {}, TRITON)
    assert why in refused(cloud, adopt, path, capsys)


class Endless(io.RawIOBase):
    """A tar.gz of a file of 20 GB, which says how much of it was read."""

    def __init__(self) -> None:
        member = tarfile.TarInfo("weights.dat")
        member.size = 20 * 10**9
        self._packer = zlib.compressobj(0, wbits=31)
        self._left, self.taken = self._packer.compress(member.tobuf()), 0

    def read(self, size: int = -1) -> bytes:
        while len(self._left) < size:
            self._left += self._packer.compress(bytes(1 << 20))
        data, self._left = self._left[:size], self._left[size:]
        self.taken += size
        return data


def test_64_mib_of_an_archive_of_many_gigabytes_are_fetched() -> None:
    body = Endless()

    class Client:
        def get_object(self, **_: str) -> dict[str, Any]:
            return {"Body": body}

    class Account(Aws):
        def __init__(self) -> None: ...

        def client(self, service: str) -> Any:
            return Client()

    assert read_artifact(Account(), "s3://by-hand/model.tar.gz").weights == "more than 64 MiB"
    assert body.taken < 65 << 20


def test_a_prefix_stays_with_its_file_unless_variables_name_another_model(
    cloud: Cloud, adopt: Callable[..., int], path: Path
) -> None:
    with_data(cloud, "m/serving.properties", PROPERTIES, {"HF_MODEL_ID": "/opt/ml/model"})
    assert adopt("--output", str(path)) == 0
    assert content(path)["model"] == {"s3": "s3://by-hand/m/"}
    model = cloud.sagemaker.things["model", "by-hand-model"].request
    model["PrimaryContainer"]["Environment"] = {"HF_MODEL_ID": "a/b"}
    path.unlink()
    assert adopt("--output", str(path)) == 0
    assert content(path)["model"]["id"] == "Qwen/Qwen3-8B"  # the file beats the variable
    assert content(path)["options"]["tensor_parallel_degree"] == 2


def test_the_host_s_ami_stays_unless_the_image_s_tag_tells_its_cuda(
    cloud: Cloud, adopt: Callable[..., int], path: Path
) -> None:
    ami = "al2-ami-sagemaker-inference-gpu-3-1"
    by_hand(cloud, PLAIN.but(variant={"InferenceAmiVersion": ami}))
    assert adopt("--output", str(path)) == 0
    assert content(path)["instance"]["ami"] == ami
    path.unlink()
    assert adopt("--output", str(path), "--image", "lmi-handler:1-cu128") == 0
    assert "ami" not in content(path)["instance"]
    assert f"InferenceAmiVersion={ami}: the image's tag names its CUDA" in path.read_text()


def two_variants(cloud: Cloud) -> None:
    sagemaker = cloud.client("sagemaker")
    sagemaker.create_model(**PLAIN.model)
    other = PUBLIC["Falcon-7B"]
    sagemaker.create_model(**{**other.model, "ModelName": "another"})
    (variant,) = PLAIN.endpoint_config["ProductionVariants"]
    variants = [{**variant, "VariantName": "a"}, {**variant, "VariantName": "b", "ModelName": "another"}]
    sagemaker.create_endpoint_config(EndpointConfigName="by-hand-config", ProductionVariants=variants)
    sagemaker.create_endpoint(EndpointName=NAME, EndpointConfigName="by-hand-config")
    while sagemaker.describe_endpoint(EndpointName=NAME)["EndpointStatus"] != "InService":
        pass
    cloud.calls.clear()


def test_of_several_variants_one_is_taken_only_for_an_endpoint_of_its_own(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_variants(cloud)
    assert "has 2 production variants (a, b)" in refused(cloud, adopt, path, capsys)
    assert "has 2 production variants" in refused(cloud, adopt, path, capsys, "--variant", "b")
    assert "the endpoint has a, b" in refused(cloud, adopt, path, capsys, "--variant", "c", "--name", "other")
    assert adopt("--output", str(path), "--variant", "b", "--name", "other") == 0
    said = content(path)
    assert (said["name"], said["model"]["id"]) == ("other", "tiiuae/falcon-7b")


@pytest.mark.parametrize(
    ("tags", "why"),
    [
        ({"lmi:deployment": NAME}, "was created by lmi deploy"),
        ({"lmi:deployment": "another"}, "belongs to another deployment of lmi deploy, another"),
        ({"aws:cloudformation:stack-name": "serving"}, "belongs to the CloudFormation stack serving"),
    ],
)
def test_an_endpoint_of_another_owner_is_refused_but_may_be_copied(
    cloud: Cloud,
    adopt: Callable[..., int],
    path: Path,
    capsys: pytest.CaptureFixture[str],
    tags: dict[str, str],
    why: str,
) -> None:
    by_hand(cloud, PLAIN)
    cloud.sagemaker.things["endpoint", NAME].tags.update({**tags, "team": "search"})
    assert why in refused(cloud, adopt, path, capsys)
    assert adopt("--output", str(path), "--name", "other") == 0
    assert (content(path)["name"], content(path)["tags"]) == ("other", {"team": "search"})


def test_the_tags_of_all_parts_come_along_but_owners_only_from_the_endpoint(
    cloud: Cloud, adopt: Callable[..., int], path: Path
) -> None:
    by_hand(cloud, PUBLIC["Kimi-K2.5, component"], {"team": "search", "all": "endpoint"})
    (component,) = cloud.sagemaker.names("inference-component")
    parts = {"model": "by-hand-model", "endpoint-config": "by-hand-config", "inference-component": component}
    for kind, name in parts.items():
        given = {"all": kind, kind: "1", "lmi:deployment": "other", "aws:cloudformation:stack-name": "serving"}
        cloud.sagemaker.things[kind, name].tags.update(given)
    assert adopt("--output", str(path)) == 0
    assert content(path)["tags"] == {"team": "search", "all": "endpoint", **dict.fromkeys(parts, "1")}


def test_an_endpoint_that_is_changing_is_refused(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(cloud, PLAIN)
    cloud.sagemaker.things["endpoint", NAME].status = "Updating"
    assert f"{NAME} is Updating" in refused(cloud, adopt, path, capsys)


@pytest.mark.parametrize(
    ("container", "why"),
    [
        ({"Mode": "MultiModel"}, "belongs to a multi-model endpoint"),
        ({"Environment": {}}, "the container's model is not named"),
        ({"Image": "1.dkr.ecr.us-east-1.amazonaws.com/mine:1"}, "mine:1 cannot be replaced"),
    ],
)
def test_a_container_that_cannot_be_replaced_is_refused(
    cloud: Cloud,
    adopt: Callable[..., int],
    path: Path,
    capsys: pytest.CaptureFixture[str],
    container: dict[str, Any],
    why: str,
) -> None:
    by_hand(cloud, PLAIN.but(container=container))
    assert why in refused(cloud, adopt, path, capsys)


def test_a_pipeline_and_a_serverless_variant_are_refused(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(cloud, PLAIN)
    model = cloud.sagemaker.things["model", "by-hand-model"].request
    container = model.pop("PrimaryContainer")
    model["Containers"] = [container, container]
    assert "model by-hand-model has 2 containers" in refused(cloud, adopt, path, capsys)
    model["Containers"] = [container]
    assert adopt() == 0
    (variant,) = cloud.sagemaker.things["endpoint-config", "by-hand-config"].request["ProductionVariants"]
    variant["ServerlessConfig"] = {"MemorySizeInMB": 2048, "MaxConcurrency": 1}
    capsys.readouterr()
    assert "is serverless" in refused(cloud, adopt, path, capsys)


def test_a_missing_endpoint_or_configuration_is_reported(
    cloud: Cloud, adopt: Callable[..., int], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no endpoint chat" in refused(cloud, adopt, path, capsys)
    by_hand(cloud, PLAIN)
    del cloud.sagemaker.things["endpoint-config", "by-hand-config"]
    assert "configuration by-hand-config was deleted" in refused(cloud, adopt, path, capsys)


def test_a_caller_without_the_policy_is_told_what_is_missing(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand(cloud, PLAIN)
    cloud.policies[CALLER] = []
    assert run(["adopt", NAME, "--output", str(path)]) == 3
    assert "AccessDenied" in capsys.readouterr().err
    assert not path.exists()
    cloud.denied.clear()


def test_text_of_aws_cannot_leave_its_comment(cloud: Cloud, adopt: Callable[..., int], path: Path) -> None:
    wild = "8192\nname: other\n\x1b[2J"
    by_hand(cloud, PLAIN.but(environment={**PLAIN.environment, "MAX_BATCH_TOTAL_TOKENS": wild}))
    assert adopt("--output", str(path)) == 0
    assert content(path)["name"] == NAME
    assert "\x1b" not in path.read_text()


def test_a_network_an_asynchronous_endpoint_and_pools(cloud: Cloud, adopt: Callable[..., int], path: Path) -> None:
    public: Public = PUBLIC["Qwen3-4B-Thinking"]
    by_hand(cloud, public)
    model = cloud.sagemaker.things["model", "by-hand-model"].request
    model["VpcConfig"] = {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    (variant,) = cloud.sagemaker.things["endpoint-config", "by-hand-config"].request["ProductionVariants"]
    del variant["InstanceType"]
    variant["InstancePools"] = [
        {"InstanceType": "ml.g5.2xlarge", "Priority": 1},
        {"InstanceType": "ml.g6.2xlarge", "Priority": 2},
    ]
    assert adopt("--output", str(path)) == 0
    said = content(path)
    assert said["async"] == {"output": "s3://by-hand/answers/", "concurrency": 4}
    assert said["network"] == {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}
    assert [pool["type"] for pool in said["instance"]["pools"]] == ["ml.g5.2xlarge", "ml.g6.2xlarge"]
    assert said["role"] == ROLE


# -- thirty public endpoints: adopted, planned, and nothing else changed than what comes with another image ------------


_TIMEOUT = r"(ModelDataDownload|ContainerStartupHealthCheck)TimeoutInSeconds"
_WITH_THE_IMAGE = {
    "model": r"PrimaryContainer\.(Image|Environment(\..*)?)",
    "endpoint-config": rf"ProductionVariants\[0\]\.(ModelName|InferenceAmiVersion|{_TIMEOUT})",
    "endpoint": "EndpointConfigName|lmi:.*",
    "inference-component": rf"Specification\.(ModelName|StartupParameters(\.{_TIMEOUT})?)|lmi:.*",
}
"""Fields that change with the image. The host's AMI follows its CUDA; timeouts that nobody set, the model's size."""

_NOT_AS_IT_WAS = {"DeepSeek-R1-Distill, TensorRT-LLM": {"PrimaryContainer.ModelDataSource"}}
"""LMI downloads a prefix of S3 itself; with model.s3 SageMaker lays it there."""


@pytest.mark.parametrize("name", PUBLIC)
def test_adopting_a_public_endpoint_changes_only_image_and_variables(
    name: str,
    cloud: Cloud,
    tmp_path: Path,
    adopt: Callable[..., int],
    planned: Callable[[Path], dict[str, dict[str, Any]]],
) -> None:
    by_hand(cloud, PUBLIC[name])
    if (url := PUBLIC[name].container.get("ModelDataUrl")) is not None:
        cloud.client("s3").create_bucket(Bucket="by-hand")
        data = archive(model_safetensors=b"x")
        cloud.client("s3").put_object(Bucket="by-hand", Key=url.removeprefix("s3://by-hand/"), Body=data)
        cloud.calls.clear()
    before = cloud.everything()
    path = tmp_path / "chat.yaml"
    assert adopt("--output", str(path)) == 0
    assert "hf_0123" not in path.read_text()
    actions = planned(path)
    assert cloud.changes() == []
    assert cloud.everything() == before
    assert {key.partition("/")[0] for key in actions} <= set(_WITH_THE_IMAGE)
    assert not [key for key, action in actions.items() if action["verb"] in ("create", "delete")]
    also = _NOT_AS_IT_WAS.get(name, set())
    wrong = [
        (key, change)
        for key, action in actions.items()
        for change in action["changes"]
        if not re.fullmatch(_WITH_THE_IMAGE[key.partition("/")[0]], change["place"]) and change["place"] not in also
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("arguments", "image"),
    [
        ((), {"repository": "lmi-handler-llamacpp-arm64"}),
        (("--image", "mine:2"), {"repository": "mine", "tag": "2", "architecture": "arm64"}),
    ],
)
def test_an_endpoint_on_graviton_gets_an_image_for_it(
    arguments: tuple[str, ...],
    image: dict[str, str],
    cloud: Cloud,
    tmp_path: Path,
    adopt: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_hand(cloud, GRAVITON)
    path = tmp_path / "chat.yaml"
    assert adopt("--output", str(path), *arguments) == 0
    assert content(path)["image"] == image
    assert content(path)["instance"]["type"] == "ml.c7g.2xlarge"
    assert content(path)["options"]["llm_engine"] == "llamacpp"
    assert "note: " not in capsys.readouterr().err


@pytest.mark.parametrize("name", OTHERS)
def test_a_public_endpoint_of_another_kind_is_refused_by_name(
    name: str, cloud: Cloud, tmp_path: Path, adopt: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    public, why = OTHERS[name]
    by_hand(cloud, public)
    path = tmp_path / "chat.yaml"
    assert adopt("--output", str(path)) == 2
    assert why in capsys.readouterr().err
    assert not path.exists()
    assert cloud.changes() == []
