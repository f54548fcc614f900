"""Muse Glimmer's calls: tags in messages to a tool (the model's template; vLLM 0.33)."""

from __future__ import annotations

import re

from handler.protocols.assistant.tools.formats.tagged import TaggedCalls, invocations
from handler.protocols.assistant.tools.parsing import Format, Steps

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|eom|>", "<|eot|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_NO_TOOLS = ("self", "user")


class MuseGlimmer(TaggedCalls):
    """A message has a header, perhaps with its recipient, then its text. Tags count in messages to a tool alone.

    The answer begins in a header, whose start is the prompt's. Calls without any header are read too.
    """

    block, block_end = "<atem:function_calls>", "</atem:function_calls>"
    call, call_end = "<atem:invoke name=", "</atem:invoke>"
    parameter, parameter_end = "<atem:parameter name=", "</atem:parameter>"
    begins = (_START, _MESSAGE, block, call, *_ENDS)
    at_start = True

    def calls(self, begin: str) -> Steps[None]:
        if begin in _ENDS:
            return
        if begin in (self.block, self.call):
            self.held, self._taken = begin + self.held, []
            yield from self._call_message()
            return
        begin = begin or (yield from self.take(_START, _MESSAGE, " to=", "to="))
        if not begin:
            return
        if begin != _MESSAGE:
            yield from self.until(_MESSAGE)
        found = _RECIPIENT.search(self.taken.replace(_START, " ").replace(_MESSAGE, " "))
        self.drop()
        if found is None or found[1] in _NO_TOOLS:
            yield from self._text_message()
        else:
            yield from self._call_message()

    def tool(self, name: str) -> str:
        """The template names `f` as a namespace of its own, so that the model may write `f.f`."""
        first, _, last = name.partition(".")
        return first if first == last and name not in self.tools and first in self.tools else name

    def _text_message(self) -> Steps[None]:
        self._end((yield from self.stream_until(self._show, *_ENDS, _START)))

    def _call_message(self) -> Steps[None]:
        marks = (self.block, self.block_end, self.call, *_ENDS, _START)
        while True:
            yield from self.skip()
            mark = (yield from self.take(*marks)) or (yield from self.stream_until(self._show, *marks))
            if mark == self.call:
                yield from self._call()
            elif mark == self.block_end and self._after_call:
                self.drop()
            elif mark not in (self.block, self.block_end):
                return self._end(mark)

    def _show(self, text: str) -> None:
        """Show a text, and the marks before it that belong to no call."""
        if text:
            taken = self.taken
            self.drop()
            self.show(taken)

    def _end(self, mark: str) -> None:
        if mark == _START:
            self.held = mark + self.held


_TAGS = invocations(MuseGlimmer)[""]
_NOTATION = _TAGS._replace(
    call=(
        f"{_START}assistant to=NAME{_MESSAGE}{_TAGS.block[0]}{_TAGS.call[0]}",
        f"{_TAGS.call[1]}{_TAGS.block[1]}{_ENDS[0]}",
    ),
    block=("", ""),
)
MUSE_GLIMMER = Format("muse_glimmer", MuseGlimmer, (_START, _MESSAGE, *_ENDS), MuseGlimmer.block, {"": _NOTATION})
