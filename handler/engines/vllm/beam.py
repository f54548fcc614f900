"""Beam search for an engine without one: continues every beam by one token at a time.

The method is the usual one. It takes each beam's most likely continuations, and of these the most likely ones. A beam
that ends by an end token is set aside, ranked by its log-probability over its length to the power of `length_penalty`.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from handler.core.media import MediaPrompt
from handler.core.values import Finish, Sampling
from handler.engines.base import Alternatives, EngineRequest
from handler.engines.vllm.results import Pending


@dataclass(frozen=True)
class Beam:
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: Finish | None = None

    def score(self, length_penalty: float) -> float:
        return sum(self.logprobs) / float(max(len(self.ids), 1) ** length_penalty)


@dataclass
class BeamSearch:
    """One search: `advance` continues `beams` by the alternatives after each of them.

    Args:
        sampling: num_beams, max_new_tokens, length_penalty, early_stopping and stop_token_ids are used.
        eos: ids that end a beam as EOS.
        beams: those that go on.
        ended: those that have ended.
    """

    sampling: Sampling
    eos: Collection[int]
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    ended: list[Beam] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Number of alternatives for each beam: if all beams but one end, that one can replace them."""
        return 2 * self.sampling.num_beams

    def advance(self, alternatives: Sequence[Alternatives]) -> bool:
        """Continue every beam by one token; return whether the search has ended."""
        size, penalty = self.sampling.num_beams, self.sampling.length_penalty
        candidates = (
            Beam((*beam.ids, id), (*beam.logprobs, logprob), self._finish(id))
            for beam, options in zip(self.beams, alternatives, strict=True)
            for id, logprob in options[: self.width]
        )
        best = heapq.nlargest(self.width, candidates, key=lambda beam: sum(beam.logprobs))
        # An end counts only among the best `size`: the search would not have reached it otherwise.
        self.ended += [beam for beam in best[:size] if beam.finish]
        self.ended = heapq.nlargest(size, self.ended, key=lambda beam: beam.score(penalty))
        self.beams = [beam for beam in best if not beam.finish][:size]
        if not self.beams or len(self.beams[0].ids) >= self.sampling.max_new_tokens:
            return True
        if len(self.ended) < size:
            return False
        return self.sampling.early_stopping or self.ended[-1].score(penalty) >= self.beams[0].score(penalty)

    def best(self) -> list[Beam]:
        """Return the result: `num_beams` beams, the best first."""
        length = self.sampling.max_new_tokens
        unended = [Beam(beam.ids, beam.logprobs, Finish.LENGTH) for beam in self.beams if len(beam.ids) >= length]
        candidates = self.ended + unended
        return heapq.nlargest(
            self.sampling.num_beams, candidates, key=lambda beam: beam.score(self.sampling.length_penalty)
        )

    def _finish(self, id: int) -> Finish | None:
        if id in self.sampling.stop_token_ids:
            return Finish.STOP
        return Finish.EOS if id in self.eos else None


@dataclass
class Beams:
    """A request's beam search in progress; each beam's next token is a vLLM request."""

    request: EngineRequest
    media: MediaPrompt | None
    search: BeamSearch
    waiting: dict[int, Pending] = field(default_factory=dict)  # by the beam's number
    alternatives: list[Sequence[tuple[int, float]]] = field(default_factory=list)

    @property
    def key(self) -> int:
        return self.request.key
