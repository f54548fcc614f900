"""The engine interface that the batcher uses, and an engine wrapper that controls the reasoning of reasoning models.

`EngineSupervisor`, `ReplicaSet` and the wrapper implement the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from handler.core.reasoning import AnswerStart
from handler.core.text import Detokenizer, Prompt, Vocabulary
from handler.core.values import Adapter, Finish, Pooling, Request, Thoughts
from handler.engines.base import EngineRequest, Output, Step


class SteppedEngine(Protocol):
    """The batcher's interface to an engine or a set of replicas. `process/supervisor.py` describes the calls."""

    @property
    def ready(self) -> bool: ...

    def admits(self, request: Request, prompt: Prompt) -> bool:
        """Return whether the engine accepts a request now. If so, the next calls to `add` must pass its sequences."""

    def continues(self, key: int) -> bool:
        """Return whether the engine accepts another part of a request that ran in the last step.

        If so, the next call to `add` must pass that part.
        """

    def add(self, request: EngineRequest) -> None: ...
    def cancel(self, key: int) -> None: ...
    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None: ...
    def step(self, timeout: float = 0.0) -> list[Step]: ...


class EngineWrapper:
    """Base class of engines that send some requests to another engine in a different form.

    Subclasses implement `add`, `cancel` and `step` of `SteppedEngine`. All other calls are passed to the engine.

    Args:
        engine: engine that runs the requests.
    """

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine

    @property
    def ready(self) -> bool:
        return self._engine.ready

    def admits(self, request: Request, prompt: Prompt) -> bool:
        return self._engine.admits(request, prompt)

    def continues(self, key: int) -> bool:
        return self._engine.continues(key)

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        self._engine.change_adapter(key, adapter, drop=drop)


def join(steps: Sequence[Step]) -> Step:
    """Merge several steps into one. If a sequence has several tokens, they are merged into a single output.

    Raises:
        ValueError: the columns of a step differ in length.
    """
    if len(steps) == 1:
        (step,) = steps
        if not len(step.keys) == len(step.ids) == len(step.logprobs):
            raise ValueError(_UNEVEN)
        return step
    columns: dict[int, tuple[list[int], list[float | None]]] = {}  # ids and log-probabilities by key
    others: list[Output] = []
    for keys, step_ids, step_logprobs, outputs in steps:
        if not len(keys) == len(step_ids) == len(step_logprobs):
            raise ValueError(_UNEVEN)
        for key, id, logprob in zip(keys, step_ids, step_logprobs):  # noqa: B905  # `strict` would take long
            if key in columns:
                ids, logprobs = columns[key]
                ids.append(id)
                logprobs.append(logprob)
            else:
                columns[key] = [id], [logprob]
        for output in outputs:
            if output.key in columns:  # earlier tokens of the sequence come first
                ids, logprobs = columns.pop(output.key)
                if output.is_plain and output.finish is not Finish.ERROR:  # it contains only tokens
                    output = output._replace(ids=[*ids, *output.ids], logprobs=[*logprobs, *output.logprobs])
                else:
                    others.append(Output(output.key, ids, logprobs))
            others.append(output)
    later = {output.key for output in others}  # for these keys, the tokens in columns come after the outputs
    joined = Step([], [], [], others)
    for key, (ids, logprobs) in columns.items():
        if len(ids) > 1 or key in later:
            others.append(Output(key, ids, logprobs))
        else:
            joined.keys.append(key)
            joined.ids.append(ids[0])
            joined.logprobs.append(logprobs[0])
    return joined


def read_some(step: Step, keys: Mapping[int, object], take: Callable[[Output, list[Output]], None]) -> Step:
    """Process the outputs of some sequences. Return the step for the batcher, with all other outputs unchanged.

    Args:
        keys: the keys of these sequences. `take` may remove some.
        take: processes an output, and appends the outputs that replace it to a list.
    """
    if keys.keys().isdisjoint(step.keys) and not any(output.key in keys for output in step.others):
        return step
    result = Step.of([])
    for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
        if key in keys:
            take(Output(key, (id,), (logprob,)), result.others)
        else:
            result.add(key, id, logprob)
    for output in step.others:
        if output.key in keys:
            take(output, result.others)
        else:
            result.others.append(output)
    return result


_UNEVEN = "a step's columns differ in length"

# -- requests that run in two parts: the reasoning, then the response -------------------------------------------------


_FIRST = 1 << 48  # added to the key of a first part
_SEEDS = 1 << 32  # difference between the seeds of the two parts
_TAIL = 256  # last characters of the text, enough for a marker and the rest of its token


