"""Which dialect a request gets that names a route under DJL."""

from __future__ import annotations

import pytest

from handler.core.errors import InvalidPayload
from handler.protocols.registry import routes
from handler.serving.admission import InferenceRoutes
from handler.serving.head import in_attributes
from tests.one_test import in_one_test

ALL = routes("mindie")


def found(path: str) -> str | None:
    schema = InferenceRoutes("mine", ALL).dialect(path)
    return None if schema is None else schema.name


def test_without_one_it_is_the_configured_dialect() -> None:
    for path in ("/invocations", "/predictions/mine", "/predictions/mine/1", "/models/mine/invoke"):
        assert found(path) is None


def test_every_route_can_be_named() -> None:
    for path, schema in ALL.items():
        assert found(path.format(model="mine", version="1")) == schema.name
    assert found("/") == "mindie"
    assert found("/v2/models/mine/generate_stream") == "triton_generate_stream"


@in_one_test("path", ["", "/ping", "/adapters", "/v2/models/other/generate", "/v2/models/mine", "x"])
def test_what_is_no_route_for_inference_is_refused(path: str) -> None:
    with pytest.raises(
        InvalidPayload, match=r"is not a route for inference; these are: /invocations, .*/v1/completions"
    ):
        found(path)


@in_one_test(
    ("attributes", "path"),
    [
        ("route=/v1/completions", "/v1/completions"),
        ("a=b;route=/;c", "/"),
        ("x, route=/generate", "/generate"),
        ("route=", ""),
        ("aroute=/generate", None),
        ("", None),
    ],
)
def test_sagemakers_attributes_name_a_route(attributes: str, path: str | None) -> None:
    assert in_attributes({"x-amzn-sagemaker-custom-attributes": attributes}, "route") == path
    assert in_attributes({}, "route") is None


def test_a_route_matches_whatever_model_it_names() -> None:
    """The embedded server then says that there is no such model."""
    routes = InferenceRoutes("mine", ALL)
    assert routes.has("/v2/models/other/generate")
    assert routes.has("/predictions/other/7")
    assert not routes.has("/ping")
    assert not routes.has("/adapters")
