"""Configurations of LMI's public guides and notebooks: each starts, or is refused in one round for a reason named here.

`public_configurations.json` has a line for each: its source, LMI's release ("" where the source names none), our image,
its options, and where it is refused, each refused option with words of the message.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from pathlib import Path
from typing import Any

import pydantic
import pytest

from handler import engines
from handler.config.loader import Reading, read_config
from handler.config.options.engine_arguments import shipped
from handler.core.errors import ConfigError, Problem
from handler.engines.base import EngineConfig
from handler.engines.trtllm.arguments import construct, llm_arguments, release_of
from handler.engines.vllm.arguments import engine_arguments
from tests.container.images.dockerfile import read
from tests.doubles import tiny, using

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
