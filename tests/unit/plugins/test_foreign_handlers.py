"""Code for AWS's vLLM image: checked without running it; refused by name where a host does not call it."""

from __future__ import annotations

from pathlib import Path

import pytest

from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.core.user_functions import HANDLERS, INSTEAD, MIDDLEWARE, PING
from handler.djl.startup import prepare
from handler.plugins.aws import STANDARDS, check_handlers, find_handlers
from handler.plugins.functions import check_model_py, find_formatters
from handler.serving.check import check
from handler.serving.user_code import model_formatters

FAIL = "raise SystemExit('it ran')\n"
AWS = "model_hosting_container_standards"


def refusals(directory: Path, text: str) -> list[str]:
    """What the start of a host without handlers says, which is what its check says too."""
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


def checked(directory: Path, text: str, **variables: str) -> list[str]:
    """What the embedded server's check says."""
    (directory / "model.py").write_text(text)
    try:
        check_handlers(directory, variables)
    except ConfigError as error:
        return [problem.message for problem in error.problems]
    return []


@pytest.mark.parametrize("define", ["def", "async def"])
def test_functions_are_found_by_their_names(define: str, tmp_path: Path) -> None:
    text = FAIL + "".join(
        f"{define} custom_sagemaker_{kind}_handler(request):\n    pass\n" for kind in ("invocation", "ping")
    )
    path = tmp_path / "model.py"
    is_of = "belongs to AWS's vLLM image and is not called here"
    assert refusals(tmp_path, text) == [
        f"{path}, line 2: custom_sagemaker_invocation_handler {is_of}: {HANDLERS}",
        f"{path}, line 4: custom_sagemaker_ping_handler {is_of}: {PING}",
    ]
    assert checked(tmp_path, text) == []


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
    assert "custom_sagemaker_ping_handler belongs to AWS's vLLM image" in told


@pytest.mark.parametrize(
    ("line", "name", "instead", "called"),
    [
        (f"from {AWS}.sagemaker import custom_invocation_handler as h", "custom_invocation_handler", HANDLERS, True),
        (f"from {AWS}.sagemaker import custom_ping_handler", "custom_ping_handler", PING, True),
        (f"from {AWS}.common.fastapi.middleware import input_formatter", "input_formatter", MIDDLEWARE, True),
        (f"from {AWS}.common.fastapi.middleware import custom_middleware", "custom_middleware", "SERVING_JOB", True),
        (f"from {AWS}.sagemaker import stateful_session_manager", "stateful_session_manager", "enable_sta", False),
        (f"from {AWS}.sagemaker import bootstrap", "bootstrap", "built in", False),
        (f"import {AWS}.sagemaker as sm", f"{AWS}.sagemaker", HANDLERS, True),
        (f"def later():\n    from {AWS} import sagemaker", "sagemaker", HANDLERS, True),
    ],
)
def test_decorators_are_found_by_their_import(line: str, name: str, instead: str, called: bool, tmp_path: Path) -> None:
    (told,) = refusals(tmp_path, f"{line}\n{FAIL}")
    assert f": {name} belongs to AWS's vLLM image" in told
    assert instead in told
    assert checked(tmp_path, f"{line}\n{FAIL}") == ([] if called else [told])


@pytest.mark.parametrize(
    ("module", "name"),
    [("sagemaker", "input_formatter"), ("common", "custom_middleware"), ("sagemaker", "no_such_name"), ("other", "x")],
)
def test_what_the_start_could_not_import_is_refused_before(module: str, name: str, tmp_path: Path) -> None:
    line = f"from {AWS}.{module} import {name}"
    (told,) = checked(tmp_path, line)
    assert f"line 1: {name} belongs to AWS's vLLM image" in told
    with pytest.raises(ConfigError):
        find_handlers(tmp_path, {}, {})


def test_each_importable_name_says_what_replaces_it_under_djl(tmp_path: Path) -> None:
    for module, names in STANDARDS.modules.items():
        for name, value in names.items():
            line = f"from {module} import {name}"
            assert checked(tmp_path, line) == []
            assert "is not called here" in refusals(tmp_path, line)[0] or not callable(value)


def test_other_names_are_the_users(tmp_path: Path) -> None:
    text = "def input_formatter(x): pass\nclass A:\n    def custom_sagemaker_ping_handler(self): pass\n"
    (tmp_path / "model.py").write_text(text)
    assert not find_formatters(tmp_path).inputs


# -- variables ---------------------------------------------------------------------------------------------------


