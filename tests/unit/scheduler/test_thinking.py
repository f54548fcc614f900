"""Structured output begins after a thought, and a thought ends at its budget, on an engine with a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.errors import GenerationFailed
from handler.core.media import MediaFile
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Adapter, Finish, Pooling, Request, Sampling, StructuredOutput, Thoughts
from handler.engines.base import EngineRequest, Output, Step
from handler.scheduler.batcher import Batcher
from handler.scheduler.engine import ReasoningEngine, second_part
from tests.one_test import in_one_test

PIECES = [*map(chr, range(128)), "<think>", "</think>", "<call>", "<end>", "k>{", "</thin", "<call>f"]
VOCABULARY = Vocabulary([piece.encode() for piece in PIECES], special=[131])
WITH_SPECIAL_MARKERS = Vocabulary([piece.encode() for piece in PIECES], special=[128, 129, 130, 131])
RULE = StructuredOutput("regex", "{}")
ANSWER = ["{", "}"]


def ids(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def thoughts(*, is_open: bool) -> Thoughts:
    closing = VOCABULARY.ids(b"</think>")
    return Thoughts(("<think>",), ("</think>", "<call>"), is_open, ("<call>",), closing)


@dataclass
class Scripted:
    """Says `thought` without a rule, then `ANSWER`; with one `ANSWER` at once. `<end>` ends it."""

    thought: Sequence[str] = ()
    at_once: int = 1
    ready: bool = True
    fail: Exception | None = None
    requests: list[tuple[list[int], Sampling, Adapter | None]] = field(default_factory=list)
    running: dict[int, tuple[list[int], int]] = field(default_factory=dict)  # what is left to say, and how much of it
    cancelled: list[int] = field(default_factory=list)
    whole: list[EngineRequest] = field(default_factory=list)

    def admits(self, request: Request, prompt: Prompt) -> bool:
        return self.ready

    def continues(self, key: int) -> bool:
        return self.ready

    def add(self, request: EngineRequest) -> None:
        sampling = request.sampling
        self.requests.append((list(request.ids), sampling, request.adapter))
        self.whole.append(request)
        said = [] if sampling.structured_output or len(self.requests) > 1 else self.thought
        self.running[request.key] = ids(*said, *ANSWER, "<end>"), sampling.max_new_tokens

    def cancel(self, key: int) -> None:
        self.running.pop(key, None)
        self.cancelled.append(key)

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        self.cancelled.append(-key)

    def step(self, timeout: float = 0.0) -> list[Step]:
        if self.fail is not None:
            raise self.fail
        step = Step([], [], [], [])
        for key, (left, most) in list(self.running.items()):
            now = left[: min(self.at_once, most, left.index(131) + 1)]
            finish = Finish.EOS if now[-1] == 131 else Finish.LENGTH if len(now) == most else None
            if finish is None and len(now) == 1:
                step.keys.append(key)
                step.ids.append(now[0])
                step.logprobs.append(-1.0)
            else:
                tops = [[(id, -1.0)] for id in now]
                step.others.append(Output(key, now, [-1.0] * len(now), finish, tops=tops))
            self.running[key] = left[len(now) :], most - len(now)
            if finish is not None:
                del self.running[key]
        return [step]


def run(
    script: Scripted, prompt: str = "p", vocabulary: Vocabulary = VOCABULARY, **sampling: Any
) -> tuple[list[str], Finish | None]:
    """What the batcher gets: the answer's pieces, and why it ended."""
    engine = ReasoningEngine(script, vocabulary)
    engine.add(EngineRequest(7, ids(*prompt), Sampling(max_new_tokens=sampling.pop("most", 20), **sampling)))
    pieces: list[str] = []
    for _ in range(40):
        for step in engine.step():
            assert not step.keys or set(step.keys) == {7}
            pieces += [PIECES[id] for id in step.ids]
            for output in step.others:
                assert output.key == 7
                assert len(output.ids) == len(output.logprobs)
                assert output.tops is None or len(output.tops) == len(output.ids)
                pieces += [PIECES[id] for id in output.ids]
                if output.finish is not None:
                    return pieces, output.finish
    return pieces, None


