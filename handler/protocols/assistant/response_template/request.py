"""A request's answers by the model's own response template."""

from __future__ import annotations

from typing import Any

from handler.core.text import Vocabulary
from handler.core.values import Request, Sampling
from handler.protocols.assistant.events import Parser
from handler.protocols.assistant.reasoning.families import Family
from handler.protocols.assistant.reasoning.parsing import Prefixed, ThinkingParser
from handler.protocols.assistant.reasoning.request import Thinking
from handler.protocols.assistant.response_template.parsing import ResponseParser
from handler.protocols.assistant.response_template.template import Marks, ResponseTemplate
from handler.protocols.assistant.tools.formats.hf import HF, TemplateCalls


def family(template: ResponseTemplate) -> Family:
    """Return the literal marks of a template's thoughts, for what begins or ends with them."""
    field = template.reasoning
    return Family(HF.name, _texts(field and field.open), _texts(field and field.close), thinks=False)


def _texts(marks: Marks | None) -> tuple[str, ...]:
    return () if marks is None else marks.texts


class TemplateThinking(Thinking):
    """The reading of one request's answers.

    Args:
        shows: thoughts are shown apart from the text.
    """

    def __init__(self, template: ResponseTemplate, *arguments: Any, shows: bool, **keywords: Any) -> None:
        super().__init__(family(template), *arguments, **keywords)
        self._template = template
        self.shows = shows
        self._begun = ""
        self._is_ruled = False

    def special(self, vocabulary: Vocabulary | None, sampling: Sampling) -> frozenset[str]:
        if vocabulary is None:
            return frozenset()
        return (
            super().special(vocabulary, sampling) if _is_ruled(sampling) else self._template.special(vocabulary.marks)
        )

    def read_prompt(self, request: Request, prompt: str) -> Request:
        self._begun = self._template.begun(prompt)
        self._is_ruled = _is_ruled(request.sampling)
        if not self.shows:
            return request
        return super().read_prompt(request, prompt)

    def ends_open(self, prompt: str) -> bool | None:
        """Return whether a prompt leaves a thought open, by the template."""
        return True if ResponseParser(self._template, self._begun).thinking else super().ends_open(prompt)

    def parser(self, inner: Parser | None = None) -> ThinkingParser:
        if self._is_ruled or not isinstance(inner, TemplateCalls | None):  # what follows a thought has no marks
            return super().parser(inner) if self.shows else Prefixed("", inner)
        tools = None if inner is None else inner.tools
        return ResponseParser(self._template, self._begun, tools, thoughts=self.shows)


def _is_ruled(sampling: Sampling) -> bool:
    rule = sampling.structured_output
    return rule is not None and not rule.allows_text
