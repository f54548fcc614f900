"""Code for AWS's vLLM image is refused by name, at the check and at each start; nothing of it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.config.loader import read_config
from handler.core.custom_handlers import HANDLERS, MIDDLEWARE, PING
from handler.core.errors import ConfigError
from handler.plugins.functions import find_formatters
from handler.serving.loading.check import check
from handler.serving.loading.model_directory import model_formatters

FAIL = "raise SystemExit('it ran')\n"
AWS = "model_hosting_container_standards"


@pytest.fixture(autouse=True)
def _imports_are_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("model", None)


def refusals(directory: Path, text: str) -> list[str]:
    """What the start says, which is what the check says too."""
    (directory / "model.py").write_text(text)
    file = directory / "serving.properties"
    file.write_text("option.llm_engine=echo\n")
    reading = read_config(properties=file, environ={})
    told = [problem.message for problem in check(reading)]
    for start in (lambda: find_formatters(directory), lambda: model_formatters(reading.config)):
        with pytest.raises(ConfigError) as caught:
            start()
        assert [problem.message for problem in caught.value.problems] == told
    return told


@pytest.mark.parametrize("define", ["def", "async def"])
def test_functions_are_found_by_their_names(define: str, tmp_path: Path) -> None:
    text = FAIL + "".join(
        f"{define} custom_sagemaker_{kind}_handler(request):\n    pass\n" for kind in ("invocation", "ping")
    )
    path = tmp_path / "model.py"
    is_of = "is of AWS's vLLM image and is not called here"
    assert refusals(tmp_path, text) == [
        f"{path}, line 2: custom_sagemaker_invocation_handler {is_of}: {HANDLERS}",
        f"{path}, line 4: custom_sagemaker_ping_handler {is_of}: {PING}",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "custom_sagemaker_ping_handler = print",
        "from os import getpid as custom_sagemaker_ping_handler",
        "try:\n    def custom_sagemaker_ping_handler(): pass\nfinally:\n    pass",
        "if 1:\n    pass\nelse:\n    class custom_sagemaker_ping_handler: pass",
    ],
)
def test_a_name_may_be_bound_in_other_ways(text: str, tmp_path: Path) -> None:
    (told,) = refusals(tmp_path, text + "\n" + FAIL)
    assert "custom_sagemaker_ping_handler is of AWS's vLLM image" in told


@pytest.mark.parametrize(
    ("line", "name", "instead"),
    [
        (f"from {AWS}.sagemaker import custom_invocation_handler as handle", "custom_invocation_handler", HANDLERS),
        (f"from {AWS}.sagemaker import custom_ping_handler", "custom_ping_handler", PING),
        (f"from {AWS}.common.fastapi.middleware import input_formatter", "input_formatter", MIDDLEWARE),
        (f"from {AWS}.common.fastapi.middleware import custom_middleware", "custom_middleware", "SERVING_JOB_QUEUE"),
        (f"from {AWS}.sagemaker import stateful_session_manager", "stateful_session_manager", "enable_stateful"),
        (f"import {AWS}.sagemaker as sm", f"{AWS}.sagemaker", HANDLERS),
        (f"def later():\n    from {AWS} import sagemaker", "sagemaker", HANDLERS),
    ],
)
def test_decorators_are_found_by_their_import(line: str, name: str, instead: str, tmp_path: Path) -> None:
    (told,) = refusals(tmp_path, f"{line}\n{FAIL}")
    assert f": {name} is of AWS's vLLM image" in told
    assert instead in told


def test_other_names_are_the_users(tmp_path: Path) -> None:
    text = "def input_formatter(x): pass\nclass A:\n    def custom_sagemaker_ping_handler(self): pass\n"
    (tmp_path / "model.py").write_text(text)
    assert not find_formatters(tmp_path).inputs


VARIABLES = {
    "CUSTOM_FASTAPI_INVOCATION_HANDLER": HANDLERS,
    "CUSTOM_FASTAPI_PING_HANDLER": PING,
    "CUSTOM_PRE_PROCESS": MIDDLEWARE,
    "CUSTOM_POST_PROCESS": MIDDLEWARE,
    "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS": MIDDLEWARE,
    "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE": "SERVING_JOB_QUEUE_SIZE limits",
    "CUSTOM_SCRIPT_FILENAME": "name the file model.py",
}


@pytest.mark.parametrize("java", [False, True])
def test_each_variable_is_refused_by_name(java: bool) -> None:
    environ = dict.fromkeys(VARIABLES, "my.py:mine")
    reading = read_config(environ=environ, overrides=["option.llm_engine=echo"], java=java)
    told = {problem.name: problem.message for problem in reading.problems}
    assert told.keys() == VARIABLES.keys()
    for name, instead in VARIABLES.items():
        assert f"{name}=my.py:mine" in told[name]
        assert instead in told[name]


def test_the_scripts_own_default_name_asks_for_nothing() -> None:
    assert not read_config(environ={"CUSTOM_SCRIPT_FILENAME": "model.py", "CUSTOM_PRE_PROCESS": ""}).problems
