"""lm-eval's `local-completions`: log-likelihoods by /v1/completions, read by its own parser."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest

from handler.config.config import Config
from handler.engines.base import EngineConfig
from handler.engines.openvino.engine import prepare
from tests.clients.checks import PARIS, PARIS_IDS
from tests.clients.driver import Driver, python_client
from tests.servers import LiveServer

pytestmark = pytest.mark.clients

PAIRS = [(PARIS, " Paris"), (PARIS, " Rome"), (PARIS, " Paris."), ("Two words", " and a third\U0001f642")]


@pytest.fixture(scope="module")
def lm_eval() -> Driver:
    return python_client("lm-eval", "drive_lm_eval")


def likelihoods(driver: Driver, url: str, **options: Any) -> list[tuple[float, bool]]:
    return [tuple(found) for found in driver.generate(url, "", pairs=PAIRS, **options)]


def logits(model: Path, ids: list[int]) -> Any:
    """Of the model itself, by OpenVINO alone: rows of what may follow each id."""
    import openvino

    settings = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    compiled = openvino.Core().compile_model(model / "openvino_model.xml", "CPU", settings)
    size = len(ids)
    given = {
        "input_ids": numpy.array([ids]),
        "attention_mask": numpy.ones((1, size), dtype=numpy.int64),
        "position_ids": numpy.arange(size)[None],
        "beam_idx": numpy.zeros(1, dtype=numpy.int32),
    }
    return compiled(given)["logits"][0]


def test_a_log_likelihood_is_the_models(lm_eval: Driver, openai_server: LiveServer, demo_model: Path) -> None:
    paris, rome, sentence, words = likelihoods(lm_eval, openai_server.url)
    row = logits(prepare(str(demo_model), EngineConfig(Config(dtype="fp32"))), PARIS_IDS)[-1].astype(numpy.float64)
    ids = [token["id"] for token in openai_server.post({"inputs": " Paris Rome"}, "/tokenize").json()]
    wanted = row[ids] - math.log(numpy.exp(row - row.max()).sum()) - row.max()
    assert [paris[0], rome[0]] == pytest.approx(wanted.tolist(), abs=1e-3)
    assert row.argmax() == ids[0]
    assert (paris[1], rome[1], words[1]) == (True, False, False)  # what the model would have said itself
    assert sentence[0] < paris[0]
    assert sentence[1]


def test_prompts_together_are_as_alone(lm_eval: Driver, openai_server: LiveServer) -> None:
    alone = likelihoods(lm_eval, openai_server.url)
    for options in ({"batch_size": 4}, {"num_concurrent": 4}):
        together = likelihoods(lm_eval, openai_server.url, **options)
        assert [greedy for _, greedy in together] == [greedy for _, greedy in alone]
        assert [sum for sum, _ in together] == pytest.approx([sum for sum, _ in alone], abs=1e-3)


def test_it_generates_until(lm_eval: Driver, openai_server: LiveServer) -> None:
    """Its tasks name what ends an answer."""
    found = lm_eval.generate(openai_server.url, "", pairs=[[PARIS], [PARIS]], until=["."], batch_size=2)
    assert found == [" Paris", " Paris"]


def test_a_refusal_is_raised(lm_eval: Driver, openai_server: LiveServer) -> None:
    outcome = lm_eval.call("generate", openai_server.url, "", pairs=PAIRS[:1], model="nobody")
    assert outcome.error == "requests.exceptions.HTTPError"
    assert "404" in outcome.message