class ReasoningEngine(EngineWrapper):
    """A `SteppedEngine` that applies structured output only after the reasoning, and limits the reasoning tokens.

    A request that needs this runs in two parts. The first part generates the reasoning, without structured output, and
    is cancelled when the reasoning ends. The second part generates the response with structured output, and its prompt
    ends with the reasoning. Engines therefore need no special support for this, and find most of the second prompt in
    their prefix cache. All other requests are passed to the engine unchanged.

    Args:
        engine: engine that runs both parts.
        vocabulary: vocabulary of the engine, or None if the engine does not support `thinking_token_budget`.
    """

    def __init__(self, engine: SteppedEngine, vocabulary: Vocabulary | None) -> None:
        super().__init__(engine)
        self._vocabulary = vocabulary
        self._first: dict[int, _FirstPart] = {}  # by the engine's key
        self._late: list[Output] = []  # outputs that the next step returns

    def add(self, request: EngineRequest) -> None:
        sampling = request.parameters
        if isinstance(sampling, Pooling):
            return self._engine.add(request)
        reasoning, budget, rule = sampling.thoughts, sampling.thinking_token_budget, sampling.structured_output
        if reasoning is None or (budget is None and (rule is None or rule.allows_text)):
            return self._engine.add(request)
        assert self._vocabulary is not None  # otherwise the engine's capabilities exclude `thinking_token_budget`
        part = _FirstPart(request, reasoning, self._vocabulary)
        if reasoning.is_open and budget == 0 and sampling.max_new_tokens > len(reasoning.closing):
            self._continue(part, _End(reasoning.closing), Output(request.key, (), ()), self._late, fits=True)
        else:
            key = request.key + _FIRST
            self._first[key] = part
            free = sampling._replace(structured_output=None, thinking_token_budget=None, thoughts=None)
            self._engine.add(request._replace(key=key, parameters=free))

    def cancel(self, key: int) -> None:
        self._engine.cancel(key if self._first.pop(key + _FIRST, None) is None else key + _FIRST)

    def step(self, timeout: float = 0.0) -> list[Step]:
        try:
            steps = self._engine.step(timeout)
        except Exception:
            self._first.clear()
            self._late.clear()
            raise
        if self._first:
            steps = [read_some(step, self._first, self._advance) for step in steps]
        if self._late:
            steps.insert(0, Step.of(self._late))
            self._late = []
        return steps

    def _advance(self, output: Output, others: list[Output]) -> None:
        """Process the output of a first part, and start the second part when the reasoning has ended."""
        key, part = output.key, self._first[output.key]
        output = output._replace(key=part.request.key)
        try:
            end = None if output.finish is Finish.ERROR else part.feed(output)
        except IndexError:  # an id outside the vocabulary: the batcher ends only this request
            return others.append(output)
        if end is not None:
            del self._first[key]
            fits = self._engine.continues(key)
            self._engine.cancel(key)
            return self._continue(part, end, output, others, fits=fits)
        if part.undecided and output.finish is None:
            part.held.append(output)
            return
        others += [*part.held, output]
        part.held.clear()
        if output.finish is not None:
            del self._first[key]

    def _continue(self, part: _FirstPart, end: _End, output: Output, others: list[Output], *, fits: bool) -> None:
        """Start the second part. End the request instead if no tokens are left for it, or if it does not fit.

        Args:
            output: last output of the first part.
            fits: whether the engine still accepts the second part; a restarted engine does not.
        """
        ids = part.ids
        if not end.again:
            left = part.request.sampling.max_new_tokens - len(ids)
            new = end.ids[:left]
            ids = [*ids, *new]
            finish = Finish.LENGTH if left <= len(new) else None
            others += [*part.held, _replace_end(output, end.num_kept, new, finish)]
            if finish is not None:
                return
        if not fits:
            error = "the engine was restarted between the reasoning and the response"
            others.append(Output(part.request.key, finish=Finish.ERROR, error=error))
            return
        self._engine.add(second_part(part.request, None if end.again else ids))


def second_part(request: EngineRequest, ids: Sequence[int] | None) -> EngineRequest:
    """Return the request of the second part, which generates the response after the reasoning.

    Args:
        request: the request as the batcher sent it.
        ids: token ids of the reasoning, or None if the output began without reasoning and is generated again.
    """
    sampling, reasoning = request.sampling, ids or ()
    parameters = sampling._replace(
        max_new_tokens=sampling.max_new_tokens - len(reasoning),
        min_new_tokens=max(sampling.min_new_tokens - len(reasoning), 0),
        seed=sampling.seed if ids is None else sampling.seed_of(_SEEDS),
        prompt_logprobs=sampling.prompt_logprobs and ids is None,
        thoughts=None,
        thinking_token_budget=None,
    )
    return request._replace(ids=[*request.ids, *reasoning], parameters=parameters, goes_on=ids is not None)


