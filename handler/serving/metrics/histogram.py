"""Histograms that one thread counts: prometheus_client's take two locks and look at every bucket for each value."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """A histogram with one set of labels. Values are observed on one thread.

    Args:
        bounds: the upper ones of its buckets but the last, ascending.
        labels: name -> value.
    """

    def __init__(
        self,
        name: str,
        help: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._created = time.time()
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=[*self._labels])
        counts = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        family.add_metric([*self._labels.values()], [*counts], self._sum)
        family.add_sample(f"{self._name}_created", dict(self._labels), self._created)
        yield family
