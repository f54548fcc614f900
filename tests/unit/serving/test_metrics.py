"""Counts and times of requests, the metrics that show them, and the document of an interval for CloudWatch."""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from handler.core.values import Adapter, Finish, Pooling, Request, Sampling
from handler.engines.base import EngineStatistics
from handler.engines.process.replicas import ReplicaReport
from handler.protocols.kernel.dialect import ParsedRequest
from handler.serving.metrics import cloudwatch
from handler.serving.metrics.cloudwatch import MEANS, document, samples
from handler.serving.metrics.gauges import Gauges
from handler.serving.metrics.prometheus import OUTCOMES, Metrics
from handler.serving.metrics.request_stats import RequestStats
from handler.serving.metrics.tracing import RequestRecord, Tracer
from tests.stepped import Clock


def gauges(**others: Any) -> Gauges:
    values: dict[str, Any] = {
        "queued": lambda: 2, "active": lambda: 3, "tokens": lambda: 70, "restarts": lambda: 4,
        "statistics": lambda: None, "replicas": tuple,
    }  # fmt: skip
    return Gauges(**{**values, **others})


def metrics(*, tgi: bool = True, **others: Any) -> Metrics:
    return Metrics("m", gauges(**others), tgi=tgi)


def record(outcome: str = "ok", **others: Any) -> RequestRecord:
    """Tokenized in 1 s, then 2 s in the queue, 3 s to the first token, and 4 s to the eleventh."""
    values: dict[str, Any] = {
        "finish": "stop", "error": "", "num_prompt_tokens": 5, "num_tokens": 11, "queue": 2.0, "first": 6.0,
        "total": 10.0, "started": 3.0,
    }  # fmt: skip
    return RequestRecord("id", {}, outcome, **{**values, **others})


def shown(made: Metrics) -> dict[str, float]:
    """The samples by name, those of several labels with the values of all but the model's name."""
    found = {}
    for name, labels, value in re.findall(r"^(\w[\w:]*)(?:{(.*)})? (\S+)$", made.render().decode(), re.M):
        values = [text for label, text in re.findall(r'(\w+)="(.*?)"', labels) if label != "model_name"]
        found[" ".join([name, *values])] = float(value)
    return found


def bounds(made: Metrics) -> dict[str, list[float]]:
    """The bounds of each histogram."""
    found: dict[str, list[float]] = {}
    for name, bound in re.findall(r'^(\S+)_bucket{.*?le="(.+?)"', made.render().decode(), re.M):
        found.setdefault(name, []).append(float(bound))
    return found


# -- the metrics -------------------------------------------------------------------------------------------------


def test_our_histograms_and_tgis_have_the_bounds_that_alarms_name() -> None:
    found = bounds(metrics())
    seconds = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, float("inf")]
    assert found["lmi_request_duration_seconds"] == found["lmi_time_to_first_token_seconds"] == seconds
    assert found["lmi_time_per_output_token_seconds"] == [
        0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, float("inf"),
    ]  # fmt: skip
    for name in ("", "validation_", "queue_", "inference_", "mean_time_per_token_"):
        of_phase = found[f"tgi_request_{name}duration"]
        assert len(of_phase) == 36
        assert of_phase[:2] == pytest.approx([0.00015, 0.000225])
        assert of_phase[-2] == pytest.approx(0.0001 * 1.5**35)


def test_vllms_histograms_have_the_bounds_that_its_dashboards_name() -> None:
    """Those of vLLM 0.33; those of tokens end at the model's context there."""
    found, infinite = bounds(metrics()), [float("inf")]
    assert found["vllm:time_to_first_token_seconds"] == [
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0, *infinite,
    ]  # fmt: skip
    assert found["vllm:request_params_n"] == [1, 2, 5, 10, 20, *infinite]
    for name in ("inter_token_latency", "request_time_per_output_token"):
        assert found[f"vllm:{name}_seconds"] == [
            0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
            *infinite,
        ]  # fmt: skip
    for name in (
        "request_queue_time", "e2e_request_latency", "request_inference_time", "request_prefill_time",
        "request_decode_time",
    ):  # fmt: skip
        assert found[f"vllm:{name}_seconds"] == [
            0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0, *infinite,
        ]  # fmt: skip
    for name in ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"):
        assert found[f"vllm:{name}"] == [
            1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
            *infinite,
        ]  # fmt: skip


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    made = metrics()
    for seconds in (1.0, 1.01):
        made.count_first(seconds)
    found = shown(made)
    assert [found[f"lmi_time_to_first_token_seconds_bucket {bound}"] for bound in ("0.5", "1.0", "2.5")] == [0, 1, 2]
    assert found["lmi_time_to_first_token_seconds_sum"] == 2.01
    assert found["vllm:time_to_first_token_seconds_sum 0"] == 2.01


