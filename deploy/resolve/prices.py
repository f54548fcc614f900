"""What an instance costs, roughly: the class of its price, to rank types and to warn, and never a quote.

Amazon's prices differ by region and change; there is no offline source of them (contract sagemaker.md, section 6.3).
The table is dated and says where it is from; a price of the user's own (`instance.price`) takes its place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deploy.data import table
from deploy.resolve.instances import family


@dataclass(frozen=True)
class Price:
    """US dollars an hour.

    Attributes:
        usd: about; None: not known.
        exact: the user's own figure.
    """

    usd: float | None
    exact: bool = False

    @property
    def text(self) -> str:
        """`$2-4/h`; what is known exactly, as it is; `not known`."""
        if self.usd is None:
            return "not known"
        if self.exact:
            return f"${self.usd:g}/h"
        low, high = self.bounds
        return f"under ${high:g}/h" if low == 0 else f"${low:g}-{high:g}/h"

    @property
    def bounds(self) -> tuple[float, float]:
        """The class: two powers of two that the price lies between; the cheapest class begins at 0.

        Raises:
            ValueError: the price is not known.
        """
        if self.usd is None:
            raise ValueError("no price is known")
        if self.usd < 0.5:
            return 0, 0.5
        low = 2.0 ** math.floor(math.log2(self.usd))
        return low, low * 2

    @property
    def rank(self) -> float:
        """To sort by: what is not known comes last, so that it is never taken for cheap."""
        return math.inf if self.usd is None else self.usd


def price_of(name: str, own: float | None = None) -> Price:
    """Of one instance. CPU types are priced by their vCPUs, as AWS does within a family.

    Args:
        own: the user's figure, which beats the table's.
    """
    if own is not None:
        return Price(own, exact=True)
    prices = table("prices")
    if name in prices["usd_per_hour"]:
        return Price(float(prices["usd_per_hour"][name]))
    cpu = table("cpu_instances")["instances"].get(name)
    return Price(None if cpu is None else prices["usd_per_vcpu_hour"][family(name)] * cpu["vcpu"])


def dated() -> str:
    """Where the classes are from, for the last line of a table."""
    prices = table("prices")
    return f"cost class: on-demand, {prices['region']}, as of {prices['read']}; see aws.amazon.com/sagemaker/pricing"
