"""/metrics: what Prometheus' own parser reads of it, by our names, vLLM's and TGI's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from handler.engines.base import EngineRequest, EngineStatistics
from handler.engines.echo import engine as echo
from handler.engines.process import engine_process
from handler.serving.metrics.prometheus import REPLICA_FAMILIES
from tests.adapter_files import write_adapter
from tests.app.server import AppServer, serve
from tests.parameter_matrix import section
from tests.servers import http, wait_for

OURS = {
    "lmi_requests": "counter",
    "lmi_prompt_tokens": "counter",
    "lmi_generated_tokens": "counter",
    "lmi_engine_restarts": "counter",
    "lmi_engine_ready": "gauge",
    "lmi_queued_requests": "gauge",
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
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_success": "counter",
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
    "tgi_request_duration": "histogram",
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


def test_the_document_lists_every_metric() -> None:
    documented = re.findall(r"`((?:lmi_|vllm:|tgi_)\w+)", section("README.md#metrics"))
    names = [
        f"{name}_total" if kind == "counter" else name
        for name, kind in {**OURS, **VLLM, **REPORTED, **ADAPTERS}.items()
    ]
    for kind, name, *_ in REPLICA_FAMILIES:
        names.append(f"lmi_replica_{name}_total" if kind is CounterMetricFamily else f"lmi_replica_{name}")
    captured = "lmi_captured_requests_total"  # tests/app/test_captured_requests.py
    assert sorted(documented) == sorted([*names, captured, *TGI])


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    with serve("--engine", "echo", *NAMED, "-o", "option.tgi_metrics=true") as server:
        yield server


def test_every_metric_has_its_type(server: AppServer) -> None:
    assert types(scrape(server)) == OURS | VLLM | TGI


def test_an_engine_that_reports_nothing_has_none_of_its_metrics_and_tgis_are_an_option() -> None:
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
    assert grown("tgi_request_count_total") == 2  # the parser adds the suffix
    assert grown("tgi_request_success_total") == grown("tgi_request_duration_count") == 1
    assert server.metric("tgi_request_count") == value(after, "tgi_request_count_total")


def test_a_request_that_ends_by_itself_or_is_given_up_counts_by_its_reason(server: AppServer) -> None:
    def count(reason: str) -> float:
        return value(scrape(server), "vllm:request_success_total", finished_reason=reason)

    stopped, aborted = count("stop"), count("abort")
    assert server.post({"inputs": "a b c", "parameters": {"stop": ["b"], "max_new_tokens": 9}}).status_code == 200
    assert count("stop") == stopped + 1
    long = {"inputs": "a", "stream": True, "parameters": {"max_new_tokens": 1_000_000}}
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


class Reporter(echo.Echo):
    """An echo engine that says of two requests that one waits; each takes a quarter of the cache, and hits 3 of 8."""

    num_added = 0

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        self.num_added += 1

    def statistics(self) -> EngineStatistics:
        busy = len(self._active)
        return EngineStatistics(int(busy > 1), busy / 4, 8 * self.num_added, 3 * self.num_added, self.num_added)


def test_what_the_engine_reports_is_exported_while_it_works_and_when_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
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