def test_a_histogram_says_when_it_began() -> None:
    before = time.time()
    created = shown(metrics())["lmi_request_duration_seconds_created"]
    assert before <= created <= time.time()


def test_each_phase_of_a_request_has_its_seconds() -> None:
    made = metrics()
    requests = [Request("a", Sampling(max_new_tokens=20)), Request("b", pooling=Pooling("embed"))]
    made.count(record(), requests)
    found = shown(made)
    vllm = ("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time")
    assert [found[f"vllm:{name}_seconds_sum 0"] for name in vllm] == [2, 3, 4, 7]
    assert found["vllm:e2e_request_latency_seconds_sum 0"] == found["lmi_request_duration_seconds_sum"] == 10
    assert found["vllm:request_params_n_sum 0"] == 1
    assert found["vllm:prompt_tokens_total 0"] == found["vllm:request_prompt_tokens_sum 0"] == 5
    tgi = ("validation_duration", "queue_duration", "inference_duration", "duration", "generated_tokens")
    assert [found[f"tgi_request_{name}_sum"] for name in tgi] == [1, 2, 7, 10, 11]
    assert found["tgi_request_mean_time_per_token_duration_sum"] == pytest.approx(7 / 11)
    assert (found["tgi_request_input_length_sum"], found["lmi_prompt_tokens_total"]) == (5, 5)
    assert found["lmi_time_per_output_token_seconds_sum"] == pytest.approx(4 / 10)
    for name in ("tgi_request_max_new_tokens", "vllm:request_params_max_tokens"):
        label = " 0" * name.startswith("vllm")
        assert (found[f"{name}_count{label}"], found[f"{name}_sum{label}"]) == (1, 20), "of the generated one alone"


def test_a_single_token_has_no_time_between_tokens() -> None:
    made = metrics()
    made.count(record(num_tokens=1), [Request("")])
    made.count(record(num_tokens=0, first=0.0), [Request("")])
    found = shown(made)
    for name in ("lmi_time_per_output_token_seconds_count", "vllm:inter_token_latency_seconds_count 0"):
        assert found[name] == 0
    assert found["vllm:request_time_per_output_token_seconds_count 0"] == 0
    assert found["vllm:request_prefill_time_seconds_count 0"] == found["vllm:request_decode_time_seconds_count 0"] == 1
    assert found["tgi_request_mean_time_per_token_duration_sum"] == 7 + 7, "of none, the whole time"
    made.count(record(num_tokens=2), [Request("")])
    found = shown(made)
    assert found["lmi_time_per_output_token_seconds_sum"] == found["vllm:inter_token_latency_seconds_sum 0"] == 4


def test_the_tokens_after_the_first_of_all_sequences_are_counted() -> None:
    made = metrics()
    made.count(record(num_tokens=12), [Request("", Sampling(n=3)), Request("")])
    found = shown(made)
    assert found["vllm:inter_token_latency_seconds_count 0"] == 8
    assert found["vllm:inter_token_latency_seconds_sum 0"] == pytest.approx(4 * 4)
    assert found["vllm:request_time_per_output_token_seconds_sum 0"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("outcome", "finish", "reason", "failure"),
    [
        ("ok", "stop", "stop", None),
        ("ok", "length", "length", None),
        ("cancelled", "length", "abort", "dropped"),
        ("failed", "", "error", "generation"),
        ("refused", "", "error", "validation"),
        ("overloaded", "", "error", "overloaded"),
        ("unavailable", "", "error", "overloaded"),
    ],
)
def test_each_outcome_has_its_reason_and_failure(outcome: str, finish: str, reason: str, failure: str | None) -> None:
    made = metrics()
    made.count(record(outcome, finish=finish), [Request("")])
    found = shown(made)
    assert {one: found[f"lmi_requests_total {one}"] for one in OUTCOMES} == {one: one == outcome for one in OUTCOMES}
    reasons = ("stop", "length", "abort", "error")
    assert {one: found[f"vllm:request_success_total 0 {one}"] for one in reasons} == {
        one: one == reason for one in reasons
    }
    failures = ("dropped", "generation", "overloaded", "validation")
    assert {one: found[f"tgi_request_failure {one}"] for one in failures} == {one: one == failure for one in failures}
    assert found["tgi_request_success"] == (failure is None)


