"""Measure a server from outside: its clients' times, and the CPU time of its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proof.bench.client import Target
from proof.bench.load import Closed
from proof.bench.processes import measure
from systems.base import Sample, Work
from systems.processes import UsedMeter


class Served:
    """See `base.System`.

    Args:
        kind: the dialect in which it is asked.
        core: see `UsedMeter`.
    """

    def __init__(
        self, url: str, pid: int, kind: type[Target], core: Sequence[str], about: Mapping[str, str] | None = None
    ) -> None:
        self.pid = pid
        self.about = about or {}
        self._url, self._kind, self._core = url, kind, core

    def measure(self, work: Work) -> Sample:
        meter = UsedMeter(self.pid, self._core)
        target = work.target(self._kind, self._url)
        results = measure(target, Closed(work.clients, work.rounds), work.processes, began=meter.start)
        used = meter.stop()
        tokens = sum(len(result.arrivals) for result in results)
        seconds = max(result.end for result in results) - min(result.start for result in results)
        return Sample(tokens, seconds, results, used)