HM = ["H", "m"]
CLOSED = [*HM, "</think>"]
END = [*ANSWER, "<end>"]
BEGUN = ["<think>", *CLOSED]


@in_one_test("at_once", [1, 2, 9])
@in_one_test(
    ("is_open", "thought", "budget", "first"),
    [
        (True, CLOSED, None, CLOSED),
        (False, BEGUN, None, BEGUN),
        (False, [" ", *BEGUN], None, [" ", *BEGUN]),
        (False, ["<", *"think>", "H", *"</think>"], None, ["<", *"think>", "H", *"</think>"]),
        (False, [" ", " ", "<think>", "</think>"], None, [" ", " ", "<think>", "</think>"]),
        (False, ["S", "o"], None, []),  # no thought: the rule holds from the start
        (False, ["<", "t", "o"], None, []),
        (False, ["<end>"], None, []),
        (True, [*HM, "<call>", "f"], None, CLOSED),  # a call is no thought, and no answer
        (True, [*HM, "<call>f"], None, CLOSED),
        (True, [*HM, "<end>"], None, CLOSED),
        (True, ["H", *"</thin", "k>{"], None, ["H", *"</thin", "k", ">"]),  # what follows the mark in a token
        (True, "Hmmmm", 2, CLOSED),
        (True, "Hmmmm", 0, ["</think>"]),
        (True, CLOSED, 3, CLOSED),
        (True, CLOSED, 2, CLOSED),
        (True, ["<think>", *"Hmmmm"], 2, BEGUN),
        (False, ["<think>", *"Hmmmm"], 2, BEGUN),
        (False, [*"<think>Hmmmm"], 2, [*"<think>", *CLOSED]),
        (False, ["<think>", *"Hmmmm"], 0, ["<think>", "</think>"]),
        (False, ["S", "o"], 1, []),
    ],
)
def test_the_rule_holds_from_the_thoughts_end(
    is_open: bool, thought: Sequence[str], budget: int | None, first: list[str], at_once: int
) -> None:
    script = Scripted(thought, at_once)
    found = run(
        script,
        structured_output=RULE,
        thoughts=thoughts(is_open=is_open),
        thinking_token_budget=budget,
        seed=5,
    )
    assert found == ([*first, *END], Finish.EOS)
    prompt, sampling, _ = script.requests[-1]
    assert prompt == ids("p", *first)
    assert (sampling.structured_output, sampling.max_new_tokens, sampling.thoughts) == (RULE, 20 - len(first), None)
    assert sampling.seed == 5 + (1 << 32) * bool(first)
    assert [one.structured_output for _, one, _ in script.requests[:-1]] == [None] * (len(script.requests) - 1)


@pytest.mark.parametrize(("is_open", "thought"), [(True, CLOSED), (False, BEGUN)])
def test_markers_may_be_special_tokens(is_open: bool, thought: list[str]) -> None:
    reasoning = thoughts(is_open=is_open)
    found = run(Scripted(thought), vocabulary=WITH_SPECIAL_MARKERS, structured_output=RULE, thoughts=reasoning)
    assert found == ([*thought, *END], Finish.EOS)


@in_one_test("at_once", [1, 2, 9])
@in_one_test(
    ("is_open", "thought", "budget", "first", "parts"),
    [
        (True, "Hmmmm", 2, CLOSED, 2),
        (True, CLOSED, 3, CLOSED, 1),
        (True, [*HM, "<call>"], 4, [*HM, "<call>"], 1),
        (False, ["S", "o"], 1, ["S", "o"], 1),
        (False, ["<think>", *"Hmmmm"], 2, BEGUN, 2),
    ],
)
def test_a_thought_ends_at_its_budget(
    is_open: bool, thought: Sequence[str], budget: int, first: list[str], parts: int, at_once: int
) -> None:
    script = Scripted(thought, at_once)
    found = run(script, thoughts=thoughts(is_open=is_open), thinking_token_budget=budget)
    assert found == ([*first, *END], Finish.EOS)
    assert len(script.requests) == parts
    assert len(script.cancelled) == parts - 1


