"""Each sampling parameter against its definition, on models whose logits are known: negative, positive and mixed.

An engine refuses by name what it does not follow.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from handler.core.errors import RefusedByEngine
from handler.core.values import Finish, Sampling
from handler.engines.base import EngineConfig
from handler.engines.openvino.model import prepare
from tests import vllm_forks
from tests.checkpoints.exact import EOS, write_model
from tests.process.engines.test_conformance import OPENVINO, VLLM, Driver, ids, start, text

MODELS: dict[str, tuple[dict[str, float], float]] = {
    "negative": ({"A": -5, "B": -5.3, "C": -5.6, "D": -5.9, EOS: -60}, -50),
    "positive": ({"A": 10, "B": 9.7, "C": 9.4, "D": 9.1, EOS: -60}, -40),
    "mixed": ({"A": 0.5, "B": 0.2, "C": -0.1, "D": -0.4, EOS: -60}, -50),
}
SMALL = 32  # tokens of a greedy answer
DRAWS = 600
TOLERANCE = 0.08
"""Of a token's frequency. The seeds are fixed, so it is the same in each run."""


@pytest.fixture(scope="module", params=MODELS)
def logits(request: pytest.FixtureRequest) -> dict[str, float]:
    return MODELS[request.param][0]


@pytest.fixture(scope="module", params=[OPENVINO, VLLM])
def driver(
    request: pytest.FixtureRequest, logits: dict[str, float], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    default = next(default for own, default in MODELS.values() if own is logits)
    model = write_model(tmp_path_factory.mktemp("exact"), logits, default)
    if request.param == "openvino":
        model = prepare(str(model), EngineConfig())
    with vllm_forks.engines() if request.param == "vllm" else contextlib.nullcontext():
        found = start(request.param, model)
    yield found
    found.engine.close()


def greedy(logits: Mapping[str, float], **parameters: float) -> str:
    """Return the letters that the definitions of the penalties give. None of them is in the prompt."""
    presence, frequency = parameters.get("presence_penalty", 0.0), parameters.get("frequency_penalty", 0.0)
    repetition = parameters.get("repetition_penalty", 1.0)
    counts, said = Counter[str](), ""
    for _ in range(SMALL):

        def punished(letter: str) -> float:
            value = logits[letter]
            if not counts[letter]:
                return value
            value = value / repetition if value > 0 else value * repetition
            return value - presence - frequency * counts[letter]

        said += max(logits, key=punished)
        counts[said[-1]] += 1
    return said


PENALTIES: list[dict[str, float]] = [
    {},
    {"presence_penalty": 0.5},
    {"presence_penalty": 2.0},
    {"presence_penalty": -1.0},
    {"frequency_penalty": 1.0},
    {"frequency_penalty": 0.07},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.04},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 0.4, "frequency_penalty": 0.11},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.13},
]


@pytest.mark.parametrize("parameters", PENALTIES, ids=str)
def test_a_penalty_is_what_its_definition_says(
    driver: Driver, logits: dict[str, float], parameters: dict[str, float]
) -> None:
    if driver.name == "openvino" and len(parameters) > 1 and "repetition_penalty" in parameters:
        [delta] = driver.one("x", max_new_tokens=SMALL, **parameters)
        assert isinstance(delta.error, RefusedByEngine)
        assert "cannot be combined" in str(delta.error)
        return
    assert text(driver.one("x", max_new_tokens=SMALL, **parameters)) == greedy(logits, **parameters)


def probabilities(logits: Mapping[str, float], temperature: float = 1.0) -> dict[str, float]:
    highest = max(logits.values())
    powers = {letter: math.exp((value - highest) / temperature) for letter, value in logits.items()}
    return {letter: power / sum(powers.values()) for letter, power in powers.items()}


def kept(logits: Mapping[str, float], letters: str, temperature: float = 1.0) -> dict[str, float]:
    return probabilities({letter: logits[letter] for letter in letters}, temperature)


# The logits fall by 0.3 from letter to letter: at temperature 1, the probabilities are 0.37, 0.27, 0.20 and 0.15.
DRAWN: list[tuple[dict[str, Any], str]] = [
    ({}, "ABCD"),
    ({"temperature": 0.5}, "ABCD"),
    ({"temperature": 2.0}, "ABCD"),
    ({"top_k": 1}, "A"),
    ({"top_k": 3}, "ABC"),
    ({"top_p": 0.3}, "A"),
    ({"top_p": 0.6}, "AB"),
    ({"top_p": 0.7}, "ABC"),
    ({"min_p": 0.7}, "AB"),
    ({"min_p": 0.5}, "ABC"),
    ({"min_p": 0.5, "temperature": 2.0}, "ABCD"),
    ({"top_k": 3, "temperature": 0.7}, "ABC"),
    ({"top_k": 3, "top_p": 0.6}, "AB"),
]


@pytest.mark.parametrize(("parameters", "letters"), DRAWN, ids=str)
def test_tokens_are_drawn_as_often_as_the_definition_says(
    driver: Driver, logits: dict[str, float], parameters: dict[str, Any], letters: str
) -> None:
    sampling = {"do_sample": True, "seed": 7, "max_new_tokens": DRAWS, "logprobs": False, **parameters}
    said = text(driver.one("x", **sampling))
    wanted = kept(logits, letters, parameters.get("temperature", 1.0))
    found = {letter: said.count(letter) / DRAWS for letter in wanted}
    assert set(said) == set(letters)
    assert {letter: abs(found[letter] - wanted[letter]) < TOLERANCE for letter in wanted} == dict.fromkeys(wanted, True)


def test_a_seed_gives_one_answer_and_another_seed_another(driver: Driver) -> None:
    first, again, other = driver.batch(
        "x", *({"do_sample": True, "max_new_tokens": 60, "seed": seed} for seed in (3, 3, 4))
    )
    assert ids(first) == ids(again) != ids(other)


def test_a_log_probability_is_the_models(driver: Driver, logits: dict[str, float]) -> None:
    """Before temperature and filters, whatever the parameters."""
    wanted = probabilities(logits)
    for sampling in ({}, {"do_sample": True, "seed": 1, "temperature": 0.5, "top_k": 2}):
        tokens = [token for delta in driver.one("x", **sampling) for token in delta.tokens]
        for token in tokens:
            assert token.logprob == pytest.approx(math.log(wanted[token.text]), abs=2e-3)


def test_a_minimum_holds_the_end_back_and_nothing_else(driver: Driver, logits: dict[str, float]) -> None:
    letter = driver.tokenizer.encode("B").ids[-1]
    best = driver.tokenizer.encode("A").ids[-1]
    [delta, *_] = driver.one("x", stop_token_ids=(best,))[-1:]
    assert delta.finish is Finish.STOP
    held = text(driver.one("x", stop_token_ids=(best,), min_new_tokens=5))
    assert held.startswith("BBBBB") or "min_new_tokens" in driver.unsupported
    assert text(driver.one("x", stop_token_ids=(letter,), max_new_tokens=4)) == "AAAA"


def test_every_parameter_of_sampling_is_tried_here() -> None:
    tried = {name for parameters in PENALTIES for name in parameters} | {n for own, _ in DRAWN for n in own}
    drawn = {"temperature", "top_k", "top_p", "min_p"}
    assert (
        tried == {name for name in Sampling._fields if name.endswith("_penalty") and name != "length_penalty"} | drawn
    )
