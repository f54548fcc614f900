from __future__ import annotations

import time

import pytest

from deploy.redaction import is_secret, redact
from tests.one_test import in_one_test


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
def test_the_work_is_linear(text: str) -> None:
    began = time.process_time()
    is_secret("ANYTHING", text)
    assert time.process_time() - began < 2, f"{text[:20]!r}: 90 kB"


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
