"""The sizes and the environment of a llama-server that the engine starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from handler.config import gguf
from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Task
from handler.engines.base import EngineConfig
from handler.engines.llamacpp import child
from handler.engines.llamacpp.child import Sizes
from tests.checkpoints import byte_gguf
from tests.checkpoints.gguf_header import Value, write_header
from tests.one_test import in_one_test

MIB, GIB = 1 << 20, 1 << 30
WIDTH = "clip.vision.projection_dim"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_gguf.make(tmp_path_factory.mktemp("bytes")) / "model.gguf"


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> int:
    """A token takes 128 KiB, as of a model of 8 billion weights."""
    monkeypatch.setattr(child, "cache_bytes", lambda values: 128 << 10)
    return 128 << 10


def config(file: Path, **options: Any) -> EngineConfig:
    return EngineConfig(Config(**{"max_rolling_batch_size": 8, **options}, engine_options={}), weights=file)


def test_a_token_takes_its_keys_and_values_in_all_layers(demo_model: Path) -> None:
    assert child.cache_bytes(gguf.check_complete(demo_model).values) == 2 * 30 * 3 * (64 + 64)


def test_a_header_may_list_the_heads_of_each_layer() -> None:
    values: dict[bytes, object] = {
        b"general.architecture": b"x",
        b"x.block_count": 3,
        b"x.attention.head_count": 8,
        b"x.attention.head_count_kv": [2, 0, 4],
        b"x.attention.key_length": 100,
        b"x.attention.value_length": 50,
    }
    assert child.cache_bytes(values) == 2 * (2 + 4) * (100 + 50)
    assert child.cache_bytes({}) == 0


@in_one_test(
    ("free", "options", "found"),
    [
        # All contexts fit: each slot has its own cache.
        (64 * GIB, {}, Sizes(8, 8 * 2048, False, 8192)),
        (64 * GIB, {"max_model_len": 100, "max_rolling_batch_size": 3}, Sizes(3, 300, False, 8192)),
        # They do not: the slots share what fits into 4 GiB, half of the memory, or kv_cache_gib.
        (64 * GIB, {"max_rolling_batch_size": 32}, Sizes(32, 32768, True, 8192)),
        (2 * GIB, {}, Sizes(8, 8192, True, 512)),
        (64 * GIB, {"kv_cache_gib": 1}, Sizes(8, 8192, True, 8192)),
        (None, {"kv_cache_gib": 3, "max_rolling_batch_size": 16}, Sizes(16, 24576, True, 8192)),
        # What an operator asks for is tried, even if it may not fit.
        (64 * GIB, {"max_model_len": 1 << 17}, Sizes(8, 1 << 17, True, 8192)),
        (1 * MIB, {}, Sizes(8, 2048, True, 0)),
        (64 * GIB, {"enable_prefix_caching": False}, Sizes(8, 8 * 2048, False, 0)),
    ],
)
def test_the_caches_fit_into_the_memory(
    file: Path, token: int, free: int | None, options: dict[str, Any], found: Sizes
) -> None:
    total = None if free is None else free + file.stat().st_size
    assert child.sizes(config(file, **options), gguf.check_parts(file), total) == found
    assert found.num_tokens * token <= max(free or 64 * GIB, 2048 * token) or "max_model_len" in options


def test_a_container_may_have_less_memory_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tmp_path / "meminfo"
    machine.write_text("MemTotal: 8 kB\nMemAvailable:    2048 kB\n")
    monkeypatch.setattr(child, "_MEMORY", machine)
    monkeypatch.setattr(child, "_CGROUP", tmp_path)
    assert child.free_memory() == 2 * MIB
    (tmp_path / "memory.current").write_text("100\n")
    for limit, free in (("max", 2 * MIB), ("1000", 900), ("50", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert child.free_memory() == free
    machine.unlink()
    assert child.free_memory() is None


def test_a_process_may_have_fewer_cores_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(child, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    cores = set(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert child.num_threads() is None
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert child.num_threads() == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    cores -= {0, 1, 2}
    assert child.num_threads() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert child.num_threads() == 3


def test_large_models_compute_fewer_tokens_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "num_threads", lambda: 2)
    for size, tokens in ((2 * GIB, 1024), (2 * GIB + 1, 512)):
        monkeypatch.setattr(gguf, "size", lambda first, parts, size=size: size)
        assert child.step_tokens(config(file), 1) == tokens
        assert child.step_tokens(config(file, max_num_batched_tokens=64), 1) == 64
    monkeypatch.setattr(child, "num_threads", lambda: None)  # all of the machine's cores
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert child.step_tokens(config(file), 1) == 1024


def test_a_start_reads_the_header_of_a_model_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, check = list[Path](), gguf.check_parts

    def counted(path: Path) -> gguf.Header:
        reads.append(path)
        return check(path)

    monkeypatch.setattr(gguf, "check_parts", counted)
    assert child.environment(config(file), "key")["LLAMA_ARG_BATCH"] == "1024"
    assert not child.has_projector(config(file))
    assert reads == [file]


def with_flags(file: Path, *flags: str) -> EngineConfig:
    return EngineConfig(Config(engine_options={"llama_server_args": flags}), weights=file)


@in_one_test(
    ("flags", "is_beside", "reads_images"),
    [
        ((), True, True),
        ((), False, False),
        (("--mmproj", "other.gguf"), False, True),
        (("-mm", "other.gguf"), True, True),
        (("--mmproj_url", "https://a/other.gguf"), False, True),
        (("--no-mmproj",), True, False),
        (("--no_mmproj_auto",), True, False),
        (("--threads", "2"), True, True),
    ],
)
def test_flags_replace_or_disable_the_projector_beside_the_file(
    flags: tuple[str, ...], is_beside: bool, reads_images: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = file.with_name("mmproj.gguf") if is_beside else None
    monkeypatch.setattr(child, "find_projector", lambda path: beside)
    given = with_flags(file, *flags)
    assert child.has_projector(given) is reads_images
    is_used = is_beside and not any("mm" in flag for flag in flags)
    assert child.projector_variables(given) == ({"LLAMA_ARG_MMPROJ": str(beside)} if is_used else {})


def test_a_server_inherits_no_keys_and_no_settings(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "HF_TOKEN": "hf_x",
        "OPENAI_API_KEY": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "LLAMA_ARG_PORT": "1",
        "AIP_MODE": "P",
    }
    for name, value in {**own, "CUDA_VISIBLE_DEVICES": "1", "LMI_LOG_LEVEL": "info"}.items():
        monkeypatch.setenv(name, value)
    found = child.environment(config(file, max_num_batched_tokens=64), "the-key")
    assert not {*own, "LMI_LOG_LEVEL"} & {*found}
    expected = {
        "LLAMA_API_KEY": "the-key",
        "CUDA_VISIBLE_DEVICES": "1",
        "LLAMA_ARG_BATCH": "64",
        "LLAMA_ARG_OFFLINE": "1",
    }
    assert expected.items() <= found.items()
    assert (found["LLAMA_ARG_N_PARALLEL"], found["LLAMA_ARG_LOG_VERBOSITY"]) == ("8", "2")
    monkeypatch.setenv("LMI_LOG_LEVEL", "debug")
    assert child.environment(config(file), "the-key")["LLAMA_ARG_LOG_VERBOSITY"] == "3"


@in_one_test(
    ("projectors", "found"),
    [
        ({"a": {}}, "a"),
        ({"a": {"general.architecture": "llama"}}, None),
        ({"a": {WIDTH: 9}, "b": {"general.basename": "other"}}, None),
        ({"a": {WIDTH: 9}, "b": {"general.basename": "own"}}, "b"),
        ({"a": {"general.file_type": 0}, "b": {"general.file_type": 1}, "c": {}}, "b"),
        ({"b": {}, "a": {}}, "a"),
    ],
)
def test_a_projector_is_of_the_model_and_preferably_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, projectors: dict[str, dict[str, Value]], found: str | None
) -> None:
    values = {b"general.architecture": b"llama", b"llama.embedding_length": 8, b"general.basename": b"own"}
    monkeypatch.setattr(gguf, "check_parts", lambda file: gguf.Header(values, ()))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    for name, more in projectors.items():
        write_header(tmp_path / f"{name}.gguf", {"general.architecture": "clip", WIDTH: 8, **more})
    assert child.find_projector(tmp_path / "model.gguf") == (None if found is None else tmp_path / f"{found}.gguf")
    for name in projectors:
        (tmp_path / f"{name}.gguf").unlink()


@in_one_test(
    ("flags", "verbosity"),
    [
        ((), "2"),
        (("-t", "1"), "2"),
        (("-v",), "3"),
        (("--verbose",), "3"),
        (("-lv", "4"), "3"),
        (("--verbosity", "4"), "3"),
    ],
)
def test_flags_may_ask_for_a_longer_log(file: Path, flags: tuple[str, ...], verbosity: str) -> None:
    assert child.environment(with_flags(file, *flags), "the-key")["LLAMA_ARG_LOG_VERBOSITY"] == verbosity


@in_one_test(
    ("task", "pooling", "found"),
    [
        (Task.GENERATION, "auto", {}),
        (Task.EMBEDDING, "auto", {"EMBEDDINGS": "1"}),
        (Task.EMBEDDING, "mean", {"EMBEDDINGS": "1", "POOLING": "mean"}),
        (Task.RERANK, "auto", {"EMBEDDINGS": "1", "RERANKING": "1"}),
    ],
)
def test_a_server_pools_as_the_task_and_the_option_say(
    file: Path, task: Task, pooling: str, found: dict[str, str]
) -> None:
    variables = child.environment(replace(config(file, pooling=pooling), task=task), "the-key")
    names = ("EMBEDDINGS", "POOLING", "RERANKING")
    assert {name: variables[f"LLAMA_ARG_{name}"] for name in names if f"LLAMA_ARG_{name}" in variables} == found


def test_a_file_on_the_hub_is_downloaded_with_its_parts_and_projector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "download_gguf", lambda *given: given)
    asked: object = child.download("owner/model/a-00001-of-00002.gguf", "v1")
    parts = "a-[0-9][0-9][0-9][0-9][0-9]-of-00002.gguf"
    assert asked == ("owner/model", "a-00001-of-00002.gguf", "v1", parts, child.PROJECTOR_PATTERN)
    monkeypatch.setattr(
        child, "without_file", lambda model_id, revision, problem: ConfigError(f"{problem}: {revision}")
    )
    with pytest.raises(ConfigError, match="owner/model: the llamacpp engine serves one file of a hub model: v1"):
        child.download("owner/model", "v1")


@pytest.mark.parametrize(
    "flag",
    [
        *("-r", "--reverse-prompt", "--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file"),
        *("--spec-synth-len", "--spec-synth-rates", "--json_schema_file"),
    ],
)
def test_flags_that_change_responses_are_refused_by_name(flag: str) -> None:
    config = EngineConfig(Config(engine_options={"llama_server_args": (flag, "x")}))
    with pytest.raises(ConfigError, match=f"{flag.replace('_', '-')} is refused: "):
        child.check_flags(config)
