"""Lines of stdout that DJL Serving reads as metrics, for its Prometheus text (`SERVING_PROMETHEUS=true`)."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, TextIO

from handler.serving.metrics.tracing import RequestRecord

if TYPE_CHECKING:
    from handler.djl.wire import DjlVersion

log = logging.getLogger("handler.djl")

_UNFIT = re.compile(r"[^\w ./-]", re.ASCII)
"""What a label's value cannot have: the line's own marks, and what Java's pattern does not take."""


class MetricLines:
    """Writes the figures of each request that has ended (`option.djl_metrics`).

    Tokens are counters. Times are histograms in seconds; before DJL Serving 0.29, gauges of the last value.

    Args:
        model_name: the label `Model`.
        stream: by default stdout, which Java reads.
    """

    def __init__(self, model_name: str, version: DjlVersion, stream: TextIO | None = None) -> None:
        self._label = f"|#Model:{_UNFIT.sub('_', model_name)}"
        self._histogram = "|h" if version.metric_types else ""
        self._stream = stream or sys.stdout

    def write(self, request: RequestRecord) -> None:
        """Write a request's lines at once: other processes have the same stdout."""
        tokens = {"LmiPromptTokens": request.num_prompt_tokens, "LmiGeneratedTokens": request.num_tokens}
        lines = [f"{name}.Count:{count}{self._label}" for name, count in tokens.items() if count]
        if request.num_tokens:
            times = {"LmiTimeToFirstTokenSeconds": request.first, "LmiEngineQueueTimeSeconds": request.queue}
            # Java knows no seconds, and loses a metric with a unit that it does not know.
            lines += [f"{name}.None:{value:.6f}{self._label}{self._histogram}" for name, value in times.items()]
        try:
            self._stream.write("".join(f"[METRICS]{line}\n" for line in lines))
            self._stream.flush()
        except (OSError, ValueError) as error:  # a request must not fail for it
            log.warning("no metrics for DJL Serving: stdout: %s", error)
