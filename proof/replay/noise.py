"""Volatile values, such as IDs and times, which differ between two responses of one server to the same request.

A request is sent again only after a difference was detected. If the two responses of that server differ at the same
JSON path, the difference is volatile for all requests of that kind. If it is a text, a status, a fraction or an item of
a list, it is volatile only for this request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from proof.replay.comparison import Class, Finding, Seen, Traits, changing_ids, echoed_ids, findings, is_compared
from proof.replay.exchange import Request, Response
from proof.replay.structure import AT_TOP, Fresh
from proof.routes import Source, source_of

_CONFIRMED = 20  # a difference that was confirmed this often for one kind of request is no longer checked
_LATER = 1.1  # seconds to wait, so that times in whole seconds differ
_MAX_RECHECKS = 3  # how often a difference in one kind of request is checked after that wait
_MAX_KINDS = 1000
_UNCHECKED = (Class.LOST, Class.UNKNOWN)  # a second response would say nothing about them

Ask = Callable[[Request], Awaitable[Response]]
Key = tuple[str, str, str]


class RequestKind:
    """Observations about one kind of request.

    Requests are of the same kind if they have the same method, route, decoding, streaming, status and content type.
    """

    def __init__(self) -> None:
        self.volatile: set[Key] = set()
        self.confirmed: Counter[Key] = Counter()
        self.rechecks: Counter[Key] = Counter()
        self.seen = Seen()
        self.last: Response | None = None


def changes_state(request: Request) -> bool:
    """Return whether a request changes the state of the server, so that it must not be sent again."""
    return request.method != "GET" and source_of(request.method, request.route) is Source.STATE


class Noise:
    """Volatile differences, by kind of request.

    Args:
        near: maximum difference between nearly equal log-probabilities.
        later: number of seconds to wait before sending a request a third time if its second response had the same
            value.
    """

    def __init__(self, near: float, later: float = _LATER) -> None:
        self._near = near
        self._later = later
        self._kinds: dict[tuple[str, bool, bool, int, str], RequestKind] = {}
        self.learnt: dict[str, str] = {}
        self.repeats = 0

    def kind(self, request: Request, traits: Traits, reference: Response) -> RequestKind:
        media = reference.content_type.partition(";")[0]
        key = (f"{request.method} {request.route}", traits.greedy, traits.streams, reference.status, media)
        if key not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:  # paths with ids
                self._kinds.clear()
            self._kinds[key] = RequestKind()
        return self._kinds[key]

    async def real(
        self,
        request: Request,
        traits: Traits,
        reference: Response,
        target: Response,
        again: Ask | None,
        other: Response,
    ) -> list[Finding]:
        """Return the differences between two responses, without volatile differences.

        Args:
            again: a function that sends the request again to one of the sides, or None if both are recordings.
            other: the earlier response of the side that `again` sends to.
        """
        kind = self.kind(request, traits, reference)
        changes = findings(reference, target, traits, kind.seen, self._near)
        if again is None or changes_state(request):
            real = self._without_asking(kind, request, reference, changes)
        else:
            real = await self._after_asking(kind, request, traits, changes, again, other)
        if changes and not real and not is_compared(reference, target, traits, (item.where for item in changes)):
            return [Finding(Class.UNKNOWN, "nothing was compared", learnable=False)]
        return real

    async def _after_asking(
        self,
        kind: RequestKind,
        request: Request,
        traits: Traits,
        differences: Sequence[Finding],
        again: Ask,
        other: Response,
    ) -> list[Finding]:
        """Return the differences that are not volatile, as far as known after sending the request again."""
        changes = [item for item in differences if item.key not in kind.volatile]
        suspects = [item for item in changes if item.cls not in _UNCHECKED and kind.confirmed[item.key] < _CONFIRMED]
        unsteady: list[Finding] = []
        for late in (False, True):
            if late:
                suspects = [item for item in suspects if item.timed and kind.rechecks[item.key] < _MAX_RECHECKS]
            if not suspects:
                break
            if late:
                await asyncio.sleep(self._later)
            noise = await self._noise(kind, request, traits, other, again)
            self._learn(kind, request, (item for item in suspects if item.key in noise and item.learnable))
            unsteady += [item for item in suspects if item.key in noise and not item.learnable]
            suspects = [item for item in suspects if item.key not in noise]
            if late:  # not earlier, because concurrent requests wait for the same value
                kind.rechecks.update(item.key for item in suspects)
        real = [item for item in changes if item.key not in kind.volatile and item not in unsteady]
        kind.confirmed.update(item.key for item in real)
        return [*real, *(item._replace(cls=Class.TIE, kind=f"unsteady {item.kind}") for item in unsteady)]

    async def _noise(
        self, kind: RequestKind, request: Request, traits: Traits, other: Response, again: Ask
    ) -> set[Key]:
        self.repeats += 1
        repeated = await again(request)
        return set() if repeated.lost else _keys(findings(other, repeated, traits, kind.seen, self._near))

    def _learn(self, kind: RequestKind, request: Request, changes: Iterable[Finding]) -> None:
        changes = list(changes)
        kind.volatile.update(item.key for item in changes)
        self._name(request, changes)

    def _name(self, request: Request, changes: Iterable[Finding]) -> None:
        """Record volatile differences for the report."""
        for item in changes:
            if len(self.learnt) < _MAX_KINDS:
                self.learnt[f"{request.route}: {item.name}"] = item.cls.value

    def _without_asking(
        self, kind: RequestKind, request: Request, reference: Response, changes: Sequence[Finding]
    ) -> list[Finding]:
        """Return the differences that count when the request cannot be sent again to find out what is volatile.

        Times are then volatile, and so are ids that differ between successive responses of the reference. For the
        first request of a kind, every id is volatile, except an id that the request sent. If a response is a function
        of its request, only its own id is. Other values are compared.
        """
        last, kind.last = kind.last, reference
        suspects = {item.key for item in changes if item.fresh is Fresh.ID}
        if source_of(request.method, request.route) is Source.REQUEST:
            suspects = {
                key for key in suspects if AT_TOP.fullmatch(key[2]) and request.method != "GET"
            }  # a model's id is its name
        if suspects and last is not None:
            suspects &= changing_ids(last, reference, self._near)
        sent = echoed_ids(request, reference) if suspects else set()
        volatile = [
            item for item in changes if item.fresh is Fresh.TIME or (item.key in suspects and item.where not in sent)
        ]
        self._name(request, volatile)
        return [item for item in changes if item not in volatile]


def _keys(changes: Iterable[Finding]) -> set[Key]:
    """Return the keys of findings. If a tie is volatile, the text is also volatile, and vice versa."""
    keys = {item.key for item in changes}
    texts = {(cls.value, *key[1:]) for key in keys for cls in (Class.TIE, Class.TEXT) if key[1] in ("text", "number")}
    return keys | texts
