"""The sessions and the form of arrays of djl_python, where DJL Serving is not installed."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from unittest import mock

import numpy
import pytest

from handler.formatters import Input
from handler.plugins.stand_ins.djl import MODULES, Output, Session, SessionManager
from handler.plugins.stand_ins.nd_list import from_nd_list, to_nd_list
from tests.one_test import in_one_test

# -- sessions ----------------------------------------------------------------------------------------------------


def manager(root: Path, **more: str) -> SessionManager:
    return SessionManager({"sessions_path": str(root), **more})


def test_they_are_what_a_model_py_imports() -> None:
    for name in ("djl_python", "djl_python.session_manager"):
        assert (MODULES[name]["Session"], MODULES[name]["SessionManager"]) == (Session, SessionManager)


def test_values_are_kept_until_the_session_is_closed(tmp_path: Path) -> None:
    sessions = manager(tmp_path / "deep" / "root")
    session = sessions.create_session()
    session.put("turns/1", {"a": [1, "é"]})
    assert (session.get("turns/1"), session.get("other"), session.get("other", 5)) == ({"a": [1, "é"]}, None, 5)
    assert 1190 < session.expiration_ts - time.time() <= 1200
    again = manager(tmp_path / "deep" / "root").get_session(session.session_id)  # after another start
    assert again is not None
    assert again.get("turns/1") == {"a": [1, "é"]}
    sessions.close_session(session.session_id)
    assert not os.path.exists(session.files_path)
    with pytest.raises(ValueError, match="session directory does not exist"):
        session.remove()


@pytest.mark.parametrize("name", [None, "", "NEW_SESSION"])
def test_no_session_is_none(name: str | None, tmp_path: Path) -> None:
    assert manager(tmp_path).get_session(name) is None


@pytest.mark.parametrize("name", ["nobody", "..", "../../etc", "/"])
def test_an_unknown_session_is_an_error(name: str, tmp_path: Path) -> None:
    sessions = manager(tmp_path)
    for call in (sessions.get_session, sessions.close_session):
        with pytest.raises(ValueError, match=f"session not found: {name}"):
            call(name)


def test_an_expired_one_is_none_and_goes_with_the_next(tmp_path: Path) -> None:
    sessions = manager(tmp_path, sessions_expiration="60")
    session = sessions.create_session()
    with mock.patch.object(time, "time", return_value=session.expiration_ts + 1):
        assert sessions.get_session(session.session_id) is None
        sessions.create_session()
    assert not os.path.exists(session.files_path)


def test_an_array_is_the_files_content(tmp_path: Path) -> None:
    session = manager(tmp_path).create_session()
    session.get_as_numpy("cache", (2, 2), create=True)[0] = [1, 2]
    assert session.get_as_numpy("cache", (4,)).tolist() == [1, 2, 0, 0]


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user made it"):
        manager(tmp_path)


# -- arrays ------------------------------------------------------------------------------------------------------

WIRE = (
    struct.pack(">i", 1) + b"\0\4NDAR" + struct.pack(">ib", 3, 0) + b"\0\7default" + b"\0\5INT32"
    + struct.pack(">iqq", 2, 1, 2) + struct.pack(">i", 2) + b"\0?\0?" + b"<" + struct.pack(">i", 8)
    + struct.pack("<ii", 7, -1)
)  # fmt: skip
"""Of one array, as DJL writes it."""


def test_an_array_has_djls_form() -> None:
    array = numpy.array([[7, -1]], "int32")
    assert to_nd_list(array) == to_nd_list([array]) == WIRE
    (found,) = from_nd_list(WIRE)
    assert (found.tolist(), found.dtype) == ([[7, -1]], numpy.dtype("int32"))


@in_one_test("kind", ["float32", "float16", "int64", "uint8", "bool", ">i4"])
@in_one_test("shape", [(), (0,), (3,), (2, 3, 1)])
def test_arrays_come_back(kind: str, shape: tuple[int, ...]) -> None:
    array = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape).astype(kind)
    found = from_nd_list(to_nd_list([array, array.T]))
    assert [one.shape for one in found] == [array.shape, array.T.shape]
    assert all((one == wanted).all() for one, wanted in zip(found, (array, array.T), strict=True))


def test_names_and_npz_are_read() -> None:
    (found,) = from_nd_list(WIRE.replace(struct.pack(">ib", 3, 0), struct.pack(">ib", 3, 1) + b"\0\1x"))
    assert found.tolist() == [[7, -1]]
    output = Output().add_as_npz([numpy.array([1, 2])])
    (found,) = from_nd_list(output.content.value_at(0))
    assert found.tolist() == [1, 2]


@in_one_test("cut", range(4, len(WIRE)))
def test_what_is_cut_off_is_an_error(cut: int) -> None:
    with pytest.raises(ValueError, match="ends amid an array"):
        from_nd_list(WIRE[:cut])


@in_one_test(
    ("old", "new"),
    [
        (b"NDAR", b"NDAX"),
        (b"INT32", b"INTXY"),
        (struct.pack(">ib", 3, 0), struct.pack(">ib", 4, 0)),
        (struct.pack(">iqq", 2, 1, 2), struct.pack(">iqq", 2, -1, -2)),
        (struct.pack(">iqq", 2, 1, 2), struct.pack(">iqq", 2, 1 << 40, 1 << 20)),
    ],
)
def test_what_is_no_list_is_an_error(old: bytes, new: bytes) -> None:
    with pytest.raises(ValueError, match="array"):
        from_nd_list(WIRE.replace(old, new))


def test_requests_and_outputs_have_arrays() -> None:
    output = Output().add_as_numpy([numpy.array([1.5])])
    (found,) = Input(bytes(output.content.value_at(0))).get_as_numpy()
    assert found.tolist() == [1.5]
