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
    with pytest.raises(ConfigError, match=r"has Q5_0 weights, which .* does not read: use .*; or use a file with F16"):
        converted(tmp_path / "small.gguf", tmp_path / "cache", dtype, monkeypatch)
