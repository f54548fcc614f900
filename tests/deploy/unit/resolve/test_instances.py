"""Instance types, their classes and their prices."""

from __future__ import annotations

from typing import Any

import botocore.session
import pytest
from botocore.stub import Stubber

from deploy.aws import Aws
from deploy.errors import SpecError
from deploy.resolve.instances import all_types, architecture, find, refuse_mistyped, without_gpus
from deploy.resolve.prices import TABLE, Price, Prices, ask
from tests.deploy.doubles.endpoints import listed_price
from tests.one_test import in_one_test

# -- the tables of instance types and of prices' classes ---------------------------------------------------------------


@pytest.fixture(scope="module")
def of_sagemaker() -> set[str]:
    """Types in SageMaker's API."""
    model = botocore.session.Session().get_service_model("sagemaker")
    variants = model.shape_for("CreateEndpointConfigInput").members["ProductionVariants"]
    return set(variants.member.members["InstanceType"].enum)


def test_every_type_is_one_that_sagemaker_serves_on(of_sagemaker: set[str]) -> None:
    names = [one.name for one in all_types()]
    assert len(names) == len(set(names)) > 100
    assert set(names) <= of_sagemaker


@pytest.mark.parametrize("name", ["g5", "ml.g5", "foo"])
def test_a_name_without_a_size_is_no_known_type(name: str) -> None:
    assert find(name) is None
    refuse_mistyped(name)


def test_every_nvidia_type_of_sagemaker_since_turing_is_known(of_sagemaker: set[str]) -> None:
    known = {one.name for one in all_types()}
    gpus = {name for name in of_sagemaker if name.split(".")[1].startswith(("g", "p"))}
    assert gpus - known == {name for name in gpus if name.startswith(("ml.p2.", "ml.p3.", "ml.p6e-"))}


def test_a_row_in_instances() -> None:
    one = find("ml.g6e.12xlarge")
    assert one is not None
    assert (one.gpu, one.gpus, one.gpu_mib, one.vcpus, one.ram_gib, one.compute) == ("L40S", 4, 45776, 48, 384, (8, 9))
    assert (one.family, one.nvlink, one.blackwell) == ("g6e", False, False)


@in_one_test(
    ("name", "nvlink", "blackwell"),
    [
        ("ml.p5.48xlarge", True, False),
        ("ml.p5.4xlarge", False, False),
        ("ml.p6-b200.48xlarge", True, True),
        ("ml.g7e.48xlarge", False, True),
        ("ml.c7i.xlarge", False, False),
    ],
)
def test_what_speaks_past_the_bus(name: str, nvlink: bool, blackwell: bool) -> None:
    one = find(name)
    assert one is not None
    assert (one.nvlink, one.blackwell) == (nvlink, blackwell)


@pytest.mark.parametrize("name", ["ml.p6e-gb300.36xlarge", "ml.g5g.xlarge"])
def test_arm_hosts_with_gpus_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="is an arm64 host with GPUs"):
        find(name)


@in_one_test(
    ("name", "wanted"),
    [
        ("ml.c7g.xlarge", "arm64"),
        ("ml.m6gd.large", "arm64"),
        ("ml.c6gn.large", "arm64"),
        ("ml.m9g.large", "arm64"),
        ("ml.p6e-gb200.36xlarge", "arm64"),
        ("ml.c7i.large", "amd64"),
        ("ml.g6e.xlarge", "amd64"),
        ("ml.m6id.large", "amd64"),
        ("ml.p4d.24xlarge", "amd64"),
    ],
)
def test_the_processors_of_a_type_are_those_of_its_family(name: str, wanted: str) -> None:
    assert architecture(name) == wanted


def test_graviton_types_are_known() -> None:
    one = find("ml.c8g.4xlarge")
    assert one is not None
    assert (one.architecture, one.gpus, one.vcpus, one.ram_gib) == ("arm64", 0, 16, 32)
    assert TABLE.of("ml.c8g.4xlarge").text == "$0.5-1/h"


@in_one_test(
    ("engine", "cuda", "wanted"),
    [("openvino", (13, 0), True), ("llamacpp", None, True), ("llamacpp", (13, 0), False), ("vllm", None, False)],
)
def test_an_engine_uses_gpus_if_the_image_does(engine: str, cuda: tuple[int, int] | None, wanted: bool) -> None:
    assert without_gpus(engine, cuda) is wanted


