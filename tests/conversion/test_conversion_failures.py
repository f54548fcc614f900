"""GGUF files whose conversion fails for memory or disk, and results that lie where nothing can be written.

The converter is the real one in its own process; each test takes something away from that process.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from handler.config.config import Config
from handler.config.gguf import check_complete
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.openvino import gguf
from handler.engines.openvino.gguf import writable
from handler.engines.openvino.model import prepare
from tests.checkpoints.small_gguf import write_small


def converted(source: Path, cache: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMI_CACHE", str(cache))
    return prepare(str(source), EngineConfig(Config(dtype=dtype)))


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_a_conversion_that_is_killed_is_refused_and_not_served_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    source, cache = tmp_path / "small.gguf", tmp_path / "cache"
    write_small(source, Kind.Q4_1)
    killed = "import os, signal, threading; threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()\n"
    monkeypatch.setattr(gguf, "SCRIPT", killed + "import time; time.sleep(60) # {!r}")
    with pytest.raises(ConfigError, match=r"small\.gguf.* was killed \(SIGKILL\), as happens when memory runs out"):
        converted(source, cache, dtype, monkeypatch)
    assert [path.name for path in (cache / "converted").iterdir()] == ["lock"]


def test_a_conversion_without_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = tmp_path / "small.gguf", tmp_path / "cache"
    write_small(source, Kind.Q4_1)
    full = (
        "import gguf.quants\n"
        "def dequantize(*arguments): raise MemoryError('Unable to allocate 110. MiB for an array')\n"
        "gguf.quants.dequantize = dequantize\n"
    )
    monkeypatch.setattr(gguf, "SCRIPT", full + gguf.SCRIPT)
    with pytest.raises(ConfigError, match=r"small\.gguf.*out of memory"):
        converted(source, cache, "auto", monkeypatch)
    assert [path.name for path in (cache / "converted").iterdir()] == ["lock"]


@pytest.mark.parametrize("limit", [4 << 10, 100 << 10, 900_000])
def test_a_file_that_cannot_be_written_to_its_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The tokenizer's file is the first that is too long, the graph's, the weights'."""
    source, cache = tmp_path / "small.gguf", tmp_path / "cache"
    write_small(source, Kind.Q4_1)
    short = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    monkeypatch.setattr(gguf, "SCRIPT", short + gguf.SCRIPT)
    with pytest.raises(ConfigError, match=rf"small\.gguf.*no space left in {cache}/converted"):
        converted(source, cache, "auto", monkeypatch)
    assert [path.name for path in (cache / "converted").iterdir()] == ["lock"]


PREPARE = """
import os
from handler.engines.base import EngineConfig
from handler.engines.openvino.model import prepare
print(prepare(os.environ["SOURCE"], EngineConfig()))
"""


def prepared_with(mount: str, source: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """In a mount namespace of its own, where `mount`, a line of shell, has been run."""
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-ec", f'{mount}; exec "$@"', "sh"]
    environment = {**os.environ, "LMI_CACHE": str(cache), "SOURCE": str(source)}
    return subprocess.run([*unshare, sys.executable, "-c", PREPARE], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("kilobytes", [64, pytest.param(1100, marks=pytest.mark.nightly), 1800])
def test_a_full_disk_is_refused_by_name(tmp_path: Path, kilobytes: int) -> None:
    source, cache = tmp_path / "small.gguf", tmp_path / "cache"
    cache.mkdir()
    write_small(source, Kind.Q4_1)
    done = prepared_with(f"mount -t tmpfs -o size={kilobytes}k tmpfs {cache}", source, cache)
    assert f"no space left in {cache}/converted" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("beside", [False, True])
def test_a_result_on_a_read_only_disk_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    """In the cache, or in `converted/` beside the file, as in an image that brings the file and its result."""
    disk = tmp_path / "disk"
    disk.mkdir()
    write_small(disk / "small.gguf", Kind.Q4_1)
    result = converted(disk / "small.gguf", disk, "auto", monkeypatch)
    read_only = f"mount --bind {disk} {disk}; mount -o remount,bind,ro {disk}"
    done = prepared_with(read_only, disk / "small.gguf", tmp_path / "other" if beside else disk)
    assert done.stdout == f"{result}\n", done.stderr
    assert not (tmp_path / "other").exists()


def test_a_read_only_cache_without_the_result_is_named(tmp_path: Path) -> None:
    source, cache = tmp_path / "small.gguf", tmp_path / "cache"
    cache.mkdir()
    write_small(source, Kind.Q4_1)
    done = prepared_with(f"mount --bind {cache} {cache}; mount -o remount,bind,ro {cache}", source, cache)
    assert f"Read-only file system: '{cache}" in done.stderr


def test_a_copy_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF")
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"GG")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(ConfigError, match=rf"no space left in {tmp_path}/made"):
        writable(source, tmp_path / "made")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["lock"]


def test_a_file_of_another_layout_is_still_served_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, Kind.Q8_0, more={"blk.0.ffn_extra.weight": np.full((32, 64), 0.5, np.float32)})
    assert converted(source, tmp_path / "cache", "auto", monkeypatch) == source
    assert "OpenVINO will round the model's weights" in caplog.text
    with pytest.raises(ConfigError, match="does not use all weights"):
        converted(source, tmp_path / "cache", "fp32", monkeypatch)


