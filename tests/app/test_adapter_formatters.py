"""Formatters of an adapter's own: a model.py in its directory, for requests that name it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from handler.config.loader import read_config
from handler.serving.check import check
from tests.adapter_files import write_adapter
from tests.app.server import AppServer, serve
from tests.formatters_model import write_model
from tests.servers import http

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
OUTPUT = """
from djl_python.output_formatter import output_formatter


@output_formatter
def sign(output):
    return {"by": %r, "chunk": isinstance(output, str)}
"""
INPUT = """
from djl_python.input_parser import input_formatter


@input_formatter
def read(decoded_payload):
    return {"inputs": decoded_payload["question"], "parameters": {"max_new_tokens": 1, "details": True}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and three adapters: `plain` has no model.py, `own` an output formatter, `asks` an input formatter."""
    directory = tmp_path_factory.mktemp("model")
    properties = write_model(directory, OUTPUT % "base")
    properties.write_text("option.llm_engine=echo\noption.enable_lora=true\n")
    for name, text in {"plain": "", "own": OUTPUT % "own", "asks": INPUT}.items():
        path = write_adapter(directory / "adapters" / name)
        if text:
            (path / "model.py").write_text(text)
    return directory


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[AppServer]:
    with serve("--properties", str(home / "serving.properties")) as server:
        server.wait_ready()
        yield server


def ask(server: AppServer, body: dict[str, Any], adapter: str = "") -> httpx.Response:
    return server.post({"inputs": "a b", **body}, headers={HEADER: adapter} if adapter else {})


@pytest.mark.parametrize(("adapter", "by"), [("", "base"), ("plain", "base"), ("own", "own"), ("asks", "base")])
def test_each_adapter_has_its_own_or_the_models(server: AppServer, adapter: str, by: str) -> None:
    body = {"question": "a b"}
    assert ask(server, body, adapter).json() == {"by": by, "chunk": False}
    if adapter:
        for named in ({"adapters": adapter}, {"adapters": [adapter]}):
            assert ask(server, {**body, **named}).json()["by"] == by
        streamed = ask(server, {**body, "adapters": adapter, "stream": True})
        assert streamed.text.startswith(f'{{"by": "{by}", "chunk"')
        chat = {"inputs": None, "messages": [{"role": "user", "content": "hi"}], "model": adapter}
        assert ask(server, chat).json()["by"] == "base"  # `model` chooses weights alone, as in LMI


def test_an_adapters_input_formatter_reads_its_requests_alone(server: AppServer) -> None:
    found = ask(server, {}, "asks")
    assert (found.status_code, "input formatter 'read' of model.py raised KeyError" in found.text) == (424, True)
    assert ask(server, {}, "own").status_code == 200


def test_a_broken_one_is_not_registered_and_an_update_runs_it_again(server: AppServer, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "late")
    url = f"{server.url}/adapters"
    (path / "model.py").write_text("import nowhere_at_all\n")
    found = http.post(url, params={"name": "late", "src": str(path)})
    assert (found.status_code, "model.py, line 1: ModuleNotFoundError" in found.text) == (424, True)
    assert http.get(f"{url}/late").status_code == 404
    for by in ("first", "second"):
        (path / "model.py").write_text(OUTPUT % by)
        target = url if by == "first" else f"{url}/late/update"
        assert http.post(target, params={"name": "late", "src": str(path)}).status_code == 200
        assert ask(server, {}, "late").json()["by"] == by
    (path / "model.py").write_text(OUTPUT.replace("%r", "__name__"))
    assert http.post(url, params={"name": "my-late.one", "src": str(path)}).status_code == 200
    assert ask(server, {}, "my-late.one").json()["by"] == "ns_my_late_one"
    assert http.delete(f"{url}/my-late.one").status_code == 200
    (path / "model.py").write_text(OUTPUT % "second")
    assert http.post(f"{url}/late/update", params={"src": str(path)}).status_code == 200
    (path / "model.py").write_text("1 / 0\n")
    assert http.post(f"{url}/late/update", params={"src": str(path)}).status_code == 424
    assert ask(server, {}, "late").json()["by"] == "second"
    assert http.delete(f"{url}/late").status_code == 200
    assert ask(server, {}).json()["by"] == "base"


def test_the_check_names_a_broken_one(home: Path, tmp_path: Path) -> None:
    properties = write_model(tmp_path, "")
    properties.write_text("option.llm_engine=echo\noption.enable_lora=true\n")
    path = write_adapter(tmp_path / "adapters" / "a")
    (path / "model.py").write_text("def (\n")
    (told,) = [problem.message for problem in check(read_config(properties=properties, environ={}))]
    assert told.startswith(f"{path}/model.py, line 1: SyntaxError")
    assert not list(check(read_config(properties=home / "serving.properties", environ={})))
