"""Reader of one answer's events: token ids, log-probabilities, its end and errors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from handler.core.values import Finish
from handler.engines.base import Alternatives
from handler.engines.openai.events import Event

_ID = "token_id:"
_OF_THE_REQUEST = (400, 413, 422)
"""Statuses by which a server finds fault with the request; others of 4xx are about keys, paths and models."""


class Refused(Exception):
    """The server does not take the request, and no other would.

    Attributes:
        words: the server's own, where it finds fault with the request itself; else the operator has to do something.
    """

    def __init__(self, text: str, words: str = "") -> None:
        super().__init__(text)
        self.words = words


class Failed(Exception):
    """The server failed; another, or the same one later, may not."""


@dataclass
class Part:
    """What came of one answer since the last step."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[Alternatives] = field(default_factory=list)
    finish: Finish | None = None
    error: str | None = None
    refused: bool = False


class Answer:
    """Reads the events of one answer.

    Args:
        stops: ids that end it as STOP, not as EOS.
        num_tops: the number of alternatives to each token.
        most: tokens that were asked for.
        scored: its tokens have log-probabilities.
    """

    def __init__(self, stops: frozenset[int], num_tops: int, most: int, *, scored: bool) -> None:
        self._stops = stops
        self._most = most
        self._num_tops = num_tops
        self._scored = scored
        self._num_ids = 0
        self._has_text = False

    @property
    def begun(self) -> bool:
        """Whether a token has come: then nobody else may be asked."""
        return self._num_ids > 0

    def read(self, event: Event, part: Part) -> bool:
        """Add an event to `part`; return whether anything came.

        Raises:
            Refused, Failed: the event is an error, or cannot be read.
        """
        if event.name == b"error":
            raise _event_error(event.data or event.comment)
        if event.data == b"[DONE]":
            raise Failed("the stream ended without a finish_reason")
        try:
            value = orjson.loads(event.data)
            if "error" in value:
                raise _event_error(event.data)
            choice = next(iter(value["choices"]), None)
            if choice is None:  # a count of tokens
                return False
            extra = value.get("nvext") or {}
            ids = choice.get("token_ids") or extra.get("completion_token_ids") or []
            reason = choice.get("finish_reason")
            if ids:
                self._take(ids, choice.get("logprobs"), part)
            self._has_text = self._has_text or bool(choice.get("text"))
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise Failed(f"an event cannot be read: {error!r}: {_short(event.data)}") from None
        if reason is not None:
            part.finish = self._finish(reason, choice.get("stop_reason"), ids)
        return bool(ids) or reason is not None

    def _take(self, ids: Sequence[int], scores: Mapping[str, Any] | None, part: Part) -> None:
        if not all(type(id) is int and id >= 0 for id in ids):
            raise ValueError("token ids are whole numbers")
        if self._num_ids + len(ids) > self._most:
            raise Failed(f"sent more tokens than max_tokens={self._most}")
        logprobs: Sequence[float | None] = [None] * len(ids)
        if self._scored and scores:
            given = scores["token_logprobs"]
            # A token's text may come later than its id, and its log-probability with either.
            if len(given) == len(ids):
                logprobs = given
        tops: list[Alternatives] = []
        if self._num_tops:
            if not scores or len(scores["top_logprobs"]) != len(ids):
                raise ValueError("a token's alternatives are missing")
            tops = [_ranked(one, self._num_tops) for one in scores["top_logprobs"]]
        self._num_ids += len(ids)
        part.ids += ids
        part.logprobs += logprobs
        part.tops += tops

    def _finish(self, reason: str, stop_reason: Any, ids: Sequence[int]) -> Finish:
        if self._has_text and not self._num_ids:
            raise Refused("its answers have text but no token ids; option.base_url_kind is another")
        match reason:
            case "length":
                return Finish.LENGTH
            case "stop":
                last = ids[-1] if ids else stop_reason  # the id may be left out
                return Finish.STOP if last in self._stops else Finish.EOS
        raise Failed(f"it ended the request as {reason!r}")


def _ranked(entry: Any, count: int) -> Alternatives:
    """Read the alternatives to a token: names with their log-probabilities, or Dynamo's list of objects."""
    pairs = entry.items() if isinstance(entry, dict) else [(one["token"], one["logprob"]) for one in entry]
    best = sorted(pairs, key=lambda pair: -pair[1])[:count]
    return [(int(name.removeprefix(_ID)), logprob) for name, logprob in best]


def message(data: bytes) -> str:
    """Return the message of an error's body, of whichever form; else its beginning."""
    try:
        value: Any = orjson.loads(data)
    except ValueError:
        return _short(data)
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    return value if isinstance(value, str) else _short(data)


def _event_error(data: bytes) -> Refused | Failed:
    """Return the error that an event under 200 stands for, by the status that it names."""
    code: Any = None
    with contextlib.suppress(ValueError, TypeError, KeyError):
        code = orjson.loads(data)["error"]["code"]
    return status_error(code if isinstance(code, int) else 500, data)


def status_error(status: int, data: bytes) -> Refused | Failed:
    """Return the error of a status and its body."""
    words = message(data) or "no message"
    if 400 <= status < 500 and status not in (408, 425, 429):
        return Refused(f"refused it with {status}: {words}", words if status in _OF_THE_REQUEST else "")
    return Failed(f"failed with {status}: {words}")


def _short(data: bytes) -> str:
    return data[:300].decode("utf-8", "replace").strip()
