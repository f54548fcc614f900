"""Values to bytes, and bytes to another process."""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handler.core.framing import (
    FRAMINGS,
    JSON,
    JSON_TEXTS,
    JSONLINES,
    MAX_DEPTH,
    NUMBER,
    SLOT,
    SSE,
    decoded_as_json,
    fill,
    is_too_deep,
    template,
)
from handler.core.media import MediaPrompt, Medium, SharedMedia
from handler.core.values import Token
from tests.one_test import in_one_test

# -- values to bytes: valid JSON always, one line always ---------------------------------------------------------------


@given(st.text())
@example("a\x85b\u2028c\u2029d")
def test_what_is_framed_is_one_line_however_lines_are_split(text: str) -> None:
    for framing in (JSONLINES, SSE):
        lines = framing.encode({"text": text}).decode().splitlines()
        found = [line.removeprefix("data: ") for line in lines if line]
        assert [json.loads(line) for line in found] == [{"text": text}]


def test_ordinary_text_is_raw() -> None:
    assert JSONLINES.encode({"text": "é😀"}) == '{"text":"é😀"}\n'.encode()


def test_what_json_cannot_say_is_null() -> None:
    for framing in FRAMINGS.values():
        assert b'{"logprob":null}' in framing.encode({"logprob": float("-inf")})


def test_decoded_numbers_retain_their_digits_and_infinity_is_null() -> None:
    value = json.loads('{"digits": [18446744073709551616, -0.0, "\u00fc"], "infinite": [1e999, -1e999]}')
    data = JSON.encode({"value": decoded_as_json(value)})
    assert data == '{"value":{"digits":[18446744073709551616,-0.0,"ü"],"infinite":[null,null]}}'.encode()


@given(st.text(), st.integers(-1, 1 << 40), st.sampled_from(["", "\0b", "\0d", '"', "%", "%b", "%%d", "\u2028"]))
def test_a_template_makes_the_same_event(text: str, number: int, name: str) -> None:
    def encode(text: str, number: int) -> bytes:
        return SSE.encode({"model": name, "text": text, "number": number, name: None})

    assert template(encode(SLOT, NUMBER)) % (JSON.encode(text), number) == encode(text, number)


@given(st.lists(st.text()))
def test_each_text_fills_an_event_of_its_own(texts: list[str]) -> None:
    tokens = [Token(1, text, None, False) for text in texts]
    expected = b"".join([SSE.encode(["%", text]) for text in texts])
    assert fill(template(SSE.encode(["%", SLOT])), tokens) == expected


def test_few_texts_are_kept() -> None:
    for number in range(20_000):
        assert JSON_TEXTS[f"{number}"] == b'"%d"' % number
    assert 0 < len(JSON_TEXTS) <= 16384
    long = "x" * 1000
    assert JSON_TEXTS[long] == JSON.encode(long)
    assert long not in JSON_TEXTS


def test_texts_are_kept_at_their_size() -> None:
    tracemalloc.start()
    texts = [f"text {number}" for number in range(1000)]
    assert all(JSON_TEXTS[text] == JSON.encode(text) for text in texts)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 500 * len(texts)


# -- the levels that JSON may have are the same on each version of Python ----------------------------------------------


@in_one_test(("begin", "end"), [("[", "]"), ('{"a":', "}")])
@in_one_test("levels", [1, MAX_DEPTH, MAX_DEPTH + 1, 2 * MAX_DEPTH])
def test_levels_are_counted(begin: str, end: str, levels: int) -> None:
    text = begin * levels + "1" + end * levels
    assert is_too_deep(json.loads(text), text) == (levels > MAX_DEPTH)


def test_brackets_beside_each_other_or_in_a_string_are_no_levels() -> None:
    for text in (json.dumps([[] for _ in range(MAX_DEPTH + 1)]), json.dumps("[" * (MAX_DEPTH + 1))):
        assert not is_too_deep(json.loads(text), text)


# -- images that another process reads: their bytes cross once, and are gone when their owner is -----------------------


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


def test_shared_media_go_with_their_owner_although_its_number_is_reused() -> None:
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
