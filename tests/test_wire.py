"""docs/wire.md's parameter tables, held against the code: no row missing, no cell empty, each cell true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from handler import engines
from handler.schemas.chat import TABLE as CHAT
from handler.schemas.parameters import PARAMETERS, REQUEST_FIELDS
from tests.servers import LiveServer

DOCUMENT = Path(__file__).parents[1] / "docs" / "wire.md"

# A value of each parameter that is not neutral, with what it needs beside it.
VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "do_sample": (True, {}),
    "seed": (7, {"do_sample": True}),
    "temperature": (0.5, {"do_sample": True}),
    "top_k": (3, {"do_sample": True}),
    "top_p": (0.5, {"do_sample": True}),
    "repetition_penalty": (1.2, {}),
    "max_new_tokens": (2, {}),
    "stop_sequences": (["b"], {}),
    "details": (True, {}),
    "return_full_text": (True, {}),
    "decoder_input_details": (True, {}),
    "output_formatter": ("sse", {}),
    "truncate": (1, {}),
    "typical_p": (0.5, {"do_sample": True}),
    "min_p": (0.1, {"do_sample": True}),
    "presence_penalty": (0.5, {}),
    "frequency_penalty": (0.5, {}),
    "n": (2, {}),
    "best_of": (2, {}),
    "num_beams": (2, {}),
    "length_penalty": (2.0, {"num_beams": 2}),
    "early_stopping": (True, {"num_beams": 2}),
    "stop_token_ids": ([4], {}),
    "include_stop_str_in_output": (True, {"stop_sequences": ["b"]}),
    "ignore_eos_token": (True, {}),
    "logprobs": (2, {}),
    "prompt_logprobs": (1, {}),
    "skip_special_tokens": (False, {}),
    "spaces_between_special_tokens": (False, {}),
    "min_length": (2, {}),
    "bad_sequences": (["b"], {}),
    "stop": (["b"], {}),
    "top_n_tokens": (2, {}),
    "watermark": (True, {}),
    "grammar": ({"type": "json", "value": {}}, {}),
    "adapter_id": ("mine", {}),
}

CHAT_VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "frequency_penalty": (0.5, {}),
    "presence_penalty": (0.5, {}),
    "logit_bias": ({"5": 1.0}, {}),
    "logprobs": (True, {}),
    "top_logprobs": (2, {"logprobs": True}),
    "max_tokens": (2, {}),
    "n": (2, {}),
    "seed": (7, {}),
    "stop": (["b"], {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "ignore_eos": (True, {}),
    "model": ("gpt2", {}),
    "user": ("test", {}),
    "tools": ([{"type": "function"}], {}),
    "response_format": ({"type": "json_object"}, {}),
}


def table(heading: str = "### Parameters\n") -> dict[str, dict[str, str]]:
    """parameter -> column -> cell."""
    lines = DOCUMENT.read_text().split(heading)[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    header, _, *body = rows[: next((i for i, row in enumerate(rows) if row[0] == "what"), len(rows))]
    found = {}
    for row in body:
        name = re.match(r"`(\w+)`", row[0])
        assert name is not None, row
        found[name[1]] = dict(zip(header, row, strict=True))
    return found


def test_every_parameter_has_its_row_and_no_cell_is_empty() -> None:
    rows = table()
    assert set(rows) == (set(PARAMETERS) | set(REQUEST_FIELDS)) - {"stream"}
    assert set(rows) == set(VALUES)
    assert not [name for name, row in rows.items() if not all(row.values())]


def test_every_chat_parameter_has_its_row_and_no_cell_is_empty() -> None:
    rows = table("### Chat parameters\n")
    assert set(rows) == set(CHAT.parameters) == set(CHAT_VALUES)
    assert not [name for name, row in rows.items() if not all(row.values())]


def test_columns_are_the_engines_that_are_there() -> None:
    there = {name for name, found in engines.ENGINES.items() if found.module is not None}
    assert set(next(iter(table().values()))) >= there


def check(server: LiveServer, engine: str, name: str) -> None:
    """Ask for the parameter and hold what happens against the table."""
    cell = table()[name][engine]
    value, beside = VALUES[name]
    found = server.post({"inputs": "a b c", "parameters": {"max_new_tokens": 4, **beside, name: value}})
    if cell == "refused":
        assert found.status_code == 424
        named = next(iter(beside), name) if engine == "echo" and "num_beams" in beside else name
        assert f"parameters.{named}=" in found.json()["error"]
    else:
        assert cell in ("supported", "emulated")
        assert found.status_code == 200, found.text
        assert "x-lmi-ignored-parameters" not in found.headers


def check_chat(server: LiveServer, engine: str, name: str) -> None:
    cell = table("### Chat parameters\n")[name][engine]
    value, beside = CHAT_VALUES[name]
    found = server.post({"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 4, **beside, name: value})
    if cell == "refused":
        assert found.status_code == 424
        assert f'"error":"{name}=' in found.text
    else:
        assert cell in ("supported", "emulated", "ignored")
        assert found.status_code == 200, found.text
        assert "x-lmi-ignored-parameters" not in found.headers


@pytest.mark.parametrize("name", CHAT_VALUES)
def test_chat_on_echo(echo_server: LiveServer, name: str) -> None:
    check_chat(echo_server, "echo", name)


@pytest.mark.model
@pytest.mark.parametrize("name", CHAT_VALUES)
def test_chat_on_openvino(model_server: LiveServer, name: str) -> None:
    check_chat(model_server, "openvino", name)


@pytest.mark.parametrize("name", VALUES)
def test_echo(echo_server: LiveServer, name: str) -> None:
    check(echo_server, "echo", name)


@pytest.mark.model
@pytest.mark.parametrize("name", VALUES)
def test_openvino(model_server: LiveServer, name: str) -> None:
    check(model_server, "openvino", name)
