"""OpenAI's chat completions being written: text, log-probabilities, calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from handler.core.framing import JSON, around
from handler.core.values import Delta, Finish, Token
from handler.protocols.lmi.chat_response import Completion
from handler.protocols.openai.response import REASONS, Choice, Head, Stream, Usage, Whole
from handler.protocols.openai.tools.parsing import Arguments, Begun, Parser, Piece
from handler.protocols.reply import SequenceOutput


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
    __slots__ = ("beside", "called", "parser", "waiting")

    def __init__(self, index: int, parser: Parser | None) -> None:
        super().__init__(index)
        self.parser = parser
        self.called = False
        self.beside: tuple[bytes, bytes] | None = None  # as `around`, for text beside calls
        self.waiting: list[Token] = []  # whose text is held back, for their log-probabilities


class ChatStream(Stream):
    kind = "chat.completion.chunk"

    def __init__(self, head: Head, form: Form, num_sequences: int, wanted: Usage) -> None:
        choices = [ChatChoice(index, form.parser()) for index in range(num_sequences)]
        super().__init__(head, choices, num_sequences, wanted)
        self._form = form
        self._is_bare = not form.tokens.logprobs and not wanted.always
        self._is_text = choices[0].parser is None and self._is_bare

    @property
    def _is_plain(self) -> bool:
        return self._is_text

    def _text_part(self, choice: Choice, text: str) -> dict[str, Any]:
        return self._made(choice, {"content": text}, [], None)

    def _chunks(self, choice: Choice, delta: Delta) -> bytes:
        """Most answers of those who bring tools are text all the same: that is made as without them."""
        assert isinstance(choice, ChatChoice)
        parser = choice.parser
        if (
            parser is None
            or delta.finish is not None
            or len(delta.tokens) != 1
            or not choice.begun
            or not self._is_bare
        ):
            return super()._chunks(choice, delta)
        if choice.beside is None:
            choice.beside = around(lambda text: self._chunk(self._text_part(choice, text)))
        (token,) = delta.tokens
        self._num_tokens += 1
        pieces = parser.feed(self._form.text(token))
        if not pieces:
            return b""
        if len(pieces) == 1 and isinstance(text := pieces[0], str):
            return choice.beside[0] + JSON.encode(text) + choice.beside[1]
        said = self._said(choice, pieces)
        return self._chunk(self._made(choice, said, [], None)) if said else b""

    def _part(
        self, choice: Choice, token: Token, finish: Finish | None, prefill: Sequence[Token]
    ) -> dict[str, Any] | None:
        assert isinstance(choice, ChatChoice)
        if choice.parser is None:
            return self._made(choice, {"content": token.text}, [token], finish)
        choice.waiting.append(token)
        text = self._form.text(token)
        pieces = [*(choice.parser.feed(text) if text else ()), *(choice.parser.flush() if finish is not None else ())]
        delta = self._said(choice, pieces)
        if not delta and finish is None:
            return None
        tokens, choice.waiting = choice.waiting, []
        return self._made(choice, delta, tokens, finish)

    def _made(
        self, choice: Choice, delta: dict[str, Any], tokens: list[Token], finish: Finish | None
    ) -> dict[str, Any]:
        assert isinstance(choice, ChatChoice)
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

    def _said(self, choice: ChatChoice, pieces: Iterable[Piece]) -> dict[str, Any]:
        """The `delta` for what a parser has read; empty for nothing."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in self._form.counted(pieces):
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

    def _choice(self, sequence: SequenceOutput) -> dict[str, Any]:
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
