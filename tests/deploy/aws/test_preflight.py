"""Before `up`: what would fail is said, nothing is changed, and what may not be looked at is a warning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from moto.kms.models import kms_backends
from moto.servicequotas.responses import ServiceQuotasResponse

from deploy.aws import Aws
from deploy.cli import main as cli
from deploy.errors import NotAllowed, Refused
from deploy.iam.policies import policies
from deploy.iam.simulation import Denial
from deploy.preflight import checks
from deploy.preflight import model as preflight_model
from deploy.preflight.check import Check, Verdict
from deploy.preflight.checks import lines, refuse_errors
from deploy.resolve.decision import Decision, InstancePool
from deploy.resolve.instances import architecture
from deploy.resources.resource import TAG_DEPLOYMENT
from deploy.s3.prefix import Entry
from deploy.spec import Spec
from tests.deploy.doubles.archives import archive
from tests.deploy.doubles.aws import ACCOUNT, CALLER, Cloud
from tests.deploy.doubles.deployments import Deployer
from tests.deploy.doubles.endpoints import IMAGE, ROLE, aws, make_endpoint, make_ready, set_quotas, settle


def spec(**content: Any) -> Spec:
    base: dict[str, Any] = {"name": "chat", "role": ROLE, "image": {"uri": IMAGE}, "model": {"id": "org/model"}}
    return Spec.model_validate({**base, **content})


def decision(**changes: Any) -> Decision:
    values: dict[str, Any] = {
        "region": "us-east-1", "account": ACCOUNT, "image": IMAGE, "instance_type": "ml.g5.xlarge", "gpus": 1,
        "ami": None, "model_data": None, "download": 600, "startup": 600, **changes,
    }  # fmt: skip
    return Decision(**values)


@pytest.fixture(autouse=True)
def quotas(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    return set_quotas(monkeypatch, {"ml.g5.xlarge for endpoint usage": 2.0})


@pytest.fixture(autouse=True)
def denied(monkeypatch: pytest.MonkeyPatch) -> list[Denial]:
    """What IAM denies to the role. moto does not simulate policies."""
    found: list[Denial] = []
    monkeypatch.setattr(checks, "denials", lambda aws, role, policy: found if role == ROLE else None)
    return found


@pytest.fixture
def ready(cloud: Cloud) -> Cloud:
    """Role and image are there."""
    make_ready(cloud)
    return cloud


@pytest.fixture(autouse=True)
def _permitted(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks has the deployer's policy that is printed for the specification, and no other."""

    def permitted(aws: Aws, spec: Spec, decision: Decision, **how: Any) -> list[Check]:
        decision = replace(decision, model_data=spec.model.s3 or spec.model.upload)
        cloud.policies[CALLER] = [policies(spec, decision)["deployer"]]
        return checks.preflight(aws, spec, decision, **how)

    monkeypatch.setitem(globals(), "preflight", permitted)


preflight = checks.preflight  # see above


def run(name: str, the_spec: Spec | None = None, **how: Any) -> Check:
    """The worst that is said of one thing."""
    found = [
        check
        for check in preflight(aws(), the_spec or spec(), how.pop("decision", decision()), **how)
        if check.name == name
    ]
    return max(found, key=lambda check: list(Verdict).index(check.verdict))


