"""Metrics by Prometheus' own parser, in CloudWatch's embedded format, and OpenTelemetry's spans."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.core.values import Request
from handler.engines.base import EngineRequest, EngineStatistics
from handler.engines.echo import engine as echo
from handler.engines.process import engine_process
from handler.serving.check import check
from handler.serving.metrics.cloudwatch import document, reporting, samples
from handler.serving.metrics.gauges import Gauges
from handler.serving.metrics.prometheus import Metrics
from handler.serving.metrics.tracing import RequestRecord, make_tracer
from tests.app.server import AppServer, refused_start, serve
from tests.doubles.downloads import serving
from tests.one_test import in_one_test
from tests.parameter_matrix import section
from tests.servers import http, wait_for
from tests.user_files import write_adapter

# -- /metrics: what Prometheus' own parser reads of it, by our names, vLLM's and TGI's ---------------------------------


OURS = {
    "lmi_requests": "counter",
    "lmi_prompt_tokens": "counter",
    "lmi_generated_tokens": "counter",
    "lmi_engine_restarts": "counter",
    "lmi_engine_ready": "gauge",
    "lmi_queued_requests": "gauge",
    "lmi_websockets": "gauge",
    "lmi_active_sequences": "gauge",
    "lmi_time_to_first_token_seconds": "histogram",
    "lmi_time_per_output_token_seconds": "histogram",
    "lmi_request_duration_seconds": "histogram",
}
VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
}
DECISIONS = {
    "lmi_decisions": "counter",
    "lmi_decision_questions": "counter",
    "lmi_decision_question_seconds": "histogram",
}
ADAPTERS = {"lmi_adapters": "gauge", "lmi_adapter_requests": "counter"}
REPORTED = {
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
}
TGI = {
    "tgi_queue_size": "gauge",
    "tgi_batch_current_size": "gauge",
    "tgi_request_count": "counter",
    "tgi_request_success": "counter",
    "tgi_request_failure": "counter",
    "tgi_request_duration": "histogram",
    "tgi_request_validation_duration": "histogram",
    "tgi_request_queue_duration": "histogram",
    "tgi_request_inference_duration": "histogram",
    "tgi_request_mean_time_per_token_duration": "histogram",
    "tgi_request_generated_tokens": "histogram",
    "tgi_request_input_length": "histogram",
    "tgi_request_max_new_tokens": "histogram",
}
ENDED = ("stop", "length", "abort", "error")
DASHBOARD = Path(__file__).parents[3] / "examples" / "monitoring" / "grafana-dashboard.json"
NAMED = ("-o", "option.served_model_name=*,llama")
ASK = {"inputs": "a b c", "parameters": {"max_new_tokens": 5}}


def scrape(server: AppServer) -> dict[str, Metric]:
    """The metrics by name, without the times at which they were created."""
    text = http.get(server.url + "/metrics").text
    families = text_string_to_metric_families(text)
    return {family.name: family for family in families if not family.name.endswith("_created")}


def dashboard_queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return sorted({target["expr"] for panel in panels for target in panel["targets"]})


def types(metrics: Mapping[str, Metric]) -> dict[str, str]:
    return {name: metric.type for name, metric in metrics.items()}


def value(metrics: Mapping[str, Metric], sample: str, **labels: str) -> float:
    (found,) = [
        entry.value
        for metric in metrics.values()
        for entry in metric.samples
        if entry.name == sample and labels.items() <= entry.labels.items()
    ]
    return found


def test_the_document_names_metrics_that_exist() -> None:
    documented = re.findall(r"`((?:lmi_|vllm:|tgi_)\w+\b)(?!=)", section("README.md#metrics"))
    names = {f"{name}_total" if kind == "counter" else name for name, kind in {**OURS, **VLLM, **REPORTED}.items()}
    assert documented
    assert {*documented} <= names


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    with serve("--engine", "echo", *NAMED, "-o", "option.tgi_metrics=true") as server:
        yield server


def test_every_metric_has_its_type_and_meaning(server: AppServer) -> None:
    metrics = scrape(server)
    assert types(metrics) == OURS | VLLM | TGI
    assert all(metric.documentation for metric in metrics.values())


def test_a_silent_engine_has_no_engine_metrics_and_tgis_are_an_option() -> None:
    with serve("--engine", "echo") as server:
        assert types(scrape(server)) == OURS | VLLM
        assert value(scrape(server), "vllm:num_requests_running", model_name="model", engine="0") == 0


def test_the_dashboard_names_only_metrics_and_labels_that_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`instance` is Prometheus's own."""
    write_adapter(tmp_path / "adapters" / "sql")
    (tmp_path / "serving.properties").write_text("option.enable_lora=true\n")
    several = ("--engine", "echo", "-o", "option.replicas=2", "--properties", str(tmp_path / "serving.properties"))
    with serve(*several) as server:
        labels = labels_of(server)
    monkeypatch.setattr(echo, "load", Reporter)
    with serve("--engine", "echo") as server:
        wait_for(lambda: "vllm:num_preemptions" in scrape(server), 5, "no report")
        labels |= labels_of(server)
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            named = re.findall(r"([a-z_:]+)\{(\w+)", query)
            assert named
            grouped = [label for group in re.findall(r"by \((.+?)\)", query) for label in group.split(", ")]
            shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            for metric, matched in named:
                assert metric in labels, query
                assert {matched, *grouped, *shown} <= {*labels[metric], "instance"}, query


