"""Counts the lines of Python that a call runs, on all threads that it starts: work that no busy machine changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any


def steps(call: Callable[[], object]) -> int:
    """Call, and return the number of lines that ran."""
    lines = count()

    def see(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            next(lines)
        return see

    before = sys.gettrace()
    threading.settrace(see)
    sys.settrace(see)
    try:
        call()
    finally:
        sys.settrace(before)
        threading.settrace(None)
    return next(lines)
