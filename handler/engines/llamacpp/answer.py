"""Reads the events of llama-server: token ids, log-probabilities, the reason for the end, and errors."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from handler.core.event_stream import StreamEvent
from handler.core.values import NO_EXTRAS, Finish
from handler.engines.base import Alternatives, EngineRequest, first_stop
from handler.engines.llamacpp.parameters import GRAMMAR, Leg, Penalties, completion
from handler.engines.llamacpp.pieces import Pieces
from handler.engines.openai.answer import event_error, shortened
from handler.engines.remote.servers import Failed, Lasting, Part, ResponseCheck, score, with_ends

_MAX_ID = 1 << 31

_WITHOUT_DRAFT = 2
"""Number of tokens of a completion for which llama-server drafts none: it never drafts the first or the last token."""


class Tokens(NamedTuple):
    """The content of an event.

    Attributes:
        ids: ids of new tokens.
        scores: their log-probabilities, as llama-server describes them.
        text: text since the last event.
        num_tokens: number of tokens of the completion so far, including those that were not in any event.
        stop_type: why the completion ended; "" if it continues.
        truncated: whether it ended because the context is full.
        num_cached: number of prompt tokens that were in the cache; 0 if unknown.
        num_prompt: number of prompt tokens; 0 if unknown.
        is_progress: whether the event only reports that a part of the prompt has been computed.
    """

    ids: Sequence[int]
    scores: Sequence[Mapping[str, Any]]
    text: str
    num_tokens: int
    stop_type: str = ""
    truncated: bool = False
    num_cached: int = 0
    num_prompt: int = 0
    is_progress: bool = False


@dataclass(slots=True)
class _Legs:
    """The completions of a response so far.

    Attributes:
        num: number of requested completions.
        num_earlier: number of completions before the last one that drew tokens of the response.
        num_ids: number of tokens of the last completion in the response.
        num_unsent: number of tokens that the last completion computed, but did not send.
    """

    num: int = 0
    num_earlier: int = 0
    num_ids: int = 0
    num_unsent: int = 0

    @property
    def num_drawn(self) -> int:
        """Number of completions that drew tokens of the response."""
        return self.num_earlier + (self.num_ids > 0)

    def next(self) -> _Legs:
        """Return the state after another completion was requested."""
        return _Legs(self.num + 1, self.num_drawn)


class LlamaCall(ResponseCheck):
    """A request to llama-server, and its response.

    A response usually takes one completion. It takes several if the first tokens must not end the response, or if
    llama-server omitted the ids of some tokens.

    Args:
        eos: ids of the end tokens in the model's files.
        context: maximum number of tokens of the prompt and the response together.
    """

    def __init__(self, request: EngineRequest, eos: Collection[int], context: int) -> None:
        super().__init__(request.sampling)
        self._sampling = with_ends(request.sampling, eos)
        self._ends = frozenset(self._sampling.stop_token_ids)
        self._context = context
        self._prompt = list(request.ids)
        self.adapter = request.adapter
        self._goes_on = request.goes_on
        self._ids: list[int] = []
        self._penalties = Penalties.of(request.sampling, request.ids)
        self._drafts = False  # whether the server drafts tokens, whose log-probabilities it does not report
        self._leg = Leg((), 0)
        self._legs = _Legs()
        self.finish_reason: Finish | None = None
        self.next_body()  # refuses what llama-server does not support

    def next_body(self) -> Mapping[str, Any]:
        """Return the body of the next completion.

        Raises:
            ValueError: llama-server does not support a parameter of the request.
        """
        num_ids, least = len(self._ids), min(self._sampling.min_new_tokens, self._most)
        if least and self._is_ruled:
            raise ValueError("min_new_tokens cannot be combined with structured output on llama-server")
        without_end = num_ids < least
        max_tokens = (least if without_end else self._most) - num_ids
        if self._legs.num_unsent:
            max_tokens = min(max_tokens, self._legs.num_unsent)
        if self._drafts and not self._is_ruled:
            max_tokens = min(max_tokens, _WITHOUT_DRAFT)
        # A rule applies from the beginning of a completion, so no second one can follow after an incomplete stream.
        streamed = not (self._legs.num_unsent or (self._scored and self._is_ruled))
        leg = Leg(self.prefix(()), max_tokens, self._legs.num_drawn, streamed=streamed, without_end=without_end)
        self._leg = self._penalties.added_to(leg, self._ids)
        return completion(self._sampling, self._leg, self._context)

    @property
    def _is_ruled(self) -> bool:
        return self._sampling.structured_output is not None

    @property
    def resumes(self) -> bool:
        """Whether a further completion can continue the response after a failure."""
        return not (self._is_ruled and self._ids)

    @property
    def num_scores(self) -> int:
        """Number of log-probabilities to request for each token; 0 if none are needed."""
        return max(self._num_tops, 1) if self._scored else 0

    def prefix(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the prompt, the response so far, and further tokens of the completion."""
        return [*self._prompt, *self._ids, *ids]

    @property
    def streamed(self) -> bool:
        """Whether the response to the last body is a stream of events."""
        return self._leg.streamed

    def begin(self) -> None:
        """Record that a completion was requested."""
        self._legs = self._legs.next()

    def num_missing(self, tokens: Tokens) -> int:
        """Return the number of tokens that have been computed since the last event, and are not in any event."""
        return max(tokens.num_tokens - self._legs.num_ids - len(tokens.ids), 0)

    def take_plain(self, data: bytes) -> int | None:
        """Add the token of an event with exactly one token, and without an error, log-probabilities or an end.

        Nearly all events are of this kind, and this takes less time than `take_tokens`.

        Args:
            data: the event in JSON.

        Returns:
            The id of the token, or None if nothing was added, because the event is of another kind.
        """
        if self._scored:
            return None
        try:
            value = orjson.loads(data)
            (id,), number, stop = value["tokens"], value["tokens_predicted"], value["stop"]
        except (ValueError, TypeError, KeyError):
            return None
        if type(id) is not int or not 0 <= id < _MAX_ID or id in self._ends or self._num_ids == self._most:
            return None
        legs = self._legs
        if number != legs.num_ids + 1 or stop is not False or "error" in value or "prompt_progress" in value:
            return None
        self._ids.append(id)
        self._num_ids += 1
        legs.num_ids += 1
        return id

    def take_tokens(self, tokens: Tokens, part: Part, pieces: Pieces | None) -> bool:
        """Add the tokens of an event to `part`. Return whether the completion is usable after this event.

        If it is not, the missing tokens have to be computed again.

        Raises:
            Failed: the event does not match the request.
        """
        ids, missing = list(tokens.ids), self.num_missing(tokens)
        if self._scored and len(tokens.scores) < len(ids):  # a token of a draft
            self._drafts = True
            self._legs.num_unsent = 1
            return False
        if missing and tokens.stop_type:
            self._legs.num_unsent = missing  # the completion ended in the middle of a character
        elif missing:
            recovered = self._missing(tokens, missing, pieces)
            if not recovered:
                self._legs.num_unsent = missing + len(ids)
                return False
            ids = [*recovered, *ids]
        end = first_stop(ids, self._ends, len(self._ids), self._sampling)
        if end is not None:
            self.finish_reason = self.finish("stop", ids[end])
            ids = ids[: end + 1]
        self._add(ids, tokens.scores[: len(ids)], part)
        self.count(tokens, part)
        self._end(tokens.stop_type, truncated=tokens.truncated)
        part.finish = self.finish_reason
        return True

    def count(self, tokens: Tokens, part: Part) -> None:
        """Read the number of cached prompt tokens from the last event of the first completion."""
        if tokens.num_cached and not self._goes_on and self._legs.num == 1:
            num_cached = min(tokens.num_cached, max(len(self._prompt), tokens.num_prompt))
            part.extras = (part.extras or NO_EXTRAS)._replace(num_cached_tokens=num_cached)

    def _missing(self, tokens: Tokens, count: int, pieces: Pieces | None) -> Sequence[int]:
        """Return the ids of missing tokens, or nothing if they are uncertain and can be computed again."""
        if self._scored or pieces is None or len(tokens.ids) != 1:
            return ()
        choices = pieces.missing(tokens.text, count, tokens.ids[0])
        return choices[0] if len(choices) == 1 or (choices and self._is_ruled) else ()

    def _add(self, ids: list[int], scores: Sequence[Mapping[str, Any]], part: Part) -> None:
        if not all(type(id) is int and 0 <= id < _MAX_ID for id in ids):
            raise ValueError("token ids must be non-negative integers of 31 bits")
        values: Sequence[Any] = [None] * len(ids)
        tops: Sequence[Alternatives] = ()
        if self._scored and ids:
            if [entry["id"] for entry in scores] != ids:
                raise ValueError("the log-probabilities do not match the tokens")
            values = [entry["logprob"] for entry in scores]
            tops = [_alternatives(entry["top_logprobs"])[: self._num_tops] for entry in scores]
        self.take(part, ids, values, tops)
        self._ids += ids
        self._legs.num_ids += len(ids)

    def _end(self, stop_type: str, *, truncated: bool) -> None:
        """Determine whether the response has ended with a completion, and why.

        Raises:
            Failed: the completion ended for an unknown reason.
        """
        if stop_type not in ("", "eos", "word", "limit"):
            raise Failed("ended the request for an unknown reason", f"stop_type={stop_type[:100]!r}")
        if not stop_type or (self._legs.num_unsent and not self._is_ruled):  # the rest is computed again
            return
        reason: Finish | None = None
        if stop_type != "limit":
            reason = self.finish("stop", self._ids[-1] if self._ids else None)
        elif truncated or self._legs.num_unsent or len(self._ids) >= self._most:
            reason = Finish.LENGTH
        self.finish_reason = self.finish_reason or reason

    def check_progress(self) -> None:
        """Raise Failed if the completion has ended without any token. A response that is not a stream omits none."""
        if not self._legs.num_ids and not (self._legs.num_unsent and self._leg.streamed):
            raise Failed("ended its response without a token")


