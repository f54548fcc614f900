"""A small BERT behind the real server: its vectors over HTTP are transformers', and survive the engine's death."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

from tests.servers import LiveServer, options, serve, wait_for
from tests.unit.engines.pooling.models import GOLDEN, TEXTS, write_model

WANTED = json.loads(GOLDEN.read_text())["bert"]["mean"]
WORDS = [" ".join(f"w{id}" for id in ids[1:-1]) for ids in TEXTS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = write_model(tmp_path_factory.mktemp("bert"), "bert")
    with serve(str(model), *options("option.dtype=fp32", "option.predict_timeout=30")) as found:
        found.wait_ready()
        yield found


def embedded(server: LiveServer, texts: Any) -> Any:
    answer = server.post({"inputs": texts, "normalize": False}, "/embed")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_vectors_over_http_are_those_of_transformers_alone_and_in_company(server: LiveServer) -> None:
    with ThreadPoolExecutor(len(WORDS)) as threads:
        alone = [vector for (vector,) in threads.map(lambda text: embedded(server, text), WORDS)]
    for found in (embedded(server, WORDS), alone):
        numpy.testing.assert_allclose(numpy.array(found), WANTED, atol=1e-4)
    again = embedded(server, [WORDS[2]] * 40)  # more than the engine takes at once
    assert len(again) == 40
    numpy.testing.assert_allclose(numpy.array(again), [WANTED[2]] * 40, atol=1e-4)


def test_an_answer_names_its_tokens_and_its_dimensions(server: LiveServer) -> None:
    answer = server.post({"model": "model", "input": WORDS[:2], "dimensions": 3}, "/v1/embeddings").json()
    assert answer["usage"]["prompt_tokens"] == len(TEXTS[0]) + len(TEXTS[1])
    for row, wanted in zip(answer["data"], WANTED, strict=False):
        first = numpy.array(wanted[:3])
        numpy.testing.assert_allclose(row["embedding"], first / numpy.linalg.norm(first), atol=1e-4)
    refused = server.post({"model": "model", "input": "w5", "dimensions": 65}, "/v1/embeddings")
    assert (refused.status_code, "have 64 numbers" in refused.text) == (400, True)


def test_a_lost_engine_is_started_again(server: LiveServer) -> None:
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_for(lambda: server.metric("lmi_engine_restarts_total") == 1 and server.ping() == 200, 60, "no new engine")
    numpy.testing.assert_allclose(numpy.array(embedded(server, WORDS[0])), [WANTED[0]], atol=1e-4)