@pytest.mark.parametrize(
    ("name", "chip"), [("ml.inf2.xlarge", "Inferentia"), ("ml.trn1.32xlarge", "Trainium"), ("ml.dl1.24xlarge", "Gaudi")]
)
def test_other_chips_are_refused(name: str, chip: str) -> None:
    with pytest.raises(SpecError, match=f"{name} has {chip}"):
        find(name)


@pytest.mark.parametrize("name", ["ml.g9.xlarge", "ml.p3.2xlarge", "ml.t2.medium"])
def test_types_that_the_tables_lack_are_not_known(name: str) -> None:
    assert find(name) is None


@in_one_test(
    ("name", "text"),
    [
        ("ml.g5.xlarge", "$1-2/h"),
        ("ml.g6e.2xlarge", "$2-4/h"),
        ("ml.p5.48xlarge", "$32-64/h"),
        ("ml.c7i.xlarge", "under $0.5/h"),
        ("ml.c7i.4xlarge", "$0.5-1/h"),
        ("ml.p5en.48xlarge", "$64-128/h"),
        ("ml.p6-b200.48xlarge", "$128-256/h"),
        ("ml.p6-b300.48xlarge", "$128-256/h"),
        ("ml.p5e.48xlarge", "not known"),
    ],
)
def test_classes_of_prices(name: str, text: str) -> None:
    assert TABLE.of(name).text == text


def test_a_price_of_the_users_own_is_shown_as_it_is() -> None:
    assert TABLE.of("ml.g5.xlarge", 0.87) == Price(0.87, exact=True)
    assert TABLE.of("ml.g5.xlarge", 0.87).text == "$0.87/h"


def test_what_is_not_known_ranks_last() -> None:
    ranked = sorted(all_types(), key=lambda one: TABLE.of(one.name).rank)
    assert ranked[-1].family in ("g7", "p5e")
    with pytest.raises(ValueError, match="the price is unknown"):
        _ = TABLE.of("ml.p5e.48xlarge").bounds


def test_a_family_gets_dearer_with_its_size() -> None:
    for family in ("g5", "g6", "g6e", "g7e", "c7i"):
        of_family = [one for one in all_types() if one.family == family and one.gpus <= 1]
        prices = [TABLE.of(one.name).rank for one in sorted(of_family, key=lambda one: one.vcpus)]
        assert prices == sorted(prices)


def test_the_table_is_dated() -> None:
    assert "as of 2026-09-27" in TABLE.source


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ml.g6e.xlage", "ml.g6e.xlarge"),
        ("ml.ge6.xlarge", "ml.g6e.xlarge"),
        ("ml.p5en.48xlarg", "ml.p5en.48xlarge"),
        ("ml.g6ee.2xlarge", "ml.g6e.2xlarge"),
    ],
)
def test_a_mistyped_name_is_refused(name: str, meant: str) -> None:
    with pytest.raises(SpecError, match=rf"^instance\.type: {name} is unknown; did you mean .*{meant}"):
        refuse_mistyped(name)


@in_one_test("name", ["ml.g9.xlarge", "ml.r5.xlarge", "ml.m5d.xlarge", "ml.p3.2xlarge", "ml.t2.medium"])
def test_what_exists_or_may_come_is_let_through(name: str) -> None:
    refuse_mistyped(name)


# -- price list --------------------------------------------------------------------------------------------------------
# Prices by AWS's Pricing API, which a stubbed client answers by botocore's model; and the table where it may not.


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
    assert prices.source == "cost: on-demand, eu-west-1, from AWS's Pricing API"
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
        "cost class: on-demand, us-east-1, as of 2026-09-27 (the Pricing API lists no endpoint instances in "
        "eu-west-1); see aws.amazon.com/sagemaker/pricing"
    )


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("AccessDeniedException", "(pricing:GetProducts is not allowed)"),
        ("InternalErrorException", "(the Pricing API returned InternalErrorException)"),
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
    assert "(the request to the Pricing API failed: EndpointConnectionError)" in ask(Aws("eu-west-1")).source


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
    assert f"(AWS's Pricing API does not exist in the partition {partition})" in ask(Aws(region)).source
