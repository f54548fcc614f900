"""A small BERT behind the real server: many requests at once, and the death of the engine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

from tests.servers import LiveServer, ServerProcess, options, serve, wait_for
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


def test_requests_at_once_share_steps_and_more_than_the_engine_takes_wait(server: LiveServer) -> None:
    with ThreadPoolExecutor(len(WORDS)) as threads:
        alone = [vector for (vector,) in threads.map(lambda text: embedded(server, text), WORDS)]
    numpy.testing.assert_allclose(numpy.array(alone), WANTED, atol=1e-4)
    numpy.testing.assert_allclose(numpy.array(embedded(server, [WORDS[2]] * 40)), [WANTED[2]] * 40, atol=1e-4)


def test_a_lost_engine_is_started_again(server: ServerProcess) -> None:
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_for(lambda: server.metric("lmi_engine_restarts_total") == 1 and server.ping() == 200, 60, "no new engine")
    numpy.testing.assert_allclose(numpy.array(embedded(server, WORDS[0])), [WANTED[0]], atol=1e-4)
