"""The lines that DJL Serving reads as metrics."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from handler.config.loader import read_config
from handler.djl.metric_lines import MetricLines
from handler.serving.metrics.tracing import RequestRecord

NEW: Any = SimpleNamespace(metric_types=True)
OLD: Any = SimpleNamespace(metric_types=False)
DONE = RequestRecord("id", {}, "ok", "length", "", 7, 3, 0.25, 1e-7, 2.0)

JAVAS = re.compile(r"([\w\s]+)\.([\w\s]+):([0-9\-,.e]+)(?:\|#([^|]*))?(?:\|(\d+))?(?:\|([cgh]))?")
"""What ai.djl.metric.Metric takes; of a line that does not fit, its reader of stdout makes a null."""

UNITS = {"Count", "None"}
"""Those that we need of ai.djl.metric.Unit; it has microseconds and milliseconds, and no seconds."""


def written(version: Any, *requests: RequestRecord, name: str = "m") -> list[str]:
    stream = io.StringIO()
    lines = MetricLines(name, version, stream)
    for request in requests:
        lines.write(request)
    return stream.getvalue().splitlines()


def test_a_request_has_its_tokens_and_times() -> None:
    assert written(NEW, DONE) == [
        "[METRICS]LmiPromptTokens.Count:7|#Model:m",
        "[METRICS]LmiGeneratedTokens.Count:3|#Model:m",
        "[METRICS]LmiTimeToFirstTokenSeconds.None:0.000000|#Model:m|h",
        "[METRICS]LmiEngineQueueTimeSeconds.None:0.250000|#Model:m|h",
    ]
    assert [line.removesuffix("|h") for line in written(NEW, DONE)] == written(OLD, DONE)


def test_one_without_a_token_has_no_times() -> None:
    assert written(NEW, DONE._replace(num_tokens=0)) == ["[METRICS]LmiPromptTokens.Count:7|#Model:m"]
    assert written(NEW, DONE._replace(num_tokens=0, num_prompt_tokens=0, outcome="refused")) == []


@pytest.mark.parametrize("name", ["owner/model-1.5_b", "a|b,c:d\n#e", "modèle", ""])
def test_java_can_read_every_line(name: str) -> None:
    for version in (NEW, OLD):
        for line in written(version, DONE, name=name):
            found = JAVAS.fullmatch(line.removeprefix("[METRICS]"))
            assert found is not None, line
            assert found[2] in UNITS
            assert "," not in found[4]
            assert found[4].count(":") == 1


def test_a_closed_stdout_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    stream.close()
    MetricLines("m", NEW, stream).write(DONE)
    assert "no metrics for DJL Serving" in caplog.text


def test_the_embedded_server_says_that_it_has_no_use_for_them(tmp_path: Path) -> None:
    for java, told in ((False, 1), (True, 0)):
        config = read_config(overrides=["option.djl_metrics=true"], environ={}, java=java).checked()
        assert sum("option.djl_metrics" in warning for warning in config.warnings) == told
