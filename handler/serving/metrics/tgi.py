"""The metrics of Text Generation Inference that autoscalers read, with its types, units and buckets.

Sources: docs/source/reference/metrics.md and router/src/server.rs of huggingface/text-generation-inference 3.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from handler.serving.metrics.histogram import Histogram

_DURATIONS = tuple(0.0001 * 1.5**power for power in range(1, 36))  # seconds


class TgiMetrics:
    def __init__(self, registry: CollectorRegistry, queued: Callable[[], int], active: Callable[[], int]) -> None:
        self._num_opened = 0
        self._num_ok = 0
        Gauge("tgi_queue_size", "Current queue size", registry=registry).set_function(queued)
        Gauge("tgi_batch_current_size", "Current batch size", registry=registry).set_function(active)
        self._duration = Histogram(
            "tgi_request_duration", "Seconds that a successful request took", _DURATIONS, registry
        )

    def count_opened(self) -> None:
        self._num_opened += 1

    def count_success(self, seconds: float) -> None:
        self._num_ok += 1
        self._duration.observe(seconds)

    def counters(self) -> bytes:
        """Render the counters: their names lack `_total`, which prometheus_client would add."""
        values = (
            ("tgi_request_count", "Total number of requests", self._num_opened),
            ("tgi_request_success", "Number of successful requests", self._num_ok),
        )
        lines = [f"# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}\n" for name, help, value in values]
        return "".join(lines).encode()
