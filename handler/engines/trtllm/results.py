"""Reads one request's result while it grows.

TensorRT-LLM returns one object whose lists grow (`GenerationResult` in executor/result.py), so the new tokens follow
from our own count. Its `*_diff` lists repeat and lose tokens under load. Each message may have several tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handler.core.values import NO_EXTRAS, Extras, Finish
from handler.engines.base import Alternatives, EngineRequest, Output, Step, describe, failed
from handler.engines.logprobs import score
from handler.engines.trtllm.sampling import Model, own_stops, stops


@dataclass(frozen=True)
class RequestOptions:
    """The parts of an answer that a request needs, and the ids that end it."""

    prompt: Sequence[int]
    width: int = 1  # sequences: beams
    stops: frozenset[int] = frozenset()  # ids that end it as STOP
    own_stops: frozenset[int] = frozenset()  # ids that the engine does not stop at
    least: int = 0  # tokens before which none of `own_stops` counts
    tops: int = 0
    prompt_logprobs: bool = False
    prompt_tops: int = 0
    context_logits: bool = False
    generation_logits: bool = False
    goes_on: bool = False  # the prompt ends with a part of the answer

    @property
    def whole(self) -> bool:
        """Whether the answer comes at once: beams exist only at the end, and the last message has all logits."""
        return self.width > 1 or self.generation_logits

    @property
    def prompt_logits(self) -> bool:
        """Whether the logits of all the prompt's tokens are needed."""
        return self.prompt_logprobs or self.context_logits

    @property
    def plain(self) -> bool:
        """Whether only tokens come, and the engine ends the answer."""
        return not (self.whole or self.own_stops or self.tops or self.prompt_logits)


def request_options(request: EngineRequest, model: Model) -> RequestOptions:
    sampling = request.sampling
    return RequestOptions(
        prompt=request.ids,
        width=sampling.num_beams,
        stops=frozenset(sampling.stop_token_ids),
        own_stops=stops(sampling, model) if own_stops(sampling, model) else frozenset(),
        least=sampling.min_new_tokens,
        tops=sampling.top_logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        prompt_tops=sampling.prompt_top_logprobs,
        context_logits=sampling.return_context_logits,
        generation_logits=sampling.return_generation_logits,
        goes_on=request.goes_on,
    )


