"""Images that another process reads: their bytes cross once, and are gone when their owner is."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys

import pytest

from handler.core.media import MediaPrompt, Medium, SharedMedia

IMAGES = (
    Medium("image", (2, 1), b"\x00\x01\x02\x03\x04\x05", "first"),
    Medium("image", (1, 1), b"abc", "second"),
)
OTHER = Medium("image", (1, 1), b"xyz", "other")

READ = """
import pickle, sys
file = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps(file.read()))
"""


def read_elsewhere(file: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", READ], input=file, capture_output=True, check=False)


def test_another_process_reads_them_any_number_of_times() -> None:
    shared = SharedMedia("a <image> b <image>", IMAGES)
    file = pickle.dumps(shared.file)
    assert len(file) < 400  # of no pixels
    for _ in range(2):
        assert pickle.loads(read_elsewhere(file).stdout) == MediaPrompt("a <image> b <image>", IMAGES)
    assert shared.digests == ("first", "second")


def test_they_are_gone_with_their_owner_even_where_its_descriptor_is_another_file() -> None:
    shared = SharedMedia("", IMAGES)
    file = shared.file
    del shared
    gc.collect()
    with pytest.raises(FileNotFoundError):
        file.read()
    others = [SharedMedia("", [OTHER]) for _ in range(8)]  # one has the same number
    assert file.path in {other.file.path for other in others}
    with pytest.raises(FileNotFoundError, match="their request has ended"):
        file.read()


def test_another_file_in_the_place_of_theirs_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [SharedMedia("", IMAGES)]
    file, readlink = held[0].file, os.readlink

    def end_meanwhile(path: str) -> str:
        target = readlink(path)
        held.clear()
        gc.collect()
        held.extend(SharedMedia("", [OTHER]) for _ in range(8))
        assert file.path in {other.file.path for other in held}
        return target

    monkeypatch.setattr(os, "readlink", end_meanwhile)
    assert file.read() == MediaPrompt("", IMAGES)