def check_free(data: bytes) -> None:
    """Check a response to `parameters.SETTINGS`.

    Raises:
        Failed: the server was started with a grammar, which requests cannot take back.
    """
    with contextlib.suppress(ValueError, AttributeError):
        if orjson.loads(data).get(GRAMMAR):
            flags = "--grammar, --grammar-file, --json-schema or --json-schema-file"
            raise Lasting(f"was started with {flags}, which constrains all responses", "start it without")


def is_scored(entry: Mapping[str, Any] | None) -> bool:
    """Return whether an entry has the log-probability of a token. Those of a draft have no alternatives."""
    return entry is not None and bool(entry["top_logprobs"])


def aligned(tokens: Tokens, pieces: Pieces) -> list[Mapping[str, Any] | None]:
    """Return the log-probabilities of each token of a completion, or None where llama-server reports none.

    It omits tokens after which the text is incomplete, even if the response is not a stream. These may include special
    tokens, because they have no text. For tokens of a draft, it reports no alternatives, and a wrong number.

    Raises:
        Failed: the log-probabilities cannot be read.
    """
    scores = deque(tokens.scores)
    result: list[Mapping[str, Any] | None] = []
    try:
        for id, omitted in zip(tokens.ids, pieces.incomplete(tokens.ids), strict=True):
            is_listed = bool(scores) and not omitted and scores[0]["id"] == id
            entry = scores.popleft() if is_listed else None
            result.append(entry if is_scored(entry) else None)
    except (KeyError, TypeError) as error:
        raise Failed("sent log-probabilities that cannot be read", repr(error)) from None
    return result


