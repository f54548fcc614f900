"""The formats in which models write tool calls. Each module contains the formats of one family."""

from __future__ import annotations

import functools
import re

from handler.protocols.assistant.tools.formats.gemma4 import FUNCTIONGEMMA, GEMMA4
from handler.protocols.assistant.tools.formats.glm import GLM45, GLM47, HY_V3, HY_V4, K2_HORIZON
from handler.protocols.assistant.tools.formats.json_calls import (
    APERTUS,
    COHERE3,
    COHERE4,
    GIGACHAT3,
    GRANITE,
    GRANITE4,
    GRANITE_20B_FC,
    HERMES,
    INKLING,
    INTERNLM,
    JAMBA,
    LLAMA3_JSON,
    LONGCAT,
    MISTRAL,
    NEMOTRON_JSON,
    PHI4_MINI_JSON,
    SMOLLM2,
    XLAM,
)
from handler.protocols.assistant.tools.formats.kimi_k3 import KIMI_K3
from handler.protocols.assistant.tools.formats.minimax_m3 import MINIMAX_M3
from handler.protocols.assistant.tools.formats.openai import OPENAI
from handler.protocols.assistant.tools.formats.pythonic import LFM2, LLAMA4_PYTHONIC, OLMO3, PYTHONIC
from handler.protocols.assistant.tools.formats.sections import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from handler.protocols.assistant.tools.formats.tagged import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    DOTS,
    MIMO,
    MINICPM5,
    MINIMAX_M2,
    MUSE_GLIMMER,
    QWEN3_CODER,
    QWEN3_XML,
    SEED_OSS,
    STEP3,
)
from handler.protocols.assistant.tools.parsing import Format

FORMATS = {
    format.name: format
    for format in (
        OPENAI,
        MUSE_GLIMMER,
        KIMI_K3,
        MINIMAX_M3,
        HY_V3,
        HY_V4,
        K2_HORIZON,
        APERTUS,
        COHERE3,
        COHERE4,
        GIGACHAT3,
        INTERNLM,
        INKLING,
        LFM2,
        OLMO3,
        FUNCTIONGEMMA,
        STEP3,
        DOTS,
        MINICPM5,
        LONGCAT,
        SEED_OSS,
        QWEN3_CODER,
        QWEN3_XML,
        MIMO,
        MINIMAX_M2,
        DEEPSEEK_V41,
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
        GRANITE_20B_FC,
        NEMOTRON_JSON,
        JAMBA,
        XLAM,
        HERMES,
        GRANITE4,
        SMOLLM2,
        PYTHONIC,
    )
}
"""All formats by name.

`auto` selects the first format that the chat template shows, so more specific formats that share the marker of hermes
come first.
"""

ALIASES = {
    "ernie45": "hermes",
    "hunyuan_a13b": "jamba",
    "llama4_json": "llama3_json",
    "qwen3_json": "hermes",
    "step3p5": "qwen3_coder",
    "step5": "qwen3_coder",
    "poolside_v1": "glm45",
    "ling3": "glm45",
}
"""Other names that vLLM uses for some of these formats."""


def get_format(name: str) -> Format:
    """Return the format with this name or alias.

    Raises:
        KeyError: no format has this name.
    """
    return FORMATS[ALIASES.get(name, name)]


@functools.lru_cache
def find(template: str) -> Format | None:
    """Return the format that a chat template shows, or None if it shows no known format."""
    matches = (format for format in FORMATS.values() if format.template and re.search(format.template, template))
    return next(matches, None)
