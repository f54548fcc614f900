"""The adapter that a request is for, wherever its body names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import ServingError
from handler.core.values import Adapter
from handler.protocols.registry import INVOCATIONS
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, with_adapters

CONTEXT = with_adapters(CAPABLE, Adapter("a", 1, "/a"), Adapter("b", 2, "/b"))
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def names(schema: str, body: dict[str, Any]) -> list[str | None]:
    found = INVOCATIONS[schema].parse(body, CONTEXT)
    assert not found.ignored
    return [request.adapter.name if request.adapter else None for request in found.requests]


@in_one_test(
    ("schema", "body", "wanted"),
    [
        ("lmi", {"inputs": "x"}, [None]),
        ("lmi", {"inputs": "x", "adapters": "a"}, ["a"]),
        ("lmi", {"inputs": "x", "adapters": ["b"]}, ["b"]),
        ("lmi", {"inputs": "x", "adapters": [""]}, [None]),
        ("lmi", {"inputs": "x", "adapters": None}, [None]),
        ("lmi", {"inputs": "x", "adapters": [], "parameters": {"adapter_id": "a"}}, ["a"]),
        ("lmi", {"inputs": "x", "parameters": {"lora_task_id": [2]}}, ["b"]),
        ("lmi", {"inputs": "x", "adapters": "b", "parameters": {"lora_task_id": 2, "adapter_id": "b"}}, ["b"]),
        ("tgi_compat", {"inputs": "x", "parameters": {"adapter_id": "b"}}, ["b"]),
        ("tgi_compat", {"inputs": "x", "parameters": {"adapter_id": ""}}, [None]),
        ("lmi", {**CHAT, "adapters": "a"}, ["a"]),
        ("dynamic_batch", {"inputs": ["x", "y"], "adapters": "a"}, ["a", "a"]),
        ("dynamic_batch", {"inputs": ["x", "y"], "adapters": ["a", "b"]}, ["a", "b"]),
        ("dynamic_batch", {"inputs": ["x", "y"], "adapters": ["a", ""]}, ["a", None]),
        ("dynamic_batch", {"inputs": ["x", "y"], "parameters": {"adapter_id": "b"}}, ["b", "b"]),
    ],
)
def test_it_is_found(schema: str, body: dict[str, Any], wanted: list[str | None]) -> None:
    assert names(schema, body) == wanted


@in_one_test(
    ("schema", "body", "wanted"),
    [
        ("lmi", {"inputs": "x", "adapters": "c"}, "'adapters': 'c': no adapter with that name is registered"),
        ("lmi", {"inputs": "x", "adapters": ["a", "b"]}, "a name per prompt (names: 2, prompts: 1)"),
        ("lmi", {"inputs": "x", "adapters": 5}, "'adapters': must be the name of an adapter"),
        ("lmi", {"inputs": "x", "adapters": [["a"]]}, "must be the name of an adapter"),
        ("lmi", {"inputs": "x", "parameters": {"adapter_id": "c"}}, 'parameters.adapter_id="c": no adapter with'),
        ("lmi", {"inputs": "x", "parameters": {"adapter_id": 1}}, "parameters.adapter_id=1: must be the name"),
        (
            "lmi",
            {"inputs": "x", "adapters": "a", "parameters": {"adapter_id": "b"}},
            "parameters.adapter_id: 'b' contradicts the adapter 'a'",
        ),
        (
            "lmi",
            {"inputs": "x", "parameters": {"adapter_id": "a", "lora_task_id": 2}},
            "parameters.lora_task_id=2 contradicts parameters.adapter_id",
        ),
        ("lmi", {**CHAT, "adapters": "c"}, "'adapters': 'c': no adapter"),
        ("dynamic_batch", {"inputs": ["x", "y"], "adapters": ["a"]}, "a name per prompt (names: 1, prompts: 2)"),
        ("dynamic_batch", {"inputs": ["x", "y"], "adapters": ["a", "c"]}, "'adapters': 'c'"),
    ],
)
def test_what_is_refused_in_adapters(schema: str, body: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ServingError) as caught:
        INVOCATIONS[schema].parse(body, CONTEXT)
    assert INVOCATIONS[schema].errors.status(caught.value) == 424
    assert wanted in caught.value.message


@pytest.mark.parametrize("body", [{"adapters": "a"}, {"parameters": {"adapter_id": "a"}}])
def test_an_engine_without_adapters_says_why(body: dict[str, Any]) -> None:
    context = replace(CONTEXT, no_adapters="it was started without option.enable_lora=true")
    with pytest.raises(ServingError, match="the engine able serves no LoRA adapters: it was started without"):
        INVOCATIONS["lmi"].parse({"inputs": "x", **body}, context)
