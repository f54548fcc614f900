"""Calls that a model's own chat template writes are read by the format that `auto` finds in it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from handler.config.options.tables import REASONING_PARSERS, TOOL_CALL_PARSERS
from handler.core.values import Request
from handler.protocols.assistant.events import Reasoning
from handler.protocols.assistant.reasoning import ReasoningForm
from handler.protocols.assistant.reasoning_families import choose_family
from handler.protocols.assistant.template import REASONING_FIELDS
from handler.protocols.assistant.tools.formats import FORMATS, find
from handler.protocols.assistant.tools.formats.json_calls import SMOLLM2
from handler.protocols.assistant.tools.request import lay_out, takes_tools
from tests.unit.protocols.assistant.tool_texts import TOOLS, read

WANTED = {
    "Apertus-8B-Instruct": "apertus",
    "Apriel-1.6-15b-Thinker-fixed": "jamba",
    "Bielik-11B-v3.0-Instruct": "hermes",
    "ByteDance-Seed-OSS": "seed_oss",
    "Cohere2MoE": "cohere_command3",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere_command3",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm45",
    "GigaChat3-10B-A1.8B": "gigachat3",
    "GigaChat3.1-10B-A1.8B": "gigachat3",
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K2-Thinking": "kimi_k2",
    "Kimi-K3": "kimi_k3",
    "LFM2-8B-A1B": "lfm2",
    "LFM2.5-8B-A1B": "lfm2",
    "LFM2.5-Instruct": "lfm2",
    "MiMo-VL": "hermes",
    "MiniMax-M1": "jamba",
    "MiniMax-M2": "minimax_m2",
    "MiniMax-M3": "minimax_m3",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "NVIDIA-Nemotron-Nano-v2": "nemotron_json",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "Reka-Edge": "hermes",
    "Spark2.5": "glm45",
    "StepFun3.5-Flash": "qwen3_coder",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek_v4",
    "google-gemma-4-31B-it": "gemma4",
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "inclusionai-ling-3.0-flash": "glm45",
    "llama-cpp-deepseek-r1": "deepseek_v3",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "moonshotai-Kimi-K2": "kimi_k2",
    "muse-glimmer": "muse_glimmer",
    "openai-gpt-oss-120b": "openai",
    "openbmb-MiniCPM5-1B": "minicpm5",
    "poolside-Laguna-S-2.1": "glm45",
    "poolside-Laguna-XS-2.1": "glm45",
    "poolside-Laguna-XS.2": "glm45",
    "tencent-Hy3": "hy_v3",
    "unsloth-Apriel-1.5": "jamba",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
}

OTHERS = (
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "meetkai-functionary-medium-v3.1",
    "meetkai-functionary-medium-v3.2",
    "upstage-Solar-Open-100B",
)
"""Templates with tools in forms that are not known here: `tools` are refused."""

USER = {"role": "user", "content": "How is the weather?"}


@pytest.fixture(scope="session")
def directory(request: pytest.FixtureRequest) -> Path:
    found = request.config.getoption("--templates")
    assert found, "`make test-templates` names the directory"
    return Path(found)


def source(directory: Path, name: str) -> str:
    return re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", (directory / f"{name}.jinja").read_text())


APPENDING = {"Kimi-K2-Instruct", "Kimi-K2-Thinking"}
"""They append to a list. Transformers' sandbox does not let them, so a server refuses a history with calls."""


def test_a_server_can_render_all_others(directory: Path) -> None:
    assert {name for name in WANTED if ".append(" in source(directory, name)} == APPENDING


def render(
    template: str, messages: Sequence[Any], tools: Sequence[Any] | None, *, prompt: bool = False, **arguments: Any
) -> str:
    given = {"messages": messages, "tools": tools, "add_generation_prompt": prompt, **arguments}
    return str(compiled(template).render(given, bos_token="<s>", eos_token="</s>"))


@functools.cache
def compiled(template: str) -> jinja2.Template:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        value = list(value) if isinstance(value, Iterator) else value
        return json.dumps(value, **{"ensure_ascii": False, **options})

    sandbox = SandboxedEnvironment if ".append(" in template else ImmutableSandboxedEnvironment
    environment = sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    environment.filters |= {"tojson": tojson, "from_json": json.loads}
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime(2026, 1, 1).strftime}
    return environment.from_string(template)


def answer_after(prompt: str, whole: str) -> str:
    """Return what follows the prompt; a template may end a prompt in another way than before an answer."""
    same = (at for at, signs in enumerate(zip(prompt, whole, strict=False)) if signs[0] != signs[1])
    return whole[next(same, len(prompt)) :]


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call_{number:024}", "type": "function", "function": {"name": name, "arguments": arguments}}


