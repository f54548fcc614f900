"""vLLM's servers with --reasoning-parser: they enforce structured output only after a thought."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from handler.core.values import Finish, Sampling, StructuredOutput
from handler.engines.base import EngineRequest
from tests import vllm_forks
from tests.process.engines.openai.server import Server
from tests.process.engines.openai.test_bad_servers import engine, run
from tests.process.engines.test_conformance import GRPC_SERVER, start, text
from tests.servers import free_port, http, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]

PROMPT = "The capital of France is"
RULE = StructuredOutput("choice", '["red", "blue"]')
MARKS = {"<file_sep>": "<think>", "<filename>": "</think>"}
"""Unused tokens of the demo model, which the parser needs as marks."""

FLAGS = (*GRPC_SERVER, "--reasoning-parser", "deepseek_r1")


@pytest.fixture(scope="module")
def model(hf_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = shutil.copytree(hf_demo, tmp_path_factory.mktemp("reasoning") / "model")
    words = (model / "tokenizer.json").read_text()
    for mark, other in MARKS.items():
        assert mark in words
        words = words.replace(mark, other)
    (model / "tokenizer.json").write_text(words)
    return model


def test_by_grpc(model: Path, tmp_path: Path) -> None:
    with vllm_forks.grpc_server(tmp_path / "log", "--model", str(model), *FLAGS) as url:
        driver = start("grpc", model, base_url=(url,))
        with contextlib.closing(driver.engine):
            free, ruled = driver.batch(PROMPT, {}, {"structured_output": RULE})
            assert "--reasoning-parser" in str(ruled[-1].error)
            assert text(free)
            assert text(driver.one(f"</think>{PROMPT}", structured_output=RULE)) in ("red", "blue")


@contextlib.contextmanager
def url_server(model: Path, log: Path) -> Iterator[str]:
    port = free_port()
    given = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model", "--model", str(model), *FLAGS)
    process = vllm_forks.start(vllm_forks.become, "vllm.entrypoints.launchers.api_server.entry", given, str(log), {})
    assert process.pid is not None

    def ready() -> bool:
        assert process.is_alive(), log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return http.get(f"http://127.0.0.1:{port}/health").status_code == 200
        return False

    try:
        wait_for(ready, 280, "vLLM does not serve")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.join(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_by_url(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ruled = Sampling(max_new_tokens=8, logprobs=False, structured_output=RULE)
    with url_server(model, tmp_path / "log") as url, engine(cast(Server, SimpleNamespace(url=url))) as found:
        for key, (words, sampling) in enumerate(
            ((PROMPT, ruled), (f"</think>{PROMPT}", ruled), (PROMPT, ruled._replace(structured_output=None))), 1
        ):
            found.add(EngineRequest(key, tokenizer.encode(words), sampling))
        results = run(found, 1, 2, 3)
        refused, after, free = (results[key] for key in (1, 2, 3))
        assert "--reasoning-parser" in refused.error
        assert tokenizer.decode(after.ids, skip_special_tokens=True) in ("red", "blue")
        assert free.finish is Finish.LENGTH
