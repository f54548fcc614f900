"""Anthropic's context editing: parts of a conversation that are removed before the model reads it.

Sources: "Context editing" in Anthropic's documentation; the types of its Python client, 2.14. Clients send the complete
conversation with every request, so every request is edited again. Tokens are counted on the rendered prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import PromptTooLong
from handler.core.text import Prompt
from handler.core.values import Request
from handler.protocols.anthropic.api import AnthropicContext, AppliedEdit
from handler.protocols.anthropic.types import CLEAR_THINKING, CLEAR_TOOL_USES, COMPACT, EDITS
from handler.protocols.assistant.summary import Summarizing, default_threshold
from handler.protocols.kernel.objects import reader_of
from handler.protocols.kernel.readers import only

_TRIGGER = 150_000
"""The default trigger of a summary in tokens, unless the model's context is smaller."""

CLEARED = "[cleared to save context]"
"""The content of a cleared result."""


class EditedMessages(NamedTuple):
    """The messages of a conversation after an edit, as a body contains them.

    Attributes:
        num_reasoning: the number of messages, counted from the end, that keep their reasoning, or None if all do.
    """

    messages: list[Mapping[str, Any]]
    num_reasoning: int | None = None


class ClearThinking(NamedTuple):
    """Removes the reasoning of all but the last messages that contain any.

    Attributes:
        keep: the number of messages that keep their reasoning, or None if all do.
    """

    keep: int | None


