"""A model's directory to S3 and back: only what is missing is sent, a kill loses little, the end is checked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from deploy.aws import Aws
from deploy.errors import Failed, NotThere, Refused
from deploy.s3 import upload as upload_parts
from deploy.s3.prefix import Prefix, delete
from deploy.s3.upload import METADATA, Part, UploadProgress, file_digest, parts_of, plan_upload, upload
from tests.deploy.doubles.aws import Call, Cloud
from tests.deploy.doubles.deployments import PLAIN, permit
from tests.deploy.doubles.endpoints import aws

MIB = 2**20
TO = "s3://models-of-ours/llama/"


@pytest.fixture
def bucket(cloud: Cloud) -> Any:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="models-of-ours")
    cloud.calls.clear()
    return s3


@pytest.fixture(autouse=True)
def _permitted(request: pytest.FixtureRequest) -> None:
    """Whoever uploads has the policy that is printed for a model that is uploaded there."""
    if "cloud" in request.fixturenames:
        uploaded = {**PLAIN["model"], "s3": None, "path": "llama", "upload": TO}
        permit(request.getfixturevalue("cloud"), {**PLAIN, "model": uploaded})


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files, one of them in three parts of 5 MiB (S3's least)."""
    monkeypatch.setattr(upload_parts, "PART_SIZE", 5 * MIB)
    directory = tmp_path / "llama"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"".join(bytes([n]) * (5 * MIB) for n in (1, 2)) + b"end")
    return directory


def keys(s3: Any) -> dict[str, int]:
    return {one["Key"]: one["Size"] for one in s3.list_objects_v2(Bucket="models-of-ours").get("Contents", [])}


def sent_parts(cloud: Cloud) -> int:
    return sum(call.operation.startswith("PUT") for call in cloud.calls)


def test_everything_is_sent_and_bears_its_digest(cloud: Cloud, bucket: Any, model: Path) -> None:
    reports: list[UploadProgress] = []
    done = upload(aws(), model, TO, reports.append)
    assert len(done.missing) == len(done.files) == 3
    assert keys(bucket) == {"llama/config.json": 2, "llama/tokenizer.json": 2, "llama/model.safetensors": 10 * MIB + 3}
    head = bucket.head_object(Bucket="models-of-ours", Key="llama/model.safetensors")
    assert head["Metadata"][METADATA] == file_digest(model / "model.safetensors")
    got = bucket.get_object(Bucket="models-of-ours", Key="llama/model.safetensors")["Body"].read()
    assert got == (model / "model.safetensors").read_bytes()
    assert reports[-1] == UploadProgress(3, 3, 10 * MIB + 3 + 4, 10 * MIB + 3 + 4)
    assert len(reports) == 5  # one file in three parts, two in one


def test_what_is_there_is_not_sent_again(cloud: Cloud, bucket: Any, model: Path) -> None:
    upload(aws(), model, TO)
    cloud.calls.clear()
    assert upload(aws(), model, TO).missing == ()
    assert sent_parts(cloud) == 0
    (model / "config.json").write_text("[]")  # as long as before
    assert plan_upload(aws(), model, TO).missing == ("config.json",)


def test_the_plan_changes_nothing_and_says_the_totals(cloud: Cloud, bucket: Any, model: Path) -> None:
    assert str(plan_upload(aws(), model, TO)) == "3 files, 10.5 MB, 3 to upload (10.5 MB)"
    assert cloud.changes() == []
    upload(aws(), model, TO)
    assert str(plan_upload(aws(), model, TO)) == "3 files, 10.5 MB, all uploaded already"


