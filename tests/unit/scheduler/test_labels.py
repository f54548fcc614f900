"""Labels on engines that have no operation for them: alternatives first, then a request for each other label."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from handler.core.errors import GenerationFailed
from handler.core.text import Prompt
from handler.core.values import Adapter, FieldNames, Finish, Pooling, Request, Sampling
from handler.engines.base import EngineRequest, Output, Step
from handler.scheduler.batcher import Batcher
from handler.scheduler.labels import MAX_TOPS, LabelEngine
from tests.doubles.scripted_engine import prompt

PROMPT = [1, 2, 3]
LOGPROBS = {id: -float(id) / 10 for id in range(1, 40)}
"""The log-probability of each id after the prompt."""

ONLY_ALTERNATIVES = ("prompt_logprobs", "allowed_token_ids")
ONLY_ALLOWED = ("prompt_logprobs",)
"""What engines do not support."""


@dataclass
class ScoringEngine:
    """Answers each request in its own step, with `LOGPROBS` as alternatives and as the scores of tokens."""

    ready: bool = True
    fail: Exception | None = None
    silent: bool = False  # whether scores are missing
    processed: bool = False  # whether log-probabilities are those among the allowed tokens
    max_tops: int = MAX_TOPS  # alternatives that the operator allows
    requests: list[EngineRequest] = field(default_factory=list)
    running: list[EngineRequest] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    def admits(self, request: Request, prompt: Prompt) -> bool:
        return True

    def continues(self, key: int) -> bool:
        return self.ready

    def add(self, request: EngineRequest) -> None:
        self.requests.append(request)
        self.running.append(request)

    def cancel(self, key: int) -> None:
        self.running = [request for request in self.running if request.key != key]
        self.cancelled.append(key)

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        raise NotImplementedError

    def step(self, timeout: float = 0.0) -> list[Step]:
        if self.fail is not None:
            raise self.fail
        step = Step.of([])
        for request in self.running:
            sampling, last = request.sampling, request.ids[-1]
            tops = [[(id, LOGPROBS[id]) for id in range(1, sampling.top_logprobs + 1)]]
            scores = [None, -1.0, -1.0, LOGPROBS[last]] if sampling.prompt_logprobs else None
            (id,) = sampling.allowed_token_ids or (1,)
            logprob = 0.0 if self.processed and sampling.allowed_token_ids else LOGPROBS[id]
            output = Output(request.key, (id,), (None if self.silent else logprob,), Finish.LENGTH)
            if sampling.top_logprobs > self.max_tops:
                output = Output(request.key, finish=Finish.ERROR, error="too many alternatives", refused=True)
            elif not self.silent:
                output = output._replace(prompt_logprobs=scores, tops=tops if sampling.top_logprobs else None)
            step.others.append(output)
        self.running = []
        return [step]


def labels(key: int, *ids: int) -> EngineRequest:
    pooling = Pooling("labels", labels=tuple(f"L{id}" for id in ids), label_ids=ids, cache_salt="salt")
    return EngineRequest(key, PROMPT, pooling, Adapter("a", 1, "/a"))


def outputs(engine: LabelEngine, *, num_steps: int) -> list[Output]:
    return [output for _ in range(num_steps) for step in engine.step() for output in step.others]


def test_labels_among_the_alternatives_take_one_request() -> None:
    script = ScoringEngine()
    engine = LabelEngine(script, ())
    engine.add(labels(7, 5, 3))
    (output,) = outputs(engine, num_steps=1)
    assert output.extras is not None
    assert (output.key, output.finish, output.extras.vector) == (7, Finish.STOP, [-0.5, -0.3, -0.1])
    (request,) = script.requests
    assert request.adapter == labels(7, 5).adapter
    assert request.sampling == Sampling(max_new_tokens=1, top_logprobs=MAX_TOPS, cache_salt="salt", ignore_eos=True)


def test_a_label_that_is_no_alternative_is_scored() -> None:
    script = ScoringEngine()
    engine = LabelEngine(script, (), max_tops=5)
    engine.add(labels(7, 9, 3, 11))
    (output,) = outputs(engine, num_steps=3)
    assert output.extras is not None
    assert output.extras.vector == [-0.9, -0.3, -1.1, -0.1]
    assert [request.ids for request in script.requests] == [PROMPT, [*PROMPT, 9], [*PROMPT, 11]]
    assert [request.sampling.top_logprobs for request in script.requests] == [5, 0, 0]


def test_an_engine_without_alternatives_scores_every_label() -> None:
    script = ScoringEngine()
    engine = LabelEngine(script, ("top_logprobs",))
    engine.add(labels(7, 9, 3))
    (output,) = outputs(engine, num_steps=3)
    assert output.extras is not None
    assert output.extras.vector == [-0.9, -0.3, -0.1]
    assert script.requests[0].sampling.top_logprobs == 0


def test_a_label_is_the_only_allowed_token_of_an_engine_that_does_not_score_prompts() -> None:
    script = ScoringEngine()
    engine = LabelEngine(script, ONLY_ALLOWED, max_tops=5)
    engine.add(labels(7, 9, 3, 11))
    (output,) = outputs(engine, num_steps=3)
    assert output.extras is not None
    assert output.extras.vector == [-0.9, -0.3, -1.1, -0.1]
    assert [(request.ids, request.sampling.allowed_token_ids) for request in script.requests] == [
        (PROMPT, ()), (PROMPT, (9,)), (PROMPT, (11,)),
    ]  # fmt: skip


def test_log_probabilities_among_the_allowed_tokens_are_refused() -> None:
    engine = LabelEngine(ScoringEngine(processed=True), ONLY_ALLOWED, max_tops=5)
    engine.add(labels(7, 9, 3))
    (output,) = outputs(engine, num_steps=2)
    assert output.refused
    assert "--logprobs-mode raw_logprobs" in (output.error or "")


@pytest.mark.parametrize("unsupported", [(), ONLY_ALLOWED])
def test_a_server_that_allows_fewer_alternatives_is_asked_without_them(unsupported: tuple[str, ...]) -> None:
    script = ScoringEngine(max_tops=4)
    engine = LabelEngine(script, unsupported)
    for key, num_steps in ((7, 4), (8, 3)):  # the second request need not be refused first
        engine.add(labels(key, 9, 8))
        (output,) = outputs(engine, num_steps=num_steps)
        assert output.extras is not None
        assert output.extras.vector == [-0.9, -0.8, -0.1]
    assert [request.sampling.top_logprobs for request in script.requests] == [MAX_TOPS, 0, 0, 0, 0, 0, 0]


def test_a_refused_request_is_refused_without_alternatives_and_if_labels_need_them() -> None:
    for unsupported, num_steps in ((ONLY_ALLOWED, 2), (ONLY_ALTERNATIVES, 1)):
        engine = LabelEngine(ScoringEngine(max_tops=-1), unsupported)
        engine.add(labels(7, 9, 3))
        (output,) = outputs(engine, num_steps=num_steps)
        assert (output.refused, output.error) == (True, "too many alternatives")


def test_a_label_that_cannot_be_read_is_refused_by_name() -> None:
    engine = LabelEngine(ScoringEngine(), ONLY_ALTERNATIVES, max_tops=5)
    engine.add(labels(7, 9))
    (output,) = outputs(engine, num_steps=1)
    assert output.refused
    assert output.error == (
        "the label 'L9' is not among the 5 most likely tokens, and the engine does not report the probabilities of "
        "others"
    )
    assert outputs(engine, num_steps=2) == []


def test_the_error_for_a_label_names_its_question() -> None:
    """A request may have many questions, whose labels are the same."""
    batcher = Batcher(LabelEngine(ScoringEngine(), ("prompt_logprobs",), max_tops=5))
    pooling = Pooling("labels", labels=("L3", "L9"), label_ids=(3, 9))
    for index in range(2):
        names = FieldNames(prompt=f"input with questions[{index}]")
        batcher.submit(Request("", pooling=pooling, names=names), prompt("?"), follows=index > 0)
    messages = [str(delta.error) for delta in batcher.step()]
    assert [message.partition(": the label 'L9'")[0] for message in messages] == [
        f"the engine refused the request: input with questions[{index}]" for index in range(2)
    ]


def test_other_requests_pass_unchanged() -> None:
    script = ScoringEngine()
    engine = LabelEngine(script, ())
    plain = EngineRequest(8, PROMPT, Sampling(max_new_tokens=1))
    engine.add(labels(7, 9, 30))
    engine.add(plain)
    first = engine.step()[0].others
    assert [output.key for output in first] == [8]
    assert script.requests[1] is plain
    assert [output.key for output in outputs(engine, num_steps=2)] == [7]


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_cancelled_request_ends(num_before: int) -> None:
    script = ScoringEngine()
    engine = LabelEngine(script, (), max_tops=5)
    engine.add(labels(7, 9, 30))
    assert outputs(engine, num_steps=num_before) == []
    engine.cancel(7)
    assert script.cancelled == [7]
    assert outputs(engine, num_steps=3) == []


def test_a_restarted_engine_ends_the_request() -> None:
    script = ScoringEngine()
    engine = LabelEngine(script, (), max_tops=5)
    engine.add(labels(7, 9))
    script.ready = False
    (output,) = outputs(engine, num_steps=1)
    assert (output.finish, output.error) == (Finish.ERROR, "the engine was restarted between two labels")


def test_a_broken_engine_leaves_no_request() -> None:
    script = ScoringEngine(fail=GenerationFailed("died"))
    engine = LabelEngine(script, ())
    engine.add(labels(7, 5))
    with pytest.raises(GenerationFailed, match="died"):
        engine.step()
    script.fail = None
    assert [output.ids for output in outputs(engine, num_steps=1)] == [(1,)], "the key is free for another request"


def test_an_engine_that_returns_no_score_fails_the_request() -> None:
    script = ScoringEngine()
    engine = LabelEngine(script, (), max_tops=5)
    engine.add(labels(7, 9))
    assert outputs(engine, num_steps=1) == []
    script.silent = True
    (output,) = outputs(engine, num_steps=1)
    assert output.error == "the engine returned no log-probability"
    assert outputs(engine, num_steps=1) == []
