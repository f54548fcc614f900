"""Plain tokens of llama-server's events, which are read by a shorter way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from handler.core.values import Sampling
from handler.engines.base import EngineRequest
from handler.engines.llamacpp.answer import LlamaCall, read_completion
from handler.engines.remote.servers import Part

EOS = 2
SAMPLING = Sampling(max_new_tokens=3, logprobs=False)
PLAIN: dict[str, Any] = {"index": 0, "content": "a", "tokens": [7], "stop": False, "id_slot": 0, "tokens_predicted": 1}


def call(sampling: Sampling = SAMPLING) -> LlamaCall:
    found = LlamaCall(EngineRequest(1, [5, 6], sampling), {EOS}, 100)
    found.begin()
    return found


def state(found: LlamaCall) -> dict[str, Any]:
    return {name: value for name, value in vars(found).items() if name != "_sampling"}


def event(**fields: Any) -> bytes:
    return json.dumps({**PLAIN, **fields}).encode()


def test_a_plain_token_has_the_same_effect_as_by_the_longer_way() -> None:
    short, long = call(), call()
    for number, id in enumerate((7, 8, 9), 1):
        data = event(tokens=[id], tokens_predicted=number)
        assert short.take_plain(data) == id
        part = Part()
        assert long.take_tokens(read_completion(data), part, None)
        assert part == Part([id], [None])
        assert state(short) == state(long)
    assert short.take_plain(event(tokens=[10], tokens_predicted=4)) is None, "more tokens than the request allows"


def test_an_end_token_that_must_not_end_the_response_yet_goes_the_longer_way() -> None:
    assert call(SAMPLING._replace(ignore_eos=True)).take_plain(event(tokens=[EOS])) == EOS
    assert call().take_plain(event(tokens=[EOS])) is None


@pytest.mark.parametrize(
    "data",
    [
        *(event(tokens=ids) for ids in ([], [7, 8], [True], [7.0], ["7"], [-1], [1 << 31], None, 7, "7", {"7": 7})),
        *(event(stop=stop) for stop in (True, None, 0, "")),
        *(event(tokens_predicted=number) for number in (0, 2, None, "1")),
        event(error={"code": 500}),
        event(prompt_progress={"total": 9}),
        b"[]",
        b"7",
        b"",
        b'{"tokens": [7',
        b'{"tokens": [7], "stop": false}',
        b'{"tokens": [7], "tokens_predicted": 1}',
    ],
)
def test_any_other_event_goes_the_longer_way(data: bytes) -> None:
    found = call()
    before = state(found)
    assert found.take_plain(data) is None
    assert state(found) == before


def test_tokens_with_log_probabilities_go_the_longer_way() -> None:
    for scored in (SAMPLING._replace(logprobs=True), SAMPLING._replace(top_logprobs=2)):
        assert call(scored).take_plain(event()) is None
