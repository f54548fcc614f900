"""What a model.py imports of djl_python where DJL Serving is not installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from handler import formatters
from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.plugins.functions import find_formatters
from handler.plugins.stand_ins.djl import DJL_PYTHON, MODULES, binary_fields
from handler.serving.check import check
from tests.formatters_model import DJL, LINES, write_model
from tests.one_test import in_one_test


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
    assert told.startswith(f"{place}: {name} is not there without DJL Serving; what stands in")
    with pytest.raises(ConfigError, match="is not there without DJL Serving"):
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
    with pytest.raises(ValueError, match="line of headers"):
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
    with pytest.raises(NotImplementedError, match="get_stream_generator needs DJL Serving"):
        module("streaming_utils").StreamingUtils.get_stream_generator("vllm")


def test_lmis_handlers_stand_for_the_engine() -> None:
    request = formatters.Input(b"{}")
    for name in ("huggingface", "tensorrt_llm"):
        answer = module(name).handle(request)
        assert answer.inputs is request
        with pytest.raises(NotImplementedError, match="the engine answers when handle returns this"):
            answer.content.get("data")