def test_a_file_of_another_layout_is_not_converted_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, Kind.Q8_0, more={"blk.0.ffn_extra.weight": np.full((32, 64), 0.5, np.float32)})
    caplog.set_level(logging.WARNING)  # an earlier test may have set another
    converted(source, tmp_path / "cache", "auto", monkeypatch)
    [first] = [record.getMessage() for record in caplog.records]
    monkeypatch.setattr(gguf, "run_converter", lambda *_: pytest.fail("converted again"))
    assert converted(source, tmp_path / "cache", "auto", monkeypatch) == source
    assert [record.getMessage() for record in caplog.records] == [first, first]
    monkeypatch.setattr(gguf, "version", lambda package: "another")
    with pytest.raises(pytest.fail.Exception, match="converted again"):
        converted(source, tmp_path / "cache", "auto", monkeypatch)


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_kinds_of_weights_that_genai_does_not_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    write_small(tmp_path / "small.gguf", Kind.Q5_0)
    with pytest.raises(
        ConfigError, match=r"small\.gguf has Q5_0 weights, which OpenVINO GenAI cannot read; take a file"
    ):
        converted(tmp_path / "small.gguf", tmp_path / "cache", dtype, monkeypatch)


READ = (Kind.F16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K)
UNREAD = (Kind.F32, Kind.BF16, Kind.Q5_0, Kind.Q5_1, Kind.TQ2_0, Kind.MXFP4)


@pytest.mark.parametrize("kind", [*READ, *UNREAD], ids=lambda kind: kind.name)
def test_the_header_tells_what_genais_reader_reads(tmp_path: Path, kind: Kind) -> None:
    """The reader itself is asked too, so that a new release that reads more, or less, is noticed."""
    _agree(tmp_path, kind in READ, kind, "llama")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3", "gemma3", "qwen3moe", "granite"])
def test_the_header_tells_which_architectures_genais_reader_reads(tmp_path: Path, architecture: str) -> None:
    _agree(tmp_path, architecture in gguf.ARCHITECTURES, Kind.Q8_0, architecture)


def _agree(tmp_path: Path, is_read: bool, kind: Kind, architecture: str) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, kind, architecture)
    for check in (_check, lambda path: gguf.converted_model(path, tmp_path / "cache", "exact")):
        if is_read:
            check(source)
        else:
            with pytest.raises(ConfigError, match=f"{kind.name} weights|{architecture}|cannot read|is missing"):
                check(source)


def _check(path: Path) -> None:
    gguf.check_readable(path, check_complete(path))


KEYS = "general.file_type tokenizer.ggml.pre tokenizer.ggml.token_type llama.block_count llama.attention.head_count"


@pytest.mark.parametrize("key", KEYS.split())
def test_a_key_that_genais_reader_needs_is_named(tmp_path: Path, key: str) -> None:
    source = tmp_path / "small.gguf"
    write_small(source, Kind.Q8_0)
    source.write_bytes(source.read_bytes().replace(key.encode(), key.encode()[:-1] + b"_"))
    with pytest.raises(ConfigError, match=rf"small\.gguf: its header has no {key}, which OpenVINO GenAI needs"):
        _check(source)
    with pytest.raises(ConfigError):
        gguf.converted_model(source, tmp_path / "cache", "exact")


def test_a_tokenizer_that_genais_reader_does_not_read_is_named(tmp_path: Path) -> None:
    """The reader's own message has a path of the machine that built it."""
    source = tmp_path / "small.gguf"
    write_small(source, Kind.Q8_0)
    source.write_bytes(source.read_bytes().replace(b"gpt2", b"bert"))
    with pytest.raises(ConfigError, match=r"small\.gguf has a tokenizer of the kind bert; OpenVINO GenAI reads gpt2"):
        _check(source)
    with pytest.raises(
        ConfigError, match=r"OpenVINO GenAI cannot read the file: Check 'model == .gpt2.' failed"
    ) as told:
        gguf.converted_model(source, tmp_path / "cache", "exact")
    assert "/home/" not in str(told.value)


def test_a_file_with_its_suffix_in_capitals_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model" / "SMALL.GGUF"
    source.parent.mkdir()
    write_small(source, Kind.Q8_0)
    for name in (source, source.parent):
        assert (converted(name, tmp_path / "cache", "fp32", monkeypatch) / "openvino_model.xml").is_file()
    link = gguf.writable(source, tmp_path / "cache")
    assert (link.name, link.resolve()) == ("SMALL.gguf", source.resolve())
