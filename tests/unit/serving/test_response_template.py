"""The response template of a model's files: where it is taken, and what is refused at the start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from handler.config.loader import read_config
from handler.config.model_files import tokenizer_config
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.process.engine_process import Spec
from handler.protocols.kernel.dialect import ServerContext
from handler.scheduler.lora import AdapterRegistry
from handler.serving.check import check
from handler.serving.start import server_context
from tests.unit.protocols.assistant.response_templates import TEMPLATES

BROKEN = {"start_anchor": "a", "fields": {"content": {"open_pattern": "(a"}}}


def served(directory: Path, template: Any, *options: str) -> ServerContext:
    (directory / "tokenizer_config.json").write_text(json.dumps({"response_template": template} if template else {}))
    config = read_config(overrides=[f"option.model_id={directory}", "option.llm_engine=echo", *options], environ={})
    checked = config.checked()
    return server_context(checked, Spec("echo", EngineConfig(checked, directory)), AdapterRegistry())


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ((), True),
        (("option.reasoning_parser=auto",), True),
        (("option.reasoning_parser=hf", "option.tool_call_parser=hf"), True),
        (("option.reasoning_parser=none",), True),
        (("option.reasoning_parser=none", "option.tool_call_parser=none"), False),
        (("option.tool_call_parser=hermes",), False),
        (("option.reasoning_parser=qwen3",), False),
    ],
)
def test_auto_takes_it_unless_an_option_names_another_parser(
    tmp_path: Path, options: tuple[str, ...], taken: bool
) -> None:
    assert (served(tmp_path, TEMPLATES["hermes"], *options).response_template is not None) is taken
    assert served(tmp_path, None, *(option for option in options if "=hf" not in option)).response_template is None


NO_CALLS = {"start_anchor": "a", "fields": {"thinking": {"open": "b"}}}


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (BROKEN, ("reasoning_parser=hf",), ": response_template.fields.content.open_pattern: '(a' has"),
        ("text", ("reasoning_parser=hf",), "tokenizer_config.json: response_template: must be an object"),
        (None, ("tool_call_parser=hf",), "tokenizer_config.json has no response_template"),
        (NO_CALLS, ("tool_call_parser=hf",), "tokenizer_config.json: response_template.fields has no tool_calls"),
        (NO_CALLS, ("reasoning_parser=hf", "tool_call_parser=hermes"), "beside option.tool_call_parser=hermes"),
        (NO_CALLS, ("reasoning_parser=hf", "tool_parser_plugin=p.py"), "beside option.tool_parser_plugin=p.py"),
    ],
)  # fmt: skip
def test_what_hf_cannot_read_is_refused_with_file_and_place(
    tmp_path: Path, template: Any, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        served(tmp_path, template, *(f"option.{option}" for option in options))
    assert message in str(refused.value)
    assert f"option.{options[0]}: " in str(refused.value)


def test_auto_leaves_a_broken_one_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert served(tmp_path, BROKEN).response_template is None
    (message,) = caplog.messages
    assert f"{tmp_path / 'tokenizer_config.json'}: response_template.fields.content.open_pattern" in message
    assert "answers are read by the chat template" in message


def test_a_check_finds_it_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": BROKEN}))
    options = [f"option.model_id={tmp_path}", "option.llm_engine=echo", "option.reasoning_parser=hf"]
    problems = check(read_config(overrides=options, environ={}))
    assert "fields.content.open_pattern" in "".join(problem.message for problem in problems)


def test_tokenizer_info_shows_it_as_it_is(tmp_path: Path) -> None:
    served(tmp_path, TEMPLATES["hermes"])
    assert tokenizer_config(tmp_path)["response_template"] == TEMPLATES["hermes"]
