"""Replies: the base classes of whole answers and of streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from handler.core.errors import ServingError
from handler.core.framing import JSON, JSON_TEXTS, Framing, encoded, fill
from handler.core.text import Prompt
from handler.core.values import NO_EXTRAS, NO_TOKEN, Delta, Finish, Request, Sampling, Token
from handler.protocols.kernel.dialect import Reply, TokenEncoder
from handler.protocols.kernel.errors import ErrorFormat

_LONG = 1 << 11  # tokens and their alternatives
LONG_TEXT = 1 << 18  # characters, which take a millisecond or two

Vectors = Sequence[Any]
"""The vector of a request, or what `VectorReply` keeps of it."""


class SequenceOutput:
    """The output of one sequence so far; `index` counts the sequences of one request."""

    def __init__(self, index: int = 0, *, special_in_text: bool = True) -> None:
        self.index = index
        self._special_in_text = special_in_text
        self.tokens: list[Token] = []
        self.prefill: Sequence[Token] = ()
        self.rows: list[Sequence[float]] = []  # of logits, for each token
        self.extras = NO_EXTRAS  # the newest of each
        self.finish = Finish.ERROR

    def take(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        if delta.prefill is not None:
            self.prefill = delta.prefill
        if delta.extras is not None:
            self.extras = delta.extras.over(self.extras)
            self.rows += delta.extras.generation_logits or ()

    @property
    def text(self) -> str:
        return "".join([token.text for token in self.tokens if self._special_in_text or not token.special])

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model made; one without an id has only text that was held back."""
        return sum(token.id >= 0 for token in self.tokens)

    @property
    def num_values(self) -> int:
        """Approximate number of tokens and their alternatives."""
        return sum(len(tokens) * (1 + len(tokens[-1].top)) for tokens in (self.tokens, self.prefill) if tokens)

    @property
    def logprob(self) -> float:
        return sum(token.logprob or 0.0 for token in self.tokens)

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, len(self.tokens))


def finish_of(request: Request, delta: Delta) -> Finish | None:
    """Return the finish reason that the client gets; the end token `eos_token_id` counts as EOS."""
    if delta.finish is Finish.STOP and request.eos_token_id is not None and delta.tokens:
        return Finish.EOS if delta.tokens[-1].id == request.eos_token_id else Finish.STOP
    return delta.finish


class WholeReply(Reply):
    """One JSON document, written when all sequences have ended. Subclasses render it.

    Attributes:
        num_repeated: characters of prompts that it begins with.
    """

    num_repeated = 0

    def __init__(self, num_sequences: int, *, special_in_text: bool = True, framing: Framing = JSON) -> None:
        self.content_type = framing.content_type
        self._framing = framing
        self._sequences = [SequenceOutput(index, special_in_text=special_in_text) for index in range(num_sequences)]
        self._unfinished = num_sequences
        self._num_prompt_tokens = 0
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        assert delta.error is None, "a document that fails is written by its request's errors"
        sequence = self._of(index, delta)
        sequence.take(delta)
        if delta.finish is None:
            return b""
        sequence.finish = self._finish(delta) or delta.finish
        self._unfinished -= 1
        self.finished = not self._unfinished
        return self._framing.encode(self._document()) if self.finished else b""

    def takes_long(self, delta: Delta) -> bool:
        ends = delta.finish is not None and self._unfinished == 1
        return ends and (
            self.num_repeated > LONG_TEXT or sum(sequence.num_values for sequence in self._sequences) > _LONG
        )

    @property
    def _context(self) -> Sequence[Sequence[float]] | None:
        """The prompt's logits."""
        found = (sequence.extras.context_logits for sequence in self._sequences)
        return next((logits for logits in found if logits is not None), None)

    def _of(self, index: int, delta: Delta) -> SequenceOutput:
        """Return the sequence that a delta of request number `index` belongs to."""
        return self._sequences[delta.sequence]

    def _finish(self, delta: Delta) -> Finish | None:
        """Return the reason that the client sees for the end of the delta's sequence."""
        return delta.finish

    def _document(self) -> Any:
        raise NotImplementedError


class WrappedReply(Reply):
    """A reply that modifies the output of another one, and ends with it."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.content_type = reply.content_type
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._reply.start(index, num_prompt_tokens)

    def feed(self, index: int, delta: Delta) -> bytes:
        data = self._reply.feed(index, delta)
        self.finished = self._reply.finished
        return data


class PromptOnly(WrappedReply):
    """The reply to a limit of 0 tokens: it hides, and does not count, the one token that engines generate at least."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._hidden: dict[int, SequenceOutput] = {}

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.error is None:
            hidden = self._hidden.setdefault(index, SequenceOutput())
            hidden.take(delta)
            if delta.finish is None:
                return b""
            delta = Delta(
                delta.id, delta.sequence, (), Finish.LENGTH, prefill=hidden.prefill or None, extras=hidden.extras
            )
        return super().feed(index, delta)


