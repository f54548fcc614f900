"""Learn what is volatile, such as ids and times: what differs between two answers of one side to the same request.

Only after a difference is a request sent twice. The same side is asked again, and what it changes by itself is
volatile: for all requests of that kind, or, if it is a text or a status, for this request only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from proof.replay.comparison import VALUES, Class, Finding, Seen, Traits, changing_values, findings
from proof.replay.exchange import Answer, Request

_CONFIRMED = 20  # a difference that was confirmed so often in one kind of request is not asked again
_LATER = 1.1  # seconds: times of whole seconds differ then
_ASKED_LATER = 3  # of a difference in one kind
_MAX_KINDS = 1000

Ask = Callable[[Request], Awaitable[Answer]]
Key = tuple[str, str, str]


class Kind:
    """The knowledge about one kind of request: a path, decoded greedily or not, streamed or not, answered by a
    status.
    """

    def __init__(self) -> None:
        self.volatile: set[Key] = set()
        self.confirmed: Counter[Key] = Counter()
        self.asked_later: Counter[Key] = Counter()
        self.seen = Seen()
        self.last: Answer | None = None


class Noise:
    """The volatile places, by kind of request.

    Args:
        near: as of `findings`.
        later: seconds until a side is asked a third time for a value that its second answer did not change.
    """

    def __init__(self, near: float, later: float = _LATER) -> None:
        self._near = near
        self._later = later
        self._kinds: dict[tuple[str, bool, bool, int, str], Kind] = {}
        self.learnt: dict[str, str] = {}
        self.asked = 0

    def kind(self, request: Request, traits: Traits, old: Answer) -> Kind:
        path = request.path.partition("?")[0]
        media = old.content_type.partition(";")[0]
        key = (f"{request.method} {path}", traits.greedy, traits.streams, old.status, media)
        if key not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:  # paths with ids
                self._kinds.clear()
            self._kinds[key] = Kind()
        return self._kinds[key]

    async def real(
        self, request: Request, traits: Traits, old: Answer, new: Answer, again: Ask | None, other: Answer
    ) -> list[Finding]:
        """Return the differences of two answers that are not noise.

        Args:
            again: asks the side of `other` again; None: it cannot be asked.
            other: the answer, old or new, of the side that `again` asks.
        """
        kind = self.kind(request, traits, old)
        found = self._compare(kind, traits, old, new)
        if not found:
            return []
        if again is None:
            return self._without_asking(kind, old, found)
        suspects = [one for one in found if one.cls is not Class.LOST and kind.confirmed[one.key] < _CONFIRMED]
        unsteady: list[Finding] = []
        for late in (False, True):
            if late:
                suspects = [one for one in suspects if one.timed and kind.asked_later[one.key] < _ASKED_LATER]
            if not suspects:
                break
            if late:
                await asyncio.sleep(self._later)
            noise = await self._noise(kind, request, traits, other, again)
            self._learn(kind, request, (one for one in suspects if one.key in noise and one.learnable))
            unsteady += [one for one in suspects if one.key in noise and not one.learnable]
            suspects = [one for one in suspects if one.key not in noise]
            if late:  # only now: others that are in flight wait for the same
                kind.asked_later.update(one.key for one in suspects)
        real = [one for one in found if one.key not in kind.volatile and one not in unsteady]
        kind.confirmed.update(one.key for one in real)
        return [*real, *(one._replace(cls=Class.TIE, kind=f"unsteady {one.kind}") for one in unsteady)]

    def _compare(self, kind: Kind, traits: Traits, old: Answer, new: Answer) -> list[Finding]:
        return [one for one in findings(old, new, traits, kind.seen, self._near) if one.key not in kind.volatile]

    async def _noise(self, kind: Kind, request: Request, traits: Traits, other: Answer, again: Ask) -> set[Key]:
        self.asked += 1
        repeated = await again(request)
        if repeated.lost:
            return set()
        return _keys(findings(other, repeated, traits, kind.seen, self._near))

    def _learn(self, kind: Kind, request: Request, found: Iterable[Finding]) -> None:
        for one in found:
            kind.volatile.add(one.key)
            if len(self.learnt) < _MAX_KINDS:
                self.learnt[f"{request.path.partition('?')[0]}: {one.name}"] = one.cls.value

    def _without_asking(self, kind: Kind, old: Answer, found: Sequence[Finding]) -> list[Finding]:
        """If no side can be asked again, treat values as volatile that one side changes from one request to the
        next.
        """
        last, kind.last = kind.last, old
        suspects = {one.key for one in found if one.kind in VALUES}
        if suspects and last is not None:
            suspects &= changing_values(last, old, self._near)
        return [one for one in found if one.key not in suspects]


def _keys(found: Iterable[Finding]) -> set[Key]:
    """Return the differences' keys. A tie on one side makes its text volatile too, and the reverse."""
    keys = {one.key for one in found}
    texts = {(cls.value, *key[1:]) for key in keys for cls in (Class.TIE, Class.TEXT) if key[1] in ("text", "number")}
    return keys | texts
