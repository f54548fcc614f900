"""Replies, which write a response as a document or as a stream, and their base classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from handler.core.errors import ServingError
from handler.core.framing import JSON, JSON_TEXTS, Framing, encoded, fill
from handler.core.values import NO_EXTRAS, NO_TOKEN, Delta, Finish, Request, Sampling, Token
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.tensors import OutputTensors, TensorValues, document

_LONG = 1 << 11  # tokens and alternatives
LONG_TEXT = 1 << 18  # characters, which take a millisecond or two

Vectors = Sequence[Any]
"""The vectors of all requests, or the values that `VectorReply` stores instead."""


TokenEncoder = Callable[[Token], bytes]
"""Encodes a token as the next bytes of a stream. The encoder of a whole response stores the token and returns b""."""


class Reply(ABC):
    """Converts the output of an engine for one request into the bytes of the response.

    `feed` accepts the deltas in order and returns the bytes to send now, possibly none. `finished` is true after the
    last delta. An error ends a stream. If nothing has been sent yet, `ParsedRequest.errors` renders the error instead.
    """

    content_type: str
    finished: bool

    def start(self, index: int, num_prompt_tokens: int) -> None:  # noqa: B027
        """Record that the request at `index` was accepted, and the number of tokens in its prompt."""

    @abstractmethod
    def feed(self, index: int, delta: Delta) -> bytes:
        """Return the bytes for the next delta of the request at `index`. Only a stream's delta may contain an error."""

    @property
    def shows_logprobs(self) -> bool:
        """Return whether the response depends on log-probabilities. If not, engines need not compute them."""
        return True

    def takes_long(self, delta: Delta) -> bool:
        """Return whether `feed` takes so long for this delta that it should run on a thread."""
        return False

    def token_encoder(self) -> TokenEncoder | None:
        """Return an encoder for the next tokens of the only sequence, or None if `feed` must be called for now.

        The encoder is equivalent to `feed` with a delta of a single token, but faster.
        """
        return None


