"""The rolling batcher on a scripted engine: order, room, the queue, neighbours, failures."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.errors import GenerationFailed, InternalError, Overloaded, ServerLost, Unavailable
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Finish, Request, Sampling, Token
from handler.engines.base import Output, Step
from handler.protocols.registry import INVOCATIONS
from handler.scheduler import batcher
from handler.scheduler.batcher import (
    MAX_OVERTAKES,
    ActiveRequest,
    Background,
    Batcher,
    FastPath,
    OwnerQueues,
    RequestQueue,
)
from handler.scheduler.engine import join
from tests.doubles.scripted_engine import Scripted, prompt, run, submit, text
from tests.limits import WORDS, undocumented
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CONTEXT, DIALECTS

# -- the rolling batcher on a scripted engine: order, room, neighbours, failures ---------------------------------------


def test_requests_of_any_length_share_steps_and_keep_their_own_tokens() -> None:
    batcher = Batcher(Scripted())
    ids = {
        submit(batcher, letter * 3, max_new_tokens=count): (letter, count)
        for letter, count in zip("abc", (1, 5, 3), strict=True)
    }
    found = run(batcher)
    assert {id: text(deltas) for id, deltas in found.items()} == {
        id: letter * count for id, (letter, count) in ids.items()
    }
    assert batcher.idle


def test_requests_wait_in_order_while_there_is_no_room() -> None:
    engine = Scripted()
    batcher = Batcher(engine, max_active=2)
    for letter in "abcd":
        submit(batcher, letter, max_new_tokens=2)
    assert (batcher.num_active, batcher.num_queued) == (2, 2)
    order = [delta.id for _ in range(4) for delta in batcher.step()]
    assert order == [1, 2, 1, 2, 3, 4, 3, 4]


def test_a_step_waits_only_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted()
    batcher, step = Batcher(engine), mock.Mock(return_value=[])
    monkeypatch.setattr(engine, "step", step)
    assert (batcher.step(), batcher.step(2.5)) == ([], [])
    assert step.call_args_list == [mock.call(0.0), mock.call(2.5)]


def test_a_full_queue_refuses_at_once() -> None:
    batcher = Batcher(Scripted(), max_active=1, max_queued=1)
    submit(batcher, "a")
    submit(batcher, "b")
    with pytest.raises(Unavailable, match="job_queue_size"):
        submit(batcher, "c")


def test_cancel_reaches_the_engine_and_makes_room() -> None:
    engine = Scripted()
    batcher = Batcher(engine, max_active=1)
    first, second = submit(batcher, "a"), submit(batcher, "b", max_new_tokens=1)
    batcher.cancel(first)
    assert engine.cancelled == [1]
    assert (batcher.num_active, batcher.num_queued) == (1, 0), "at once, not with the next step"
    assert list(run(batcher)) == [second]


@pytest.mark.parametrize("num_left", [1, 2])
def test_tokens_of_a_cancelled_request_do_not_count(num_left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted()
    batcher = Batcher(engine)
    first, second = (submit(batcher, letter, max_new_tokens=num_left + 1) for letter in "ab")
    batcher.step()
    assert batcher.num_tokens == 2
    step = engine.step()  # these tokens are on their way while the request is cancelled
    monkeypatch.setattr(engine, "step", lambda timeout: step)
    batcher.cancel(first)
    assert [delta.id for delta in batcher.step()] == [second]
    assert batcher.num_tokens == 3


def test_a_waiting_request_can_be_cancelled_and_unknown_ids_are_ignored() -> None:
    batcher = Batcher(Scripted(), max_active=1)
    first, second = submit(batcher, "a", max_new_tokens=2), submit(batcher, "b")
    batcher.cancel(second)
    batcher.cancel(999)
    assert list(run(batcher)) == [first]


def test_what_the_engine_refuses_ends_alone_in_batcher() -> None:
    batcher = Batcher(Scripted(refuse="bad"))
    good, bad = submit(batcher, "ok", max_new_tokens=2), submit(batcher, "bad")
    found = run(batcher)
    assert text(found[good]) == "ok"
    assert [delta.finish for delta in found[bad]] == [Finish.ERROR]
    assert "cannot do that" in str(found[bad][0].error)


def test_an_engine_failure_ends_those_inside_and_spares_those_who_wait() -> None:
    engine = Scripted(fail=RuntimeError("boom"))
    batcher = Batcher(engine, max_active=2)
    inside = [submit(batcher, "a"), submit(batcher, "b")]
    waiting = submit(batcher, "c", max_new_tokens=2)
    engine_gone = batcher.step()
    assert {delta.id for delta in engine_gone} == set(inside)
    assert all(isinstance(delta.error, GenerationFailed) and "boom" in str(delta.error) for delta in engine_gone)
    assert text(run(batcher)[waiting]) == "cc"


def test_requests_without_a_token_continue_once_after_the_loss_of_the_engines_server() -> None:
    engine = Scripted()
    batcher = Batcher(engine, max_active=3)
    begun = submit(batcher, "a", max_new_tokens=3)
    assert [delta.id for delta in batcher.step()] == [begun]
    fresh, waiting = submit(batcher, "b", max_new_tokens=2, n=2), submit(batcher, "c", max_new_tokens=2)
    engine.fail, engine.ready = ServerLost("engine failure: it was killed"), False
    (failed,) = batcher.step()
    assert (failed.id, str(failed.error)) == (begun, "engine failure: it was killed")
    assert (batcher.num_active, batcher.num_queued) == (0, 2)
    engine.ready = True
    batcher.step()
    assert (batcher.num_active, batcher.num_queued) == (3, 0)
    engine.fail = ServerLost("engine failure: it was killed again")
    (failed,) = batcher.step()
    assert failed.id == fresh, "it may be the cause"
    assert text(run(batcher)[waiting]) == "cc", "it had waited"
    assert batcher.idle


def test_a_request_that_continues_is_still_the_first_and_can_be_cancelled() -> None:
    engine = Scripted()
    batcher = Batcher(engine, max_active=1)
    first, second = submit(batcher, "a", max_new_tokens=1), submit(batcher, "b", max_new_tokens=1)
    third = submit(batcher, "c", max_new_tokens=1)
    engine.fail = ServerLost("engine failure: it was killed")
    assert batcher.step() == []
    batcher.cancel(second)
    assert list(run(batcher)) == [first, third]


def test_nothing_starts_while_the_engine_is_not_ready() -> None:
    engine = Scripted(ready=False)
    batcher = Batcher(engine)
    id = submit(batcher, "a", max_new_tokens=1)
    assert batcher.step() == []
    engine.ready = True
    assert list(run(batcher)) == [id]


def test_a_batcher_is_ready_while_its_engine_is() -> None:
    engine = Scripted()
    batcher = Batcher(engine)
    assert batcher.ready
    engine.ready = False
    assert not batcher.ready


def test_a_request_may_wait_and_run_for_all_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    engine = Scripted(ready=False)
    batcher = Batcher(engine, queue_timeout=2.0, time_limit=4.0)
    first, second = (submit(batcher, letter, max_new_tokens=50) for letter in "ab")
    now += 2.0
    assert batcher.step() == []
    batcher.cancel(second)
    engine.ready = True
    batcher.step()
    now += 2.0
    assert [(delta.id, delta.error) for delta in batcher.step()] == [(first, None)]
    now += 0.5
    *_, last = batcher.step()
    assert str(last.error) == "the request was not finished within 4 s (option.request_time_limit)"


def test_an_option_is_named_where_it_is_as_short_as_the_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    batcher = Batcher(Scripted(ready=False), queue_timeout=2.0)
    batcher.submit(Request("a", Sampling(), timeout=2.0), prompt("a"))
    now += 3.0
    (delta,) = batcher.step()
    assert str(delta.error) == "the request waited 2 s for the engine (option.predict_timeout)"


def test_waiting_too_long_is_an_error_that_names_the_option() -> None:
    batcher = Batcher(Scripted(ready=False), queue_timeout=0.0)
    id = submit(batcher, "a")
    (delta,) = batcher.step()
    assert delta.id == id
    assert isinstance(delta.error, Unavailable)
    assert "predict_timeout" in str(delta.error)
    assert batcher.idle, "it waits no longer"


def test_a_request_that_has_begun_is_ended_by_its_time_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    engine = Scripted()
    batcher = Batcher(engine, queue_timeout=1.0, time_limit=10.0)
    id = submit(batcher, "a", max_new_tokens=30)
    for _ in range(3):
        now += 3.0
        assert [(delta.id, delta.error) for delta in batcher.step()] == [(id, None)]
    now += 3.0
    *_, last = batcher.step()
    assert (last.id, last.finish, engine.cancelled) == (id, Finish.ERROR, [1])
    assert "option.request_time_limit" in str(last.error)
    assert batcher.idle


def test_several_sequences_have_seeds_and_numbers_of_their_own() -> None:
    engine = Scripted()
    batcher = Batcher(engine)
    id = submit(batcher, "ab", n=3, best_of=3, do_sample=True, seed=7, max_new_tokens=2)
    found = run(batcher)[id]
    assert engine.seeds == [7, 8, 9]
    assert {delta.sequence for delta in found} == {0, 1, 2}
    assert all(text([d for d in found if d.sequence == sequence]) == "ab" for sequence in range(3))
    assert batcher.idle


@pytest.mark.parametrize(
    ("sampling", "wanted"), [({"n": 2, "best_of": 3}, (3, 3)), ({"n": 3}, (3, 3)), ({"num_beams": 3}, (1, 1))]
)
def test_best_of_and_n_are_requests_of_the_engine_and_beams_are_one(
    sampling: dict[str, int], wanted: tuple[int, int]
) -> None:
    engine = Scripted()
    batcher = Batcher(engine)
    submit(batcher, "a", **sampling)
    assert (batcher.num_active, len(engine.active)) == wanted


def test_each_sequence_needs_a_slot_but_a_large_request_runs_alone() -> None:
    batcher = Batcher(Scripted(), max_active=2)
    submit(batcher, "a", max_new_tokens=2)
    large = submit(batcher, "b", n=2, max_new_tokens=1)
    assert (batcher.num_active, batcher.num_queued) == (1, 1)
    assert large in run(batcher)


def test_a_stop_string_is_cancelled_in_the_engine() -> None:
    engine = Scripted()
    batcher = Batcher(engine)
    id = submit(batcher, "abc", stop=("c",), max_new_tokens=30)
    deltas = run(batcher)[id]
    assert deltas[-1].finish is Finish.STOP
    assert deltas[-1].extras is not None
    assert (text(deltas), deltas[-1].extras.stop) == ("ab", "c")
    assert engine.cancelled == [1]
    assert batcher.idle


def test_what_ends_in_a_step_leaves_its_neighbours_their_tokens() -> None:
    batcher = Batcher(Scripted())
    stopped = submit(batcher, "abc", stop=("a",), max_new_tokens=30)
    others = [submit(batcher, letter, max_new_tokens=30) for letter in "xy"]
    assert [(delta.id, text([delta])) for delta in batcher.step()] == [
        (stopped, ""),
        (others[0], "x"),
        (others[1], "y"),
    ]
    assert batcher.num_active == 2


def test_an_end_without_a_stop_string_names_none() -> None:
    batcher = Batcher(Scripted())
    id = submit(batcher, "ab", stop=("z",), max_new_tokens=2)
    assert [(delta.finish, delta.extras) for delta in run(batcher)[id]] == [(None, None), (Finish.LENGTH, None)]


def test_special_tokens_are_told_from_text() -> None:
    vocabulary = Vocabulary([bytes([code]) for code in range(128)], special=[98])
    batcher = Batcher(Scripted())
    given = Prompt("ab", [97, 98], vocabulary)
    batcher.submit(Request("ab", Sampling(max_new_tokens=4)), given)
    tokens = [token for _ in range(3) for delta in batcher.step() for token in delta.tokens]
    assert [(token.id, token.text, token.special) for token in tokens] == [
        (97, "a", False),
        (98, "", True),
        (97, "a", False),
    ]


def test_a_batcher_is_idle_without_running_and_waiting_requests() -> None:
    engine = Scripted(ready=False)
    batcher = Batcher(engine)
    assert batcher.idle
    id = submit(batcher, "a", max_new_tokens=2)
    assert (batcher.idle, batcher.num_queued) == (False, 1)
    engine.ready = True
    batcher.step()
    assert (batcher.idle, batcher.num_queued) == (False, 0)
    batcher.cancel(id)
    assert batcher.idle


def test_the_engine_gets_the_media_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted()
    add = mock.Mock()
    monkeypatch.setattr(engine, "add", add)
    media = mock.Mock()
    for one in (media, None):
        Batcher(engine).submit(Request("a"), prompt("a")._replace(media=one))
    assert [call.args[0].media for call in add.call_args_list] == [media.file, None]


def test_failures_are_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = Batcher(engine := Scripted())
    submit(batcher, "a")
    monkeypatch.setattr(engine, "step", lambda timeout: [Step([], [], [], [Output(1, [97, 98], [-0.1])])])
    batcher.step()
    assert caplog.messages[0].startswith("the engine returned malformed output for a request: ")
    monkeypatch.setattr(engine, "step", mock.Mock(side_effect=[RuntimeError("boom"), GenerationFailed("known")]))
    batcher.step()
    batcher.step()
    assert caplog.messages[1:] == ["the engine raised an exception"]


# -- fast paths: plain tokens of streams that are encoded at once, without deltas --------------------------------------


def encode(token: Token) -> bytes:
    if token.text == "!":
        raise TypeError("cannot be written")
    return token.text.encode()


def fast(batcher: Batcher, id: int) -> FastPath:
    path = FastPath(id, encode, None, lambda data: None)
    batcher.set_fast_path(id, path)
    return path


def test_a_fast_path_encodes_tokens_and_leaves_the_end_to_a_delta() -> None:
    batcher = Batcher(Scripted())
    first, second = (submit(batcher, letters, max_new_tokens=3) for letters in ("abc", "xyz"))
    path = fast(batcher, first)
    assert [(delta.id, text([delta])) for delta in batcher.step()] == [(second, "x")]
    assert (batcher.fast_paths, batcher.lines, path.num_tokens) == ([path], [b"a"], 1)
    other = fast(batcher, second)
    assert batcher.step() == []
    assert (batcher.fast_paths, batcher.lines) == ([path, other], [b"b", b"y"])
    assert (path.num_tokens, other.num_tokens, batcher.num_tokens) == (2, 1, 4)
    assert [(delta.id, text([delta]), delta.finish) for delta in batcher.step()] == [
        (first, "c", Finish.LENGTH),
        (second, "z", Finish.LENGTH),
    ]
    assert (batcher.fast_paths, batcher.lines, path.num_tokens) == ([], [], 2)


def test_a_fast_path_that_only_stores_its_tokens_has_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = Batcher(engine := Scripted())
    id = submit(batcher, "abcd", max_new_tokens=4)
    stored: list[str] = []

    def store(token: Token) -> bytes:
        stored.append(token.text)
        return b""

    path = FastPath(id, store, None, lambda data: None)
    batcher.set_fast_path(id, path)
    assert batcher.step() == []
    step = engine.step
    with monkeypatch.context() as joined:
        joined.setattr(engine, "step", lambda timeout: [*step(), *step()])
        assert batcher.step() == []
    assert (stored, path.num_tokens, batcher.num_tokens) == (["a", "b", "c"], 3, 3)
    assert (batcher.fast_paths, batcher.lines) == ([], [])
    assert [(text([delta]), delta.finish) for delta in batcher.step()] == [("d", Finish.LENGTH)]


def test_joined_tokens_are_one_line_of_a_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = Batcher(engine := Scripted())
    id = submit(batcher, "abcd", max_new_tokens=30)
    path = fast(batcher, id)
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda timeout: [*step(), *step(), *step()])
    assert batcher.step() == []
    assert (batcher.fast_paths, batcher.lines, path.num_tokens, batcher.num_tokens) == ([path], [b"cda"], 3, 3)


def test_outputs_with_more_than_tokens_do_not_take_the_fast_path() -> None:
    batcher = Batcher(Detailed())
    id = submit(batcher, "a", max_new_tokens=30)
    path = fast(batcher, id)
    assert [text([delta]) for delta in batcher.step()] == ["a"]
    assert (batcher.lines, path.num_tokens) == ([], 0)


@pytest.mark.parametrize("joined", [1, 2])
def test_a_token_that_cannot_be_encoded_ends_its_request_alone(
    joined: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batcher = Batcher(engine := Scripted())
    bad, good = (submit(batcher, letters, max_new_tokens=30) for letters in ("!", "x"))
    paths = [fast(batcher, id) for id in (bad, good)]
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda timeout: [one for _ in range(joined) for one in step()])
    (delta,) = batcher.step()
    assert (delta.id, delta.finish, type(delta.error)) == (bad, Finish.ERROR, InternalError)
    assert (batcher.fast_paths, batcher.lines, paths[1].num_tokens) == ([paths[1]], [b"x" * joined], joined)
    assert caplog.messages == ["a bug in the server: a response could not be encoded"]
    assert engine.cancelled == [1]


def test_only_a_running_request_of_one_sequence_has_a_fast_path() -> None:
    batcher = Batcher(Scripted(), max_active=3)
    several, waiting = submit(batcher, "ab", n=2, max_new_tokens=3), submit(batcher, "xy", n=2, max_new_tokens=3)
    for id in (several, waiting, 999):
        fast(batcher, id)
    assert [text([delta]) for delta in batcher.step()] == ["b", "b"]
    assert batcher.lines == []


class Detailed(Scripted):
    """Says all about each token, and of the prompt's tokens whether asked or not."""

    def step(self, timeout: float = 0.0) -> list[Step]:
        (step,) = super().step()
        columns = zip(step.keys, step.ids, step.logprobs, strict=True)
        step.others[:0] = [Output(key, [id], [logprob], prompt_logprobs=[None]) for key, id, logprob in columns]
        return [Step([], [], [], step.others)]


