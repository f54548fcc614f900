"""What is read of a result that grows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from handler.core.values import Extras, Finish
from handler.engines.base import Step
from handler.engines.trtllm.engine import RequestOptions, RunningRequest
from tests.one_test import in_one_test


def running(ids: list[int], *, finish: str | None = None, logprobs: Any = None, **asked: Any) -> RunningRequest:
    output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=finish, stop_reason=None)
    return RunningRequest(7, SimpleNamespace(outputs=[output], context_logits=None), RequestOptions([1, 2], **asked))


def logprobs(*values: tuple[int, float]) -> list[dict[int, Any]]:
    return [{id: SimpleNamespace(logprob=value)} for id, value in values]


def test_one_token_more_goes_into_the_columns() -> None:
    found, step = running([5], logprobs=logprobs((5, -0.5))), Step([], [], [], [])
    assert found.one_token(step)
    assert not found.one_token(step)  # nothing new
    assert found.outputs() == []
    output = found.result.outputs[0]
    output.token_ids, output.logprobs = [5, 6], logprobs((5, -0.5), (6, -0.25))
    assert found.one_token(step)
    assert step == Step([7, 7], [5, 6], [-0.5, -0.25], [])


def test_a_token_without_a_log_probability_has_none() -> None:
    step = Step([], [], [], [])
    assert running([5], logprobs=[]).one_token(step)
    assert running([5], logprobs=None).one_token(step)
    assert step.logprobs == [None, None]


@in_one_test(
    "other",
    [
        running([5, 6]),
        running([]),
        running([5], finish="stop"),
        running([5], tops=2, logprobs=logprobs((5, -0.5))),
        running([5], own_stops=frozenset({5})),
        running([5], prompt_logprobs=True),
        running([5], context_logits=True),
        running([5], generation_logits=True),
        running([5], width=2),
    ],
)
def test_all_else_does_not(other: RunningRequest) -> None:
    step = Step([], [], [], [])
    assert not other.one_token(step)
    assert step == Step([], [], [], [])


def test_what_has_ended_without_a_reason_or_cannot_be_read_is_an_error() -> None:
    ended, empty, strange = running([5]), running([5]), running([5], logprobs=3)
    ended.ended = True
    empty.result.outputs = []
    for broken in (ended, empty, strange):
        step = Step([], [], [], [])
        assert not broken.one_token(step)
        (output,) = broken.outputs()
        assert (output.finish, step.ids) == (Finish.ERROR, [])
        assert output.error


def test_what_was_in_the_prefix_cache_comes_once_with_the_first_token() -> None:
    found, step = running([5]), Step([], [], [], [])
    found.result.cached_tokens = 32
    assert not found.one_token(step)
    (output,) = found.outputs()
    assert (output.ids, output.extras) == ([5], Extras(num_cached_tokens=32))
    found.result.outputs[0].token_ids = [5, 6]
    assert found.one_token(step)
    assert step.ids == [6]


def test_an_answer_that_goes_on_tells_nothing_of_the_prefix_cache() -> None:
    found, step = running([5], goes_on=True), Step([], [], [], [])
    found.result.cached_tokens = 32
    assert found.one_token(step)
