"""The adapter of vLLM, without vLLM: parameters, results, beams, adapters."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.values import Extras, Finish, Sampling, StructuredOutput
from handler.engines.base import EngineStatistics, Output, Step
from handler.engines.vllm.core import BeamToken, Pending, Results, Statistics, engine_info
from handler.engines.vllm.engine import Beam, BeamSearch, Exclusion, check_weights
from handler.engines.vllm.sampling import SUPPORTS, sampling_arguments, structured_output_arguments
from tests.one_test import in_one_test
from tests.parameter_matrix import FIELD_VALUES

# -- what a request's parameters become as vLLM's, without vLLM --------------------------------------------------------


@pytest.mark.parametrize(("is_cpu", "longest"), [(True, 163.8), (False, 0.0)])
def test_only_on_cpus_is_a_step_as_long_as_its_tokens(
    monkeypatch: pytest.MonkeyPatch, is_cpu: bool, longest: float
) -> None:
    platform = SimpleNamespace(device_name="cpu", is_cpu=lambda: is_cpu)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    engine = SimpleNamespace(
        model_config=SimpleNamespace(dtype="torch.bfloat16", max_model_len=100),
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=8192)),
    )
    assert engine_info(engine, 0.02).longest_step == longest


def test_a_token_is_forbidden_by_its_weight() -> None:
    found = sampling_arguments(Sampling(bad_token_ids=(3,), logit_bias=((3, 5.0), (4, 5.0))))["logit_bias"]
    assert found[4] == 5.0
    assert found[3] < -1e8


def test_greedy_has_no_sampling() -> None:
    found = sampling_arguments(Sampling(temperature=0.5, top_k=3, top_p=0.5, seed=1))
    assert found["temperature"] == 0.0
    assert not {"top_k", "top_p", "min_p", "seed"} & set(found)


@pytest.mark.parametrize(("seed", "theirs"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_every_seed_fits_a_signed_number(seed: int, theirs: int) -> None:
    assert sampling_arguments(Sampling(do_sample=True, seed=seed))["seed"] == theirs


def test_a_nucleus_of_nothing_is_the_most_likely_token() -> None:
    found = sampling_arguments(Sampling(do_sample=True, top_p=0.0, top_k=9))
    assert (found["top_p"], found["top_k"]) == (1.0, 1)


def test_the_rest_of_the_parameters() -> None:
    sampling = Sampling(
        stop_token_ids=(4,), bad_sequences=("x",), logit_bias=((3, -1.0),), prompt_logprobs=True, ignore_eos=True,
        min_new_tokens=2, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, top_logprobs=3,
    )  # fmt: skip
    assert sampling_arguments(sampling) == {
        "max_tokens": 30, "min_tokens": 2, "repetition_penalty": 1.5, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "ignore_eos": True, "logprobs": 3, "detokenize": False, "temperature": 0.0,
        "stop_token_ids": [4], "bad_words": ["x"], "logit_bias": {3: -1.0}, "prompt_logprobs": 0,
    }  # fmt: skip


def test_each_supported_parameter_changes_the_keywords() -> None:
    elsewhere = {"num_beams", "length_penalty", "early_stopping", "prompt_top_logprobs", "cache_salt"}
    base: dict[str, Any] = {"max_new_tokens": 5, "do_sample": True, "logprobs": False}
    plain = sampling_arguments(Sampling(**base))
    for field in SUPPORTS - elsewhere:
        assert sampling_arguments(Sampling(**{**base, field: FIELD_VALUES[field]})) != plain, field


@in_one_test(
    ("structured_output", "theirs"),
    [
        (StructuredOutput("json_schema", '{"type": "object"}'), {"json": '{"type": "object"}'}),
        (StructuredOutput("json_object", ""), {"json_object": True}),
        (StructuredOutput("regex", "a+"), {"regex": "a+"}),
        (StructuredOutput("structural_tag", "{}"), {"structural_tag": "{}"}),
        (StructuredOutput("grammar", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (StructuredOutput("choice", '["a", "b"]'), {"choice": ["a", "b"]}),
    ],
)
def test_guides_become_vllms_structured_outputs(structured_output: StructuredOutput, theirs: dict[str, Any]) -> None:
    assert structured_output_arguments(structured_output) == theirs


# -- what vLLM's core says, as columns and outputs; needs no vLLM ------------------------------------------------------


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
    assert "vLLM ended the request: error" in (output.error or "")


def test_scores_that_are_no_numbers_end_the_engine() -> None:
    with pytest.raises(RuntimeError, match="the model computes NaN"):
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


# -- vLLM's statistics of each step, summed up, without vLLM -----------------------------------------------------------


def stats(waiting: int, usage: float, queries: int, hits: int, **more: Any) -> Any:
    cache = SimpleNamespace(queries=queries, hits=hits)
    return SimpleNamespace(num_waiting_reqs=waiting, kv_cache_usage=usage, prefix_cache_stats=cache, **more)


def test_lookups_add_up_and_the_state_is_the_last_steps() -> None:
    statistics = Statistics()
    assert statistics.report(idle=True) == EngineStatistics()  # disable_log_stats
    statistics.add(stats(3, 0.5, 10, 4))
    statistics.add(stats(1, 0.25, 0, 0))
    statistics.add(stats(1, 0.75, 6, 6, num_skipped_waiting_reqs=2))
    assert statistics.report(idle=False) == EngineStatistics(3, 0.75, 16, 10, 0)


def test_an_engine_without_requests_uses_nothing_whatever_its_last_step() -> None:
    statistics = Statistics()
    statistics.add(stats(1, 0.5, 10, 4))
    assert statistics.report(idle=True, num_preemptions=2) == EngineStatistics(0, 0.0, 10, 4, 2)


# -- beam search against trying everything, over a language of a few tokens --------------------------------------------


EOS = 0
Answer = tuple[tuple[int, ...], float]
Model = Mapping[tuple[int, ...], Sequence[tuple[int, float]]]


def language(seed: int, size: int = 4) -> Model:
    """What may come after every beginning of up to four tokens."""
    draw = random.Random(seed)
    found = {}
    for length in range(5):
        for ids in itertools.product(range(1, size), repeat=length):
            weights = [draw.random() for _ in range(size)]
            ranked = sorted(range(size), key=lambda id: -weights[id])
            found[ids] = [(id, math.log(weights[id] / sum(weights))) for id in ranked]
    return found


def search(model: Model, **sampling: Any) -> list[Beam]:
    found = BeamSearch(Sampling(**sampling), {EOS})
    while not found.advance([model[beam.ids] for beam in found.beams]):
        pass
    return found.best()


def everything(model: Model, length: int) -> list[Answer]:
    """Every answer of up to `length` tokens with its log-probability."""
    found: list[Answer] = []
    open_: list[Answer] = [((), 0.0)]
    for _ in range(length):
        longer: list[Answer] = [((*ids, id), total + logprob) for ids, total in open_ for id, logprob in model[ids]]
        found += [answer for answer in longer if answer[0][-1] == EOS]
        open_ = [answer for answer in longer if answer[0][-1] != EOS]
    return found + open_


@in_one_test("seed", range(8))
@in_one_test("penalty", [0.0, 1.0, 2.0])
def test_beams_wide_enough_for_everything_find_the_best(seed: int, penalty: float) -> None:
    model = language(seed)
    ranked = sorted(everything(model, 4), key=lambda answer: -answer[1] / len(answer[0]) ** penalty)
    found = search(model, num_beams=300, max_new_tokens=4, length_penalty=penalty)
    assert [beam.ids for beam in found[:5]] == [ids for ids, _ in ranked[:5]]
    assert sum(found[0].logprobs) == pytest.approx(ranked[0][1])


def test_as_many_beams_as_asked_for_the_best_first() -> None:
    found = search(language(1), num_beams=3, max_new_tokens=4)
    scores = [beam.score(1.0) for beam in found]
    assert len(found) == 3
    assert scores == sorted(scores, reverse=True)
    assert len({beam.ids for beam in found}) == 3


def test_an_end_token_ends_a_beam_and_the_limit_the_others() -> None:
    model: Model = {(): [(1, -0.1), (EOS, -3.0)], (1,): [(1, -0.1), (EOS, -3.0)]}
    found = search(model, num_beams=2, max_new_tokens=2, length_penalty=0.0)
    assert [(beam.ids, beam.finish) for beam in found] == [((1, 1), Finish.LENGTH), ((EOS,), Finish.EOS)]


def test_a_stop_token_ends_a_beam_as_such() -> None:
    model: Model = {(): [(1, -0.1), (2, -3.0)], (1,): [(2, -0.1), (1, -3.0)]}
    found = search(model, num_beams=2, max_new_tokens=2, stop_token_ids=(2,), length_penalty=0.0)
    assert (found[0].ids, found[0].finish) == ((1, 2), Finish.STOP)


def test_early_stopping_ends_with_the_first_full_set() -> None:
    """Two answers are there after two tokens; going on finds a better one."""
    model = {
        (): [(1, -0.5), (EOS, -0.9), (2, -1.0), (3, -9.0)],
        (1,): [(3, -0.1), (EOS, -3.0)],
        (2,): [(EOS, -0.5), (3, -9.0)],
        (1, 3): [(EOS, -0.1), (3, -9.0)],
        (2, 3): [(EOS, -0.1), (3, -9.0)],
    }
    early = search(model, num_beams=2, max_new_tokens=3, early_stopping=True)
    late = search(model, num_beams=2, max_new_tokens=3)
    assert [beam.ids for beam in early] == [(2, EOS), (EOS,)]
    assert late[0].ids == (1, 3, EOS)


def test_a_search_in_which_everything_ends_has_ended() -> None:
    model: Model = {(): [(1, -0.1), (2, -3.0), (EOS, -4.0)]}
    found = search(model, num_beams=2, max_new_tokens=9, stop_token_ids=(1, 2))
    assert [(beam.ids, beam.finish) for beam in found] == [((1,), Finish.STOP), ((2,), Finish.STOP)]


@in_one_test("seed", range(30))
def test_any_tokens_may_end_a_beam(seed: int) -> None:
    draw = random.Random(seed)
    stops = tuple(id for id in range(6) if draw.random() < 0.7)
    found = search(language(seed, 6), num_beams=draw.choice([2, 3, 5]), max_new_tokens=4, stop_token_ids=stops)
    assert found
    assert all((beam.ids[-1] in stops) == (beam.finish is Finish.STOP) for beam in found if beam.ids[-1] != EOS)


# -- adapter weights ---------------------------------------------------------------------------------------------------
# The scale of a LoRA adapter is a finite number, or vLLM does not get it. Weights: tests/gpu/vllm/test_served.py.


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), "16", [16]])
def test_an_alpha_that_is_no_number_is_refused(tmp_path: Path, alpha: Any) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": alpha}))
    with pytest.raises(ValueError, match="is not a number"):
        check_weights(tmp_path)


# -- two kinds of requests that are never inside together, whatever comes and goes -------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 30)), max_size=60))
def test_kinds_never_meet_and_everybody_gets_in(events: list[tuple[bool, bool, int]]) -> None:
    turns = Exclusion()
    inside: dict[int, bool] = {}
    order: list[int] = []

    def start(key: int, kind: bool) -> None:
        inside[key] = kind
        order.append(key)
        assert len(set(inside.values())) == 1

    entered = []
    for number, (comes, kind, which) in enumerate(events):
        if comes:
            entered.append(number)
            turns.enter(number, kind, partial(start, number, kind))
        elif inside:
            gone = sorted(inside)[which % len(inside)]
            del inside[gone]
            assert turns.leave(gone) == []
    while inside:
        gone = next(iter(inside))
        del inside[gone]
        turns.leave(gone)
    assert order == entered, "all of them, in the order in which they came"


def test_one_that_cannot_start_is_named_and_the_next_one_comes() -> None:
    def fail() -> None:
        raise ValueError

    turns = Exclusion()
    started: list[int] = []
    turns.enter(1, True, partial(started.append, 1))
    turns.enter(2, False, fail)
    turns.enter(3, True, partial(started.append, 3))
    ((key, error),) = turns.leave(1)
    assert (key, type(error)) == (2, ValueError)
    assert started == [1, 3]


def test_leaving_without_a_turn_lets_those_in_who_fit() -> None:
    """A request that waits leaves, and was what kept its successors of the running kind out."""
    turns = Exclusion()
    started: list[int] = []
    for key, kind in ((1, True), (2, False), (3, True)):
        turns.enter(key, kind, partial(started.append, key))
    turns.leave(2)
    assert started == [1, 3]
