"""OpenAI's chat answers from tokens: text, log-probabilities, tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from handler.core.framing import JSON, SSE_DONE, Framing
from handler.core.values import Finish, Token
from handler.protocols.assistant.events import Arguments, CallStart, Event, Parser, Reasoning
from handler.protocols.openai.answers import (
    ChatLogprobs,
    ChosenLogprob,
    FunctionCall,
    OpenAiChatChoice,
    OpenAiChatPart,
    OpenAiMessage,
    OpenAiMessagePart,
    TokenLogprob,
    ToolCall,
    ToolCallPart,
)
from handler.protocols.openai.response import REASONS, Choice, Head, Stream, Usage, WholeAnswer
from handler.protocols.reply import SequenceOutput


class Logprobs(NamedTuple):
    """The log-probabilities in an answer: of the chosen tokens, and of their alternatives."""

    chosen: bool = False
    alternatives: bool = False

    def of(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        return {"content": [self._token(token) for token in tokens if token.id >= 0]} if self.chosen else None

    def _token(self, token: Token) -> ChosenLogprob:
        """Render one token. An engine without alternatives reports the chosen token as the only one, as LMI does."""
        own = _logprob(token)
        tops = ([_logprob(alternative) for alternative in token.top] or [own]) if self.alternatives else []
        return {"token": own["token"], "logprob": own["logprob"], "bytes": own["bytes"], "top_logprobs": tops}


def _logprob(token: Token) -> TokenLogprob:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()) or None}


class ChatFormat(NamedTuple):
    """The options of a chat's answers.

    Attributes:
        parser: makes the parser of one choice; returns None where tool calls are not read.
        single: keep the first tool call only.
        named: the client named the tool; OpenAI then reports `stop` as the reason.
        every_role: put the role and `tool_calls` into every part, as TGI's clients expect.
        marks: special tokens that are text for the parser; all others are dropped.
    """

    logprobs: Logprobs
    parser: Callable[[], Parser | None] = lambda: None
    single: bool = False
    named: bool = False
    every_role: bool = False
    marks: frozenset[str] = frozenset()

    def text(self, token: Token) -> str:
        return "" if self.marks and token.special and token.text not in self.marks else token.text

    def reason(self, finish: Finish | None, *, called: bool) -> str | None:
        reason = REASONS[finish]
        return "tool_calls" if called and not self.named and reason == "stop" else reason

    def select_events(self, events: Iterable[Event]) -> list[Event]:
        return [event for event in events if isinstance(event, str | Reasoning) or not (self.single and event.number)]


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatChoice(Choice):
    __slots__ = ("called", "parser", "waiting")

    def __init__(self, index: int, parser: Parser | None) -> None:
        super().__init__(index)
        self.parser = parser
        self.called = False
        self.waiting: list[Token] = []  # whose text is held back, for their log-probabilities


class ChatStream(Stream):
    kind = "chat.completion.chunk"

    def __init__(
        self, head: Head, format: ChatFormat, num_sequences: int, wanted: Usage, framing: Framing = SSE_DONE
    ) -> None:
        choices = [ChatChoice(index, format.parser()) for index in range(num_sequences)]
        super().__init__(head, choices, num_sequences, wanted, framing)
        self._format = format
        self._reads_calls = choices[0].parser is not None
        self._is_text = self._is_text and not self._reads_calls

    @property
    def _is_plain(self) -> bool:
        return not self._format.logprobs.chosen and not (self._reads_calls and self._usage.always)

    def _text_part(self, choice: Choice, text: str) -> OpenAiChatPart:
        return self._choice_part(choice, {"content": text}, [], None)

    def _next(self, choice: Choice, token: Token, finish: Finish | None, prefill: Sequence[Token]) -> bytes:
        assert isinstance(choice, ChatChoice)
        if choice.parser is None or choice.text_event is None or finish is not None:
            return super()._next(choice, token, finish, prefill)
        self._num_tokens += 1
        events = choice.parser.feed(self._format.text(token))
        if not events:
            return b""
        if len(events) == 1 and isinstance(text := events[0], str):
            return self._text_chunk(choice.text_event, text)
        delta = self._message_delta(choice, events)
        return self._chunk(JSON.encode(self._choice_part(choice, delta, [], None))) if delta else b""

    def _part(
        self, choice: Choice, token: Token, finish: Finish | None, prefill: Sequence[Token]
    ) -> OpenAiChatPart | None:
        assert isinstance(choice, ChatChoice)
        if choice.parser is None:
            return self._choice_part(choice, {"content": token.text}, [token], finish)
        choice.waiting.append(token)
        text = self._format.text(token)
        events = [*(choice.parser.feed(text) if text else ()), *(choice.parser.flush() if finish is not None else ())]
        delta = self._message_delta(choice, events)
        if not delta and finish is None:
            return None
        tokens, choice.waiting = choice.waiting, []
        return self._choice_part(choice, delta, tokens, finish)

    def _choice_part(
        self, choice: Choice, delta: OpenAiMessagePart, tokens: list[Token], finish: Finish | None
    ) -> OpenAiChatPart:
        assert isinstance(choice, ChatChoice)
        return {
            "index": choice.index,
            "delta": self._message_part(choice, delta),
            "logprobs": self._format.logprobs.of(tokens),
            "finish_reason": self._format.reason(finish, called=choice.called),
        }

    def _message_part(self, choice: Choice, delta: OpenAiMessagePart) -> OpenAiMessagePart:
        """Put the role before a choice's first part."""
        if not choice.begun or self._format.every_role:
            delta = {"role": "assistant", "content": None, **delta}
        if self._format.every_role:
            delta.setdefault("tool_calls", None)
        return delta

    def _message_delta(self, choice: ChatChoice, events: Iterable[Event]) -> OpenAiMessagePart:
        """Build the `delta` of what a parser has read; empty for nothing."""
        delta: OpenAiMessagePart = {}
        calls: dict[int, ToolCallPart] = {}
        for event in self._format.select_events(events):
            if isinstance(event, str):
                delta["content"] = (delta.get("content") or "") + event
            elif isinstance(event, CallStart):
                calls[event.number] = {
                    "index": event.number,
                    "id": call_id(),
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
            elif isinstance(event, Arguments):
                call = calls.setdefault(event.number, {"index": event.number, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text
        if calls:
            choice.called = True
            delta["tool_calls"] = list(calls.values())
        return delta


class ChatDocument(WholeAnswer):
    """The whole answer; choices are in the order of their seeds."""

    kind = "chat.completion"

    def __init__(self, head: Head, format: ChatFormat, num_sequences: int) -> None:
        super().__init__(head, 1, num_sequences)
        self._format = format

    def _choices(self) -> list[OpenAiChatChoice]:
        return [self._choice(sequence) for sequence in self._sequences]

    def _choice(self, sequence: SequenceOutput) -> OpenAiChatChoice:
        message = self._message("".join([self._format.text(token) for token in sequence.tokens]))
        return {
            "index": sequence.index,
            "message": message,
            "logprobs": self._format.logprobs.of(sequence.tokens),
            "finish_reason": self._format.reason(sequence.finish, called="tool_calls" in message),
        }

    def _message(self, text: str) -> OpenAiMessage:
        parser = self._format.parser()
        if parser is None:
            return {"role": "assistant", "content": text, "refusal": None}
        content, calls = _gather_calls(self._format.select_events([*parser.feed(text), *parser.flush()]))
        if not calls:
            return {"role": "assistant", "content": content, "refusal": None}
        return {
            "role": "assistant",
            "content": content if content.strip() else None,
            "refusal": None,
            "tool_calls": calls,
        }


def _gather_calls(events: Sequence[Event]) -> tuple[str, list[ToolCall]]:
    """Return the text, and the calls as a whole answer has them."""
    content: list[str] = []
    functions: dict[int, FunctionCall] = {}
    for event in events:
        if isinstance(event, str):
            content.append(event)
        elif isinstance(event, CallStart):
            functions[event.number] = {"name": event.name, "arguments": ""}
        elif isinstance(event, Arguments):
            functions[event.number]["arguments"] += event.text
    calls: list[ToolCall] = [
        {"id": call_id(), "type": "function", "function": function} for function in functions.values()
    ]
    return "".join(content), calls
