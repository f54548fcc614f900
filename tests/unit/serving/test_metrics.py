"""Counts of requests, and the document of an interval for CloudWatch."""

from __future__ import annotations

from unittest import mock

from handler.serving.metrics.cloudwatch import _MEANS, document
from handler.serving.metrics.prometheus import RequestStats


def test_a_gauge_without_a_sample_is_omitted() -> None:
    counts = {f"{name}_count": 0.0 for name in _MEANS.values()}
    value = document("m", {}, {"lmi_queued_requests": 2.0, **counts}, 1.0)
    assert value["QueuedRequests"] == 2.0
    assert "KVCacheUsage" not in value


def test_an_opened_request_is_counted_once() -> None:
    metrics = mock.Mock()
    RequestStats("id", metrics).count_opened()
    metrics.count_opened.assert_called_once_with()
