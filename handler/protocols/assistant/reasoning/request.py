"""The reasoning of one request: whether it is on, where its prompt leaves it, and the parser of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from handler.core.errors import InvalidParameter
from handler.core.text import Thoughts
from handler.core.values import Request
from handler.protocols.assistant.events import Parser
from handler.protocols.assistant.reasoning.families import HARMONY, Family
from handler.protocols.assistant.reasoning.parsing import ThinkingParser, thinking_parser


class Thinking:
    """The reasoning of one request's answers.

    Args:
        family: the model's.
        kwargs: the arguments of the chat template.
        prefix: the text with which the prompt ends, and which the answer continues; None where it begins one.
    """

    def __init__(self, family: Family, kwargs: Mapping[str, Any], prefix: str | None = None) -> None:
        self.family = family
        self._is_on = family.is_on(kwargs)
        self._prefix = prefix
        self._open = family.thinks and self._is_on

    def read_prompt(self, request: Request, prompt: str) -> Request:
        """Find out from the prompt's end whether a thought is open; parsers are made after that.

        Raises:
            InvalidParameter: structured output would have to begin after a thought.
        """
        family = self.family
        if self._prefix is None:
            ending = None if family.name == HARMONY else family.ends_open(prompt)
        else:
            ending = family.is_open(self._prefix)
        if ending is not None:
            self._open = self._is_on = ending
        rule = request.sampling.structured_output
        if rule is not None and self._is_on and not rule.allows_text:
            raise InvalidParameter(
                f"{request.names.structured_output}: the model thinks before it answers, and the engine cannot begin "
                "a rule after a thought; send chat_template_kwargs with enable_thinking false"
            )
        thoughts = Thoughts(family.begin, (*family.end, *family.calls), self._open)
        return replace(request, sampling=request.sampling._replace(thoughts=thoughts))

    def parser(self, inner: Parser | None = None) -> ThinkingParser:
        return thinking_parser(self.family, inner, thinking=self._open)
