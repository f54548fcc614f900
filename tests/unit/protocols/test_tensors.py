"""GptManager's input tensors as parameters, and its output tensors."""

from __future__ import annotations

import array
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.text import Vocabulary
from handler.core.values import Adapter, Delta, Extras, Finish, Request, Token
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.kernel.tensors import TENSORS
from handler.protocols.registry import INVOCATIONS
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, TOKENS, answer, deltas, value, with_adapters

# -- GptManager's thirty input tensors as parameters: their shapes, what they are to us, and what is refused -----------


SEED_000 = (
    "request_output_len", "input_ids", "streaming", "beam_width", "temperature", "runtime_top_k", "runtime_top_p",
    "len_penalty", "early_stopping", "repetition_penalty", "min_length", "presence_penalty", "frequency_penalty",
    "no_repeat_ngram_size", "random_seed", "end_id", "pad_id", "embedding_bias", "bad_words_list", "stop_words_list",
    "prompt_embedding_table", "prompt_vocab_size", "lora_task_id", "lora_weights", "lora_config", "return_log_probs",
    "return_context_logits", "return_generation_logits", "draft_input_ids", "draft_logits",
)  # fmt: skip

MINE = Adapter("mine", 7, "/adapters/mine")
EXAMPLE = [[[5, 1, 3, 4, 0], [3, 5, -1, -1, -1]]]  # words of three and two tokens


def parse(parameters: dict[str, Any], context: ServerContext = CAPABLE, /, **body: Any) -> ParsedRequest:
    return INVOCATIONS["lmi"].parse({"inputs": "hi", "parameters": parameters, **body}, context)


def request(context: ServerContext = CAPABLE, /, **parameters: Any) -> Request:
    return parse(parameters, context).requests[0]


def refusal(context: ServerContext = CAPABLE, /, **parameters: Any) -> str:
    with pytest.raises(InvalidParameter) as caught:
        parse(parameters, context)
    return str(caught.value)


def test_the_table_is_the_seeds() -> None:
    assert tuple(TENSORS) == SEED_000


@in_one_test(
    ("name", "tensor", "lmis", "plain"),
    [
        ("request_output_len", 7, "max_new_tokens", 7),
        ("temperature", 0.5, "temperature", 0.5),
        ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
        ("min_length", 2, "min_length", 2),
        ("presence_penalty", 0.5, "presence_penalty", 0.5),
        ("frequency_penalty", -0.5, "frequency_penalty", -0.5),
        ("random_seed", 2**64 - 1, "seed", 2**64 - 1),
    ],
)
def test_a_scalar_is_lmis_parameter_bare_or_as_a_tensor(name: str, tensor: Any, lmis: str, plain: Any) -> None:
    wanted = request(**{lmis: plain})
    shapes = [tensor, [tensor], [[tensor]]] if name == "request_output_len" else [tensor, [tensor]]
    for shape in shapes:
        found = request(**{name: shape})
        assert found.sampling == wanted.sampling
        assert found == wanted._replace(names=found.names)
        assert request(**{name: shape, lmis: plain}).sampling == wanted.sampling  # both, when they agree


@in_one_test("name", ["temperature", "min_length", "random_seed", "beam_width", "streaming", "end_id"])
@in_one_test("shape", [[], [1, 1], [[1]], {"a": 1}])
def test_another_shape_is_refused(name: str, shape: Any) -> None:
    assert refusal(**{name: shape}).startswith(f"parameters.{name}=")


def test_a_beam_search_has_its_own() -> None:
    found = request(beam_width=[3], len_penalty=[2.0], early_stopping=[1]).sampling
    assert (found.num_beams, found.length_penalty, found.early_stopping) == (3, 2.0, True)
    for false in (0, [0], False, [False]):
        assert not request(beam_width=[3], early_stopping=false).sampling.early_stopping
    for wrong in (2, [2], 1.5, "1", [[1]], []):
        assert refusal(beam_width=[3], early_stopping=wrong).startswith("parameters.early_stopping=")
    assert refusal(len_penalty=[2.0]).startswith("parameters.len_penalty=[2.0]: has an effect only with")
    assert refusal(beam_width=[33]).startswith("parameters.beam_width=[33]: must be at most 32")


