"""Requests that the batcher has accepted, as it keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from handler.core.sequence import SequenceState, prompt_tokens
from handler.core.text import Prompt
from handler.core.values import Finish, Request, Token
from handler.engines.base import Output


class Channel(Protocol):
    """A short way to a client."""

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk at once; return False where that is not possible."""


class TokenReceiver:
    """Turns the plain tokens of one stream into lines, past the request's deltas.

    Attributes:
        id: the batcher's, of the request.
        line: encodes a token.
        channel: takes lines; None: they are kept.
        keep: keeps lines that the channel does not take.
        num_tokens: encoded so far.
    """

    __slots__ = ("channel", "id", "keep", "line", "num_tokens")

    def __init__(
        self, id: int, line: Callable[[Token], bytes], channel: Channel | None, keep: Callable[[bytes], object]
    ) -> None:
        self.id = id
        self.line = line
        self.channel = channel
        self.keep = keep
        self.num_tokens = 0


@dataclass
class ActiveRequest:
    """One accepted request, queued or in the engine."""

    id: int
    request: Request
    prompt: Prompt
    start_by: float
    end_by: float
    started: Callable[[], None]
    keys: list[int] = field(default_factory=list)
    unfinished: int = 0


class RunningRequest:
    """A request in the engine: one sequence, or a beam search with several.

    All that a plain token needs lies in this object: each further one is a cache miss a token.
    """

    __slots__ = ("active", "first", "id", "receiver", "sequences", "single", "special", "texts")

    def __init__(self, active: ActiveRequest, first: int, sequences: Sequence[SequenceState]) -> None:
        self.active = active
        self.id = active.id
        self.first = first  # number of its first sequence
        self.sequences: list[SequenceState | None] = list(sequences)  # None: the sequence has ended
        self.single = sequences[0]
        self.texts = self.single.texts
        self.special = self.single.special
        self.receiver: TokenReceiver | None = None  # of its tokens; None: they come as deltas

    def push(self, id: int, logprob: float | None) -> Token:
        """Add a token to its only sequence."""
        token = self.single.push(id, logprob)
        self.texts = self.single.texts
        return token

    def feed(self, output: Output) -> tuple[list[Token], Finish | None, list[Token] | None] | None:
        """Return an output's tokens, why its sequence ended, and the prompt's tokens; None after the sequence's end."""
        state = self.sequences[output.sequence]
        if state is None:
            return None
        tokens, finish = state.feed(output.ids, output.logprobs, output.finish, output.tops)
        prefill = None
        if output.prompt_logprobs is not None and self.first + output.sequence == 0:
            prefill = prompt_tokens(self.active.prompt, output.prompt_logprobs, output.prompt_tops)
        self.texts = self.single.texts
        return tokens, finish, prefill
