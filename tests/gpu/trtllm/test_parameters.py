"""The parameters of docs/wire/ against TensorRT-LLM's double: every note, its condition met and not met."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import tiny
from tests.doubles.requests import environment
from tests.parameter_matrix import (
    ALL,
    CHAT,
    CHAT_VALUES,
    PARAMETERS,
    TENSORS,
    TGI,
    TGI_VALUES,
    VALUES,
    check,
    check_chat,
    check_tgi,
    unmet,
)
from tests.servers import LiveServer, serve
from tests.user_files import write_adapter

LORA = {"option.enable_lora": "true", "option.gather_generation_logits": "true"}
SETTINGS: dict[str, tuple[str, dict[str, str]]] = {
    "1.3": ("1.3.0", {**LORA, "option.guided_decoding_backend": "xgrammar"}),
    "1.2 with beams": ("1.2.1", {**LORA, "option.max_beam_width": "3", "option.sampler_type": "TRTLLMSampler"}),
    "1.1": ("1.1.0", {}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tiny.make(tmp_path_factory.mktemp("model"))
    write_adapter(at / "adapters" / "mine")
    return at


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[LiveServer, Any]]:
    version, options = SETTINGS[request.param]
    flags = [flag for key, value in options.items() for flag in ("-o", f"{key}={value}")]
    with serve(str(model), "--engine", "trtllm", *flags, env=environment(f"version={version}")) as server:
        server.wait_ready()
        yield server, lambda heading: unmet(heading, "trtllm", version, options)


@pytest.mark.parametrize("name", ALL)
def test_a_parameter_of_lmis_with_trtllm(setting: tuple[LiveServer, Any], model: Path, name: str) -> None:
    server, missing = setting
    heading = PARAMETERS if name in VALUES else TENSORS
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    check(server, "trtllm", name, unmet=missing(heading), vocabulary=size)


@pytest.mark.parametrize("name", CHAT_VALUES)
def test_a_chats_parameter_with_trtllm(setting: tuple[LiveServer, Any], name: str) -> None:
    server, missing = setting
    check_chat(server, "trtllm", name, unmet=missing(CHAT))


@pytest.mark.parametrize("name", TGI_VALUES)
def test_a_parameter_of_tgis_with_trtllm(setting: tuple[LiveServer, Any], name: str) -> None:
    server, missing = setting
    check_tgi(server, "trtllm", name, unmet=missing(TGI))
