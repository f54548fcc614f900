"""Rough prices of instances, to rank types and to warn. They are no quote.

Amazon's prices differ by region and change. Online its Pricing API is asked (`price_list.py`); else the table counts,
with its date and source. The user's own price (`instance.price`) overrides both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from deploy.data import table
from deploy.resolve.instances import family


@dataclass(frozen=True)
class Price:
    """A price in US dollars an hour.

    Attributes:
        usd: approximate price; None: unknown.
        exact: whether it is the user's own, or of the Pricing API.
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
    def each(self) -> str:
        """The price of one of several instances, for a sentence."""
        return "price not known" if self.usd is None else f"{self.text} each"

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


@dataclass(frozen=True)
class Prices:
    """What instances cost.

    Attributes:
        listed: US dollars an hour by type, of the Pricing API; None: the table's count.
        region: of `listed`.
        why: why the table counts although AWS was asked; empty: it was not.
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
        """The source of the prices, for the last line of a table."""
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
