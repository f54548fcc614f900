"""docs/models.md's table of families: what `auto` finds in each template, and only names that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from handler.config.options.tables import REASONING_PARSERS, TOOL_CALL_PARSERS
from handler.core.values import Request
from handler.protocols.assistant.events import Reasoning
from handler.protocols.assistant.reasoning import Thinking
from handler.protocols.assistant.reasoning_families import choose_family
from handler.protocols.assistant.template import THOUGHTS
from handler.protocols.assistant.tools.formats import find
from handler.protocols.assistant.tools.formats.json_calls import SMOLLM2
from handler.protocols.assistant.tools.request import takes_tools
from tests.templates.test_tool_formats import USER, directory, render, source

__all__ = ["directory"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = DOCUMENT.read_text().partition("\n| `option.tool_call_parser` |")[2].partition("\n\n")[0]
TEMPLATES = {
    "Qwen 2.5": "Qwen-Qwen2.5-7B-Instruct",
    "QwQ": "Qwen-QwQ-32B",
    "Qwen 3": "Qwen-Qwen3-0.6B",
    "Granite 4/4.1": "ibm-granite-granite-4.1",
    "MiMo VL": "MiMo-VL",
    "Hermes 2 Pro/3": "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Reka Edge": "Reka-Edge",
    "DeepSeek V3.1": "deepseek-ai-DeepSeek-V3.1",
    "SmolLM3": "HuggingFaceTB-SmolLM3-3B",
    "Granite 3.3": "ibm-granite-granite-3.3-2B-Instruct",
    "Llama 3.1 to 3.3": "meta-llama-Llama-3.3-70B-Instruct",
    "Mistral Nemo/Small 3": "Mistral-Small-3.2-24B-Instruct-2506",
    "Ministral 3/Small 4/Medium 3.5": "mistralai-Ministral-3-14B-Reasoning-2512",
    "DeepSeek R1": "llama-cpp-deepseek-r1",
    "Kimi K2": "Kimi-K2-Instruct",
    "Kimi K2 Thinking/2.5 to 2.7": "Kimi-K2-Thinking",
    "gpt-oss": "openai-gpt-oss-120b",
    "Qwen3-Coder": "Qwen3-Coder",
    "Qwen 3.5/3.6/3.8": "Qwen3.5-4B",
    "Nemotron 3": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Step 3.5/3.7": "StepFun3.5-Flash",
    "MiniMax M2 to M2.7": "MiniMax-M2",
    "Seed-OSS": "ByteDance-Seed-OSS",
    "DeepSeek V3.2": "deepseek-ai-DeepSeek-V3.2",
    "DeepSeek V4": "deepseek-ai-DeepSeek-V4-Flash-0731",
    "MiniMax M3": "MiniMax-M3",
    "Kimi K3": "Kimi-K3",
    "MiniCPM5": "openbmb-MiniCPM5-1B",
    "Hy3": "tencent-Hy3",
    "GLM 4.5/4.6": "GLM-4.6",
    "GLM 4.7/5": "GLM-4.7-Flash",
    "Laguna": "poolside-Laguna-S-2.1",
    "Ling 3": "inclusionai-ling-3.0-flash",
    "Gemma 4": "google-gemma-4-31B-it",
    "LFM2": "LFM2-8B-A1B",
    "LFM2.5": "LFM2.5-8B-A1B",
    "MiniMax M1": "MiniMax-M1",
    "Apriel 1.5/1.6": "unsloth-Apriel-1.5",
    "Nemotron Nano v2": "NVIDIA-Nemotron-Nano-v2",
    "GigaChat 3/3.1": "GigaChat3.1-10B-A1.8B",
    "Muse Glimmer": "muse-glimmer",
    "Apertus": "Apertus-8B-Instruct",
    "Command R7B/A": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "Command A+": "Cohere2MoE",
}
"""A family's template in llama.cpp's collection."""


class Family(NamedTuple):
    """A family of the table: the names of its row, and "–" where it has no reasoning."""

    name: str
    tools: list[str]
    reasoning: str
    tested: bool


def families() -> Iterator[Family]:
    for line in TABLE.splitlines()[2:]:
        names, cell, *_ = (part.strip() for part in line.split("|")[1:])
        for group in cell.split("; "):
            listed, _, reasoning = group.partition(" (`")
            if not listed.startswith(("also ", "if named: ")):
                for name in filter(None, listed.split(", ")):
                    found = re.findall(r"`([^`]+)`", names)
                    yield Family(name.removesuffix(" ¹"), found, reasoning.rstrip("`)") or "–", "¹" not in name)


FAMILIES = list(families())


def test_the_table_has_families_and_names_that_there_are() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 60
    for family in FAMILIES:
        assert set(family.tools) <= set(TOOL_CALL_PARSERS), family
        assert family.reasoning in (*REASONING_PARSERS, "–"), family
    assert {family.name for family in FAMILIES if family.tested} == set(TEMPLATES)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.tested], ids=lambda family: family.name)
def test_auto_finds_in_a_template_what_the_table_says(family: Family, directory: Path) -> None:
    template = source(directory, TEMPLATES[family.name])
    tools = find(template) if takes_tools(template) else SMOLLM2
    assert tools
    assert tools.name in family.tools
    reasoning = choose_family("auto", template)
    assert (reasoning.name if reasoning else "–") == family.reasoning


PRINTED = 25
"""Templates that print the thought of a history's last answer after what may be the prompt."""


def test_a_thought_is_read_from_where_the_prompt_leaves_it(directory: Path) -> None:
    """Whether a template opens a thought in the prompt, or leaves that to the model, by default and when asked."""
    answer = {"role": "assistant", "content": "Yes.", **dict.fromkeys(THOUGHTS, "I think.")}
    read = set()
    for file in sorted(directory.glob("*.jinja")):
        template = source(directory, file.stem)
        family = choose_family("auto", template)
        for arguments in ({}, {"enable_thinking": True}, {"enable_thinking": False}) if family else ():
            prompt = render(template, [USER], None, prompt=True, **arguments)
            begun, prompt_alone, rest = render(template, [USER, answer], None, **arguments).partition(prompt)
            if begun or not prompt_alone or "I think." not in rest:
                continue  # the template prints no thought, or a prompt as before an answer without one
            assert family
            thinking = Thinking(family.of(None, template), arguments)
            thinking.read_prompt(Request(""), prompt)
            for pieces in ([rest], rest):
                parser = thinking.parser()
                events = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
                thought = "".join(event.text for event in events if isinstance(event, Reasoning))
                text = "".join(event for event in events if isinstance(event, str))
                assert (thought.strip(), text.strip()[:4]) == ("I think.", "Yes."), (file.stem, arguments)
            read.add(file.stem)
    assert len(read) >= PRINTED, sorted(read)
