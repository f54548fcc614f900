"""From Sampling to SamplingParams' keywords, and from results to outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from handler.core.values import Extras, Finish, Sampling, StructuredOutput
from handler.engines.base import EngineConfig, EngineRequest, Step
from handler.engines.structured_output.validator import StructuredOutputValidator
from handler.engines.trtllm.engine import TrtRequest
from handler.engines.trtllm.sampling import (
    ModelProperties,
    guided_decoding_arguments,
    misses_stops,
    sampling_arguments,
    structured_output_check,
)
from tests.one_test import in_one_test

# -- from Sampling to SamplingParams' keywords -------------------------------------------------------------------------


TORCH = ModelProperties(vocabulary=10, eos=frozenset({3, 4}), tokenizer_eos=3, torch_sampler=True)
TRTLLM = ModelProperties(vocabulary=10, eos=frozenset({3}), tokenizer_eos=3, torch_sampler=False)
PLAIN = {
    "max_tokens": 30,
    "detokenize": False,
    "include_stop_str_in_output": True,
    "end_id": 3,
    "pad_id": 3,
    "stop_token_ids": [4],
    "logprobs": 1,
}
GREEDY = {**PLAIN, "top_k": 1}
SAMPLED = {**PLAIN, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0}


@in_one_test(
    ("sampling", "wanted"),
    [
        ({}, GREEDY),
        ({"max_new_tokens": 5}, {**GREEDY, "max_tokens": 5}),
        ({"temperature": 0.5, "top_k": 4, "top_p": 0.5, "seed": 7}, GREEDY),  # without do_sample
        ({"do_sample": True}, SAMPLED),
        ({"do_sample": True, "temperature": 0.5, "seed": 7}, {**SAMPLED, "temperature": 0.5, "seed": 7}),
        ({"do_sample": True, "top_k": 4, "top_p": 0.5}, {**SAMPLED, "top_k": 4, "top_p": 0.5}),
        ({"do_sample": True, "min_p": 0.1}, {**SAMPLED, "min_p": 0.1}),
        ({"do_sample": True, "seed": 2**64 - 1}, {**SAMPLED, "seed": 2**64 - 1}),
        ({"do_sample": True, "temperature": 0.0}, GREEDY),
        ({"do_sample": True, "top_p": 0.0}, GREEDY),
        ({"do_sample": True, "top_k": 1}, GREEDY),
        ({"do_sample": True, "temperature": 1e-30}, GREEDY),
        ({"do_sample": True, "top_k": 10}, SAMPLED),
        ({"do_sample": True, "top_k": 2**31 - 1}, SAMPLED),
        ({"repetition_penalty": 1.2}, {**GREEDY, "repetition_penalty": 1.2}),
        ({"presence_penalty": -0.5}, {**GREEDY, "presence_penalty": -0.5}),
        ({"frequency_penalty": 0.5}, {**GREEDY, "frequency_penalty": 0.5}),
        ({"no_repeat_ngram_size": 3}, {**GREEDY, "no_repeat_ngram_size": 3}),
        ({"stop": ("x",)}, GREEDY),  # the batcher's business
        ({"stop_token_ids": (7, 5)}, {**GREEDY, "stop_token_ids": [4, 5, 7]}),
        ({"stop_token_ids": (3,)}, {**GREEDY, "stop_token_ids": [3, 4]}),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, {**GREEDY, "end_id": -1, "stop_token_ids": [7]}),
        ({"top_logprobs": 5}, {**GREEDY, "logprobs": 5}),
        ({"logprobs": False, "top_logprobs": 5}, {**GREEDY, "logprobs": 5}),
        ({"logprobs": False}, {name: value for name, value in GREEDY.items() if name != "logprobs"}),
        ({"prompt_logprobs": True}, {**GREEDY, "return_context_logits": True}),
        ({"return_context_logits": True}, {**GREEDY, "return_context_logits": True}),
        ({"return_generation_logits": True}, {**GREEDY, "return_generation_logits": True}),
        ({"logit_bias": ((2, 1.5), (0, -3.0))}, {**GREEDY, "embedding_bias": [-3.0, 0, 1.5, 0, 0, 0, 0, 0, 0, 0]}),
        ({"bad_token_ids": (1,)}, {**GREEDY, "embedding_bias": [0, -1e30, 0, 0, 0, 0, 0, 0, 0, 0]}),
        ({"structured_output": StructuredOutput("regex", "a+")}, {**GREEDY, "guided_decoding": {"regex": "a+"}}),
        (
            {"structured_output": StructuredOutput("structural_tag", "{}")},
            {**GREEDY, "guided_decoding": {"structural_tag": "{}"}},
        ),
    ],
)
def test_torch_sampler(sampling: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = sampling_arguments(Sampling(**{"seed": 0, **sampling}), TORCH)
    bias, wanted_bias = found.pop("embedding_bias", None), wanted.get("embedding_bias")
    assert found == {name: value for name, value in wanted.items() if name != "embedding_bias"}
    assert (bias is None) == (wanted_bias is None)
    if bias is not None:
        assert bias.dtype == "float32"
        assert bias.tolist() == pytest.approx(wanted_bias)


OTHER = {name: value for name, value in GREEDY.items() if name not in ("logprobs", "stop_token_ids")}


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        ({}, OTHER),
        ({"bad_token_ids": (1,)}, {**OTHER, "bad_token_ids": [1]}),
        (
            {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
            {
                **{name: value for name, value in OTHER.items() if name != "top_k"},
                **{"use_beam_search": True, "n": 3, "best_of": 3, "length_penalty": 2.0, "early_stopping": 1},
                "logprobs": 1,
            },
        ),
    ],
)
def test_trtllm_sampler(sampling: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert sampling_arguments(Sampling(**sampling), TRTLLM) == wanted


@pytest.mark.parametrize(
    ("stops", "end_id", "others"), [((7,), 7, None), ((8, 5, 7), 7, [5, 8]), ((7, 7), 7, None), ((), -1, None)]
)
def test_a_clients_own_end_token_ends_beams_as_the_models_would(
    stops: tuple[int, ...], end_id: int, others: list[int] | None
) -> None:
    found = sampling_arguments(Sampling(num_beams=3, ignore_eos=True, stop_token_ids=stops), TRTLLM)
    assert (found["end_id"], found["pad_id"], found.get("stop_token_ids")) == (end_id, 3, others)


def test_forbidden_words_leave_the_end_to_the_engines_tokenizer() -> None:
    found = sampling_arguments(Sampling(bad_sequences=("a b", "c")), TRTLLM)
    assert (found["bad"], found["ignore_eos"]) == (["a b", "c"], False)
    assert "end_id" not in found
    endless = sampling_arguments(Sampling(bad_sequences=("a",), ignore_eos=True, stop_token_ids=(5,)), TRTLLM)
    assert endless["ignore_eos"]
    assert "stop_token_ids" not in endless  # newer versions would not look for them
    assert misses_stops(Sampling(bad_sequences=("a",), ignore_eos=True, stop_token_ids=(5,)), TRTLLM)


@pytest.mark.parametrize(
    ("eos", "tokenizer_eos", "end_id", "others"),
    [({3, 4}, 4, 4, {3}), ({3, 4}, None, 3, {4}), ({3}, 3, 3, set()), (set(), None, -1, set())],
)
def test_the_end_is_the_tokenizers(eos: set[int], tokenizer_eos: int | None, end_id: int, others: set[int]) -> None:
    model = ModelProperties(vocabulary=10, eos=frozenset(eos), tokenizer_eos=tokenizer_eos, torch_sampler=True)
    found = sampling_arguments(Sampling(), model)
    assert (found["end_id"], found["pad_id"]) == (end_id, max(end_id, 0))
    assert set(found.get("stop_token_ids", ())) == others
    least = sampling_arguments(Sampling(min_new_tokens=4), model)
    assert (least["end_id"], least["min_tokens"], "stop_token_ids" in least) == (end_id, 4, False)


def test_a_least_length_holds_back_stop_ids_by_our_own_look() -> None:
    sampling = Sampling(min_new_tokens=6, stop_token_ids=(5,))
    found = sampling_arguments(sampling, TRTLLM)
    assert found["min_tokens"] == 6
    assert "stop_token_ids" not in found
    assert misses_stops(sampling, TRTLLM)
    assert not misses_stops(Sampling(min_new_tokens=6), TRTLLM)
    assert misses_stops(Sampling(min_new_tokens=6), TORCH)  # it has a second EOS
    # With no end id there is nothing to hold back but the id -1, which is the last of the vocabulary.
    assert "min_tokens" not in sampling_arguments(Sampling(min_new_tokens=6, ignore_eos=True), TRTLLM)


@in_one_test(
    ("sampling", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 1"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"temperature": -0.1}, "temperature must be a finite number of at least 0"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature must be a finite number of at least 0"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be a finite number above 0"),
        ({"presence_penalty": math.inf}, "presence_penalty must be a finite number"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be a finite number"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -1}, "seed"),
        ({"logit_bias": ((10, 1.0),)}, "token ids must be from 0 to 9"),
        ({"bad_token_ids": (-1,)}, "token ids must be from 0 to 9"),
        ({"num_beams": 2, "length_penalty": -1.0}, "length_penalty must be a finite number of at least 0"),
        ({"num_beams": 2, "length_penalty": math.inf}, "length_penalty must be a finite number of at least 0"),
        (
            {"structured_output": StructuredOutput("regex", "a"), "ignore_eos": True},
            "structured output cannot be combined with ignore_eos",
        ),
        (
            {"structured_output": StructuredOutput("regex", "a"), "min_new_tokens": 1},
            "structured output cannot be combined with a minimum length",
        ),
        ({"structured_output": StructuredOutput("tree", "x")}, "does not support structured output of the kind 'tree'"),
    ],
)
def test_what_would_fail_late_is_refused_at_once(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampling_arguments(Sampling(do_sample=True, **sampling), TRTLLM)


def test_with_several_eos_ids_forbidden_words_exclude_ignore_eos() -> None:
    with pytest.raises(ValueError, match="bad_sequences cannot be combined with ignore_eos"):
        sampling_arguments(Sampling(bad_sequences=("a",), ignore_eos=True), TORCH)


@in_one_test(
    ("structured_output", "wanted"),
    [
        (StructuredOutput("json_schema", '{"type": "object"}'), {"json": '{"type": "object"}'}),
        (StructuredOutput("json_object", ""), {"json_object": True}),
        (StructuredOutput("regex", r"\d+"), {"regex": r"\d+"}),
        (StructuredOutput("grammar", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (StructuredOutput("choice", '["yes", "no"]'), {"regex": "(yes|no)"}),
    ],
)
def test_guides_become_trtllms_guided_decoding(structured_output: StructuredOutput, wanted: dict[str, Any]) -> None:
    assert guided_decoding_arguments(structured_output) == wanted


def test_a_choice_is_its_text_and_no_pattern() -> None:
    choices = ["a.b", "1+1=2", "(x|y)", "[z]", "{q}", "^$", "c:\\d*", "é 日"]
    pattern = guided_decoding_arguments(StructuredOutput("choice", str(choices).replace("'", '"')))["regex"]
    for choice in choices:
        assert re.fullmatch(pattern, choice)
    assert not re.fullmatch(pattern, "axb")


# -- what is read of a result that grows -------------------------------------------------------------------------------


def running(
    ids: list[int],
    *,
    finish: str | None = None,
    logprobs: Any = None,
    own_stops: frozenset[int] = frozenset(),
    goes_on: bool = False,
    **asked: Any,
) -> TrtRequest:
    output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=finish, stop_reason=None)
    result = SimpleNamespace(outputs=[output], context_logits=None)
    return TrtRequest(EngineRequest(7, [1, 2], Sampling(**asked), goes_on=goes_on), own_stops, result)


def logprobs(*values: tuple[int, float]) -> list[dict[int, Any]]:
    return [{id: SimpleNamespace(logprob=value)} for id, value in values]


def test_one_token_more_goes_into_the_columns() -> None:
    found, step = running([5], logprobs=logprobs((5, -0.5))), Step([], [], [], [])
    assert found.single_token(step)
    assert not found.single_token(step)  # nothing new
    assert found.outputs() == []
    output = found.result.outputs[0]
    output.token_ids, output.logprobs = [5, 6], logprobs((5, -0.5), (6, -0.25))
    assert found.single_token(step)
    assert step == Step([7, 7], [5, 6], [-0.5, -0.25], [])


def test_a_token_without_a_log_probability_has_none() -> None:
    step = Step([], [], [], [])
    assert running([5], logprobs=[]).single_token(step)
    assert running([5], logprobs=None).single_token(step)
    assert step.logprobs == [None, None]


@in_one_test(
    "other",
    [
        running([5, 6]),
        running([]),
        running([5], finish="stop"),
        running([5], top_logprobs=2, logprobs=logprobs((5, -0.5))),
        running([5], own_stops=frozenset({5})),
        running([5], prompt_logprobs=True),
        running([5], return_context_logits=True),
        running([5], return_generation_logits=True),
        running([5], num_beams=2),
    ],
)
def test_all_else_does_not(other: TrtRequest) -> None:
    step = Step([], [], [], [])
    assert not other.single_token(step)
    assert step == Step([], [], [], [])


def test_what_has_ended_without_a_reason_or_cannot_be_read_is_an_error() -> None:
    ended, empty, strange = running([5]), running([5]), running([5], logprobs=3)
    ended.ended = True
    empty.result.outputs = []
    for broken in (ended, empty, strange):
        step = Step([], [], [], [])
        assert not broken.single_token(step)
        (output,) = broken.outputs()
        assert (output.finish, step.ids) == (Finish.ERROR, [])
        assert output.error


def test_tokens_of_trtllms_prefix_cache_come_once_with_the_first_token() -> None:
    found, step = running([5]), Step([], [], [], [])
    found.result.cached_tokens = 32
    assert not found.single_token(step)
    (output,) = found.outputs()
    assert (output.ids, output.extras) == ([5], Extras(num_cached_tokens=32))
    found.result.outputs[0].token_ids = [5, 6]
    assert found.single_token(step)
    assert step.ids == [6]


def test_an_answer_that_goes_on_tells_nothing_of_the_prefix_cache() -> None:
    found, step = running([5], goes_on=True), Step([], [], [], [])
    found.result.cached_tokens = 32
    assert found.single_token(step)


# -- what is found out of a guide before TensorRT-LLM gets it, in the process that tries them --------------------------


@pytest.fixture(scope="module")
def checks() -> Iterator[StructuredOutputValidator]:
    found = StructuredOutputValidator(partial(structured_output_check, EngineConfig()), seconds=1.0, memory=64 << 20)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("structured_output", "wanted"),
    [
        (StructuredOutput("regex", r"\d+|\p{Lu}[\P{N}x]*"), ""),
        (StructuredOutput("regex", "("), "the regular expression is invalid: missing )"),
        (StructuredOutput("regex", "(" * 16_000), "the regular expression is invalid"),
        (StructuredOutput("regex", "(?i)" + "[a-\U0010ffff]" * 800), "more than 1 s (option.guide_timeout)"),
        (StructuredOutput("grammar", "("), ""),
        (StructuredOutput("json_schema", "{}"), ""),
    ],
)
def test_an_expression_that_is_none_or_takes_too_long_is_refused(
    checks: StructuredOutputValidator, structured_output: StructuredOutput, wanted: str
) -> None:
    found = checks.check(structured_output).result(60)
    assert wanted in found
    assert bool(found) == bool(wanted)