def test_an_upload_that_was_killed_goes_on_where_it_was(cloud: Cloud, bucket: Any, model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    where = {"Bucket": "models-of-ours", "Key": "llama/model.safetensors"}
    begun = bucket.create_multipart_upload(**where, Metadata={METADATA: file_digest(model / "model.safetensors")})
    bucket.upload_part(**where, UploadId=begun["UploadId"], PartNumber=1, Body=content[: 5 * MIB])
    bucket.upload_part(**where, UploadId=begun["UploadId"], PartNumber=2, Body=b"\0" * (5 * MIB))  # of another file
    cloud.calls.clear()
    reports: list[UploadProgress] = []
    upload(aws(), model, TO, reports.append)
    assert reports[-1].resumed == 5 * MIB
    assert sent_parts(cloud) == 4  # parts 2 and 3, and the two small files
    assert bucket.get_object(**where)["Body"].read() == content


def test_who_may_not_list_unfinished_uploads_begins_anew(
    cloud: Cloud, bucket: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_aws = Aws()
    s3 = own_aws.client("s3")
    own = s3.get_paginator

    def get_paginator(operation: str) -> Any:
        if operation == "list_multipart_uploads":
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "ListMultipartUploads")
        return own(operation)

    monkeypatch.setattr(s3, "get_paginator", get_paginator)
    assert len(upload(own_aws, model, TO).missing) == 3


def test_a_file_that_changed_since_the_kill_is_found_out(cloud: Cloud, bucket: Any, model: Path) -> None:
    where = {"Bucket": "models-of-ours", "Key": "llama/model.safetensors"}
    bucket.create_multipart_upload(**where, Metadata={METADATA: "of the file as it was"})
    with pytest.raises(Failed, match=r"model\.safetensors differs from the uploaded file"):
        upload(aws(), model, TO)
    assert len(upload(aws(), model, TO).missing) == 1
    assert plan_upload(aws(), model, TO).missing == ()


def test_a_failure_sends_no_more_and_leaves_what_was_sent(cloud: Cloud, bucket: Any, model: Path) -> None:
    seen = threading.Event()

    def broken(sent: UploadProgress) -> None:
        seen.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(aws(), model, TO, broken)
    assert seen.is_set()
    assert len(upload(aws(), model, TO).missing) <= 3
    assert plan_upload(aws(), model, TO).missing == ()


def test_what_is_foreign_stays(cloud: Cloud, bucket: Any, model: Path) -> None:
    bucket.put_object(Bucket="models-of-ours", Key="llama/old.safetensors", Body=b"old")
    assert plan_upload(aws(), model, TO).foreign == ("old.safetensors",)
    upload(aws(), model, TO)
    assert "llama/old.safetensors" in keys(bucket)


@pytest.mark.parametrize(("number", "were"), [(1, "was"), (2, "and 1 more were"), (3, "and 2 more were")])
def test_an_object_that_s3_does_not_delete_is_no_success(
    cloud: Cloud, bucket: Any, monkeypatch: pytest.MonkeyPatch, number: int, were: str
) -> None:
    refused = {"Errors": [{"Key": "llama/a", "Code": "AccessDenied", "Message": "Access Denied"}] * number}
    monkeypatch.setattr(aws().client("s3"), "delete_objects", lambda **request: refused)
    with pytest.raises(Failed, match=f"llama/a {were} not deleted: Access Denied"):
        delete(aws(), Prefix.of(TO), ["a"])


def test_a_folder_object_of_the_console_is_refused(cloud: Cloud, bucket: Any, model: Path) -> None:
    bucket.put_object(Bucket="models-of-ours", Key="llama/", Body=b"")
    with pytest.raises(Refused, match="0-byte object"):
        upload(aws(), model, TO)
    assert list(keys(bucket)) == ["llama/"]


def test_a_directory_that_cannot_load_is_not_sent(cloud: Cloud, bucket: Any, model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(Refused, match=r"config\.json: missing"):
        upload(aws(), model, TO)
    assert keys(bucket) == {}


def test_the_bucket_must_be_there_and_in_the_region(cloud: Cloud, model: Path) -> None:
    with pytest.raises(NotThere, match="there is no bucket models-of-ours"):
        plan_upload(aws(), model, TO)
    cloud.client("s3").create_bucket(
        Bucket="models-of-ours", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    with pytest.raises(Refused, match="is in eu-west-1, but SageMaker is in us-east-1"):
        plan_upload(aws(), model, TO)


def test_what_is_changed_behind_the_back_is_found(cloud: Cloud, bucket: Any, model: Path) -> None:
    def meddle(call: Call) -> None:
        if call.operation == "PUT /models-of-ours/llama/config.json":
            cloud.after = None
            bucket.put_object(Bucket="models-of-ours", Key="llama/config.json", Body=b"other")

    cloud.after = meddle
    with pytest.raises(Failed, match=r"config\.json differs from the uploaded file"):
        upload(aws(), model, TO)


def test_parts_cover_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.s3.upload.PART_SIZE", 5)
    assert parts_of("a", 0) == [Part("a", 1, 1, 0, 0)]
    assert parts_of("a", 11) == [Part("a", 1, 3, 0, 5), Part("a", 2, 3, 5, 5), Part("a", 3, 3, 10, 1)]
    huge = parts_of("a", 4 * 10**12)
    assert len(huge) <= 9000
    assert sum(part.size for part in huge) == 4 * 10**12


def test_prefixes() -> None:
    assert Prefix.of("s3://b/a/c") == Prefix("b", "a/c/")
    assert str(Prefix.of("s3://b")) == "s3://b/"
