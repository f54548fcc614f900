"""What the specification's values are made of: patterns of AWS's names, and the base of all sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints


class Section(BaseModel):
    """A part of the specification: frozen, and an unknown name in it is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def text(pattern: str, longest: int = 2048) -> StringConstraints:
    return StringConstraints(pattern=pattern, max_length=longest)


Name = Annotated[str, text(r"^[a-zA-Z0-9](-*[a-zA-Z0-9])*$", 63)]
"""Of an endpoint, a component, a variant (botocore's EndpointName)."""

Region = Annotated[str, text(r"^[a-z]{2,4}(-[a-z]+)+-\d$", 32)]
RoleArn = Annotated[str, text(r"^arn:aws[a-z-]*:iam::\d{12}:role/.+$")]
KeyId = Annotated[str, text(r"^(arn:aws[a-z-]*:kms:.+|[0-9a-f-]{36}|alias/.+)$")]
SecretArn = Annotated[str, text(r"^arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:.+$")]
TopicArn = Annotated[str, text(r"^arn:aws[a-z-]*:sns:[a-z0-9-]+:\d{12}:.+$")]
S3Uri = Annotated[str, text(r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?$")]
S3Prefix = Annotated[str, text(r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/(.+/)?$")]
"""Ends in a slash: SageMaker takes nothing else as a prefix of model data."""

InstanceType = Annotated[str, text(r"^ml\.[a-z0-9-]+\.[a-z0-9]+$", 64)]
Seconds = Annotated[int, Field(ge=60, le=3600)]
Count = Annotated[int, Field(ge=0, le=1000)]
