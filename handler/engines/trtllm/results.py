"""One request's result, read as it grows.

TensorRT-LLM hands out one object, which changes with every item (contract trtllm.md, section 2): its lists hold all
that came so far, and what is new is told by our own counts. Its own `*_diff` repeat and lose tokens under load, an
item may bring several tokens, and the last one may bring some too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handler.core.logprobs import score
from handler.core.values import Finish, Logits
from handler.engines.base import Output, Step


@dataclass(frozen=True)
class Asked:
    """What a request wants to see, and what ends it."""

    prompt: Sequence[int]
    width: int = 1  # sequences: beams
    stops: frozenset[int] = frozenset()  # ids that end it as STOP
    own_stops: frozenset[int] = frozenset()  # ids that the engine does not look for
    least: int = 0  # tokens before which none of `own_stops` counts
    tops: int = 0
    prompt_logprobs: bool = False
    prompt_tops: int = 0
    context_logits: bool = False
    generation_logits: bool = False

    @property
    def whole(self) -> bool:
        """It comes in one piece: beams are none before the end, and of logits only the last item has all."""
        return self.width > 1 or self.generation_logits

    @property
    def plain(self) -> bool:
        """Nothing but tokens come, and the engine says which is the last."""
        return not (self.whole or self.own_stops or self.tops or self.prompt_logprobs or self.context_logits)


class Running:
    """A request in the engine. `one_token` and `outputs` say what is new since either was last called."""

    def __init__(self, key: int, result: Any, asked: Asked) -> None:
        self.key = key
        self.result = result  # held: a result that nobody holds may be gone before its end
        self.ended = False  # no item will come any more
        self.error = ""
        self.stopped = False  # by one of `own_stops`: the engine goes on until it is told
        self.asked = asked
        self._plain = asked.plain
        self._sent = 0
        self._prompt_pending = asked.prompt_logprobs or asked.context_logits

    @property
    def begun(self) -> bool:
        """It has said something, and more is to come."""
        return self._sent > 0

    def one_token(self, step: Step) -> bool:
        """Put what is new into the columns of `step`, where that is one more token and nothing else."""
        if not self._plain or self.ended or self.error:
            return False
        try:
            output, sent = self.result.outputs[0], self._sent
            if output.finish_reason is not None or len(output.token_ids) != sent + 1:
                return False
            id, entries = output.token_ids[sent], output.logprobs
            logprob = _logprob(entries[sent], id) if entries else None
        except Exception:  # `outputs` says it
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
            if self.asked.width > 1:
                return self._beams() if self.ended else []
            return self._single()
        except Exception as error:  # this one cannot be read; its neighbours can
            self.error = self.error or str(error) or type(error).__name__
            return [Output(self.key, (), (), Finish.ERROR, error=self.error)]

    def _single(self) -> list[Output]:
        output = self.result.outputs[0]
        if output.finish_reason is None and (self.ended or self.asked.whole):
            if self.ended:
                raise ValueError("the engine ended the request without a reason")
            return []
        pending = self._prompt_pending
        if pending and self.result.context_logits is None:
            if output.finish_reason is not None:
                raise ValueError("the engine gave no logits of the prompt")
            return []  # they come with the first output, or before it
        self._prompt_pending = False
        ids = self._ids(output)[self._sent :]
        finish = self._finish(output, ids)
        if (at := self._own_stop(ids)) is not None:
            ids, self.stopped = ids[: at + 1], output.finish_reason is None
            finish = Finish.STOP if ids[-1] in self.asked.stops else Finish.EOS
        found = self._output(output, ids, finish, 0, self._sent, with_prompt=pending)
        self._sent += len(ids)
        return [found] if ids or finish is not None else []

    def _beams(self) -> list[Output]:
        """All at once, in the engine's order, which is the best first."""
        found = []
        for number, output in enumerate(self.result.outputs[: self.asked.width]):
            ids = self._ids(output)
            finish = self._finish(output, ids)
            if finish is None:
                raise ValueError("the engine ended a beam without a reason")
            found.append(self._output(output, ids, finish, number, 0, with_prompt=self._prompt_pending and not number))
        if len(found) != self.asked.width:
            raise ValueError(f"the engine gave {len(found)} of {self.asked.width} beams")
        return found

    def _ids(self, output: Any) -> Sequence[int]:
        """All ids so far. One that ended the answer as a stop id belongs to it, also where it was cut from the list."""
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
                return Finish.STOP if last in self.asked.stops or isinstance(reason, str) else Finish.EOS
        raise ValueError(f"the engine ended the request: {output.finish_reason}")  # cancelled, timeout, not_finished

    def _own_stop(self, ids: Sequence[int]) -> int | None:
        for at, id in enumerate(ids):
            if id in self.asked.own_stops and self._sent + at >= self.asked.least:
                return at
        return None

    def _output(
        self, output: Any, ids: Sequence[int], finish: Finish | None, number: int, start: int, *, with_prompt: bool
    ) -> Output:
        entries = (output.logprobs or [])[start : start + len(ids)]  # may be longer than token_ids, or absent
        logprobs = [_logprob(entry, id) for entry, id in zip(entries, ids, strict=False)]
        logprobs += [None] * (len(ids) - len(logprobs))
        tops = [_top(entry, self.asked.tops) for entry in entries] if self.asked.tops else None
        if tops is not None:
            tops += [()] * (len(ids) - len(tops))
        context = self._context() if with_prompt else None
        scores = context if self.asked.context_logits else None
        generation = _rows(output.generation_logits)[: len(ids)] if self.asked.generation_logits else None
        logits = None if scores is None and generation is None else Logits(_listed(scores), _listed(generation))
        found = Output(self.key, ids, logprobs, finish, number, tops=tops, logits=logits)
        if context is None or not self.asked.prompt_logprobs:
            return found
        scored, prompt_tops = score(context[:-1], self.asked.prompt[1:], self.asked.prompt_tops)
        return found._replace(
            prompt_logprobs=[None, *scored], prompt_tops=[(), *prompt_tops] if self.asked.prompt_tops else None
        )

    def _context(self) -> Any:
        rows, wanted = _rows(self.result.context_logits), len(self.asked.prompt)
        if len(rows) != wanted:
            raise ValueError(
                f"the engine gave logits of {len(rows)} of the prompt's {wanted} tokens: the others were in its prefix "
                "cache, or in parts (option.enable_prefix_caching=false, option.enable_chunked_prefill=false)"
            )
        return rows


def _logprob(entry: Any, id: int) -> float | None:
    """One token's; the sampler of old versions leaves it out where the token is none of the most likely."""
    found = entry.get(id) if isinstance(entry, Mapping) else entry
    return getattr(found, "logprob", found)


def _top(entry: Mapping[int, Any], count: int) -> Sequence[tuple[int, float]]:
    """The most likely ids, the first one first; the chosen one may be among them, or come on top of them."""
    best_first = sorted(((id, found.logprob) for id, found in entry.items()), key=lambda pair: -pair[1])
    return tuple(best_first[:count])


def _rows(tensor: Any) -> Any:
    """A tensor [..., rows, vocabulary] as a numpy array of float32 [rows, vocabulary]."""
    if tensor is None:
        raise ValueError("the engine gave no logits")
    array = tensor.float().cpu().numpy()
    return array.reshape(-1, array.shape[-1])


def _listed(rows: Any) -> Any:
    return None if rows is None else rows.tolist()
