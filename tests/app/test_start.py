"""Starts that are refused, with what to change, and `lmi serve --check`, which lists every problem."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.server import Ended, refused_start, run_to_end, serve
from tests.environment import clean_environment
from tests.one_test import in_one_test
from tests.servers import http
from tests.user_files import write_adapter

# -- starts that are refused, with what to change; and where a start finds its options ---------------------------------


ASK = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}


@in_one_test(
    ("arguments", "wanted"),
    [
        (("/no/such/model",), "there is no model at '/no/such/model'"),
        (("-o", "option.tgi_compt=true"), "did you mean 'option.tgi_compat'"),
        (("--engine", "vllm"), "pip install vllm"),
        (("--engine", "echo", "-o", 'option.default_chat_template_kwargs={"tools": []}'), "must not set 'tools'"),
        (("--engine", "warp"), "--engine warp: must be one of auto, openvino"),
        (("--port", "99999"), "must be a number from 0 to 65535"),
        (("--host", "203.0.113.1", "--engine", "echo"), "cannot listen on 203.0.113.1"),
    ],
)
def test_a_start_that_cannot_work_says_what_to_change(arguments: tuple[str, ...], wanted: str) -> None:
    assert wanted in refused_start(*arguments)


def test_a_script_for_awss_vllm_image_that_cannot_be_called_is_refused(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.llm_engine=echo\n")
    (tmp_path / "model.py").write_text("from model_hosting_container_standards.sagemaker import bootstrap\n")
    for more in ((), ("--check",)):
        told = refused_start("--properties", str(tmp_path / "serving.properties"), *more)
        assert f"{tmp_path}/model.py, line 1: bootstrap belongs to AWS's vLLM image and is not called here" in told


def test_a_taken_port_is_refused_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot listen" in refused_start("--port", str(taken.getsockname()[1]))


@pytest.mark.parametrize("content", [b"GGUF but not really", b""])
def test_a_broken_model_file_is_refused_with_the_reason(tmp_path: Path, content: bytes) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(content)
    assert "broken.gguf" in refused_start(str(model))


@pytest.mark.model
def test_a_model_file_that_is_cut_short_is_refused(demo_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "short.gguf"
    with demo_model.open("rb") as whole:
        model.write_bytes(whole.read(30_000_000))
    assert "is cut short: it has 30,000,000 bytes" in refused_start(str(model))


def test_the_model_directorys_own_properties_are_read_however_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.llm_engine=echo\noption.model_name=mine\n")
    for arguments, env in (((str(tmp_path),), {}), ((), {"HF_MODEL_ID": str(tmp_path)})):
        with serve(*arguments, env=env) as server:
            assert server.post(ASK, "/predictions/mine").status_code == 200


def test_the_start_and_info_say_which_sampling_defaults_hold(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "max_new_tokens": 3, "eos_token_id": 2}')
    with serve("--engine", "echo", "-o", f"option.generation_config={tmp_path}") as server:
        said = f"default sampling parameters: temperature=0.6, max_new_tokens=3 ({file}; "
        assert said + "option.generation_config=vllm disables the model's defaults)" in server.log
        assert http.get(f"{server.url}/info").json()["default_sampling_params"] == {
            "temperature": 0.6,
            "max_new_tokens": 3,
        }
        chat = {"messages": [{"role": "user", "content": "a b c d e"}]}
        answer = server.post(chat, "/v1/chat/completions").json()
        assert answer["usage"]["completion_tokens"] == 3
        assert server.post({"inputs": "a b c d e"}).json()["generated_text"].count(" ") > 3  # LMI's own schema
    file.write_text('{"temperature": "hot"}')
    assert f'{file}: temperature="hot": must be' in refused_start(
        "--engine", "echo", "-o", f"option.generation_config={tmp_path}"
    )


# -- `lmi serve --check` lists every problem; a start that fails lists the same, and what only a start can see ---------


FILE = """option.dtype=int3
option.tgi_compt=true
option.speculative_draft_model=x
option.speculative_config={}
option.rolling_batch=disable
batch_size=2
option.enable_streaming=true
"""


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Of a process of its own."""
    command = [sys.executable, "-m", "handler", "serve", *arguments]
    return subprocess.run(
        command, env=clean_environment() | environ, capture_output=True, text=True, timeout=60, check=False
    )


