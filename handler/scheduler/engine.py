"""The batcher's view of an engine, or of several, which the supervisor and the set of replicas implement; its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from handler.core.text import Detokenizer, Prompt, Vocabulary
from handler.core.values import Adapter, AnswerStart, Finish, Pooling, Request, Thoughts
from handler.engines.base import EngineRequest, Output, Step


class SteppedEngine(Protocol):
    """Runs requests. `process/supervisor.py` describes the calls."""

    @property
    def ready(self) -> bool: ...

    def admits(self, request: Request, prompt: Prompt) -> bool:
        """Return whether it takes a request now; the next calls of `add` bring its sequences."""

    def continues(self, key: int) -> bool:
        """Return whether it takes another part of a request that ran in the last step; the next call of `add`
        brings it.
        """

    def add(self, request: EngineRequest) -> None: ...
    def cancel(self, key: int) -> None: ...
    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None: ...
    def step(self, timeout: float = 0.0) -> list[Step]: ...


def join(steps: Sequence[Step]) -> Step:
    """Join steps that waited together: several tokens of a sequence become one output.

    Raises:
        ValueError: a step's columns differ in length.
    """
    if any(not len(step.keys) == len(step.ids) == len(step.logprobs) for step in steps):
        raise ValueError("a step's columns differ in length")
    if len(steps) == 1:
        return steps[0]
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[float | None]] = {}
    others: list[Output] = []
    for step in steps:
        for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
            if key in ids:
                ids[key].append(id)
                logprobs[key].append(logprob)
            else:
                ids[key], logprobs[key] = [id], [logprob]
        for output in step.others:
            if output.key in ids:  # its earlier tokens come first
                earlier = Output(output.key, ids.pop(output.key), logprobs.pop(output.key))
                if output.is_plain and output.finish is not Finish.ERROR:  # else it brings more than tokens
                    all_ids, all_logprobs = [*earlier.ids, *output.ids], [*earlier.logprobs, *output.logprobs]
                    output = output._replace(ids=all_ids, logprobs=all_logprobs)
                else:
                    others.append(earlier)
            others.append(output)
    later = {output.key for output in others}  # whose tokens in columns come after these outputs
    others += [Output(key, ids[key], logprobs[key]) for key in ids if len(ids[key]) > 1 or key in later]
    single = [key for key in ids if len(ids[key]) == 1 and key not in later]
    return Step(single, [ids[key][0] for key in single], [logprobs[key][0] for key in single], others)


# -- requests in two parts: a thought, then the answer -----------------------------------------------------------------


_FIRST = 1 << 48  # added to the key of a first part
_SEEDS = 1 << 32  # between the seeds of the two parts
_TAIL = 256  # characters of a text's end that hold a mark and what follows it in one token


class ThinkingEngine:
    """A `SteppedEngine` whose structured output begins after the thought, and whose thoughts end at their budget.

    The engine gets such a request twice. The first part has no structured output. It is cancelled where the thought
    ends. The second part's prompt ends with the thought, and has the structured output. So engines need no feature of
    their own for it, and their prefix cache has most of the second prompt. All other requests go to the engine
    unchanged.

    Args:
        engine: runs both parts.
        vocabulary: the engine's; None if no request has a thought to end.
    """

    def __init__(self, engine: SteppedEngine, vocabulary: Vocabulary | None) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._first: dict[int, _FirstPart] = {}  # by the engine's key
        self._late: list[Output] = []  # for the next step

    @property
    def ready(self) -> bool:
        return self._engine.ready

    def admits(self, request: Request, prompt: Prompt) -> bool:
        return self._engine.admits(request, prompt)

    def continues(self, key: int) -> bool:
        return self._engine.continues(key)

    def add(self, request: EngineRequest) -> None:
        sampling = request.parameters
        if isinstance(sampling, Pooling):
            return self._engine.add(request)
        thoughts, budget, rule = sampling.thoughts, sampling.thinking_token_budget, sampling.structured_output
        if thoughts is None or (budget is None and (rule is None or rule.allows_text)):
            return self._engine.add(request)
        assert self._vocabulary is not None  # such an engine's capabilities have no `thinking_token_budget`
        part = _FirstPart(request, thoughts, self._vocabulary)
        if thoughts.is_open and budget == 0 and sampling.max_new_tokens > len(thoughts.closing):
            self._continue(part, _End(thoughts.closing), Output(request.key, (), ()), self._late, fits=True)
        else:
            key = request.key + _FIRST
            self._first[key] = part
            free = sampling._replace(structured_output=None, thinking_token_budget=None, thoughts=None)
            self._engine.add(request._replace(key=key, parameters=free))

    def cancel(self, key: int) -> None:
        self._engine.cancel(key if self._first.pop(key + _FIRST, None) is None else key + _FIRST)

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        self._engine.change_adapter(key, adapter, drop=drop)

    def step(self, timeout: float = 0.0) -> list[Step]:
        try:
            steps = self._engine.step(timeout)
        except Exception:
            self._first.clear()
            self._late.clear()
            raise
        if self._first:
            steps = [self._read(step) for step in steps]
        if self._late:
            steps.insert(0, Step([], [], [], self._late))
            self._late = []
        return steps

    def _read(self, step: Step) -> Step:
        """Read the tokens of first parts in a step; leave the others' as they are."""
        first = self._first
        if first.keys().isdisjoint(step.keys) and not any(output.key in first for output in step.others):
            return step
        result = Step([], [], [], [])
        for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
            if key in first:
                self._advance(first[key], Output(key, (id,), (logprob,)), result.others)
            else:
                result.keys.append(key)
                result.ids.append(id)
                result.logprobs.append(logprob)
        for output in step.others:
            if output.key in first:
                self._advance(first[output.key], output, result.others)
            else:
                result.others.append(output)
        return result

    def _advance(self, part: _FirstPart, output: Output, others: list[Output]) -> None:
        """Read a first part's tokens, and begin the second part where the thought ends."""
        key, output = output.key, output._replace(key=part.key)
        try:
            end = None if output.finish is Finish.ERROR else part.feed(output)
        except IndexError:  # an id that no token has: whoever gets it ends this request, and no other
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
        """Start the second part.

        Args:
            output: the last one of the first part.
            fits: the engine still accepts it; a restarted engine does not.
        """
        sampling, ids = part.sampling, part.ids
        if end.again:
            ids = []
        else:
            left = sampling.max_new_tokens - len(ids)
            new = end.ids[:left]
            ids = [*ids, *new]
            finish = Finish.LENGTH if left <= len(new) else None
            others += [*part.held, _replace_end(output, end.num_kept, new, finish)]
            if finish is not None:
                return
        if not fits:
            others.append(Output(part.key, (), (), Finish.ERROR, error="it was restarted after the thought"))
            return
        second = sampling._replace(
            max_new_tokens=sampling.max_new_tokens - len(ids),
            min_new_tokens=max(sampling.min_new_tokens - len(ids), 0),
            seed=sampling.seed if end.again else sampling.seed_of(_SEEDS),
            prompt_logprobs=sampling.prompt_logprobs and end.again,
            thoughts=None,
            thinking_token_budget=None,
        )
        whole = [*part.request.ids, *ids]
        self._engine.add(part.request._replace(ids=whole, parameters=second, goes_on=not end.again))


