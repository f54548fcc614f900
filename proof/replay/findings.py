"""Findings of a comparison, and the class of a request by them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Class(str, Enum):
    """The classes, from the least to the gravest: a request has that of its gravest finding."""

    EQUAL = "equal"
    TIE = "tie"
    TEXT = "text"
    SHAPE = "shape"
    FRAMING = "framing"
    STATUS = "status"
    LOST = "lost"


CLASSES = tuple(Class)
_RANK = {one: rank for rank, one in enumerate(CLASSES)}


class Finding(NamedTuple):
    """One difference.

    Args:
        kind: what differs, such as `usage`.
        where: the place, without what a client or a model wrote.
        change: what it was and is; no content.
        content: the same with content, for `--show` alone.
        learnable: it may be volatile wherever it is found; else each request is asked again for itself.
        timed: it may change by the second.
    """

    cls: Class
    kind: str
    where: str = ""
    change: str = ""
    content: str = ""
    learnable: bool = True
    timed: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return self.cls.value, self.kind, self.where

    @property
    def name(self) -> str:
        return f"{self.kind} {self.where}".strip()


def class_of(findings: Iterable[Finding]) -> Class:
    return max((finding.cls for finding in findings), key=_RANK.__getitem__, default=Class.EQUAL)