def labels_of(server: AppServer) -> dict[str, set[str]]:
    """The labels of each sample, by its name."""
    samples = [sample for metric in scrape(server).values() for sample in metric.samples]
    return {sample.name: {*sample.labels} for sample in samples}


def test_vllms_metrics_have_its_labels(server: AppServer) -> None:
    for name, metric in scrape(server).items():
        if name in VLLM:
            assert metric.samples
            for sample in metric.samples:
                labels = {key: text for key, text in sample.labels.items() if key not in ("le", "finished_reason")}
                assert labels == {"model_name": "llama", "engine": "0"}


@pytest.mark.parametrize(("n", "between"), [(1, 4), (2, 8)])
def test_a_request_counts_its_tokens_after_the_first_of_each_sequence(server: AppServer, n: int, between: int) -> None:
    before = scrape(server)
    body = {"prompt": "a b c", "max_tokens": 5, "n": n, "model": "llama"}
    assert server.post(body, "/v1/completions").status_code == 200
    server.post({})  # refused
    after = scrape(server)

    def grown(sample: str, **labels: str) -> float:
        return value(after, sample, **labels) - value(before, sample, **labels)

    assert grown("vllm:time_to_first_token_seconds_count") == 1
    assert grown("vllm:inter_token_latency_seconds_count") == between
    assert grown("vllm:inter_token_latency_seconds_bucket", le="+Inf") == between
    assert grown("vllm:inter_token_latency_seconds_sum") == pytest.approx(
        n * (grown("lmi_request_duration_seconds_sum") - grown("lmi_time_to_first_token_seconds_sum")), abs=0.01
    )
    assert grown("vllm:request_queue_time_seconds_count") == grown("vllm:request_prompt_tokens_count") == 1
    assert (grown("vllm:request_prompt_tokens_sum"), grown("vllm:request_generation_tokens_sum")) == (3, 5 * n)
    reasons = {reason: grown("vllm:request_success_total", finished_reason=reason) for reason in ENDED}
    assert reasons == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert (grown("vllm:prompt_tokens_total"), grown("vllm:generation_tokens_total")) == (3, 5 * n)
    assert (grown("vllm:request_params_n_sum"), grown("vllm:request_params_max_tokens_sum")) == (n, 5)
    assert grown("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(
        grown("vllm:inter_token_latency_seconds_sum") / between
    )
    whole, *parts = (grown(f"vllm:{name}_seconds_sum") for name in (
        "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time",
    ))  # fmt: skip
    assert grown("lmi_request_duration_seconds_sum") == pytest.approx(whole)
    assert 0 < sum(parts) <= whole
    assert sum(parts[1:]) == pytest.approx(grown("vllm:request_inference_time_seconds_sum"))
    assert grown("tgi_request_count_total") == 1  # the parser adds the suffix; `{}` is no request of TGI's form
    assert grown("tgi_request_success_total") == grown("tgi_request_duration_count") == 1
    assert [grown(f"tgi_request_{name}_sum") for name in ("input_length", "generated_tokens", "max_new_tokens")] == [
        3, 5 * n, 5,
    ]  # fmt: skip
    durations = [grown(f"tgi_request_{name}duration_sum") for name in ("validation_", "queue_", "inference_")]
    assert grown("tgi_request_duration_sum") == pytest.approx(sum(durations))
    assert server.metric("tgi_request_count") == value(after, "tgi_request_count_total")


