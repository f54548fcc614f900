"""Random specifications with fields of `sagemaker:`: what we take, AWS takes, and what AWS refuses, we refuse.

4,000 of each, in tests of 500.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.cli.views import plan_as_json
from deploy.deployer.live import Live
from deploy.deployer.plan import plan
from deploy.errors import Refused
from deploy.export.cloudformation import cloudformation_template
from deploy.iam.policies import policies
from deploy.resources.build import resources
from deploy.spec import Spec
from deploy.spec.passthrough import OWNED, problems, shape_of
from tests.deploy.cases import CASES, decision, spec
from tests.deploy.strict import report, wrong_in, wrong_words

# -- random fields of `sagemaker:`, right and wrong, out of botocore's own shapes; the same for the same seed ----------


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


COUNT = 500
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 8))]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_specification_takes_aws_takes(seed: int) -> None:
    draw = random.Random(f"right {seed}")
    taken = 0
    for _ in range(COUNT):
        case = draw.choice(CASES)
        said = taken_by_the_specification(draw, case)
        if said is None:
            continue
        taken += 1
        decided = decision(case, shadow=None if said.shadow is None else decision(case, pools=()))
        made = resources(said, decided)
        assert [line for item in made for line in wrong_in(item)] == [], said.sagemaker
        json.dumps(plan_as_json(plan(made, Live(said.name, online=False))))
        policies(said, decided)
        try:
            cloudformation_template(made)
        except Refused as refusal:
            assert "CloudFormation does not support" in str(refusal)  # noqa: PT017  # it may be taken too
    assert taken > COUNT / 2


BESIDE: dict[str, Callable[[random.Random], Any]] = {
    "capture": lambda draw: {
        "output": "s3://captured/llama/",
        "percent": draw.randint(1, 100),
        "content": draw.choice(["both", "input", "output"]),
    },
    "shadow": lambda draw: {
        "percent": draw.randint(1, 100),
        "count": draw.randint(1, 9),
        "type": draw.choice(["ml.g6e.xlarge", "ml.g5.12xlarge"]),
        "environment": {"MODE": "next"},
    },
    "reservation": lambda draw: "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/llama",
}


def taken_by_the_specification(draw: random.Random, case: str) -> Spec | None:
    """A specification with random fields; None: these contradict the rest of it."""
    share = draw.choice([0.05, 0.1, 0.3])
    content: dict[str, Any] = {part: fields(draw, part, share) for part in PARTS if draw.random() < 0.5}
    if not spec(case).components:
        content.pop("component", None)
    if (component := content.get("component")) is not None:
        component.pop("Specifications", None)  # of pools, which have their own tests
    beside: dict[str, Any] = {name: value(draw) for name, value in BESIDE.items() if draw.random() < 0.2}
    try:
        return spec(case, sagemaker=content, **beside)
    except ValidationError as error:
        # Fields that are right by themselves: only what does not go together is refused.
        assert all(not item["loc"] for item in error.errors()), error  # noqa: PT017  # it may be taken too
        return None


@pytest.mark.parametrize("seed", SEEDS)
def test_what_aws_refuses_the_specification_refuses(seed: int) -> None:
    """Each verdict is held against that of botocore's validation and model."""
    draw = random.Random(f"spoilt {seed}")
    verdicts = {True: 0, False: 0}
    for _ in range(COUNT):
        part = draw.choice(PARTS)
        content = fields(draw, part)
        assert [*problems(part, content)] == []
        content = spoilt(draw, content)
        ours = [line for line in problems(part, content) if not stricter(line)]
        theirs = refusals(part, content)
        assert bool(ours) == bool(theirs), (part, content, ours, theirs)
        verdicts[bool(ours)] += 1
    assert min(verdicts.values()) > COUNT / 20


def stricter(line: str) -> bool:
    """Where we know more than botocore, to which a boolean is a number."""
    return any(
        words in line for words in (" is set by ", "must start with s3://", "10, 30, 60", "number (given: true)")
    )


def refusals(part: str, content: dict[str, Any]) -> list[str]:
    """What botocore says of the fields, without what the specification's own settings give."""
    shape = shape_of(part)
    lines = [line for line in report(shape, content).splitlines() if not _of_ours(part, line)]
    return lines or [*wrong_words(shape, content)]


def _of_ours(part: str, line: str) -> bool:
    """A missing field that another setting gives."""
    if not line.startswith("Missing required parameter in "):
        return False
    where, _, name = line.removeprefix("Missing required parameter in ").partition(': "')
    place = where.removeprefix("input").removeprefix(".")
    steps = [step.partition("[")[0] for step in place.split(".") if step]
    full = ".".join([*steps, name.rstrip('"')])
    given = [*OWNED[part], "Specifications.ComputeResourceRequirements.MinMemoryRequiredInMb"]
    return any(one == full or one.startswith(f"{full}.") for one in given)
