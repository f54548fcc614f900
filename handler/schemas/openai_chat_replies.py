"""OpenAI's chat completions being written: text, log-probabilities, calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from handler.core import Finish, Token
from handler.schemas.chat_replies import Completion
from handler.schemas.openai_replies import REASONS, Choice, Head, Stream, Usage, Whole
from handler.schemas.replies import Continuation
from handler.schemas.tool_calls.parsing import Arguments, Begun, Parser, Piece


class Form(NamedTuple):
    """How a chat's answers look.

    Attributes:
        tokens: says what a token's log-probability looks like.
        parser: makes one for each choice; it gives None where there are no calls to read.
        single: only the first call counts.
        named: the client named the tool, and OpenAI says `stop` then.
        every_role: a stream's every part has the role, and `tool_calls`, as TGI's clients want it.
        marks: special tokens that are text for the parser; others are none.
    """

    tokens: Completion
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

    def counted(self, pieces: Iterable[Piece]) -> list[Piece]:
        return [piece for piece in pieces if isinstance(piece, str) or not (self.single and piece.number)]


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

    def __init__(self, head: Head, form: Form, num_sequences: int, wanted: Usage) -> None:
        choices = [ChatChoice(index, form.parser()) for index in range(num_sequences)]
        super().__init__(head, choices, num_sequences, wanted)
        self._form = form
        self._is_text = choices[0].parser is None and not form.tokens.logprobs

    @property
    def _is_plain(self) -> bool:
        return self._is_text

    def _part(
        self, choice: Choice, token: Token, finish: Finish | None, prefill: Sequence[Token]
    ) -> dict[str, Any] | None:
        assert isinstance(choice, ChatChoice)
        if choice.parser is None:
            delta: dict[str, Any] = {"content": token.text}
            tokens = [token]
        else:
            choice.waiting.append(token)
            delta = self._parsed(choice, choice.parser, self._form.text(token), last=finish is not None)
            if not delta and finish is None:
                return None
            tokens, choice.waiting = choice.waiting, []
        if not choice.begun or self._form.every_role:
            delta = {"role": "assistant", "content": None, **delta}
        if self._form.every_role:
            delta.setdefault("tool_calls", None)
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._form.tokens.probabilities(tokens),
            "finish_reason": self._form.reason(finish, called=choice.called),
        }

    def _parsed(self, choice: ChatChoice, parser: Parser, text: str, *, last: bool) -> dict[str, Any]:
        pieces = self._form.counted([*(parser.feed(text) if text else ()), *(parser.flush() if last else ())])
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if isinstance(piece, str):
                delta["content"] = delta.get("content", "") + piece
            elif isinstance(piece, Begun):
                function = {"name": piece.name, "arguments": ""}
                calls[piece.number] = {"index": piece.number, "id": call_id(), "type": "function", "function": function}
            else:
                call = calls.setdefault(piece.number, {"index": piece.number, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        if calls:
            choice.called = True
            delta["tool_calls"] = list(calls.values())
        return delta


class ChatDocument(Whole):
    """The choices are in the order of their seeds."""

    kind = "chat.completion"

    def __init__(self, head: Head, form: Form, num_sequences: int) -> None:
        super().__init__(head, 1, num_sequences)
        self._form = form

    def _choices(self) -> list[dict[str, Any]]:
        return [self._choice(sequence) for sequence in self._sequences]

    def _choice(self, sequence: Continuation) -> dict[str, Any]:
        message = self._message("".join([self._form.text(token) for token in sequence.tokens]))
        return {
            "index": sequence.index,
            "message": message,
            "logprobs": self._form.tokens.probabilities(sequence.tokens),
            "finish_reason": self._form.reason(sequence.finish, called="tool_calls" in message),
        }

    def _message(self, text: str) -> dict[str, Any]:
        parser = self._form.parser()
        if parser is None:
            return {"role": "assistant", "content": text, "refusal": None}
        content, calls = _gathered(self._form.counted([*parser.feed(text), *parser.flush()]))
        if not calls:
            return {"role": "assistant", "content": content, "refusal": None}
        return {
            "role": "assistant",
            "content": content if content.strip() else None,
            "refusal": None,
            "tool_calls": calls,
        }


def _gathered(pieces: Sequence[Piece]) -> tuple[str, list[dict[str, Any]]]:
    """The text, and the calls as a whole answer has them."""
    content: list[str] = []
    functions: dict[int, dict[str, str]] = {}
    for piece in pieces:
        if isinstance(piece, str):
            content.append(piece)
        elif isinstance(piece, Begun):
            functions[piece.number] = {"name": piece.name, "arguments": ""}
        elif isinstance(piece, Arguments):
            functions[piece.number]["arguments"] += piece.text
    calls: list[dict[str, Any]] = [
        {"id": call_id(), "type": "function", "function": function} for function in functions.values()
    ]
    return "".join(content), calls
