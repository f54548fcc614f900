"""Prices by AWS's Pricing API, which a stubbed client answers by botocore's model; and the table where it may not."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.stub import Stubber

from deploy.aws import Aws
from deploy.resolve.prices import TABLE, Price, Prices, ask
from tests.deploy.doubles.endpoints import listed_price


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stubber:
    aws = Aws("eu-west-1")
    client = aws.quick_client("pricing", "us-east-1")
    stubber = Stubber(client)
    monkeypatch.setattr(Aws, "quick_client", lambda self, service, region: client)
    stubber.activate()
    return stubber


def wanted(**more: Any) -> dict[str, Any]:
    return {
        "ServiceCode": "AmazonSageMaker",
        "Filters": [
            {"Type": "TERM_MATCH", "Field": "regionCode", "Value": "eu-west-1"},
            {"Type": "TERM_MATCH", "Field": "component", "Value": "Hosting"},
        ],
        "MaxResults": 100,
        **more,
    }


def answered(stub: Stubber, *products: str) -> Prices:
    stub.add_response("get_products", {"FormatVersion": "aws_v1", "PriceList": list(products)}, wanted())
    return ask(Aws("eu-west-1"))


def test_prices_of_all_pages(stub: Stubber) -> None:
    first = {"PriceList": [listed_price("EUW1-Host:ml.g5.xlarge", "1.5730000000")], "NextToken": "more"}
    stub.add_response("get_products", first, wanted())
    second = {"PriceList": [listed_price("EUW1-Host:ml.p6-b200.48xlarge", "130.5")]}
    stub.add_response("get_products", second, wanted(NextToken="more"))
    prices = ask(Aws("eu-west-1"))
    assert prices.of("ml.g5.xlarge") == Price(1.573, exact=True)
    assert prices.of("ml.p6-b200.48xlarge").text == "$130.5/h"
    assert prices.of("ml.g4dn.xlarge").text == "not known"  # not offered there
    assert prices.of("ml.g4dn.xlarge", 0.5) == Price(0.5, exact=True)
    assert prices.source == "cost: on-demand, eu-west-1, by AWS's Pricing API"
    stub.assert_no_pending_responses()


def test_of_us_east_1_usage_has_no_prefix(stub: Stubber) -> None:
    assert answered(stub, listed_price("Host:ml.c7i.xlarge", "0.2142")).of("ml.c7i.xlarge").usd == 0.2142


@pytest.mark.parametrize(
    "item",
    [
        "{",
        "[" * 100_000,
        "7",
        '{"product": 7, "terms": []}',
        listed_price("EUW1-Train:ml.g5.xlarge", "1"),
        listed_price("EUW1-Host:ml.g5.xlarge-extra", "1"),
        listed_price("EUW1-ServerlessInf:Mem-1GB", "1"),
        listed_price("EUW1-Host:ml.g5.xlarge", "0"),
        listed_price("EUW1-Host:ml.g5.xlarge", "-4"),
        listed_price("EUW1-Host:ml.g5.xlarge", "1e300"),
        listed_price("EUW1-Host:ml.g5.xlarge", "NaN"),
        listed_price("EUW1-Host:ml.g5.xlarge", "much"),
        listed_price("EUW1-Host:ml.g5.xlarge", "1", terms={"Reserved": {}}),
        listed_price("EUW1-Host:ml.g5.xlarge", "1", terms={"OnDemand": {"A": {"priceDimensions": [1]}}}),
    ],
    ids=range(14),
)
def test_what_is_no_price_of_an_endpoints_hour(stub: Stubber, item: str) -> None:
    prices = answered(stub, item, listed_price("EUW1-Host:ml.g6.xlarge", "1.2"))
    assert prices.listed == {"ml.g6.xlarge": 1.2}


def test_a_list_without_prices_leaves_the_table(stub: Stubber) -> None:
    prices = answered(stub)
    assert prices.of("ml.g5.xlarge") == TABLE.of("ml.g5.xlarge")
    assert prices.source == (
        "cost class: on-demand, us-east-1, as of 2026-09-27 (the Pricing API lists no endpoint's instances in "
        "eu-west-1); see aws.amazon.com/sagemaker/pricing"
    )


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("AccessDeniedException", "(pricing:GetProducts is not allowed)"),
        ("InternalErrorException", "(the Pricing API answers InternalErrorException)"),
    ],
)
def test_who_may_not_ask_has_the_table_and_one_line(stub: Stubber, code: str, why: str) -> None:
    stub.add_client_error("get_products", code, "no", 400, expected_params=wanted())
    prices = ask(Aws("eu-west-1"))
    assert prices.of("ml.g5.xlarge").text == "$1-2/h"
    assert why in prices.source
    assert "\n" not in prices.source


def test_without_a_way_there() -> None:
    """The address of tests is one where nothing listens."""
    assert "(the Pricing API cannot be reached: EndpointConnectionError)" in ask(Aws("eu-west-1")).source


@pytest.mark.parametrize(
    ("region", "partition"),
    [
        ("us-gov-west-1", "aws-us-gov"),
        ("cn-north-1", "aws-cn"),
        ("us-iso-east-1", "aws-iso"),
        ("eusc-de-east-1", "aws-eusc"),
    ],
)
def test_other_partitions_are_not_asked(region: str, partition: str) -> None:
    assert f"(AWS's Pricing API is not in the partition {partition})" in ask(Aws(region)).source