def test_what_tgi_would_not_count_is_in_no_counter_of_tgis() -> None:
    made = metrics()
    for outcome in ("ok", "failed"):
        made.count(record(outcome), [Request("")], opened=False)
    found = shown(made)
    assert found["tgi_request_success"] == found["tgi_request_failure generation"] == 0
    assert found["tgi_request_count"] == 0
    made.count_opened()
    assert shown(made)["tgi_request_count"] == 1


def test_what_needed_no_engine_counts_by_its_outcome_alone() -> None:
    made = metrics()
    made.count(record(queue=None), [Request("")])
    found = shown(made)
    assert found["lmi_requests_total ok"] == 1
    assert found["lmi_request_duration_seconds_count"] == found["tgi_request_success"] == 0
    assert found["vllm:request_success_total 0 stop"] == found["vllm:prompt_tokens_total 0"] == 0
    assert made.ended.durations["success"]["count"] == 0


def test_requests_of_an_adapter_are_counted_until_it_is_gone() -> None:
    names = ["a", "b"]
    made = metrics(adapters=lambda: names)
    for adapter in (Adapter("a", 1, "/a"), Adapter("a", 1, "/a"), None):
        one = Request("", adapter=adapter)
        made.count(record(), [one, one])
    found = shown(made)
    assert [found[name] for name in ("lmi_adapters", "lmi_adapter_requests_total a")] == [2, 2]
    assert found["lmi_adapter_requests_total b"] == 0
    names.remove("a")
    assert "lmi_adapter_requests_total a" not in shown(made)
    names.append("a")
    assert shown(made)["lmi_adapter_requests_total a"] == 0, "another one of this name"
    names.clear()
    assert "lmi_adapters" not in shown(made)


def test_gauges_are_read_when_they_are_shown() -> None:
    found = shown(metrics())
    names = ("lmi_queued_requests", "lmi_active_sequences", "lmi_generated_tokens_total", "lmi_engine_restarts_total")
    assert [found[name] for name in names] == [2, 3, 70, 4]
    assert (found["tgi_queue_size"], found["tgi_batch_current_size"]) == (2, 3)
    running = ("vllm:num_requests_running 0", "vllm:num_requests_waiting 0", "vllm:generation_tokens_total 0")
    assert [found[name] for name in running] == [3, 2, 70]
    assert b"lmi_replica" not in metrics().render()


def test_replicas_are_shown_one_by_one_and_the_queue_with_the_first() -> None:
    reports = (
        ReplicaReport(0, True, 4, 10, 100, 0, EngineStatistics(1, 0.5, 80, 30, 2)),
        ReplicaReport(
            1, False, 2, 20, 200, 1, EngineStatistics(9, 0.25, 70)
        ),  # its statistics are older than its number
        ReplicaReport(2, True, 1, 30, 300, 0, None),
    )
    found = shown(metrics(replicas=lambda: reports))

    def of(name: str) -> list[float | None]:
        return [found.get(f"{name} {number}") for number in range(3)]

    assert of("lmi_replica_ready") == [1, 0, 1]
    assert of("lmi_replica_active_sequences") == [4, 2, 1]
    assert of("lmi_replica_requests_total") == [10, 20, 30]
    assert of("lmi_replica_generated_tokens_total") == [100, 200, 300]
    assert of("lmi_replica_restarts_total") == [0, 1, 0]
    assert of("vllm:num_requests_running") == [3, 0, 1]
    assert of("vllm:num_requests_waiting") == [3, 2, 0]
    assert of("vllm:kv_cache_usage_perc") == [0.5, 0.25, None]
    assert of("vllm:prefix_cache_queries_total") == [80, None, None]
    assert of("vllm:prefix_cache_hits_total") == [30, None, None]
    assert of("vllm:num_preemptions_total") == [2, None, None]


