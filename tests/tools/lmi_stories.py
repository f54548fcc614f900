"""Run the client tests of LMI's integration suite on this server: `python -m tests.tools.lmi_stories DIRECTORY`.

DIRECTORY is a checkout of DJL Serving. Each test of its `tests/integration/tests.py` that builds a model and sends it
requests is a story. Here `lmi serve` with the echo engine takes the place of the story's container, on a free port of
loopback. Nothing else of a story changes, apart from what needs a network: its adapters are empty ones, and where it
runs awscurl, each of awscurl's requests is sent once.

Prints a line for each story that does not pass, with its reason, and the counts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import io
import logging
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
import requests

from tests.servers import free_port, serve
from tests.user_files import write_adapter

ADDRESS = "127.0.0.1:8080"
"""Where a story's client looks for its container."""

NOT_HERE = {
    "correctness": "scores a real model's answers to a data set on the internet",
    "handler_performance": "measures a GPU with awscurl's report",
    "vllm_lmcache_performance": "measures a GPU with awscurl's report",
    "djl_long_doc_qa_clean": "measures a GPU, with packages of its own",
    "redis_proc": "starts Redis in Docker",
    "missing-role": "expects an error of LMCache",
}
"""Words of a story that cannot run without a GPU or a network, and why."""

BEYOND_ECHO = (
    "the engine echo does not support it",
    "No module named 'vllm'",
    "cannot be fetched: there are no AWS credentials",
)
"""Words of a refusal that says that the story needs a real model, or S3."""


class Runner(contextlib.ExitStack):
    """Stands for the suite's Runner: the same calls, and `lmi serve` for the container.

    Attributes:
        port: the one that the story's client uses.
        release: LMI's, for answers that differ by it.
        refused: the last refusal of a request, or of a start.
    """

    port = 0
    release = ""
    refused = ""

    def __init__(self, container: str, test_name: str | None = None, download: bool = False) -> None:
        super().__init__()

    def launch(self, env_vars: str | list[str] | None = None, container: str | None = None, cmd: str = "") -> None:
        lines = env_vars.splitlines() if isinstance(env_vars, str) else env_vars or []
        options = ["--engine", "echo", "-o", f"option.lmi_version={self.release}", "--port", str(self.port)]
        try:
            server = self.enter_context(serve("models/test", *options, env=dict(line.split("=", 1) for line in lines)))
            server.wait_ready()
        except (AssertionError, httpx.ConnectError) as error:
            Runner.refused = str(error)
            raise


def post(*args: Any, **more: Any) -> requests.Response:
    """Post as the client does, and keep a refusal's text, which its own error leaves out."""
    response = requests.post(*args, **more)
    if response.status_code >= 300:
        Runner.refused = response.text
    return response


def send(client: ModuleType, data: Any, *_: Any, **more: Any) -> None:
    """Send what awscurl would send, each request once; the first that fails ends the story."""
    headers = dict(header.strip("'").split(": ", 1) for header in more.get("headers", ()))
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda one: client.send_json(one, headers=dict(headers)), data if isinstance(data, list) else [data]
            )
        )


def suite(checkout: Path, directory: Path, port: int) -> ModuleType:
    """Copy the suite, and import it with its client on `port`."""
    shutil.copytree(checkout / "tests" / "integration", directory, dirs_exist_ok=True)
    client_file = directory / "llm" / "client.py"
    client_file.write_text(client_file.read_text().replace(ADDRESS, f"127.0.0.1:{port}"))
    sys.path.insert(0, str(directory))
    sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))  # type: ignore[assignment]
    huggingface_hub.snapshot_download = lambda _, local_dir, **__: write_adapter(Path(local_dir))
    spec = importlib.util.spec_from_file_location("lmi_suite", directory / "tests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    client = module.client
    client.requests = SimpleNamespace(**{**vars(requests), "post": post})
    client.awscurl_run = lambda *args, **more: send(client, *args, **more)
    module.Runner = Runner  # type: ignore[attr-defined]
    return module


def stories(module: ModuleType) -> Iterator[tuple[str, Callable[[], None], str]]:
    """Yield each story's name, its test, and why it cannot run here, else ""."""
    for class_name, cls in inspect.getmembers(module, inspect.isclass):
        for name, test in inspect.getmembers(cls, inspect.isfunction):
            text = inspect.getsource(test)
            if name.startswith("test") and ("client.run(" in text or "prepare." in text):
                found = [why for word, why in NOT_HERE.items() if re.search(rf"\b{word}\b", text)]
                yield f"{class_name}.{name}", getattr(cls(), name), found[0] if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="a checkout of DJL Serving")
    parser.add_argument("-k", metavar="TEXT", default="", help="only the stories with TEXT in their names")
    arguments = parser.parse_args()
    checkout = arguments.directory.resolve()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        Runner.port = free_port()
        module = suite(checkout, Path(directory), Runner.port)
        Runner.release = ".".join(module.serving_version.split(".")[:2])
        logging.disable()  # the client writes each request and answer
        for name, test, why in stories(module):
            if arguments.k not in name:
                continue
            Runner.refused = ""
            importlib.reload(module.prepare)  # a story changes its tables; in LMI's CI each class has its own process
            result = "not run" if why else "pass"
            try:
                if not why:
                    with contextlib.redirect_stdout(io.StringIO()):
                        test()
            except (Exception, SystemExit, pytest.fail.Exception) as error:
                why = " ".join((Runner.refused or str(error) or repr(error)).split())[-300:]
                result = "not run" if any(words in why for words in BEYOND_ECHO) else "fail"
            counts[result] += 1
            if why:
                print(f"{result}: {name}: {why}", flush=True)
    print(f"LMI {Runner.release}: {counts.total()} stories:", ", ".join(f"{n} {what}" for what, n in counts.items()))


if __name__ == "__main__":
    main()