@in_one_test(
    ("given", "k", "p", "samples"),
    [
        ({"runtime_top_k": [50]}, 50, 1.0, True),
        ({"runtime_top_k": [1]}, 1, 1.0, False),
        ({"runtime_top_k": [0]}, 0, 1.0, False),
        ({"runtime_top_k": -1}, 0, 1.0, False),
        ({"runtime_top_p": [0.9]}, 0, 0.9, True),
        ({"runtime_top_p": [0.0]}, 0, 1.0, False),
        ({"runtime_top_k": [50], "runtime_top_p": [0.0]}, 50, 1.0, True),
        ({"runtime_top_k": [1], "do_sample": False}, 1, 1.0, False),
    ],
)
def test_more_than_one_candidate_is_sampling(given: dict[str, Any], k: int, p: float, samples: bool) -> None:
    found = request(**given).sampling
    assert (found.top_k, found.top_p, found.do_sample) == (k, p, samples)


def test_sampling_that_is_refused_in_one_name_and_asked_for_in_another() -> None:
    assert refusal(runtime_top_k=[50], do_sample=False) == (
        "parameters.do_sample=false contradicts parameters.runtime_top_k"
    )
    assert "omit parameters.runtime_top_k=[50]" in refusal(runtime_top_k=[50], beam_width=[2])


def test_a_name_of_lmis_and_its_tensor_must_agree() -> None:
    assert refusal(max_new_tokens=5, request_output_len=[[6]]) == (
        "parameters.request_output_len=[[6]] contradicts parameters.max_new_tokens"
    )
    assert "contradicts parameters.seed" in refusal(seed=1, random_seed=[2])
    assert "contradicts parameters.top_p" in refusal(top_p=0.5, runtime_top_p=[0.0])


def test_ngrams_longer_than_any_sequence_may_repeat() -> None:
    assert request(no_repeat_ngram_size=[3]).sampling.no_repeat_ngram_size == 3
    assert request(no_repeat_ngram_size=[1 << 30]).sampling.no_repeat_ngram_size == 0


# -- the prompt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[0, 1, 5], [[0, 1, 5]]])
def test_ids_stand_for_the_prompt(shape: Any) -> None:
    (found,) = INVOCATIONS["lmi"].parse({"parameters": {"input_ids": shape}}, CAPABLE).requests
    assert (found.prompt_ids, found.prompt, found.names.prompt) == ((0, 1, 5), "a b<end>", "parameters.input_ids")
    shown = value("lmi", {"parameters": {"input_ids": shape, "details": True}}, context=CAPABLE)
    assert shown["details"]["inputs"] == "a b<end>"


def test_ids_are_a_batch_of_one_under_dynamic_batching() -> None:
    (found,) = INVOCATIONS["dynamic_batch"].parse({"parameters": {"input_ids": [[4]]}}, CAPABLE).requests
    assert (found.prompt_ids, found.prompt) == ((4,), "c")


@in_one_test(
    ("ids", "wanted"),
    [
        ([], "must contain at least one token"),
        ([[]], "must contain at least one token"),
        ([[0], [1]], "integers from 0"),
        ([-1], "integers from 0"),
        ([True], "integers from 0"),
        ([0.0], "integers from 0"),
        ([6], "6 is not in the vocabulary of 6 tokens"),
        ("a", "must be a tensor of shape [1, num_input_tokens] or [num_input_tokens]"),
    ],
)
def test_wrong_ids_are_refused(ids: Any, wanted: str) -> None:
    with pytest.raises(InvalidParameter, match=r"^parameters\.input_ids=") as caught:
        INVOCATIONS["lmi"].parse({"parameters": {"input_ids": ids}}, CAPABLE)
    assert wanted in str(caught.value)


def test_a_prompt_comes_once() -> None:
    assert refusal(input_ids=[[0]]) == "parameters.input_ids=[0]: contradicts 'inputs'; send only one of them"


