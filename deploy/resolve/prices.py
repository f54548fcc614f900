"""Rough prices of instances, to rank types and to warn. They are no quote.

Amazon's prices differ by region and change, and there is no offline source. The table has its date and source; the
user's own price (`instance.price`) overrides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deploy.data import table
from deploy.resolve.instances import family


@dataclass(frozen=True)
class Price:
    """A price in US dollars an hour.

    Attributes:
        usd: approximate price; None: unknown.
        exact: whether it is the user's own.
    """

    usd: float | None
    exact: bool = False

    @property
    def text(self) -> str:
        """The price class, e.g. `$2-4/h`; an exact price as it is; or `not known`."""
        if self.usd is None:
            return "not known"
        if self.exact:
            return f"${self.usd:g}/h"
        low, high = self.bounds
        return f"under ${high:g}/h" if low == 0 else f"${low:g}-{high:g}/h"

    @property
    def bounds(self) -> tuple[float, float]:
        """The price class: two powers of two around the price; the cheapest class begins at 0.

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


def price_of(name: str, own: float | None = None) -> Price:
    """Return the price of one instance. CPU types are priced by vCPU, as AWS does within a family.

    Args:
        own: the user's price, which overrides the table's.
    """
    if own is not None:
        return Price(own, exact=True)
    prices = table("prices")
    if name in prices["usd_per_hour"]:
        return Price(float(prices["usd_per_hour"][name]))
    cpu = table("cpu_instances")["instances"].get(name)
    return Price(None if cpu is None else prices["usd_per_vcpu_hour"][family(name)] * cpu["vcpu"])


def source_note() -> str:
    """Return the source of the price classes, for the last line of a table."""
    prices = table("prices")
    return f"cost class: on-demand, {prices['region']}, as of {prices['read']}; see aws.amazon.com/sagemaker/pricing"