def check_serve(*arguments: str, **environ: str) -> Ended:
    return run_to_end(*arguments, env=environ)


@pytest.mark.parametrize("checking", [True, False], ids=["check", "start"])
def test_all_problems_are_listed_in_one_round(tmp_path: Path, checking: bool) -> None:
    (tmp_path / "serving.properties").write_text(FILE)
    (tmp_path / "model.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "config.json").write_text("[]")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        more = ["--engine", "vllm", "--port", port, "--allow-host", "a/b", *(["--check"] if checking else [])]
        environ = {"OPTION_JOB_QUEUE_SIZE": "1", "OPTION_MAX_LORAS": "0", "LMI_LOG_LEVEL": "loud"}
        ended = run(str(tmp_path), *more, **environ)
    of_start = [f"cannot listen on 127.0.0.1:{port}", f"{tmp_path / 'model.py'}, line 1: ModuleNotFoundError"]
    told = [
        "environment variable OPTION_JOB_QUEUE_SIZE: unknown option 'option.job_queue_size'; did you mean",
        "environment variable OPTION_MAX_LORAS: option.max_loras=0: must be a whole number of at least 1",
        "serving.properties, line 1: option.dtype=int3: must be one of",
        "serving.properties, line 2: unknown option 'option.tgi_compt'; did you mean 'option.tgi_compat'?",
        "serving.properties, line 7: option.enable_streaming=true needs batch_size=1",
        f"{tmp_path / 'config.json'} is not a JSON object",
        "serving.properties, line 3: option.speculative_draft_model and option.speculative_config cannot",
        "the engine 'vllm' is not installed",
        "--allow-host a/b: must be * or a host",
        "environment variable LMI_LOG_LEVEL=LOUD: must be",
        *([] if checking else of_start),
    ]
    head, *lines = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout, head) == (2, "", f"lmi: {len(told)} problems:")
    for number, (line, wanted) in enumerate(zip(lines, told, strict=True), 1):
        assert line.startswith(f"{number}. {wanted}")


@pytest.mark.parametrize("checking", [True, False], ids=["check", "start"])
def test_a_model_py_that_is_no_python_is_named_once(tmp_path: Path, checking: bool) -> None:
    (tmp_path / "model.py").write_text("import os\n\nx = = 1\n")
    (tmp_path / "serving.properties").write_text("option.dtype=int3\n")
    more = ["--check"] if checking else ["--port", "0"]
    ended = check_serve("--engine", "echo", "--properties", str(tmp_path / "serving.properties"), *more)
    assert ended.returncode == 2
    first, second = ended.stderr.splitlines()[1:]
    assert first.startswith("1. serving.properties, line 1: option.dtype=int3: ")
    assert second == f"2. {tmp_path / 'model.py'}, line 3: SyntaxError: invalid syntax (model.py, line 3)"


def test_a_check_runs_nothing_of_a_users_files(tmp_path: Path) -> None:
    for name in ("model.py", "calls.py"):
        (tmp_path / name).write_text("raise SystemExit('it runs')  # '\\d'\n")
    (tmp_path / "serving.properties").write_text("option.tool_parser_plugin=calls.py\n")
    (tmp_path / "requirements.txt").write_text("no-such-package-of-lmi\n")
    ended = check_serve("--engine", "echo", "--properties", str(tmp_path / "serving.properties"), "--check")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"{tmp_path}/requirements.txt: not checked; its packages are installed at startup" in ended.stdout