class ClearToolUses(NamedTuple):
    """Replaces the oldest results of tools.

    Attributes:
        counts_uses: whether `trigger` is a number of calls instead of a number of tokens.
        trigger: the number above which results are cleared.
        keep: the number of results, counted from the end, that are kept.
        at_least: the minimum number of tokens that clearing must remove. Otherwise nothing is cleared.
        excluded: the names of the tools whose results are always kept.
        inputs: whether to clear the arguments of the calls too, or the names of the tools whose calls lose them.
    """

    counts_uses: bool
    trigger: int
    keep: int
    at_least: int
    excluded: frozenset[str]
    inputs: bool | frozenset[str]

    def may_clear(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
        """Return the tool names of the results that clearing would replace, by the ids of their calls.

        The result is empty if clearing depends on a number of calls that is not reached.
        """
        uses = [*_blocks(messages, "tool_use")]
        if self.counts_uses and len(uses) <= self.trigger:
            return {}
        names = {block["id"]: block["name"] for block in uses}
        results = [*_blocks(messages, "tool_result")]
        num_old = max(0, len(results) - self.keep)
        kept = {block["tool_use_id"] for block in [*results[num_old:], *filter(_loads, results)]}
        ids = [block["tool_use_id"] for block in results[:num_old] if block["tool_use_id"] not in kept]
        return {id: names[id] for id in ids if names[id] not in self.excluded}

    def clear(self, messages: Sequence[Mapping[str, Any]], ids: Mapping[str, str]) -> list[Mapping[str, Any]]:
        """Return the messages, in which the results of these calls are cleared."""
        return [
            {**message, "content": [self._cleared(block, ids) for block in message["content"]]}
            if isinstance(message.get("content"), list) and message["role"] != "system"
            else message
            for message in messages
        ]

    def _cleared(self, block: Mapping[str, Any], ids: Mapping[str, str]) -> Mapping[str, Any]:
        if block["type"] == "tool_result" and block["tool_use_id"] in ids:
            return {**block, "content": CLEARED}
        if block["type"] == "tool_use" and block["id"] in ids:
            name, inputs = block["name"], self.inputs
            if inputs if isinstance(inputs, bool) else name in inputs:
                return {**block, "input": {}}
        return block


class Compact(NamedTuple):
    """Requests a summary of the conversation before the response.

    Attributes:
        trigger: the number of tokens above which the conversation is summarized, or None for the default.
        instructions: what the model reads instead of the server's own instructions, or "".
        pauses: whether the response ends after the summary.
    """

    trigger: int | None
    instructions: str
    pauses: bool

    def threshold(self, context_length: int | None) -> int:
        """Return the number of tokens above which the conversation is summarized."""
        return default_threshold(context_length, _TRIGGER) if self.trigger is None else self.trigger


Clearing = ClearThinking | ClearToolUses
Edit = Clearing | Compact


def _blocks(messages: Sequence[Mapping[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    """Yield the blocks of a type in messages that have been read."""
    for message in messages:
        content = message.get("content")
        for block in content if isinstance(content, list) and message["role"] != "system" else ():
            if block["type"] == kind:
                yield block


def _loads(result: Mapping[str, Any]) -> bool:
    """Return whether a result shows tools to the model. Without it, the model could not call them."""
    content = result.get("content")
    return isinstance(content, list) and any(part["type"] == "tool_reference" for part in content)


class ContextEdits:
    """The edits of one request.

    Args:
        edits: the edits in their order. A summary follows all others.
        messages: the messages of the unedited conversation.
        num_reasoning: the number of them that have reasoning, after consecutive ones have been joined.
        build: returns the request with other messages.

    Attributes:
        applied: the edits that removed something, as the response shows them.
        num_original: the number of prompt tokens before the edits, or None if no edit had to count them.
        edited: the messages after the edits.
        compact: the edit that has the edited conversation summarized, or None.
        summarizing: has the edited conversation summarized if it is still too long, or None.
    """

    def __init__(
        self,
        edits: Sequence[Edit],
        messages: list[Mapping[str, Any]],
        num_reasoning: int,
        build: Callable[[EditedMessages], Request],
    ) -> None:
        self._edits = [edit for edit in edits if not isinstance(edit, Compact)]
        self.compact = next((edit for edit in edits if isinstance(edit, Compact)), None)
        self._messages = messages
        self._num_reasoning = num_reasoning
        self._build = build
        self.applied: list[AppliedEdit] = []
        self.num_original: int | None = None
        self.edited = EditedMessages(messages)
        self.summarizing: Summarizing | None = None

    @property
    def needed(self) -> bool:
        """Whether an edit may remove something, so that tokens must be counted."""
        return self.summarizing is not None or any(
            self._num_cleared(edit) > 0 if isinstance(edit, ClearThinking) else edit.may_clear(self._messages)
            for edit in self._edits
        )

    def shown(self) -> AnthropicContext:
        return {"applied_edits": self.applied}

    def edit(self, request: Request, render: Callable[[Request], Prompt]) -> tuple[Request, Prompt]:
        """Return the request, and the prompt of the edited conversation. This may be called on any thread.

        Args:
            render: returns the prompt of a request.

        Raises:
            PromptTooLong: the prompt is too long to be tokenized, even after the edits.
        """
        prompt: Prompt | None = None
        too_long: PromptTooLong | None = None
        try:
            prompt = render(request)
            num_tokens = len(prompt.ids)
        except PromptTooLong as error:
            num_tokens, too_long = error.num_prompt, error
        self.applied, self.num_original = [], num_tokens
        self.edited = EditedMessages(self._messages)
        for edit in self._edits:
            shorter = self._shorten(edit, request, num_tokens, render)
            if shorter is not None:
                request, prompt = shorter
                num_tokens = len(prompt.ids)
        if prompt is None:
            assert too_long is not None, "the prompt was not rendered"
            raise too_long
        return (request, prompt) if self.summarizing is None else self.summarizing.shorten(request, prompt, render)

    def _shorten(
        self, edit: Clearing, request: Request, num_tokens: int, render: Callable[[Request], Prompt]
    ) -> tuple[Request, Prompt] | None:
        """Apply an edit. Return the request and its prompt, or None if the edit is not due or removes too little.

        Args:
            num_tokens: the number of prompt tokens before the edit.
        """
        due = self._edited(edit, self.edited, num_tokens)
        if due is None:
            return None
        edited, applied = due
        built = self._build(edited)
        request = request._replace(messages=built.messages, media=built.media)
        prompt = render(request)
        num_removed = num_tokens - len(prompt.ids)
        if isinstance(edit, ClearToolUses) and num_removed < max(1, edit.at_least):
            return None
        applied["cleared_input_tokens"] = max(0, num_removed)
        self.applied.append(applied)
        self.edited = edited
        return request, prompt

    def _num_cleared(self, edit: ClearThinking) -> int:
        return 0 if edit.keep is None else max(0, self._num_reasoning - edit.keep)

    def _edited(
        self, edit: Clearing, now: EditedMessages, num_tokens: int
    ) -> tuple[EditedMessages, AppliedEdit] | None:
        """Return the conversation after an edit and the response's report of the edit, or None if it is not due."""
        if isinstance(edit, ClearThinking):
            if not (num_cleared := self._num_cleared(edit)):
                return None
            cleared: AppliedEdit = {
                "type": CLEAR_THINKING,
                "cleared_input_tokens": 0,
                "cleared_thinking_turns": num_cleared,
            }
            return now._replace(num_reasoning=edit.keep), cleared
        if not edit.counts_uses and num_tokens <= edit.trigger:
            return None
        if not (ids := edit.may_clear(now.messages)):
            return None
        num_results = sum(block["tool_use_id"] in ids for block in _blocks(now.messages, "tool_result"))
        applied: AppliedEdit = {"type": CLEAR_TOOL_USES, "cleared_input_tokens": 0, "cleared_tool_uses": num_results}
        return now._replace(messages=edit.clear(now.messages, ids)), applied


# -- `context_management`: what the client asks for --------------------------------------------------------------------


_READERS = {kind: reader_of(edit) for kind, edit in EDITS.items()}


def read_edits(value: Any) -> tuple[Edit, ...]:
    """Read `context_management`.

    Raises:
        ValueError: the value is invalid, or contains an edit that is not supported.
    """
    edits = value.get("edits") if isinstance(value, dict) else value
    edits = [] if edits is None else edits
    if not isinstance(value, dict) or not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise ValueError("must be an object with 'edits', a list of objects")
    only(value, "edits")
    types = [edit.get("type") for edit in edits]
    for kind in types:
        if not isinstance(kind, str) or kind not in EDITS:
            raise ValueError(f"has an edit that is not supported: the available edits are {', '.join(EDITS)}")
        if types.count(kind) > 1:
            raise ValueError(f"may have only one edit of the type {kind}")
    if CLEAR_THINKING in types[1:]:
        raise ValueError(f"must begin with the edit of the type {CLEAR_THINKING}")
    return tuple(_edit(edit["type"], _READERS[edit["type"]](edit)) for edit in edits)


def _edit(kind: str, fields: Mapping[str, Any]) -> Edit:
    if kind == CLEAR_THINKING:
        return ClearThinking(fields["keep"])
    trigger = fields["trigger"]
    if kind == COMPACT:
        return Compact(trigger["value"], fields["instructions"], fields["pause_after_compaction"])
    return ClearToolUses(
        counts_uses=trigger["type"] == "tool_uses",
        trigger=trigger["value"],
        keep=fields["keep"]["value"],
        at_least=fields["clear_at_least"]["value"],
        excluded=fields["exclude_tools"],
        inputs=fields["clear_tool_inputs"],
    )