def test_decisions_count_their_questions_from_the_first_one_on(caplog: pytest.LogCaptureFixture) -> None:
    questions = {name: {"type": "noul", "instructions": "Is it?"} for name in ("a", "b", "c")}
    with serve("--engine", "echo") as server:
        assert not DECISIONS.keys() & scrape(server).keys()
        with caplog.at_level("INFO", "handler.request"):
            for number in (3, 1):
                body = {"state": "a b c", "questions": dict([*questions.items()][:number])}
                assert server.post(body, "/v1/systemone").status_code == 200
        server.post({"state": "a"}, "/v1/systemone")  # refused
        after = scrape(server)
    assert DECISIONS.items() <= types(after).items()
    assert value(after, "lmi_decisions_total") == value(after, "lmi_decision_question_seconds_count") == 2
    assert value(after, "lmi_decision_questions_total") == 4
    lines = [record.getMessage() for record in caplog.records]
    assert [" questions=3" in line for line in lines[:2]] == [True, False]
    assert " questions=1" in lines[1]


def test_a_request_that_ends_by_itself_or_is_given_up_counts_by_its_reason(server: AppServer) -> None:
    def count(reason: str) -> float:
        return value(scrape(server), "vllm:request_success_total", finished_reason=reason)

    stopped, aborted = count("stop"), count("abort")
    assert server.post({"inputs": "a b c", "parameters": {"stop": ["b"], "max_new_tokens": 9}}).status_code == 200
    assert count("stop") == stopped + 1
    long = {"inputs": "a", "stream": True, "parameters": {"max_new_tokens": 100_000}}
    with http.stream("POST", server.url + "/invocations", json=long) as answer:
        next(answer.iter_lines())
    wait_for(lambda: count("abort") == aborted + 1, 5, "it is not given up")


def test_requests_count_by_their_adapter(tmp_path: Path) -> None:
    for name in ("sql", "idle"):
        write_adapter(tmp_path / "adapters" / name)
    (tmp_path / "serving.properties").write_text("option.llm_engine=echo\noption.enable_lora=true\n")
    with serve("--properties", str(tmp_path / "serving.properties")) as server:
        assert server.post({**ASK, "adapters": "sql"}).status_code == server.post(ASK).status_code == 200
        metrics = scrape(server)
        assert types(metrics) == OURS | VLLM | ADAPTERS
        counts = [value(metrics, "lmi_adapter_requests_total", adapter=name) for name in ("sql", "idle")]
        assert [value(metrics, "lmi_adapters"), *counts] == [2, 1, 0]
        assert http.request("DELETE", f"{server.url}/adapters/sql").status_code == 200
        assert "sql" not in http.get(server.url + "/metrics").text


