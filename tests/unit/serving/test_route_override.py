"""Which dialect a request gets that names a route under DJL."""

from __future__ import annotations

import pytest

from handler.core.errors import InvalidPayload
from handler.protocols.registry import routes
from handler.serving.route_override import named_dialect

ALL = routes("mindie")


def found(path: str, mode: str = "lmi") -> str | None:
    schema = named_dialect({"route": path}, mode, "mine", ALL)
    return None if schema is None else schema.name


def test_without_one_it_is_the_configured_dialect() -> None:
    assert named_dialect({"x": "y"}, "lmi", "mine", ALL) is None
    for path in ("/invocations", "/predictions/mine", "/predictions/mine/1", "/models/mine/invoke"):
        assert found(path) is None
        assert found(path, "dynamic_batch") is None


def test_every_route_can_be_named() -> None:
    for path, schema in ALL.items():
        assert found(path.format(model="mine", version="1")) == schema.name
    assert found("/") == "mindie"
    assert found("/v2/models/mine/generate_stream") == "triton_generate_stream"


@pytest.mark.parametrize("path", ["", "/ping", "/adapters", "/v2/models/other/generate", "/v2/models/mine", "x"])
def test_what_is_no_route_for_inference_is_refused(path: str) -> None:
    with pytest.raises(InvalidPayload, match="is no route for inference"):
        named_dialect({"route": path}, "lmi", "mine", ALL)


def test_dynamic_batches_have_one_dialect() -> None:
    with pytest.raises(InvalidPayload, match="not available for dynamic batching"):
        found("/v2/models/mine/generate", "dynamic_batch")
