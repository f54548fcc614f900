"""Chat templates that vLLM has for its parsers: calls are read by the parser that its documents name with each."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from handler.protocols.assistant.answer import warn_of_unread_calls
from handler.protocols.assistant.tools.formats import find, get_format
from handler.protocols.assistant.tools.request import lay_out, takes_tools
from tests.templates.test_tool_formats import CALLS, ODD, USER, answer_after, directory, render
from tests.unit.protocols.answers import CAPABLE, with_options
from tests.unit.protocols.assistant.tool_texts import TOOLS, read

__all__ = ["directory"]

PARSERS = {
    "apertus": "apertus",
    "deepseekr1": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "functiongemma": "functiongemma",
    "gemma3_pythonic": "pythonic",
    "gemma4": "gemma4",
    "glm4": "glm45",
    "granite": "granite",
    "granite_20b_fc": "granite-20b-fc",
    "hermes": "hermes",
    "hunyuan_a13b": "hunyuan_a13b",
    "internlm2_tool": "internlm",
    "llama3.1_json": "llama3_json",
    "llama3.2_json": "llama3_json",
    "llama4_json": "llama4_json",
    "mistral": "mistral",
    "mistral3": "mistral",
    "mistral_parallel": "mistral",
    "muse_glimmer": "muse_glimmer",
    "qwen3coder": "qwen3_coder",
    "xlam_llama": "xlam",
    "xlam_qwen": "xlam",
}
"""Not those that print a call which nobody can read: llama3.2_pythonic and toolace print strings without quotes,
llama4_pythonic all values as strings with nothing escaped, phi4_mini Python's dictionaries in JSON.
"""


@pytest.mark.parametrize("given", [CALLS, ODD], ids=["calls", "odd"])
@pytest.mark.parametrize("name", PARSERS)
def test_calls_of_a_template_are_read_by_its_parser(
    name: str, given: list[dict[str, Any]], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = (directory / "vllm/examples" / f"tool_chat_template_{name}.jinja").read_text()
    format = get_format(PARSERS[name])
    assert takes_tools(template)
    assert find(template) in (format, None)
    with caplog.at_level(logging.WARNING):
        warn_of_unread_calls(with_options(replace(CAPABLE, chat_template=template), tool_call_parser=PARSERS[name]))
    assert caplog.messages == []
    asked: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "", "tool_calls": given}]
    messages, tools = lay_out(asked, TOOLS, template, format)
    calls = given[: len(messages[1].get("tool_calls", given))]  # some templates have one call a message
    whole = render(template, messages[:2], tools)
    prompts = [render(template, messages[:1], tools, prompt=prompt) for prompt in (True, False)]
    found = [read(format.make(TOOLS), [answer_after(prompt, whole)]) for prompt in prompts]
    wanted = [[one["function"]["name"], one["function"]["arguments"]] for one in calls]
    assert wanted in [[[e[0], json.loads(e[1])] for e in events if isinstance(e, list)] for events in found]
