from __future__ import annotations

import pytest

from deploy.secrecy import is_secret, redact


@pytest.mark.parametrize("name", [
    "HF_TOKEN", "HUGGINGFACEHUB_API_TOKEN", "hfToken", "token", "DB_PASSWORD", "API_KEY", "apiKey", "MY_API_KEYS",
    "AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET", "SECRET_VALUE", "SSH_PRIVATE_KEY", "option.hf_token",
])  # fmt: skip
def test_names_that_hide_something(name: str) -> None:
    assert is_secret(name, "abcdef")


@pytest.mark.parametrize("name", [
    "MAX_TOKENS", "max_num_batched_tokens", "tokens_per_block", "tokenizer_mode", "sink_token_length", "Key",
    "KmsKeyId", "HF_TOKEN_SECRET_ARN", "SECRET_ARN", "SECRET_NAME", "S3Uri", "monkey",
])  # fmt: skip
def test_names_that_do_not(name: str) -> None:
    assert not is_secret(name, "abcdef")


@pytest.mark.parametrize("value", ["512", "0.9", "true", ""])
def test_numbers_hide_nothing(value: str) -> None:
    assert not is_secret("MAX_TOKEN", value)


@pytest.mark.parametrize("value", [
    "hf_" + "a1B2" * 8, "AKIA" + "ABCD1234" * 2, "Bearer sk-" + "x" * 24, "ghp_" + "a" * 36,
    "sagemaker-api-key-" + "aGVsbG8" * 4,
])  # fmt: skip
def test_known_keys_are_known_by_any_name(value: str) -> None:
    assert is_secret("ANYTHING", value)
    assert redact(f"curl -H '{value}'").count("***") == 1


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