@pytest.mark.parametrize("name", ["input_ids", "embedding_bias", "stop_words_list", "bad_words_list"])
def test_an_engine_whose_prompts_have_their_vocabulary_accepts_no_ids(name: str) -> None:
    given = {"input_ids": [1], "embedding_bias": [1.0]}.get(name, [[1, 0], [2, -1]])
    context = replace(CAPABLE, vocabulary=None)
    assert "is not supported: the engine able has no vocabulary of its own" in refusal(context, **{name: given})


# -- ends, words and biases ----------------------------------------------------------------------------------------


def test_no_end_token_is_to_ignore_the_models() -> None:
    for shape in (-1, [-1]):
        found = request(end_id=shape)
        assert (found.sampling.ignore_eos, found.sampling.stop_token_ids, found.eos_token_id) == (True, (), None)


def test_another_end_token_takes_the_place_of_the_models() -> None:
    found = request(end_id=[4])
    assert (found.sampling.ignore_eos, found.sampling.stop_token_ids, found.eos_token_id) == (True, (4,), 4)
    assert found.names.stop_token_ids == "parameters.end_id"
    both = request(end_id=[4], stop_token_ids=[1])
    assert (both.sampling.stop_token_ids, both.eos_token_id) == ((1, 4), 4)


def test_beams_have_their_own_end_token_or_none() -> None:
    found = request(end_id=[4], beam_width=2).sampling
    assert (found.ignore_eos, found.stop_token_ids, found.num_beams) == (True, (4,), 2)
    assert request(end_id=[-1], beam_width=2).sampling.ignore_eos


def test_a_models_own_end_token_changes_nothing() -> None:
    context = replace(CAPABLE, eos=frozenset({3, 4}))

    def own(**parameters: Any) -> Request:
        return request(context, **{"end_id": [4], **parameters})

    others: list[dict[str, Any]] = [{}, {"beam_width": 2}, {"guided_json": {}}, {"ignore_eos_token": False}]
    for more in others:
        found = own(**more)
        assert (found.sampling.ignore_eos, found.sampling.stop_token_ids) == (False, ())
    assert own(stop_token_ids=[1]).sampling.stop_token_ids == (1,)
    assert own(end_id=[2]).sampling.stop_token_ids == (2,)
    contradiction = refusal(context, end_id=[4], ignore_eos_token=True)
    assert contradiction == "parameters.end_id=4: contradicts parameters.ignore_eos_token=true"
    assert own(outputs=["output_ids"], pad_id=[0]).sampling == own().sampling


def test_an_end_by_that_token_is_shown_as_the_models_own() -> None:
    ending = [*deltas()[:2], deltas()[2]._replace(finish=Finish.STOP)]  # its last token is 278
    wide = replace(CAPABLE, vocabulary=None)
    for end, wanted in ((278, "eos_token"), (9, "stop_sequence")):
        asked = {"inputs": "a", "parameters": {"end_id": end, "details": True}}
        assert value("lmi", asked, ending, wide)["details"]["finish_reason"] == wanted
        *_, last = answer("lmi", {**asked, "stream": True}, ending, wide).body.splitlines()
        assert f'"finish_reason":"{wanted}"'.encode() in last


def test_a_stop_token_that_is_the_end_token_too_is_the_clients() -> None:
    assert request(end_id=[4], stop_token_ids=[4]).eos_token_id is None


def test_an_end_token_and_none_contradict_each_other() -> None:
    assert refusal(end_id=[4], ignore_eos_token=True) == (
        "parameters.end_id=4: contradicts parameters.ignore_eos_token=true"
    )
    assert "contradicts parameters.end_id" in refusal(end_id=[-1], ignore_eos_token=False)
    assert "not in the vocabulary" in refusal(end_id=6)
    assert "must be" in refusal(pad_id=[1 << 31])


@pytest.mark.parametrize("shape", [EXAMPLE, EXAMPLE[0]])
def test_words_of_several_tokens_are_their_text(shape: Any) -> None:
    vocabulary = replace(CAPABLE, vocabulary=Vocabulary([b"a", b" b", b"x", b"y", b"c", b"d"]))
    assert request(vocabulary, stop_words_list=shape).sampling.stop == ("d by", "ca")
    assert request(vocabulary, bad_words_list=shape).sampling.bad_sequences == ("d by", "ca")


