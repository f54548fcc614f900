"""OpenTelemetry traces with one span per request, exported with OTLP. A span is created when its request has ended."""

from __future__ import annotations

import functools
import importlib
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from handler.config import environment
from handler.core.errors import ConfigError
from handler.core.package import install

log = logging.getLogger("handler.tracing")

_PATIENCE = 2.0  # seconds
_NAME = "llm_request"  # as in vLLM
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
"""Exporter modules, by the protocol name in OTEL_EXPORTER_OTLP_PROTOCOL."""

_EXTRA = "lmi-handler[tracing]"


class RequestRecord(NamedTuple):
    """The record of a request that has ended.

    Attributes:
        headers: request headers by name in lower case. `traceparent` and `tracestate` name the parent span.
        outcome: ok, refused, overloaded, unavailable, failed or cancelled.
        finish: finish reason of the last sequence, or "" if no sequence has ended.
        error: error message, or "" without an error.
        queue: seconds from the end of tokenizing to the start in the engine, or None if the request never reached the
            engine.
        started: seconds from the acceptance of the request to its start in the engine, or 0 if it never reached the
            engine.
        first: seconds to the first token, or 0 without a token.
        total: seconds to the end of the request, or 0 if it was not accepted.
        num_questions: number of questions to decide, or 0 if the request is for anything else.
    """

    id: str
    headers: Mapping[str, str]
    outcome: str
    finish: str
    error: str
    num_prompt_tokens: int
    num_tokens: int
    queue: float | None
    first: float
    total: float
    started: float = 0.0
    num_questions: int = 0


class Tracer:
    """Sends spans in batches on a separate thread. The OpenTelemetry SDK reads all other settings from the `OTEL_*`
    environment variables.

    Args:
        exporter: the OpenTelemetry exporter class, as returned by `find_exporter`.
        endpoint: the URL of the receiver, or None to read it from the `OTEL_*` variables.
        model_name: name of the model in the spans.
    """

    def __init__(self, exporter: Any, endpoint: str | None, model_name: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "lmi", **OTELResourceDetector().detect().attributes})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("lmi-handler")
        self._extract = TraceContextTextMapPropagator().extract
        self._model_name = model_name
        self._kind = SpanKind.SERVER
        self._error = functools.partial(Status, StatusCode.ERROR)

    def record(self, request: RequestRecord) -> None:
        """Create the span of a request that has just ended."""
        end = time.time_ns()
        context = self._extract(request.headers)
        span = self._tracer.start_span(_NAME, context, self._kind, start_time=end - int(request.total * 1e9))
        if span.is_recording():
            span.set_attributes(self._attributes(request))
            if request.outcome not in ("ok", "cancelled"):
                span.set_status(self._error(request.error))
        span.end(end)

    def _attributes(self, request: RequestRecord) -> dict[str, str | int | float | list[str]]:
        """Return the span attributes, named as in the OpenTelemetry conventions for generative AI or as in vLLM."""
        values: dict[str, str | int | float | list[str]] = {
            "gen_ai.request.id": request.id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": request.num_tokens,
            "gen_ai.latency.time_in_queue": request.queue or 0.0,
            "gen_ai.latency.e2e": request.total,
            "lmi.outcome": request.outcome,
        }
        if request.num_tokens:
            values["gen_ai.latency.time_to_first_token"] = request.first
        if request.finish:
            values["gen_ai.response.finish_reasons"] = [request.finish]
        return values

    def close(self) -> None:
        """Send the remaining spans, within a time limit so that a receiver cannot delay the server's exit."""
        ending = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        ending.start()
        ending.join(_PATIENCE)


def find_exporter(endpoint: str | None) -> Any:
    """Import the OpenTelemetry exporter for the configured protocol, or return None if tracing is not configured.

    Args:
        endpoint: value of `option.otlp_traces_endpoint`.

    Raises:
        ConfigError: the protocol is unknown, or the option is set but a package is missing.
    """
    if endpoint is None and not environment.exports_traces():
        return None
    protocol = environment.otlp_protocol()
    if protocol not in _EXPORTERS:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}: must be "
            f"{' or '.join(_EXPORTERS)}"
        )
    try:
        importlib.import_module("opentelemetry.sdk.trace.export")
        return importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter
    except ImportError as error:
        if endpoint is not None:
            raise ConfigError(f"option.otlp_traces_endpoint={endpoint}: {error}; {install(_EXTRA)}") from None
        log.warning("OTEL_* variables configure traces, but traces cannot be sent: %s; %s", error, install(_EXTRA))
        return None


def make_tracer(endpoint: str | None, model_name: str) -> Tracer | None:
    """Return a tracer, or None if neither the option nor the OpenTelemetry variables set a receiver.

    Raises:
        ConfigError: the protocol is unknown, or the option is set but a package is missing.
    """
    exporter = find_exporter(endpoint)
    return None if exporter is None else Tracer(exporter, endpoint, model_name)
