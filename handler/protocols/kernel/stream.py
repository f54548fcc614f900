"""Streams: the order in which an answer's parts come, for every dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod

from handler.core.errors import ServingError
from handler.core.framing import JSON_TEXTS, Framing, fill
from handler.core.values import NO_TOKEN, Delta, Finish, Token
from handler.protocols.kernel.base import Reply, TokenLine
from handler.protocols.kernel.errors import ErrorFormat


class TokenStream(Reply, ABC):
    """One client's answer, sent as it comes: a head, the tokens of each sequence, the last of each, an end.

    Subclasses render those parts. A sequence's `place` counts those of all requests.

    Args:
        num_sequences: of each request.

    Attributes:
        _events: each place's template of what a token adds that is no sequence's last; its only slot is the token's
            text. None where more has to be looked at: then the parts are rendered one by one.
        _num_tokens: those of all sequences so far, but for a subclass with a `token_line` of its own.
    """

    def __init__(self, errors: ErrorFormat, framing: Framing, num_requests: int = 1, num_sequences: int = 1) -> None:
        self.content_type = framing.content_type
        self.finished = False
        self._errors = errors
        self._framing = framing
        self._each = num_sequences
        self._unfinished = num_requests * num_sequences
        self._events: list[bytes | None] = [None] * self._unfinished
        self._begun = False
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0  # of the prompts
        self._num_tokens = 0

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens += num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        place = index * self._each + delta.sequence
        event = self._events[place]
        if event is not None and delta.finish is None:  # nearly all
            self._num_tokens += len(delta.tokens)
            return fill(event, delta.tokens)
        if delta.error is not None:
            self.finished = True
            return self._broken_off(delta.error)
        line = self.token_line() if self._begun else None
        if line is not None and delta.finish is None:
            tokens = delta.tokens
            return line(tokens[0]) if len(tokens) == 1 else b"".join(map(line, tokens))
        if delta.prefill is not None or delta.extras is not None:
            self._take(place, delta)
        parts = [] if self._begun else [self._head()]
        self._begun = True
        if delta.finish is None:
            tokens, last = delta.tokens, None
        else:
            *tokens, last = delta.tokens or (NO_TOKEN,)
        for position, token in enumerate(tokens):
            if (event := self._events[place]) is not None:  # the sequence has begun: the rest is plain
                self._num_tokens += len(tokens) - position
                parts.append(fill(event, tokens[position:]))
                break
            self._num_tokens += token.id >= 0
            parts.append(self._token(place, token))
        if last is not None:
            self._num_tokens += last.id >= 0
            parts.append(self._last(place, last, self._finish(delta)))
            self._unfinished -= 1
            self.finished = not self._unfinished
            if self.finished:
                parts.append(self._end())
        return b"".join(parts)

    def token_line(self) -> TokenLine | None:
        event = self._events[0]
        if event is None or len(self._events) > 1:
            return None

        def line(token: Token) -> bytes:
            self._num_tokens += 1
            return event % JSON_TEXTS[token.text]

        return line

    def _head(self) -> bytes:
        """Render what comes before the first token."""
        return b""

    def _take(self, place: int, delta: Delta) -> None:
        """Note what a delta has beside its tokens, before they are rendered."""
        if not delta.sequence and delta.extras is not None:  # each of several samples says it of the same prompt
            self._num_cached_tokens += delta.extras.num_cached_tokens or 0

    @abstractmethod
    def _token(self, place: int, token: Token) -> bytes:
        """Render a token that is not its sequence's last; possibly nothing yet."""

    @abstractmethod
    def _last(self, place: int, token: Token, finish: Finish) -> bytes:
        """Render the last token of a sequence, NO_TOKEN where nothing but its end has come."""

    def _finish(self, delta: Delta) -> Finish:
        """Return the reason that the client sees for the end of the delta's sequence."""
        assert delta.finish is not None, "the sequence has ended"
        return delta.finish

    def _end(self) -> bytes:
        """Render what comes after the last token of all sequences."""
        return self._framing.end

    def _broken_off(self, error: ServingError) -> bytes:
        """Render the end of a stream that fails."""
        return self._framing.encode(self._errors.tail(error)) + self._framing.end