def test_a_stop_string_in_a_detailed_output_is_cancelled_in_the_engine() -> None:
    engine = Detailed()
    batcher = Batcher(engine)
    id = submit(batcher, "a", stop=("aa",), max_new_tokens=30)
    deltas = run(batcher)[id]
    assert (deltas[-1].finish, text(deltas), engine.cancelled) == (Finish.STOP, "", [1])
    assert deltas[-1].extras is not None
    assert deltas[-1].extras.stop == "aa"


def test_the_prompts_tokens_come_with_the_first_sequence_alone() -> None:
    batcher = Batcher(Detailed())
    id = submit(batcher, "a", n=2, prompt_logprobs=True, max_new_tokens=2)
    found = [(delta.sequence, delta.prefill is not None) for delta in run(batcher)[id]]
    assert sorted(found) == [(0, False), (0, True), (1, False), (1, False)]


def test_the_engine_is_asked_for_a_prompts_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted()
    add = mock.Mock()
    monkeypatch.setattr(engine, "add", add)
    submit(Batcher(engine), "a", n=3, prompt_logprobs=True)
    assert [call.args[0].sampling.prompt_logprobs for call in add.call_args_list] == [True, False, False]


def test_sequences_of_beams_and_samples_are_numbered() -> None:
    class Beams(Scripted):
        """Each request has three outputs, the last of which ends it."""

        def step(self, timeout: float = 0.0) -> list[Step]:
            keys = [*self.active]
            self.active.clear()
            outputs = [
                Output(key, [97 + index], [-0.1], Finish.LENGTH, sequence=index) for key in keys for index in range(3)
            ]
            return [Step([], [], [], outputs)]

    batcher = Batcher(Beams())
    id = submit(batcher, "a", num_beams=3, n=3)
    assert [(delta.id, delta.sequence, text([delta])) for delta in batcher.step()] == [
        (id, 0, "a"),
        (id, 1, "b"),
        (id, 2, "c"),
    ]
    assert batcher.idle
    assert batcher.num_tokens == 3


