"""Requests to vLLM for the log-probabilities of labels, and the requests for alternatives that wait for them."""

from __future__ import annotations

from typing import Any

import pytest

from handler.core.values import Finish, Pooling
from handler.engines.base import EngineRequest, Output, failed
from handler.engines.vllm.engine import Exclusion
from handler.engines.vllm.labels import MAX_IDS, LabelRequest

PROMPT = [5, 6, 7]


def request(*label_ids: int) -> EngineRequest:
    return EngineRequest(1, PROMPT, Pooling("labels", labels=("x",) * len(label_ids), label_ids=label_ids))


def selected(ids: Any, highest: float) -> Output:
    """vLLM's output for selected ids, each of which has its negative as log-probability."""
    return Output(1, (9,), (highest,), Finish.LENGTH, tops=[[(id, -float(id)) for id in ids]])


def vector(output: Output | None) -> list[float]:
    assert output is not None
    assert output.finish is Finish.STOP
    assert output.extras is not None
    return [*(output.extras.vector or ())]


def test_selected_labels_take_one_request() -> None:
    labels = LabelRequest(request(3, 2), None, selects_ids=True)
    assert labels.part.ids == PROMPT
    assert labels.part.arguments() == {
        "max_tokens": 1, "temperature": 0.0, "detokenize": False, "logprob_token_ids": [3, 2],
    }  # fmt: skip
    assert labels.part.pending(1).num_tops == 2
    assert vector(labels.take(selected((3, 2), -0.5))) == [-3.0, -2.0, -0.5]


@pytest.mark.parametrize(
    ("selects_ids", "output"),
    [
        (True, Output(1, finish=Finish.STOP)),
        (True, selected((3,), -0.5)),
        (True, selected((3, 2), -0.5)._replace(logprobs=(None,))),
        (False, Output(1, (4,), (-1.0,), Finish.LENGTH)),
        (False, Output(1, (4,), (-1.0,), Finish.LENGTH, prompt_logprobs=[None])),
    ],
)
def test_an_output_without_a_log_probability_fails_only_its_request(selects_ids: bool, output: Output) -> None:
    failed = LabelRequest(request(3, 2), None, selects_ids=selects_ids).take(output)
    assert failed == Output(1, finish=Finish.ERROR, error="the engine returned no log-probability")


def test_more_labels_than_vllm_allows_take_several_requests() -> None:
    ids = tuple(range(1, MAX_IDS + 3))
    labels = LabelRequest(request(*ids), None, selects_ids=True)
    assert labels.take(selected(labels.part.label_ids, -0.5)) is None
    assert labels.part.label_ids == ids[MAX_IDS:]
    assert vector(labels.take(selected(labels.part.label_ids, -0.5))) == [*(-float(id) for id in ids), -0.5]


def test_scored_labels_take_a_request_each_and_one_for_the_most_likely_token() -> None:
    labels = LabelRequest(request(3, 2), None, selects_ids=False)
    for id, logprob in ((3, -3.5), (2, -2.5)):
        assert labels.part.ids == [*PROMPT, id]
        assert labels.part.arguments()["prompt_logprobs"] == 0
        assert labels.part.pending(1).prompt_logprobs == [None]
        scores = [None, -9.0, -9.0, logprob]
        assert labels.take(Output(1, (4,), (-1.0,), Finish.LENGTH, prompt_logprobs=scores)) is None
    assert labels.part.ids == PROMPT
    assert labels.part.arguments()["logprobs"] == 0
    assert vector(labels.take(Output(1, (4,), (-0.25,), Finish.LENGTH))) == [-3.5, -2.5, -0.25]


@pytest.mark.parametrize("is_selected", [True, False])
def test_an_error_ends_a_request_with_labels(is_selected: bool) -> None:
    error = failed(1, "vLLM ended the request")
    assert LabelRequest(request(3, 2), None, selects_ids=is_selected).take(error) is error


# -- alternatives and selected ids never meet in a batch of the V1 model runner ----------------------------------------


def test_alternatives_wait_for_selected_ids() -> None:
    exclusion, started = Exclusion(), list[int]()
    assert exclusion.enters(1, False)
    assert exclusion.enters(2, False)
    exclusion.enter(3, True, lambda: started.append(3))
    assert exclusion.leave(1) == []
    assert started == []
    assert not exclusion.enters(4, False), "a request for alternatives has waited first"
    assert exclusion.leave(2) == []
    assert started == [3]
    assert not exclusion.enters(4, False)
    exclusion.leave(3)
    assert exclusion.enters(4, False)


def test_a_request_that_leaves_while_it_waits_never_starts() -> None:
    exclusion, started = Exclusion(), list[int]()
    assert exclusion.enters(1, False)
    exclusion.enter(2, True, lambda: started.append(2))
    exclusion.leave(2)
    exclusion.leave(1)
    assert started == []
    assert exclusion.enters(3, False)


def test_a_request_that_cannot_start_is_reported_and_the_next_starts() -> None:
    def refuse() -> None:
        raise ValueError("too long")

    exclusion, started = Exclusion(), list[int]()
    assert exclusion.enters(1, False)
    exclusion.enter(2, True, refuse)
    exclusion.enter(3, True, lambda: started.append(3))
    ((key, error),) = exclusion.leave(1)
    assert (key, str(error), started) == (2, "too long", [3])
    exclusion.leave(3)
    assert exclusion.enters(4, False), "the request that failed does not count"
