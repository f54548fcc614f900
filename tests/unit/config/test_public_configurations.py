"""Configurations that others publish, and the options that stand in them most often."""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
import pytest

from handler import engines
from handler.config.loader import Reading, read_config
from handler.config.options.engine_arguments import shipped
from handler.config.options.tables import Options
from handler.core.errors import ConfigError, Problem
from handler.engines.base import EngineConfig
from handler.engines.trtllm.arguments import construct, llm_arguments, release_of
from handler.engines.vllm import arguments as lmcache
from handler.engines.vllm.arguments import engine_arguments
from tests.container.images.dockerfile import read
from tests.doubles import tiny, using

# -- public configurations ---------------------------------------------------------------------------------------------
# Configurations of LMI's public guides and notebooks: each starts, or is refused in one round for a reason named here.
#
# `public_configurations.json` has a line for each: its source, LMI's release ("" where the source names none), our
# image, its options, and where it is refused, each refused option with words of the message.


ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "public_configurations.json").read_text())
_IMAGES = {
    name: {key: value for key, value in stage.environment().items() if key.startswith("OPTION_")}
    for name, stage in read()[1].items()
}
_VLLM = (0, 28)  # of AWS's LMI image 0.38.0-lmi29
_GPUS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("row", ROWS, ids=[row["source"] for row in ROWS])
def test_it_starts_or_is_refused_in_one_round(row: dict[str, Any], model: Path, tmp_path: Path) -> None:
    properties, environ = dict(row.get("properties", {})), dict(row.get("environment", {}))
    wanted = row.get("refused", {})
    found = _start(row["image"], properties, environ, model, tmp_path)
    assert {problem.name for problem in found} == set(wanted), found
    for problem in found:
        assert re.search(wanted[problem.name], problem.message), problem
    if found:
        lines = list(properties)
        for problem in found:
            kind, _, place = problem.where.rpartition(" ")
            if kind == "environment variable":
                del environ[place]
            else:
                assert kind == "serving.properties, line"
                del properties[lines[int(place) - 1]]
        assert _start(row["image"], properties, environ, model, tmp_path) == []


def test_enough_of_them_start() -> None:
    named = [row for row in ROWS if "0.28" <= row["lmi"] <= "0.38"]
    assert len(named) >= 25
    assert sum("refused" not in row for row in named) >= 20


def _start(image: str, properties: dict[str, str], environ: dict[str, str], model: Path, home: Path) -> list[Problem]:
    """Go up to the engine's constructor; returns the problems that stop it.

    Names of the hub and of S3 stay as they are, but for the download. For a path of the machine, which SageMaker fills,
    stands a model of our own.
    """
    file = home / "serving.properties"
    file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    reading = read_config(properties=file, environ={**_IMAGES[image], **environ})
    model_id = reading.config.model_id
    if model_id is None or model_id.startswith("/"):
        model_id = str(model)
    problems = list(reading.problems)
    try:
        engines.check(reading.engine, model_id, EngineConfig(reading.config))
    except ConfigError as error:
        problems += error.problems
    if not problems:
        _construct(reading, EngineConfig(reading.config, model))
    return problems


def _construct(reading: Reading, config: EngineConfig) -> None:
    if reading.engine == "vllm":
        _vllm_double()(**engine_arguments(config, _GPUS, cpu=False))
        return
    for version in ("1.2.1", "1.3.0rc29"):
        arguments = llm_arguments(config, _GPUS, release_of(version))
        with using.tensorrt_llm(f"gpus={_GPUS};version={version}"):
            from tensorrt_llm.llm_args import checked

            checked("LLM", construct(arguments))