def test_requests_in_the_queue_and_in_the_engine() -> None:
    options = ("option.max_rolling_batch_size=1", "option.echo_tokens_per_second=20", "option.tgi_metrics=true")
    body = {"inputs": "a", "parameters": {"max_new_tokens": 10}}
    with (
        serve("--engine", "echo", *(part for option in options for part in ("-o", option))) as server,
        ThreadPoolExecutor() as pool,
    ):
        asked = [pool.submit(server.post, body) for _ in range(2)]
        wait_for(lambda: value(scrape(server), "vllm:num_requests_waiting") == 1, 5, "nobody waits")
        metrics = scrape(server)
        names = ("vllm:num_requests_running", "tgi_batch_current_size", "tgi_queue_size")
        assert [value(metrics, name) for name in names] == [1, 1, 1]
        assert [answer.result().status_code for answer in asked] == [200, 200]


def test_tgis_count_has_the_requests_that_tgi_counts(server: AppServer) -> None:
    """Those whose body has the right form; a wrong value is a failure, and tokenizing counts for chats only."""

    def grown(path: str, body: Any, **more: Any) -> tuple[float, float]:
        before = scrape(server)
        http.post(server.url + path, **({"content": body} if isinstance(body, bytes) else {"json": body}), **more)
        after = scrape(server)
        names = {"tgi_request_count_total": {}, "tgi_request_failure_total": {"err": "validation"}}
        count, failed = (value(after, name, **of) - value(before, name, **of) for name, of in names.items())
        return count, failed

    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert grown("/generate", {"inputs": "a"}) == grown("/v1/chat/completions", {**chat, "max_tokens": 1}) == (1, 0)
    assert grown("/generate", {"inputs": "a", "parameters": {"temperature": -1}}) == (1, 1)
    assert grown("/generate", {"inputs": 7}) == grown("/generate", b"{") == (0, 0)
    assert grown("/tokenize", {"inputs": "a"}) == grown("/detokenize", {"tokens": [1]}) == (0, 0)
    assert grown("/v1/messages/count_tokens", chat) == grown("/v1/responses/input_tokens", {"input": "a"}) == (0, 0)


def test_requests_refused_by_a_full_queue_have_no_duration() -> None:
    slow = ("option.max_rolling_batch_size=1", "option.echo_tokens_per_second=10", "job_queue_size=1")
    options = (*slow, "option.tgi_metrics=true")
    body = {"inputs": "a", "parameters": {"max_new_tokens": 20}}
    with (
        serve("--engine", "echo", *(part for option in options for part in ("-o", option))) as server,
        ThreadPoolExecutor() as pool,
    ):
        asked = [pool.submit(server.post, body)]
        wait_for(lambda: value(scrape(server), "lmi_active_sequences") == 1, 5, "the first has not started")
        asked.append(pool.submit(server.post, body))
        wait_for(lambda: value(scrape(server), "lmi_queued_requests") == 1, 5, "nobody waits")
        assert [server.post(body).status_code for _ in range(7)] == [503] * 7
        assert [answer.result().status_code for answer in asked] == [200, 200]
        assert server.post({"inputs": "a"}, "/tokenize").status_code == 200
        metrics = scrape(server)
    counts = [value(metrics, "lmi_requests_total", outcome=outcome) for outcome in ("ok", "overloaded")]
    assert counts == [3, 7]
    assert [value(metrics, f"tgi_request_{name}_total") for name in ("count", "success")] == [9, 2]
    assert value(metrics, "tgi_request_failure_total", err="overloaded") == 7
    durations = ("lmi_request_duration_seconds", "tgi_request_duration", "vllm:request_queue_time_seconds")
    assert {name: value(metrics, f"{name}_count") for name in durations} == dict.fromkeys(durations, 2)
    assert value(metrics, "lmi_request_duration_seconds_bucket", le="0.25") == 0


