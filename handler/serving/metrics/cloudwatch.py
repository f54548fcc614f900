"""Writes log lines in the CloudWatch embedded metric format, which CloudWatch Logs converts to metrics.

These lines replace Prometheus where metrics cannot be scraped. The format is described at docs.aws.amazon.com,
AmazonCloudWatch, "Specification: Embedded metric format". Each line must be a complete log event that starts with the
JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any, TextIO

from prometheus_client import CollectorRegistry

from handler.serving.metrics.prometheus import OUTCOMES

log = logging.getLogger("handler.cloudwatch")

NAMESPACE = "LMI"
_LONGEST_VALUE = 1024  # maximum characters of a dimension's value, all printable ASCII (CloudWatch's API, `Dimension`)

Samples = Mapping[str, float]
"""Values by Prometheus sample name, followed by `{outcome}` if the sample has this label."""

_GAUGES = {
    "EngineReady": ("lmi_engine_ready", "None", 1.0),
    "QueuedRequests": ("lmi_queued_requests", "Count", 1.0),
    "ActiveSequences": ("lmi_active_sequences", "Count", 1.0),
    "RunningRequests": ("vllm:num_requests_running", "Count", 1.0),
    "WaitingRequests": ("vllm:num_requests_waiting", "Count", 1.0),
    "KVCacheUsage": ("vllm:kv_cache_usage_perc", "Percent", 100.0),
}
"""Maps the name of a CloudWatch metric to the sample, the CloudWatch unit, and the factor from sample to unit."""

_COUNTERS = {
    **{f"Requests{outcome.title()}": f"lmi_requests_total{{{outcome}}}" for outcome in OUTCOMES},
    "PromptTokens": "lmi_prompt_tokens_total",
    "GeneratedTokens": "lmi_generated_tokens_total",
    "EngineRestarts": "lmi_engine_restarts_total",
    "PrefixCacheQueries": "vllm:prefix_cache_queries_total",
    "PrefixCacheHits": "vllm:prefix_cache_hits_total",
}
"""Counters, which are reported as their growth during the interval."""

MEANS = {
    "TimeToFirstToken": "lmi_time_to_first_token_seconds",
    "InterTokenLatency": "vllm:inter_token_latency_seconds",
    "RequestDuration": "lmi_request_duration_seconds",
}
"""Metrics that are reported as the mean over the interval, or omitted if the interval has no values."""


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Return the current metrics, summed over the replicas. Fractions are averaged instead."""
    values_by_name: defaultdict[str, list[float]] = defaultdict(list)
    for metric in registry.collect():
        for sample in metric.samples:
            outcome = sample.labels.get("outcome")
            if "le" not in sample.labels:
                values_by_name[f"{sample.name}{{{outcome}}}" if outcome else sample.name].append(sample.value)
    return {name: (fmean if name.endswith("_perc") else sum)(values) for name, values in values_by_name.items()}


def document(model_name: str, before: Samples, now: Samples, at: float) -> dict[str, Any]:
    """Return the JSON object that reports an interval.

    Args:
        before: samples at the start of the interval.
        now: samples at the end of the interval.
        at: time of the end, in seconds since 1970.
    """
    values = _values(before, now)
    directive = {
        "Namespace": NAMESPACE,
        "Dimensions": [["ModelName"]],
        "Metrics": [{"Name": name, "Unit": unit} for name, (_, unit) in values.items()],
    }
    return {
        "_aws": {"Timestamp": int(at * 1000), "CloudWatchMetrics": [directive]},
        "ModelName": model_name.encode("unicode_escape").decode()[:_LONGEST_VALUE],
        **{name: value for name, (value, _) in values.items()},
    }


def _values(before: Samples, now: Samples) -> dict[str, tuple[float, str]]:
    """Return the value and unit of each metric for an interval, by name."""
    values: dict[str, tuple[float, str]] = {}
    for name, (sample, unit, factor) in _GAUGES.items():
        if sample in now:
            values[name] = now[sample] * factor, unit
    for name, sample in _COUNTERS.items():
        if sample in now:
            values[name] = _growth(sample, before, now), "Count"
    for name, histogram in MEANS.items():
        if count := _growth(f"{histogram}_count", before, now):
            values[name] = _growth(f"{histogram}_sum", before, now) / count, "Seconds"
    return values


def _growth(sample: str, before: Samples, now: Samples) -> float:
    """Return the growth of a counter since `before`. A restarted engine starts its counters at 0."""
    grown = now[sample] - before.get(sample, 0.0)
    return grown if grown >= 0 else now[sample]


@contextlib.contextmanager
def reporting(
    registry: CollectorRegistry, model_name: str, interval: float, stream: TextIO | None = None
) -> Iterator[None]:
    """Write a line every `interval` seconds and at the end of the block. A thread writes the lines.

    Args:
        interval: seconds between two lines; 0 disables reporting.
        stream: the stream to write to. The default is stdout, which has no log records with prefixes.
    """
    if not interval:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=_report,
        args=(registry, model_name, interval, stream or sys.stdout, ended),
        name="cloudwatch",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1.0)  # a stream that nobody reads must not delay the server's exit


def _report(
    registry: CollectorRegistry, model_name: str, interval: float, stream: TextIO, ended: threading.Event
) -> None:
    before = samples(registry)
    while True:
        last = ended.wait(interval)
        now = samples(registry)
        try:
            stream.write(json.dumps(document(model_name, before, now, time.time())) + "\n")
            stream.flush()
        except (OSError, ValueError):
            return log.exception("no more metrics are sent to CloudWatch: the output stream cannot be written to")
        if last:
            return
        before = now