class _End(NamedTuple):
    """The end of a first part.

    Attributes:
        ids: ids of the tokens to insert between the kept tokens and the second part.
        num_kept: number of tokens of the last output that are kept.
        again: whether to discard all tokens and generate the output again, because it began without reasoning.
    """

    ids: Sequence[int] = ()
    num_kept: int = 0
    again: bool = False


class _FirstPart:
    """The first part of a request, in which the engine generates the reasoning.

    Attributes:
        ids: ids of the tokens generated so far.
        held: outputs that are not sent to the client while `undecided` is true.
        undecided: whether outputs are held back because the response is structured and may still begin with reasoning.
    """

    def __init__(self, request: EngineRequest, reasoning: Thoughts, vocabulary: Vocabulary) -> None:
        self.request = request
        self.ids: list[int] = []
        self.held: list[Output] = []
        self._guided = request.sampling.structured_output is not None
        self._budget = request.sampling.thinking_token_budget
        self._reasoning = reasoning
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, skip_special=False)
        self._start = AnswerStart(reasoning)
        self._tail = ""  # last characters of the text
        self._num_reasoning = 0  # number of tokens in the reasoning, without its markers
        self._passes = False  # whether the reasoning has ended, and its end needs no action

    @property
    def undecided(self) -> bool:
        return self._guided and not self._start.is_open

    def feed(self, output: Output) -> _End | None:
        """Add the tokens of an output. Return the end of this part if the second part must start now, or None."""
        if self._passes:
            return None
        if self._is_spent:  # the budget is 0, and there is no room for a second part
            return _End(self._reasoning.closing)
        # An end-of-sequence token ends the reasoning only, because the response must follow the structured output.
        ends = self._guided and output.finish is Finish.EOS and (self.undecided or bool(self._reasoning.closing))
        ids = output.ids
        if ends and ids and ids[-1] in self._vocabulary.special:  # some servers omit the end-of-sequence token
            ids = ids[:-1]
        for index, id in enumerate(ids):
            if (end := self._push(id, index)) is not None or self._passes:
                return end
        if self.undecided and output.finish is not None:
            return _End(again=True)
        return _End(self._reasoning.closing, len(ids)) if ends else None

    def _push(self, id: int, index: int) -> _End | None:
        was_open, text = self._start.is_open, self._detokenizer.feed(id)
        _, response = self._start.feed(text)
        self._tail = (self._tail + text)[-_TAIL:]
        if response is not None:
            return self._leave(id, index, response)
        self.ids.append(id)
        self._num_reasoning += was_open and text.strip() not in self._reasoning.begin
        return _End(self._reasoning.closing, index + 1) if self._is_spent else None

    @property
    def _is_spent(self) -> bool:
        """Whether the reasoning is open and has used up its token budget."""
        return self._budget is not None and self._start.is_open and self._num_reasoning >= self._budget

    def _leave(self, id: int, index: int, response: str) -> _End | None:
        """End the reasoning within a token. Return the end of this part, or None if it continues with the response.

        Args:
            response: the token's text after the end of the reasoning.
        """
        if not self._guided:
            self._passes = True
            return None
        if not self._start.is_open:
            return _End(again=True)
        if self._tail[: len(self._tail) - len(response)].endswith(self._reasoning.calls):
            return _End(self._reasoning.closing, index)  # a tool call would not follow the structured output
        if not response:
            self.ids.append(id)
            return _End((), index + 1)
        piece = self._vocabulary.pieces[id]
        return _End(self._vocabulary.ids(piece[: len(piece) - len(response.encode())]) or (id,), index)


def _replace_end(output: Output, num_kept: int, ids: Sequence[int], finish: Finish | None) -> Output:
    """Replace all but the first `num_kept` ids of an output. The new tokens are forced: their log-probability is 0."""
    tops = None if output.tops is None else [*output.tops[:num_kept], *[()] * len(ids)]
    logprobs = [*output.logprobs[:num_kept], *[0.0] * len(ids)]
    return output._replace(ids=[*output.ids[:num_kept], *ids], logprobs=logprobs, finish=finish, tops=tops)
