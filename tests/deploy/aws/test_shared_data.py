"""Data that somebody else has a use for: what serves is not overwritten, and another's is not deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.deployer.live import look
from deploy.deployer.preparation import check_data
from deploy.deployer.teardown import check_users, delete_data
from deploy.errors import Failed, Refused
from deploy.s3.upload import METADATA, plan_upload, upload
from deploy.spec import Spec
from tests.deploy.doubles.aws import Call, Cloud
from tests.deploy.doubles.deployments import NAME, PLAIN, permit, up, wanted_of
from tests.deploy.doubles.endpoints import aws

TO, ELSEWHERE = "s3://models/llama/", "s3://models/llama-2/"
ROLE = "arn:aws:iam::123456789012:role/other"


@pytest.fixture
def bucket(cloud: Cloud) -> Any:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="models")
    return s3


@pytest.fixture(autouse=True)
def _permitted(cloud: Cloud) -> None:
    """Whoever deploys has the policies that are printed for models that are uploaded there."""
    model = {**PLAIN["model"], "s3": None, "path": "llama"}
    permit(cloud, *({**PLAIN, "model": {**model, "upload": to}} for to in (TO, ELSEWHERE)))


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    return Spec.model_validate({**PLAIN, "model": {"path": str(tmp_path), "upload": TO}})


def test_changed_files_do_not_come_under_an_endpoint_that_serves(cloud: Cloud, bucket: Any, spec: Spec) -> None:
    directory = Path(str(spec.model.path))
    upload(aws(), directory, TO)
    up(wanted_of(PLAIN))
    planned = check_data(spec, aws(), look(aws(), NAME))
    assert planned is not None
    assert planned.missing == ()
    (directory / "config.json").write_text("[]")
    with pytest.raises(Refused, match=r"1 file new or changed, such as config\.json") as raised:
        check_data(spec, aws(), look(aws(), NAME))
    assert "model.upload" in raised.value.advice
    elsewhere = spec.model_copy(update={"model": spec.model.model_copy(update={"upload": ELSEWHERE})})
    assert check_data(elsewhere, aws(), look(aws(), NAME)) is not None


def test_files_may_change_while_nothing_serves_them(cloud: Cloud, bucket: Any, spec: Spec) -> None:
    directory = Path(str(spec.model.path))
    upload(aws(), directory, TO)
    (directory / "config.json").write_text("[]")
    planned = check_data(spec, aws(), look(aws(), NAME))
    assert planned is not None
    assert planned.changed == ("config.json",)
    assert "replacing 1 object with different content, such as config.json" in str(planned)
    up(wanted_of(PLAIN))
    cloud.sagemaker.things["endpoint", NAME].status = "Failed"
    assert check_data(spec, aws(), look(aws(), NAME)) is not None


@pytest.mark.parametrize("where", [TO, "s3://models/", f"{TO}lora/"])
def test_data_that_another_model_loads_is_not_deleted(cloud: Cloud, bucket: Any, where: str) -> None:
    another_model(cloud, where)
    with pytest.raises(Refused, match="model other also loads from"):
        check_users(aws(), TO, deleted_models=["llama-0000aaaa"])
    check_users(aws(), TO, deleted_models=["other"])
    check_users(aws(), "s3://models/llama-2/" if where != "s3://models/" else "s3://models-2/", deleted_models=[])


def test_a_killed_run_s_parts_go_with_the_data(cloud: Cloud, bucket: Any) -> None:
    bucket.put_object(Bucket="models", Key="llama/config.json", Body=b"{}", Metadata={METADATA: "0"})
    bucket.create_multipart_upload(Bucket="models", Key="llama/model.safetensors")
    bucket.create_multipart_upload(Bucket="models", Key="other/model.safetensors")
    assert delete_data(aws(), TO) == (1, 0)
    left = bucket.list_multipart_uploads(Bucket="models")["Uploads"]
    assert [one["Key"] for one in left] == ["other/model.safetensors"]


def test_data_that_s3_keeps_is_not_said_to_be_gone(cloud: Cloud, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put_object(Bucket="models", Key="llama/config.json", Body=b"{}", Metadata={METADATA: "0"})
    denied = {"Errors": [{"Key": "llama/config.json", "Code": "AccessDenied", "Message": "locked"}]}
    monkeypatch.setattr(aws().client("s3"), "delete_objects", lambda **request: denied)
    with pytest.raises(Failed, match=r"s3://models/llama/config\.json .* not deleted: locked"):
        delete_data(aws(), TO)


@pytest.mark.parametrize("part_size", [16 * 2**20, 5 * 2**20])
def test_a_file_that_changes_while_it_is_sent_is_found_out(
    cloud: Cloud, bucket: Any, spec: Spec, monkeypatch: pytest.MonkeyPatch, part_size: int
) -> None:
    """Of the same size: whole in one part, or the last of three parts of another version."""
    monkeypatch.setattr("deploy.s3.upload.PART_SIZE", part_size)
    directory = Path(str(spec.model.path))
    weights = directory / "model.safetensors"
    weights.write_bytes(b"a" * (11 * 2**20))

    def change(call: Call) -> None:
        if call.operation.startswith(("PUT", "POST")):
            cloud.before = None
            weights.write_bytes(b"b" * (11 * 2**20))

    cloud.before = change
    if part_size > 11 * 2**20:
        monkeypatch.setattr("deploy.s3.upload.WORKERS", 1)
    with pytest.raises(Failed, match=r"model\.safetensors"):
        upload(aws(), directory, TO)
    upload(aws(), directory, TO)
    assert plan_upload(aws(), directory, TO).missing == ()
    assert bucket.get_object(Bucket="models", Key="llama/model.safetensors")["Body"].read() == weights.read_bytes()


def another_model(cloud: Cloud, where: str) -> None:
    source = {"S3DataSource": {"S3Uri": where, "S3DataType": "S3Prefix", "CompressionType": "None"}}
    cloud.client("sagemaker").create_model(
        ModelName="other", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "x", "ModelDataSource": source}
    )


def test_nothing_is_sent_where_another_deployment_s_model_loads_from(cloud: Cloud, bucket: Any, spec: Spec) -> None:
    directory = Path(str(spec.model.path))
    upload(aws(), directory, TO, deployment="other")
    another_model(cloud, TO)
    planned = check_data(spec, aws(), look(aws(), NAME))  # the same files: two deployments of one model
    assert planned is not None
    (directory / "config.json").write_text("[]")
    with pytest.raises(Refused, match=r"the deployment other uploaded files there, and 1 more; 1 file") as raised:
        check_data(spec, aws(), look(aws(), NAME))
    assert "model.upload to another prefix" in raised.value.advice
    (directory / "config.json").write_text("{}")
    (directory / "generation_config.json").write_text("{}")
    with pytest.raises(Refused, match=rf"the model other loads from {TO}; 1 file"):
        check_data(spec, aws(), look(aws(), NAME))


def test_what_another_deployment_has_sent_but_not_made_yet_stays(cloud: Cloud, bucket: Any, spec: Spec) -> None:
    directory = Path(str(spec.model.path))
    upload(aws(), directory, TO, deployment="other")
    (directory / "config.json").write_text('{"a": 1}')
    with pytest.raises(Refused, match="the deployment other uploaded files there"):
        check_data(spec, aws(), look(aws(), NAME))
    upload(aws(), directory, TO, deployment=NAME)
    (directory / "config.json").write_text('{"a": 2}')
    assert check_data(spec, aws(), look(aws(), NAME)) is not None
