"""Summaries of conversations: the model writes one before it responds, if the prompt has become too long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from handler.core.errors import GenerationFailed, PromptTooLong
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Delta, Finish, Request
from handler.protocols.assistant.answer import ResponseForm
from handler.protocols.assistant.events import Event
from handler.protocols.kernel.special_tokens import without_special_tokens

PROMPT = (
    "Summarize our conversation so far, so that you can continue the work from the summary alone. Keep: what the user "
    "asked for, and each constraint; decisions and their reasons; facts, names, paths, commands, numbers and errors "
    "that matter; what has been done, and with which result; what remains to be done, and the next step. Write only "
    "the summary, as plain text. Do not call tools."
)
"""The last message of a request for a summary."""

BEFORE = "Summary of the earlier conversation, which it replaces:\n\n"
"""The beginning of the message that contains a summary."""

_MAX_TOKENS = 8192
"""The maximum number of tokens of a summary, unless the request limits its output."""

_MIN_ROOM = 128
"""The number of tokens that must remain in the context when a prompt has become too long. The summary takes half."""

_GROWTH, _RESERVE = 0.25, 2 * _MIN_ROOM
"""The growth of a prompt since its last summary that justifies another one, as a share of what that summary left.
The half of the room in the context is enough too, less the reserve for the request for a summary, in tokens.
"""

_UNSHAPED: Mapping[str, Any] = {
    "structured_output": None, "min_new_tokens": 0, "stop": (), "stop_token_ids": (), "allowed_token_ids": (),
    "ignore_eos": False, "n": 1, "best_of": 1,
}  # fmt: skip
"""Parameters of a response that must not shape a summary, by field of Sampling."""


_SHARE = 0.8
"""The share of the model's context above which a conversation is summarized, unless the request sets a threshold."""


def default_threshold(context_length: int | None, maximum: int = sys.maxsize) -> int:
    """Return the number of tokens above which a conversation is summarized, up to `maximum`.

    Args:
        context_length: the maximum number of tokens in a prompt and its response, or None while it is unknown.
    """
    return maximum if context_length is None else min(maximum, int(context_length * _SHARE))


def of_bounded_length(request: Request) -> Request:
    """Return a request for a summary of limited length. The room in the model's context is also a limit."""
    limit = min(request.sampling.max_new_tokens, _MAX_TOKENS)
    return request._replace(sampling=request.sampling._replace(max_new_tokens=limit), fill_context=True)


def unshaped(request: Request) -> Request:
    """Return a request for a summary without the parameters that would shape the response."""
    return request._replace(sampling=request.sampling._replace(**_UNSHAPED))


def message_of(summary: str, vocabulary: Vocabulary | None) -> str:
    """Return the message that contains a summary. Special tokens that the summary quotes are plain text in it.

    Otherwise a quoted placeholder of an image, for example, would be one image too many in each later request.

    Args:
        vocabulary: the model's vocabulary, or None if it is unknown.
    """
    return BEFORE + without_special_tokens(summary, vocabulary)


def text_of(events: Iterable[Event]) -> str:
    """Return the text of a summary without its reasoning and calls.

    Raises:
        GenerationFailed: there is no text.
    """
    text = "".join(event for event in events if isinstance(event, str)).strip()
    if not text:
        raise GenerationFailed("the model returned no summary of the conversation")
    return text


class SummaryReader:
    """Reads the tokens of a summary.

    Attributes:
        num_tokens: the number of tokens so far.
        num_cached_tokens: the number of tokens of the prompt that were cached.
        num_media_tokens: the number of prompt tokens that the engine reports in addition to those of the prompt's ids.
    """

    def __init__(self, form: ResponseForm) -> None:
        self._reader = form.reader()
        self._events: list[Event] = []
        self.num_tokens = 0
        self.num_cached_tokens = self.num_media_tokens = 0

    @property
    def num_reasoning(self) -> int:
        return 0 if self._reader is None else self._reader.num_reasoning

    def feed(self, delta: Delta) -> None:
        if delta.extras is not None:
            self.num_cached_tokens += delta.extras.num_cached_tokens or 0
            self.num_media_tokens += delta.num_media_tokens
        for token in delta.tokens:
            self.num_tokens += token.id >= 0
            self._events += [token.text] if self._reader is None else self._reader.feed(token)

    def end(self, finish: Finish) -> str:
        """Return the summary.

        Raises:
            GenerationFailed: the summary is empty.
        """
        if self._reader is not None:
            self._events += self._reader.flush(finish)
        return text_of(self._events)


