"""Decisions switch thinking off by the switch of a model's own chat template, or are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from handler.core.errors import ServingError
from tests.templates.test_tool_formats import directory as directory  # a fixture
from tests.templates.test_tool_formats import render, source
from tests.unit.protocols.test_decisions import CONTEXT, NOUL, request_of

OFF = {
    "ByteDance-Seed-OSS": "</seed:think>",
    "Cohere2MoE": "<|START_THINKING|><|END_THINKING|>",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "<|START_THINKING|><|END_THINKING|>",
    "GLM-4.6": "<think></think>",
    "GLM-4.7-Flash": "</think>",
    "HuggingFaceTB-SmolLM3-3B": "<think>\n\n</think>\n",
    "Kimi-K3": "response<|sep|>",
    "MiniMax-M3": "</mm:think>",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "<think></think>",
    "Qwen-QwQ-32B": "<think>\n</think>",
    "Qwen-Qwen3-0.6B": "<think>\n\n</think>\n\n",
    "Qwen3.5-4B": "<think>\n\n</think>\n\n",
    "Spark2.5": "</think>",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "<think>\n</think>",
    "deepseek-ai-DeepSeek-V3.1": "<think></think>",
    "deepseek-ai-DeepSeek-V3.2": "<think></think>",
    "deepseek-ai-DeepSeek-V4": "</think>",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "</think>",
    "google-gemma-4-31B-it": "<|channel>thought\n<channel|>",
    "google-gemma-4-31B-it-interleaved": "<|channel>thought\n<channel|>",
    "inclusionai-ling-3.0-flash": "<think></think>",
    "llama-cpp-rwkv-world": "<think>\n</think>",
    "openbmb-MiniCPM5-1B": "<think>\n\n</think>\n\n",
    "poolside-Laguna-S-2.1": "</think>",
    "poolside-Laguna-XS-2.1": "</think>",
    "poolside-Laguna-XS.2": "</think>",
    "tencent-Hy3": "<think:opensource></think:opensource>",
}
"""Maps templates to the end of the prompt of a question: the model's thoughts are closed before they begin."""

UNMARKED = ("Apertus-8B-Instruct", "Bielik-11B-v3.0-Instruct", "Reka-Edge", "ibm-granite-granite-3.3-2B-Instruct")
"""With these, the prompt changes before its end: the switch is in the system message, or adds a marker only if on."""

THINKS = {
    "MiniMax-M2": "the model thinks before it replies",
    "NVIDIA-Nemotron-Nano-v2": "the model thinks before it replies",
    "StepFun3.5-Flash": "the model thinks before it replies",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "the model thinks before it replies",
    "llama-cpp-deepseek-r1": "the model thinks before it replies",
    "muse-glimmer": "replies begin with a header",
    "openai-gpt-oss-120b": "replies begin with a header",
}
"""Maps templates of models that always think, or begin with a header, to the words of the refusal."""

SILENT = {
    "Apriel-1.6-15b-Thinker-fixed", "Kimi-K2-Thinking", "LFM2.5-8B-A1B", "LFM2.5-Instruct",
    "meetkai-functionary-medium-v3.1", "mistralai-Ministral-3-14B-Reasoning-2512", "unsloth-Apriel-1.5",
    "upstage-Solar-Open-100B",
}  # fmt: skip
"""Templates that speak of thoughts, without a switch and without a marker at the end of the prompt.

Whether their models think cannot be told from the template. `label_mass` of the response tells.
"""


def prompt_of(template: str) -> str:
    """Return the prompt of a question, which the request has accepted."""
    request = request_of(NOUL, context=replace(CONTEXT, chat_template=template))
    prompt = render(template, [*request.messages], None, prompt=True, **dict(request.template.arguments))
    assert request.read_prompt is not None
    request.read_prompt(request, prompt)
    return prompt


@pytest.mark.parametrize("name", OFF)
def test_the_prompt_ends_after_the_thoughts(name: str, directory: Path) -> None:
    assert prompt_of(source(directory, name)).endswith(OFF[name])


@pytest.mark.parametrize("name", UNMARKED)
def test_the_switch_changes_the_prompt(name: str, directory: Path) -> None:
    template = source(directory, name)
    messages = request_of(NOUL, context=replace(CONTEXT, chat_template=template)).messages
    thinking = render(template, [*messages], None, prompt=True, thinking=True, enable_thinking=True)
    assert prompt_of(template) != thinking


@pytest.mark.parametrize("name", THINKS)
def test_a_model_that_always_thinks_is_refused(name: str, directory: Path) -> None:
    with pytest.raises(ServingError, match=THINKS[name]):
        prompt_of(source(directory, name))


def test_every_template_that_speaks_of_thoughts_is_listed(directory: Path) -> None:
    found = {path.stem for path in directory.glob("*.jinja") if "think" in source(directory, path.stem).lower()}
    assert found | {"muse-glimmer"} == {*OFF, *UNMARKED, *THINKS, *SILENT}
