"""The formats in which models write tool calls, by name: a module for each family."""

from __future__ import annotations

import functools
import re

from handler.protocols.assistant.tools.formats.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V31
from handler.protocols.assistant.tools.formats.gemma4 import GEMMA4
from handler.protocols.assistant.tools.formats.glm import GLM45, GLM47
from handler.protocols.assistant.tools.formats.json_calls import (
    GRANITE,
    GRANITE4,
    HERMES,
    LLAMA3_JSON,
    PHI4_MINI_JSON,
    SMOLLM2,
)
from handler.protocols.assistant.tools.formats.kimi_k2 import KIMI_K2
from handler.protocols.assistant.tools.formats.mistral import MISTRAL
from handler.protocols.assistant.tools.formats.openai import OPENAI
from handler.protocols.assistant.tools.formats.pythonic import LLAMA4_PYTHONIC, PYTHONIC
from handler.protocols.assistant.tools.formats.tagged import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    MIMO,
    MINIMAX_M2,
    QWEN3_CODER,
    QWEN3_XML,
    SEED_OSS,
)
from handler.protocols.assistant.tools.parsing import Format

FORMATS = {
    format.name: format
    for format in (
        OPENAI,
        SEED_OSS,
        QWEN3_CODER,
        QWEN3_XML,
        MIMO,
        MINIMAX_M2,
        DEEPSEEK_V32,
        DEEPSEEK_V4,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        KIMI_K2,
        GLM45,
        GLM47,
        GEMMA4,
        MISTRAL,
        GRANITE,
        LLAMA4_PYTHONIC,
        LLAMA3_JSON,
        PHI4_MINI_JSON,
        HERMES,
        GRANITE4,
        SMOLLM2,
        PYTHONIC,
    )
}
"""`auto` takes the first one that a chat template shows: hermes is late, for others have its mark too."""

ALIASES = {
    "llama4_json": "llama3_json",
    "qwen3_json": "hermes",
    "step3p5": "qwen3_coder",
    "step5": "qwen3_coder",
    "poolside_v1": "glm45",
    "ling3": "glm45",
}
"""vLLM's names for formats that have another name here."""


def named(name: str) -> Format:
    """Return the format of a name, or of an alias.

    Raises:
        KeyError: no format has it.
    """
    return FORMATS[ALIASES.get(name, name)]


@functools.lru_cache
def find(template: str) -> Format | None:
    """Return the format that a chat template shows; None where it shows no known one."""
    found = (format for format in FORMATS.values() if format.template and re.search(format.template, template))
    return next(found, None)
