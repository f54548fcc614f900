"""Random fields of `sagemaker:`, right and wrong, out of botocore's own shapes; the same for the same seed."""

from __future__ import annotations

import copy
import random
from typing import Any

from deploy.spec.passthrough import OWNED, shape_of

PARTS = tuple(OWNED)

_TEXTS = {
    "DestinationS3Uri": "s3://written/llama/",
    "S3ModelUri": "s3://models/draft/",
    "Url": "s3://models/baseline.csv",
    "KmsKeyId": "alias/llama",
    "VariantName": "Shadow-1",
    "ModelName": "llama-next",
    "MlReservationArn": "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/llama-plan",
    "AcceleratorPartitionType": "mig-3g.40gb",
    "CsvContentType": "text/csv",
    "JsonContentType": "application/json",
    "ClarifyMimeType": "text/csv",
    "MetricsEndpointPath": "/metrics",
    "AdditionalModelChannelName": "draft",
    "RepositoryCredentialsProviderArn": "arn:aws:lambda:eu-west-1:123456789012:function:login",
    "ContainerHostname": "one",
    "AlarmName": "alarm",
}
"""A right text for each shape with a pattern of its own."""

_FEW = {"MetricPublishFrequencyInSeconds": (10, 30, 60, 120, 180, 240, 300)}


def fields(draw: random.Random, part: str, share: float = 0.3) -> dict[str, Any]:
    """Right fields of a part, without those of other settings."""
    return _structure(draw, part, shape_of(part), "", share)


def _structure(draw: random.Random, part: str, shape: Any, path: str, share: float) -> dict[str, Any]:
    found = {}
    for name, member in shape.members.items():
        place = f"{path}.{name}".removeprefix(".")
        if place in OWNED[part]:
            continue
        if name in shape.required_members or draw.random() < share:
            found[name] = _value(draw, part, name, member, place, share)
    return found


def _value(draw: random.Random, part: str, name: str, shape: Any, path: str, share: float) -> Any:
    told = shape.metadata
    match shape.type_name:
        case "structure":
            return _structure(draw, part, shape, path, share)
        case "list":
            least = max(told.get("min", 0), 1)
            count = draw.randint(least, min(told.get("max", least + 2), least + 1))
            return [_value(draw, part, name, shape.member, path, share) for _ in range(count)]
        case "map":
            return {}
        case "boolean":
            return draw.random() < 0.5
        case "integer" | "long":
            if name in _FEW:
                return draw.choice(_FEW[name])
            least = told.get("min", 0)
            return draw.choice([least, told.get("max", least + 9), draw.randint(least, told.get("max", least + 9))])
        case "float" | "double":
            return told.get("min", 0) + round(draw.random() * 9, 2)
    if shape.enum:
        return draw.choice(shape.enum)
    return _TEXTS.get(shape.name, "x" * max(told.get("min", 1), 1))


def spoilt(draw: random.Random, content: dict[str, Any]) -> dict[str, Any]:
    """A copy of right fields with one thing changed, usually so that it is wrong."""
    content = copy.deepcopy(content)
    holders = [*_holders(content)]
    holder = draw.choice(holders)
    keys: list[Any] = [*holder] if isinstance(holder, dict) else [*range(len(holder))]
    key = draw.choice(keys) if keys else None
    match draw.randrange(6):
        case 0 if isinstance(holder, dict):
            holder["NoSuchField"] = 1
        case 1 if isinstance(holder, dict) and keys:
            del holder[key]
        case 2 if keys:
            holder[key] = draw.choice(
                [None, "wrong words", -1, 10**9, 1.5, [], {}]
            )  # to botocore a boolean is a number
        case 3 if keys and isinstance(holder[key], str):
            holder[key] = draw.choice([holder[key] * 300, holder[key].swapcase(), "", "https://b/x", "é"])
        case 4 if isinstance(holder, list):
            holder += holder * 40
        case _ if isinstance(holder, dict) and keys:
            holder[str(key) + "s"] = holder.pop(key)
    return content


def _holders(value: Any) -> Any:
    if isinstance(value, dict):
        yield value
        for one in value.values():
            yield from _holders(one)
    elif isinstance(value, list):
        yield value
        for one in value:
            yield from _holders(one)