@in_one_test("at_once", [1, 9])
@in_one_test(
    ("most", "budget", "shown", "finish"),
    [
        (2, None, HM, Finish.LENGTH),  # it ends within the thought
        (3, None, CLOSED, Finish.LENGTH),
        (2, 2, HM, Finish.LENGTH),
        (3, 2, CLOSED, Finish.LENGTH),
        (4, 2, [*CLOSED, "{"], Finish.LENGTH),
    ],
)
def test_a_length_counts_both_parts(
    most: int, budget: int | None, shown: list[str], finish: Finish, at_once: int
) -> None:
    script = Scripted(CLOSED, at_once)
    thought = thoughts(is_open=True)
    assert run(script, most=most, structured_output=RULE, thoughts=thought, thinking_token_budget=budget) == (
        shown,
        finish,
    )
    assert not script.running


@given(
    st.lists(st.sampled_from([*PIECES[128:], *"<k>{H "]), max_size=9),
    st.integers(2, 9),
    st.booleans(),
    st.sampled_from([None, RULE]),
    st.none() | st.integers(0, 5),
    st.integers(1, 12),
)
def test_how_many_tokens_come_at_once_changes_nothing(
    thought: list[str], at_once: int, is_open: bool, rule: StructuredOutput | None, budget: int | None, most: int
) -> None:
    thought_ = thoughts(is_open=is_open)
    sampling: dict[str, Any] = {"structured_output": rule, "thinking_token_budget": budget, "thoughts": thought_}
    found = run(Scripted(thought, at_once), most=most, **sampling)
    assert found == run(Scripted(thought), most=most, **sampling)
    assert len(found[0]) <= most
    if rule is not None and budget is not None and found[1] is Finish.EOS:
        assert found[0][-3:] == END


def test_other_requests_and_calls_pass_unchanged() -> None:
    script = Scripted(["H"])
    engine, adapter = ReasoningEngine(script, None), Adapter("a", 1, "/")
    for sampling in (Sampling(), Sampling(structured_output=RULE), Sampling(thoughts=thoughts(is_open=True))):
        script.requests.clear()
        engine.add(EngineRequest(3, [1], sampling, adapter))
        assert script.requests == [([1], sampling, adapter)]
    engine.change_adapter(4, adapter, drop=True)
    engine.cancel(3)
    assert (script.cancelled, engine.ready) == ([-4, 3], True)


def test_both_parts_keep_what_they_do_not_change() -> None:
    script = Scripted(CLOSED)
    engine = ReasoningEngine(script, VOCABULARY)
    sampling = Sampling(structured_output=RULE, thoughts=thoughts(is_open=True))
    whole = EngineRequest(7, ids("p"), sampling, Adapter("a", 1, "/"), MediaFile("", "", "text", ()))
    engine.add(whole)
    while len(script.whole) < 2:
        engine.step()
    assert [part.goes_on for part in script.whole] == [False, True]
    own: dict[str, Any] = {"key": 0, "ids": (), "parameters": Sampling(), "goes_on": False}
    assert [part._replace(**own) for part in script.whole] == [whole._replace(**own)] * 2


def test_cancelling_and_failing_end_both_parts() -> None:
    script = Scripted("Hmmmm")
    engine = ReasoningEngine(script, VOCABULARY)
    sampling = Sampling(structured_output=RULE, thoughts=thoughts(is_open=True))
    engine.add(EngineRequest(7, [1], sampling))
    engine.add(EngineRequest(8, [1], sampling))
    engine.cancel(7)
    assert len(script.running) == 1
    script.fail = GenerationFailed("lost")
    with pytest.raises(GenerationFailed):
        engine.step()
    script.fail = None
    assert all(output.key not in (7, 8) for output in engine.step()[0].others)


