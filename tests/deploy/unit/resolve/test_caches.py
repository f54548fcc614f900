"""The cache that `plan` expects beside what the configurations of the installed transformers say, class by class.

Each generating model's configuration is made with its defaults, and written as its config.json. What a token needs is
added up here from the object: a layer's kind and its heads, where a layer may have values of its own, share another's
cache, or run several times.
"""

from __future__ import annotations

import ast
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deploy.errors import SpecError
from deploy.resolve.fit import Need
from deploy.resolve.model.shape import shape_of_config

MODELS = Path(transformers.__file__).parent / "models"
TABLES = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
FULL = {
    "full_attention",
    "attention",
    "indexed_attention",
    "hybrid",
    "minimax_m3_sparse",
    "reference_sliding_attention",
}
WINDOW = {"sliding_attention", "chunked_attention", "hybrid_sliding"}
COMPRESSED = {"compressed_sparse_attention", "heavily_compressed_attention"}
"""Kinds of DeepSeek-V4's layers, whose caches test_model_shape.py computes by hand."""

CACHING = FULL | WINDOW
LISTS = ("layer_types", "layers_block_type")
"""Lists that many published files do not have, because the class derives them from other values."""

WITHOUT = ("bamba",)
"""Models that cache nothing by default: a published file names the layers with attention."""


def _generating() -> list[str]:
    """Return the types in the package's tables of generating models, which it imports only with torch."""
    found: set[str] = set()
    for node in ast.parse((MODELS / "auto" / "modeling_auto.py").read_text(encoding="utf-8")).body:
        names = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
        if isinstance(node, ast.Assign) and not {*names}.isdisjoint(TABLES):
            pairs = [pair for pair in ast.walk(node.value) if isinstance(pair, ast.Tuple) and len(pair.elts) == 2]
            found |= {str(pair.elts[0].value) for pair in pairs if isinstance(pair.elts[0], ast.Constant)}
    return sorted(found & {*CONFIG_MAPPING})


