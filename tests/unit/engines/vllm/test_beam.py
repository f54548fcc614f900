"""Beam search against trying everything, over a language of a few tokens."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from handler.core.values import Finish, Sampling
from handler.engines.vllm.engine import Beam, BeamSearch
from tests.one_test import in_one_test

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