def test_an_engine_that_restarts_between_the_parts_fails_the_request() -> None:
    script = Scripted([*HM, "<end>"])
    engine = ReasoningEngine(script, VOCABULARY)
    engine.add(EngineRequest(7, [1], Sampling(structured_output=RULE, thoughts=thoughts(is_open=True))))
    engine.step()
    engine.step()
    script.ready = False
    last = engine.step()[0].others[-1]
    assert (last.key, last.finish) == (7, Finish.ERROR)


def test_forced_tokens_are_certain_and_have_no_alternatives() -> None:
    script = Scripted("Hmmmm", at_once=2)
    engine = ReasoningEngine(script, VOCABULARY)
    sampling = Sampling(max_new_tokens=20, thoughts=thoughts(is_open=True), thinking_token_budget=2)
    engine.add(EngineRequest(7, ids("p"), sampling))
    (step,) = engine.step()
    (output,) = step.others
    assert (step.keys, output.ids) == ([], ids("H", "m", "</think>"))
    assert output.logprobs == [-1.0, -1.0, 0.0]
    assert output.tops == [[(ids("H")[0], -1.0)], [(ids("m")[0], -1.0)], ()]


def test_a_failure_forgets_what_was_to_come() -> None:
    script = Scripted("Hmmmm")
    engine = ReasoningEngine(script, VOCABULARY)
    sampling = Sampling(max_new_tokens=20, thoughts=thoughts(is_open=True), thinking_token_budget=0)
    engine.add(EngineRequest(7, ids("p"), sampling))
    script.fail = GenerationFailed("it died")
    with pytest.raises(GenerationFailed):
        engine.step()
    script.fail = None
    script.running.clear()
    assert all(not step.keys and not step.others for step in engine.step())


def test_an_error_in_a_thought_ends_it_there() -> None:
    script = Scripted("Hmm")
    engine = ReasoningEngine(script, VOCABULARY)
    engine.add(EngineRequest(7, ids("p"), Sampling(thoughts=thoughts(is_open=True), structured_output=RULE)))
    engine.step()
    (key,) = script.running
    with pytest.MonkeyPatch.context() as patch:
        failed = Output(key, (), (), Finish.ERROR, error="it broke")
        patch.setattr(script, "step", lambda timeout: [Step([], [], [], [failed])])
        assert engine.step()[0].others == [failed._replace(key=7)]
    assert script.cancelled == []
    assert len(script.whole) == 1, "there is no second part"


def test_other_requests_of_a_step_keep_their_tokens_and_outputs() -> None:
    script = Scripted("Hmmmm")
    engine = ReasoningEngine(script, VOCABULARY)
    engine.add(EngineRequest(7, ids("p"), Sampling(thoughts=thoughts(is_open=True), structured_output=RULE)))
    (key,) = script.running
    end = Output(9, ids("y"), [-3.0], Finish.LENGTH)
    step = Step([8, key], ids("x", "H"), [-2.0, -1.0], [end])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "step", lambda timeout: [step])
        (found,) = engine.step()
        assert (found.keys, found.ids, found.logprobs) == ([8], ids("x"), [-2.0])
        assert found.others == [Output(7, (ids("H")[0],), (-1.0,)), end]
        alone = Step([8], ids("x"), [-2.0], [end])
        patch.setattr(script, "step", lambda timeout: [alone])
        assert engine.step() == [alone]