def test_no_request_gets_a_seed_that_it_does_not_have() -> None:
    engine = Scripted()
    submit(Batcher(engine), "a", n=2)
    submit(Batcher(engine), "a", n=2, do_sample=True)
    assert engine.seeds == [None] * 4


def test_of_what_is_cancelled_nothing_is_left() -> None:
    batcher = Batcher(Scripted(), max_active=1)
    for id in [submit(batcher, "a"), submit(batcher, "b")]:
        batcher.cancel(id)
    assert batcher.idle
    assert batcher.step() == []


def test_ids_are_never_used_twice() -> None:
    batcher = Batcher(Scripted())
    ids = [submit(batcher, "a", max_new_tokens=1) for _ in range(3)]
    for id in ids:
        batcher.cancel(id)
    assert len({*ids, submit(batcher, "a")}) == 4


def test_seeds_of_several_sequences_wrap_at_64_bits() -> None:
    engine = Scripted()
    submit(Batcher(engine), "a", n=2, do_sample=True, seed=2**64 - 1)
    assert engine.seeds == [2**64 - 1, 0]


@in_one_test(
    "malformed",
    [
        Output(1, [97, 98], [-0.1]),
        Output(1, [97], [-0.1], sequence=1),
        Output(1, [97], [-0.1], prompt_logprobs=[-0.1]),
        Output(1, [97], [-0.1], tops=[]),
        Output(1, [97], [-0.1], tops=[None]),  # type: ignore[list-item]
        Output(1, [None], [-0.1]),  # type: ignore[list-item]
        Output(1, [97], [-0.1], sequence=None),  # type: ignore[arg-type]
    ],
    ids=["log-probabilities", "sequence", "the prompt's", "alternatives", "no alternatives", "no id", "no sequence"],
)
def test_a_malformed_output_ends_its_request_alone(malformed: Output) -> None:
    class Malformed(Scripted):
        def step(self, timeout: float = 0.0) -> list[Step]:
            (step,) = Scripted.step(self)
            return [step._replace(others=[malformed, *step.others])]

    engine = Malformed()
    batcher = Batcher(engine)
    bad, *good = (submit(batcher, text, max_new_tokens=3) for text in ("abc", "abc", "def"))
    found = run(batcher)
    first, last = found[bad]
    assert (text([first]), first.error, type(last.error)) == ("a", None, GenerationFailed)
    assert [text(found[id]) for id in good] == ["abc", "def"]
    assert engine.cancelled == [1]
    assert batcher.idle