def read_scores(data: bytes, id: int, num_tops: int) -> Mapping[str, Any] | None:
    """Return the log-probabilities of a token and of its alternatives from a response to `parameters.scores`.

    Returns:
        None if the token is not among the most likely ones.

    Raises:
        Failed: the response cannot be read.
    """
    tokens = read_completion(data)
    try:
        alternatives = tokens.scores[0]["top_logprobs"]
        logprob = next((entry["logprob"] for entry in alternatives if entry["id"] == id), None)
    except (IndexError, KeyError, TypeError) as error:
        raise Failed("sent log-probabilities that cannot be read", repr(error)) from None
    return None if logprob is None else {"id": id, "logprob": logprob, "top_logprobs": alternatives[:num_tops]}


def _alternatives(entries: Sequence[Mapping[str, Any]]) -> Alternatives:
    return [(entry["id"], score(entry["logprob"])) for entry in entries]


def read_event(event: StreamEvent) -> Tokens:
    """Return the content of an event.

    Raises:
        Refused: the event is an error caused by the request.
        Failed: the event is another error, or cannot be read.
    """
    return read_completion(event.data)


def read_completion(data: bytes) -> Tokens:
    """Return the content of an event, or of a response that is not a stream."""
    try:
        value = orjson.loads(data)
        if "error" in value:
            raise event_error(data)
        ended, is_progress = value.get("stop") is True, bool(value.get("prompt_progress"))
        timings = value.get("timings") or {}
        cached, num_prompt = timings.get("cache_n"), value.get("tokens_evaluated")
        tokens = Tokens(
            [] if is_progress else value.get("tokens") or [],  # a report of progress has an invalid id
            value.get("completion_probabilities") or [],
            value.get("content") or "",
            value["tokens_predicted"],
            str(value["stop_type"]) if ended else "",
            bool(value.get("truncated")),
            cached if ended and type(cached) is int and cached > 0 else 0,
            num_prompt if type(num_prompt) is int and num_prompt > 0 else 0,
            is_progress,
        )
        types = type(tokens.ids), type(tokens.scores), type(tokens.text), type(tokens.num_tokens)
        if types != (list, list, str, int) or tokens.num_tokens < 0:
            raise ValueError("a field has an unexpected type")
        return tokens
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise Failed("sent an event that cannot be read", f"{error!r}: {shortened(data)}") from None
