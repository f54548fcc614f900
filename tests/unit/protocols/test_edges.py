"""The least and the most that each parameter may be: its reader and its schema in the API's document agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from handler.core.errors import InvalidPayload
from handler.core.values import Adapter
from handler.protocols.kernel import messages, readers, texts
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.messages import ROLES, check_role
from handler.protocols.kernel.parameters import PARAMETERS, unsupported
from handler.protocols.kernel.readers import INT32, INT64, metadata, response_format, show
from handler.protocols.kernel.schema import schema_of_reader
from handler.protocols.kernel.tensors import TENSORS
from handler.protocols.kernel.texts import text_list, text_of, texts_shape
from handler.protocols.registry import ROUTES
from tests.limits import undocumented
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, USER, with_adapters

INT32_MOST, INT64_MOST, UINT64_MOST = 2147483647, 9223372036854775807, 18446744073709551615
STOPS = (
    ["a", "a" * 2048, [], ["a"] * 64, ["a" * 2048]],
    ["", "a" * 2049, ["a"] * 65, [""], ["a" * 2049], [1], 1, True],
)
FLAG: tuple[list[Any], list[Any]] = [True, False], [0, 1, "true", []]
COUNT: tuple[list[Any], list[Any]] = [1, INT32_MOST], [0, -1, INT32_MOST + 1, True, 1.5, "1"]
PENALTY: tuple[list[Any], list[Any]] = [-2, 0, 2, 2.0], [-2.01, 2.01, True, "1"]
EDGES: dict[str, tuple[list[Any], list[Any]]] = {
    "do_sample": FLAG,
    "seed": ([0, UINT64_MOST], [-1, UINT64_MOST + 1, True, 1.5]),
    "temperature": ([0, 0.01, 3.4e38], [-0.01, True, "1"]),
    "repetition_penalty": ([0.01, 3.4e38], [0, -0.01, True]),
    "top_k": ([-1, 0, INT32_MOST], [-2, INT32_MOST + 1, True, 1.5]),
    "top_p": ([0, 1, 0.5], [-0.01, 1.01, True]),
    "max_new_tokens": COUNT,
    "stop_sequences": STOPS,
    "typical_p": ([0.01, 1], [0, 1.01]),
    "min_p": ([0, 0.99], [1, -0.01]),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "n": COUNT,
    "best_of": COUNT,
    "num_beams": COUNT,
    "length_penalty": ([-20, 20], [-20.01, 20.01]),
    "early_stopping": FLAG,
    "ignore_eos_token": FLAG,
    "stop_token_ids": ([[], [0] * 64, [INT32_MOST]], [[0] * 65, [-1], [INT32_MOST + 1], [True], 1]),
    "include_stop_str_in_output": FLAG,
    "logprobs": ([0, 1, 20], [-1, 21, True]),
    "prompt_logprobs": ([0, 1], [-1, 2, True]),
    "decoder_input_details": FLAG,
    "skip_special_tokens": FLAG,
    "spaces_between_special_tokens": FLAG,
    "logit_bias": ([{}, {"0": -100, "1": 100}], [{"0": -101}, {"0": 101}, {"0": "1"}, []]),
    "guided_json": ([{}, "{}"], [1, []]),
    "guided_json_object": FLAG,
    "guided_regex": (["a", "a" * 16_384], [1]),
    "guided_choice": ([["a"], ["a"] * 256], [[], ["a"] * 257, [""], [1], "a"]),
    "guided_grammar": (["a", "a" * 16_384], [1]),
    "min_length": ([0, INT32_MOST], [-1, INT32_MOST + 1, True]),
    "bad_sequences": STOPS,
    "stop": ([*STOPS[0], False], list(STOPS[1])),
    "top_n_tokens": ([0, 1, 20], [-1, 21, True]),
    "watermark": ([False], [True, 0, 1, None]),
    "grammar": (
        [{"type": "json", "value": {}}, {"type": "json_object"}, {"type": "regex", "value": "a"}],
        [{}, {"type": "xml"}, {"type": 1}, "a"],
    ),
    "adapter_id": (["", "one"], [1]),
    "allowed_token_ids": (
        [[0], [INT32_MOST] * 16_384],
        [[], [0] * 16_385, [-1], [INT32_MOST + 1], 1],
    ),
    "cache_salt": (["a", "a" * 128], ["", "a" * 129, 1]),
    "priority": ([-INT64_MOST - 1, INT64_MOST], [-INT64_MOST - 2, INT64_MOST + 1, True]),
}


def in_tensors(accepted: list[Any], refused: list[Any], depth: int = 1) -> tuple[list[Any], list[Any]]:
    """The same in tensors with one element, of no more dimensions."""
    for _ in range(depth):
        refused = [*refused, [], *([one, one] for one in accepted[:1]), [[[accepted[0]]]], *([one] for one in refused)]
        accepted = [*accepted, *([one] for one in accepted)]
    return accepted, refused


NEVER: tuple[list[Any], list[Any]] = [[], [[]], 0, [0]], [1, [1], [[0]], False, None]
ID = ([-1, INT32_MOST], [-2, INT32_MOST + 1])
TENSOR_EDGES: dict[str, tuple[list[Any], list[Any]]] = {
    "request_output_len": in_tensors(*COUNT, depth=2),
    "streaming": in_tensors([True, False], [0, 1]),
    "beam_width": in_tensors(*COUNT),
    "temperature": in_tensors(*EDGES["temperature"]),
    "runtime_top_k": in_tensors(*EDGES["top_k"]),
    "runtime_top_p": in_tensors(*EDGES["top_p"]),
    "len_penalty": in_tensors(*EDGES["length_penalty"]),
    "early_stopping": in_tensors([True, False, 0, 1], [2, -1, "true"]),
    "repetition_penalty": in_tensors(*EDGES["repetition_penalty"]),
    "min_length": in_tensors(*EDGES["min_length"]),
    "presence_penalty": in_tensors(*PENALTY),
    "frequency_penalty": in_tensors(*PENALTY),
    "no_repeat_ngram_size": in_tensors([0, INT32_MOST], [-1, INT32_MOST + 1]),
    "random_seed": in_tensors(*EDGES["seed"]),
    "pad_id": in_tensors(*ID),
    "prompt_embedding_table": NEVER,
    "prompt_vocab_size": NEVER,
    "lora_weights": NEVER,
    "lora_config": NEVER,
    "draft_input_ids": NEVER,
    "draft_logits": NEVER,
    "return_log_probs": in_tensors([True, False], [0, 1]),
    "return_context_logits": in_tensors([True, False], [0, 1]),
    "return_generation_logits": in_tensors([True, False], [0, 1]),
}
OTHERS = {"input_ids", "end_id", "embedding_bias", "bad_words_list", "stop_words_list", "lora_task_id"}
"""Tensors that depend on the vocabulary or on adapters, in test_tensors.py."""


def check(schema: dict[str, Any], read: Callable[[Any], Any], accepted: list[Any], refused: list[Any]) -> None:
    validator = Draft202012Validator(schema)
    for value in accepted:
        assert validator.is_valid(value), f"the schema refuses {show(value)}"
        read(value)
    for value in refused:
        assert not validator.is_valid(value), f"the schema accepts {show(value)}"
        with pytest.raises(ValueError):  # noqa: PT011 - each has words of its own
            read(value)


def test_the_edges_are_those_of_all_parameters() -> None:
    assert EDGES.keys() == PARAMETERS.keys(), "EDGES needs the values at the ends of a new parameter's range"
    assert TENSOR_EDGES.keys() | OTHERS == TENSORS.keys()
    assert (INT32, INT64) == (INT32_MOST, INT64_MOST)


@in_one_test("name", EDGES)
def test_a_parameter_is_taken_up_to_its_edges_and_no_further(name: str) -> None:
    read, context = PARAMETERS[name].read, with_adapters(CAPABLE, Adapter("one", 1, "/one"))
    informed = (lambda value: read(value, context)) if PARAMETERS[name].informed else read
    check(schema_of_reader(read), informed, *EDGES[name])


@in_one_test("name", TENSOR_EDGES)
def test_a_tensor_is_taken_up_to_its_edges_and_no_further(name: str) -> None:
    read = TENSORS[name].read
    check(schema_of_reader(read), read, *TENSOR_EDGES[name])


def test_tensors_of_ids_say_their_form_in_the_document() -> None:
    wanted: dict[str, tuple[list[Any], list[Any]]] = {
        "input_ids": ([[1], [[1, 2]]], [[], 1, ["a"]]),
        "embedding_bias": ([[0.5], [[1, 2]]], [[], 1, ["a"]]),
        "end_id": ([-1, INT32_MOST, [3]], [-2, INT32_MOST + 1, [], [1, 2], [[1]]]),
        "lora_task_id": ([0, UINT64_MOST, [3]], [-1, UINT64_MOST + 1, [], [1, 2], [[1]]]),
        **dict.fromkeys(("bad_words_list", "stop_words_list"), ([[[1], [1]], [[[1], [1]]]], [[], [[1]] * 3, [1], 1])),
    }
    assert wanted.keys() == OTHERS
    for name, (accepted, refused) in wanted.items():
        schema = Draft202012Validator(schema_of_reader(TENSORS[name].read))
        assert [schema.is_valid(value) for value in (*accepted, *refused)] == [True] * len(accepted) + [False] * len(
            refused
        ), name


def test_metadata_has_so_many_pairs_of_such_lengths() -> None:
    most = {f"{number:064}": "a" * 512 for number in range(16)}
    more = [{**most, "a": "b"}, {"a" * 65: "b"}, {"a": "a" * 513}, {"a": 1}, []]
    check(schema_of_reader(metadata), metadata, [{}, most], more)


def test_a_response_format_is_one_of_three() -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {}, "name": "a"}}
    accepted = [{"type": "text"}, {"type": "json_object"}, schema]
    check(schema_of_reader(response_format), response_format, accepted, [{}, {"type": "xml"}, "text"])


@pytest.mark.parametrize(
    ("neutral", "accepted", "refused"),
    [
        ((), [], [0, False, ""]),
        ((None,), [None], [0, False]),
        ((1,), [1, 1.0], [True, 0, "1", None]),
        ((0, 1.5), [0, 1.5], [1, False, None]),
        ((True,), [True], [1, False]),
        ((False, 0), [False, 0], [1, True]),
        (("", []), ["", []], [None, 0, "a"]),
    ],
)
def test_of_what_is_not_supported_neutral_values_alone_are_taken(
    neutral: tuple[Any, ...], accepted: list[Any], refused: list[Any]
) -> None:
    made = unsupported("no engine has it", *neutral)
    schema = Draft202012Validator(schema_of_reader(made.read))
    assert made.field == ""
    for value in accepted:
        assert made.read(value) is None
        assert schema.is_valid(value)
    for value in refused:
        assert not schema.is_valid(value) or (isinstance(value, bool) and len(neutral) > 1)
        with pytest.raises(ValueError, match=r"^is not supported: no engine has it$"):
            made.read(value)
    assert schema.is_valid(None) == (not neutral or None in neutral)


# -- texts -------------------------------------------------------------------------------------------------------


def test_texts_are_a_string_ids_or_lists_of_either() -> None:
    schema = Draft202012Validator(texts_shape(3))
    accepted: list[Any] = ["a", [0], [1, 2, 3, 4], ["a"], ["", "b"], [[0], [1]], ["a", [1]], ["a"] * 3]
    refused: list[Any] = ["", [], [-1], [[]], [[-1]], ["a"] * 4, [[1]] * 4, [None], 1, None]
    assert [value for value in accepted if not schema.is_valid(value)] == []
    assert [value for value in refused if schema.is_valid(value)] == []
    assert Draft202012Validator(texts_shape()).is_valid(["a"] * 2048)
    assert not Draft202012Validator(texts_shape()).is_valid(["a"] * 2049)
    listed = Draft202012Validator(text_list({"type": "string"}))
    assert [listed.is_valid(["a"] * count) for count in (0, 1, 2048, 2049)] == [False, True, True, False]


def test_ids_are_text_by_the_engines_vocabulary_alone() -> None:
    assert CAPABLE.vocabulary is not None
    last = len(CAPABLE.vocabulary) - 1
    assert text_of((0, last), "input", CAPABLE) == CAPABLE.vocabulary.decode((0, last))
    assert text_of("a", "input", ServerContext(engine="bare")) == "a"
    with pytest.raises(InvalidPayload, match=r"^'input' contains ids that are not in the vocabulary of 6 tokens$"):
        text_of((0, last + 1), "input", CAPABLE)
    with pytest.raises(InvalidPayload, match=r"^'input': the engine has no vocabulary of its own to decode token ids"):
        text_of((0,), "input", ServerContext(engine="bare"))


# -- roles -------------------------------------------------------------------------------------------------------


def test_a_chat_template_may_know_further_roles() -> None:
    template = (
        "{% if message.role == 'user' or message['role'] in ('critic', \"judge\") or message.role != 'poet' %}"
        "{% elif message.role.startswith('agent') or message.role == '' %}"
    )
    context = ServerContext(engine="able", chat_template=template)
    for role in ("user", "critic", "judge", "poet", "agent", "agent 2"):
        assert check_role(role, "messages[0]", ROLES, context) == role
    names = "system, user, assistant, developer, tool, agent…, critic, judge, poet"
    for wrong in ("critics", "criti", "my agent", "age", "", 1, None):
        with pytest.raises(InvalidPayload) as raised:
            check_role(wrong, "messages[0]", ROLES, context)
        assert raised.value.message == f"messages[0].role must be one of {names}"
    with pytest.raises(InvalidPayload, match=r"^messages\[0\]\.role must be one of user, tool$"):
        check_role("critic", "messages[0]", ("user", "tool"), ServerContext(engine="able"))


def test_the_limits_of_texts_and_messages_are_documented() -> None:
    assert not undocumented(
        "wire/README.md",
        f"{messages.MAX_ARGUMENTS:,} characters in the arguments of one tool call, and "
        f"{messages.MAX_ALL_ARGUMENTS:,} in those of all",
    )
    assert not undocumented(
        "embeddings.md",
        f"may contain up to {texts.MAX_TEXTS:,} texts",
        f"may be up to {texts.MAX_QUERIES:,} characters",
    )
    stops = f"a string or up to {readers.MAX_STOPS}, each up to {readers.MAX_STOP_CHARACTERS:,} characters"
    assert not undocumented("wire/lmi.md", stops)
    most = f"a value of at most {readers.MAX_CHARACTERS:,} characters"
    assert not undocumented("wire/structured-output.md", most)
    pairs = f"up to {readers._PAIRS} pairs: keys of {readers._KEY} characters, values of {readers._VALUE}"
    assert not undocumented("wire/batches.md", pairs)


def test_a_calls_arguments_have_their_most() -> None:
    def chat(*sizes: int) -> Any:
        calls = [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{"x" * (size - 9)}"}}'}}
            for size in sizes
        ]
        said = {"role": "assistant", "content": None, "tool_calls": calls}
        return ROUTES["/v1/chat/completions"].parse({"messages": [USER, said, USER]}, CAPABLE)

    most = 1 << 20
    chat(most, most, most, most)
    for sizes in ((most + 1,), (most, most, most, most, 10)):
        with pytest.raises(
            InvalidPayload, match=r"^messages\[\]\.tool_calls: the arguments of a call may have at most "
        ):
            chat(*sizes)
