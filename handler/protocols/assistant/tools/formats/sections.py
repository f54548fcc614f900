"""Calls in sections: each after a mark of its own, and all between two others."""

from __future__ import annotations

from handler.protocols.assistant.tools.parsing import Broken, CallParser, Steps


class SectionedCalls(CallParser):
    """A call is a head with its name, its arguments, and perhaps an end.

    A call that is none stays text alone: the next one's mark begins calls again, and the section ends after it.

    Attributes:
        section_end: the mark after the calls.
        call: the mark before each of them.
    """

    section_end = call = ""

    def calls(self, begin: str) -> Steps[None]:
        if begin == self.section_end and not self.count:
            raise Broken
        mark = begin
        while mark != self.section_end:
            if mark == self.call:
                yield from self._call()
            yield from self.skip()
            mark = yield from self.expect(self.call, self.section_end)

    def head(self) -> Steps[str]:
        """Take what precedes a call's arguments, and return its name.

        Raises:
            Broken: it is no call.
        """
        raise NotImplementedError

    def tail(self) -> Steps[None]:
        """Take what follows a call's arguments."""
        raise NotImplementedError

    def _call(self) -> Steps[None]:
        name = yield from self.head()
        if (yield from self.skip()) != "{":
            raise Broken
        self.begin(name)
        yield from self.json()
        self.end_call()
        yield from self.skip()
        yield from self.tail()
