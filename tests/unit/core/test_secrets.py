"""Forms of tokens: what hides secrets knows all of them, wherever they stand."""

from __future__ import annotations

import pytest

from deploy.redaction import redact
from handler.config.options.option import shown
from handler.core.errors import log_words

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