@functools.cache
def _vllm_double() -> type[pydantic.BaseModel]:
    """Make a class with the names and types of EngineArgs, from the shipped list, that converts no value."""
    types: dict[str, Any] = {
        "bool": pydantic.StrictBool, "int": pydantic.StrictInt, "float": pydantic.StrictFloat | pydantic.StrictInt,
        "str": pydantic.StrictStr, "list": list, "object": dict, "null": type(None), "any": Any,
    }  # fmt: skip
    fields: dict[str, Any] = {}
    for name, argument in shipped("vllm").arguments.items():
        first, last = (tuple(map(int, text.split("."))) for text in (argument.first, argument.last))
        if first <= _VLLM <= last:
            kind = functools.reduce(operator.or_, (types[each] for each in argument.types))
            fields[name] = (kind, None)
    config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())
    return pydantic.create_model("EngineArgs", __config__=config, **fields)


# -- frequent ----------------------------------------------------------------------------------------------------------
# The options that stand most often in LMI's own test configurations, each with a value of them, and its effect here.
#
# Counted in the 892 configurations that the builders of LMI 0.28, 0.29, 0.36 and its main branch write, each builder
# for each of its models, without those of AWS Neuron; most frequent first.


_ADAPTERS = ("option.enable_lora=true",)
_DYNAMIC = ("option.rolling_batch=disable",)
_LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
_EAGLE = {"method": "eagle", "model": "org/draft", "num_speculative_tokens": 4}


class Row(NamedTuple):
    """An option and what it changes.

    Attributes:
        name, value: as serving.properties writes them.
        changes: fields of `Config`, `engine`, and vLLM's arguments as `vllm.NAME`, with their values.
        beside: the lines that the option needs.
        warning: words of the line that it logs; "" where it logs none.
        image: what the image names as the engine.
    """

    name: str
    value: str
    changes: Mapping[str, Any] = {}
    beside: tuple[str, ...] = ()
    warning: str = ""
    image: str = "vllm"


FREQUENT_ROWS = (
    Row("option.model_id", "org/model", {"model_id": "org/model"}),
    Row(
        "option.tensor_parallel_degree",
        "4",
        {"tensor_parallel_degree": "4", "vllm.tensor_parallel_size": 4},
    ),
    Row("engine", "Python", warning="DJL Serving's Java side reads it"),
    Row(
        "option.rolling_batch",
        "vllm",
        {"engine": "vllm", "rolling_batch": "vllm", "max_rolling_batch_size": 256},
        image="",
    ),
    Row(
        "option.entryPoint",
        "djl_python.lmi_vllm.vllm_async_service",
        {
            "engine": "vllm",
            "llm_engine": "vllm",
            "async_mode": True,
            "max_rolling_batch_size": 256,
            "lmi_version": "0.36",
        },
        image="",
    ),
    Row(
        "option.async_mode",
        "true",
        {"rolling_batch": "auto", "async_mode": True, "lmi_version": "0.36"},
        _DYNAMIC,
    ),
    Row(
        "option.max_rolling_batch_size",
        "4",
        {"max_rolling_batch_size": 4, "vllm.max_num_seqs": 4},
    ),
    Row("option.task", "text-embedding", {"task": "text-embedding"}),
    Row("option.gpu_memory_utilization", "0.8", {"vllm.gpu_memory_utilization": 0.8}),
    Row("option.load_format", "dummy", {"vllm.load_format": "dummy"}),
    Row("option.max_new_tokens", "100", warning="the server reads it from each request's parameters"),
    Row(
        "option.output_formatter",
        "jsonlines",
        {"output_formatter": "jsonlines"},
    ),
    Row(
        "option.kv_transfer_config",
        '{"kv_connector":"LMCacheConnectorV1", "kv_role":"kv_both"}',
        {"vllm.kv_transfer_config": _LMCACHE},
    ),
    Row("load_on_devices", "0", warning="DJL Serving's Java side reads it"),
    Row("option.trust_remote_code", "True", {"vllm.trust_remote_code": True}),
    Row(
        "option.enable_lora",
        "true",
        {"vllm.enable_lora": True, "vllm.max_loras": 4, "vllm.max_lora_rank": 16},
    ),
    Row("option.adapters", "adapters", warning="LoRA adapters are loaded from the model's directory adapters"),
    Row(
        "option.lmcache_config_file",
        "FILE",
        {"environment": {"LMCACHE_CONFIG_FILE": "FILE"}},
    ),
    Row("option.max_loras", "2", {"vllm.max_loras": 2}, _ADAPTERS),
    Row("option.max_lora_rank", "64", {"vllm.max_lora_rank": 64}, _ADAPTERS),
    Row(
        "option.max_model_len",
        "8192",
        {"max_model_len": 8192, "vllm.max_model_len": 8192},
    ),
    Row("option.long_lora_scaling_factors", "4.0", warning="vLLM no longer supports long LoRA"),
    Row("option.quantize", "awq", {"vllm.quantization": "awq"}),
    Row("option.dtype", "fp16", {"dtype": "fp16", "vllm.dtype": "float16"}),
    Row("model_loading_timeout", "1800", warning="LMI reads only option.model_loading_timeout"),
    Row("adapter_ids", "['org/adapter']", warning="no option has this name"),
    Row("adapter_names", "['one']", warning="no option has this name"),
    Row("option.limit_mm_per_prompt", '{"image": 4}', {"vllm.limit_mm_per_prompt": {"image": 4}}),
    Row("option.enforce_eager", "True", {"vllm.enforce_eager": True}),
    Row("option.predict_timeout", "240", {"predict_timeout": 240.0}),
    Row(
        "option.enable_prefix_caching",
        "False",
        {"enable_prefix_caching": False, "vllm.enable_prefix_caching": False},
    ),
    Row("normalize", "False", {"normalize": False}),
    Row("option.device_map", "auto"),
    Row("batch_size", "8", {"batch_size": 8, "rolling_batch": "disable"}),
    Row("option.enable_chunked_prefill", "true", {"vllm.enable_chunked_prefill": True}),
    Row(
        "option.speculative_config",
        '{"method":"eagle","model":"org/draft","num_speculative_tokens":4}',
        {"vllm.speculative_config": _EAGLE},
    ),
    Row(
        "option.enable_auto_tool_choice",
        "True",
        warning="requests may always contain tools",
    ),
    Row("option.tool_call_parser", "llama3_json", {"tool_call_parser": "llama3_json"}),
    Row("option.lora_dtype", "float16", {"vllm.lora_dtype": "float16"}, _ADAPTERS),
    Row("pooling", "cls", {"pooling": "cls"}),
)