def test_words_of_one_token_are_that_token() -> None:
    found = request(stop_words_list=[[0, 5, 1, 4, 0], [1, 2, 4, -1, -1]]).sampling
    assert (found.stop_token_ids, found.stop) == ((0, 5), (" bc",))
    assert request(bad_words_list=[[[5], [1]]]).sampling.bad_token_ids == (5,)
    assert request(bad_words_list=[[[5], [1]]]).names.bad_token_ids == "parameters.bad_words_list"
    whole = request(stop_words_list=[[2, 3], [2, -1]]).sampling  # the two halves of a character
    assert whole.stop == ("\u00e9",)


@pytest.mark.parametrize("empty", [[[], []], [[[], []]], [[0, 0], [-1, -1]], [[-1], [-1]]])
def test_no_words_are_none(empty: Any) -> None:
    assert request(stop_words_list=empty, bad_words_list=empty).sampling == request().sampling


@in_one_test(
    ("words", "wanted"),
    [
        ([], "a tensor of shape [2, N] or [1, 2, N]"),
        ([[0, 1]], "a tensor of shape [2, N] or [1, 2, N]"),
        ([[[0], [1]], [[0], [1]]], "integers from -1"),
        ([0, 1], "a tensor of shape [2, N] or [1, 2, N]"),
        ("word", "a tensor of shape [2, N] or [1, 2, N]"),
        ([[0, 1], [1]], "its rows have 2 and 1 numbers"),
        ([[0, 1], [2, 1]], "increasing"),
        ([[0, 1], [0, 1]], "increasing"),
        ([[0, 1], [3, -1]], "up to the row's length"),
        ([[0, 1], [-1, 2]], "-1 after them"),
        ([[0, 1], [1, -1]], "0 or -1 after it"),
        ([[-1, 1], [2, -1]], "token ids in its first row up to the last offset"),
        ([[0, 6], [2, -1]], "6 is not in the vocabulary"),
        ([[0, 5], [2, -1]], "a special token, which has no text, in a word of several tokens"),
        ([[0, 2], [2, -1]], "begins or ends in the middle of a character"),
        ([[0] * 65, list(range(1, 66))], "at most 64 words"),
        ([[0, "1"], [1, 2]], "integers from -1"),
    ],
)
@in_one_test("name", ["stop_words_list", "bad_words_list"])
def test_wrong_words_are_refused(name: str, words: Any, wanted: str) -> None:
    message = refusal(**{name: words})
    assert message.startswith(f"parameters.{name}=")
    assert wanted in message


def test_a_bias_for_each_token_of_the_vocabulary() -> None:
    bias = [0.0, 1.5, 0, 0, -2, 0]
    for shape in (bias, [bias]):
        found = request(embedding_bias=shape)
        assert (found.sampling.logit_bias, found.names.logit_bias) == (
            ((1, 1.5), (4, -2.0)),
            "parameters.embedding_bias",
        )
    assert not request(embedding_bias=[0.0] * 6).sampling.logit_bias
    assert "has 2 numbers, but the vocabulary has 6" in refusal(embedding_bias=[1.0, 2.0])
    assert "must be a number" in refusal(embedding_bias=["a"] * 6)
    assert "contradicts parameters.logit_bias" in refusal(logit_bias={"1": 2}, embedding_bias=bias)


# -- what is not there, and adapters -----------------------------------------------------------------------------


@in_one_test(
    ("name", "given", "why"),
    [
        ("prompt_embedding_table", [[0.5]], "P-tuning"),
        ("prompt_vocab_size", [5], "P-tuning"),
        ("lora_weights", [[0.5]], "register the adapter"),
        ("lora_config", [[1, 2, 3]], "register the adapter"),
        ("draft_input_ids", [5], "speculative decoding is configured for the engine"),
        ("draft_logits", [[0.5]], "speculative decoding is configured for the engine"),
    ],
)
def test_what_no_engine_of_today_can_is_refused_by_name(name: str, given: Any, why: str) -> None:
    message = refusal(**{name: given})
    assert message.startswith(f"parameters.{name}=")
    assert why in message
    assert request(**{name: []}) == request(**{name: None}) == request()


