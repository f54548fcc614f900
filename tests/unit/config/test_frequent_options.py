"""Each of the forty most frequent options has its effect, and no other."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from handler.config.loader import Reading, read_config
from handler.config.options.tables import Options
from handler.engines.base import EngineConfig
from handler.engines.vllm import arguments as lmcache
from handler.engines.vllm.arguments import engine_arguments
from tests.unit.config.frequent_options import ROWS, Row


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_an_option_has_its_effect_and_no_other(row: Row, tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text("")
    line = f"{row.name}={str(file) if row.value == 'FILE' else row.value}"
    before, after = read(row, *row.beside), read(row, *row.beside, line)
    old, new = state(before, row.image), state(after, row.image)
    changes = {name: value for name, value in new.items() if old.get(name, ...) != value}
    if "environment" in changes:
        changes["environment"] = dict.fromkeys(changes["environment"], "FILE")
    assert changes == row.changes
    told = set(after.config.warnings) - set(before.config.warnings)
    assert len(told) == bool(row.warning)
    assert all(row.warning in warning and row.name in warning for warning in told)


def test_there_are_forty() -> None:
    assert len({row.name for row in ROWS}) == 40


def read(row: Row, *lines: str) -> Reading:
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
