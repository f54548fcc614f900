"""Stand-ins for djl_python's names that a model.py imports where DJL Serving is not installed."""

from __future__ import annotations

import importlib
import io
import os
import struct
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy
import PIL.Image
import pytest

from handler import formatters
from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.formatters import Input
from handler.plugins.foreign_handlers import NO_VLLM_OBJECTS, missing
from handler.plugins.functions import find_formatters
from handler.plugins.stand_ins import StandIn
from handler.plugins.stand_ins.djl import DJL_PYTHON, MODULES, Output, Session, SessionManager, binary_fields
from handler.plugins.stand_ins.nd_list import from_nd_list, to_nd_list
from handler.serving.check import check
from tests.one_test import in_one_test
from tests.user_files import DJL, LINES, write_model


def test_a_model_py_with_djl_pythons_imports_is_found(tmp_path: Path) -> None:
    write_model(tmp_path, DJL + LINES)
    found = find_formatters(tmp_path)
    assert (list(found.inputs), list(found.outputs)) == (["read_question"], ["write_lines"])


def test_nothing_is_found_before_a_model_py_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("djl_python")
    write_model(tmp_path, "def late():\n    from djl_python.encode_decode import decode\n    return decode\n")
    find_formatters(tmp_path)
    assert sys.modules["model"].late() is MODULES["djl_python.encode_decode"]["decode"]


def test_every_module_can_be_imported_and_has_its_names() -> None:
    DJL_PYTHON.install()
    for name, content in MODULES.items():
        module = importlib.import_module(name)
        assert {one: getattr(module, one) for one in content} == content
    assert importlib.import_module("djl_python").Input is formatters.Input


def test_the_package_itself_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "djl_python"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    DJL_PYTHON.install()
    assert DJL_PYTHON not in sys.meta_path
    assert importlib.import_module("djl_python").real
    DJL_PYTHON.install()
    assert DJL_PYTHON not in sys.meta_path


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import djl_python.rolling_batch", "djl_python.rolling_batch"),
        ("from djl_python import Output, Nothing", "djl_python.Nothing"),
        ("from djl_python.request_io import Nothing", "djl_python.request_io.Nothing"),
        ("def f():\n    from djl_python.rolling_batch import RollingBatch", "djl_python.rolling_batch.RollingBatch"),
    ],
)
def test_what_is_not_there_is_named_by_the_check_and_the_start(line: str, name: str, tmp_path: Path) -> None:
    properties = write_model(tmp_path, f"import djl_python\nfrom djl_python.request_io import *\n{line}\n")
    properties.write_text("option.llm_engine=echo\n")
    (told,) = [problem.message for problem in check(read_config(properties=properties, environ={}))]
    place = f"{tmp_path}/model.py, line {3 + line.count(chr(10))}"
    assert told.startswith(f"{place}: {name} is not available without DJL Serving; its available modules are")
    with pytest.raises(ConfigError, match="is not available without DJL Serving"):
        find_formatters(tmp_path)


# -- what the modules do -----------------------------------------------------------------------------------------


def module(name: str) -> ModuleType:
    DJL_PYTHON.install()
    return importlib.import_module(f"djl_python.{name}")


@in_one_test(
    ("media", "body", "wanted"),
    [
        ("", b'{"a": 1}', {"a": 1}),
        (None, b"", {"inputs": ""}),
        ("application/json; charset=utf-8", b"[1]", [1]),
        ("text/plain", b"hi", {"inputs": ["hi"]}),
        ("text/csv", b"inputs\na\nb\n", {"inputs": ["a", "b"]}),
        ("text/csv", b"question,context\na,b\n", {"inputs": [{"question": "a", "context": "b"}]}),
        ("application/x-www-form-urlencoded", b"a=1", {"inputs": "a=1"}),
        ("application/octet-stream", b"\0", {"inputs": b"\0"}),
    ],
)
def test_bodies_are_decoded_by_content_type(media: str | None, body: bytes, wanted: Any) -> None:
    assert module("encode_decode").decode(formatters.Input(body), media) == wanted


def test_a_csv_without_headers_is_refused() -> None:
    with pytest.raises(ValueError, match="begin with a header line"):
        module("encode_decode").decode(formatters.Input(b"a,b\n1,2\n"), "text/csv")


