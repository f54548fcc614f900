"""What `plan` counts for models of 2025 and 2026, beside the sizes that others publish.

A size is one of
* the bytes in the checkpoint's own index (`metadata.total_size`), or the GB of its files that a reader of it tells,
* the number of weights that the model's card, its paper or vLLM's recipes (vllm-project/recipes, models/, read on
  2026-11-24) give, times the bytes of the checkpoint's precision. "Not looked up again": no page was at hand.
`deploy/data/models.json` has numbers of weights that transformers counted, and dimensions; no bytes.
"""

from __future__ import annotations

import pytest

from deploy.data import table
from deploy.resolve.fit import Need
from deploy.resolve.model.shape import config_of, known_model, shape_of_config
from tests.one_test import in_one_test

_GIB = 1 << 30
_RECIPES = "vllm-project/recipes: parameter_count"

PUBLISHED: tuple[tuple[str, float, str], ...] = (
    (
        "openai/gpt-oss-20b",
        13_761_264_768,
        "total_size of its index",
    ),
    ("openai/gpt-oss-120b", 60.8 * _GIB, "OpenAI's model card (arXiv 2508.10925), as fitmygpu.com tells it"),
    ("deepseek-ai/DeepSeek-V3", 688_586_727_753, "total_size of its index"),
    (
        "deepseek-ai/DeepSeek-V3.1",
        685e9,
        "DeepSeek's card: 671 billion weights, and 14 of a further token's layer; FP8",
    ),
    ("deepseek-ai/DeepSeek-V3.2", 671e9, f"{_RECIPES}, without the layer of a further token; FP8"),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 109e9 * 2, f"{_RECIPES}"),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 400e9 * 2, "Meta's 400B, not looked up again"),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", 400e9, "Meta's 400B, not looked up again; FP8"),
    ("Qwen/Qwen3-32B-FP8", 32.8e9, "Qwen's 32.8B, not looked up again; FP8"),
    ("Qwen/Qwen3-235B-A22B-Instruct-2507", 235e9 * 2, f"{_RECIPES}"),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 480e9 * 2, f"{_RECIPES}"),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", 80e9 * 2, f"{_RECIPES}"),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", 80e9, f"{_RECIPES}; FP8"),
    ("Qwen/Qwen3-VL-235B-A22B-Instruct", 235e9 * 2, _RECIPES),
    ("Qwen/Qwen3.5-27B", 27e9 * 2, _RECIPES),
    ("Qwen/Qwen3.5-35B-A3B", 35e9 * 2, _RECIPES),
    ("Qwen/Qwen3.5-122B-A10B", 122e9 * 2, _RECIPES),
    ("Qwen/Qwen3.5-397B-A17B", 397e9 * 2, "the model's name"),
    ("google/gemma-3-27b-it", 27.4e9 * 2, "the hub's count, in this table since 2025"),
    ("google/gemma-4-31B-it", 31e9 * 2, _RECIPES),
    ("google/gemma-4-26B-A4B-it", 26e9 * 2, _RECIPES),
    ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", 24e9 * 2, "the model's name"),
    ("zai-org/GLM-4.5", 358e9 * 2, _RECIPES),
    ("zai-org/GLM-4.5-FP8", 358e9, f"{_RECIPES}; FP8"),
    ("zai-org/GLM-4.6", 357e9 * 2, _RECIPES),
    ("zai-org/GLM-4.7", 358e9 * 2, _RECIPES),
    ("zai-org/GLM-5", 754e9 * 2, "the card of a quantized copy of GLM-5.1: 754 billion, 1.4 TB in BF16"),
    ("moonshotai/Kimi-K2-Instruct", 1026.5e9, "the hub's count of weights, as llmrun.dev repeats it; FP8"),
    ("moonshotai/Kimi-K2-Thinking", 600e9, f"{_RECIPES.replace('parameter_count', 'vram_minimum_gb')}; INT4 experts"),
    ("MiniMaxAI/MiniMax-M2", 230e9, f"{_RECIPES}; FP8"),
    ("MiniMaxAI/MiniMax-M2.5", 228.7e9, "the hub's count of weights, as llmrun.dev repeats it; FP8"),
    ("ByteDance-Seed/Seed-OSS-36B-Instruct", 36e9 * 2, _RECIPES),
    ("XiaomiMiMo/MiMo-V2-Flash", 309e9, f"{_RECIPES}; FP8"),
)


def test_there_are_models_enough() -> None:
    assert len({name for name, _, _ in PUBLISHED}) == len(PUBLISHED) >= 25


@in_one_test(("name", "published", "source"), PUBLISHED, ids=lambda value: value if "/" in str(value) else "")
def test_weights_are_within_a_twentieth_of_what_is_published(name: str, published: float, source: str) -> None:
    shape = known_model(name)
    assert shape is not None
    need = Need(shape, shape.dtype or "bf16")
    assert need.weight_gib * _GIB == pytest.approx(published, rel=0.05), source


@in_one_test(("name", "published", "source"), PUBLISHED, ids=lambda value: value if "/" in str(value) else "")
def test_so_are_those_of_the_dimensions_alone(name: str, published: float, source: str) -> None:
    """As for a model that nobody listed, whose files are not at hand."""
    rows = table("models")["models"]
    row = next(row for row in rows if name in row["names"])
    shape = shape_of_config(config_of(row, rows))
    assert Need(shape, shape.dtype or "bf16").weight_gib * _GIB == pytest.approx(published, rel=0.05), source