class VectorReply(WholeReply):
    """Renders a document of all requests' vectors.

    Args:
        render: takes the vectors, in the order of the requests, and the number of all their tokens.
        keep: the part of a vector that is kept for `render`, such as its JSON, which would take long for all vectors
            at once.
    """

    def __init__(
        self,
        num_requests: int,
        render: Callable[[Vectors, int], Any],
        keep: Callable[[Sequence[float]], Any] = tuple,
    ) -> None:
        super().__init__(num_requests)
        self._vectors: list[Any] = [()] * num_requests
        self._render, self._keep = render, keep

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens += num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        self._vectors[index] = self._keep((delta.extras or NO_EXTRAS).vector or ())
        return super().feed(index, delta._replace(sequence=index))

    def _document(self) -> Any:
        return self._render(self._vectors, self._num_prompt_tokens)


def json_of(vector: Sequence[float]) -> Any:
    """Encode a vector for `VectorReply` as a list of numbers."""
    return encoded([*vector])


def rank_sequences(scores: Sequence[float], sampling: Sampling) -> list[int]:
    """Return the indices of the sequences for the client, the best first; the engine has ranked beams already."""
    ranked = list(range(len(scores)))
    if sampling.num_beams == 1:
        ranked.sort(key=lambda index: -scores[index])
    return ranked[: sampling.n] if sampling.n > 1 else ranked


class PreparedDocument(Reply):
    """Sends a JSON document that exists before the answer begins, without an engine."""

    content_type = JSON.content_type
    finished = False

    def __init__(self, body: bytes) -> None:
        self._body = body

    def start(self, index: int, num_prompt_tokens: int) -> None:
        pass

    def feed(self, index: int, delta: Delta) -> bytes:
        self.finished = True
        return self._body


_PART = 1 << 10  # values whose JSON is made at a time; it holds the GIL, and so does freeing what it was made of


def list_parts(values: Iterable[Any]) -> Iterator[bytes]:
    """Yield the JSON of a long list, in parts."""
    rest, before = iter(values), b"["
    while part := list(islice(rest, _PART)):
        yield before + JSON.encode(part)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"


class PromptDocument(PreparedDocument):
    """Sends a document made from a request's prompt, without an engine.

    Args:
        render: makes the document's JSON, in parts: each part holds the GIL, which other threads need. It may take
            long.
    """

    def __init__(self, render: Callable[[Prompt], Iterable[bytes]]) -> None:
        super().__init__(b"")
        self._render = render

    def take(self, prompt: Prompt) -> None:
        """Render the document. Thread-safe: the document is sent afterwards."""
        self._body = b"".join(self._render(prompt))


# -- streams: the order in which an answer's parts come, for every dialect ---------------------------------------------


class TokenStream(Reply, ABC):
    """Streams one client's answer: a head, the tokens of each sequence, the last of each, an end.

    Subclasses render those parts. A sequence's `place` counts those of all requests.

    Args:
        num_sequences: of each request.

    Attributes:
        _events: for each place, the template of the event of a token that is not the last; its only slot is the
            token's text. None if other parts may change: then they are rendered one by one.
        _num_tokens: those of all sequences so far, except in a subclass with its own `token_encoder`.
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
        # 1. Nearly all: plain tokens of a sequence that has begun.
        if event is not None and delta.finish is None:
            self._num_tokens += len(delta.tokens)
            return fill(event, delta.tokens)
        # 2. A failure.
        if delta.error is not None:
            self.finished = True
            return self._broken_off(delta.error)
        # 3. Plain tokens, where a subclass encodes them by a `token_encoder` of its own.
        encode = self.token_encoder() if self._begun else None
        if encode is not None and delta.finish is None:
            tokens = delta.tokens
            return encode(tokens[0]) if len(tokens) == 1 else b"".join(map(encode, tokens))
        # 4. All else, part by part.
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

    def token_encoder(self) -> TokenEncoder | None:
        event = self._events[0]
        if event is None or len(self._events) > 1:
            return None

        def line(token: Token) -> bytes:
            self._num_tokens += 1
            return event % JSON_TEXTS[token.text]

        return line

    def _head(self) -> bytes:
        """Render the part before the first token."""
        return b""

    def _take(self, place: int, delta: Delta) -> None:
        """Record a delta's values other than tokens, before the tokens are rendered."""
        if not delta.sequence and delta.extras is not None:  # each of several samples says it of the same prompt
            self._num_cached_tokens += delta.extras.num_cached_tokens or 0

    @abstractmethod
    def _token(self, place: int, token: Token) -> bytes:
        """Render a token that is not its sequence's last; possibly nothing yet."""

    @abstractmethod
    def _last(self, place: int, token: Token, finish: Finish) -> bytes:
        """Render the last token of a sequence, NO_TOKEN if only its end has come; possibly nothing."""

    def _finish(self, delta: Delta) -> Finish:
        """Return the reason that the client sees for the end of the delta's sequence."""
        assert delta.finish is not None, "the sequence has ended"
        return delta.finish

    def _end(self) -> bytes:
        """Render the part after the last token of all sequences."""
        return self._framing.end

    def _broken_off(self, error: ServingError) -> bytes:
        """Render the end of a stream that fails."""
        return self._framing.encode(self._errors.tail(error)) + self._framing.end
