"""Several instance types for one endpoint: each is fitted, and one host suits all."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deploy.errors import DeployError
from deploy.resolve.decision import Decision
from deploy.resolve.resolver import resolve
from deploy.resources.build import resources
from deploy.resources.resource import Kind
from deploy.spec import Spec
from tests.deploy.unit.resolve.test_resolver import GIVEN, spec
from tests.one_test import in_one_test


def decision(*types: str | dict[str, Any], **changes: Any) -> Decision:
    pools = [item if isinstance(item, dict) else {"type": item} for item in types]
    return resolve(spec(instance={"pools": pools}, **changes), "us-east-1").decision


def test_each_type_has_its_own_degree_and_the_first_is_the_deployments() -> None:
    found = decision({"type": "ml.g6.12xlarge", "priority": 3}, {"type": "ml.g6e.xlarge", "priority": 1})
    assert [(pool.priority, pool.instance_type, pool.gpus, pool.tensor_parallel) for pool in found.pools] == [
        (1, "ml.g6e.xlarge", 1, 1),
        (3, "ml.g6.12xlarge", 4, 4),
    ]
    assert (found.instance_type, found.gpus, found.tensor_parallel) == ("ml.g6e.xlarge", 1, 1)


@in_one_test(
    ("types", "changes", "message"),
    [
        (("ml.g6e.xlarge", "ml.g4dn.xlarge"), {}, r"instance.pools\[1\]: instance.type: ml.g4dn.xlarge: bf16 needs"),
        (("ml.g6.xlarge",), {"model": {"id": "Qwen/Qwen3-32B"}}, r"instance.pools\[0\]: .*ml.g6.xlarge: weights of"),
        (("ml.g6e.xlarge", "ml.g7g.xlarge"), {}, r"instance.pools\[1\]: .* arm64"),
        (("ml.g6e.xlarge", "ml.g6ee.xlarge"), {}, r"instance.pools\[1\]: .* did you mean"),
        (
            ("ml.g6e.xlarge", "ml.p6-b200.48xlarge"),
            {"image": {"repository": "lmi", "tag": "1-cu128"}},
            r"instance.pools: the types need different hosts \(ml.g6e.xlarge: al2-",
        ),
        (("ml.g6e.xlarge", "ml.c7i.24xlarge"), {}, "instance.pools: the types need different hosts"),
    ],
)
def test_a_type_that_does_not_suit_is_named(types: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DeployError, match=message):
        decision(*types, **changes)


def test_a_pool_whose_environment_differs_has_its_own_model() -> None:
    said = spec(instance={"pools": [{"type": "ml.g6e.xlarge"}, {"type": "ml.g6.12xlarge"}, {"type": "ml.g6e.2xlarge"}]})
    built = resources(said, resolve(said, "us-east-1").decision)
    models = [item for item in built if item.kind is Kind.MODEL]
    degrees = [item.request["PrimaryContainer"]["Environment"].get("OPTION_TENSOR_PARALLEL_DEGREE") for item in models]
    assert degrees == [None, "4"]
    (config,) = [item for item in built if item.kind is Kind.ENDPOINT_CONFIG]
    (variant,) = config.request["ProductionVariants"]
    assert variant["InstancePools"] == [
        {"InstanceType": "ml.g6e.xlarge", "Priority": 1},
        {"InstanceType": "ml.g6.12xlarge", "ModelNameOverride": models[1].name, "Priority": 2},
        {"InstanceType": "ml.g6e.2xlarge", "Priority": 3},
    ]
    assert "InstanceType" not in variant
    assert set(config.needs) == {item.key for item in models}


@in_one_test(
    ("instance", "message"),
    [
        ({"type": "ml.g6e.xlarge", "pools": [{"type": "ml.g6.xlarge"}]}, "instance.type does not go with"),
        ({"price": 1.5, "pools": [{"type": "ml.g6.xlarge"}]}, "instance.price is that of one type"),
        ({"pools": [{"type": "ml.g6.xlarge"}, {"type": "ml.g6.xlarge"}]}, r"pools\[\].type: ml.g6.xlarge is given"),
        ({"pools": [{"type": "ml.g6.xlarge", "priority": 2}, {"type": "ml.g5.xlarge"}]}, r"pools\[\].priority: 2 is"),
        ({"pools": [{"type": f"ml.g{n}.xlarge"} for n in range(1, 7)]}, "at most 5"),
        ({"pools": [{"type": "auto"}]}, "pattern"),
    ],
)
def test_contradictions_are_named(instance: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Spec.model_validate({**GIVEN, "instance": instance})
