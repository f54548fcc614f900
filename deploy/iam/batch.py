"""What batch transform needs of the role and of the deployer. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.iam.arns import Arns
from deploy.iam.statements import allow, key_via, listing
from deploy.spec import Spec


def role(spec: Spec, arns: Arns) -> Iterator[dict[str, Any]]:
    """Reading the input, writing the answers and the log. The key of the answers is that of `async`'s."""
    if (batch := spec.batch) is None:
        return
    yield allow("BatchInput", ["s3:GetObject"], [arns.objects(batch.input)])
    yield from listing(arns, "BatchInputListed", [batch.input])
    yield allow("BatchAnswers", ["s3:PutObject"], [arns.objects(batch.output)])
    yield from key_via(arns, "s3", "BatchInputKey", spec.encryption.input_key, ["kms:Decrypt"])
    actions = ["CreateLogGroup", "CreateLogStream", "DescribeLogStreams", "PutLogEvents"]
    yield allow("BatchLogs", [f"logs:{action}" for action in actions], arns.batch_logs())


def deployer(spec: Spec, arns: Arns) -> Iterator[dict[str, Any]]:
    """Creating, watching and stopping jobs, and their model; looking at input and answers."""
    if (batch := spec.batch) is None:
        return
    jobs = ["AddTags", "CreateTransformJob", "DescribeTransformJob", "ListTags", "StopTransformJob"]
    yield allow("BatchJobs", [f"sagemaker:{action}" for action in jobs], arns.transform_jobs())
    yield allow("BatchJobsListed", ["sagemaker:ListTransformJobs"], ["*"])
    models = ["AddTags", "CreateModel", "DeleteModel", "DescribeModel", "ListTags"]
    yield allow("BatchModels", [f"sagemaker:{action}" for action in models], arns.batch_models())
    yield allow("BatchInput", ["s3:GetObject"], [arns.objects(batch.input)])
    yield from listing(arns, "BatchFilesListed", [batch.input, batch.output])
    yield from key_via(arns, "s3", "BatchInputKey", spec.encryption.input_key, ["kms:Decrypt"])
    yield allow("BatchLogs", ["logs:DescribeLogStreams", "logs:GetLogEvents"], arns.batch_logs())