def hub(status: int) -> Any:
    def fetch(method: str, url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        if url.startswith("https://huggingface.co/"):
            assert (method, url) == ("HEAD", "https://huggingface.co/org/model/resolve/main/config.json")
            assert headers == {}
            return status, b""
        return 200, b'{"architecture": "amd64"}'

    return fetch


def test_all_is_well_and_nothing_is_changed(ready: Cloud) -> None:
    found = preflight(aws(), spec(), decision(), fetch=hub(200))
    assert [(check.name, check.verdict) for check in found] == [
        (name, Verdict.OK) for name in ("account", "name", "role", "image", "model", "quota")
    ]
    assert ready.changes() == []
    refuse_errors(found)
    assert lines(found)[0] == f"ok      account: {ACCOUNT} in us-east-1"


def test_the_name_is_taken(ready: Cloud) -> None:
    sagemaker = make_endpoint(ready)
    settle(sagemaker)
    ready.sagemaker.things["endpoint", "chat"].tags.clear()
    found = run("name")
    assert (found.verdict, found.advice) == (Verdict.ERROR, "Use another name, or delete that endpoint.")
    arn = sagemaker.describe_endpoint(EndpointName="chat")["EndpointArn"]
    sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": TAG_DEPLOYMENT, "Value": "chat"}])
    assert run("name").says == "chat exists and belongs to this deployment (InService)"


def test_the_role(cloud: Cloud) -> None:
    assert run("role").says == f"{ROLE} does not exist"
    cloud.client("iam").create_role(
        RoleName="lmi", AssumeRolePolicyDocument='{"Statement": {"Effect": "Allow", "Principal": {"Service": ["ec2"]}}}'
    )
    assert run("role").says == f"{ROLE} does not trust sagemaker.amazonaws.com"
    other = spec(role="arn:aws:iam::999999999999:role/lmi")
    assert "does not belong to the account" in run("role", other).says


def test_the_role_s_permissions(ready: Cloud, denied: list[Denial], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("role").verdict is Verdict.OK
    denied += [Denial("s3:GetObject", one, "implicitDeny") for one in ("a", "b")]
    found = run("role")
    assert (found.verdict, found.says) == (Verdict.WARNING, f"{ROLE} is not allowed s3:GetObject")
    assert "--who execution-role" in found.advice

    def fails(*arguments: Any) -> None:
        raise NotAllowed("no", "")

    monkeypatch.setattr(checks, "denials", fails)
    found = run("role")
    assert (found.verdict, found.says) == (Verdict.WARNING, f"{ROLE}: permissions not checked: no")


@pytest.mark.parametrize("action", ["BatchGetImage", "GetDownloadUrlForLayer", "GetAuthorizationToken"])
def test_a_role_that_cannot_pull_the_image_is_an_error_before_anything_is_made(
    ready: Cloud, denied: list[Denial], action: str
) -> None:
    denied.append(Denial(f"ecr:{action}", "*", "implicitDeny"))
    found = run("role")
    assert found.verdict is Verdict.ERROR
    assert f"is not allowed ecr:{action}, so it cannot pull the image" in found.says
    assert "--who execution-role" in found.advice
    name = IMAGE.partition("/")[2].partition(":")[0]
    statement = {"Effect": "Allow", "Principal": {"AWS": ROLE}, "Action": "ecr:*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    ready.client("ecr").set_repository_policy(repositoryName=name, policyText=policy)
    by_policy = run("role").verdict
    assert by_policy is (Verdict.ERROR if action == "GetAuthorizationToken" else Verdict.WARNING)


def test_an_image_of_another_account_may_be_allowed_there(ready: Cloud, denied: list[Denial]) -> None:
    denied.append(Denial("ecr:BatchGetImage", "*", "implicitDeny"))
    other = decision(image=IMAGE.replace(IMAGE[:12], "999999999999"))
    assert run("role", decision=other).verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("docker.io/lmi:1", "is not in ECR"),
        (IMAGE.replace("us-east-1", "eu-west-1"), "is in eu-west-1, but the endpoint is in us-east-1"),
        (IMAGE.replace(":1", ":2"), "does not exist"),
        (IMAGE.replace("lmi", "none"), "does not exist"),
    ],
)
def test_an_image_that_cannot_be_pulled(ready: Cloud, uri: str, says: str) -> None:
    found = run("image", decision=decision(image=uri))
    assert found.verdict is Verdict.ERROR
    assert says in found.says


def test_an_image_of_another_processor(ready: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    aws = Aws()
    monkeypatch.setattr(
        aws.client("ecr"), "get_download_url_for_layer", lambda **which: {"downloadUrl": "http://there/config"}
    )
    for body, host, verdict in (
        (b'{"architecture": "arm64"}', "ml.g6e.xlarge", Verdict.ERROR),
        (b'{"architecture": "arm64"}', "ml.c8g.2xlarge", Verdict.OK),
        (b'{"architecture": "amd64"}', "ml.c8g.2xlarge", Verdict.ERROR),
        (b'{"architecture": "amd64"}', "ml.c7i.2xlarge", Verdict.OK),
        (b"{}", "ml.c8g.2xlarge", Verdict.OK),
    ):
        on = decision(instance_type=host)
        checks = preflight(aws, spec(), on, fetch=lambda *asked, body=body: (200, body))
        [found] = [check for check in checks if check.name == "image"]
        assert found.verdict is verdict, (body, host)
        if verdict is Verdict.ERROR:
            assert found.says.endswith(f"{host} is an {architecture(host)} host")
            assert f"--platform linux/{architecture(host)} " in found.advice


LABEL = "com.amazonaws.sagemaker.capabilities.bidirectional-streaming"
NEWEST = "al2023-ami-sagemaker-inference-gpu-4-1"


def bidirectional(
    monkeypatch: pytest.MonkeyPatch,
    labels: dict[str, str] | None,
    host: dict[str, Any],
    asked: bool = True,
    **content: Any,
) -> list[Check]:
    """What is said of bidirectional streams to an image with these labels, or one that cannot be read."""
    aws = Aws()
    monkeypatch.setattr(
        aws.client("ecr"), "get_download_url_for_layer", lambda **which: {"downloadUrl": "http://there"}
    )
    body = json.dumps({"architecture": "amd64", "config": {"Labels": labels}}).encode()
    status = 404 if labels is None else 200
    found = preflight(
        aws, spec(**content), decision(**host), fetch=lambda *request: (status, body), bidirectional=asked
    )
    return [check for check in found if check.name == "bidirectional"]


@pytest.mark.parametrize(
    ("labels", "host", "content", "says"),
    [
        ({LABEL: "true"}, {"ami": NEWEST}, {}, []),
        ({LABEL: "true"}, {"gpus": 0, "instance_type": "ml.g5.xlarge"}, {}, []),
        ({LABEL: "true"}, {"ami": "one-of-2027"}, {}, []),
        ({LABEL: "false"}, {"ami": NEWEST}, {}, ["the image lacks the label"]),
        ({}, {"ami": None}, {}, ["instance.ami is the default", "the image lacks the label"]),
        (None, {"ami": "al2-ami-sagemaker-inference-gpu-3-1"}, {}, ["gpu-3-1", "labels were not read"]),
        ({LABEL: "true"}, {"ami": NEWEST}, {"environment": {"LMI_FRONT": "djl"}}, ["DJL Serving refuses WebSockets"]),
        ({LABEL: "true"}, {"ami": NEWEST}, {"options": {"websockets_max": 0}}, ["websockets_max: 0 turns"]),
    ],
)
def test_what_bidirectional_streams_need(
    ready: Cloud, monkeypatch: pytest.MonkeyPatch, labels: Any, host: Any, content: Any, says: list[str]
) -> None:
    found = bidirectional(monkeypatch, labels, host, **content)
    if says:
        assert [words in check.says for check, words in zip(found, says, strict=True)] == [True] * len(says)
        assert Verdict.OK not in {check.verdict for check in found}
        assert all(check.advice for check in found)
    else:
        [check] = found
        assert check.verdict is Verdict.OK
        assert "sagemaker:InvokeEndpointWithBidirectionalStream" in check.says


@pytest.mark.parametrize(
    ("options", "is_checked"),
    [
        ({}, False),
        ({"max_model_len": 512}, False),
        ({"websockets_max": 0}, False),
        ({"websockets_max": 0, "websockets_seconds": 1800}, False),
        ({"websockets_max": 100}, True),
        ({"websockets_seconds": 1800}, True),
    ],
)
def test_bidirectional_streams_are_checked_where_their_options_are_set(
    ready: Cloud, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], is_checked: bool
) -> None:
    found = bidirectional(monkeypatch, {}, {"ami": None}, asked=False, options=options)
    assert bool(found) == is_checked
    assert {check.verdict for check in found} <= {Verdict.WARNING}  # the other routes work


def test_a_manifest_in_ocis_format_is_a_warning(ready: Cloud) -> None:
    """What buildah and podman push by default, and Docker where its images are in containerd's store."""
    kind = "application/vnd.oci.image.manifest.v1+json"
    for tag, named in (("2", {"mediaType": kind}), ("3", {})):
        manifest = {"schemaVersion": 2, **named, "config": {"digest": f"sha256:{tag * 64}", "size": 1}, "layers": []}
        ready.client("ecr").put_image(
            repositoryName="lmi", imageTag=tag, imageManifest=json.dumps(manifest), imageManifestMediaType=kind
        )
        found = run("image", decision=decision(image=IMAGE.replace(":1", f":{tag}")))
        assert found.verdict is Verdict.WARNING
        assert "OCI format" in found.says
        assert "--format v2s2" in found.advice


def test_an_index_of_platforms_is_refused(ready: Cloud) -> None:
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}
    ready.client("ecr").put_image(
        repositoryName="lmi", imageTag="2", imageManifest=json.dumps(index), imageManifestMediaType=index["mediaType"],
        imageDigest="sha256:" + hashlib.sha256(json.dumps(index).encode()).hexdigest(),
    )  # fmt: skip
    found = run("image", decision=decision(image=IMAGE.replace(":1", ":2")))
    assert found.says == "the image is an index of several platforms, which SageMaker does not accept"
    assert "--provenance=false" in found.advice


