"""The reasoning of one request: whether it is on, where its prompt leaves it, and the parser of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidParameter
from handler.core.text import Vocabulary
from handler.core.thoughts import Thoughts
from handler.core.values import Request, Sampling
from handler.protocols.assistant.events import Parser
from handler.protocols.assistant.reasoning.families import MESSAGES, Family
from handler.protocols.assistant.reasoning.parsing import ThinkingParser, thinking_parser

_COUNTED_ANEW = ("presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
"""Sampling fields that look at the answer's tokens, of which the engine has the thought's as the prompt's."""


class Thinking:
    """The reasoning of one request's answers.

    Attributes:
        shows: it is shown apart from the text.

    Args:
        family: the model's.
        kwargs: the arguments of the chat template.
        prefix: the text with which the prompt ends, and which the answer continues; None where it begins one.
        vocabulary: of the answers; None where each prompt brings its own.
        lacks: the reason why the engine cannot end a thought, or begin a rule after one; "" where it can.
        named: an option names the family; otherwise a rule holds from the start where none can begin after a thought.
    """

    shows = True

    def __init__(
        self,
        family: Family,
        kwargs: Mapping[str, Any],
        prefix: str | None = None,
        vocabulary: Vocabulary | None = None,
        lacks: str = "",
        *,
        named: bool = True,
    ) -> None:
        self.family = family
        self._is_on = family.is_on(kwargs)
        self._prefix = prefix
        self._open = family.thinks and self._is_on
        self._vocabulary = vocabulary
        self._lacks = lacks
        self._named = named

    def special(self, vocabulary: Vocabulary | None, sampling: Sampling) -> frozenset[str]:
        """Return the special tokens that the answers' parser looks for."""
        return self.family.special(vocabulary)

    def ends_open(self, prompt: str) -> bool | None:
        """Return whether a prompt leaves a thought open, or has ended one; None where it says nothing."""
        if self._prefix is not None:
            return self.family.is_open(self._prefix)
        return None if self.family.name in MESSAGES else self.family.ends_open(prompt)

    def read_prompt(self, request: Request, prompt: str) -> Request:
        """Find out from the prompt's end whether a thought is open; parsers are made after that.

        Raises:
            InvalidParameter: structured output cannot begin after a thought, or a thought cannot be ended.
        """
        family = self.family
        if (ending := self.ends_open(prompt)) is not None:
            self._open = self._is_on = ending
        sampling = request.sampling
        rule, budget = sampling.structured_output, sampling.thinking_token_budget
        guided = rule is not None and (not rule.allows_text or budget is not None)  # a thought is a text too
        if guided and not self._is_on:  # the rule holds from the start, and allows no thought
            return _without_thoughts(request)
        closing: tuple[int, ...] = ()
        try:
            if guided or budget is not None:
                name = request.names.structured_output if guided else "thinking_token_budget"
                closing = self._closing(sampling, name)
        except InvalidParameter:
            if self._named or budget is not None:
                raise
            self._open = self._is_on = False
            return _without_thoughts(request)
        if not family.end:
            return request
        thoughts = Thoughts(family.begin, (*family.end, *family.calls), self._open, family.calls, closing)
        return request._replace(sampling=sampling._replace(thoughts=thoughts))

    def _closing(self, sampling: Sampling, name: str) -> tuple[int, ...]:
        """Check that a thought may be followed by a part of its own; return the ids that end one."""
        off = "send chat_template_kwargs with enable_thinking false"
        if self._lacks:
            raise InvalidParameter(f"{name}: the model thinks before it answers, and {self._lacks}; {off}")
        for field in _COUNTED_ANEW:
            if (value := getattr(sampling, field)) != Sampling._field_defaults[field]:
                raise InvalidParameter(
                    f"{field}={value}: with {name} it cannot count the tokens of the reasoning; {off}"
                )
        family, mark = self.family, self.family.closing
        closing = self._vocabulary.ids(mark.encode()) if self._vocabulary is not None else ()
        if not family.end or (mark and not closing) or (sampling.thinking_token_budget is not None and not mark):
            raise InvalidParameter(f"{name}: no mark ends a thought with option.reasoning_parser={family.name}; {off}")
        return closing

    def parser(self, inner: Parser | None = None) -> ThinkingParser:
        return thinking_parser(self.family, inner, thinking=self._open)


def _without_thoughts(request: Request) -> Request:
    return request._replace(sampling=request.sampling._replace(thoughts=None, thinking_token_budget=None))
