"""A deployment's whole life with the policies that `lmi deploy iam` prints, in every partition of AWS.

The double denies what no statement allows. So a new call without its statement fails here, and in `test_lifecycle.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from moto.sns.models import sns_backends
from moto.utilities.utils import get_partition

from deploy.cli.main import main as run
from deploy.client import Forbidden, ModelFailed, Predictor
from deploy.emulator.authorization import Permission, allowed
from deploy.iam.policies import Policy
from deploy.resolve.images import registry_suffix
from tests.deploy.aws.test_lifecycle import MODEL
from tests.deploy.doubles.archives import archive
from tests.deploy.doubles.aws import ACCOUNT, CALLER, Cloud
from tests.deploy.doubles.deployments import COMPONENTS, NAME, PLAIN, Deployer, printed

pytestmark = pytest.mark.usefixtures("only_aws")

REGIONS = ["us-east-1", "cn-north-1", "us-gov-west-1", "eusc-de-east-1", "us-iso-east-1", "us-isob-east-1"]
"""One of each partition. What is alike in all of them is tried in one or two."""


def prepared(cloud: Cloud, region: str, content: dict[str, Any]) -> dict[str, Any]:
    """The specification in a region, with what it needs there: image, role, bucket."""
    cloud.push("lmi", "1-cu130", region)
    document = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    role = cloud.client("iam", region).create_role(
        RoleName="model", Path="/serving/", AssumeRolePolicyDocument=json.dumps({"Statement": [document]})
    )
    s3 = cloud.client("s3", region)
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    s3.create_bucket(Bucket="models", **where)
    for name, body in MODEL.items():
        s3.put_object(Bucket="models", Key=f"llama/{name}", Body=body)
    image = f"{ACCOUNT}.dkr.ecr.{region}.{registry_suffix(region)}/lmi:1-cu130"
    return {**content, "region": region, "role": role["Role"]["Arn"], "image": {"uri": image}}


def written(tmp_path: Path, content: dict[str, Any], **changes: Any) -> str:
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}))
    return str(path)


def live(
    main: Deployer,
    tmp_path: Path,
    content: dict[str, Any],
    *scale: str,
    also: tuple[str, ...] = (),
    serving: Callable[[], None] = lambda: None,
) -> None:
    """Every command, from the plan to the end. `serving` is called when it serves, and when updated."""
    path, where = written(tmp_path, content), ["--region", content["region"]]
    assert main(["doctor", path]) == 0
    assert main(["plan", path]) == 0
    assert main(["up", path, "--yes"]) == 0
    serving()
    assert main(["up", path, "--yes"]) == 0
    assert main(["status", NAME, *where]) == 0
    assert main(["scale", NAME, *scale, *where, "--no-wait"]) == 0
    assert main(["logs", NAME, *where]) in (0, 4)
    assert main(["update", written(tmp_path, content, options={"max_tokens": 3}), "--yes"]) == 0
    serving()
    assert main(["iam", path]) == 0
    assert main(["down", path, *where, "--yes", "--logs", *also]) == 0
    assert needless(main.asked(), printed(content)) <= _SELDOM


_SELDOM = {"EncryptionChecked", "FormerComponents", "KeysChecked", "OtherComponents"}
"""Statements for what the specification does not tell: others' components and former ones, which key a bucket has."""


def needless(asked: Iterable[Permission], policy: Policy) -> set[str]:
    """The statements that nothing which was asked for needs."""
    needs = {(need.action, need.resource): need for need in asked}.values()
    found = {one["Sid"]: {key: one[key] for key in ("Effect", "Action", "Resource")} for one in policy["Statement"]}
    return {sid for sid, one in found.items() if not any(allowed([{"Statement": [one]}], need) for need in needs)}


