"""Rough prices of instances, to rank types and to warn. They are not a quote.

Amazon's prices differ by region and change. Online its Pricing API is queried (below); otherwise the table is used,
with its date and source. The user's own price (`instance.price`) overrides both.
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
    """A price in US dollars an hour.

    Attributes:
        usd: approximate price; None: unknown.
        exact: whether it comes from the user or the Pricing API.
    """

    usd: float | None
    exact: bool = False

    @property
    def text(self) -> str:
        """Return the price class, e.g. `$2-4/h`; an exact price as it is; or `not known`."""
        if self.usd is None:
            return "not known"
        if self.exact:
            return f"${self.usd:g}/h"
        low, high = self.bounds
        return f"under ${high:g}/h" if low == 0 else f"${low:g}-{high:g}/h"

    @property
    def each(self) -> str:
        """Return the price of one of several instances, for a sentence."""
        return "price not known" if self.usd is None else f"{self.text} each"

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the price class: two powers of two around the price; the cheapest class begins at 0.

        Raises:
            ValueError: the price is unknown.
        """
        if self.usd is None:
            raise ValueError("no price is known")
        if self.usd < 0.5:
            return 0, 0.5
        low = 2.0 ** math.floor(math.log2(self.usd))
        return low, low * 2

    @property
    def rank(self) -> float:
        """Sort key. An unknown price comes last, so that it never counts as cheap."""
        return math.inf if self.usd is None else self.usd


@dataclass(frozen=True)
class Prices:
    """The prices of instances.

    Attributes:
        listed: US dollars an hour by type, from the Pricing API; None: the table is used.
        region: of `listed`.
        why: why the table is used although AWS was queried; empty: it was not queried.
    """

    listed: Mapping[str, float] | None = None
    region: str = ""
    why: str = ""

    def of(self, name: str, own: float | None = None) -> Price:
        """Return the price of one instance. In the table CPU types are priced by vCPU, as AWS does within a family.

        Args:
            own: the user's price, which overrides others.
        """
        if own is not None:
            return Price(own, exact=True)
        if self.listed is not None:
            return Price(self.listed.get(name), exact=True)
        prices = table("prices")
        if name in prices["usd_per_hour"]:
            return Price(float(prices["usd_per_hour"][name]))
        per_vcpu, instance = prices["usd_per_vcpu_hour"].get(family(name)), table("instances")["cpu"].get(name)
        return Price(None if per_vcpu is None or instance is None else per_vcpu * instance["vcpu"])

    @property
    def source(self) -> str:
        """Return the source of the prices, for the last line of a table."""
        if self.listed is not None:
            return f"cost: on-demand, {self.region}, by AWS's Pricing API"
        prices = table("prices")
        why = f" ({self.why})" if self.why else ""
        return (
            f"cost class: on-demand, {prices['region']}, as of {prices['read']}{why}; "
            "see aws.amazon.com/sagemaker/pricing"
        )


TABLE = Prices()
"""The prices of the dated table."""


# -- AWS's Pricing API: what hosting costs in a region -----------------------------------------------------------------


_MOST_PAGES = 30
_HOURLY = re.compile(r"(?:[A-Z0-9-]+-)?Host:(ml\.[a-z0-9-]+\.[a-z0-9]+)")
"""A usage type of a real-time endpoint's instance hour, e.g. `USE1-Host:ml.g5.xlarge`."""

_LARGEST_PRICE = 10_000.0


def ask(aws: Aws) -> Prices:
    """Return the on-demand prices of the region, or the table's with the reason."""
    if aws.partition != "aws":  # the API is not in others, and their credentials stay there
        return Prices(why=f"AWS's Pricing API does not exist in the partition {aws.partition}")
    try:
        listed = dict(_prices(aws))
    except ClientError as error:
        why = (
            "pricing:GetProducts is not allowed" if is_denied(error) else f"the Pricing API answers {error_code(error)}"
        )
        return Prices(why=why)
    except BotoCoreError as error:
        return Prices(why=f"the Pricing API cannot be reached: {type(error).__name__}")
    if not listed:
        return Prices(why=f"the Pricing API lists no endpoint instances in {aws.region}")
    return Prices(listed, aws.region)


def _prices(aws: Aws) -> Iterator[tuple[str, float]]:
    client = aws.quick_client("pricing", "us-east-1")  # which has the prices of all regions
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
    """Return the type and price of a product, if it is an hour of an endpoint's instance."""
    used = _HOURLY.fullmatch(str(part(part(product, "product"), "attributes").get("usagetype")))
    if used is None:
        return
    for term in part(part(product, "terms"), "OnDemand").values():
        for dimension in part(term, "priceDimensions").values():
            price = float(str(part(dimension, "pricePerUnit").get("USD", 0)))
            if 0 < price < _LARGEST_PRICE:
                yield used[1], price