class SummaryRequest(NamedTuple):
    """A request for a summary, and the settings for reading it."""

    request: Request
    form: ResponseForm


class Summarizing:
    """Requests a summary of a conversation before the response, if the prompt exceeds a threshold.

    Args:
        threshold: the number of tokens that the prompt must exceed.
        context_length: returns the maximum number of tokens in a prompt and its response, or None while it is unknown.
        ask: returns the request for the summary.
        go_on: returns the request with the summary in place of the conversation.
        last: the last summary in the conversation, or "" if there is none.

    Attributes:
        due: whether the engine writes a summary first. It is known once the prompt has been rendered.
        summary: the summary, once it is written.
        failed: whether the model has written none, but is to respond without it.
    """

    def __init__(
        self,
        threshold: int,
        context_length: Callable[[], int | None],
        ask: Callable[[], SummaryRequest],
        go_on: Callable[[str], Request],
        last: str = "",
    ) -> None:
        self._threshold = threshold
        self._context_length = context_length
        self._ask = ask
        self._go_on = go_on
        self._last = last
        self._request: Request | None = None
        self._form = ResponseForm()
        self.summary = ""
        self.failed = False

    @property
    def due(self) -> bool:
        return self._request is not None

    def edit(self, request: Request, render: Callable[[Request], Prompt]) -> tuple[Request, Prompt]:
        """Return the request for a summary and its prompt, or those of the response if the threshold is not exceeded.

        Raises:
            PromptTooLong: the model's context has no room for a summary.
        """
        return self.shorten(request, render(request), render)

    def shorten(self, request: Request, prompt: Prompt, render: Callable[[Request], Prompt]) -> tuple[Request, Prompt]:
        """Do the same as `edit` for a prompt that has been rendered."""
        if len(prompt.ids) <= self._threshold or not self._has_grown(request, len(prompt.ids), render):
            return request, prompt
        other, self._form = self._ask()
        first = _instead_of(request, other)
        prompt = render(first)
        limit = self._context_length()
        if limit is not None:
            room = limit - len(prompt.ids)
            if room < _MIN_ROOM:
                raise PromptTooLong(request.names.prompt, len(prompt.ids), limit - _MIN_ROOM, limit=limit)
            num_tokens = min(first.sampling.max_new_tokens, room // 2)  # the rest is for the response
            first = first._replace(sampling=first.sampling._replace(max_new_tokens=num_tokens))
        self._request = request
        return first, prompt

    def _has_grown(self, request: Request, num_tokens: int, render: Callable[[Request], Prompt]) -> bool:
        """Return whether another summary would shorten the prompt enough. The parts that no summary replaces may exceed
        the threshold by themselves. A summary for each request would then cost much and change little.
        """
        if not self._last:
            return True
        shortest, limit = len(render(self._after(request, self._last)).ids), self._context_length()
        growth = max(1, _GROWTH * shortest)
        if limit is not None:
            fits = num_tokens + request.num_needed <= limit
            growth = max(1, min(growth, (limit - shortest) / 2 - _RESERVE)) if fits else 1
        return num_tokens >= shortest + growth

    def reader(self) -> SummaryReader:
        return SummaryReader(self._form)

    def follow_up(self) -> Request | None:
        """Return the request for the response after the summary, or None if there is no summary.

        The response may be shorter than requested, because the client could not foresee the length of the summary.
        """
        if self._request is None or not (self.summary or self.failed):
            return None
        if self.failed:
            return self._request._replace(edit=None)
        return self._after(self._request, self.summary)._replace(fill_context=True)

    def _after(self, request: Request, summary: str) -> Request:
        """Return a request with a summary in place of its conversation."""
        after = self._go_on(summary)
        return request._replace(messages=after.messages, media=after.media, edit=None)


def _instead_of(request: Request, other: Request) -> Request:
    """Return another request of the same client, with the values that the host has set in the first one."""
    sampling = other.sampling._replace(logprobs=request.sampling.logprobs)
    return other._replace(
        sampling=sampling,
        adapter=request.adapter,
        priority=request.priority,
        timeout=request.timeout,
        time_limit=request.time_limit,
        background=request.background,
        session=request.session,
        id=request.id,
        edit=None,
    )