class Reporter(echo.Echo):
    """An echo engine that says of two requests that one waits; each takes a quarter of the cache, and hits 3 of 8."""

    num_added = 0

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        self.num_added += 1

    def statistics(self) -> EngineStatistics:
        busy = len(self._active)
        return EngineStatistics(int(busy > 1), busy / 4, 8 * self.num_added, 3 * self.num_added, self.num_added)


def test_engine_metrics_are_exported_while_it_works_and_when_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "load", Reporter)
    monkeypatch.setattr(engine_process, "_REPORT_INTERVAL", 0.0)

    def seen(server: AppServer) -> list[float]:
        metrics = scrape(server)
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total")
        return [value(metrics, f"vllm:{name}") for name in (*names, "num_preemptions_total")]

    with serve("--engine", "echo", "-o", "option.echo_tokens_per_second=100") as server:
        wait_for(lambda: "vllm:kv_cache_usage_perc" in scrape(server), 5, "no report")
        assert types(scrape(server)) == OURS | VLLM | REPORTED
        body = {"inputs": "a", "stream": True, "parameters": {"max_new_tokens": 100_000}}
        with (
            http.stream("POST", server.url + "/invocations", json=body),
            http.stream("POST", server.url + "/invocations", json=body),
        ):
            wait_for(lambda: seen(server) == [1, 1, 0.5, 6, 2], 5, "no report of two requests")
        wait_for(lambda: seen(server) == [0, 0, 0, 6, 2], 5, "no report when the last request was cancelled")


# -- metrics in CloudWatch's embedded metric format: lines of JSON alone, by its specification -------------------------


UNITS = {"Count", "Percent", "Seconds", "None"}


def cloudwatch_check(line: str) -> dict[str, Any]:
    """A line's values; each metric is named once, has a unit, and a number at the root."""
    whole: dict[str, Any] = json.loads(line)
    (directive,) = whole["_aws"]["CloudWatchMetrics"]
    assert directive["Namespace"] == "LMI"
    assert directive["Dimensions"] == [["ModelName"]]
    assert isinstance(whole["_aws"]["Timestamp"], int)
    names = [metric["Name"] for metric in directive["Metrics"]]
    assert {metric["Unit"] for metric in directive["Metrics"]} <= UNITS
    assert set(whole) == {"_aws", "ModelName", *names}
    assert len(set(names)) == len(names) <= 100
    assert all(isinstance(whole[name], int | float) for name in names)
    return whole


def metrics() -> Metrics:
    return Metrics("m", Gauges(lambda: 2, lambda: 1, lambda: 7, lambda: 0, lambda: None, tuple))


def test_a_request_started_at_once_has_a_queue_time_and_an_unsent_has_none() -> None:
    made = metrics()
    made.count(RequestRecord("id", {}, "ok", "", "", 1, 2, queue=0.0, first=8.0, total=9.0), [Request("")])
    made.count(RequestRecord("id", {}, "refused", "", "", 0, 0, queue=None, first=0.0, total=0.0), [Request("")])
    assert samples(made.registry)["vllm:request_queue_time_seconds_count"] == 1


@pytest.mark.parametrize(
    ("outcome", "queue", "counts"),
    [
        ("ok", 0.0, 1),
        ("failed", 0.0, 1),
        ("cancelled", 0.0, 1),
        ("overloaded", 0.0, 0),  # by busy servers at option.base_url
        ("refused", 0.0, 0),
        ("unavailable", 0.0, 0),
        ("overloaded", None, 0),
        ("cancelled", None, 0),
        ("ok", None, 0),  # /tokenize
    ],
)
def test_only_requests_that_the_engine_took_have_a_duration(outcome: str, queue: float | None, counts: int) -> None:
    made = metrics()
    made.count(RequestRecord("id", {}, outcome, "", "", 1, 0, queue=queue, first=0.0, total=2.0), [Request("")])
    found = samples(made.registry)
    names = ("lmi_request_duration_seconds_count", "lmi_request_duration_seconds_sum")
    assert [found[name] for name in names] == [counts, 2.0 * counts]


