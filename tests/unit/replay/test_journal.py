"""The journal of `lmi replay`: what a run that goes on must know of its earlier part."""

from __future__ import annotations

from pathlib import Path

from handler.replay.journal import Journal


def test_what_is_volatile_is_known_when_a_run_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"to": "a"})
    journal.keep_volatile({"/generate: value $.id": "text"})
    journal.keep_volatile({"/generate: value $.id": "text", "/chat: value $.created": "text"})
    journal.close()
    journal = Journal(tmp_path, {"to": "a"})
    journal.close()
    assert journal.summary.volatile == {"/generate: value $.id": "text", "/chat: value $.created": "text"}