def test_a_step_of_uneven_columns_ends_its_requests_here_and_in_the_engine() -> None:
    class Uneven(Scripted):
        def step(self, timeout: float = 0.0) -> list[Step]:
            (step,) = Scripted.step(self)
            return [step._replace(ids=step.ids[:-1])]

    engine = Uneven()
    batcher = Batcher(engine, max_active=1)
    ids = [submit(batcher, "abc", max_new_tokens=3) for _ in range(2)]
    found = run(batcher)
    assert [str(delta.error) for id in ids for delta in found[id]] == [
        "engine failure: a step's columns differ in length"
    ] * 2
    assert engine.cancelled == [1, 2]
    assert batcher.idle


@pytest.mark.parametrize("id", [999, None])
@pytest.mark.parametrize("where", ["columns", "others"])
def test_an_id_that_the_tokenizer_lacks_ends_its_request_alone(where: str, id: Any) -> None:
    class Padded(Scripted):
        def step(self, timeout: float = 0.0) -> list[Step]:
            (step,) = Scripted.step(self)
            if 1 in step.keys:
                place = step.keys.index(1)
                step.ids[place] = id
                if where == "others":
                    step.others.append(Output(1, [id], [-0.1]))
                    del step.keys[place], step.ids[place], step.logprobs[place]
            return [step]

    engine = Padded()
    batcher = Batcher(engine)
    bad, good = (submit(batcher, "abc", max_new_tokens=3) for _ in range(2))
    found = run(batcher)
    assert isinstance(found[bad][0].error, GenerationFailed)
    assert len(found[bad]) == 1
    assert text(found[good]) == "abc"
    assert engine.cancelled == [1]


