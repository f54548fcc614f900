"""Encrypted values that clients send back: whose they are, changes to them, and the file with the secret."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.errors import ConfigError
from handler.core.sealing import Sealer, read_sealer

SEALER = Sealer(b"a secret of the tests")


@given(st.binary(max_size=200), st.text(max_size=20))
def test_a_value_comes_back_for_its_owner_only(value: bytes, owner: str) -> None:
    text = SEALER.seal(value, owner)
    assert SEALER.open(text, owner) == value
    for other, sealer in ((owner + "x", SEALER), (owner, Sealer(b"another secret")), (owner, Sealer())):
        with pytest.raises(ValueError, match="another secret or for another owner"):
            sealer.open(text, other)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_byte_can_be_changed(place: int, change: int) -> None:
    data = bytearray(base64.urlsafe_b64decode(SEALER.seal(b"value", "ann")))
    data[place % len(data)] ^= change
    with pytest.raises(ValueError, match="the text"):
        SEALER.open(base64.urlsafe_b64encode(data).decode(), "ann")


@pytest.mark.parametrize("text", ["", "A", "gAAAAAB", "AQ==", "é", "AAAA\n", "*" * 40, "AQ" * 9])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        SEALER.open(text, "")


def test_equal_values_have_different_texts() -> None:
    assert SEALER.seal(b"value", "") != SEALER.seal(b"value", "")


def test_servers_with_one_file_read_each_other_s_values(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef" * 2 + b"\n")
    assert read_sealer(str(file)).open(read_sealer(str(file)).seal(b"value", "ann"), "ann") == b"value"
    with pytest.raises(ValueError, match="another secret"):
        read_sealer(None).open(read_sealer(str(file)).seal(b"value", "ann"), "ann")


def test_a_file_without_a_secret_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"option\.compaction_key_file=.*: No such file"):
        read_sealer(str(file))
    file.write_bytes(b"\n" + b"x" * 31 + b"\n")
    with pytest.raises(ConfigError, match=r"at least 32 bytes; write the output of `openssl rand -hex 32`"):
        read_sealer(str(file))
