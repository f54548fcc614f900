"""gpt-oss's tool calls, which are messages to a function in OpenAI's harmony format (source: its chat template)."""

from __future__ import annotations

import re

from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.json_text import JsonEnd
from handler.protocols.assistant.tools.parsing import NAME, BrokenCall, CallParser, Format, Steps

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")


class Harmony(CallParser):
    """Parses gpt-oss's tool calls.

    A message has a header with its channel and possibly a recipient, and then text. A message to a function is a call,
    and any other message is text. The response begins within a header, whose start is in the prompt.
    """

    begins = (_START, _CHANNEL)
    within = (_CALL, _END, _RETURN)
    at_start = True

    def calls(self, begin: str) -> Steps[None]:
        if not begin and not (yield from self.take(_START, _CHANNEL, " to=", "to=")):
            return
        _, end = yield from self.until(_MESSAGE, _CALL, _END, _RETURN, _START)
        if end != _MESSAGE:  # the header of a message without text
            raise BrokenCall
        recipient = _RECIPIENT.search(re.sub(r"<\|\w+\|>", " ", self.taken))
        if recipient is None:
            self.drop()
            end = yield from self.stream_until(self.show_taken, _CALL, _END, _RETURN, _START)
        else:
            name = recipient[1].removeprefix("functions.")
            if not NAME.fullmatch(name):
                raise BrokenCall
            self.begin(name)
            end = yield from self._arguments()
            self.end_call()
        if end == _START:
            self.put_back(end)

    def _arguments(self) -> Steps[str]:
        """Emit the JSON of the arguments, and return the marker after it. Within a string, a marker is text."""
        json, ended = JsonEnd(), False

        def write(text: str) -> None:
            nonlocal ended
            ended = ended or json.feed(text) is not None
            self.write(text)

        while True:
            end = yield from self.stream_until(write, _CALL, _END, _RETURN, _START)
            if not json.quoted:
                return end
            while not self.held:  # the model also ends a call that it has left incomplete
                yield from self._open()
            write(end)


_NOTATION = Notation(
    (f"{_START}assistant{_CHANNEL}commentary to=functions.NAME {_CONSTRAIN}json{_MESSAGE}", _CALL), style=""
)
"""This notation has no style, because structured output starts within the final message and cannot write headers."""

OPENAI = Format(
    "openai",
    Harmony,
    (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN),
    r"(?s)<\|channel\|>.*<\|call\|>",
    {"": _NOTATION},
)