# -- requests of batches: all together have so many sequences, and owners take turns -----------------------------------


class Batches:
    """A batcher with room for four sequences, two of them for batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.engine = Scripted()
        self.batcher = Batcher(self.engine, max_active=4, max_background=2)
        self.letters: dict[int, str] = {}

    def submit(self, owner: str | None, letter: str, tokens: int = 1, **sampling: Any) -> int:
        request = Request(letter, Sampling(max_new_tokens=tokens, **sampling), background=owner)
        id = self.batcher.submit(request, prompt(letter))
        self.letters[id] = letter
        return id

    @property
    def inside(self) -> str:
        return "".join(sorted(chr(ids[0]) for ids in self.engine.active.values()))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    return Batches(monkeypatch)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_batches_leave_room_with_any_number_of_requests_and_sequences(batches: Batches, n: int) -> None:
    for letter in "abcdef":
        batches.submit("ann", letter, 2, n=n)
    assert batches.inside == {1: "ab", 2: "aa", 3: "aaa"}[n], "one that is too large starts alone"
    assert batches.batcher.num_queued == 0
    batches.submit(None, "z", 2)
    assert batches.inside.endswith("z")
    found = run(batches.batcher)
    assert {batches.letters[id] for id in found} == {*"abcdefz"}
    assert batches.batcher.idle


def test_owners_of_batches_take_turns(batches: Batches) -> None:
    for letter in "abcde":
        batches.submit("ann", letter)
    for owner, letter in (("bob", "x"), ("cid", "y"), ("bob", "z")):
        batches.submit(owner, letter)
    steps = [{batches.letters[delta.id] for delta in batches.batcher.step()} for _ in range(4)]
    assert steps == [{*"ab"}, {*"cx"}, {*"dy"}, {*"ez"}]


def test_a_cancelled_request_of_a_batch_makes_room_or_stops_waiting(batches: Batches) -> None:
    ids = {letter: batches.submit("ann", letter, 50) for letter in "abcd"}
    batches.batcher.cancel(ids["c"])
    assert batches.inside == "ab"
    batches.batcher.cancel(ids["a"])
    assert batches.inside == "bd"
    for id in ids.values():
        batches.batcher.cancel(id)
    assert batches.batcher.idle


def test_an_owner_who_waits_long_gets_the_place_of_anothers_newest_request(batches: Batches) -> None:
    """The place of one who has a single request is left to it, and so is that of another owner's."""
    ids = {letter: batches.submit("ann", letter, 100) for letter in "abc"}
    batches.submit("bob", "x", 100)
    assert ({*run(batches.batcher, 3)}, batches.inside) == ({ids["a"], ids["b"]}, "ab")
    batches.now += 11.0
    (failed,) = [delta for delta in batches.batcher.step() if delta.error is not None]
    assert (failed.id, type(failed.error), batches.inside) == (ids["b"], Overloaded, "ax")
    batches.submit("cid", "y")
    batches.now += 11.0
    assert all(delta.error is None for delta in batches.batcher.step())
    assert batches.inside == "ax"