def test_captured_requests_are_written_or_dropped() -> None:
    made = metrics()
    made.show_captured(lambda: (5, 2))
    found = shown(made)
    counts = [found[f"lmi_captured_requests_total {outcome}"] for outcome in ("written", "dropped")]
    assert counts == [5, 2]


def test_tritons_statistics_have_nanoseconds_of_each_phase() -> None:
    made = metrics()
    assert made.ended.last == 0
    before = time.time()
    made.count(record(), [Request("")])
    made.count(record("failed", total=4.0, started=5.0), [Request("")])
    assert made.ended.durations == {
        "success": {"count": 1, "ns": 10**10},
        "fail": {"count": 1, "ns": 4 * 10**9},
        "queue": {"count": 2, "ns": 4 * 10**9},
        "compute_input": {"count": 2, "ns": 0},
        "compute_infer": {"count": 2, "ns": 7 * 10**9},
        "compute_output": {"count": 2, "ns": 0},
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }
    assert round(before * 1000) <= made.ended.last <= round(time.time() * 1000)


def test_whoever_reads_the_metrics_finds_every_request_that_has_ended() -> None:
    made, number = metrics(), 0
    readers: list[Callable[[], float | None]] = [
        lambda: shown(made)["lmi_requests_total ok"],
        lambda: made.registry.get_sample_value("lmi_requests_total", {"outcome": "ok"}),
        lambda: samples(made.registry)["lmi_requests_total{ok}"],
        lambda: shown(made)["tgi_request_success"],
        lambda: made.ended.durations["success"]["count"],
    ]
    for read in readers:
        for several in (1, 600):
            for _ in range(several):
                made.count(record(), [Request("a")])
            number += several
            assert read() == number
    assert shown(made)["lmi_prompt_tokens_total"] == 5 * number


def test_metrics_are_read_on_one_thread_while_requests_end_on_another() -> None:
    made, ended = metrics(), threading.Event()

    def read() -> None:
        while not ended.is_set():
            samples(made.registry)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(3000):
        made.count_first(1.0)
        made.count(record(), [Request("a")])
    ended.set()
    for reader in readers:
        reader.join()
    found = shown(made)
    names = (
        "lmi_requests_total ok",
        "lmi_time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count 0",
    )
    assert [found[name] for name in names] == [3000, 3000, 3000]


def test_what_is_counted_later_keeps_no_request_in_memory() -> None:
    class Headers(dict[str, str]):
        """Headers to which there may be a weak reference."""

    made, headers = metrics(), Headers()
    made.count(record()._replace(headers=headers), [Request("a")])
    gone = weakref.ref(headers)
    del headers
    assert gone() is None


def test_recorders_get_each_record_and_the_tracer_is_closed() -> None:
    tracer, recorder = mock.Mock(), mock.Mock()
    made = Metrics("m", gauges(), tracer=tracer)
    made.recorders.append(recorder)
    made.count(one := record(), [])
    assert (tracer.record.call_args_list, recorder.call_args_list) == ([mock.call(one)], [mock.call(one)])
    made.close()
    tracer.close.assert_called_once_with()
    metrics().close()
    assert b"tgi_" not in metrics(tgi=False).render()


# -- one request -------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class Recorded(Metrics):
    """With the records, and the seconds to first tokens."""

    def __init__(self) -> None:
        super().__init__("m", gauges())
        self.records: list[RequestRecord] = []
        self.firsts: list[float] = []
        self.recorders.append(self.records.append)

    def count_first(self, seconds: float) -> None:
        self.firsts.append(seconds)


def parsed(*requests: Request, ignored: tuple[str, ...] = ()) -> ParsedRequest:
    return ParsedRequest(requests, mock.Mock(), mock.Mock(), ignored)


def test_the_times_of_a_request_begin_when_it_is_accepted(clock: Clock) -> None:
    made = Recorded()
    stats = RequestStats("id", made, headers={"a": "b"})
    clock.now += 50  # its body is received
    stats.note_accepted(parsed(Request("a")))
    clock.now += 1
    stats.note_encoded(parsed(Request("a")))
    clock.now += 2
    stats.note_started()
    clock.now += 3
    stats.num_prompt_tokens, stats.num_tokens = 4, 1
    assert not stats.first_at
    stats.note_first()
    assert made.firsts == [6], "at once"
    clock.now += 4
    assert stats.timing()._asdict() == {
        "validation": 1, "queue": 2, "inference": 7, "num_prompt_tokens": 4, "num_tokens": 1,
    }  # fmt: skip
    assert stats.timing().total == 10
    stats.num_tokens = 5
    stats.close("ok", Finish.LENGTH)
    assert made.records == [
        RequestRecord("id", {"a": "b"}, "ok", "length", "", 4, 5, queue=2, first=6, total=10, started=3)
    ]
    assert made.firsts == [6]