def _value(of: Any, *names: str) -> Any:
    values = (getattr(of, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _kind(layer: Any) -> str:
    if _value(layer, "sliding_window") is not None:
        return "sliding_attention"
    return "full_attention" if _value(layer, "attention_chunk_size") is None else "chunked_attention"


def _runs(text: Any, layers: int) -> list[int]:
    """Return the layers whose caches a token fills, in the order of the runs."""
    section, times = range(layers), 1
    if (passes := getattr(text, "loop_num_passes", None)) is not None:
        section, times = range(text.loop_layer_index_start, text.loop_layer_index_end), passes
    elif getattr(text, "recurrent_kv_cache_mode", "") == "per_loop":
        section, times = range(text.n_input_layers, layers - text.n_output_layers), text.n_recurrent_loops
    return [*range(layers), *[*section] * (times - 1)]


def _size(layer: Any, *, windowed: bool) -> int:
    """Return the number of values that a token has in a layer: of keys and values, or of their latent."""
    if _value(layer, "kv_lora_rank") is not None:
        return int(layer.kv_lora_rank + (layer.qk_rope_head_dim or 0))
    own = ("swa_num_key_value_heads", "swa_head_dim") if windowed else ("", "")
    heads = _value(layer, own[0], "num_key_value_heads", "num_attention_heads")
    size = _value(layer, own[1], "head_dim") or layer.hidden_size // layer.num_attention_heads
    return int(heads * (size + ((windowed and _value(layer, "swa_v_head_dim")) or _value(layer, "v_head_dim") or size)))


def held(config: Any) -> tuple[int, int] | None:
    """Return the bytes of a token in layers without and with a window, or None if this does not apply to the model."""
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "num_hidden_layers", None)
    if layers is None or "num_attention_heads" not in text.to_dict():
        return None
    by_layer = [*(getattr(text, "per_layer_config", None) or [text] * layers)]
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or map(_kind, by_layer)
    modes = getattr(text, "kv_sharing_modes", None) or [""] * layers
    kinds = ["" if mode == "reuse" else kind for kind, mode in zip(kinds, modes, strict=False)]
    if not COMPRESSED.isdisjoint(kinds):
        return None
    full = window = 0
    for number in _runs(text, layers):
        if kinds[number] in FULL:
            full += _size(by_layer[number], windowed=False)
        elif kinds[number] in WINDOW:
            window += _size(by_layer[number], windowed=True)
    return 2 * full, 2 * window


def planned(content: Mapping[str, Any]) -> tuple[float, float]:
    """Return the same numbers of `plan`, without the keys of indexers."""
    shape = shape_of_config(content)
    _, full, window = Need(shape, context=1 << 20, windows=True)._bytes(1)
    return full - 2 * shape.extra_values, window


def refused(content: Mapping[str, Any]) -> str:
    """Return why `plan` refuses a file, or "" if it does not."""
    try:
        shape_of_config(content)
    except SpecError as error:
        return str(error)
    return ""


REFUSED = ("num_hidden_layers", "num_attention_heads", "hidden_size")
"""Values under other names: encoders with decoders, and models without attention."""


def _without(content: Any, names: tuple[str, ...]) -> Any:
    if not isinstance(content, dict):
        return content
    return {name: _without(value, names) for name, value in content.items() if name not in names}


def _made() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for name in _generating():
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # a class whose defaults are no model
            continue
        yield name, config, json.loads(json.dumps(config.to_dict(), default=str))


@pytest.fixture(scope="module")
def made() -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield [*_made()]
    logging.disable(logging.NOTSET)


def test_every_class_of_transformers_is_planned_right_or_refused(made: list[tuple[str, Any, dict[str, Any]]]) -> None:
    wrong, right, refusals = [], 0, list[str]()
    for name, config, content in made:
        wanted = held(config)
        if wanted is None or name in WITHOUT:
            continue
        found = refused(content) or planned(content)
        if isinstance(found, str):
            refusals.append(found)
            continue
        if found != pytest.approx(wanted, rel=0.01, abs=2):
            wrong.append((name, found, wanted))
        right += 1
    assert wrong == []
    assert right > 100
    assert {*refusals} <= {f"the model's config.json has no {name}" for name in REFUSED}


def test_a_file_without_the_list_of_layers_is_never_planned_with_too_little(
    made: list[tuple[str, Any, dict[str, Any]]],
) -> None:
    wrong, right = [], 0
    for name, config, content in made:
        short = _without(content, LISTS)
        try:
            wanted = held(type(config).from_dict(json.loads(json.dumps(short))))
            found = planned(short)
        except Exception:  # the class needs the list, or `plan` refuses the file
            continue
        if wanted is None or short == content:
            continue
        right += 1
        if sum(found) < 0.99 * sum(wanted):
            wrong.append((name, found, wanted))
    assert wrong == []
    assert right > 30


ATTENTION = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
TEXT = {**ATTENTION, "num_hidden_layers": 10}
OF_TEXT = 10 * 2 * 8 * 128 * 2
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "two attentions a layer": (
        {**ATTENTION, **LATENT, "model_type": "longcat_flash", "num_layers": 28},
        56 * (512 + 64) * 2,
    ),
    "its 56 attentions": (
        {**ATTENTION, **LATENT, "model_type": "longcat_flash", "num_hidden_layers": 56},
        56 * (512 + 64) * 2,
    ),
    "four steps": ({**TEXT, "model_type": "ouro", "total_ut_steps": 4}, 4 * OF_TEXT),
    "three steps": ({**TEXT, "model_type": "ouro", "total_ut_steps": 3}, 3 * OF_TEXT),
    "Jamba": (
        {**TEXT, "model_type": "jamba", "num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4},
        4 * 2 * 8 * 128 * 2,
    ),
    "Bamba": (
        {**TEXT, "model_type": "bamba", "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]},
        3 * 2 * 8 * 128 * 2,
    ),
    "LFM2": (
        {**TEXT, "model_type": "lfm2", "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
        6 * 2 * 8 * 128 * 2,
    ),
    "Zamba2": (
        {**TEXT, "model_type": "zamba2", "num_key_value_heads": 32, "num_hidden_layers": 38,
         "hybrid_layer_ids": [5, 11, 17, 23, 29, 35]},
        6 * 2 * 32 * 256 * 2,
    ),
    "thinker": ({"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": TEXT, "dtype": "bf16"}}, OF_TEXT),
    "language": ({"model_type": "deepseek_vl_v2", "language_config": TEXT, "vision_config": {}}, OF_TEXT),
    "values of a layer": (
        {**TEXT, "layer_types": ["full_attention"] * 10, "head_dim": 64,
         "per_layer_config": {f"{number:02}": {"head_dim": 128} for number in range(10)}},
        OF_TEXT,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "wanted"), PUBLISHED.values(), ids=PUBLISHED)
def test_what_published_files_say_in_other_words(content: dict[str, Any], wanted: float) -> None:
    assert planned(content) == (wanted, 0)


@pytest.mark.parametrize("number", [0, -1, 10**9, 10**8, 4.5, "3", [], {}, True])
def test_runs_and_numbers_of_layers_are_bounded(number: Any) -> None:
    for name in ("total_ut_steps", "loop_num_passes", "n_recurrent_loops", "attn_layer_period", "loop_layer_index_end"):
        type = "ouro" if name == "total_ut_steps" else "other"
        content = {**TEXT, "model_type": type, "loop_layer_index_end": 5, "loop_num_passes": 2, name: number}
        if name == "n_recurrent_loops":
            del content["loop_num_passes"]
        reason = refused(content)
        assert name in reason if reason else shape_of_config(content).layers <= 64 * 10