@pytest.mark.parametrize("num_sequences", [2, 3])
def test_nobody_makes_room_for_a_request_that_would_not_fit(batches: Batches, num_sequences: int) -> None:
    for letter in "ab":
        batches.submit("ann", letter, 100)
    batches.submit("bob", "x", 2, n=num_sequences)
    batches.now += 11.0
    assert all(delta.error is None for delta in batches.batcher.step())
    assert batches.inside == "ab"


def test_an_owner_waits_ten_seconds_before_another_makes_room(batches: Batches) -> None:
    for letter in "ab":
        batches.submit("ann", letter, 100)
    batches.submit("bob", "x", 100)
    batches.now += 9.9
    batches.batcher.step()
    assert batches.inside == "ab"
    batches.now += 0.3
    (failed,) = [delta for delta in batches.batcher.step() if delta.error is not None]
    assert str(failed.error) == "request stopped to make room for another API key's batch (option.batches_concurrency)"
    assert batches.inside == "ax"


def test_a_cancelled_line_that_the_engine_has_not_begun_makes_room(batches: Batches) -> None:
    batches.engine.ready = False
    ids = [batches.submit("ann", letter, 2) for letter in "abc"]
    assert batches.batcher.num_queued == 2
    batches.batcher.cancel(ids[0])
    assert batches.batcher.num_queued == 2
    batches.batcher.cancel(ids[1])
    assert batches.batcher.num_queued == 1


def test_a_line_in_the_queue_waits_for_the_engine_as_any_request(batches: Batches) -> None:
    """Its time begins when there is room for it in front of the engine."""
    ids = [batches.submit("ann", letter, 2) for letter in "abc"]
    batches.now += 1000.0
    assert {*run(batches.batcher, 1)} == {*ids[:2]}
    batches.engine.ready = False
    late = batches.submit("ann", "d", 2)
    run(batches.batcher, 2)
    batches.now += 119.0
    assert batches.batcher.step() == []
    batches.now += 2.0
    assert {delta.id for delta in batches.batcher.step() if delta.error} == {ids[2], late}


def test_a_request_without_room_holds_up_its_own_owner_alone(batches: Batches) -> None:
    for letter in "abc":
        batches.submit("ann", letter, 100)
    batches.submit("bob", "x", 2, n=8)
    batches.submit("cid", "y", 100)
    batches.now += 11.0
    batches.batcher.step()
    assert batches.inside == "ay"


def test_a_request_without_room_starts_after_so_many_others(batches: Batches) -> None:
    """It waits for what runs, and for ten others, but not for those that come after them."""
    long = batches.submit("ann", "a", 100)
    large = batches.submit("bob", "x", 1, n=8)
    for number in range(MAX_OVERTAKES):
        small = batches.submit(f"small {number}", "s")
        assert small in {delta.id for delta in batches.batcher.step()}
    assert batches.inside == "a"
    late = batches.submit("late", "z")
    batches.now += 11.0
    assert {*run(batches.batcher, 3)} == {long}
    batches.batcher.cancel(long)
    assert batches.inside == "x" * 8
    found = run(batches.batcher)
    assert list(found) == [large, late]


def test_what_waits_for_a_batchs_room_does_not_expire(batches: Batches) -> None:
    batches.submit("ann", "a", 3, n=2)
    last = batches.submit("ann", "b", 2)
    for _ in range(3):
        batches.now += 1000.0
        assert all(delta.error is None for delta in batches.batcher.step())
    assert text(run(batches.batcher)[last]) == "bb"


# -- the order of the queue, its bound on waiting, and that nothing is lost, in any order of calls ---------------------