# -- each of the forty most frequent options has its effect, and no other ----------------------------------------------


@pytest.mark.parametrize("row", FREQUENT_ROWS, ids=[row.name for row in FREQUENT_ROWS])
def test_an_option_has_its_effect_and_no_other(row: Row, tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("")
    line = f"{row.name}={str(file) if row.value == 'FILE' else row.value}"
    before, after = frequent_read(row, *row.beside), frequent_read(row, *row.beside, line)
    old, new = state(before, row.image), state(after, row.image)
    changes = {name: value for name, value in new.items() if old.get(name, ...) != value}
    if "environment" in changes:
        changes["environment"] = dict.fromkeys(changes["environment"], "FILE")
    assert changes == row.changes
    told = set(after.config.warnings) - set(before.config.warnings)
    assert len(told) == bool(row.warning)
    assert all(row.warning in warning and row.name in warning for warning in told)


def test_there_are_forty() -> None:
    assert len({row.name for row in FREQUENT_ROWS}) == 40


def frequent_read(row: Row, *lines: str) -> Reading:
    reading = read_config(overrides=lines, environ={"OPTION_LLM_ENGINE": row.image} if row.image else {})
    assert reading.problems == ()
    return reading


def state(reading: Reading, image: str) -> dict[str, Any]:
    """What the options have come to: the engine, the fields of all engines' options, vLLM's arguments, variables."""
    values = {field.name: getattr(reading.config, field.name) for field in fields(Options)}
    values |= {"engine": reading.engine, "lmi_version": str(reading.config.lmi_version)}
    config = EngineConfig(reading.config, Path("model"))
    arguments = engine_arguments(config, 8, cpu=False) if image == "vllm" else {}
    values |= {f"vllm.{name}": value for name, value in arguments.items()}
    return values | {"environment": lmcache.lmcache_environment(config, {}, 1)}
