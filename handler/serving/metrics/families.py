"""Families of Prometheus metrics: a histogram, and metrics whose values are read when they are requested.

`prometheus_client` has histograms too, but an observation there takes a lock, and looks up its labels.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """A histogram with a single set of label values. It is not thread-safe.

    Args:
        bounds: upper bounds of the buckets in ascending order, without the final infinite bound.
        labels: values of the labels by name.
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
        """Add a value to the histogram `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def observe_all(self, values: Iterable[float]) -> None:
        """Add each of several values once."""
        bounds, counts, total = self._bounds, self._counts, self._sum
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self._sum = total

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=[*self._labels])
        counts = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        family.add_metric([*self._labels.values()], [*counts], self._sum)
        family.add_sample(f"{self._name}_created", dict(self._labels), self._created)
        yield family


def histograms(
    prefix: str,
    registry: CollectorRegistry,
    labels: Mapping[str, str],
    rows: Iterable[tuple[str, str, Sequence[float]]],
) -> dict[str, Histogram]:
    """Create histograms from rows that contain a name without the prefix, a help text and the bounds."""
    return {name: Histogram(prefix + name, help, bounds, registry, labels) for name, help, bounds in rows}


Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def labelled(
    kind: Family, name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Create a metric from pairs of label values and metric value."""
    family = kind(name, text, labels=labels)
    for own, value in values:
        family.add_metric(own, value)
    return family