class _End(NamedTuple):
    """The end of a first part.

    Attributes:
        ids: tokens between the kept ones and the second part.
        num_kept: number of the last output's tokens that are kept.
        again: nothing is kept, and the answer is generated again: it begins without a thought.
    """

    ids: Sequence[int] = ()
    num_kept: int = 0
    again: bool = False


class _FirstPart:
    """A request whose thought the engine generates.

    Attributes:
        ids: generated so far.
        held: outputs held back while it is open whether the answer begins with a thought.
        undecided: it is still open whether the answer begins with a thought; nothing is shown until then.
    """

    def __init__(self, request: EngineRequest, thoughts: Thoughts, vocabulary: Vocabulary) -> None:
        self.request = request
        self.key = request.key
        self.sampling = request.sampling
        self.ids: list[int] = []
        self.held: list[Output] = []
        self._guided = self.sampling.structured_output is not None
        self._thoughts = thoughts
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, skip_special=False)
        self._start = AnswerStart(thoughts)
        self._tail = ""  # the end of the text
        self._num_thoughts = 0  # tokens of the thought, without marks
        self._passes = False  # nothing is looked for any more

    @property
    def undecided(self) -> bool:
        return self._guided and not self._start.is_open

    def feed(self, output: Output) -> _End | None:
        """Add the tokens of an output; return the end where the second part has to begin."""
        if self._passes:
            return None
        if self._is_spent:  # a budget of 0, and no room for a second part
            return _End(self._thoughts.closing)
        # An end token in the thought only ends the thought: the rule says where the answer ends.
        ends = self._guided and output.finish is Finish.EOS and (self.undecided or bool(self._thoughts.closing))
        ids = output.ids
        if ends and ids and ids[-1] in self._vocabulary.special:  # some servers leave it out
            ids = ids[:-1]
        for index, id in enumerate(ids):
            if (end := self._push(id, index)) is not None or self._passes:
                return end
        if self.undecided and output.finish is not None:
            return _End(again=True)
        return _End(self._thoughts.closing, len(ids)) if ends else None

    def _push(self, id: int, index: int) -> _End | None:
        was_open, text = self._start.is_open, self._detokenizer.feed(id)
        _, answer = self._start.feed(text)
        self._tail = (self._tail + text)[-_TAIL:]
        if answer is not None:
            return self._leave(id, index, answer)
        self.ids.append(id)
        self._num_thoughts += was_open and text.strip() not in self._thoughts.begin
        return _End(self._thoughts.closing, index + 1) if self._is_spent else None

    @property
    def _is_spent(self) -> bool:
        """Return whether the open thought has used up its token budget."""
        budget = self.sampling.thinking_token_budget
        return budget is not None and self._start.is_open and self._num_thoughts >= budget

    def _leave(self, id: int, index: int, answer: str) -> _End | None:
        """End the thought with a token; `answer` is its text after that."""
        if not self._guided:
            self._passes = True
            return None
        if not self._start.is_open:
            return _End(again=True)
        if self._tail[: len(self._tail) - len(answer)].endswith(self._thoughts.calls):
            return _End(self._thoughts.closing, index)  # a call is no thought, and does not follow the rule
        if not answer:
            self.ids.append(id)
            return _End((), index + 1)
        piece = self._vocabulary.pieces[id]
        return _End(self._vocabulary.ids(piece[: len(piece) - len(answer.encode())]) or (id,), index)


def _replace_end(output: Output, num_kept: int, ids: Sequence[int], finish: Finish | None) -> Output:
    """Replace an output's last ids. No other tokens were possible: their log-probability is 0."""
    tops = None if output.tops is None else [*output.tops[:num_kept], *[()] * len(ids)]
    logprobs = [*output.logprobs[:num_kept], *[0.0] * len(ids)]
    return output._replace(ids=[*output.ids[:num_kept], *ids], logprobs=logprobs, finish=finish, tops=tops)
