"""The scrape configuration and the dashboard of examples/monitoring, on Prometheus itself and a live server."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from handler.engines.echo import engine as echo
from tests.app.server import AppServer, serve
from tests.app.serving.test_metrics import ASK, Reporter, dashboard_queries
from tests.monitoring.prometheus import Prometheus, programs, prometheus
from tests.servers import http, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
VARIABLES = {"$__rate_interval": "5s", "$instance": ".+"}
"""Grafana's, and their values here."""


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(echo, "load", Reporter)
        options = ("option.echo_tokens_per_second=100", "option.tgi_metrics=true")
        with serve("--engine", "echo", *(part for option in options for part in ("-o", option))) as server:
            yield server


@pytest.fixture(scope="module")
def scraper(server: AppServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """The example's configuration, but for the server's port, and more often."""
    config = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "200ms"
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{server.port}"]
    directory = tmp_path_factory.mktemp("prometheus")
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    with prometheus(path, directory) as found:
        yield found


def test_the_configuration_is_valid() -> None:
    check = [programs() / "promtool", "check", "config", str(EXAMPLES / "prometheus.yml")]
    done = subprocess.run(check, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def test_prometheus_takes_all_metrics(server: AppServer, scraper: Prometheus) -> None:
    wait_for(lambda: scraper.query('up{job="lmi"} == 1'), 20, "the server is not scraped")
    lines = http.get(server.url + "/metrics").text.splitlines()
    names = {line.split("{")[0].split(" ")[0] for line in lines if line and not line.startswith("#")}
    assert {"lmi_requests_total", "vllm:kv_cache_usage_perc", "tgi_request_count"} <= names
    for name in names:
        assert scraper.query(name), name


@pytest.mark.parametrize("query", dashboard_queries())
def test_every_query_of_the_dashboard_has_a_value(server: AppServer, scraper: Prometheus, query: str) -> None:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query

    def has_values() -> bool:
        assert server.post(ASK).status_code == 200
        values = [float(series["value"][1]) for series in scraper.query(query)]
        return bool(values) and all(math.isfinite(value) for value in values)

    wait_for(has_values, 20, f"no value of {query}")
