"""Words of a prompt that make echo fail, for tests."""

from __future__ import annotations

import threading

CUES = ("<raise>", "<hang>", "<die>", "<refuse>")
"""Their ids are 0 to 3 in every prompt's vocabulary."""

REFUSE = CUES.index("<refuse>")


def act(cue: str) -> None:
    """Do what a cue says."""
    if cue == "<hang>":
        threading.Event().wait()
    if cue == "<die>":
        raise SystemExit(3)  # ends the process, or the thread, without a message
    raise RuntimeError(f"raised on cue {cue}")
