"""When Python looks for garbage in cycles: by the clock, and never among what stays.

A collection holds the GIL. After `gc.freeze` one of all generations visits only what requests have made, not the
modules, the vocabulary and the libraries, which are hundreds of thousands of objects.
"""

from __future__ import annotations

import gc
import threading
import time

YOUNG_SECONDS = 2.0
"""Between collections of what was made since the last one."""

FULL_EVERY = 10
"""One in so many is of all generations."""


def calm() -> None:
    """Collect rarely while tokens come and go by the thousand, which leave no cycles, but regularly by the clock."""
    gc.set_threshold(50_000, 20, 50)
    keep()


def keep() -> None:
    """Never look at what is there now; from now on collect by the clock too, on a thread."""
    gc.collect()
    gc.freeze()
    threading.Thread(target=_collect, name="garbage", daemon=True).start()


def _collect() -> None:
    while True:
        for generation in (*[1] * (FULL_EVERY - 1), 2):
            time.sleep(YOUNG_SECONDS)
            gc.collect(generation)
