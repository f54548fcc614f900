"""OpenTelemetry: a span a request, as a receiver of OTLP over HTTP gets it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.serving.check import check
from handler.serving.metrics.tracing import make_tracer
from tests.app.server import refused_start, serve
from tests.doubles.http_thread import serving
from tests.servers import http

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "one"}
NOT_SENT = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
ASK = {"inputs": "a b c", "parameters": {"max_new_tokens": 4}}


class Receiver(ThreadingHTTPServer):
    """Takes spans as `/v1/traces` does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.services: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in sent.resource_spans:
            self.server.services.add(values(resource.resource)["service.name"])
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    with serving(server):
        yield server


def values(span: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {attribute.key: plain(attribute.value) for attribute in span.attributes}


def test_each_request_is_a_span_of_its_callers_trace(receiver: Receiver) -> None:
    with serve("--engine", "echo", env={"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.url}) as server:
        assert server.post(ASK, headers=SENT).status_code == 200
        assert server.post(ASK, headers=NOT_SENT).status_code == 200
        assert server.post({"inputs": "a", "parameters": {"top_p": "x"}}).status_code == 424
    answered, refused = receiver.spans  # the end of the server sends what waits
    assert receiver.services == {"lmi"}
    assert (answered.trace_id.hex(), answered.parent_span_id.hex(), answered.name) == (TRACE, PARENT, "llm_request")
    found = values(answered)
    seconds = (answered.end_time_unix_nano - answered.start_time_unix_nano) / 1e9
    assert found.pop("gen_ai.latency.e2e") == pytest.approx(seconds, abs=1e-6)
    assert 0 <= found.pop("gen_ai.latency.time_in_queue") <= found.pop("gen_ai.latency.time_to_first_token") <= seconds
    assert found == {
        "gen_ai.request.id": "one",
        "gen_ai.response.model": "model",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
        "lmi.outcome": "ok",
    }
    assert values(refused)["lmi.outcome"] == "refused"
    assert (refused.status.code, refused.parent_span_id) == (2, b"")
    assert "top_p" in refused.status.message


def test_a_stream_that_its_client_leaves_is_a_span_too(receiver: Receiver) -> None:
    endpoint = f"option.otlp_traces_endpoint={receiver.url}"
    with serve("--engine", "echo", "-o", endpoint, "-o", "option.echo_tokens_per_second=50") as server:
        body = {"inputs": "a", "stream": True, "parameters": {"max_new_tokens": 100_000}}
        with http.stream("POST", server.url + "/invocations", json=body) as answer:
            next(answer.iter_lines())
    (span,) = receiver.spans
    assert values(span)["lmi.outcome"] == "cancelled"
    assert values(span)["gen_ai.usage.output_tokens"] > 0


@pytest.mark.parametrize(
    ("variables", "exports"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_standard_variables_decide(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], exports: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracer = make_tracer(None, "m")
    assert (tracer is not None) == exports
    if tracer is not None:
        tracer.close()


def test_missing_packages_stop_the_start_where_the_option_asks_for_traces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"option.otlp_traces_endpoint=http://x: .*lmi-handler\[tracing\]"):
        make_tracer("http://x", "m")
    overrides = ["option.llm_engine=echo", "option.otlp_traces_endpoint=http://x"]
    with pytest.raises(ConfigError, match=r"lmi-handler\[tracing\]"):
        check(read_config(overrides=overrides, environ={})).check()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert make_tracer(None, "m") is None
    assert "'lmi-handler[tracing]'" in caplog.text


def test_an_unknown_protocol_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json" in refused_start(
        "--engine", "echo", "-o", "option.otlp_traces_endpoint=http://x"
    )
