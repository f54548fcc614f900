"""The scrape configuration, the alerts and the dashboard of examples/monitoring, on Prometheus and a live server."""

from __future__ import annotations

import functools
import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from handler.engines.echo import engine as echo
from tests.app.server import AppServer, serve
from tests.app.serving.test_metrics import ASK, Reporter, dashboard_queries
from tests.monitoring import panels
from tests.monitoring.prometheus import Prometheus, programs, prometheus
from tests.servers import http, options, wait_for
from tests.user_files import write_adapter

EXAMPLES = panels.EXAMPLES


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(echo, "load", Reporter)
        fast = options("option.echo_tokens_per_second=100", "option.tgi_metrics=true")
        with serve("--engine", "echo", *fast) as server:
            yield server


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    """Two replicas, and an adapter."""
    directory = tmp_path_factory.mktemp("several")
    write_adapter(directory / "adapters" / "sql")
    (directory / "serving.properties").write_text("option.enable_lora=true\noption.replicas=2\n")
    with serve("--engine", "echo", "--properties", str(directory / "serving.properties")) as server:
        yield server


@pytest.fixture(scope="module")
def scraper(server: AppServer, several: AppServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """The example's configuration, but for the servers' ports, and more often."""
    directory = tmp_path_factory.mktemp("prometheus")
    config = panels.configuration(f"127.0.0.1:{server.port}", "200ms", directory, f"127.0.0.1:{several.port}")
    with prometheus(config, directory) as found:
        yield found


@pytest.mark.parametrize(
    "check",
    [
        ("check", "config", str(EXAMPLES / "prometheus.yml")),
        ("check", "rules", str(EXAMPLES / "alerts.yml")),
        ("test", "rules", str(Path(__file__).with_name("alerts_test.yml"))),
    ],
    ids=" ".join,
)
def test_promtool_finds_no_fault(check: tuple[str, ...]) -> None:
    done = subprocess.run([programs() / "promtool", *check], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case() -> None:
    rules = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"][0]["rules"]
    cases = yaml.safe_load(Path(__file__).with_name("alerts_test.yml").read_text())["tests"]
    fire = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert {rule["alert"] for rule in rules} == fire


def test_prometheus_takes_all_metrics(server: AppServer, scraper: Prometheus) -> None:
    wait_for(lambda: scraper.query('up{job="lmi"} == 1'), 20, "the server is not scraped")
    lines = http.get(server.url + "/metrics").text.splitlines()
    names = {line.split("{")[0].split(" ")[0] for line in lines if line and not line.startswith("#")}
    assert {"lmi_requests_total", "vllm:kv_cache_usage_perc", "tgi_request_count"} <= names
    for name in names:  # the last scrape may be older than what /metrics says now
        wait_for(functools.partial(scraper.query, name), 20, f"{name} is not taken")


@pytest.mark.parametrize("query", dashboard_queries())
def test_every_query_of_the_dashboard_has_a_value(server: AppServer, scraper: Prometheus, query: str) -> None:
    query = panels.expression(query, "5s")
    assert "$" not in query

    def has_values() -> bool:
        assert server.post(ASK).status_code == 200
        values = [float(series["value"][1]) for series in scraper.query(query)]
        return bool(values) and all(math.isfinite(value) for value in values)

    wait_for(has_values, 20, f"no value of {query}")


def test_the_alerts_are_evaluated(scraper: Prometheus) -> None:
    def evaluated() -> bool:
        (group,) = http.get(scraper.url + "/api/v1/rules").json()["data"]["groups"]
        return {rule["health"] for rule in group["rules"]} == {"ok"}

    wait_for(evaluated, 20, "a rule fails")
    assert not scraper.query('ALERTS{alertstate="firing"}')


def test_the_panels_show_the_answers_of_prometheus(server: AppServer, scraper: Prometheus, tmp_path: Path) -> None:
    def pictures(end: float) -> dict[str, bytes]:
        panels.save(scraper, end - 5, end, [panels.Mark(end - 2, "8 clients")], tmp_path, "5s")
        return {path.stem: path.read_bytes() for path in tmp_path.iterdir()}

    def every_row_has_curves() -> bool:
        assert server.post(ASK).status_code == 200
        return all(picture != empty[row] for row, picture in pictures(time.time()).items())

    empty = pictures(time.time() - 1000)
    assert empty.keys() == set(panels.ROWS)
    wait_for(every_row_has_curves, 20, "a row shows nothing")