def test_what_does_not_think_goes_to_the_engine_as_it_is() -> None:
    script = Scripted()
    engine = ReasoningEngine(script, None)
    pooled: Any = EngineRequest(3, ids("p"), Pooling("embed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "add", script.whole.append)
        engine.add(pooled)
    assert script.whole == [pooled]
    for ready in (True, False):
        script.ready = ready
        request, given = Request("p"), Prompt("p", ids("p"), VOCABULARY)
        assert [engine.ready, engine.admits(request, given), engine.continues(3)] == [ready] * 3


def test_the_ids_of_a_mark_are_its_longest_tokens() -> None:
    assert VOCABULARY.ids(b"<think>") == (128,)
    assert VOCABULARY.ids(b"</thinner>") == tuple(ids("</thin", *"ner>"))
    assert VOCABULARY.ids("é".encode()) == ()


def test_a_rule_that_allows_text_holds_for_the_thought_too() -> None:
    script = Scripted(CLOSED)
    rule = RULE._replace(allows_text=True)
    run(script, structured_output=rule, thoughts=thoughts(is_open=True))
    assert [sampling.structured_output for _, sampling, _ in script.requests] == [rule]
    script = Scripted(CLOSED)
    run(script, structured_output=rule, thoughts=thoughts(is_open=True), thinking_token_budget=9)
    assert [sampling.structured_output for _, sampling, _ in script.requests] == [None, rule]


@pytest.mark.parametrize("at_once", [1, 9])
def test_an_unknown_id_in_a_thought_ends_its_request_and_no_other(at_once: int) -> None:
    script = Scripted(at_once=at_once)
    batcher = Batcher(ReasoningEngine(script, VOCABULARY))
    thinking = Sampling(max_new_tokens=20, structured_output=RULE, thoughts=thoughts(is_open=True))
    prompt = Prompt("p", ids("p"), VOCABULARY)
    lost, other = (batcher.submit(Request("p", sampling), prompt) for sampling in (thinking, Sampling()))
    script.running[min(script.running, key=lambda key: -key)] = [len(PIECES), *ids(*END)], 20
    ends = {delta.id: delta for _ in range(9) for delta in batcher.step() if delta.finish is not None}
    assert "an id that the tokenizer does not have" in str(ends[lost].error)
    assert ends[other].finish is Finish.EOS
    assert batcher.idle
    assert not script.running


def test_a_budget_of_0_without_room_for_an_answer_is_answered_by_a_step() -> None:
    script = Scripted("Hm")
    thought = thoughts(is_open=True)
    assert run(script, most=1, thoughts=thought, thinking_token_budget=0) == (["</think>"], Finish.LENGTH)
    assert script.requests, "without one nothing wakes the host"
    assert not script.running


def test_an_end_without_its_token_loses_none_of_the_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted()
    engine = ReasoningEngine(script, VOCABULARY)
    engine.add(EngineRequest(7, [1], Sampling(structured_output=RULE, thoughts=thoughts(is_open=True))))
    (key,) = script.running
    last = Step([], [], [], [Output(key, ids("m"), [-1.0], Finish.EOS)])
    monkeypatch.setattr(script, "step", lambda timeout: [last])
    (output,) = engine.step()[0].others
    assert output.ids == ids("m", "</think>")


@in_one_test(
    ("least", "reasoning", "expected"),
    [(0, ids("H"), 0), (5, ids("H", "m"), 3), (2, ids("H", "m"), 0), (1, ids("H", "m"), 0), (5, [], 5), (5, None, 5)],
)
def test_the_second_part_owes_what_the_reasoning_left_of_the_minimum(
    least: int, reasoning: list[int] | None, expected: int
) -> None:
    sampling = Sampling(max_new_tokens=9, min_new_tokens=least)
    second = second_part(EngineRequest(7, [1], sampling), reasoning)
    assert (second.sampling.min_new_tokens, second.sampling.max_new_tokens) == (expected, 9 - len(reasoning or []))


@in_one_test(
    ("reasoning", "prompt", "seed", "scored"),
    [(None, [1], 5, True), ([], [1], 5 + (1 << 32), False), ([2, 3], [1, 2, 3], 5 + (1 << 32), False)],
)
def test_only_a_second_part_without_reasoning_is_the_request_itself(
    reasoning: list[int] | None, prompt: list[int], seed: int, scored: bool
) -> None:
    sampling = Sampling(
        max_new_tokens=9,
        seed=5,
        prompt_logprobs=True,
        structured_output=RULE,
        thinking_token_budget=2,
        thoughts=thoughts(is_open=True),
    )
    second = second_part(EngineRequest(7, [1], sampling), reasoning)
    changed = sampling._replace(
        max_new_tokens=9 - len(reasoning or []),
        seed=seed,
        prompt_logprobs=scored,
        thinking_token_budget=None,
        thoughts=None,
    )
    assert second == EngineRequest(7, prompt, changed, goes_on=reasoning is not None)