class SequenceOutput:
    """The output of a sequence so far.

    Args:
        index: the index of the sequence within its request.
        special_in_text: whether special tokens are part of the text.
    """

    def __init__(self, index: int = 0, *, special_in_text: bool = True) -> None:
        self.index = index
        self._special_in_text = special_in_text
        self.tokens: list[Token] = []
        self.prefill: Sequence[Token] = ()
        self.rows: list[Sequence[float]] = []  # the logits of each token
        self.extras = NO_EXTRAS  # the latest value of each field
        self.finish = Finish.ERROR

    def take(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        if delta.prefill is not None:
            self.prefill = delta.prefill
        if delta.extras is not None:
            self.extras = delta.extras.with_defaults(self.extras)
            self.rows += delta.extras.generation_logits or ()

    @property
    def text(self) -> str:
        return "".join([token.text for token in self.tokens if self._special_in_text or not token.special])

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model generated. A token that contains only held-back text does not count."""
        return sum(token.id >= 0 for token in self.tokens)

    @property
    def last_id(self) -> int:
        """The id of the last token, or -1 if there is none."""
        return self.tokens[-1].id if self.tokens else -1

    @property
    def num_values(self) -> int:
        """The approximate number of tokens and their alternatives."""
        num_values = len(self.tokens) * (1 + len(self.tokens[-1].top)) if self.tokens else 0
        return num_values + (len(self.prefill) * (1 + len(self.prefill[-1].top)) if self.prefill else 0)

    @property
    def logprob(self) -> float:
        return sum(token.logprob or 0.0 for token in self.tokens)

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, len(self.tokens))


def finish_of(request: Request, delta: Delta) -> Finish | None:
    """Return the finish reason for the client. A stop at the request's own `eos_token_id` counts as EOS."""
    if delta.finish is Finish.STOP and request.eos_token_id is not None and delta.tokens:
        return Finish.EOS if delta.tokens[-1].id == request.eos_token_id else Finish.STOP
    return delta.finish


class WholeReply(Reply):
    """Base class of replies that write a single JSON document once all sequences have finished.

    Attributes:
        num_repeated: the number of characters of prompts that the document repeats.
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
        assert delta.error is None, "an error is rendered by ParsedRequest.errors"
        self._num_prompt_tokens += delta.num_media_tokens
        sequence = self._of(index, delta)
        if sequence.finish is not Finish.ERROR:  # it has finished, and its request was stopped later
            return b""
        sequence.take(delta)
        if delta.finish is None:
            return b""
        sequence.finish = self._finish(delta) or delta.finish
        self._unfinished -= 1
        self.finished = not self._unfinished
        return self._encode() if self.finished else b""

    def _encode(self) -> bytes:
        return self._framing.encode(self._document())

    def token_encoder(self) -> TokenEncoder | None:
        if len(self._sequences) > 1:
            return None
        store = self._sequences[0].tokens.append

        def nothing(token: Token) -> bytes:
            store(token)
            return b""

        return nothing

    def takes_long(self, delta: Delta) -> bool:
        if delta.finish is None or self._unfinished != 1:
            return False
        return self.num_repeated > LONG_TEXT or sum([sequence.num_values for sequence in self._sequences]) > _LONG

    def _tensors(self, selected: OutputTensors | None, sequences: Sequence[SequenceOutput]) -> TensorValues | None:
        """Return the selected output tensors of sequences, or None if the request selects none."""
        if selected is None:
            return None
        all_logits = (sequence.extras.context_logits for sequence in self._sequences)
        of_prompt = next((logits for logits in all_logits if logits is not None), None)
        return document(selected, [(sequence.tokens, sequence.rows) for sequence in sequences], of_prompt)

    def _of(self, index: int, delta: Delta) -> SequenceOutput:
        """Return the sequence that a delta of the request at `index` belongs to."""
        return self._sequences[delta.sequence]

    def _finish(self, delta: Delta) -> Finish | None:
        """Return the finish reason of a sequence's last delta for the client."""
        return delta.finish

    def _document(self) -> Any:
        raise NotImplementedError


class WrappedReply(Reply):
    """Base class of replies that modify the output of another reply, and finish together with that reply."""

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
    """The reply to a request for 0 new tokens.

    It hides the single token that engines always generate, and does not count it.
    """

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
    """Writes a JSON document with the vectors of all requests.

    Args:
        render: builds the document from the vectors, in the order of the requests, and the number of prompt tokens.
        keep: converts a vector to the value that is stored for `render`, such as its JSON, because encoding all
            vectors at the end would take too long.
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

    def token_encoder(self) -> TokenEncoder | None:
        return None

    def _document(self) -> Any:
        return self._render(self._vectors, self._num_prompt_tokens)


def json_of(vector: Sequence[float]) -> Any:
    """Encode a vector for `VectorReply` as a list of numbers."""
    return encoded([*vector])


def rank_sequences(scores: Sequence[float], sampling: Sampling) -> list[int]:
    """Return the indices of the sequences to send to the client, best first. The engine has already ranked beams."""
    ranked = list(range(len(scores)))
    if sampling.num_beams == 1:
        ranked.sort(key=lambda index: -scores[index])
    return ranked[: sampling.n] if sampling.n > 1 else ranked


class PreparedDocument(Reply):
    """Sends a JSON document that does not depend on the engine's output.

    Attributes:
        body: the document.
    """

    content_type = JSON.content_type
    finished = False

    def __init__(self, body: bytes) -> None:
        self.body = body

    def feed(self, index: int, delta: Delta) -> bytes:
        self.finished = True
        return self.body


_PART = 1 << 10  # values encoded at a time; encoding and freeing them holds the GIL


def list_parts(values: Iterable[Any]) -> Iterator[bytes]:
    """Yield the JSON of a long list in parts."""
    remaining, before = iter(values), b"["
    while part := list(islice(remaining, _PART)):
        yield before + JSON.encode(part)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"


# -- streams: the parts of a response and their order, which is the same for all dialects ------------------------------


class TokenStream(Reply, ABC):
    """Base class of streams: a head, the tokens of each sequence, the last token of each sequence, and an end.

    Subclasses render these parts. The `position` of a sequence is its index among the sequences of all requests.

    Args:
        num_sequences: the number of sequences of each request.

    Attributes:
        _events: for each position, the template of the event for any token except the last. Its only slot is the
            token's text. It is None if other parts of the event may change, in which case each event is rendered.
        _num_tokens: the number of tokens of all sequences so far. A subclass's own `token_encoder` must count its
            tokens.
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
        position = index * self._each + delta.sequence
        event = self._events[position]
        # 1. The most frequent case: plain tokens of a sequence that has started.
        if event is not None and delta.finish is None:
            self._num_tokens += len(delta.tokens)
            return fill(event, delta.tokens)
        # 2. A failure.
        if delta.error is not None:
            self.finished = True
            return self._broken_off(delta.error)
        # 3. Plain tokens, if a subclass encodes them with a `token_encoder` of its own.
        encode = self.token_encoder() if self._begun else None
        if encode is not None and delta.finish is None:
            tokens = delta.tokens
            return encode(tokens[0]) if len(tokens) == 1 else b"".join(map(encode, tokens))
        # 4. Everything else, part by part.
        if delta.prefill is not None or delta.extras is not None:
            self._num_prompt_tokens += delta.num_media_tokens
            self._take(position, delta)
        parts = [] if self._begun else [self._head()]
        self._begun = True
        if delta.finish is None:
            tokens, last = delta.tokens, None
        else:
            *tokens, last = delta.tokens or (NO_TOKEN,)
        for number, token in enumerate(tokens):
            if (event := self._events[position]) is not None:  # the sequence has started, so the rest is plain
                self._num_tokens += len(tokens) - number
                parts.append(fill(event, tokens[number:]))
                break
            self._num_tokens += token.id >= 0
            parts.append(self._token(position, token))
        if last is not None:
            self._num_tokens += last.id >= 0
            parts.append(self._last(position, last, self._finish(delta)))
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

    def _take(self, position: int, delta: Delta) -> None:
        """Record the values of a delta other than tokens, before the tokens are rendered."""
        if not delta.sequence and delta.extras is not None:  # all sequences of a request report the same prompt
            self._num_cached_tokens += delta.extras.num_cached_tokens or 0

    @abstractmethod
    def _token(self, position: int, token: Token) -> bytes:
        """Render a token that is not the last of its sequence. The result may be empty."""

    @abstractmethod
    def _last(self, position: int, token: Token, finish: Finish) -> bytes:
        """Render the last token of a sequence, or NO_TOKEN if the last delta has no token. The result may be empty."""

    def _finish(self, delta: Delta) -> Finish:
        """Return the finish reason of a sequence's last delta for the client."""
        assert delta.finish is not None, "only the last delta has a finish reason"
        return delta.finish

    def _end(self) -> bytes:
        """Render the end of the stream, after the last tokens of all sequences."""
        return self._framing.end

    def _broken_off(self, error: ServingError) -> bytes:
        """Render the end of a stream that failed."""
        return self._framing.encode(self._errors.tail(error)) + self._framing.end
