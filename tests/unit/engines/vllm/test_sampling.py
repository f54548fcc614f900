"""What a request's parameters become as vLLM's, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from handler.core.values import Sampling, StructuredOutput
from handler.engines.vllm.sampling import sampling_arguments, structured_output_arguments
from tests.one_test import in_one_test


def test_a_token_is_forbidden_by_its_weight() -> None:
    found = sampling_arguments(Sampling(bad_token_ids=(3,), logit_bias=((3, 5.0), (4, 5.0))))["logit_bias"]
    assert found[4] == 5.0
    assert found[3] < -1e8


def test_greedy_has_no_sampling() -> None:
    found = sampling_arguments(Sampling(temperature=0.5, top_k=3, top_p=0.5, seed=1))
    assert found["temperature"] == 0.0
    assert not {"top_k", "top_p", "min_p", "seed"} & set(found)


@pytest.mark.parametrize(("seed", "theirs"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_every_seed_fits_a_signed_number(seed: int, theirs: int) -> None:
    assert sampling_arguments(Sampling(do_sample=True, seed=seed))["seed"] == theirs


def test_a_nucleus_of_nothing_is_the_most_likely_token() -> None:
    found = sampling_arguments(Sampling(do_sample=True, top_p=0.0, top_k=9))
    assert (found["top_p"], found["top_k"]) == (1.0, 1)


def test_the_rest_of_the_parameters() -> None:
    sampling = Sampling(
        stop_token_ids=(4,), bad_sequences=("x",), logit_bias=((3, -1.0),), prompt_logprobs=True, ignore_eos=True,
        min_new_tokens=2, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, top_logprobs=3,
    )  # fmt: skip
    assert sampling_arguments(sampling) == {
        "max_tokens": 30, "min_tokens": 2, "repetition_penalty": 1.5, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "ignore_eos": True, "logprobs": 3, "detokenize": False, "temperature": 0.0,
        "stop_token_ids": [4], "bad_words": ["x"], "logit_bias": {3: -1.0}, "prompt_logprobs": 0,
    }  # fmt: skip


@in_one_test(
    ("structured_output", "theirs"),
    [
        (StructuredOutput("json_schema", '{"type": "object"}'), {"json": '{"type": "object"}'}),
        (StructuredOutput("json_object", ""), {"json_object": True}),
        (StructuredOutput("regex", "a+"), {"regex": "a+"}),
        (StructuredOutput("structural_tag", "{}"), {"structural_tag": "{}"}),
        (StructuredOutput("grammar", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (StructuredOutput("choice", '["a", "b"]'), {"choice": ["a", "b"]}),
    ],
)
def test_guides(structured_output: StructuredOutput, theirs: dict[str, Any]) -> None:
    assert structured_output_arguments(structured_output) == theirs
