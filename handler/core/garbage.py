"""When Python looks for garbage in cycles: by the clock, and never among what stays.

A collection holds the GIL, for about 0.3 microseconds an object. After `gc.freeze` it visits only what requests have
made, not the modules, the vocabulary and the libraries, which are hundreds of thousands of objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time

YOUNG_SECONDS = 2.0
"""Between collections of what was made since the last one."""

FULL_SECONDS = 20.0
"""Between collections of all generations."""

CROWD = 80_000
"""Objects in use (some 500 streams) that would make one of those too long a pause. It waits until there are fewer."""

CROWD_SECONDS = 600.0
"""But no longer than this."""

_YOUNG = 20_000  # objects more than before, at which the youngest are visited, be the clock where it may: a step of
# 1,000 streams makes fewer, all of which are gone before the next
_MIDDLE = 1  # of those before the next generation is visited too
_NEVER = 1 << 30


def keep_collecting() -> None:
    """Never look at what is there now; from now on collect by the clock, on a thread."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
    threading.Thread(target=_collect, name="garbage", daemon=True).start()


def _collect() -> None:
    last = time.monotonic()
    while True:
        time.sleep(YOUNG_SECONDS)
        gc.collect(1)
        since = time.monotonic() - last
        if since < FULL_SECONDS or (since < CROWD_SECONDS and len(gc.get_objects(generation=2)) > CROWD):
            continue
        gc.collect()
        _trim()
        last = time.monotonic()


def _trim() -> None:
    """Give the system what the C library keeps of freed memory: after a large request that may be much."""
    with contextlib.suppress(AttributeError):  # it is not GNU's
        ctypes.CDLL(None).malloc_trim(0)  # without the GIL
