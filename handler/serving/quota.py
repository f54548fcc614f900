"""Quotas that all requests share (for example, of memory), their shares, and counts of running operations."""

from __future__ import annotations

import threading

from handler.core.errors import Overloaded
from handler.core.fair_queue import Shares


class Quota:
    """An amount that all requests share, for example of memory. Thread-safe.

    Args:
        total: total amount.
        spare: additional amount for requests of up to `small`, so that large requests cannot block them. An
            owner that holds much leaves half of it to others (see `of`).
        small: maximum amount of a small request.
        words: error message for a request whose amount is not available.
        beside: as long as all other requests together hold no more than this, a request may take any amount. The spare
            amount remains reserved for small requests. With the default, this never applies.
    """

    def __init__(self, total: int, spare: int, small: int, words: str, beside: int = -1) -> None:
        self.most, self._beside = total, beside
        self._spare, self._small, self._words = spare, small, words
        self.lock = threading.RLock()  # the garbage collector may give back a share while this thread takes one
        self.taken = 0
        self._taken_by_large = 0
        self._taken_by_owner = Shares[str]()

    def of(self, owner: str) -> Quota:
        """Return this quota for the requests of an owner. The owner "", which is everyone, may take all of it."""
        return _OwnersQuota(self, owner) if owner else self

    def change_of_owner(self, before: int, after: int, owner: str, *, large: bool | None) -> None:
        """Change the amount that a request of an owner holds. The caller holds the lock."""
        held = self._taken_by_owner[owner] + after - before
        self.change_locked(before, after, large=large, modest=held <= self.most // 2)
        self._taken_by_owner.add(owner, after - before)

    def change(self, before: int, after: int, *, large: bool | None = None) -> None:
        """Change the amount that a request holds.

        Args:
            before: amount that the request holds before the change.
            after: amount that the request holds after the change.
            large: whether the request is large. By default, it is large if its amount exceeds `small`.

        Raises:
            Overloaded: the remaining amount is too small.
        """
        with self.lock:
            self.change_locked(before, after, large=large)

    def change_locked(self, before: int, after: int, *, large: bool | None = None, modest: bool = True) -> None:
        """Change the amount that a request holds, as `change` does. The caller holds the lock.

        Args:
            modest: whether a small request may use all of the spare amount, and not only half of it.
        """
        taken, small = self.taken + after - before, self._small
        if before <= small >= after and taken <= self.most and large is None:  # as most changes are
            self.taken = taken
            return
        was_large, is_large = (before > small, after > small) if large is None else (large, large)
        by_large = self._taken_by_large + after * is_large - before * was_large
        if after > before and taken > self.most:
            reserved = taken - max(0, by_large - self.most)  # large requests never take the spare amount
            spare = self._spare if modest else self._spare // 2
            has_room = not is_large and reserved <= self.most + spare
            if not has_room and self.taken - before > self._beside:
                raise Overloaded(self._words)
        self.taken, self._taken_by_large = taken, by_large


class _OwnersQuota(Quota):
    """A quota as the requests of one owner see it."""

    def __init__(self, whole: Quota, owner: str) -> None:
        self.most, self.lock = whole.most, whole.lock
        self._whole, self._owner = whole, owner

    def change_locked(self, before: int, after: int, *, large: bool | None = None, modest: bool = True) -> None:
        self._whole.change_of_owner(before, after, self._owner, large=large)


class Count:
    """The number of running operations. Each operation is counted while its `with` block runs."""

    value = 0

    def __enter__(self) -> None:
        self.value += 1

    def __exit__(self, *error: object) -> None:
        self.value -= 1


BODY_MEMORY = 3
"""Bytes of memory to reserve per byte of a body while it is received. This is enough to decode most bodies too."""


class Share:
    """The share of a quota that a request holds. Closing or deleting the object releases the share. Thread-safe.

    A closed share remains empty: a thread or a writer may still count for a request that has ended.
    """

    _is_closed = False

    def __init__(self, quota: Quota) -> None:
        self._quota, self.size = quota, 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, amount: int) -> None:
        """Increase the share by an amount.

        Raises:
            Overloaded: the remaining amount is too small.
        """
        with self._quota.lock:
            self._set(self.size + amount)

    def set(self, size: int) -> None:
        """Set the size of the share.

        Raises:
            Overloaded: the remaining amount is too small.
        """
        with self._quota.lock:
            self._set(size)

    def _set(self, size: int) -> None:
        """Set the size of the share. The caller holds the quota's lock."""
        if size != self.size and not self._is_closed:
            self._quota.change_locked(self.size, size)
            self.size = size

    def give_back(self, amount: int | None = None) -> None:
        """Release an amount, by default the entire share."""
        with self._quota.lock:
            self._set(0 if amount is None else self.size - amount)

    def close(self) -> None:
        """Release the entire share. Later changes have no effect."""
        if self._is_closed:  # as when a closed object is deleted
            return
        with self._quota.lock:
            self._set(0)
            self._is_closed = True

    __del__ = close
