"""An endpoint that was scaled by hand: the plan says what an update would take back."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.deployer.live import Live, LiveResource
from deploy.deployer.preparation import scaled_by_hand
from deploy.resources.resource import Kind
from deploy.spec import Spec
from tests.deploy.doubles.deployments import NAME, PLAIN


def warned(count: int, begun: int = 1, *, status: str = "InService", **changes: Any) -> tuple[str, ...]:
    """Of an endpoint that has so many instances, and had `begun` at first."""
    said = {
        "EndpointName": NAME,
        "EndpointConfigName": "c",
        "EndpointStatus": status,
        "ProductionVariants": [{"VariantName": "main", "DesiredInstanceCount": count}],
    }
    variant = {"VariantName": "main", "InitialInstanceCount": begun}
    config = {"EndpointConfigName": "c", "ProductionVariants": [variant]}
    spec = Spec.model_validate({**PLAIN, "scaling": None, **changes})
    return scaled_by_hand(
        spec, Live(NAME, (LiveResource(Kind.ENDPOINT, said, {}), LiveResource(Kind.ENDPOINT_CONFIG, config, {})))
    )


def test_both_numbers_and_what_keeps_them_are_said() -> None:
    (said,) = warned(5, instance={"count": 2, "type": "ml.g6e.2xlarge"})
    assert "scaled to 5 instances, instance.count is 2" in said
    assert "write instance.count: 5, or scaling:" in said


@pytest.mark.parametrize(
    "how",
    [
        {"count": 2, "begun": 2},  # as the file says
        {"count": 1, "begun": 1},  # the file has changed since: the plan shows it
        {"count": 3, "scaling": PLAIN["scaling"]},  # an update keeps them
        {"count": 3, "status": "Failed"},
    ],
)
def test_nothing_is_said_where_nothing_is_taken_back(how: dict[str, Any]) -> None:
    assert warned(**how) == ()
