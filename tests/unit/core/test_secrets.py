"""Forms of tokens: what hides secrets knows all of them, wherever they stand."""

from __future__ import annotations

import logging

import pytest

from deploy.redaction import redact
from handler.config.options.option import shown
from handler.core.errors import log_words
from handler.engines.huggingface.files import _without_secrets

TOKENS = {
    "Hugging Face": "hf_" + "a1B2" * 8,
    "AWS": "AKIA" + "ABCD1234" * 2,
    "OpenAI": "sk-" + "a1B2" * 8,
    "GitHub": "ghp_" + "a1B2" * 9,
    "GitHub, fine-grained": "github_pat_" + "a1B2" * 9,
    "Slack": "xoxb-" + "1234" * 6,
    "NVIDIA": "nvapi-" + "a1B2" * 8,
    "SageMaker": "sagemaker-api-key-" + "a1B2" * 8,
    "GitLab": "glpat-" + "a1B2" * 5,
    "Google": "AIza" + "a1B2c" * 7,
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln",
}


@pytest.mark.parametrize("name", TOKENS)
def test_every_form_of_token_is_hidden_in_options_in_foreign_words_and_in_deployments(name: str) -> None:
    token = TOKENS[name]
    assert token not in shown(f"option.model_id=see {token} there")
    assert token not in log_words(f"refused: {token} is not known")
    assert token not in redact(f"refused: {token} is not known")


@pytest.mark.parametrize("name", ["Hugging Face", "GitHub", "Slack", "OpenAI"])
def test_nothing_of_a_longer_word_is_left(name: str) -> None:
    text = f"refused: {TOKENS[name]}-tail_secret is not known"
    assert "tail" not in log_words(text)
    if name == "Hugging Face":
        record = logging.LogRecord("a", logging.INFO, "", 1, text.replace("-tail", "_tail"), (), None)
        assert _without_secrets(record)
        assert "tail" not in record.getMessage()