ACTIONS = st.lists(
    st.tuples(st.just("add"), st.integers(-(1 << 62), 1 << 62) | st.integers(-2, 2))
    | st.tuples(st.just("take"), st.just(0))
    | st.tuples(st.just("discard"), st.integers(0, 60)),
    max_size=120,
)


@given(actions=ACTIONS)
def test_order_bound_and_nothing_lost(actions: list[tuple[str, int]]) -> None:
    queue = RequestQueue[int]()
    waiting: dict[int, int] = {}  # id -> priority
    most: dict[int, int] = {}  # id -> the number of the `take` by which it is taken
    num_taken = overtakes = 0
    for id, (action, value) in enumerate(actions):
        if action == "add":
            most[id] = num_taken + (len(waiting) + 1) * (MAX_OVERTAKES + 1)
            queue.add(id, value, id)
            waiting[id] = value
        elif action == "discard":
            queue.discard(value)
            waiting.pop(value, None)
        elif waiting:
            oldest = min(waiting)
            wanted = oldest if overtakes == MAX_OVERTAKES else min(waiting, key=lambda one: (waiting[one], one))
            assert queue.first() == wanted == queue.take()
            overtakes = 0 if wanted == oldest else overtakes + 1
            num_taken += 1
            assert num_taken <= most[wanted]
            del waiting[wanted]
        assert (list(queue), len(queue)) == (sorted(waiting), len(waiting))


def test_an_endless_stream_of_urgent_requests_starves_nobody() -> None:
    queue = RequestQueue[str]()
    queue.add(0, 1 << 62, "patient")
    taken = []
    for id in range(1, 2 * MAX_OVERTAKES):
        queue.add(id, -id, "urgent")
        taken.append(queue.take())
    assert taken.index("patient") == MAX_OVERTAKES


def test_the_oldest_is_let_by_as_often_again_after_one_was_taken() -> None:
    queue = RequestQueue[str]()
    for id in range(2):
        queue.add(id, 1, f"patient {id}")
    taken = []
    for id in range(2, 4 + 2 * MAX_OVERTAKES):
        queue.add(id, -id, "urgent")
        taken.append(queue.take())
    assert taken.index("patient 0") == MAX_OVERTAKES
    assert taken.index("patient 1") == 2 * MAX_OVERTAKES + 1


def test_owners_take_turns_whatever_one_of_them_sends() -> None:
    batcher = Batcher(Scripted(), max_active=1)

    def submit(owner: str, priority: int = 0) -> int:
        return batcher.submit(Request("a", Sampling(max_new_tokens=1), priority=priority), prompt("a"), owner=owner)

    first, *anns = [submit("ann") for _ in range(5)]
    bobs, urgent = [submit("bob") for _ in range(2)], submit("ann", -1)
    assert list(run(batcher)) == [first, urgent, bobs[0], anns[0], bobs[1], *anns[1:]]


def test_old_items_of_low_priority_give_their_owner_no_more_turns() -> None:
    queue, owners = OwnerQueues[str](), ("ann", "bob", "carol")
    ids = itertools.count()
    for _ in range(20):
        queue.add(next(ids), 1000, "ann", "ann")
    taken = []
    for _ in range(20 * (MAX_OVERTAKES + 1)):
        for owner in owners:
            queue.add(next(ids), 0, owner, owner)
        taken.append(queue.first())
        assert queue.take() == taken[-1]
    assert taken.count("bob") - taken.count("carol") in (0, 1)
    assert taken.count("ann") - taken.count("bob") <= 21  # the old items, of which each may leave once


def test_a_full_queue_loses_the_newest_of_the_owner_with_most() -> None:
    batcher = Batcher(Scripted(), max_active=1, max_queued=4)

    def submit(owner: str) -> int:
        return batcher.submit(Request("a", Sampling(max_new_tokens=1)), prompt("a"), owner=owner)

    first, *anns = [submit("ann") for _ in range(5)]
    with pytest.raises(Overloaded, match="the queue is full"):
        submit("ann")
    bobs = [submit("bob") for _ in range(2)]
    for owner in ("bob", "ann"):
        with pytest.raises(Overloaded, match="the queue is full"):
            batcher.check_room(owner)
    batcher.check_room("carol")
    ended = run(batcher)
    assert {id for id in ended if ended[id][-1].error is not None} == {*anns[2:]}
    assert {*ended} == {first, *anns, *bobs}


def test_the_lowest_priority_starts_first_and_cancelled_requests_never() -> None:
    batcher = Batcher(Scripted(), max_active=1)
    ids = [
        batcher.submit(Request("a", Sampling(max_new_tokens=1), priority=priority), prompt("a"))
        for priority in (0, 5, 0, -1, 5)
    ]
    batcher.cancel(ids[2])
    assert list(run(batcher)) == [ids[0], ids[3], ids[1], ids[4]]
    assert batcher.idle


BODIES: dict[str, dict[str, Any]] = {
    "lmi": {"inputs": "a", "parameters": {"priority": -3}},
    "tgi_compat": {"inputs": "a", "parameters": {"priority": -3}},
    "dynamic_batch": {"inputs": ["a", "b"], "parameters": {"priority": -3}},
    "openai_chat": {"messages": [{"role": "user", "content": "a"}], "priority": -3},
    "openai_completions": {"prompt": ["a", "b"], "priority": -3},
}


