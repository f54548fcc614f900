"""How one request's answers are read: thoughts and calls, token by token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter
from handler.core.values import Finish, Sampling, Token
from handler.protocols.assistant.choice import reasoning_family
from handler.protocols.assistant.events import Event, Parser, PlainText
from handler.protocols.assistant.reasoning.parsing import ThinkingParser
from handler.protocols.assistant.reasoning.request import Thinking
from handler.protocols.assistant.response_template.request import TemplateThinking
from handler.protocols.assistant.tools.arguments import CheckedCalls
from handler.protocols.assistant.tools.formats.hf import HF
from handler.protocols.assistant.tools.request import AUTO, NONE, Tools
from handler.protocols.assistant.trimming import Trimmed
from handler.protocols.kernel.context import ServerContext


class AnswerReader:
    """Reads one answer.

    Args:
        allowed: names of the tools that may be called; None: any.

    Attributes:
        num_thoughts: tokens of thoughts so far, without their marks.
        thinking: the last token belonged to a thought.
    """

    __slots__ = ("_calls", "_parser", "_thoughts", "_trimmed", "num_thoughts", "thinking")

    def __init__(
        self,
        parser: Parser,
        thoughts: ThinkingParser | None,
        *,
        trims: bool = False,
        allowed: Collection[str] | None = None,
    ) -> None:
        self._parser = parser
        self._thoughts = thoughts
        self._trimmed = Trimmed() if trims else None
        self._calls = CheckedCalls(allowed)
        self.num_thoughts = 0
        self.thinking = False

    def feed(self, token: Token) -> list[Event]:
        if self._thoughts is None:
            return self._events(token.text)
        before = self._thoughts.thinking
        events = self._events(token.text)
        self.thinking = before and self._thoughts.thinking
        self.num_thoughts += self.thinking and token.id >= 0 and token.text not in self._thoughts.begin
        return events

    def read(self, tokens: list[Token], finish: Finish) -> tuple[list[Event], list[Token]]:
        """Read a whole answer; return its events, and the tokens that belong to no thought."""
        if self._thoughts is None:
            found = self._events("".join([token.text for token in tokens]))
            return [*found, *self.flush(finish)], tokens
        events: list[Event] = []
        others: list[Token] = []
        for token in tokens:
            events += self.feed(token)
            if not self.thinking:
                others.append(token)
        return [*events, *self.flush(finish)], others

    def flush(self, finish: Finish) -> list[Event]:
        """Return the rest at the answer's end, with the ends of all calls; `finish` is why it ended."""
        events = self._calls.end(self._parser.flush(), finish)
        return events if self._trimmed is None else self._trimmed.read(events)

    def _events(self, text: str) -> list[Event]:
        if not text:
            return []
        events = self._calls.read(self._parser.feed(text))
        return events if self._trimmed is None else self._trimmed.read(events)


class AnswerForm(NamedTuple):
    """The form of a request's answers.

    Attributes:
        thinking: None where thoughts are not separated from the text.
        trims: text and reasoning have no white space at their ends.
    """

    tools: Tools = Tools()
    thinking: Thinking | None = None
    trims: bool = False

    @property
    def is_text(self) -> bool:
        """Whether answers are nothing but text, as it comes."""
        return self.thinking is None and not self.trims and self.tools.parser() is None

    def reader(self) -> AnswerReader | None:
        """Return a reader of one answer, once the prompt is known; None where answers are nothing but text."""
        inner = self.tools.parser()
        if self.thinking is not None:
            parser = self.thinking.parser(inner)
            return AnswerReader(parser, parser, trims=self.trims, allowed=self.tools.allowed)
        if inner is None and self.trims:
            inner = PlainText()
        if inner is None:
            return None
        return AnswerReader(inner, None, trims=self.trims, allowed=self.tools.allowed)

    def sampling(self, sampling: Sampling, context: ServerContext) -> Sampling:
        """Keep the special tokens that are marks of this form in the text.

        Raises:
            InvalidParameter: a thought has a budget, and none would be found.
        """
        shows = self.thinking is not None and self.thinking.shows
        if not shows and (budget := sampling.thinking_token_budget) is not None:
            shown = "; the chat template shows none" if context.config.reasoning == AUTO else ""
            why = f"needs option.reasoning_parser, the model's family{shown}"
            raise InvalidParameter(f"thinking_token_budget={budget}: {why}")
        marks = self.tools.format.special(context.vocabulary) if self.tools.format else frozenset[str]()
        if self.thinking is not None:
            marks |= self.thinking.special(context.vocabulary, sampling)
        return sampling._replace(marks=marks) if marks else sampling


def answer_form(
    tools: Tools, context: ServerContext, arguments: Mapping[str, Any] | None = None, prefix: str | None = None
) -> AnswerForm:
    """Return the form of a request's answers.

    Args:
        arguments: those of the chat template.
        prefix: the beginning of the answer, where the messages end with it.
    """
    trims = context.config.trim_answers
    family, template = reasoning_family(context), context.response_template
    lacks, kwargs = context.unsupported.get("thinking_token_budget", ""), arguments or {}
    named = context.config.reasoning_parser is not None
    if template is not None and (tools.format is HF or context.config.reasoning != NONE):
        shows = family is not None
        thinking = TemplateThinking(template, kwargs, prefix, context.vocabulary, lacks, named=named, shows=shows)
        return AnswerForm(tools, thinking, trims)
    if family is None:
        return AnswerForm(tools, trims=trims)
    family = family.of(context.vocabulary, context.chat_template)
    return AnswerForm(tools, Thinking(family, kwargs, prefix, context.vocabulary, lacks, named=named), trims)
