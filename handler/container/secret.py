"""Fetches the Hugging Face token from Secrets Manager.

DescribeModel shows a model's environment to everybody who may call it, so the environment holds only the secret's ARN.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from handler.core.errors import ConfigError

ARN = "HF_TOKEN_SECRET_ARN"
TOKEN = "HF_TOKEN"
_FORM = re.compile(r"arn:aws[\w-]*:secretsmanager:([a-z0-9-]+):\d{12}:secret:\S+")
_TRUE = ("1", "true", "yes", "on")  # as huggingface_hub reads its own switches
_SECONDS = 5

_ADVICE = {
    "AccessDeniedException": ": the execution role needs secretsmanager:GetSecretValue on it (kms:Decrypt on its key)",
    "ResourceNotFoundException": ": no secret has this name in that account and region",
    "DecryptionFailure": ": the execution role needs kms:Decrypt on its key",
}


def with_token(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Add the token to an environment that names a secret.

    Raises:
        ConfigError: the secret cannot be fetched, or the token is also set; the message says why.
    """
    arn = environ.get(ARN)
    if not arn:
        return environ
    if environ.get(TOKEN):
        raise ConfigError(f"{TOKEN} and {ARN} are both set: leave {TOKEN} out, which everybody can read")
    region = _FORM.fullmatch(arn)
    if region is None:
        raise ConfigError(f"{ARN}={arn}: is not a secret's ARN (arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME)")
    if environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        raise ConfigError(
            f"{ARN} is set, but this container is offline (HF_HUB_OFFLINE): under network isolation there is neither "
            "Secrets Manager nor a hub. Put the model's files into the model data, and leave the secret out"
        )
    return {**environ, TOKEN: _token(arn, _secret_text(arn, region[1]))}


def _secret_text(arn: str, region: str) -> str:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError as error:
        raise ConfigError(f"{ARN} needs {error.name}, which this image lacks") from None
    limits = Config(connect_timeout=_SECONDS, read_timeout=_SECONDS, retries={"total_max_attempts": 3})
    try:
        client = boto3.client("secretsmanager", region_name=region, config=limits)
        answer: dict[str, Any] = client.get_secret_value(SecretId=arn)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "unknown")
        raise ConfigError(f"the secret {arn} cannot be read: {code}{_ADVICE.get(code, '')}") from None
    except BotoCoreError as error:
        raise ConfigError(
            f"the secret {arn} cannot be read: {type(error).__name__}. Secrets Manager in {region} is out of reach, or "
            "the container has no role: under network isolation leave the secret out; a VPC without NAT needs an "
            "interface endpoint for secretsmanager"
        ) from None
    if not isinstance(answer.get("SecretString"), str):
        raise ConfigError(f"the secret {arn} is binary; a token is text")
    return str(answer["SecretString"])


def _token(arn: str, text: str) -> str:
    """Take the text, or of a JSON object its member HF_TOKEN, or its only one. No message shows any of it."""
    text = text.strip("\ufeff \t\r\n")  # of a file, with its byte order mark
    if text.startswith("{"):
        try:
            members = json.loads(text)
        except ValueError:
            raise ConfigError(f"the secret {arn} looks like JSON, but is not valid JSON") from None
        text = members.get(TOKEN, next(iter(members.values()), "") if len(members) == 1 else "")
        if not isinstance(text, str) or not text:
            raise ConfigError(f"the secret {arn} is a JSON object without a text {TOKEN}")
    if not re.fullmatch(r"[!-~]+", text):
        raise ConfigError(f"the secret {arn} holds no token: one word of printable characters")
    return text
