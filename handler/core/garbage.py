"""Schedule of Python's garbage collection: by the clock and by new objects, without those of the start.

A collection holds the GIL for about 0.3 microseconds an object. After `gc.freeze` it visits only the objects of
requests, not the hundreds of thousands of modules, vocabulary and libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Iterator

YOUNG_SECONDS = 2.0
"""Seconds between collections of the young generations."""

FULL_SECONDS = 20.0
"""Seconds between collections of all generations."""

CROWD = 80_000
"""Objects in use (some 570 streams) above which a full collection waits, as it would pause too long."""

CROWD_SECONDS = 600.0
"""Seconds that it waits at most."""

_YOUNG = 50_000  # new objects that start a young collection at once: those of some 300 new streams
_MIDDLE = 1  # two such collections lie between two that take the middle generation along
_NEVER = 1 << 30
_THREAD = "garbage"
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD
_LARGE = 1 << 20  # bytes


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Collect nothing meanwhile, and freeze the modules, which the interpreter's end would visit too."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_collecting() -> None:
    """Freeze all objects. Collect new ones by the clock, on a thread; many of them at once, where they are made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
    if all(thread.name != _THREAD for thread in threading.enumerate()):  # another model has started it
        threading.Thread(target=_collect, name=_THREAD, daemon=True).start()


def return_large_blocks() -> None:
    """Have the C library return a large block to the system when it is freed.

    By itself it keeps blocks of up to 32 MiB, for each thread, from the first one that is freed on (mallopt(3)).
    """
    with contextlib.suppress(AttributeError):  # it is not GNU's
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def _collect() -> None:
    counted = collected = time.monotonic()
    while True:
        time.sleep(YOUNG_SECONDS)
        gc.collect(1)
        now = time.monotonic()
        if now - counted < FULL_SECONDS:
            continue
        counted = now  # which pauses too
        if now - collected < CROWD_SECONDS and len(gc.get_objects(generation=2)) > CROWD:
            continue
        gc.collect()
        _trim()
        collected = now


def _trim() -> None:
    """Return freed memory of the C library to the system; after a large request that may be much."""
    with contextlib.suppress(AttributeError):  # it is not GNU's
        ctypes.CDLL(None).malloc_trim(0)  # without the GIL
