"""The log-probabilities in llama-server's responses."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from handler.core.values import Sampling
from handler.engines.base import EngineRequest
from handler.engines.llamacpp.answer import LlamaCall, Tokens, aligned, is_scored, read_scores
from handler.engines.llamacpp.pieces import Pieces
from handler.engines.remote.servers import Failed, Part


def test_log_probabilities_belong_to_their_tokens_if_special_ones_have_no_text() -> None:
    """A special token after half a character leaves it incomplete, so llama-server reports neither."""
    pieces = Pieces([b"\xc3", b"\xa4", b"<|im_start|>", b"a"])
    for ids, reported in (([0, 2, 1, 3], [1, 3]), ([3, 0, 2, 3], [3, 3]), ([0, 2], []), ([2, 3], [2, 3])):
        scores = [{"id": id, "number": number, "top_logprobs": [1]} for number, id in enumerate(reported)]
        found = aligned(Tokens(ids, scores, "", len(ids)), pieces)
        assert [score for score in found if score is not None] == scores
        assert all(score is None or score["id"] == id for id, score in zip(ids, found, strict=True))
    with pytest.raises(Failed, match="log-probabilities that cannot be read"):
        aligned(Tokens([3], cast(Any, [7]), "", 1), pieces)


def entry(id: int, logprob: Any = -1.0) -> dict[str, Any]:
    return {"id": id, "logprob": logprob}


def scored(*alternatives: dict[str, Any]) -> bytes:
    probabilities = [{"id": 1, "top_logprobs": alternatives}]
    return json.dumps({"tokens_predicted": 1, "completion_probabilities": probabilities}).encode()


def test_the_log_probability_of_a_token_is_that_among_the_alternatives() -> None:
    entries = [entry(7, -0.5), entry(8, -1.5), entry(9, -2.5)]
    for count in (1, 2, 3):
        for own in entries:
            found = read_scores(scored(*entries), own["id"], count)
            assert found == {**own, "top_logprobs": entries[:count]}
    assert read_scores(scored(*entries), 6, 3) is None, "it is less likely than all of them"


@pytest.mark.parametrize("data", [b'{"tokens_predicted": 1}', scored({}), b'{"tokens_predicted": 1, "x": 1}', b"[]"])
def test_log_probabilities_that_are_missing_are_a_failure(data: bytes) -> None:
    with pytest.raises(Failed, match="cannot be read"):
        read_scores(data, 7, 1)


def test_tokens_of_a_draft_have_no_log_probability() -> None:
    assert is_scored({"top_logprobs": [entry(1)]})
    assert not is_scored({"top_logprobs": []})
    assert not is_scored(None)


def call(**fields: Any) -> LlamaCall:
    sampling = Sampling(**{"max_new_tokens": 5, "logprobs": True, **fields})
    found = LlamaCall(EngineRequest(1, [5, 6], sampling), {2}, 100)
    found.begin()
    return found


def tokens(ids: list[int], number: int, stop_type: str = "", **more: Any) -> Tokens:
    scores = [{**entry(id, -float(id)), "top_logprobs": [entry(id, -float(id)), entry(99, -9)]} for id in ids]
    return Tokens(ids, more.pop("scores", scores), "", number, stop_type, **more)


def test_each_token_has_its_log_probability_and_as_many_alternatives_as_asked_for() -> None:
    for count in (0, 1, 2):
        found, part = call(top_logprobs=count), Part()
        assert found.num_scores == max(count, 1)
        assert found.next_body()["n_probs"] == max(count, 1)
        assert found.take_tokens(tokens([7, 8], 2), part, None)
        assert found.take_tokens(tokens([9], 3), part, None)
        assert (part.ids, part.logprobs) == ([7, 8, 9], [-7.0, -8.0, -9.0])
        assert part.tops == ([[(id, -float(id)), (99, -9.0)][:count] for id in (7, 8, 9)] if count else [])
    assert call(logprobs=False).num_scores == 0


def test_log_probabilities_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="do not match the tokens"):
        call().take_tokens(tokens([7], 1)._replace(ids=[8]), Part(), None)


def test_a_draft_without_log_probabilities_is_computed_again_in_steps_without_drafts() -> None:
    found, part = call(), Part()
    assert not found.take_tokens(tokens([7, 8], 2, scores=()), part, None)
    assert part.ids == []
    body = found.next_body()
    assert (body["n_predict"], body["stream"]) == (1, False)
    found.begin()
    assert found.take_tokens(tokens([7], 1, "limit"), part, None)
    assert found.finish_reason is None, "the response goes on"
    body = found.next_body()
    assert (body["n_predict"], body["stream"], body["prompt"]) == (2, True, [5, 6, 7])