def test_an_interval_has_the_growth_of_counters_and_its_requests_means() -> None:
    made = metrics()
    made.count_first(8.0)
    made.count(RequestRecord("id", {}, "ok", "", "", 1, 2, queue=0.0, first=8.0, total=9.0), [Request("")])
    before = samples(made.registry)
    assert "TimeToFirstToken" not in cloudwatch_check(json.dumps(document("m", before, before, 1.5)))
    for first in (0.1, 0.3):
        made.count_first(first)
        made.count(RequestRecord("id", {}, "ok", "", "", 4, 11, queue=0.0, first=first, total=first + 1), [Request("")])
    found = cloudwatch_check(json.dumps(document("m", before, samples(made.registry), 1.5)))
    assert found["_aws"]["Timestamp"] == 1500
    assert found["ModelName"] == "m"
    counts = [found[name] for name in ("RequestsOk", "RequestsFailed", "PromptTokens", "GeneratedTokens")]
    assert counts == [2, 0, 8, 0]
    assert (found["QueuedRequests"], found["RunningRequests"]) == (2, 1)
    assert found["TimeToFirstToken"] == pytest.approx(0.2)
    assert found["InterTokenLatency"] == pytest.approx(0.1)
    assert "KVCacheUsage" not in found


@in_one_test("name", ["modèle", "模型", "a\nb", "\x1b[31m", "x" * 2000])
def test_a_dimension_is_one_that_cloudwatch_takes(name: str) -> None:
    made = samples(metrics().registry)
    value = cloudwatch_check(json.dumps(document(name, made, made, 1.5)))["ModelName"]
    assert value.isascii()
    assert value.isprintable()
    assert 1 <= len(value) <= 1024


def test_an_engine_that_was_started_again_counts_from_nothing() -> None:
    own = samples(metrics().registry)
    before, now = ({**own, "vllm:prefix_cache_hits_total": value} for value in (9.0, 2.0))
    assert document("m", before, now, 0)["PrefixCacheHits"] == 2


def test_the_last_interval_is_written_at_the_end_if_the_option_is_set() -> None:
    stream = io.StringIO()
    with reporting(metrics().registry, "m", 3600, stream):
        pass
    cloudwatch_check(stream.getvalue())
    with reporting(CollectorRegistry(), "m", 0, stream=None):
        pass


def test_a_server_writes_its_metrics_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    written = ""

    def tokens() -> float:
        nonlocal written
        written += capsys.readouterr().out
        return math.fsum(cloudwatch_check(line)["GeneratedTokens"] for line in written.splitlines())

    with serve("--engine", "echo", "-o", "option.cloudwatch_metrics_interval=0.1") as server:
        assert server.post(ASK).status_code == 200
        wait_for(lambda: tokens() == 5, 5, "no line has the tokens")


# -- OpenTelemetry: a span a request, as a receiver of OTLP over HTTP gets it ------------------------------------------


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "one"}
NOT_SENT = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
TRACING_ASK = {"inputs": "a b c", "parameters": {"max_new_tokens": 4}}


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
        assert server.post(TRACING_ASK, headers=SENT).status_code == 200
        assert server.post(TRACING_ASK, headers=NOT_SENT).status_code == 200
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
    with pytest.raises(ConfigError, match=r"option.otlp_traces_endpoint=http://x: .*\[tracing\]"):
        make_tracer("http://x", "m")
    overrides = ["option.llm_engine=echo", "option.otlp_traces_endpoint=http://x"]
    with pytest.raises(ConfigError, match=r"\[tracing\]"):
        check(read_config(overrides=overrides, environ={})).check()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert make_tracer(None, "m") is None
    assert "[tracing]" in caplog.text


def test_an_unknown_protocol_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is http/json" in refused_start(
        "--engine", "echo", "-o", "option.otlp_traces_endpoint=http://x"
    )
