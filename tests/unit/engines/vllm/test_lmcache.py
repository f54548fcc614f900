"""LMCache's variables and vLLM's connector, by LMI's two options."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.vllm import arguments as lmcache
from handler.engines.vllm.arguments import engine_arguments

AUTO, FILE = "option.lmcache_auto_config=true", "option.lmcache_config_file=cache.yaml"


def config(*overrides: str, properties: Path | None = None, model: Path | None = None) -> EngineConfig:
    lines = ["option.llm_engine=vllm", *overrides]
    return EngineConfig(read_config(properties=properties, overrides=lines, environ={}).checked(), model)


def arguments(given: EngineConfig) -> dict[str, Any]:
    return engine_arguments(given, 4, cpu=False)


def test_a_file_lies_beside_serving_properties_or_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties, model = tmp_path / "serving.properties", tmp_path / "model"
    properties.write_text("")
    model.mkdir()
    (model / "cache.yaml").write_text("chunk_size: 256\n")
    for given in (config(FILE, properties=properties, model=model), config(FILE, model=model)):
        assert "kv_transfer_config" not in arguments(given)
        found = lmcache.lmcache_environment(given, {"LMCACHE_CONFIG_FILE": "other"}, 1)
        assert found == {"LMCACHE_CONFIG_FILE": str(model / "cache.yaml")}
    shutil.move(model / "cache.yaml", tmp_path / "cache.yaml")
    beside = lmcache.lmcache_environment(config(FILE, properties=properties, model=model), {}, 1)
    assert beside == {"LMCACHE_CONFIG_FILE": str(tmp_path / "cache.yaml")}
    monkeypatch.chdir(tmp_path)
    assert lmcache.lmcache_environment(config(FILE), {}, 1) == beside


class Usage(NamedTuple):
    free: int


def test_by_itself_it_takes_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    (tmp_path / "b.bin").write_bytes(bytes(10))
    (tmp_path / "memory").write_text(f"MemTotal: 9 kB\nMemAvailable: {100 << 20} kB\n")
    monkeypatch.setattr(lmcache, "_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(500 << 30))
    given = config(AUTO, model=tmp_path)
    assert arguments(given)["kv_transfer_config"] == {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    assert lmcache.lmcache_environment(given, {"LMCACHE_LOCAL_DISK": "file:///mine/"}, 4) == {
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "20",  # four fifths of 100 GiB, for each of four workers
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "100",
        "LMCACHE_LOCAL_DISK": "file:///mine/",
        "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR": "true",
        "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
        "PYTHONHASHSEED": "0",
    }


def test_large_weights_leave_less() -> None:
    assert [lmcache._share(100 << 30, weights << 30, 2) for weights in (0, 10, 40, 60)] == [40, 40, 10, 0]


def test_without_the_options_nothing_is_set() -> None:
    assert lmcache.lmcache_environment(config("option.lmcache_auto_config=false"), {}, 1) == {}
    assert "kv_transfer_config" not in arguments(config("option.lmcache_auto_config=false"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [FILE],
            r"^-o option.lmcache_config_file=cache.yaml: there is no such file$",
        ),
        ([AUTO, FILE], "set the same thing"),
        ([AUTO, "option.enable_expert_parallel=true"], "option.enable_expert_parallel=true"),
        ([AUTO, "option.replicas=2"], "option.replicas=1"),
    ],
)
def test_what_cannot_be_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(config(*lines))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "vllm" or None)
    with pytest.raises(ConfigError, match="pip install lmcache"):
        arguments(config(AUTO))
