"""Incremental readers of responses, which separate text, reasoning and tool calls."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter
from handler.core.framing import SSE
from handler.core.values import FieldNames, Finish, Sampling, Token
from handler.protocols.assistant.events import CallStart, Event, EventParser, PlainText, Trimmed
from handler.protocols.assistant.reasoning import ReasoningForm, ReasoningParser
from handler.protocols.assistant.reasoning_families import Family, choose_family
from handler.protocols.assistant.response_template.parsing import TemplateReasoning, family
from handler.protocols.assistant.tools.formats import find
from handler.protocols.assistant.tools.formats.json_calls import SMOLLM2
from handler.protocols.assistant.tools.grammar import write_calls
from handler.protocols.assistant.tools.parsing import HF, CheckedCalls
from handler.protocols.assistant.tools.request import AUTO, NONE, Tools, choose_format, takes_tools
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.reply import SequenceOutput, TokenStream

log = logging.getLogger("handler.template")


def reasoning_family(context: ServerContext) -> Family | None:
    """Return the reasoning family of the model, or None if reasoning is not separated from the text."""
    name = context.config.reasoning
    if context.response_template is not None and name != NONE:
        return family(context.response_template) if context.response_template.reasoning is not None else None
    return choose_family(name, context.chat_template)


def describe_parsers(context: ServerContext) -> str:
    """Return a description, for the log, of the parsers that read the model's responses and why they were chosen."""
    family, calls = reasoning_family(context), choose_format(context)
    response_template, chat_template = "the model's response template", "the chat template"
    by = response_template if context.response_template is not None else chat_template
    if context.config.reasoning != AUTO:
        reasoning = f"according to option.reasoning_parser={context.config.reasoning}"
    elif family is None:
        reasoning = f"none, according to {by}"
    else:
        reasoning = f"{family.name}, according to {by} (option.reasoning_parser=none leaves it in the text)"
    if context.tool_format is not None:
        tool_calls = "according to option.tool_parser_plugin"
    elif context.config.tool_call_parser != AUTO:
        tool_calls = f"according to option.tool_call_parser={context.config.tool_call_parser}"
    elif calls is SMOLLM2 and not takes_tools(context.chat_template):
        tool_calls = f"{calls.name}, as no chat template shows tools"
    else:
        source = response_template if calls is HF else chat_template
        tool_calls = f"{calls.name if calls else 'unknown format'}, according to {source}"
    return f"reasoning: {reasoning}; tool calls: {tool_calls}"


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def warn_of_unread_calls(context: ServerContext) -> None:
    """Log a warning if prompts contain tool calls in a format that the parser of the responses does not read."""
    template, format = context.chat_template, choose_format(context)
    if format is None:
        return
    if not takes_tools(template):
        if format.notation(template) is None:
            log.warning(
                "the chat template does not show tools, and the tool format %s does not define how calls are written; "
                "prompts ask for <tool_call>[JSON]</tool_call>",
                format.name,
            )
        return
    prompt_format = find(template)
    if (
        context.tool_format is not None
        or prompt_format is None
        or (notation := prompt_format.notation(template)) is None
    ):
        return
    parser = format.make([_TOOL])
    events = [*parser.feed(write_calls(notation, [("f", {})])), *parser.flush()]
    if not any(isinstance(event, CallStart) for event in events):
        log.warning(
            "option.tool_call_parser=%s does not read the calls that the chat template shows; their format is %s",
            context.config.tool_call_parser,
            prompt_format.name,
        )


class ResponseReader:
    """Reads the tokens of one response and returns its events.

    Args:
        parser: the parser of the text, which may also separate reasoning.
        trims: whether whitespace at the ends of text and reasoning is dropped.
        allowed: the names of the tools that may be called, or None for any name.

    Attributes:
        num_reasoning: the number of reasoning tokens so far, not counting markers.
        thinking: whether the last token belongs to reasoning.
    """

    __slots__ = ("_calls", "_parser", "_reasoning_parser", "_trimmed", "_undecided", "num_reasoning", "thinking")

    def __init__(self, parser: EventParser, *, trims: bool = False, allowed: Collection[str] | None = None) -> None:
        self._parser = parser
        self._reasoning_parser = parser if isinstance(parser, ReasoningParser) else None
        self._trimmed = Trimmed() if trims else None
        self._calls = CheckedCalls(allowed)
        self._undecided: list[int] = []  # lengths of the last tokens, which may belong to the marker after reasoning
        self.num_reasoning = 0
        self.thinking = False

    def feed(self, token: Token) -> list[Event]:
        if self._reasoning_parser is None:
            return self._events(token.text)
        before = self._reasoning_parser.thinking
        events = self._events(token.text)
        self.thinking = before and self._reasoning_parser.thinking
        if not self.thinking:
            self._undecided = []
        elif token.id >= 0 and token.text not in self._reasoning_parser.begin:
            self._undecided.append(len(token.text))
            self._count_reasoning(self._reasoning_parser.num_held)
        return events

    def _count_reasoning(self, num_held: int) -> None:
        """Count the reasoning tokens before the last `num_held` characters, which may be the start of a marker."""
        while self._undecided and (not num_held or sum(self._undecided) > num_held):
            del self._undecided[0]
            self.num_reasoning += 1

    def read(self, tokens: list[Token], finish: Finish) -> tuple[list[Event], list[Token]]:
        """Return the events of a non-streaming response, and the tokens outside of its reasoning."""
        if self._reasoning_parser is None:
            text = "".join([token.text for token in tokens])
            return [*self._events(text), *self.flush(finish)], tokens
        events: list[Event] = []
        text_tokens: list[Token] = []
        for token in tokens:
            events += self.feed(token)
            if not self.thinking:
                text_tokens.append(token)
        return [*events, *self.flush(finish)], text_tokens

    def flush(self, finish: Finish) -> list[Event]:
        """Return the last events of a response, including the ends of all tool calls.

        Args:
            finish: the reason why the response ended.
        """
        events = self._calls.end(self._parser.flush(), finish)
        self._count_reasoning(0)
        return events if self._trimmed is None else self._trimmed.read(events)

    def _events(self, text: str) -> list[Event]:
        if not text:
            return []
        events = self._calls.read(self._parser.feed(text))
        return events if self._trimmed is None else self._trimmed.read(events)