def test_each_variable_is_refused_by_name_under_djl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INSTEAD:
        monkeypatch.setenv(name, "my.py:mine")
    with pytest.raises(ConfigError) as caught:
        prepare({"model_dir": str(tmp_path), "llm_engine": "echo"}, None)
    told = {problem.name: problem.message for problem in caught.value.problems}
    assert told == {name: f"{name}=my.py:mine: {instead}" for name, instead in INSTEAD.items()}


@pytest.mark.parametrize("java", [False, True])
def test_variables_are_no_options(java: bool) -> None:
    reading = read_config(environ=dict.fromkeys(INSTEAD, "x"), overrides=["option.llm_engine=echo"], java=java)
    assert not reading.problems


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("mine", "must be file.py:function, package.module:function or model:function"),
        ("my file.py:f", "must be file.py:function"),
        ("missing.py:f", "there is no file"),
        ("model.py:nothing", ""),  # seen when it is imported
        ("/ping", ""),
        ("some.module:f", ""),
    ],
)
def test_variables_are_checked_without_running_anything(spec: str, told: str, tmp_path: Path) -> None:
    found = checked(tmp_path, FAIL, CUSTOM_PRE_PROCESS=spec)
    assert len(found) == bool(told)
    assert all(told in one and one.startswith(f"CUSTOM_PRE_PROCESS={spec}: ") for one in found)


def test_all_problems_of_the_code_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (\n")
    found = checked(tmp_path, "def (\n", CUSTOM_PRE_PROCESS="broken.py:f", CUSTOM_SCRIPT_FILENAME="nowhere.py")
    assert len(found) == 2
    assert "CUSTOM_SCRIPT_FILENAME=nowhere.py: there is no such file" in found[0]
    assert "broken.py, line 1: SyntaxError" in found[1]


@pytest.mark.parametrize(
    ("text", "variables", "told"),
    [
        ("x = 1\n", {"CUSTOM_PRE_PROCESS": "model.py:x"}, "is a int, not a function"),
        ("", {"CUSTOM_FASTAPI_PING_HANDLER": "model:f"}, "has no attribute 'f'"),
        ("", {"CUSTOM_FASTAPI_PING_HANDLER": "nowhere_at_all:f"}, "No module named 'nowhere_at_all'"),
        ("", {"CUSTOM_PRE_PROCESS": "this_one_exits:f"}, "CUSTOM_PRE_PROCESS=this_one_exits:f: SystemExit: 2"),
        ("", {"CUSTOM_PRE_PROCESS": ".model:f"}, "CUSTOM_PRE_PROCESS=.model:f: TypeError"),
        ("custom_sagemaker_ping_handler = 5\n", {}, "custom handler 'int' .ping.: 5 is not a callable"),
        ("custom_sagemaker_ping_handler = dict\n", {}, "custom handler 'dict' .ping.: no signature found"),
        ("def custom_sagemaker_ping_handler(a, b): pass\n", {}, "has 2 arguments; it must take only the request"),
        ("1 / 0\n", {}, "line 1: ZeroDivisionError"),
        (f"from {AWS}.common.fastapi.middleware import *\n@custom_middleware('x')\ndef f(): ...\n", {}, "line 2"),
        (f"from {AWS}.common.fastapi.middleware import *\n" + "@input_formatter\ndef f(r): ...\n" * 2, {}, "twice"),
    ],
)
def test_what_cannot_be_called_stops_the_start(text: str, variables: dict[str, str], told: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(text)
    (tmp_path / "this_one_exits.py").write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(ConfigError, match=told):
        find_handlers(tmp_path, variables, {})


def test_without_code_there_are_none(tmp_path: Path) -> None:
    assert find_handlers(tmp_path, {}, {}) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def model_fn(model_dir):\n    pass\n\ndef predict_fn(input_data, model):\n    pass\n", [1, 4]),
        (
            "from djl_python.input_parser import prediction_handler\n\n@prediction_handler\ndef f(X, m):\n    pass\n",
            [4],
        ),
        ("import djl_python.input_parser as p\n@p.init_handler\ndef f(d):\n    pass\ndef handle(i):\n    pass\n", [3]),
        ("def output_fn(prediction, accept):\n    pass\n", [1]),
        ("def model_fn(path):\n    pass\n", []),
        ("def model_fn(model_dir):\n    pass\ndef handle(inputs):\n    return model_fn('x')\n", []),
    ],
)
def test_functions_for_other_models_are_refused(text: str, named: list[int], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(text)
    if not named:
        return check_model_py(tmp_path / "model.py")
    with pytest.raises(ConfigError) as refused:
        check_model_py(tmp_path / "model.py")
    problems = [problem.message for problem in refused.value.problems]
    assert [message.split(", line ")[1].partition(":")[0] for message in problems] == list(map(str, named))
    assert all("scikit-learn and XGBoost handlers and is not called: this" in message for message in problems)
