"""LoRA adapters as llama-server lists and takes them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.llamacpp import adapters
from handler.engines.llamacpp.adapters import LoadedAdapter, LoadedAdapters
from handler.engines.remote.servers import Failed
from tests.checkpoints.gguf_header import write_header


def test_adapters_are_found_by_path_or_unique_name() -> None:
    loaded = LoadedAdapters(LoadedAdapter(path, 0.5, False) for path in ("/a/x.gguf", "/b/x.gguf", "/b/y.gguf"))
    assert [loaded.find(path) for path in ("/b/x.gguf", "x.gguf", "y.gguf", "/c/y.gguf", "y")] == [
        1,
        None,
        2,
        None,
        None,
    ]
    assert loaded.scales(1) == [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 0.5}, {"id": 2, "scale": 0.0}]
    assert [entry["scale"] for entry in loaded.scales(None)] == [0.0, 0.0, 0.0]
    assert loaded.paths_by_name() == (("x", "/a/x.gguf"), ("y", "/b/y.gguf"))


@pytest.mark.parametrize(
    "data", [b"[{}]", b"7", b"x", b'[{"id": 1, "path": "a", "scale": 1}]', b'[{"id": 0, "path": 1, "scale": 1}]']
)
def test_a_broken_list_of_adapters_is_a_failure(data: bytes) -> None:
    with pytest.raises(Failed, match="does not describe its adapters"):
        LoadedAdapters.read(data)


def test_each_field_of_an_adapter_is_read() -> None:
    entries = [
        {"id": 0, "path": "/a.gguf", "scale": 0.25},
        {"id": 1, "path": "/b.gguf", "scale": 0, "alora_invocation_tokens": []},
        {"id": 2, "path": "/c.gguf", "scale": -2, "alora_invocation_tokens": [1]},
    ]
    loaded = LoadedAdapters.read(json.dumps(entries).encode())
    assert [*loaded] == [("/a.gguf", 0.25, False), ("/b.gguf", 1.0, False), ("/c.gguf", -2.0, True)]
    assert (loaded.has_activated, LoadedAdapters(loaded[:2]).has_activated) == (True, False)
    assert [*LoadedAdapters.read(b"")] == [*LoadedAdapters.read(b"[]")] == [], "an older server has no such route"


def config(directory: Path, **options: Any) -> EngineConfig:
    return EngineConfig(Config(engine_options=options), weights=directory / "model.gguf")


def written(path: Path, kind: str = "adapter") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_header(path, {"general.type": kind})


def test_the_adapters_of_a_server_are_those_beside_the_model_and_of_the_option(tmp_path: Path) -> None:
    beside = tmp_path / "adapters"
    for name in ("b.gguf", "a.gguf", "._a.gguf", "c.txt"):
        written(beside / name)
    elsewhere = written(tmp_path / "elsewhere" / "x.gguf")
    modules = {"a": str(elsewhere), "new": str(elsewhere)}
    assert adapters.files_of(config(tmp_path, lora_modules=modules)) == {}, "option.enable_lora is off"
    assert adapters.files_of(config(tmp_path, enable_lora=True)) == {"a": beside / "a.gguf", "b": beside / "b.gguf"}
    both = adapters.files_of(config(tmp_path, enable_lora=True, lora_modules=modules))
    assert both == {"a": elsewhere, "b": beside / "b.gguf", "new": elsewhere}, "the option goes before the directory"
    without = EngineConfig(Config(engine_options={"enable_lora": True, "lora_modules": modules}))
    assert adapters.files_of(without) == {"a": elsewhere, "new": elsewhere}


def test_the_flags_name_each_file_once_as_the_server_reads_them(tmp_path: Path) -> None:
    names = ["plain", 'a "quoted" one', "with, comma"]
    files = [written(tmp_path / f"{name}.gguf") for name in names]
    modules = {**{path.stem: str(path) for path in files}, "again": str(files[0])}
    flag, paths, *rest = adapters.flags(config(tmp_path, enable_lora=True, lora_modules=modules))
    assert flag == "--lora"
    assert next(csv.reader([paths])) == [str(path) for path in files]
    assert rest == ["--lora-init-without-apply", "--cache-ram", "0"]
    assert adapters.flags(config(tmp_path, enable_lora=True)) == ()
    assert adapters.flags(config(tmp_path, lora_modules=modules)) == ()


def test_each_adapter_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    model, good = written(tmp_path / "other.gguf", "model"), written(tmp_path / "good.gguf")
    modules = {"good": str(good), "gone": str(tmp_path / "gone.gguf"), "wrong": str(model)}
    for check in (adapters.check_files, adapters.flags):
        with pytest.raises(ConfigError) as failed:
            check(config(tmp_path, enable_lora=True, lora_modules=modules))
        words = str(failed.value)
        assert "the adapter gone cannot be used" in words
        assert f"the adapter wrong cannot be used: {model} is not an adapter, but a model" in words
        assert "adapter good" not in words