@pytest.mark.parametrize(
    ("status", "verdict", "says"),
    [(200, Verdict.OK, "on the hub"), (401, Verdict.WARNING, "is private or gated"),
     (403, Verdict.WARNING, "is private or gated"), (404, Verdict.WARNING, "has no file config.json")],
)  # fmt: skip
def test_a_model_of_the_hub_in_preflight(ready: Cloud, status: int, verdict: Verdict, says: str) -> None:
    found = run("model", fetch=hub(status))
    assert found.verdict is verdict
    assert says in found.says


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("gpt2", "gpt2/resolve/main/config.json", "gpt2 on the hub has no file config.json"),
        (
            "org/model/q4/file.gguf",
            "org/model/resolve/main/q4/file.gguf",
            "org/model on the hub has no file q4/file.gguf",
        ),
    ],
)
def test_the_hub_is_asked_for_a_file_of_the_model(ready: Cloud, name: str, path: str, said: str) -> None:
    urls: list[str] = []

    def fetch(method: str, url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        urls.extend([url] * url.startswith("https://huggingface.co/"))
        return 404, b""

    found = run("model", spec(model={"id": name}), fetch=fetch)
    assert urls == [f"https://huggingface.co/{path}"]
    assert found.says == said


def test_the_hub_is_never_a_reason_to_fail(ready: Cloud) -> None:
    def unreachable(*asked: Any) -> tuple[int, bytes]:
        raise OSError("no network")

    assert run("model", fetch=unreachable).verdict is Verdict.WARNING
    assert run("model", fetch=unreachable).says.startswith("not checked: ")
    assert run("model").says.endswith("(not checked)")


def test_the_hub_is_not_asked_for_the_demo_model(ready: Cloud) -> None:
    def asked(*question: Any) -> tuple[int, bytes]:
        raise AssertionError(question)

    found = run("model", spec(model={"id": "demo"}), fetch=asked)
    assert (found.verdict, found.says.split(":")[0]) == (Verdict.OK, "demo")


def test_a_gated_model_with_its_secret(ready: Cloud) -> None:
    made = ready.client("secretsmanager").create_secret(Name="hub", SecretString="never read")
    gated = spec(model={"id": "org/model", "token_secret": made["ARN"]})
    assert run("model", gated, fetch=hub(401)).verdict is Verdict.OK
    assert run("secret", gated).verdict is Verdict.OK
    assert ready.count("GetSecretValue") == 0
    ready.client("secretsmanager").delete_secret(SecretId=made["ARN"], ForceDeleteWithoutRecovery=True)
    assert "does not exist" in run("secret", gated).says
    elsewhere = spec(model={"id": "org/model", "token_secret": made["ARN"].replace("us-east-1", "eu-west-1")})
    assert run("secret", elsewhere).says.endswith("is in eu-west-1, but the endpoint is in us-east-1")


def test_a_prefix_is_held_against_what_can_load(ready: Cloud) -> None:
    in_s3 = spec(model={"s3": "s3://of-ours/llama/"})
    assert run("model", in_s3).says == "there is no bucket of-ours"
    s3 = ready.client("s3")
    s3.create_bucket(Bucket="of-ours")
    assert run("model", in_s3).says == "it contains no files"
    for name, text in {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights", "": ""}.items():
        s3.put_object(Bucket="of-ours", Key=f"llama/{name}", Body=text.encode())
    assert "0-byte object" in run("model", in_s3).says
    s3.delete_object(Bucket="of-ours", Key="llama/")
    assert run("model", in_s3) == Check("model", Verdict.OK, "s3://of-ours/llama/: 3 objects, 11 B")


@pytest.mark.parametrize(
    ("data", "environment", "verdict", "says"),
    [
        (archive({"model.safetensors": b"", "config.json": b""}), {}, Verdict.OK, "an archive of"),
        (
            archive({"model.safetensors": b"", "config.json": None}),
            {},
            Verdict.ERROR,
            "its member 'config.json' is a link",
        ),
        (b"PK", {}, Verdict.ERROR, "it cannot be read as a tar.gz"),
        (archive({"model.py": b""}), {}, Verdict.ERROR, "llama.tar.gz contains no weights"),
        (archive({"llama/model.safetensors": b""}), {}, Verdict.ERROR, "all files are in the directory 'llama'"),
        (archive({"llama/a.gguf": b""}), {"OPTION_MODEL_ID": "/opt/ml/model/llama"}, Verdict.OK, "an archive of"),
    ],
    ids=["model", "link", "zip", "code", "folder", "named folder"],
)
def test_an_archive_is_held_against_what_sagemaker_unpacks(
    ready: Cloud, data: bytes, environment: dict[str, str], verdict: Verdict, says: str
) -> None:
    in_s3 = spec(model={"s3": "s3://archives/llama.tar.gz"}, environment=environment)
    s3 = ready.client("s3")
    s3.create_bucket(Bucket="archives")
    assert run("model", in_s3).says == "s3://archives/llama.tar.gz does not exist"
    s3.put_object(Bucket="archives", Key="llama.tar.gz", Body=data)
    found = run("model", in_s3)
    assert (found.verdict, says in found.says) == (verdict, True)


def test_lmi_looks_into_an_archive_s_only_directory_by_itself(ready: Cloud) -> None:
    ready.client("s3").create_bucket(Bucket="archives")
    ready.client("s3").put_object(Bucket="archives", Key="a.tar.gz", Body=archive({"llama/model.safetensors": b""}))
    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.36.0-lmi28.0.0-cu130"
    of_aws = spec(model={"s3": "s3://archives/a.tar.gz"}, image={"uri": image})
    assert run("model", of_aws, decision=decision(image=image)).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("environment", "told"),
    [({}, "a.tar.gz contains inference.py, which the server does not run"),
     ({"CUSTOM_SCRIPT_FILENAME": "inference.py"}, "an archive of")],
)  # fmt: skip
def test_a_script_in_an_archive_is_named_unless_the_server_runs_it(
    ready: Cloud, environment: dict[str, str], told: str
) -> None:
    ready.client("s3").create_bucket(Bucket="archives")
    data = archive({"model.safetensors": b"", "code/inference.py": b""})
    ready.client("s3").put_object(Bucket="archives", Key="a.tar.gz", Body=data)
    assert told in run("model", spec(model={"s3": "s3://archives/a.tar.gz"}, environment=environment)).says


def test_an_archive_of_20_gb_is_named(ready: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    ready.client("s3").create_bucket(Bucket="archives")
    ready.client("s3").put_object(Bucket="archives", Key="llama.tar.gz", Body=archive({"model.safetensors": b""}))
    monkeypatch.setattr(preflight_model, "objects", lambda aws, prefix: [Entry("", 20 * 10**9)])
    found = run("model", spec(model={"s3": "s3://archives/llama.tar.gz"}))
    assert (found.verdict, "the archive is 20.0 GB" in found.says) == (Verdict.WARNING, True)


def test_a_directory_says_what_is_to_be_sent(ready: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3 = ready.client("s3")
    s3.create_bucket(Bucket="of-ours")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    local = spec(model={"path": str(tmp_path), "upload": "s3://of-ours/llama/"})
    assert run("model", local).says.endswith("3 files, 6 B, 3 to upload (6 B)")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    at_home = spec(model={"path": f"~/{tmp_path.name}", "upload": "s3://of-ours/llama/"})
    assert run("model", at_home).verdict is Verdict.OK
    s3.put_object(Bucket="of-ours", Key="llama/old.bin", Body=b"x")
    assert "contains other objects (1), e.g. old.bin" in run("model", local).says
    (tmp_path / "config.json").unlink()
    assert run("model", local).verdict is Verdict.ERROR


LOCKED = {"s3": "s3://of-ours/llama/"}


@pytest.fixture
def locked(ready: Cloud) -> str:
    """The ARN of the key that encrypts the model's bucket."""
    kms, s3 = ready.client("kms"), ready.client("s3")
    arn = str(kms.create_key()["KeyMetadata"]["Arn"])
    kms.create_alias(AliasName="alias/models", TargetKeyId=arn)
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": arn}}
    s3.create_bucket(Bucket="of-ours")
    s3.put_bucket_encryption(Bucket="of-ours", ServerSideEncryptionConfiguration={"Rules": [rule]})
    s3.put_object(Bucket="of-ours", Key="llama/config.json", Body=b"{}")
    return arn


def keys_said(**content: Any) -> list[Check]:
    return [check for check in preflight(aws(), spec(**content), decision()) if check.name == "key"]


def test_a_key_that_is_not_named(locked: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    uploaded = {"path": str(tmp_path), "upload": "s3://of-ours/mine/"}
    for model, place in ((LOCKED, "s3://of-ours/llama/config.json"), (uploaded, "s3://of-ours")):
        (found,) = keys_said(model=model)
        assert found.verdict is Verdict.WARNING
        assert found.says == f"{place} is encrypted with {locked}, which is not in the specification"
        assert f"encryption.model_key: {locked}" in found.advice


def test_a_key_named_by_arn_id_and_alias(locked: str) -> None:
    for named in (locked, locked.rpartition("/")[2], "alias/models"):
        (found,) = keys_said(model=LOCKED, encryption={"model_key": named})
        assert (found.verdict, found.says) == (Verdict.OK, f"{named} encrypts the model's bucket")


def test_another_key_than_the_buckets(ready: Cloud, locked: str) -> None:
    other = ready.client("kms").create_key()["KeyMetadata"]["Arn"]
    found = keys_said(model=LOCKED, encryption={"model_key": other})
    assert [check.verdict for check in found] == [Verdict.WARNING] * 2
    assert f"kms:Decrypt on {locked}" in found[0].advice
    assert found[1].says == f"encryption.model_key: {other} does not encrypt s3://of-ours/llama/config.json"


def test_an_adapter_under_another_key(ready: Cloud, locked: str) -> None:
    ready.client("s3").create_bucket(Bucket="plain")
    ready.client("s3").put_object(Bucket="plain", Key="llama/config.json", Body=b"{}")
    adapters = [{"name": "french", "artifact": "s3://of-ours/french.tar.gz"}]
    components = [{"name": "base", "adapters": adapters}]
    (found,) = keys_said(model={"s3": "s3://plain/llama/"}, components=components)
    assert found.says.startswith(f"s3://of-ours is encrypted with {locked}")


def test_a_bucket_without_a_key_or_with_awss_needs_none(ready: Cloud, locked: str) -> None:
    kms_backends[ACCOUNT]["us-east-1"].keys[locked.rpartition("/")[2]].key_manager = "AWS"
    assert keys_said(model=LOCKED) == []
    ready.client("s3").create_bucket(Bucket="plain")
    assert keys_said(model={"s3": "s3://plain/llama/"}) == []
    assert keys_said(model={"s3": "s3://none-there/llama/"}) == []


def test_a_key_that_may_not_be_looked_at(ready: Cloud, locked: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    uploaded = {"path": str(tmp_path), "upload": "s3://of-ours/mine/"}
    everything = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    for action, says in (
        ("s3:GetEncryptionConfiguration", "not checked: GetBucketEncryption is not allowed"),
        ("kms:DescribeKey", f"s3://of-ours is encrypted with {locked}, which is not in the specification"),
    ):
        ready.policies[CALLER] = [{"Statement": [everything, {**everything, "Effect": "Deny", "Action": action}]}]
        (found,) = [one for one in checks.preflight(aws(), spec(model=uploaded), decision()) if one.name == "key"]
        assert (found.verdict, found.says) == (Verdict.WARNING, says)
        assert {need.action for need in ready.denied} == {action}
        ready.denied.clear()


def test_the_key_of_the_token_s_secret(ready: Cloud) -> None:
    key = ready.client("kms").create_key()["KeyMetadata"]["Arn"]
    for name, named in (("awss", {}), ("ours", {"KmsKeyId": key})):
        arn = ready.client("secretsmanager").create_secret(Name=name, SecretString="never read", **named)["ARN"]
        content = {"model": {"id": "org/model", "token_secret": arn}}
        if not named:
            assert keys_said(**content) == []
            continue
        (found,) = keys_said(**content)
        assert found.says == f"{arn} is encrypted with {key}, which is not in the specification"
        assert f"encryption.secret_key: {key}, and give the role the permissions" in found.advice
        (found,) = keys_said(**content, encryption={"secret_key": key})
        assert (found.verdict, found.says) == (Verdict.OK, f"{key} encrypts model.token_secret")


def topic(cloud: Cloud, name: str, key: str | None = None) -> str:
    attributes = {} if key is None else {"KmsMasterKeyId": key}
    return str(cloud.client("sns").create_topic(Name=name, Attributes=attributes)["TopicArn"])


def test_the_key_of_topics(ready: Cloud) -> None:
    key = str(ready.client("kms").create_key()["KeyMetadata"]["Arn"])
    ours, awss, plain = (topic(ready, *named) for named in (("ours", key), ("awss", "alias/aws/sns"), ("plain",)))
    ready.client("s3").create_bucket(Bucket="answers")
    for told in ({"notify_success": awss}, {"notify_error": plain}, {}):
        assert keys_said(**{"async": {"output": "s3://answers/", **told}}) == []
    asynchronous = {"output": "s3://answers/", "notify_success": plain, "notify_error": ours}
    (found,) = keys_said(**{"async": asynchronous})
    assert found.says == f"{ours} is encrypted with {key}, which is not in the specification"
    (found,) = keys_said(**{"async": asynchronous}, encryption={"topic_key": key})
    assert (found.verdict, found.says) == (Verdict.OK, f"{key} encrypts the topics of `async`")


def test_topics_that_are_not_there_and_keys_that_keep_cloudwatch_out(ready: Cloud) -> None:
    key = str(ready.client("kms").create_key()["KeyMetadata"]["Arn"])
    absent = f"arn:aws:sns:us-east-1:{ACCOUNT}:absent"
    found = run("topics", spec(alarms={"notify": absent}))
    assert (found.verdict, found.says) == (Verdict.WARNING, f"{absent} does not exist")
    found = run("topics", spec(alarms={"notify": topic(ready, "awss", "alias/aws/sns")}))
    assert found.verdict is Verdict.WARNING
    assert "CloudWatch cannot publish" in found.says
    found = run("topics", spec(alarms={"notify": topic(ready, "ours", key)}))
    assert found.verdict is Verdict.OK
    assert "must allow cloudwatch.amazonaws.com" in found.says


def test_the_key_of_the_answers_bucket(ready: Cloud, locked: str) -> None:
    asynchronous = {"async": {"output": "s3://of-ours/answers/"}}
    (found,) = keys_said(**asynchronous)
    assert f"encryption.output_key: {locked}, and give the role and the invoker" in found.advice
    assert [one.verdict for one in keys_said(**asynchronous, encryption={"output_key": locked})] == [Verdict.OK]
    ready.client("s3").create_bucket(Bucket="plain")  # SageMaker encrypts with the key that it is told
    assert keys_said(**{"async": {"output": "s3://plain/"}}, encryption={"output_key": locked}) == []


def test_quotas(ready: Cloud, quotas: dict[str, float]) -> None:
    assert run("quota").says == "ml.g5.xlarge for endpoint usage: 2"
    scaled = spec(scaling={"max": 5, "concurrency": 4})
    assert run("quota", scaled).verdict is Verdict.WARNING
    quotas["ml.g5.xlarge for endpoint usage"] = 0.0
    found = run("quota")
    assert found.verdict is Verdict.ERROR
    assert "Request a quota of 1 for `ml.g5.xlarge for endpoint usage`" in found.advice
    quotas.clear()
    assert run("quota").verdict is Verdict.WARNING


def test_a_quota_that_other_endpoints_use_up(ready: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the metric that Service Quotas names; our own instances are part of it."""
    name = "ml.g5.xlarge for endpoint usage"
    dimensions = {"Class": "None", "Resource": "endpoint/ml.g5.xlarge", "Service": "SageMaker", "Type": "Resource"}
    metric = {
        "MetricNamespace": "AWS/Usage",
        "MetricName": "ResourceCount",
        "MetricDimensions": dimensions,
        "MetricStatisticRecommendation": "Maximum",
    }
    entry = {"QuotaName": name, "Value": 2.0, "UsageMetric": metric}
    monkeypatch.setattr(
        ServiceQuotasResponse, "list_service_quotas", lambda self: json.dumps({"Quotas": [entry]}), raising=False
    )
    assert run("quota").verdict is Verdict.OK  # no usage is known
    ready.client("cloudwatch").put_metric_data(
        Namespace="AWS/Usage",
        MetricData=[
            {
                "MetricName": "ResourceCount",
                "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
                "Value": 2.0,
                "Timestamp": datetime.now(timezone.utc) - timedelta(minutes=20),
            }
        ],
    )
    found = run("quota")
    assert found.says == f"{name}: 2, of which other endpoints use 2, but 1 are needed"
    assert "Request a quota of 3" in found.advice
    entry["Value"] = 3.0
    assert run("quota").verdict is Verdict.OK


def test_a_pool_without_quota_is_an_error_only_if_no_pool_has_some(ready: Cloud, quotas: dict[str, float]) -> None:
    pools = (InstancePool(1, "ml.g5.xlarge", 1), InstancePool(2, "ml.g6.xlarge", 1))
    quotas["ml.g6.xlarge for endpoint usage"] = 0.0
    assert run("quota", decision=decision(pools=pools)).says == "ml.g6.xlarge for endpoint usage: 0, but 1 are needed"
    assert run("quota", decision=decision(pools=pools)).verdict is Verdict.WARNING
    quotas["ml.g5.xlarge for endpoint usage"] = 0.0
    assert run("quota", decision=decision(pools=pools)).verdict is Verdict.ERROR


def test_a_vpc(ready: Cloud) -> None:
    ec2 = ready.client("ec2")
    vpcs = [ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"] for _ in range(2)]
    asked = [{"CidrBlock": f"10.0.{n}.0/24", "AvailabilityZone": f"us-east-1{zone}"} for n, zone in enumerate("ab")]
    subnets = [ec2.create_subnet(VpcId=vpcs[0], **one)["Subnet"]["SubnetId"] for one in asked]
    groups = [ec2.create_security_group(GroupName="g", Description="g", VpcId=vpc)["GroupId"] for vpc in vpcs]

    def network(in_subnets: list[str], group: str) -> Check:
        return run("network", spec(network={"subnets": in_subnets, "security_groups": [group]}))

    assert network(subnets, groups[0]) == Check("network", Verdict.OK, f"{vpcs[0]}, 2 zones")
    assert network(subnets[:1], groups[0]).says == "all subnets are in us-east-1a"
    assert "belong to several VPCs" in network(subnets, groups[1]).says
    assert network(["subnet-0123456789abcdef0"], groups[0]).verdict is Verdict.ERROR


def test_what_may_not_be_looked_at_is_a_warning(ready: Cloud) -> None:
    ready.refuse("DescribeImages", "AccessDeniedException", "no")
    found = run("image")
    assert (found.verdict, found.says) == (Verdict.WARNING, "not checked: DescribeImages is not allowed")
    assert "lmi deploy iam" in found.advice


def test_errors_are_refused_all_at_once(cloud: Cloud) -> None:
    with pytest.raises(Refused, match=f"role: {ROLE} does not exist") as refused:
        refuse_errors(preflight(aws(), spec(), decision()))
    assert "image:" in refused.value.advice
    assert "role:" not in refused.value.advice, "the message has it"


def test_plan_says_it_and_up_refuses(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("deploy.cli.plan", "deploy.cli.up"):
        monkeypatch.setattr(f"{place}.over_the_network", None)
    shape = {"parameters": 1e9, "layers": 16, "kv_heads": 8, "head_dim": 64}
    content = {"name": "chat", "role": ROLE, "image": {"uri": f"{IMAGE}-cu130"}, "instance": {"type": "ml.g5.xlarge"},
               "model": {"id": "org/model", "shape": shape}, "alarms": None}  # fmt: skip
    path = tmp_path / "chat.yaml"
    path.write_text(yaml.safe_dump(content))
    cloud.push("lmi", "1-cu130")
    main = Deployer(cloud, cli.main)
    assert main(["plan", str(path)]) == 0
    assert f"error   role: {ROLE} does not exist" in capsys.readouterr().out.replace("\n", " ")
    cloud.calls.clear()
    assert main(["up", str(path), "--yes"]) == 2
    assert cloud.changes() == []
    cloud.sagemaker.polls = 0
    assert main(["up", str(path), "--yes", "--no-checks"]) == 0
    assert cloud.sagemaker.names("endpoint") == ["chat"]