@pytest.mark.parametrize(
    "region", [*REGIONS[:2], *(pytest.param(region, marks=pytest.mark.nightly) for region in REGIONS[2:])]
)
def test_an_endpoint(cloud: Cloud, tmp_path: Path, main: Deployer, region: str) -> None:
    content = prepared(cloud, region, {**PLAIN, "alarms": {"model_errors": 3}})
    live(main, tmp_path, content, "--max", "5")
    assert not cloud.sagemaker.things
    assert {call.region for call in cloud.calls} == {region}
    role = content["role"]
    assert role.startswith(f"arn:{get_partition(region)}:iam::")


@pytest.mark.parametrize("region", REGIONS[:1])
def test_components_with_an_adapter_in_permissions(cloud: Cloud, tmp_path: Path, main: Deployer, region: str) -> None:
    live(main, tmp_path, prepared(cloud, region, COMPONENTS), "--component", "base", "3")
    assert not cloud.sagemaker.things


def test_a_model_of_ones_own_in_ones_own_network(cloud: Cloud, tmp_path: Path, main: Deployer) -> None:
    ec2 = cloud.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="g", Description="g", VpcId=vpc)["GroupId"]
    key = f"arn:aws:kms:us-east-1:{ACCOUNT}:key/11111111-2222-3333-4444-555555555555"
    model = tmp_path / "model"
    model.mkdir()
    for name, content in MODEL.items():
        (model / name).write_bytes(content)
    changes = {
        "model": {"path": str(model), "upload": "s3://models/mine/", "shape": PLAIN["model"]["shape"]},
        "network": {"isolated": True, "subnets": [subnet], "security_groups": [group]},
        "encryption": {"volume_key": key},
        "scaling": None,
    }
    live(main, tmp_path, prepared(cloud, "us-east-1", {**PLAIN, **changes}), "3", also=("--data",))


def test_an_archive_of_a_model(cloud: Cloud, tmp_path: Path, main: Deployer) -> None:
    model = {"s3": "s3://models/llama.tar.gz", "shape": PLAIN["model"]["shape"]}
    content = prepared(cloud, "us-east-1", {**PLAIN, "model": model})
    cloud.client("s3").put_object(Bucket="models", Key="llama.tar.gz", Body=archive({"model.safetensors": b"x"}))
    live(main, tmp_path, content, "--max", "5")


def encrypted(cloud: Cloud, region: str) -> str:
    """Have the model's bucket encrypt with a key of one's own, what is in it too; return the key's ARN."""
    kms, s3 = cloud.client("kms", region), cloud.client("s3", region)
    arn = str(kms.create_key()["KeyMetadata"]["Arn"])
    kms.create_alias(AliasName="alias/models", TargetKeyId=arn)
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": arn}}
    s3.put_bucket_encryption(Bucket="models", ServerSideEncryptionConfiguration={"Rules": [rule]})
    for name, body in MODEL.items():
        s3.put_object(Bucket="models", Key=f"llama/{name}", Body=body)
    cloud.keys["models"] = arn
    return arn


@pytest.mark.parametrize("region", REGIONS[2:3])
def test_a_model_that_is_uploaded_to_a_bucket_with_a_key(
    cloud: Cloud, tmp_path: Path, main: Deployer, region: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name, data in MODEL.items():
        (model / name).write_bytes(data)
    uploaded = {"path": str(model), "upload": "s3://models/mine/", "shape": PLAIN["model"]["shape"]}
    content = prepared(cloud, region, {**PLAIN, "model": uploaded})
    content["encryption"] = {"model_key": encrypted(cloud, region)}
    live(main, tmp_path, content, "--max", "5", also=("--data",))


@pytest.mark.parametrize("named", ["arn", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("id", "alias"))])
def test_a_model_in_a_bucket_with_a_key(cloud: Cloud, tmp_path: Path, main: Deployer, named: str) -> None:
    """The shape is read from the config.json, which the key encrypts."""
    content = prepared(cloud, "us-east-1", {**COMPONENTS, "model": {"s3": "s3://models/llama/"}})
    arn = encrypted(cloud, "us-east-1")
    content["encryption"] = {"model_key": {"arn": arn, "id": arn.rpartition("/")[2], "alias": "alias/models"}[named]}
    live(main, tmp_path, content, "--component", "base", "3")


