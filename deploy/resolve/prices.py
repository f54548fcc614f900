"""Prices of instances, for ranking instance types and for warnings about cost. They are not a quote.

AWS's prices change and differ by region. They come from AWS's Pricing API if AWS is queried, otherwise from a dated
table. The user's own price (`instance.price`) overrides both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import error_code, is_denied
from deploy.data import table
from deploy.resolve.instances import family
from deploy.resolve.model.files import part

if TYPE_CHECKING:
    from deploy.aws import Aws


@dataclass(frozen=True)
class Price:
    """The price of one instance.

    Attributes:
        usd: price in US dollars per hour, or None if it is unknown.
        exact: whether the price is exact, from the user or the Pricing API, rather than approximate.
    """

    usd: float | None
    exact: bool = False

    @property
    def text(self) -> str:
        """Return the exact price as text, or a price class such as `$2-4/h`, or `not known`."""
        if self.usd is None:
            return "not known"
        if self.exact:
            return f"${self.usd:g}/h"
        low, high = self.bounds
        return f"under ${high:g}/h" if low == 0 else f"${low:g}-{high:g}/h"

    @property
    def each(self) -> str:
        """Return text for the price of each of several instances, to insert into a sentence."""
        return "price not known" if self.usd is None else f"{self.text} each"

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the lower and upper bound of the price class, which are powers of two, or 0 and 0.5.

        Raises:
            ValueError: the price is unknown.
        """
        if self.usd is None:
            raise ValueError("the price is unknown")
        if self.usd < 0.5:
            return 0, 0.5
        low = 2.0 ** math.floor(math.log2(self.usd))
        return low, low * 2

    @property
    def rank(self) -> float:
        """Return the sort key of the price. Unknown prices sort last, so that they are never considered cheap."""
        return math.inf if self.usd is None else self.usd


@dataclass(frozen=True)
class Prices:
    """The prices of instance types.

    Attributes:
        listed: prices from the Pricing API in US dollars per hour, by instance type, or None to use the table.
        region: region of the prices in `listed`.
        reason: reason why the table is used although AWS was queried, or empty.
    """

    listed: Mapping[str, float] | None = None
    region: str = ""
    reason: str = ""

    def of(self, name: str, user_price: float | None = None) -> Price:
        """Return the price of one instance. The table has prices per vCPU for the families of CPU types.

        Args:
            name: name of the instance type.
            user_price: the user's price, which overrides other prices, or None.
        """
        if user_price is not None:
            return Price(user_price, exact=True)
        if self.listed is not None:
            return Price(self.listed.get(name), exact=True)
        prices = table("prices")
        if name in prices["usd_per_hour"]:
            return Price(float(prices["usd_per_hour"][name]))
        per_vcpu, instance = prices["usd_per_vcpu_hour"].get(family(name)), table("instances")["cpu"].get(name)
        return Price(None if per_vcpu is None or instance is None else per_vcpu * instance["vcpu"])

    @property
    def source(self) -> str:
        """Return text that names the source of the prices, to print below a table."""
        if self.listed is not None:
            return f"cost: on-demand, {self.region}, from AWS's Pricing API"
        prices = table("prices")
        reason = f" ({self.reason})" if self.reason else ""
        return (
            f"cost class: on-demand, {prices['region']}, as of {prices['read']}{reason}; "
            "see aws.amazon.com/sagemaker/pricing"
        )


TABLE = Prices()
"""Prices from the dated table."""


# -- AWS's Pricing API, which lists the hosting prices of a region -----------------------------------------------------


_MOST_PAGES = 30
_HOURLY = re.compile(r"(?:[A-Z0-9-]+-)?Host:(ml\.[a-z0-9-]+\.[a-z0-9]+)")
"""Matches the usage type of a real-time endpoint's instance per hour, e.g. `USE1-Host:ml.g5.xlarge`."""

_LARGEST_PRICE = 10_000.0  # US dollars per hour


def ask(aws: Aws) -> Prices:
    """Return the region's on-demand prices from the Pricing API, or the prices in the table and why they are used."""
    if aws.partition != "aws":  # other partitions do not have the API, and their credentials must stay there
        return Prices(reason=f"AWS's Pricing API does not exist in the partition {aws.partition}")
    try:
        listed = dict(_prices(aws))
    except ClientError as error:
        if is_denied(error):
            return Prices(reason="pricing:GetProducts is not allowed")
        return Prices(reason=f"the Pricing API returned {error_code(error)}")
    except BotoCoreError as error:
        return Prices(reason=f"the request to the Pricing API failed: {type(error).__name__}")
    if not listed:
        return Prices(reason=f"the Pricing API lists no endpoint instances in {aws.region}")
    return Prices(listed, aws.region)


def _prices(aws: Aws) -> Iterator[tuple[str, float]]:
    client = aws.quick_client("pricing", "us-east-1")  # this region's API has the prices of all regions
    filters = {"regionCode": aws.region, "component": "Hosting"}
    pages = client.get_paginator("get_products").paginate(
        ServiceCode="AmazonSageMaker",
        Filters=[{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in filters.items()],
        PaginationConfig={"MaxItems": 100 * _MOST_PAGES, "PageSize": 100},
    )
    for page in pages:
        for item in page.get("PriceList", ()):
            try:
                yield from _price(json.loads(item))
            except (ValueError, RecursionError):
                continue


def _price(product: object) -> Iterator[tuple[str, float]]:
    """Yield the instance type and hourly price of a product if it is an instance for real-time endpoints."""
    used = _HOURLY.fullmatch(str(part(part(product, "product"), "attributes").get("usagetype")))
    if used is None:
        return
    for term in part(part(product, "terms"), "OnDemand").values():
        for dimension in part(term, "priceDimensions").values():
            price = float(str(part(dimension, "pricePerUnit").get("USD", 0)))
            if 0 < price < _LARGEST_PRICE:
                yield used[1], price