def test_an_output_has_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module("outputs").Output, "failure", "invoke handler failure")  # LMI's release decides
    output = module("outputs").Output().error("no")
    assert (output.code, output.message, output.get_property("content-type")) == (
        424, "invoke handler failure", "application/json",
    )  # fmt: skip
    assert output.content.value_at(0) == b'{\n  "code":424,\n  "message":"invoke handler failure",\n  "error":"no"\n}'
    made = module("async_utils").create_non_stream_output({"a": "é"}, properties={"x": 1})
    assert made.properties == {"Content-Type": "application/json", "x": 1}
    (data,) = made.content.get_values()
    assert data == '\0\2\0\0\0\4data\0\0\0\x0c{"a": "é"}\n\0\0\0\4last\0\0\0\4True'.encode()
    assert binary_fields(data) == {"data": '{"a": "é"}\n', "last": "True"}


@in_one_test("data", [b"", b"\0", b"\0\1\0\0", b"\0\1\0\0\0\1a\0\0\0\1b", b'{"data": 1}', bytes(99), b"\0\0"])
def test_another_body_is_no_binary_map(data: bytes) -> None:
    assert binary_fields(data) is None


def test_what_needs_djl_says_so() -> None:
    with pytest.raises(NotImplementedError, match="get_stream_generator is only available under DJL Serving"):
        module("streaming_utils").StreamingUtils.get_stream_generator("vllm")


def test_lmis_handlers_stand_for_the_engine() -> None:
    request = formatters.Input(b"{}")
    for name in ("huggingface", "tensorrt_llm"):
        answer = module(name).handle(request)
        assert answer.inputs is request
        with pytest.raises(NotImplementedError, match="the engine answers after handle has returned"):
            answer.content.get("data")


def test_content_is_found_by_its_key() -> None:
    content = formatters.Input(b"a").content
    assert (content.get("data"), content.get("other")) == (b"a", None)


# -- the sessions and the form of arrays of djl_python, where DJL Serving is not installed -----------------------------


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
    with pytest.raises(PermissionError, match="belongs to another user"):
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
    with pytest.raises(ValueError, match="is truncated inside an array"):
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


def test_a_body_is_what_its_content_type_says() -> None:
    numpy.savez(npz := io.BytesIO(), numpy.array([1.5]))
    PIL.Image.new("RGB", (2, 3)).save(png := io.BytesIO(), "PNG")
    for media, body, wanted in (
        ("application/json; charset=utf-8", b"[1]", [1]),
        ("text/plain", b"[1]", "[1]"),
        ("x/y", b"[1]", b"[1]"),
        ("tensor/npz", npz.getvalue(), [[1.5]]),
        ("tensor/ndlist", bytes(Output().add_as_numpy([numpy.array([1.5])]).content.value_at(0)), [[1.5]]),
        ("image/png", png.getvalue(), (2, 3)),
    ):
        found = Input(body, {"content-type": media}).get_data()
        if media.startswith("tensor/"):
            found = [array.tolist() for array in found]
        assert getattr(found, "size", found) == wanted, media


# -- what a user's file names that is not here -------------------------------------------------------------------------


PARTLY = StandIn({"partly": {"here": 1}, "partly.sub": {}})

IMPORTS = {
    "import json, os.path": [],
    "import no_such": ["no_such is not installed"],
    "from no_such.part import name": ["no_such is not installed"],
    "def f():\n    import no_such": ["no_such is not installed"],
    "from . import no_such": [],
    "import beside, package.part": [],
    "from partly import here, sub": [],
    "from partly import there": ["partly.there is not installed"],
    "try:\n    import no_such\nexcept Exception:\n    no_such = None": [],
    "try:\n    x = 1\n    import no_such\nexcept ImportError:\n    pass": [],
    "try:\n    x = 1\n    import no_such\nexcept ValueError:\n    pass": ["no_such is not installed"],
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import no_such": [],
}


@pytest.mark.parametrize("text", IMPORTS)
def test_imports(text: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "package").mkdir()
    assert told(tmp_path, text) == IMPORTS[text]


def told(directory: Path, text: str) -> list[str]:
    path = directory / "model.py"
    path.write_text(text)
    found = missing(path, [PARTLY])
    return [line.removeprefix(f"{path}, line ").partition(": ")[2] for line in found]


def test_what_the_file_itself_puts_into_the_state_is_there(tmp_path: Path) -> None:
    text = "def f(request):\n    request.app.state.mine = 1\n    return request.app.state.mine, request.state.other"
    assert told(tmp_path, text) == []
    text = "def f(request):\n    try:\n        request.app.state.engine_client()\n    except Exception:\n        pass"
    assert told(tmp_path, text) == [f"request.app.state.engine_client: {NO_VLLM_OBJECTS}"]
