"""The engine in front of the real llama-server, with models of architectures that OpenVINO GenAI does not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from handler.config.gguf import check_complete
from handler.core.errors import ConfigError
from handler.core.values import Finish, Sampling
from handler.engines.base import EngineRequest
from handler.engines.llamacpp.pieces import Pieces
from handler.engines.openvino.gguf import check_readable
from tests.checkpoints import architectures
from tests.doubles import tiny
from tests.process.engines.llamacpp import real
from tests.process.engines.llamacpp.real import RealServer
from tests.process.engines.llamacpp.test_llamacpp import REAL, details, engine, own, pieces_of, prompts
from tests.process.engines.openai.test_bad_servers import run

pytestmark = REAL

NUM_TOKENS, NUM_PROMPTS = 24, 40
CLEAR = 0.001
"""Least difference of the first two log-probabilities at each token of a response that the tests compare.

The sums of llama.cpp depend on what else is in a batch. They changed log-probabilities by less than a tenth of this.
"""
SAMPLING = Sampling(max_new_tokens=NUM_TOKENS, logprobs=False)
FLOATS = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
"""Attention is computed in 32 bits, so that a prompt whose beginning is cached has the same log-probabilities."""
NUM_SCORED = 12
ASCII = "root ::= [ -~]+"


class Case(NamedTuple):
    """A prompt, and the server's own response, with what it tells of each token that ends with a character."""

    prompt: list[int]
    answer: dict[str, Any]

    @property
    def ids(self) -> list[int]:
        return list(self.answer["tokens"])

    @property
    def finish(self) -> Finish:
        return Finish.EOS if self.answer["stop_type"] == "eos" else Finish.LENGTH


class Setup(NamedTuple):
    """A server, the directory of its tokenizer, and prompts with clear responses."""

    server: RealServer
    model: Path
    cases: Sequence[Case]


@pytest.fixture(scope="module", params=architectures.ARCHITECTURES)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    model = architectures.make(tmp_path_factory.mktemp(request.param), request.param)
    with real.running(model / "model.gguf", pieces_of(model), 8, *real.EXACT, *FLOATS) as server:
        yield Setup(server, model, clear_cases(server))


def clear_cases(server: RealServer) -> list[Case]:
    """Return the first prompts with different responses, none of whose tokens has another one nearly as likely."""
    found = dict[tuple[int, ...], Case]()
    for prompt in prompts(server, 4 * NUM_PROMPTS):
        case = Case(prompt, own(server, prompt, n_predict=NUM_TOKENS, n_probs=3, cache_prompt=False))
        if len(case.ids) > 2 and min(differences(server, case)) >= CLEAR:
            found.setdefault((*case.ids,), case)
        if len(found) == NUM_PROMPTS:
            return [*found.values()]
    raise AssertionError(f"only {len(found)} prompts have clear responses")


def differences(server: RealServer, case: Case) -> Iterator[float]:
    """Yield by how much each token is more likely than the second one."""
    for place, told in enumerate(scores(server, case)):
        before = [*case.prompt, *case.ids[:place]]
        score = told or own(server, before, n_predict=1, n_probs=2, grammar=ASCII)["completion_probabilities"][0]
        first, second = score["top_logprobs"][:2]
        yield float(first["logprob"] - second["logprob"])


def scores(server: RealServer, case: Case) -> Iterator[dict[str, Any] | None]:
    """Yield the log-probabilities that the server told of each token, or None if it told none.

    It tells none of a token after which the text is incomplete. Special tokens have no text.
    """
    pieces = [b"" if id < len(tiny.SPECIAL) else piece for id, piece in enumerate(server.pieces)]
    told = list(case.answer.get("completion_probabilities", ()))
    for is_incomplete in Pieces(pieces).incomplete(case.ids):
        yield None if is_incomplete else told.pop(0)
    assert not told


def test_openvino_does_not_read_the_file(setup: Setup) -> None:
    file = setup.model / "model.gguf"
    with pytest.raises(ConfigError, match="has the architecture"):
        check_readable(file, check_complete(file))


@pytest.mark.parametrize("at_once", [1, 8])
def test_the_ids_are_the_servers_own(setup: Setup, at_once: int) -> None:
    with engine(setup.model, setup.server) as found:
        for start in range(0, NUM_PROMPTS, at_once):
            cases = dict(zip(count(1), setup.cases[start : start + at_once]))
            for key, case in cases.items():
                found.add(EngineRequest(key, case.prompt, SAMPLING))
            for key, result in run(found, *cases).items():
                assert (result.ids, result.finish) == (cases[key].ids, cases[key].finish), result.error
    assert min(Counter(case.finish for case in setup.cases).values()) > 3, "no response ends early, or all do"


def test_the_log_probabilities_are_the_servers_own(setup: Setup) -> None:
    sampling = SAMPLING._replace(logprobs=True, top_logprobs=3)
    num_compared = 0
    with engine(setup.model, setup.server) as found:
        for case in setup.cases[:NUM_SCORED]:
            result = details(found, sampling, case.prompt)
            assert result["ids"] == case.ids
            num_compared += compared(setup.server, case, result)
    assert num_compared > NUM_SCORED * NUM_TOKENS / 3


def compared(server: RealServer, case: Case, result: dict[str, Any]) -> int:
    """Compare the log-probabilities with those that the server told. Return their number."""
    num_told = 0
    for place, score in enumerate(scores(server, case)):
        assert len(result["tops"][place]) == 3
        if score is None:
            continue
        num_told += 1
        assert result["logprobs"][place] == pytest.approx(score["logprob"], abs=1e-4)
        expected = {top["id"]: pytest.approx(top["logprob"], abs=1e-4) for top in score["top_logprobs"]}
        assert dict(result["tops"][place]) == expected
    return num_told
