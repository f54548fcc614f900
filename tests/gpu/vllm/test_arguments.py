"""vLLM's own arguments as options: the installed class's names and types, and their way into vLLM's configuration."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from handler.config.loader import read_config
from handler.config.options.engine_arguments import engine_arguments
from handler.core.errors import ConfigError
from handler.engines.vllm.arguments import construct
from handler.engines.vllm.arguments import engine_arguments as keywords
from handler.serving.engine import engine_spec

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def configured(model: Path, *options: str) -> Any:
    """Make vLLM's configuration of options."""
    import vllm

    given = ["option.llm_engine=vllm", "option.enforce_eager=true", *(f"option.{option}" for option in options)]
    config = replace(engine_spec(read_config(overrides=given, environ={}).checked()).config, model=model)
    made = construct(keywords(config, 1, cpu=True), vllm.EngineArgs)
    return vllm.EngineArgs(**made).create_engine_config()


def test_the_names_are_those_of_the_installed_class() -> None:
    import vllm

    found = engine_arguments("vllm")
    names = {field.name for field in fields(vllm.EngineArgs) if not field.name.startswith("_")}
    assert names == set(found.arguments)
    assert found.source == f"vLLM {vllm.__version__.partition('+')[0]}"


def test_an_argument_reaches_vllm(hf_demo: Path) -> None:
    found = configured(
        hf_demo,
        "seed=7",
        "scheduling_policy=priority",
        "kv_events_config={\"enable_kv_cache_events\": false, \"publisher\": \"null\"}",
        "compilation_config={\"cudagraph_capture_sizes\": [1, 2]}",
        "hf_overrides={\"max_position_embeddings\": 4096}",
        "long_prefill_token_threshold=64",
        "additional_config={\"a\": 1}",
        "engine_args={\"max_num_seqs\": 9}",
    )  # fmt: skip
    assert (found.model_config.seed, found.scheduler_config.max_num_seqs) == (7, 9)
    assert found.scheduler_config.policy == "priority"
    assert found.scheduler_config.long_prefill_token_threshold == 64
    assert found.kv_events_config.publisher == "null"
    assert found.model_config.hf_config.max_position_embeddings == 4096
    assert found.additional_config == {"a": 1}


def test_a_wrong_object_is_refused_by_name(hf_demo: Path) -> None:
    with pytest.raises(ConfigError, match=r"^option\.kv_transfer_config: kv_conector: Unexpected keyword argument$"):
        configured(hf_demo, 'kv_transfer_config={"kv_conector": "x"}')
