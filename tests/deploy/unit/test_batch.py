"""Transform jobs: their parts, and which of those botocore's own validation takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.batch.job import TransformJob, amounts, too_long, transform_job
from deploy.errors import Refused, SpecError
from deploy.iam.policies import policies
from deploy.resources.build import spec_digest
from deploy.resources.resource import batch_name, is_version_of, job_prefix
from deploy.service_model import instance_types
from deploy.spec import Spec
from deploy.spec.components import Batch
from tests.deploy.cases import CASES, KEY, decision, spec
from tests.deploy.strict import input_of, report, wrong_words
from tests.one_test import in_one_test

PLACES = {"input": "s3://data/in/", "output": "s3://answers/out"}
ELSEWHERE = ("isolated", "isolated-components", "cpu", "own-models", "guest")
"""Cases that batch transform refuses, or that have tests of their own."""
OFFERED = "ml.g6e.12xlarge"


def job(case: str = "plain", changes: dict[str, Any] | None = None, **batch: Any) -> TransformJob:
    said = spec(case, batch={**PLACES, **batch}, **(changes or {}))
    return transform_job(said, decision(case))


@in_one_test("case", [case for case in CASES if case not in ELSEWHERE])
def test_botocore_takes_every_request(case: str) -> None:
    made = job(case, {"encryption": {"volume_key": KEY, "output_key": KEY, "input_key": KEY}})
    request = {**made.request, "TransformJobName": f"{made.stem}-1"}
    for operation, asked in (("CreateTransformJob", request), ("CreateModel", made.model.request)):
        shape = input_of("sagemaker", operation)
        assert not report(shape, asked)
        assert not list(wrong_words(shape, asked))
    assert "ModelDataSource" not in json.dumps(made.model.request)
    assert request["TransformOutput"]["KmsKeyId"] == request["TransformResources"]["VolumeKmsKeyId"] == KEY


def test_an_archive_is_unpacked_for_a_job_too() -> None:
    archive = "s3://models/llama.tar.gz"
    made = transform_job(spec("isolated", batch=PLACES), replace(decision("isolated"), model_data=archive))
    container = made.model.request["PrimaryContainer"]
    assert container["ModelDataUrl"] == archive
    assert container["Environment"]["OPTION_MODEL_ID"] == "/opt/ml/model"
    assert "HF_MODEL_ID" not in container["Environment"]


def test_several_models_and_another_endpoint_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"batch: components have their own settings \(embed, old"):
        job("own-models")
    with pytest.raises(ValidationError, match="batch: cannot be combined with endpoint"):
        job("guest")


def test_a_cpu_has_no_gpu_s_host() -> None:
    assert "TransformAmiVersion" not in job("cpu").request["TransformResources"]
    assert not [text for text in job("cpu").warnings if "driver" in text]
    assert job().request["TransformResources"]["TransformAmiVersion"].endswith("-535")


@in_one_test(
    ("batch", "options", "amount"),
    [
        ({}, {"llm_engine": "openvino"}, (32, 3)),
        ({}, {"llm_engine": "vllm"}, (100, 1)),
        ({}, {"max_rolling_batch_size": 8}, (8, 6)),
        ({}, {"max_num_seqs": 20}, (20, 5)),
        ({"concurrency": 10}, {}, (10, 6)),
        ({"payload_mb": 30}, {}, (3, 30)),
        ({"payload_mb": 100}, {}, (1, 100)),
        ({"concurrency": 2, "payload_mb": 50}, {}, (2, 50)),
    ],
)
def test_lines_at_a_time_and_their_size_fit_together(
    batch: dict[str, Any], options: dict[str, Any], amount: tuple[int, int]
) -> None:
    found = amounts(spec("plain", batch={**PLACES, **batch}, options=options))
    assert found == amount
    assert found[0] * found[1] <= 100


@in_one_test("concurrency", [None, *range(1, 101)])
@in_one_test("payload_mb", [None, 1, 2, 6, 33, 50, 100])
def test_no_amounts_are_beyond_what_aws_takes(concurrency: int | None, payload_mb: int | None) -> None:
    if (concurrency or 1) * (payload_mb or 1) > 100:
        with pytest.raises(ValidationError, match="must be at most 100"):
            Batch.model_validate({**PLACES, "concurrency": concurrency, "payload_mb": payload_mb})
        return
    lines, megabytes = amounts(spec("plain", batch={**PLACES, "concurrency": concurrency, "payload_mb": payload_mb}))
    assert 1 <= lines * megabytes <= 100
    assert concurrency in (None, lines)
    assert payload_mb in (None, megabytes)


def test_without_the_section_there_is_no_job() -> None:
    with pytest.raises(SpecError, match="batch: must be given"):
        transform_job(spec("plain"), decision("plain"))


def test_what_a_job_cannot_have_is_refused_or_told() -> None:
    with pytest.raises(Refused, match=r"network\.isolated"):
        job("isolated")
    (told,) = [text for text in job("components").warnings if "adapters" in text]
    assert "gets an error" in told
    assert "OPTION_ENABLE_LORA" not in job("components").model.request["PrimaryContainer"]["Environment"]
    djl = {"environment": {"LMI_FRONT": "djl"}}
    for made in (job("aws-image"), job("plain", djl)):
        assert [text for text in made.warnings if text.startswith("DJL Serving responds to an invalid line")]
    assert not [text for text in job().warnings if "DJL" in text]
    assert OFFERED in instance_types("TransformInstanceType")


def test_pools_have_their_first_type() -> None:
    made = job("pools")
    assert made.request["TransformResources"]["InstanceType"] == "ml.g6e.xlarge"


def test_components_keep_their_network() -> None:
    network = {"subnets": ["subnet-0123456789abcdef0"], "security_groups": ["sg-0123456789abcdef2"]}
    assert "VpcConfig" in job("components", {"network": network}).model.request


@in_one_test("name", ["a", "llama", "a" * 63, "a" * 47 + "-" + "b" * 15, "llama-batch"])
def test_names_are_aws_s_and_not_an_endpoint_s(name: str) -> None:
    made = transform_job(Spec.model_validate({**spec("plain", batch=PLACES).model_dump(by_alias=True), "name": name}),
                     decision("plain"))  # fmt: skip
    assert len(f"{made.stem}-99999") <= 63
    assert made.stem.startswith(job_prefix(name))
    assert is_version_of(batch_name(name), made.model.name)
    assert not is_version_of(name, made.model.name)
    assert len(made.model.name) <= 63


def test_the_section_changes_nothing_of_the_endpoint() -> None:
    assert spec_digest(spec("plain", batch=PLACES)) == spec_digest(spec("plain"))


def test_policies_have_it_only_with_the_section() -> None:
    plain, with_batch = (policies(said, decision("plain")) for said in (spec("plain"), spec("plain", batch=PLACES)))
    assert "Transform" not in json.dumps(plain)
    deployer = {action for one in with_batch["deployer"]["Statement"] for action in one["Action"]}
    assert {"sagemaker:CreateTransformJob", "sagemaker:StopTransformJob", "sagemaker:ListTransformJobs"} <= deployer
    jobs = next(one for one in with_batch["deployer"]["Statement"] if one["Sid"] == "BatchJobs")
    assert jobs["Resource"] == ["arn:aws:sagemaker:eu-west-1:123456789012:transform-job/llama-*"]


@in_one_test(
    ("text", "number"),
    [
        (b"", None),
        (b"12345\n", 1),
        (b"1234\n", None),
        (b"12345", None),
        (b"123456", 1),
        (b"1\n123456", 2),
        (b"1\n\n12345\n1", 3),
        (b"1234\n1234\n1234\n", None),
    ],
)
def test_a_line_that_is_too_long_is_found_wherever_it_is_cut(text: bytes, number: int | None) -> None:
    for size in range(1, 8):
        chunks = [text[first : first + size] for first in range(0, len(text), size)]
        assert too_long(chunks, 5) == number, size
