"""Random specifications with fields of `sagemaker:`: what we take, AWS takes, and what AWS refuses, we refuse.

4,000 of each, in tests of 500.
"""

from __future__ import annotations

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
from tests.deploy.random_fields import PARTS, fields, spoilt
from tests.deploy.strict import report, wrong_in, wrong_words

COUNT, SEEDS = 500, range(8)


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
        plan_as_json(plan(made, Live(said.name, online=False)))
        policies(said, decided)
        try:
            cloudformation_template(made)
        except Refused as refusal:
            assert "CloudFormation has no place for" in str(refusal)  # noqa: PT017  # it may be taken too
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
        words in line for words in (" belongs to ", "must begin with s3://", "10, 30, 60", "number (given: true)")
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
