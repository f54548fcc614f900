"""Output tensors where they meet something uneven: no last token, several tokens a step, rows that are too many."""

from __future__ import annotations

import array
import json
from typing import Any

from handler.core.values import Delta, Extras, Finish, Token
from tests.unit.protocols.answers import CAPABLE, TOKENS, answer, value

ALL = ["output_ids", "sequence_length", "output_log_probs", "cum_log_probs", "generation_logits"]


def lines(script: list[Delta], names: list[str]) -> list[Any]:
    body = {"inputs": "a", "stream": True, "parameters": {"outputs": names}}
    return [json.loads(line)["outputs"] for line in answer("lmi", body, script, CAPABLE).body.splitlines()]


def test_a_step_of_several_tokens_is_a_line_for_each() -> None:
    rows = [[1.0], [2.0], [3.0]]
    script = [
        Delta(1, 0, TOKENS[:2], extras=Extras([[9.0]], rows[:2])),
        Delta(1, 0, TOKENS[2:3], Finish.LENGTH, extras=Extras(None, rows[2:])),
    ]
    found = lines(script, [*ALL, "context_logits"])
    assert [line["output_ids"] for line in found] == [[[304]], [[11157]], [[278]]]
    assert [line["cum_log_probs"] for line in found] == [[[-0.05]], [[-1.3]], [[-1.8]]]
    assert [line["generation_logits"] for line in found] == [[[[[1.0]]]], [[[[2.0]]]], [[[[3.0]]]]]
    assert found[0]["context_logits"] == [[[9.0]]]
    assert not any("context_logits" in line for line in found[1:])


def test_an_end_without_a_token_has_no_output() -> None:
    *_, last = lines([Delta(1, 0, TOKENS[:1]), Delta(1, 0, (), Finish.STOP)], ALL)
    assert last == {
        "output_ids": [[]],
        "sequence_length": [0],
        "output_log_probs": [[[]]],
        "cum_log_probs": [[-0.05]],
        "generation_logits": [[[]]],
    }


def test_rows_of_tokens_behind_a_stop_string_are_left_out() -> None:
    script = [Delta(1, 0, TOKENS[:1], Finish.STOP, extras=Extras(None, [[1.0], [2.0]]))]
    body = {"inputs": "a", "parameters": {"outputs": ["generation_logits"]}}
    assert value("lmi", body, script, CAPABLE)["outputs"] == {"generation_logits": [[[[1.0]]]]}
    assert lines(script, ["generation_logits"]) == [{"generation_logits": [[[[1.0]]]]}]


def test_rows_may_be_arrays_and_tokens_without_a_probability() -> None:
    script = [Delta(1, 0, (Token(1, "x", None, False),), Finish.EOS, extras=Extras([array.array("f", [0.5])], None))]
    body = {"inputs": "a", "parameters": {"return_context_logits": True, "return_log_probs": True}}
    assert value("lmi", body, script, CAPABLE)["outputs"] == {
        "output_log_probs": [[[None]]],
        "cum_log_probs": [[0]],
        "context_logits": [[[0.5]]],
    }


def test_sequences_are_in_the_order_of_the_answer_and_as_long_as_the_longest() -> None:
    low, high = Token(1, "x", -2.0, False), Token(2, "y", -1.0, False)
    script = [
        Delta(1, 0, (low, low), Finish.LENGTH, extras=Extras(None, [[1.0, 0.0], [2.0, 0.0]])),
        Delta(1, 1, (high,), Finish.STOP, extras=Extras(None, [[3.0, 0.0]])),
    ]
    body = {"inputs": "a", "parameters": {"n": 2, "do_sample": True, "outputs": ALL}}
    assert value("lmi", body, script, CAPABLE)["outputs"] == {
        "output_ids": [[2, -1], [1, 1]],
        "sequence_length": [1, 2],
        "output_log_probs": [[[-1.0, 0.0], [-2.0, -2.0]]],
        "cum_log_probs": [[-1.0, -4.0]],
        "generation_logits": [[[[3.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [2.0, 0.0]]]],
    }