def test_a_first_token_counts_once_though_the_first_delta_has_none(clock: Clock) -> None:
    made = Recorded()
    stats = RequestStats("id", made)
    stats.note_accepted(parsed())
    clock.now += 1
    stats.note_first()
    assert (stats.first_at, made.firsts) == (clock.now, [])
    stats.num_tokens = 3
    clock.now += 1
    stats.close("ok")
    assert made.firsts == [1]
    silent = RequestStats("id", made)
    silent.note_accepted(parsed())
    silent.close("ok")
    assert made.firsts == [1]


def test_a_request_that_is_refused_at_once_has_no_times(clock: Clock) -> None:
    made = Recorded()
    stats = RequestStats("id", made)
    clock.now += 5
    stats.error = "no"
    stats.close("refused")
    assert made.records == [RequestRecord("id", {}, "refused", "", "no", 0, 0, queue=None, first=0, total=0)]
    waiting = RequestStats("id", made)
    waiting.note_accepted(parsed())
    clock.now += 5
    waiting.close("cancelled")
    assert made.records[1] == RequestRecord("id", {}, "cancelled", "", "", 0, 0, queue=None, first=0, total=5)


def test_an_opened_request_is_counted_once() -> None:
    metrics = mock.Mock()
    RequestStats("id", metrics).count_opened()
    metrics.count_opened.assert_called_once_with()


def test_only_an_opened_request_ends_as_one() -> None:
    made = mock.Mock()
    for opens in (False, True):
        stats = RequestStats("id", made)
        if opens:
            stats.count_opened()
        stats.close("ok")
    assert [call.kwargs["opened"] for call in made.count.call_args_list] == [False, True]


def test_a_request_is_a_line_of_the_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "handler.request")
    stats = RequestStats("one", metrics())
    stats.note_accepted(parsed(Request("secret"), ignored=("n" * 70, *map(str, range(40)))))
    clock.now += 0.12345
    stats.num_prompt_tokens, stats.num_tokens = 3, 2
    stats.note_first()
    clock.now += 1
    stats.error = "it broke"
    stats.close("failed")
    names = ["n" * 64, *map(str, range(31))]
    assert caplog.messages == [
        "id=one outcome=failed prompt_tokens=3 tokens=2 first_token_s=0.123 seconds=1.123 "
        f"ignored='{','.join(names)}' error='it broke'"
    ]
    assert vars(caplog.records[0])["fields"] == {
        "request_id": "one", "outcome": "failed", "prompt_tokens": 3, "tokens": 2, "first_token_s": 0.123,
        "seconds": 1.123, "ignored": names, "error": "it broke",
    }  # fmt: skip


def test_a_prompt_is_logged_only_if_the_option_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "handler.request")
    chat = ({"role": "user", "content": "hi"},)
    for log_prompts in (False, True):
        stats = RequestStats("one", metrics(), log_prompts=log_prompts)
        stats.note_accepted(parsed(Request("secret"), Request("", messages=chat)))
        stats.close("ok")
    RequestStats("two", metrics(), log_prompts=True).close("refused")
    first, second, prompts, refused = caplog.messages
    for line in (first, second):
        assert line.startswith("id=one outcome=ok prompt_tokens=0 tokens=0 first_token_s=0.000 seconds=")
    assert prompts == f"id=one prompts={['secret', chat]}"
    assert vars(caplog.records[2])["fields"] == {"request_id": "one"}
    assert refused.startswith("id=two outcome=refused")


# -- CloudWatch --------------------------------------------------------------------------------------------------


def test_a_gauge_without_a_sample_is_omitted() -> None:
    counts = {f"{name}_count": 0.0 for name in MEANS.values()}
    value = document("m", {}, {"lmi_queued_requests": 2.0, **counts}, 1.0)
    assert value["QueuedRequests"] == 2.0
    assert "KVCacheUsage" not in value


