"""CloudFormation templates before AWS's own linter, which takes two seconds: `make test-deploy`, not `make test`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cfnlint.api import lint
from cfnlint.config import ManualArgs
from cfnlint.schema.manager import PROVIDER_SCHEMA_MANAGER

from deploy.export.cloudformation import LACKING, TYPES, cloudformation_template
from deploy.resources.build import resources
from deploy.resources.resource import Kind
from deploy.spec.passthrough import OWNED, shape_of
from tests.deploy.cases import CASES, decision, spec
from tests.deploy.passthrough import FIELDS, RESERVATION, decided, specification
from tests.deploy.unit.test_export import exported

SHADOW = {"percent": 10, "options": {"max_rolling_batch_size": 8}}


def linted(template: dict[str, Any]) -> list[str]:
    matches = lint(json.dumps(template), config=ManualArgs(regions=["eu-west-1"], ignore_checks=["E3019"]))
    return [f"{match.rule.id}: {match.message}" for match in matches]


def test_awss_own_linter_finds_nothing_but_what_is_wrong() -> None:
    """All cases in one template, as the linter takes a second for each; so names stand there twice (E3019)."""
    every = exported("plain")
    every["Resources"], every["Outputs"] = {}, {}
    for number, case in enumerate(CASES):
        for name, resource in named_apart(exported(case)["Resources"], number).items():
            every["Resources"][name] = resource
    assert len(every["Resources"]) == sum(len(exported(case)["Resources"]) for case in CASES)
    for field in sorted(FIELDS.keys() - {"partitions"}):  # which CloudFormation lacks
        template = cloudformation_template(resources(specification(field), decided(field)))
        every["Resources"] |= named_apart(template["Resources"], field.title().replace("-", ""))
    beside = spec("plain", capture={"output": "s3://captured/"}, shadow=SHADOW, reservation=RESERVATION)
    template = cloudformation_template(resources(beside, decision("plain", shadow=decision("plain"))))
    every["Resources"] |= named_apart(template["Resources"], "Beside")
    every["Resources"]["EndpointConfigOf0"]["Properties"]["ProductionVariants"][0]["InstanceKind"] = "ml.g5.xlarge"
    (only,) = linted(every)
    assert only.startswith("E3002")
    assert "InstanceKind" in only


def named_apart(resources: dict[str, Any], mark: int | str) -> dict[str, Any]:
    text = json.dumps(resources)
    for name in resources:
        text = text.replace(f'"{name}"', f'"{name}Of{mark}"')
    found: dict[str, Any] = json.loads(text)
    return found


def test_what_cloudformation_lacks_is_what_its_schemas_lack() -> None:
    """Of the fields that `sagemaker:` takes: a newer linter that has one more is told here."""
    for kind, part, path in (
        (Kind.MODEL, "model", ""),
        (Kind.ENDPOINT_CONFIG, "endpoint_config", ""),
        (Kind.ENDPOINT_CONFIG, "variant", "ProductionVariants."),
        (Kind.COMPONENT, "component", ""),
        (Kind.ENDPOINT, "endpoint", ""),
    ):
        whole = PROVIDER_SCHEMA_MANAGER.get_resource_schema("eu-west-1", TYPES[kind]).schema
        start = whole
        for step in filter(None, path.split(".")):
            start = inner(start, step, whole)
        lacking = {f"{path}{place}" for place in missing(part, shape_of(part), start, whole, "")}
        known = set(LACKING.get(kind, {}))
        of_variants = {place for place in known if place.startswith("ProductionVariants.")}
        assert lacking == (of_variants if path else known - of_variants)


def missing(part: str, shape: Any, schema: dict[str, Any], whole: dict[str, Any], path: str) -> Iterator[str]:
    """The fields that we take and a schema lacks."""
    for name, member in shape.members.items():
        place = f"{path}.{name}".removeprefix(".")
        if place in OWNED[part]:
            continue
        if name not in schema["properties"]:
            yield place
            continue
        below = member.member if member.type_name == "list" else member
        if below.type_name == "structure":
            yield from missing(part, below, inner(schema, name, whole), whole, place)


def inner(schema: dict[str, Any], name: str, whole: dict[str, Any]) -> dict[str, Any]:
    """The schema of a property, or of the items of a list."""
    found = schema["properties"][name]
    while "$ref" in found or "items" in found:
        found = whole["definitions"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found["items"]
    return dict(found)
