"""Metrics of Text Generation Inference that autoscalers read, with its types, units and buckets.

Sources: docs/source/reference/metrics.md and router/src/server.rs of huggingface/text-generation-inference 3.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable
from operator import truediv

from prometheus_client import CollectorRegistry, Gauge

from handler.serving.metrics.ended import EndedRequest
from handler.serving.metrics.families import histograms
from handler.serving.metrics.vllm import TOKENS

_DURATIONS = tuple(0.0001 * 1.5**power for power in range(1, 36))  # seconds
_TGI = (
    ("duration", "Duration of successful requests, in seconds", _DURATIONS),
    ("validation_duration", "Seconds from a request's acceptance to the check of its prompt's length", _DURATIONS),
    ("queue_duration", "Seconds in the queue", _DURATIONS),
    ("inference_duration", "Seconds in the engine", _DURATIONS),
    ("mean_time_per_token_duration", "Seconds in the engine per generated token", _DURATIONS),
    ("generated_tokens", "Generated tokens per request", TOKENS),
    ("input_length", "Prompt tokens per request", TOKENS),
    ("max_new_tokens", "Maximum number of new tokens per request", TOKENS),
)
_TGI_ERRORS = {
    **dict.fromkeys(("overloaded", "unavailable"), "overloaded"),
    "refused": "validation",
    "failed": "generation",
    "cancelled": "dropped",
}
"""Value of TGI's label `err`, by outcome."""


class TgiMetrics:
    def __init__(self, registry: CollectorRegistry, queued: Callable[[], int], active: Callable[[], int]) -> None:
        self._num_ok = 0
        self._failed: Counts[str] = Counts()
        Gauge("tgi_queue_size", "Current queue size", registry=registry).set_function(queued)
        Gauge("tgi_batch_current_size", "Current batch size", registry=registry).set_function(active)
        self._others = histograms("tgi_request_", registry, {}, _TGI)

    def count(self, requests: Iterable[EndedRequest]) -> None:
        """Count requests that have ended, if TGI would have counted them at their start."""
        opened = [request for request in requests if request.opened]
        self._failed.update(_TGI_ERRORS[request.outcome] for request in opened if request.outcome != "ok")
        done = [request for request in opened if request.outcome == "ok" and request.queue is not None]
        self._num_ok += len(done)
        histograms, num_per_request = self._others, [max(1, request.num_tokens) for request in done]
        inferences = [request.total - request.started for request in done]
        histograms["duration"].observe_all([request.total for request in done])
        histograms["validation_duration"].observe_all([request.started - (request.queue or 0.0) for request in done])
        histograms["queue_duration"].observe_all([request.queue or 0.0 for request in done])
        histograms["inference_duration"].observe_all(inferences)
        histograms["mean_time_per_token_duration"].observe_all(map(truediv, inferences, num_per_request))
        histograms["generated_tokens"].observe_all([request.num_tokens for request in done])
        histograms["input_length"].observe_all([request.num_prompt_tokens for request in done])
        histograms["max_new_tokens"].observe_all([limit for request in done for _, limit in request.limits])

    def counters(self, num_opened: int) -> bytes:
        """Return the counters as text. With prometheus_client, their names would end with `_total`, unlike TGI's.

        Args:
            num_opened: number of requests that TGI would have counted at their start.
        """
        values = (
            ("tgi_request_count", "Total number of requests", num_opened),
            ("tgi_request_success", "Number of successful requests", self._num_ok),
        )
        lines = [f"# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}\n" for name, help, value in values]
        name = "tgi_request_failure"
        lines.append(f"# HELP {name} Number of failed requests\n# TYPE {name} counter\n")
        lines += [f'{name}{{err="{err}"}} {self._failed[err]}\n' for err in sorted({*_TGI_ERRORS.values()})]
        return "".join(lines).encode()
