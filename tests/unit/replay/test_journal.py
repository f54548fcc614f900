"""The journal of a run, and what keeps it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handler.core.errors import ConfigError
from proof.replay.comparison import Class
from proof.replay.journal import Journal, Outcome

RUN = {"requests": "requests.jsonl"}
EQUAL = Outcome(0, Class.EQUAL, (), (None, None), (0, 0))


def test_a_directory_has_one_run_at_a_time(tmp_path: Path) -> None:
    first = Journal(tmp_path, RUN)
    first.add(EQUAL)
    for restart in (False, True):
        with pytest.raises(ConfigError, match="another lmi replay writes there"):
            Journal(tmp_path, RUN, restart=restart)
    first.close()
    second = Journal(tmp_path, RUN)
    assert second.num_done == 1
    second.close()


@pytest.mark.parametrize("restart", [False, True])
def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, restart: bool) -> None:
    (tmp_path / "journal.jsonl").write_text("dear diary\n")
    with pytest.raises(ConfigError, match=r"holds a journal\.jsonl of something else"):
        Journal(tmp_path, RUN, restart=restart)
    assert (tmp_path / "journal.jsonl").read_text() == "dear diary\n"


def test_a_first_line_that_a_full_disk_cut_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text('{"ru')
    journal = Journal(tmp_path, RUN)
    journal.close()
    assert (tmp_path / "journal.jsonl").read_text() == '{"run":{"requests":"requests.jsonl"}}\n'


class Full:
    """A file on a full disk."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self._file.close()


def test_a_full_disk_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, RUN)
    monkeypatch.setattr(journal, "_file", Full(journal._file))
    with pytest.raises(ConfigError, match=f"--output {tmp_path}: No space left on device"):
        journal.add(EQUAL)
    journal.close()


def test_what_is_volatile_is_known_when_a_run_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"to": "a"})
    journal.keep_volatile({"/generate: value $.id": "text"})
    journal.keep_volatile({"/generate: value $.id": "text", "/chat: value $.created": "text"})
    journal.close()
    journal = Journal(tmp_path, {"to": "a"})
    journal.close()
    assert journal.summary.volatile == {"/generate: value $.id": "text", "/chat: value $.created": "text"}
