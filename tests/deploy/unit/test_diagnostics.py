"""A user's view of a failure: advice, and no secret."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from deploy.aws import as_deploy_error
from deploy.diagnostics import advice, all_causes, causes
from deploy.redaction import is_secret, redact
from deploy.spec.reading import schema
from tests.joints.test_log_lines import MESSAGES
from tests.one_test import in_one_test

# -- failures that users report in public issue trackers: each gives its own advice, and only that ---------------------


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
    (PING, ["cannot start: /opt/ml/model contains no model: no config.json, openvino_model.xml, but model.tar"],
     "tokenizer missing", ["model.path"]),
    (PING, ["ModuleNotFoundError: No module named 'sagemaker.model'"], "sagemaker's SDK", []),
    (PING, ["huggingface_hub.errors.GatedRepoError: 401 Client Error."], "gated model", ["model.token_secret"]),
    (PING, ["403 Client Error: Forbidden for url: https://huggingface.co/x"], "gated model",
     ["model.token_secret"]),
    (PING, ["config error: unknown option 'option.max_rolling_batch'; did you mean 'max_rolling_batch_size'?"],
     "unknown option", ["options"]),
    (PING, ["failed to extract model.tar.gz: contains a symbolic link"], "archive", ["model.path", "model.s3"]),
    (PING, ['Failed to extract model data archive from URL "s3://a/b.tar.gz".'], "archive", ["model.path", "model.s3"]),
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
    assert {cause.name for cause in all_causes()} == {name for _, _, name, _ in TABLE} | {one.cause for one in MESSAGES}


def test_the_advice_names_what_the_specification_has() -> None:
    document = schema()

    def names(node: dict[str, Any]) -> set[str]:
        return set(node.get("properties", {}))

    sections = {"model": "Model", "image": "Image", "instance": "Instance", "timeouts": "Timeouts"}
    sections |= {"network": "Network", "scaling": "Scaling", "update": "Update", "components": "Component"}
    sections |= {"async": "Async"}
    for cause in all_causes():
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


@in_one_test("name", [
    "HF_TOKEN", "HUGGINGFACEHUB_API_TOKEN", "hfToken", "token", "DB_PASSWORD", "API_KEY", "apiKey", "MY_API_KEYS",
    "AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET", "SECRET_VALUE", "SSH_PRIVATE_KEY", "option.hf_token",
    "DB_PASS", "MY_PWD", "PGPASS",
])  # fmt: skip
def test_names_that_hide_something(name: str) -> None:
    assert is_secret(name, "abcdef")


@in_one_test("name", [
    "MAX_TOKENS", "max_num_batched_tokens", "tokens_per_block", "tokenizer_mode", "sink_token_length", "Key",
    "KmsKeyId", "HF_TOKEN_SECRET_ARN", "SECRET_ARN", "SECRET_NAME", "S3Uri", "monkey",
    "BYPASS", "PWD", "OLDPWD",
])  # fmt: skip
def test_names_that_do_not(name: str) -> None:
    assert not is_secret(name, "abcdef")


def test_a_password_may_be_a_number() -> None:
    assert is_secret("DB_PASSWORD", "12345678")


@pytest.mark.parametrize("value", ["https://proxy:8080/x", "s3://bucket/a@b", "arn:aws:iam::1:role/a"])
def test_addresses_without_a_password_hide_nothing(value: str) -> None:
    assert not is_secret("ANYTHING", value)
    assert redact(value) == value


@pytest.mark.parametrize("value", ["512", "0.9", "true", ""])
def test_numbers_hide_nothing(value: str) -> None:
    assert not is_secret("MAX_TOKEN", value)


@in_one_test("value", [
    "hf_" + "a1B2" * 8, "AKIA" + "ABCD1234" * 2, "Bearer sk-" + "x" * 24, "ghp_" + "a" * 36,
    "sagemaker-api-key-" + "aGVsbG8" * 4, "github_pat_" + "11ABcd_" * 6, "nvapi-" + "aB3-" * 10, "xoxb-" + "123-ab" * 6,
    "postgres://user:hunter2@database/x", "http://:hunter2@proxy:80", "https://b/?X-Amz-Signature=0a1b2c",
    "https://hooks.slack.com/services/T0/B0/XXXX", "glpat-" + "a1B2-" * 4, "AIza" + "aB3-x" * 7,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dBjftJeZ4CVP",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIabc=\n-----END RSA PRIVATE KEY-----",
])  # fmt: skip
def test_known_keys_are_known_by_any_name(value: str) -> None:
    assert is_secret("ANYTHING", value)
    assert redact(f"curl -H '{value}'").count("***") == 1


@in_one_test("value", [
    '{"api_key": "abcdef"}', '{"hub": {"hf_token":"abcdef"}}', '{"token": "abcdef"}', '{"db.password": "a"}',
    "--max-model-len 4096 --api-key abcdef", "--api-key=abcdef", "--token abcdef", "-Dkeystore.password=abcdef -Xmx2g",
    "--hf-token 'abcdef'", "Authorization: Bearer abcdefghij", '{"headers": {"Authorization": "Basic abc"}}',
])  # fmt: skip
def test_a_value_may_have_a_secret_within(value: str) -> None:
    assert is_secret("ANYTHING", value)
    assert redact({"ANYTHING": value}) == {"ANYTHING": "***"}


@in_one_test("value", [
    '{"eos_token": "</s>", "max_tokens": "5"}', '{"token_secret": "arn:aws:secretsmanager:x"}', '{"api_key": ""}',
    "--max-num-batched-tokens 4096 --pad-token x", "{{ bos_token }}You keep a secret: no password.",
    "--token-secret arn:x",
    '{"secret": "arn:aws:secretsmanager:us-east-1:1:secret:x"}', "--enable-token --x", '{"tokenizer_mode": "auto"}',
])  # fmt: skip
def test_words_within_a_value_hide_nothing(value: str) -> None:
    assert not is_secret("ANYTHING", value)


@in_one_test("text", [
    "-D" + "a.-" * 30_000, '"' + "a" * 90_000, '"a' * 45_000, "-a" * 45_000, "bearer " * 13_000, '"token" ' * 12_000,
    "--hf_token" * 9_000, "-Dsecret_access_" * 6_000, " " * 90_000, "eyJ" * 30_000,
])  # fmt: skip
def test_the_work_is_linear_in_diagnostics(text: str) -> None:
    """A pattern that begins again at each character would not end within the test's time limit."""
    is_secret("ANYTHING", text)


def test_redaction_goes_into_every_depth_and_leaves_the_rest() -> None:
    request = {
        "PrimaryContainer": {"Environment": {"HF_TOKEN": "abc", "OPTION_DTYPE": "bf16"}},
        "Tags": [{"Key": "lmi:spec", "Value": "1234"}],
        "list": ("hf_" + "a" * 30, 3, None),
    }
    assert redact(request) == {
        "PrimaryContainer": {"Environment": {"HF_TOKEN": "***", "OPTION_DTYPE": "bf16"}},
        "Tags": [{"Key": "lmi:spec", "Value": "1234"}],
        "list": ["***", 3, None],
    }