def test_an_interval_has_what_counters_have_grown_by() -> None:
    made = metrics()
    before = cloudwatch.samples(made.registry)
    made.count_first(3.0)
    made.count(record(num_tokens=3), [Request("")])
    value = document("m", before, cloudwatch.samples(made.registry), 1.2345)
    assert value["_aws"]["Timestamp"] == 1234
    counts = ("RequestsOk", "RequestsFailed", "PromptTokens", "GeneratedTokens", "EngineRestarts")
    assert [value[name] for name in counts] == [1, 0, 5, 0, 0]
    means = ("TimeToFirstToken", "InterTokenLatency", "RequestDuration")
    assert [value[name] for name in means] == [3, 2, 10]
    gauges = ("EngineReady", "QueuedRequests", "ActiveSequences", "RunningRequests", "WaitingRequests")
    assert [value[name] for name in gauges] == [0, 2, 3, 3, 2]
    again = document("m", cloudwatch.samples(made.registry), before, 1.0)
    assert (again["PromptTokens"], again["RequestsOk"]) == (0, 0), "of counters that begin again"


def test_of_replicas_numbers_are_added_and_fractions_averaged() -> None:
    reports = [
        ReplicaReport(number, True, 4, 0, 0, 1, EngineStatistics(1, usage)) for number, usage in ((0, 0.5), (1, 0.25))
    ]
    found = cloudwatch.samples(metrics(replicas=lambda: reports).registry)
    value = document("m", {}, found, 1.0)
    assert (value["KVCacheUsage"], value["RunningRequests"], value["EngineRestarts"]) == (37.5, 6, 4)
    units = {metric["Name"]: metric["Unit"] for metric in value["_aws"]["CloudWatchMetrics"][0]["Metrics"]}
    assert [units[name] for name in ("KVCacheUsage", "RunningRequests", "EngineReady")] == ["Percent", "Count", "None"]
    assert units["RequestsOk"] == "Count"


def test_a_closed_stream_ends_the_reports(caplog: pytest.LogCaptureFixture) -> None:
    stream = mock.Mock()
    stream.write.side_effect = ValueError("closed")
    with cloudwatch.reporting(metrics().registry, "m", 3600, stream):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "no more metrics are sent to CloudWatch: the output stream cannot be written to"
    ]
    assert stream.write.call_count == 1
    assert stream.flush.call_count == 0


def test_each_report_is_flushed() -> None:
    stream = mock.Mock()
    with cloudwatch.reporting(metrics().registry, "m", 3600, stream):
        pass
    assert [call[0] for call in stream.method_calls] == ["write", "flush"]


# -- traces ------------------------------------------------------------------------------------------------------


def test_a_span_has_the_times_and_counts_of_its_request() -> None:
    exporter = InMemorySpanExporter()
    make = mock.Mock(return_value=exporter)
    tracer = Tracer(make, "http://a", "m")
    before = time.time_ns()
    parent = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    tracer.record(record()._replace(headers=parent))
    tracer.record(record("failed", error="it broke", num_tokens=0, finish="", queue=None))
    tracer.record(record("cancelled"))
    after = time.time_ns()
    tracer.close()
    make.assert_called_once_with(endpoint="http://a")
    done, failed, cancelled = exporter.get_finished_spans()
    assert done.parent is not None
    assert (f"{done.parent.trace_id:x}", done.name) == ("4bf92f3577b34da6a3ce929d0e0e4736", "llm_request")
    assert done.end_time is not None
    assert done.start_time == done.end_time - 10 * 10**9
    assert before <= done.end_time <= after
    found = {
        "gen_ai.request.id": "id",
        "gen_ai.response.model": "m",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 11,
        "gen_ai.latency.time_in_queue": 2.0,
        "gen_ai.latency.time_to_first_token": 6.0,
        "gen_ai.latency.e2e": 10.0,
        "gen_ai.response.finish_reasons": ("stop",),
        "lmi.outcome": "ok",
    }
    assert dict(done.attributes or {}) == found
    assert dict(failed.attributes or {}) == {
        name: value for name, value in found.items() if not name.endswith(("first_token", "finish_reasons"))
    } | {"gen_ai.usage.output_tokens": 0, "gen_ai.latency.time_in_queue": 0.0, "lmi.outcome": "failed"}
    assert (failed.status.is_ok, failed.status.description, failed.parent) == (False, "it broke", None)
    assert done.status.is_ok
    assert cancelled.status.is_ok