def test_a_key_that_the_specification_lacks(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str]
) -> None:
    content = prepared(cloud, "us-east-1", PLAIN)
    key = encrypted(cloud, "us-east-1")
    path = written(tmp_path, content)
    main(["doctor", path])
    assert f"encryption.model_key: {key}" in " ".join(capsys.readouterr().out.split())
    assert {need.action for need in cloud.denied} <= {"kms:Decrypt"}
    cloud.denied.clear()


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_what_bidirectional_streams_need_is_read_with_the_same_policy(
    cloud: Cloud, tmp_path: Path, main: Deployer, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = written(tmp_path, prepared(cloud, "us-east-1", PLAIN))
    for flags, said in ((["--bidirectional"], True), ([], False)):
        assert main([command, path, *flags]) == 0
        assert ("bidirectional: " in capsys.readouterr().out) == said
    assert not cloud.denied


def test_what_a_former_specification_had_is_removed(cloud: Cloud, tmp_path: Path, main: Deployer) -> None:
    """Components, scaling and alarms that the printed policy's specification no longer names."""
    content = prepared(cloud, "us-east-1", {**COMPONENTS, "alarms": {"model_errors": 3}})
    assert main(["up", written(tmp_path, content), "--yes"]) == 0
    fewer = {**content, "components": [{"name": "third"}], "scaling": None, "alarms": None}
    fewer["instance"] = {"type": "ml.g6e.12xlarge", "count": 1}
    assert main(["up", written(tmp_path, fewer), "--yes"]) == 0
    assert cloud.sagemaker.names("inference-component") == ["third"]
    assert main(["down", "--name", NAME, "--region", "us-east-1", "--yes"]) == 0
    assert not cloud.sagemaker.things


def test_another_deployments_component_cannot_be_deleted(cloud: Cloud, tmp_path: Path, main: Deployer) -> None:
    """The double heeds conditions: the tag is what allows it."""
    content = prepared(cloud, "us-east-1", COMPONENTS)
    assert main(["up", written(tmp_path, content), "--yes"]) == 0
    other = {**content, "name": "other", "components": [{"name": "theirs"}]}
    main.takes(written(tmp_path, other))
    deleting = cloud.client_of_caller("sagemaker")
    with pytest.raises(deleting.exceptions.ClientError, match="AccessDenied"):
        deleting.delete_inference_component(InferenceComponentName="second")
    assert [need.action for need in cloud.denied] == ["sagemaker:DeleteInferenceComponent"]
    cloud.denied.clear()


def own_key(cloud: Cloud, region: str) -> str:
    return str(cloud.client("kms", region).create_key()["KeyMetadata"]["Arn"])


def asynchronous(cloud: Cloud, region: str, model: dict[str, Any]) -> dict[str, Any]:
    """An asynchronous endpoint's specification, whose answers and topics have keys of one's own."""
    content = prepared(cloud, region, {**PLAIN, "model": model})
    sns, s3, keys = cloud.client("sns", region), cloud.client("s3", region), [own_key(cloud, region) for _ in range(2)]
    topics = [sns.create_topic(Name=name, Attributes={"KmsMasterKeyId": keys[0]})["TopicArn"] for name in ("ok", "bad")]
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    s3.create_bucket(Bucket="answers", **where)
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": keys[1]}}
    s3.put_bucket_encryption(Bucket="answers", ServerSideEncryptionConfiguration={"Rules": [rule]})
    cloud.keys["answers"] = keys[1]
    places = {"output": "s3://answers/llama/", "failures": "s3://answers/failed/"}
    content["async"] = {**places, "concurrency": 4, "notify_success": topics[0], "notify_error": topics[1]}
    content["encryption"] = {"topic_key": keys[0], "output_key": keys[1]}
    return content


@pytest.mark.parametrize(("region", "hub"), [("us-east-1", True), ("us-isob-east-1", False)])
def test_an_asynchronous_endpoint(
    cloud: Cloud,
    tmp_path: Path,
    main: Deployer,
    region: str,
    hub: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Requests by somebody with the invoker's printed policy; what SageMaker does with them, by the role's."""
    content = asynchronous(cloud, region, PLAIN["model"])
    if hub:
        key = own_key(cloud, region)
        secret = cloud.client("secretsmanager").create_secret(Name="hub", SecretString="never read", KmsKeyId=key)
        shape = PLAIN["model"]["shape"]
        content["model"] = {"id": "org/model", "shape": shape, "token_secret": secret["ARN"]}
        content["encryption"]["secret_key"] = key
    else:
        content["encryption"]["model_key"] = encrypted(cloud, region)
    cloud.policies["invoker"] = [printed(content, "invoker")]
    cloud.policies[content["role"]] = [printed(content, "execution-role")]

    def serving() -> None:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "invoker")
            for upload in ([], ["--upload", "s3://answers/llama/requests/1.json"]):
                assert run(["invoke", NAME, "Hello", "--async", *upload, "--region", region]) == 0
                assert json.loads(capsys.readouterr().out) == {"generated_text": "Hello"}
        told = sns_backends[ACCOUNT][region].topics[content["async"]["notify_success"]].sent_notifications
        assert len(told) in (2, 4)
        assert "inputLocation" not in json.loads(told[0][1])["requestParameters"], "its body was not uploaded"
        message = json.loads(told[-1][1])
        assert (message["invocationStatus"], message["eventName"]) == ("Completed", "InferenceResult")
        assert message["requestParameters"]["endpointName"] == NAME
        assert message["requestParameters"]["inputLocation"] == "s3://answers/llama/requests/1.json"
        assert message["responseParameters"]["outputLocation"].startswith("s3://answers/llama/")

    live(main, tmp_path, content, "--max", "5", serving=serving)
    assert not cloud.sagemaker.things
    assert {call.caller for call in cloud.calls if "async-invocations" in call.operation} == {"invoker"}


def test_what_asynchronous_requests_need_is_denied_without_it(cloud: Cloud, tmp_path: Path, main: Deployer) -> None:
    """Else the test above shows nothing: another endpoint's invoker, a place that is not the role's, an unnamed key."""
    content = asynchronous(cloud, "us-east-1", PLAIN["model"])
    assert main(["up", written(tmp_path, content), "--yes"]) == 0
    role, output_key = content["role"], content["encryption"]["output_key"]
    cloud.policies[CALLER] = [printed({**content, "name": "other"}, "invoker")]
    predictor = Predictor(NAME, "us-east-1")
    with pytest.raises(Forbidden, match="sagemaker:InvokeEndpointAsync"):
        predictor.predict_async({"inputs": "Hello"})
    cloud.policies[CALLER] = [printed(content, "invoker")]
    cloud.policies[role] = [printed({**content, "encryption": {"output_key": output_key}}, "execution-role")]
    cloud.client("s3").put_object(Bucket="answers", Key="elsewhere/1.json", Body=b"{}")
    with pytest.raises(ModelFailed, match="The role is not authorized to perform: s3:GetObject"):
        predictor.predict_async(input_location="s3://answers/elsewhere/1.json").wait(9)
    assert predictor.predict_async({"inputs": "Hello"}).wait(9) == {"generated_text": "Hello"}
    assert not sns_backends[ACCOUNT]["us-east-1"].topics[content["async"]["notify_success"]].sent_notifications
    denied = ["sagemaker:InvokeEndpointAsync", "s3:GetObject", "kms:GenerateDataKey", "kms:GenerateDataKey"]
    assert [need.action for need in cloud.denied] == denied
    cloud.denied.clear()
