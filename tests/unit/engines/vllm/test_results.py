"""What vLLM's core says, as columns and outputs; needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from handler.core.values import Extras, Finish
from handler.engines.base import Output, Step
from handler.engines.vllm.results import BeamToken, Pending, Results


def results(*pending: Pending) -> Results:
    """Requests named by their keys."""
    made = Results()
    for each in pending:
        made.next = each
        made.add_request(SimpleNamespace(request_id=str(each.key)))
    return made


def said(name: str, *ids: int, finish: str | None = None, scores: Any = None, events: Any = None) -> Any:
    return SimpleNamespace(
        events=events,
        request_id=name,
        new_token_ids=list(ids),
        finish_reason=finish,
        new_logprobs=scores,
        new_prompt_logprobs_tensors=None,
    )


def scores(*rows: list[tuple[int, float]]) -> Any:
    """For each token: itself, then the most likely ones."""
    return SimpleNamespace(
        logprob_token_ids=numpy.array([[id for id, _ in row] for row in rows]),
        logprobs=numpy.array([[score for _, score in row] for row in rows]),
    )


def test_a_token_each_is_three_columns() -> None:
    made = results(Pending(1), Pending(2))
    step, beams = made.read([said("1", 7), said("2", 8, scores=scores([(8, -0.5)]))])
    assert (step, beams) == (Step([1, 2], [7, 8], [None, -0.5], []), [])
    assert set(made.pending) == {"1", "2"}


def test_preemptions_are_counted_also_of_what_was_cancelled() -> None:
    queued, scheduled, preempted = (SimpleNamespace(type=number) for number in (1, 2, 3))
    made = results(Pending(1))
    made.read([said("1", 7, events=[queued, scheduled]), said("9", 7, events=[preempted, scheduled, preempted])])
    made.read([said("1", 7, events=[preempted])])
    assert made.num_preemptions == 3


def test_what_was_cancelled_is_passed_over() -> None:
    made = results(Pending(1), Pending(2))
    assert made.abort_requests(["1", "9"], internal=True) == ["1"]
    step, _ = made.read([said("1", 7), said("2", 8)])
    assert (step.keys, step.ids) == ([2], [8])


def test_several_tokens_and_ends_are_outputs_of_their_own() -> None:
    made = results(Pending(1), Pending(2), Pending(3, stops=frozenset({5})), Pending(4))
    step, _ = made.read(
        [said("1", 7, 8), said("2", 9, finish="length"), said("3", 5, finish="stop"), said("4", 6, finish="stop")]
    )
    assert step.keys == []
    assert [(output.key, list(output.ids), output.finish) for output in step.others] == [
        (1, [7, 8], None),
        (2, [9], Finish.LENGTH),
        (3, [5], Finish.STOP),
        (4, [6], Finish.EOS),
    ]
    assert set(made.pending) == {"1"}


def test_alternatives_and_the_prompts_scores_come_with_the_token() -> None:
    made = results(Pending(1, num_tops=2, prompt_logprobs=[None], num_prompt_tops=1))
    part = said("1")  # of a long prompt
    part.new_prompt_logprobs_tensors = scores([(2, -0.25), (2, -0.25)])
    token = said("1", 7, scores=scores([(7, -2.0), (3, -0.5), (4, -1.0)]))
    token.new_prompt_logprobs_tensors = scores([(5, -0.75), (6, -0.5)])
    assert made.read([part])[0].others == []
    step, _ = made.read([token])
    assert step.others == [
        Output(
            1,
            [7],
            [-2.0],
            None,
            prompt_logprobs=[None, -0.25, -0.75],
            tops=[[(3, -0.5), (4, -1.0)]],
            prompt_tops=[(), [(2, -0.25)], [(6, -0.5)]],
        )
    ]


def test_the_prompts_scores_come_without_alternatives() -> None:
    made = results(Pending(1, prompt_logprobs=[None]))
    token = said("1", 7)
    token.new_prompt_logprobs_tensors = scores([(5, -0.75)])
    (output,) = made.read([token])[0].others
    assert (output.prompt_logprobs, output.prompt_tops) == ([None, -0.75], None)
    assert made.read([said("1", 8)])[0].keys == [1]  # once


def test_a_beams_token_comes_when_its_request_ends() -> None:
    beam = Pending(1, num_tops=2, beam=0)
    made = results(beam)
    step, beams = made.read([said("1", 7, finish="length", scores=scores([(7, -0.5), (7, -0.5), (4, -1.0)]))])
    assert step == Step([], [], [], [])
    assert beams == [BeamToken(beam, [(7, -0.5), (4, -1.0)], None)]


def test_an_end_that_is_none_is_an_error_of_that_request() -> None:
    step, _ = results(Pending(1)).read([said("1", finish="error")])
    (output,) = step.others
    assert output.finish is Finish.ERROR
    assert "vLLM ended it as error" in (output.error or "")


def test_scores_that_are_no_numbers_end_the_engine() -> None:
    with pytest.raises(RuntimeError, match="no longer numbers"):
        results(Pending(1)).read([said("1", 7, scores=scores([(7, float("nan"))]))])


def test_what_was_in_the_prefix_cache_comes_once_with_the_first_token() -> None:
    made = results(Pending(1), Pending(2), Pending(3), Pending(4, begun=True))
    newer, older, none, later = (said(name, 7) for name in "1234")
    newer.prefill_stats = later.prefill_stats = SimpleNamespace(num_cached_tokens=16)
    older.num_cached_tokens = 32
    none.prefill_stats = SimpleNamespace(num_cached_tokens=0)
    step, _ = made.read([newer, older, none, later])
    assert step.keys == [3, 4]
    assert [(output.key, output.ids, output.extras) for output in step.others] == [
        (1, [7], Extras(num_cached_tokens=16)),
        (2, [7], Extras(num_cached_tokens=32)),
    ]
    assert made.read([newer, older])[0] == Step([1, 2], [7, 7], [None, None], [])