@in_one_test("dialect", BODIES)
def test_a_request_has_the_priority_of_its_body(dialect: str) -> None:
    body = BODIES[dialect]
    assert {request.priority for request in DIALECTS[dialect].parse(body, CONTEXT).requests} == {-3}
    if "messages" in body:
        assert INVOCATIONS["lmi"].parse(body, CONTEXT).requests[0].priority == -3


def test_bodies_of_many_texts_take_turns() -> None:
    queue, ids = RequestQueue[str](), itertools.count()

    def body(name: str, count: int, priority: int = 0) -> None:
        for number in range(count):
            queue.add(next(ids), priority, name, follows=number > 0)

    body("a", 30)
    taken = [queue.take() for _ in range(10)]
    body("b", 3)
    body("c", 1)
    body("urgent", 1, priority=-1)
    taken += [queue.take() for _ in range(len(queue))]
    assert taken[:10] == ["a"] * 10
    assert taken[10] == "urgent"
    assert taken[11:18] == ["a", "b", "c", "a", "b", "a", "b"]
    assert taken.count("a") == 30


# -- steps that waited together lose, repeat and reorder nothing of any sequence ---------------------------------------


def random_steps(rng: random.Random) -> list[Step]:
    """Steps of a few sequences, each with a token in the columns, an output, or nothing; some of them end."""
    steps = []
    alive = set(range(5))
    for number in range(rng.randrange(1, 6)):
        step = Step([], [], [], [])
        for key in sorted(alive):
            token = 100 * key + number
            kind = rng.choice(["column", "column", "column", "output", "end", "nothing"])
            if kind == "column":
                step.keys.append(key)
                step.ids.append(token)
                step.logprobs.append(-float(number))
            elif kind != "nothing":
                finish = Finish.STOP if kind == "end" else None
                step.others.append(Output(key, (token,), (-float(number),), finish))
            if kind == "end":
                alive.remove(key)
        steps.append(step)
    return steps


def histories(steps: list[Step]) -> dict[int, list[tuple[int, float | None] | Finish]]:
    """What each sequence gets, in order; a step's columns come before its other outputs."""
    found: dict[int, list[tuple[int, float | None] | Finish]] = {}
    for step in steps:
        for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
            found.setdefault(key, []).append((id, logprob))
        for output in step.others:
            history = found.setdefault(output.key, [])
            history += zip(output.ids, output.logprobs, strict=True)
            history += [] if output.finish is None else [output.finish]
    return found


def test_joined_steps_bring_each_sequence_the_same_in_the_same_order() -> None:
    rng = random.Random(0)
    for _ in range(500):
        steps = random_steps(rng)
        joined = join(steps)
        assert histories([joined]) == histories(steps)
        assert len(set(joined.keys)) == len(joined.keys)
        assert not {output.key for output in joined.others} & set(joined.keys), "a sequence comes in one way"


def test_a_sequences_tokens_become_one_output() -> None:
    steps = [Step([1, 2], [10, 20], [0.0, 0.0], []), Step([1], [11], [None], [])]
    assert join(steps) == Step([2], [20], [0.0], [Output(1, [10, 11], [0.0, None])])


def test_the_end_of_a_sequence_comes_with_the_tokens_before_it() -> None:
    end = Output(1, (11,), (-1.0,), Finish.LENGTH)
    steps = [Step([1], [10], [0.0], []), Step([], [], [], [end])]
    assert join(steps).others == [Output(1, [10, 11], [0.0, -1.0], Finish.LENGTH)]


@pytest.mark.parametrize(
    "last",
    [
        Output(1, (11,), (-1.0,), Finish.LENGTH, tops=[[(11, -1.0)]]),
        Output(1, (), (), Finish.ERROR, error="it broke"),
    ],
    ids=["more than tokens", "a failure"],
)
def test_what_brings_more_than_tokens_comes_after_those_before_it(last: Output) -> None:
    steps = [Step([1], [10], [0.0], []), Step([], [], [], [last])]
    assert join(steps).others == [Output(1, [10], [0.0]), last]


def test_an_owner_whose_lines_have_all_ended_waits_as_one_that_has_none() -> None:
    background = Background(2)

    def add(id: int, owner: str) -> ActiveRequest:
        request = Request("x", Sampling(max_new_tokens=1), background=owner)
        active = ActiveRequest(id, request, prompt("x"), lambda: None, start_by=0.0)
        background.add(owner, active)
        return active

    first = add(1, "ann")
    assert background.take() is first
    assert background.end(1)
    bobs = [add(id, "bob") for id in (2, 3, 4)]
    assert [background.take() for _ in range(3)] == [*bobs[:2], None]
    anns = add(5, "ann")
    assert background.to_displace(1.0) is bobs[1]
    assert background.end(3)
    assert background.take() is anns


def test_the_waiting_of_batches_lines_is_documented() -> None:
    assert not undocumented(
        "wire/batches.md",
        f"after at most {WORDS[MAX_OVERTAKES]} others have overtaken it",
        f"waits for at most {batcher.PATIENCE:g} s while another key",
    )
