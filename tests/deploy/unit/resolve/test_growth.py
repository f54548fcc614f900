"""Engines and copies against GPUs, and the advice on growth."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.errors import DoesNotFit, SpecError
from deploy.resolve.fit import Resolution
from deploy.resolve.resolver import advice, resolve
from deploy.resources.environment import environment
from tests.deploy.unit.resolve.test_resolver import GIVEN, spec
from tests.one_test import in_one_test

FOUR = {"type": "ml.g6e.12xlarge"}
"""Four GPUs."""


def resolution(**changes: Any) -> Resolution:
    options = {**GIVEN["options"], **changes.pop("options", {})}
    return resolve(spec(**{"model": {**GIVEN["model"], "context": 8192}, **changes, "options": options}), "us-east-1")


def component(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "chat", **changes}]


@in_one_test(
    ("options", "degree", "idle"),
    [
        ({}, 4, None),
        ({"replicas": 4}, 1, None),
        ({"replicas": "auto"}, 1, None),
        ({"replicas": 2, "tensor_parallel_degree": 2}, 2, None),
        ({"replicas": "auto", "tensor_parallel_degree": 2}, 2, None),
        ({"replicas": 3}, 1, 1),
        ({"tensor_parallel_degree": 1}, 1, 3),
        ({"replicas": 2, "tensor_parallel_degree": "max"}, 4, None),
    ],
)
def test_replicas_divide_an_instances_gpus(options: dict[str, Any], degree: int, idle: int | None) -> None:
    found = resolution(instance=FOUR, options=options).decision
    assert found.tensor_parallel == degree
    said = [sentence for sentence in found.warnings if "stay idle" in sentence]
    assert len(said) == (idle is not None)
    assert all(f"{idle} of 4 GPUs" in sentence for sentence in said)


@in_one_test(
    ("changes", "message"),
    [
        ({"options": {"replicas": 5}}, "options.replicas: 5 engines of 1 GPU need 5 GPUs, and ml.g6e.12xlarge has 4"),
        ({"options": {"replicas": 3, "tensor_parallel_degree": 2}}, "3 engines of 2 GPUs need 6 GPUs"),
        ({"options": {"replicas": 2}, "components": component()}, "need 2 GPUs, and component chat has 1"),
        (
            {"options": {"tensor_parallel_degree": 2}, "components": component()},
            "_parallel_degree: 1 engine of 2",
        ),
        ({"components": component(copies=3, accelerators=2)}, r"components\[\].copies: the first copies need 6 GPUs"),
        (
            {"instance": {**FOUR, "managed": {"max": 2}}, "components": component(copies=9)},
            r"need 9 GPUs, and 2 x ml.g6e.12xlarge \(instance.managed.max\) have 8",
        ),
    ],
)
def test_engines_and_copies_without_gpus_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resolution(**{"instance": FOUR, **changes})


def test_copies_with_engines_of_their_own_fit() -> None:
    found = resolution(
        instance={**FOUR, "managed": {"max": 2}},
        options={"replicas": 2},
        components=component(copies=4, accelerators=2),
        scaling={"max": 6, "concurrency": 8},
    ).decision
    assert found.tensor_parallel == 1
    assert any("scaling.max: all components at their maximum need 12 GPUs" in sentence for sentence in found.warnings)


def test_replicas_have_the_front_end_that_knows_them() -> None:
    said = spec(options={**GIVEN["options"], "replicas": 2}, instance=FOUR)
    assert environment(said, resolve(said, "us-east-1").decision)["LMI_FRONT"] == "embedded"
    said = said.model_copy(update={"environment": {"LMI_FRONT": "djl"}})
    with pytest.raises(SpecError, match=r"environment.LMI_FRONT and options.replicas contradict"):
        environment(said, resolve(said, "us-east-1").decision)


@in_one_test(
    ("changes", "sentence"),
    [
        (
            {"instance": {"type": "ml.g6e.xlarge"}},
            "ml.g6e.xlarge holds 22 requests of the full context at once: for more",
        ),
        (
            {"instance": {"type": "ml.g6e.12xlarge"}, "options": {"replicas": "auto"}},
            "ml.g6e.12xlarge holds 88 requests of the full context at once: for more take more instances",
        ),
        (  # one engine on all GPUs
            {
                "instance": {"type": "ml.g6.48xlarge"},
                "options": {"replicas": "auto", "tensor_parallel_degree": "max"},
            },
            "ml.g6.48xlarge holds 55 requests",
        ),
        ({"instance": {"type": "ml.g6.xlarge"}}, "or a shorter model.context"),
        ({"instance": FOUR}, "One instance has no spare"),
        (
            {"instance": FOUR, "routing": {"concurrency_threshold": 8}, "scaling": {"max": 6, "concurrency": 8}},
            "Dynamo on HyperPod routes by what each worker holds",
        ),
    ],
)
def test_advice_follows_from_the_specification(changes: dict[str, Any], sentence: str) -> None:
    found = resolution(**changes)
    options = {**GIVEN["options"], **changes.get("options", {})}
    said = advice(spec(**{**changes, "options": options}), found.decision, found.candidates)
    assert any(sentence in text for text in said), said


def test_a_model_beyond_one_machine_is_sent_to_dynamo() -> None:
    shape = {"parameters": 3e12, "layers": 120, "kv_heads": 8, "head_dim": 128}
    with pytest.raises(DoesNotFit) as raised:
        resolution(model={"id": "org/huge", "shape": shape})
    assert "On HyperPod Dynamo does" in raised.value.advice
