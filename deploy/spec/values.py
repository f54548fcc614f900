"""Types of the specification's values, with patterns for AWS's names, and the base class of all sections.

Limits and patterns are from botocore 1.44's service model, and tests/deploy/unit/test_spec.py checks that they match.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints


class Section(BaseModel):
    """Base class for sections of the specification. They are immutable and reject unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


EXAMPLES: dict[str, str] = {}
"""Descriptions of valid values by pattern, for error messages."""


def text(pattern: str, example: str, longest: int = 2048) -> StringConstraints:
    """Return a constraint for strings.

    Args:
        example: description of a valid value, for error messages.
        longest: maximum length.
    """
    EXAMPLES[pattern] = example
    return StringConstraints(pattern=pattern, max_length=longest)


Architecture = Literal["amd64", "arm64"]
"""Processor architecture of an image or a host, by Docker's names."""

Precision = Literal["fp32", "bf16", "fp16", "fp8", "int8", "mxfp4", "fp4", "int4"]

Name = Annotated[
    str, text(r"^[a-zA-Z0-9](-*[a-zA-Z0-9])*$", "letters, digits and inner hyphens, such as llama-3-8b", 63)
]
"""Name of an endpoint, a component or a variant (botocore's EndpointName)."""

Region = Annotated[str, text(r"^[a-z]{2,4}(-[a-z]+)+-[0-9]$", "an AWS region, such as us-east-1", 32)]
RoleArn = Annotated[
    str, text(r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/[a-zA-Z_0-9+=,.@/-]+$", "as arn:aws:iam::111122223333:role/Name")
]
KeyId = Annotated[
    str,
    text(
        r"^(arn:aws[a-z-]*:kms:[a-zA-Z0-9:/_-]+|(mrk-)?[0-9a-f-]{32,36}|alias/[a-zA-Z0-9/_-]+)$",
        "the ID, ARN or alias/NAME of a KMS key",
    ),
]
SecretArn = Annotated[
    str,
    text(
        r"^arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[a-zA-Z0-9/_+=.@-]+$",
        "as arn:aws:secretsmanager:us-east-1:111122223333:secret:hf-token-AbCdEf",
    ),
]
TopicArn = Annotated[
    str,
    text(r"^arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[a-zA-Z0-9_.-]+$", "as arn:aws:sns:us-east-1:111122223333:alarms"),
]
ArtifactUri = Annotated[
    str,
    text(
        r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/.+\.tar\.gz$", "an archive, such as s3://bucket/adapter.tar.gz", 1024
    ),
]
OutputUri = Annotated[str, text(r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?$", "as s3://bucket/answers/", 512)]
S3Prefix = Annotated[
    str,
    text(
        r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/(.+/)?$",
        "a prefix that ends in a slash, such as s3://bucket/llama-3-8b/",
        1024,
    ),
]
"""S3 prefix that ends in a slash, which SageMaker requires for model data."""
ModelUri = Annotated[
    str,
    text(
        r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/(.+/|.+\.tar\.gz)?$",
        "a prefix that ends in a slash, such as s3://bucket/llama-3-8b/, or an archive, such as s3://bucket/model.tar.gz",
        1024,
    ),
]

_TYPE = r"ml\.[a-z0-9-]+\.[a-z0-9]+"
InstanceType = Annotated[str, text(rf"^(auto|{_TYPE})$", "auto, or a SageMaker type, such as ml.g6e.xlarge", 64)]
PoolType = Annotated[str, text(rf"^{_TYPE}$", "a SageMaker type, such as ml.g6e.xlarge", 64)]
ImageUri = Annotated[
    str,
    text(
        r"^[0-9]{12}\.dkr\.ecr\.[a-z0-9-]+\.[a-z0-9.-]+/[a-z0-9/._-]+(:[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})$",
        "an image in ECR, such as 111122223333.dkr.ecr.us-east-1.amazonaws.com/name:tag or ...@sha256:... (SageMaker "
        "pulls images only from ECR)",
        255,
    ),
]
Repository = Annotated[
    str, text(r"^[a-z0-9]+([/._-]+[a-z0-9]+)*$", "an ECR repository's name, such as lmi-handler", 200)
]
ImageTag = Annotated[str, text(r"^[a-zA-Z0-9_][a-zA-Z0-9_.-]*$", "an image's tag, such as 1.0-cu130", 128)]
ReservationArn = Annotated[
    str,
    text(
        r"^arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:[0-9]{12}:training-plan/[a-z0-9-]+$",
        "as arn:aws:sagemaker:us-east-1:111122223333:training-plan/name",
        258,
    ),
]
VpcId = Annotated[str, text(r"^[-0-9a-zA-Z]+$", "an ID, such as subnet-0123456789abcdef0", 32)]
TagKey = Annotated[str, text(r"^[\p{L}\p{Z}\p{N}_.:/=+\-@]+$", "letters, digits, spaces and _.:/=+-@", 128)]
TagValue = Annotated[str, text(r"^[\p{L}\p{Z}\p{N}_.:/=+\-@]*$", "letters, digits, spaces and _.:/=+-@", 256)]


def _scalar(value: Any) -> Any:
    """Check that a value is a string, number or boolean. Pydantic would report a separate error for each type."""
    if not isinstance(value, str | int | float):
        raise ValueError("must be a string, a number, true or false (put JSON in quotes)")
    return value


def _variable(value: Any) -> Any:
    """Check that a variable's value is a string: YAML changes `0777` and `12:30:45` to numbers, and `on` to true."""
    if not isinstance(value, str):
        raise ValueError("must be a string (put it in quotes)")
    if any(unicodedata.category(character) == "Cc" for character in value):
        raise ValueError("must not contain control characters or line breaks")
    return value


Variable = Annotated[str, BeforeValidator(_variable)]
Option = Annotated[str | int | float | bool, BeforeValidator(_scalar)]
Seconds = Annotated[int, Field(ge=60, le=3600)]
Count = Annotated[int, Field(ge=0, le=1000)]
