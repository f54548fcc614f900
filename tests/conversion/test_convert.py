"""Conversion of Hugging Face checkpoints, with the converter (torch, optimum-intel) played by a small function.

The double stands in for a package of 6 GB; what the real one makes was compared with transformers when
tests/golden/engines/smollm2_f32_greedy.json was made (`exact`).
"""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handler.core import child_processes
from handler.core.errors import ConfigError
from handler.core.values import Task
from handler.engines import downloads
from handler.engines.openvino import ir_files as module
from handler.engines.openvino.ir_files import convert


class Converter:
    """What `child_processes.run` is replaced by: writes `files` where the command line says, then ends as told."""

    def __init__(self) -> None:
        self.files: tuple[str, ...] = downloads.NEEDED
        self.returncode = 0
        self.stderr = b""
        self.before_end: Callable[[], None] = lambda: None
        self.runs: list[tuple[list[str], dict[str, Any]]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        self.runs.append((command, options))
        target = Path(command[-1])
        target.mkdir()
        for name in self.files:
            (target / name).write_text(name)
        self.before_end()
        return subprocess.CompletedProcess(command, self.returncode, b"", self.stderr)


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    double = Converter()
    monkeypatch.setattr(child_processes, "run", double)
    monkeypatch.setattr(module, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    return double


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "gpt_neox"}')
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def results(cache: Path) -> list[Path]:
    """All that conversions left behind, finished or not."""
    return [path for path in cache.iterdir() if path.name != "lock"]


def test_converts_once_and_reuses(converter: Converter, source: Path, cache: Path) -> None:
    target = convert(source, cache)
    assert target.parent == cache
    assert {path.name for path in target.iterdir()} == {*downloads.NEEDED, downloads.SOURCE}
    assert convert(source, cache) == target
    assert len(converter.runs) == 1
    assert results(cache) == [target]


def test_the_converter_runs_apart_and_offline(converter: Converter, source: Path, cache: Path) -> None:
    convert(source, cache)
    [(command, options)] = converter.runs
    assert command[:2] == [sys.executable, "-c"]
    assert command[3] == str(source)
    assert options["env"]["HF_HUB_OFFLINE"] == "1"
    assert options["env"]["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_file_is_converted_again(converter: Converter, source: Path, cache: Path, name: str) -> None:
    before = convert(source, cache)
    (source / name).write_text('{"something": "else"}')
    assert convert(source, cache) != before
    assert len(converter.runs) == 2


def test_a_changed_config_of_the_same_size_and_time_counts(converter: Converter, source: Path, cache: Path) -> None:
    before, config = convert(source, cache), source / "config.json"
    times = config.stat()
    config.write_text(config.read_text().replace("neox", "bird"))
    os.utime(config, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert convert(source, cache) != before


def test_a_moved_checkpoint_is_the_same(converter: Converter, source: Path, cache: Path) -> None:
    before = convert(source, cache)
    assert convert(source.rename(source.with_name("moved")), cache) == before


@pytest.mark.parametrize("missing", ["optimum", "optimum.intel"])
def test_without_the_extra_the_refusal_says_what_to_install(
    converter: Converter, monkeypatch: pytest.MonkeyPatch, source: Path, cache: Path, missing: str
) -> None:
    spec = importlib.machinery.ModuleSpec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == missing else spec(name, None))
    with pytest.raises(ConfigError, match=r"pip install .*\[convert\]") as refusal:
        convert(source, cache)
    assert str(source) in str(refusal.value)
    assert not converter.runs
    assert not cache.exists()


def test_an_earlier_result_needs_no_extra(
    converter: Converter, monkeypatch: pytest.MonkeyPatch, source: Path, cache: Path
) -> None:
    target = convert(source, cache)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert convert(source, cache) == target


def test_a_failure_shows_the_end_of_the_output_and_leaves_nothing(
    converter: Converter, source: Path, cache: Path
) -> None:
    converter.returncode, converter.stderr = 1, b"x" * 10_000 + b"\nValueError: no such architecture\xff\n"
    with pytest.raises(ConfigError, match="ValueError: no such architecture") as failure:
        convert(source, cache)
    assert "exit status 1" in str(failure.value)
    assert len(str(failure.value)) < 3000
    assert results(cache) == []
    converter.returncode = 0
    assert convert(source, cache).is_dir()


def test_a_result_without_a_tokenizer_is_a_failure(converter: Converter, source: Path, cache: Path) -> None:
    converter.files, converter.stderr = ("openvino_model.xml",), b"tokenizer models won't be generated"
    with pytest.raises(ConfigError, match=r"no openvino_tokenizer\.xml, openvino_detokenizer\.xml") as failure:
        convert(source, cache)
    assert "won't be generated" in str(failure.value)
    assert results(cache) == []


def test_an_interrupt_half_way_leaves_nothing(converter: Converter, source: Path, cache: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    converter.before_end = interrupt
    with pytest.raises(KeyboardInterrupt):
        convert(source, cache)
    assert results(cache) == []


KILLED = """
import sys
from pathlib import Path
from handler.engines.openvino import ir_files as convert
convert.CONVERTER = '''
import os, signal, sys
os.mkdir(sys.argv[2])
open(sys.argv[2] + "/openvino_model.xml", "w").close()
os.kill(os.getppid(), signal.SIGKILL)
'''
convert.find_spec = lambda name: True
convert.convert(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_kill_half_way_leaves_nothing_that_counts_in_convert(source: Path, cache: Path) -> None:
    """SIGKILL gives no chance to tidy up: the next conversion does, and never takes the half for the whole."""
    path = os.pathsep.join(filter(None, [str(Path(module.__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(source), str(cache)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
    )
    assert killed.returncode == -9, killed.stderr
    assert [path.suffix for path in results(cache)] == [".partial"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
        patch.setattr(child_processes, "run", Converter())
        target = convert(source, cache)
    assert {path.name for path in target.iterdir()} == {*downloads.NEEDED, downloads.SOURCE}
    assert results(cache) == [target]


def test_workers_that_start_together_convert_once(converter: Converter, source: Path, cache: Path) -> None:
    targets: list[Path] = []
    threads = [threading.Thread(target=lambda: targets.append(convert(source, cache))) for _ in range(4)]
    converter.before_end = lambda: time.sleep(0.1)  # long enough for the others to come to the lock
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert targets == [targets[0]] * 4
    assert len(converter.runs) == 1


def test_the_cache_may_be_a_relative_path(
    converter: Converter, monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    target = convert(Path(source.name), Path("cache"))
    assert target.is_dir()
    [(command, _)] = converter.runs
    assert command[3:] == [str(source.resolve()), str(tmp_path.resolve() / "cache" / f"{target.name}.partial")]


@pytest.mark.parametrize(
    ("task", "export"), [(Task.EMBEDDING, "feature-extraction"), (Task.RERANK, "text-classification")]
)
def test_a_model_for_another_task_has_a_conversion_of_its_own(
    converter: Converter, source: Path, cache: Path, task: Task, export: str
) -> None:
    text = convert(source, cache)
    converter.files = ("openvino_model.xml", "tokenizer.json")  # no tokenizer of OpenVINO's
    found = convert(source, cache, task)
    assert found != text
    assert convert(source, cache, task) == found
    [_, (command, _)] = converter.runs
    assert f'task="{export}"' in command[2]
