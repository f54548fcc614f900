"""Failures that users report in public issue trackers: each gives its own advice, and only that."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from deploy.aws import as_deploy_error
from deploy.diagnostics import advice, causes, known_causes
from deploy.spec.reading import schema
from tests.joints.test_log_lines import MESSAGES
from tests.one_test import in_one_test

PING = (
    "The primary container for production variant main did not pass the ping health check. "
    "Please check CloudWatch logs for this endpoint."
)

# row of the table, FailureReason, log, cause, names of the specification that the advice must hold
TABLE = [
    ("Your invocation timed out while waiting for a response from container primary", [], "answer too slow",
     ["async.output", "instance.count"]),
    (PING, ["INFO loading", "TimeoutError: health-check timeout after 240 s"], "health-check timeout",
     ["timeouts.startup"]),
    (PING, ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"], "out of GPU memory",
     ["instance.type", "model.context", "options.tensor_parallel_degree"]),
    (PING, ["worker exited with status 137"], "out of host memory", ["instance.type"]),
    (PING, ["OSError: [Errno 28] No space left on device"], "disk full", ["instance.volume_gb"]),
    ("ContainerStartupHealthCheckTimeoutInSeconds found in env", [], "timeout in the environment",
     ["timeouts.startup", "environment"]),
    (PING, [], "ping", ["timeouts.startup", "instance.ami"]),
    (PING, ["vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue"],
     "health check fails later", ["model.context"]),
    ("CannotStartContainerError. Please ensure the model container for variant main starts correctly when invoked "
        "with 'docker run <image> serve'.", [], "serve not found", ["image.uri"]),
    (PING, ['exec: "serve": executable file not found in $PATH'], "serve not found", ["image.uri"]),
    (PING, ["exec /usr/local/bin/entrypoint: exec format error"], "image of another processor", ["image.uri"]),
    (PING, ["RuntimeError: CUDA driver version is insufficient for CUDA runtime version"], "driver",
     ["instance.ami", "image.cuda"]),
    (PING, ["nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.0"], "driver",
     ["instance.ami"]),
    ("no log stream after 10 min", [], "stuck without logs", ["instance.ami", "image.cuda", "image.uri"]),
    ("Requested image 123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi:1 not found.", [], "image not found",
     ["image.uri"]),
    ("The role 'arn:aws:iam::123456789012:role/r' does not have BatchGetImage permission for the image: 'x'.", [],
     "image not found", ["image.uri"]),
    ("Using an image from a different region is not supported: the image must come from the same region", [],
     "image not found", ["image.uri"]),
    ("Unsupported manifest media type application/vnd.oci.image.index.v1+json for resource", [], "image index",
     ["image.uri", "--provenance=false"]),
    (PING, ["cannot start: driver 535.1 with CUDA 12.2; CUDA 13.0 in the image: the driver is too old for it."],
     "driver", ["instance.ami"]),
    (PING, ["CUDA 13.0 in the image, but no NVIDIA driver is visible: the GPU engines will not start"], "no GPU",
     ["instance.type"]),
    (PING, ["cannot start: the secret arn:aws:secretsmanager:us-east-1:1:secret:hf cannot be read: AccessDenied"],
     "secret", ["model.token_secret"]),
    (PING, ["cannot start: /opt/ml/model holds no model: no config.json, openvino_model.xml, but model.tar"],
     "tokenizer missing", ["model.path"]),
    (PING, ["ModuleNotFoundError: No module named 'sagemaker.model'"], "sagemaker's SDK", []),
    (PING, ["huggingface_hub.errors.GatedRepoError: 401 Client Error."], "gated model", ["model.token_secret"]),
    (PING, ["403 Client Error: Forbidden for url: https://huggingface.co/x"], "gated model",
     ["model.token_secret"]),
    (PING, ["config error: unknown option 'option.max_rolling_batch'; did you mean 'max_rolling_batch_size'?"],
     "unknown option", ["options"]),
    (PING, ["failed to extract model.tar.gz: contains a symbolic link"], "archive", ["model.path", "model.s3"]),
    ("Failed to lay out model data: 0-byte object models/llama/", [], "prefix", ["model.s3"]),
    ('Failed to download model data for container "container_1" from URL: "s3://b/p/". Please ensure that there is '
         "an object located at the URL and that the role passed to CreateModel has permissions to download it.", [],
     "model data not readable", ["model.s3", "model.upload"]),
    (PING, ["OSError: We couldn't connect to 'https://huggingface.co' to load the files"], "no internet",
     ["network.isolated", "network.subnets", "model.path"]),
    (PING, ["ValueError: The repository contains custom code which must be executed"],
     "code of the model is missing", ["options.trust_remote_code"]),
    (PING, ["OSError: Can't load tokenizer for '/opt/ml/model'."], "tokenizer missing", ["model.path"]),
    ("ResourceLimitExceeded: The account-level service limit 'ml.g5.12xlarge for endpoint usage' is 0 Instances, "
         "with current utilization of 0 Instances and a request delta of 1 Instances.", [], "quota",
     ["instance.type", "instance.count", "ml.g5.12xlarge for endpoint usage"]),
    ("Unable to provision requested ML compute capacity due to InsufficientInstanceCapacity error. Please retry "
         "using a different ML instance type or after some time.", [], "no capacity at AWS",
     ["instance.type", "timeouts.provision"]),
    ("Inference Component has no capacity to process this request.", [], "no copy is up", ["scaling.min"]),
    ("Inference Component Name header is required for endpoints to which you plan to deploy inference components",
     [], "component not named", ["components.name"]),
]  # fmt: skip


@in_one_test(("reason", "log", "name", "fields"), TABLE, ids=[name for _, _, name, _ in TABLE])
def test_each_failure_gives_its_advice(reason: str, log: list[str], name: str, fields: list[str]) -> None:
    found = causes(reason, log)
    assert [cause.name for cause in found] == [name]
    said = advice(reason, log)
    assert said
    assert not [field for field in fields if field not in said]


def test_every_cause_is_in_a_table() -> None:
    assert {cause.name for cause in known_causes()} == {name for _, _, name, _ in TABLE} | {
        one.cause for one in MESSAGES
    }


def test_the_advice_names_what_the_specification_has() -> None:
    document = schema()

    def names(node: dict[str, Any]) -> set[str]:
        return set(node.get("properties", {}))

    sections = {"model": "Model", "image": "Image", "instance": "Instance", "timeouts": "Timeouts"}
    sections |= {"network": "Network", "scaling": "Scaling", "update": "Update", "components": "Component"}
    sections |= {"async": "Async"}
    for cause in known_causes():
        for word in cause.says.replace("`", " ").replace(",", " ").replace(":", " ").replace("(", " ").split():
            section, _, field = word.rstrip(".;)").partition(".")
            if field and section in sections and not field.startswith("py"):
                assert field.split(".")[0] in names(document["$defs"][sections[section]]), word


@pytest.mark.parametrize("text", ["", "Something else went wrong.", "InService", "loaded in 12 s, serving"])
def test_unknown_texts_give_none(text: str) -> None:
    assert advice(text, [text]) == ""


def test_a_cause_in_the_log_outweighs_the_symptom() -> None:
    assert "ping" in [cause.name for cause in causes(PING)]
    assert "ping" not in [cause.name for cause in causes(PING, ["CUDA out of memory"])]


def test_two_lines_at_most() -> None:
    log = ["CUDA out of memory", "No space left on device", "GatedRepoError", "exec format error"]
    assert len(advice(PING, log).splitlines()) == 2


def test_a_call_that_aws_refuses_gives_its_advice() -> None:
    message = "The account-level service limit 'ml.g5.12xlarge for endpoint usage' is 0 Instances"
    error = ClientError({"Error": {"Code": "ResourceLimitExceeded", "Message": message}}, "CreateEndpoint")
    ours = as_deploy_error(error)
    assert str(ours) == f"CreateEndpoint: ResourceLimitExceeded: {message}"
    assert "`ml.g5.12xlarge for endpoint usage`" in ours.advice


def test_commands_are_said_with_the_name() -> None:
    assert "`lmi deploy logs chat`" in advice(PING, name="chat")
    assert "`lmi deploy logs NAME`" in advice(PING)