def test_a_check_says_what_a_users_files_name_that_is_not_here(tmp_path: Path) -> None:
    script = tmp_path / "handlers.py"
    script.write_text("from fastapi import APIRouter, Request\nimport no_such_package.part\n")
    (tmp_path / "model.py").write_text("import json, beside\n\ndef f():\n    from no_such_other import x\n")
    (tmp_path / "beside.py").touch()
    (tmp_path / "serving.properties").write_text("option.llm_engine=echo\noption.enable_lora=true\n")
    of_adapter = write_adapter(tmp_path / "adapters" / "a") / "model.py"
    of_adapter.write_text("import no_such_package\n")
    ended = check_serve(
        "--properties", str(tmp_path / "serving.properties"), "--check", CUSTOM_SCRIPT_FILENAME=script.name
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        f"{tmp_path}/model.py: no handle and no formatters",
        f"{tmp_path}/model.py, line 4: no_such_other is not installed",
        f"{script}, line 1: fastapi.APIRouter is not installed",
        f"{script}, line 2: no_such_package is not installed",
        f"{of_adapter}, line 1: no_such_package is not installed",
        "no problems; engine: echo, option.model_id: not set",
    ]


def test_a_check_says_what_of_model_py_is_called(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def handle(inputs):\n    raise SystemExit\n")
    file = tmp_path / "serving.properties"
    file.write_text("engine=Python\noption.model_id=org/model\noption.rolling_batch=vllm\n")
    ended = check_serve("--properties", str(file), "--check")
    assert ended.stdout.splitlines() == [
        "no engine is loaded: handle in model.py serves its routes (documentation: custom-code)",
        f"{tmp_path}/model.py: handle answers the requests on its routes; no engine is loaded",
        "no problems; engine: none, option.model_id: not set",
    ]
    ended = check_serve("--engine", "echo", "--properties", str(file), "--check")
    assert (
        f"{tmp_path}/model.py: handle is called first; requests for which it returns None go to the engine\n"
        in ended.stdout
    )


MISSING = {
    "option.tool_parser_plugin=calls.py": "option.tool_parser_plugin=calls.py: there is no such file",
    "option.echo_tokenizer=/nowhere": "-o option.echo_tokenizer=/nowhere: there is no such directory",
}


@pytest.mark.parametrize("checking", [True, False], ids=["check", "start"])
def test_missing_files_of_options_are_named_once(checking: bool) -> None:
    more = ["--check"] if checking else ["--port", "0"]
    ended = check_serve("--engine", "echo", *(word for option in MISSING for word in ("-o", option)), *more)
    assert ended.returncode == 2
    head, *lines = ended.stderr.splitlines()
    assert head == "lmi: 2 problems:"
    for number, (line, wanted) in enumerate(zip(lines, MISSING.values(), strict=True), 1):
        assert line.startswith(f"{number}. {wanted}")


def test_an_engine_by_url_names_all_that_it_needs() -> None:
    ended = check_serve("demo", "--engine", "openai", "--check")
    assert ended.stderr.splitlines() == [
        "lmi: 2 problems:",
        "1. the openai engine needs option.base_url, for example -o option.base_url=http://host:8000/v1",
        "2. the MODEL argument: the openai engine needs option.model_id, a directory or a name on the hub; 'demo' is "
        "neither",
    ]


def test_an_engine_by_url_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ended = check_serve(str(tmp_path), "--engine", "openai", "-o", "option.base_url=http://127.0.0.1:1/v1", "--check")
    assert ended.returncode == 2
    assert f"{tmp_path} has no tokenizer: none of tokenizer.json, " in ended.stderr


def test_without_a_problem_nothing_is_started() -> None:
    ended = check_serve("--engine", "openvino", "--check", OPTION_ECHO_CUES="true")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        "ignored: option.echo_cues (environment variable OPTION_ECHO_CUES); only the echo engine reads these words",
        "no problems; engine: openvino, option.model_id: not set",
    ]
