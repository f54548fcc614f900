"""The metrics of decisions, which exist from the first request for a decision on."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter

from handler.serving.metrics.ended import EndedRequest
from handler.serving.metrics.families import histograms

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_QUESTION = ("question_seconds", "Mean seconds for a question of a decision", _SECONDS)


class DecisionMetrics:
    """The numbers of decisions and of their questions, and the time for a question."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter("lmi_decisions", "Requests for decisions", registry=registry)
        self._questions = Counter("lmi_decision_questions", "Questions in requests for decisions", registry=registry)
        (self._seconds,) = histograms("lmi_decision_", registry, {}, (_QUESTION,)).values()

    def count(self, ended: Sequence[EndedRequest]) -> None:
        """Count requests for decisions that reached the engine. Only complete ones have a time for a question."""
        self._decisions.inc(len(ended))
        self._questions.inc(sum([request.num_questions for request in ended]))
        complete = [request for request in ended if request.outcome == "ok"]
        self._seconds.observe_all([request.total / request.num_questions for request in complete])
