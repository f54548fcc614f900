"""OpenTelemetry: one span a request, exported by OTLP. It is made when the request has ended, off the tokens' path."""

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
_NAME = "llm_request"  # as vLLM's
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
"""OTLP's protocols, by their names in OTEL_EXPORTER_OTLP_PROTOCOL."""

_EXTRA = "lmi-handler[tracing]"


class RequestRecord(NamedTuple):
    """The record of a request that has ended; times in seconds, 0 if there was none.

    Attributes:
        headers: the request's, names in lower case; `traceparent` and `tracestate` name the parent span.
        outcome: ok, refused, overloaded, unavailable, failed or cancelled.
        finish: why the last sequence ended; "" if none has.
        error: "" for none.
        queue: time from the tokenized prompt to the engine.
        first: time to the first token.
        total: time to the end.
    """

    id: str
    headers: Mapping[str, str]
    outcome: str
    finish: str
    error: str
    num_prompt_tokens: int
    num_tokens: int
    queue: float
    first: float
    total: float


class Tracer:
    """Sends spans in batches from a thread of its own; the SDK reads its other settings from `OTEL_*` itself.

    Args:
        exporter: OpenTelemetry's, as `find_exporter` returns it.
        endpoint: its URL; None: the one of OpenTelemetry's own variables.
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
        """Make the span of a request that has just ended."""
        end = time.time_ns()
        context = self._extract(request.headers)
        span = self._tracer.start_span(_NAME, context, self._kind, start_time=end - int(request.total * 1e9))
        if span.is_recording():
            span.set_attributes(self._attributes(request))
            if request.outcome not in ("ok", "cancelled"):
                span.set_status(self._error(request.error))
        span.end(end)

    def _attributes(self, request: RequestRecord) -> dict[str, str | int | float | list[str]]:
        """Return the span's attributes: by OpenTelemetry's conventions for generative AI, and by vLLM's names for the
        times.
        """
        values: dict[str, str | int | float | list[str]] = {
            "gen_ai.request.id": request.id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": request.num_tokens,
            "gen_ai.latency.time_in_queue": request.queue,
            "gen_ai.latency.e2e": request.total,
            "lmi.outcome": request.outcome,
        }
        if request.num_tokens:
            values["gen_ai.latency.time_to_first_token"] = request.first
        if request.finish:
            values["gen_ai.response.finish_reasons"] = [request.finish]
        return values

    def close(self) -> None:
        """Send the remaining spans; a receiver that does not answer must not delay the server's exit."""
        ending = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        ending.start()
        ending.join(_PATIENCE)


def find_exporter(endpoint: str | None) -> Any:
    """Import OpenTelemetry's exporter of the configured protocol; None if nothing asks for traces.

    Args:
        endpoint: `option.otlp_traces_endpoint`.

    Raises:
        ConfigError: the option is set, but a package is missing; or the protocol is not known.
    """
    if endpoint is None and not environment.exports_traces():
        return None
    protocol = environment.otlp_protocol()
    if protocol not in _EXPORTERS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol}: must be {' or '.join(_EXPORTERS)}")
    try:
        importlib.import_module("opentelemetry.sdk.trace.export")
        return importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter
    except ImportError as error:
        if endpoint is not None:
            raise ConfigError(f"option.otlp_traces_endpoint={endpoint}: {error}; {install(_EXTRA)}") from None
        log.warning("OTEL_* ask for traces, but there are none: %s; %s", error, install(_EXTRA))
        return None


def make_tracer(endpoint: str | None, model_name: str) -> Tracer | None:
    """Return a tracer where the option or OpenTelemetry's own variables name a receiver.

    Raises:
        ConfigError: as `find_exporter`.
    """
    exporter = find_exporter(endpoint)
    return None if exporter is None else Tracer(exporter, endpoint, model_name)