WITHOUT_TEXT = (
    "Cohere2MoE", "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "MiniMax-M1", "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407", "muse-glimmer",
)  # fmt: skip
"""Templates that print no text beside calls."""

CALLS = [call(1, "weather", {"city": "Köln", "days": 3}), call(2, "time", {})]
ODD = [
    call(
        1, "weather", {"city": "5", "place": {"lat": -1.5, "name": 'it\'s "x"'}, "tags": ["a", "é\n"], "metric": True}
    ),
    call(2, "write", {"path": "C:\\a \"b\" 'c'", "text": "{'a': [1, \"b\"]}\n  😀, }])"}),
]
WITH_NULL = [call(1, "weather", {"city": "Köln", "note": None})]

OWN_LOSSES = {
    "MiniMax-M3": [WITH_NULL],  # it drops members without a value
    "LFM2.5-8B-A1B": [ODD],  # it puts strings between quotes as they are
}
"""Calls that a template prints otherwise than they are."""


@pytest.mark.parametrize("given", [CALLS, ODD, WITH_NULL], ids=["calls", "odd", "null"])
@pytest.mark.parametrize("name", WANTED)
def test_calls_of_a_template_are_read(name: str, given: list[dict[str, Any]], directory: Path) -> None:
    if given in OWN_LOSSES.get(name, ()):
        return
    template = source(directory, name)
    format = find(template)
    assert takes_tools(template)
    assert format is FORMATS[WANTED[name]]
    messages, tools = lay_out([USER, {"role": "assistant", "content": "", "tool_calls": given}], TOOLS, template)
    calls = given[: len(messages[1].get("tool_calls", given))]  # some templates have one call a message
    whole = render(template, messages[:2], tools)
    prompts = [render(template, messages[:1], tools, prompt=prompt) for prompt in (True, False)]
    wanted = [[one["function"]["name"], one["function"]["arguments"]] for one in calls]
    found = [read(format.make(TOOLS), [answer_after(prompt, whole)]) for prompt in prompts]
    assert wanted in [[[e[0], json.loads(e[1])] for e in events if isinstance(e, list)] for events in found]


@pytest.mark.parametrize("name", WANTED)
def test_a_template_prints_calls_and_their_results(name: str, directory: Path) -> None:
    template = source(directory, name)
    results = [
        {"role": "tool", "content": f"result-{number}", "tool_call_id": CALLS[number]["id"]} for number in (0, 1)
    ]
    asked: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, *results]
    messages, tools = lay_out(asked, TOOLS, template)
    whole = render(template, messages, tools, prompt=True).replace("\\u00f6", "ö")
    places = [whole.find(text) for text in ("Köln", "result-0", "result-1")]
    assert places == sorted(places)
    assert places[0] > 0


@pytest.mark.parametrize("name", WANTED)
def test_a_template_takes_an_answer_with_reasoning_text_and_calls(name: str, directory: Path) -> None:
    template = source(directory, name)
    thoughts = dict.fromkeys(REASONING_FIELDS, "I think.")
    answer = {"role": "assistant", "content": "I call.", "tool_calls": CALLS[:1], **thoughts}
    result = {"role": "tool", "content": "result-0", "tool_call_id": CALLS[0]["id"]}
    messages, tools = lay_out([USER, answer, result], TOOLS, template)
    whole = render(template, messages, tools, prompt=True)
    assert "result-0" in whole
    assert ("I call." in whole) is (name not in WITHOUT_TEXT)


@pytest.mark.parametrize("name", OTHERS)
def test_a_template_in_another_form_shows_no_known_one(name: str, directory: Path) -> None:
    template = source(directory, name)
    assert takes_tools(template)
    assert find(template) is None


# -- docs/models.md's table of families: what `auto` finds in each template, and only names that there are -------------


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
    answer = {"role": "assistant", "content": "Yes.", **dict.fromkeys(REASONING_FIELDS, "I think.")}
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
            thinking = ReasoningForm(family.of(None, template), arguments)
            thinking.read_prompt(Request(""), prompt)
            for pieces in ([rest], rest):
                parser = thinking.parser()
                events = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
                thought = "".join(event.text for event in events if isinstance(event, Reasoning))
                text = "".join(event for event in events if isinstance(event, str))
                assert (thought.strip(), text.strip()[:4]) == ("I think.", "Yes."), (file.stem, arguments)
            read.add(file.stem)
    assert len(read) >= PRINTED, sorted(read)
