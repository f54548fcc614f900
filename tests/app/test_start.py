"""Starts that are refused, with what to change; and where a start finds its options."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.app.server import refused_start, serve
from tests.one_test import in_one_test
from tests.servers import http

ASK = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}


@in_one_test(
    ("arguments", "wanted"),
    [
        (("/no/such/model",), "there is no model at '/no/such/model'"),
        (("-o", "option.tgi_compt=true"), "did you mean 'option.tgi_compat'"),
        (("--engine", "vllm"), "pip install vllm"),
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
    assert "is cut short: it holds 30,000,000 bytes" in refused_start(str(model))


def test_the_model_directorys_own_properties_are_read_however_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.llm_engine=echo\noption.model_name=mine\n")
    for arguments, env in (((str(tmp_path),), {}), ((), {"HF_MODEL_ID": str(tmp_path)})):
        with serve(*arguments, env=env) as server:
            assert server.post(ASK, "/predictions/mine").status_code == 200


def test_the_start_and_info_say_which_sampling_defaults_hold(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "max_new_tokens": 3, "eos_token_id": 2}')
    with serve("--engine", "echo", "-o", f"option.generation_config={tmp_path}") as server:
        said = f"sampling parameters that clients leave out: temperature=0.6, max_new_tokens=3 ({file}; "
        assert said + "option.generation_config=vllm turns the model's off)" in server.log
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
