"""Ask AWS's Pricing API what hosting costs in a region. Whoever may not ask is told in one line, and has the table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import error_code, is_denied
from deploy.resolve.model.config import part
from deploy.resolve.prices import Prices

if TYPE_CHECKING:
    from deploy.aws import Aws

_MOST_PAGES = 30
_HOURLY = re.compile(r"(?:[A-Z0-9-]+-)?Host:(ml\.[a-z0-9-]+\.[a-z0-9]+)")
"""A usage type of a real-time endpoint's instance hour, e.g. `USE1-Host:ml.g5.xlarge`."""

_LARGEST_PRICE = 10_000.0


def ask(aws: Aws) -> Prices:
    """Return the on-demand prices of the region, or the table's with the reason."""
    if aws.partition != "aws":  # the API is not in others, and their credentials stay there
        return Prices(why=f"AWS's Pricing API is not in the partition {aws.partition}")
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
        return Prices(why=f"the Pricing API lists no endpoint's instances in {aws.region}")
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