def test_a_task_is_the_adapter_of_that_number() -> None:
    context = with_adapters(CAPABLE, MINE)
    assert request(context, lora_task_id=[7]).adapter == MINE
    assert request(context, lora_task_id=7, adapter_id="mine").adapter == MINE
    found = refusal(context, lora_task_id=[8])
    assert found == "parameters.lora_task_id=[8]: no adapter with that number is registered"
    assert "an integer from 0" in refusal(context, lora_task_id=[-1])
    with pytest.raises(InvalidPayload, match="serves no LoRA adapters: none is registered"):
        INVOCATIONS["lmi"].parse({"inputs": "a", "adapters": ["mine"]}, CAPABLE)


# -- streams and outputs -----------------------------------------------------------------------------------------


def test_streaming_is_stream() -> None:
    assert parse({"streaming": [True]}).streams
    assert not parse({"streaming": [False]}).streams
    assert parse({"streaming": True}, stream=True).streams
    with pytest.raises(InvalidParameter, match=r"^parameters.streaming=true contradicts 'stream'"):
        parse({"streaming": [True]}, stream=False)
    batch = INVOCATIONS["dynamic_batch"].parse({"inputs": "a", "parameters": {"streaming": [True]}}, CAPABLE)
    assert (batch.streams, batch.ignored) == (False, ["parameters.streaming"])


def test_logits_are_asked_for_by_their_flag_or_by_their_name() -> None:
    assert request(return_context_logits=[True]).sampling.return_context_logits
    found = request(outputs=["generation_logits"])
    assert (found.sampling.return_generation_logits, found.names.logits) == (True, "parameters.outputs")
    assert not request(return_generation_logits=[False]).sampling.return_generation_logits


def test_outputs_and_flags_must_agree() -> None:
    assert "contradicts parameters.outputs" in refusal(outputs=["context_logits"], return_context_logits=[False])
    assert "contradicts parameters.return_log_probs=false" in refusal(outputs=["cum_log_probs"], return_log_probs=False)
    assert "must be a list of tensor names, which are output_ids, sequence_length" in refusal(outputs=["logits"])
    assert "must be a list of tensor names, which are output_ids" in refusal(outputs="output_ids")


def test_logits_are_refused_where_the_engine_has_none() -> None:
    context = replace(CAPABLE, unsupported={"return_context_logits": "it has no logits"})
    assert refusal(context, return_context_logits=[True]) == (
        "parameters.return_context_logits=[true]: the engine able does not support it: it has no logits"
    )
    assert refusal(context, outputs=["context_logits"]).startswith('parameters.outputs=["context_logits"]: the engine')


@pytest.mark.parametrize(
    "parameters", [{"return_log_probs": [True]}, {"outputs": ["output_ids"]}, {"logprobs": 2}, {"top_n_tokens": 2}]
)
def test_dynamic_batching_has_no_outputs(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="only available with rolling batch"):
        INVOCATIONS["dynamic_batch"].parse({"inputs": "a", "parameters": parameters}, CAPABLE)


small = st.integers(-2, 7) | st.booleans() | st.floats(-2, 2) | st.none() | st.sampled_from(["", "a", *SEED_000[:3]])
nested = st.recursive(small, lambda inner: st.lists(inner, max_size=3), max_leaves=9)
fields = st.dictionaries(st.sampled_from([*TENSORS, "outputs", "stream"]), nested, max_size=5)


@given(parameters=fields, prompt=st.none() | st.just("hi"), schema=st.sampled_from(["lmi", "dynamic_batch"]))
def test_whatever_they_hold_they_are_read_or_refused(parameters: dict[str, Any], prompt: Any, schema: str) -> None:
    try:
        call = INVOCATIONS[schema].parse({"inputs": prompt, "parameters": parameters}, CAPABLE)
    except (InvalidParameter, InvalidPayload):
        return
    sampling = call.requests[0].sampling
    assert all(0 <= id < 6 for id in (*sampling.stop_token_ids, *sampling.bad_token_ids, *dict(sampling.logit_bias)))


# -- outputs -----------------------------------------------------------------------------------------------------------
# Output tensors where they meet something uneven: no last token, several tokens a step, rows that are too many.


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


def test_sequences_are_in_the_responses_order_and_as_long_as_the_longest() -> None:
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