class RunningRequest:
    """A request in the engine; `one_token` and `outputs` return what is new since the last call of either."""

    def __init__(self, key: int, result: Any, options: RequestOptions) -> None:
        self.key = key
        self.result = result  # without a reference it may be freed before its end
        self.ended = False  # no result will come any more
        self.error = ""
        self.stopped = False  # by one of `own_stops`; the engine goes on until `abort`
        self.options = options
        self._plain = options.plain
        self._sent = 0
        self._prompt_pending = options.prompt_logits

    @property
    def begun(self) -> bool:
        """Whether tokens have come."""
        return self._sent > 0

    @property
    def _num_cached(self) -> int | None:
        """Number of the prompt's tokens that were in the prefix cache; None: nothing to tell."""
        return None if self.options.goes_on else getattr(self.result, "cached_tokens", 0) or None

    def one_token(self, step: Step) -> bool:
        """Add the new token to the columns of `step`; False where there is more to return, or less."""
        if not self._plain or self.ended or self.error or (not self._sent and self._num_cached):
            return False
        try:
            output, sent = self.result.outputs[0], self._sent
            if output.finish_reason is not None or len(output.token_ids) != sent + 1:
                return False
            id, entries = output.token_ids[sent], output.logprobs
            logprob = _logprob(entries[sent], id) if entries else None
        except (AttributeError, IndexError, KeyError, TypeError):  # `outputs` reports it
            return False
        step.keys.append(self.key)
        step.ids.append(id)
        step.logprobs.append(logprob)
        self._sent = sent + 1
        return True

    def outputs(self) -> list[Output]:
        try:
            if self.error:
                raise ValueError(self.error)
            if self.options.width > 1:
                return self._beams() if self.ended else []
            return self._single()
        except Exception as error:  # foreign objects: this request fails, its neighbours go on
            self.error = self.error or describe(error)
            return [failed(self.key, self.error)]

    def _single(self) -> list[Output]:
        output = self.result.outputs[0]
        if output.finish_reason is None and (self.ended or self.options.whole):
            if self.ended:
                raise ValueError("the engine ended the request without a reason")
            return []
        pending = self._prompt_pending
        if pending and self.result.context_logits is None:
            if output.finish_reason is not None:
                raise ValueError("the engine gave no logits of the prompt")
            return []  # they come before the first output, or with it
        self._prompt_pending = False
        ids = self._ids(output)[self._sent :]
        finish = self._finish(output, ids)
        if (at := self._own_stop(ids)) is not None:
            ids, self.stopped = ids[: at + 1], output.finish_reason is None
            finish = Finish.STOP if ids[-1] in self.options.stops else Finish.EOS
        result = self._output(output, ids, finish, 0, self._sent, with_prompt=pending)
        self._sent += len(ids)
        return [result] if ids or finish is not None else []

    def _beams(self) -> list[Output]:
        """Return all beams, in the engine's order: the best first."""
        beams = []
        for number, output in enumerate(self.result.outputs[: self.options.width]):
            ids = self._ids(output)
            finish = self._finish(output, ids)
            if finish is None:
                raise ValueError("the engine ended a beam without a reason")
            beams.append(self._output(output, ids, finish, number, 0, with_prompt=self._prompt_pending and not number))
        if len(beams) != self.options.width:
            raise ValueError(f"the engine gave {len(beams)} of {self.options.width} beams")
        return beams

    def _ids(self, output: Any) -> Sequence[int]:
        """Return all ids so far, with a stop id that ended the answer, which some versions cut off."""
        ids, reason = output.token_ids, output.stop_reason
        if output.finish_reason == "stop" and isinstance(reason, int) and ids[-1:] != [reason]:
            return [*ids, reason]
        return ids  # type: ignore[no-any-return]

    def _finish(self, output: Any, ids: Sequence[int]) -> Finish | None:
        match output.finish_reason:
            case None:
                return None
            case "length":
                return Finish.LENGTH
            case "stop":
                reason = output.stop_reason
                last = reason if isinstance(reason, int) else ids[-1] if ids else None
                return Finish.STOP if last in self.options.stops or isinstance(reason, str) else Finish.EOS
        raise ValueError(f"the engine ended the request: {output.finish_reason}")  # cancelled, timeout, not_finished

    def _own_stop(self, ids: Sequence[int]) -> int | None:
        for at, id in enumerate(ids):
            if id in self.options.own_stops and self._sent + at >= self.options.least:
                return at
        return None

    def _output(
        self, output: Any, ids: Sequence[int], finish: Finish | None, number: int, start: int, *, with_prompt: bool
    ) -> Output:
        entries = (output.logprobs or [])[start : start + len(ids)]  # may be longer than token_ids, or absent
        logprobs = [_logprob(entry, id) for entry, id in zip(entries, ids, strict=False)]
        logprobs += [None] * (len(ids) - len(logprobs))
        tops = [_top(entry, self.options.tops) for entry in entries] if self.options.tops else None
        if tops is not None:
            tops += [()] * (len(ids) - len(tops))
        context = self._context() if with_prompt else None
        scores = context if self.options.context_logits else None
        generation = _rows(output.generation_logits)[: len(ids)] if self.options.generation_logits else None
        cached = None if self._sent or number else self._num_cached
        extras = Extras(_to_lists(scores), _to_lists(generation), num_cached_tokens=cached)
        said = None if extras == NO_EXTRAS else extras
        result = Output(self.key, ids, logprobs, finish, number, tops=tops, extras=said)
        if context is None or not self.options.prompt_logprobs:
            return result
        scored, prompt_tops = score(context[:-1], self.options.prompt[1:], self.options.prompt_tops)
        return result._replace(
            prompt_logprobs=[None, *scored], prompt_tops=[(), *prompt_tops] if self.options.prompt_tops else None
        )

    def _context(self) -> Any:
        rows, size = _rows(self.result.context_logits), len(self.options.prompt)
        if len(rows) != size:
            raise ValueError(
                f"the engine gave logits of {len(rows)} of the prompt's {size} tokens: the others were in its prefix "
                "cache, or in parts (option.enable_prefix_caching=false, option.enable_chunked_prefill=false)"
            )
        return rows


def _logprob(entry: Any, id: int) -> float | None:
    """Read one token's log-probability; old samplers leave it out for an unlikely token."""
    value = entry.get(id) if isinstance(entry, Mapping) else entry
    return getattr(value, "logprob", value)


def _top(entry: Mapping[int, Any], count: int) -> Alternatives:
    """Return the most likely ids, best first; `entry` may have the chosen one in addition."""
    best_first = sorted(((id, value.logprob) for id, value in entry.items()), key=lambda pair: -pair[1])
    return tuple(best_first[:count])


def _rows(tensor: Any) -> Any:
    """Convert a tensor [..., rows, vocabulary] to a numpy array of float32 [rows, vocabulary]."""
    if tensor is None:
        raise ValueError("the engine gave no logits")
    array = tensor.float().cpu().numpy()
    return array.reshape(-1, array.shape[-1])


def _to_lists(rows: Any) -> Any:
    return None if rows is None else rows.tolist()