class ResponseForm(NamedTuple):
    """The settings for reading the responses to a request.

    Attributes:
        tools: the tools of the request.
        thinking: the settings for reasoning in the responses, or None if it is not separated from the text.
        trims: whether whitespace at the ends of text and reasoning is dropped.
    """

    tools: Tools = Tools()
    thinking: ReasoningForm | None = None
    trims: bool = False

    @property
    def is_text(self) -> bool:
        """Whether responses are plain text that is passed on unchanged."""
        return self.thinking is None and not self.trims and self.tools.parser() is None

    def reader(self) -> ResponseReader | None:
        """Return a new reader of one response, or None for plain text. Call `thinking.read_prompt` first."""
        parser = self.tools.parser()
        if self.thinking is not None:
            parser = self.thinking.parser(parser)
        if parser is None and self.trims:
            parser = PlainText()
        return None if parser is None else ResponseReader(parser, trims=self.trims, allowed=self.tools.allowed)

    def sampling(self, sampling: Sampling, context: ServerContext, names: FieldNames) -> Sampling:
        """Return sampling parameters that keep special tokens in the text if they enclose reasoning or tool calls.

        Args:
            names: the client's names for fields.

        Raises:
            InvalidParameter: the request limits the number of reasoning tokens, but reasoning cannot be recognized.
        """
        shows = self.thinking is not None and self.thinking.shows
        if not shows and (budget := sampling.thinking_token_budget) is not None:
            cause = "; the chat template shows no reasoning" if context.config.reasoning == AUTO else ""
            reason = f"requires option.reasoning_parser with the name of the model's family{cause}"
            raise InvalidParameter(f"{names.thinking_token_budget}={budget}: {reason}")
        if context.vocabulary is None:
            return sampling
        marks = self.tools.format.special(context.vocabulary) if self.tools.format else frozenset[str]()
        if self.thinking is not None:
            marks |= self.thinking.special(context.vocabulary, sampling)
        return sampling._replace(marks=marks) if marks else sampling


def response_form(
    tools: Tools, context: ServerContext, arguments: Mapping[str, Any] | None = None, prefix: str | None = None
) -> ResponseForm:
    """Return the settings for reading the responses to a request.

    Args:
        arguments: the arguments of the chat template.
        prefix: the text of the last message if the response continues it, or None.
    """
    family, template = reasoning_family(context), context.response_template
    lacks, kwargs = context.unsupported.get("thinking_token_budget", ""), arguments or {}
    explicit = context.config.reasoning_parser is not None
    thinking: ReasoningForm | None = None
    if template is not None and (tools.format is HF or context.config.reasoning != NONE):
        shows = family is not None
        thinking = TemplateReasoning(
            template, kwargs, prefix, context.vocabulary, lacks, explicit=explicit, shows=shows
        )
    elif family is not None:
        family = family.of(context.vocabulary, context.chat_template)
        thinking = ReasoningForm(family, kwargs, prefix, context.vocabulary, lacks, explicit=explicit)
    return ResponseForm(tools, thinking, context.config.trim_answers)


# -- base class of streams that consist of blocks (Anthropic) or items (OpenAI's Responses) ----------------------------


class BlockStream(TokenStream):
    """Base class of streams that render a parsed response as server-sent events."""

    def __init__(self, errors: ErrorFormat, form: ResponseForm) -> None:
        super().__init__(errors, SSE)
        self._form = form
        self._reader: ResponseReader | None = None

    def start(self, index: int, num_prompt_tokens: int) -> None:
        super().start(index, num_prompt_tokens)
        self._reader = self._form.reader()  # the prompt has been read: reasoning may begin in it

    @property
    def _num_reasoning(self) -> int:
        return self._reader.num_reasoning if self._reader is not None else 0


def read_whole(form: ResponseForm, sequence: SequenceOutput) -> tuple[Sequence[Event], int]:
    """Return the events of a non-streaming response, and the number of its reasoning tokens."""
    reader = form.reader()
    events: Sequence[Event] = [sequence.text] if reader is None else reader.read(sequence.tokens, sequence.finish)[0]
    return events, reader.num_reasoning if reader is not None else 0
