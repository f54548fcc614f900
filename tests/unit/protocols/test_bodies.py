"""Bodies: the JSON that is read, and values of another type than a field's."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter, ValidationError

from handler.config.config import Config
from handler.core.errors import InvalidParameter, InvalidPayload, NotJson, ServingError
from handler.core.framing import MAX_DEPTH
from handler.core.values import Request, Task
from handler.protocols import registry
from handler.protocols.kernel import body as bodies
from handler.protocols.kernel.body import (
    decode,
    decode_in_python,
    decoded_size,
    report_unknown,
    value_size,
)
from handler.protocols.kernel.dialect import Dialect
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, DIALECTS

# -- bodies are decoded by orjson as by Python's json: the same values and types, or the same words of refusal ---------


TWICE = b'{"a":1,"b":2,"a":{"c":3,"c":4}}'
STRICT = ("anthropic_", "mindie", "tei_", "tgi", "triton")
"""How the names of those dialects begin that refuse a key that stands twice."""


def outcome(body: bytes, *, by_json: bool) -> str:
    """The value and its types, or the refusal's words."""
    try:
        value = (decode_in_python if by_json else decode)(body, unique_keys=False)
    except NotJson as error:
        return f"refused: {error.message}"
    return repr(value)


EDGES = (
    b"", b" \n", b"{", b'{"a":1} x', b"[1,]", b"01", b"1.", b"-", b"+1", b"\xef\xbb\xbf{}", b"\xff", b'"\xed\xa0\x80"',
    b'"\x00"',
    b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\\x"', b"NaN", b"[Infinity]", b"-Infinity",
    b"-0", b"-0.0", b"0e0", b"1.0", b"1E5", b"1e999", b"-1e999", b"1e-400", b"5e-324", b"2.5e-324",
    b"1.7976931348623157e308", b"1.7976931348623159e308", b"0.1000000000000000055511151231257827",
    b"999999999999999999", b"9223372036854775807", b"9223372036854775808", b"18446744073709551615",
    b"18446744073709551616", b"-9223372036854775808", b"-9223372036854775809", b"-9999999999999999999", b"1" * 5000,
    b'{"1234567890123456789":1}', b"1 // a comment", b"\x0c1", b"\xc2\xa01", b"\xe2\x80\xa81", TWICE,
    "1".encode("utf-16"), '{"a":"ü"}'.encode("utf-32"), b'{"a":"\xfc"}',
    *(opening * levels + middle + closing * levels
      for opening, middle, closing in ((b"[", b"", b"]"), (b'{"a":', b"1", b"}"))
      for levels in (MAX_DEPTH, MAX_DEPTH + 1, 1023, 1024, 1025, 5000)),
)  # fmt: skip


@in_one_test("body", EDGES, ids=lambda body: repr(body[:24]))
def test_odd_bodies_are_read_as_by_the_standard_library(body: bytes) -> None:
    assert outcome(body, by_json=False) == outcome(body, by_json=True)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**65), 2**65) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """JSON, mostly with a few bytes of it replaced by others that mean something in JSON."""
    data = json.dumps(draw(VALUES), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
    body = bytearray(data.encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(body)))
        body[at : at + draw(st.integers(0, 2))] = draw(
            st.sampled_from(
                [b"9" * 18, b"9" * 19, b"-", b".", b"e9", b"e999", b'"', b"\\", b"\\ud83d", b",", b"]", b"\xff", b" "]
            )
        )
    return bytes(body)


@given(documents())
@example(b"[-9999999999999999999]")
def test_any_body_is_read_as_by_the_standard_library(body: bytes) -> None:
    assert outcome(body, by_json=False) == outcome(body, by_json=True)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 20))
def test_digits_become_the_same_float(value: float, digits: int) -> None:
    body = b"%.*e" % (digits, value)
    assert math.copysign(1, decode(body, unique_keys=False)) == math.copysign(1, float(body))
    assert outcome(body, by_json=False) == outcome(body, by_json=True)


# -- a key that stands twice -------------------------------------------------------------------------------------

BODIES_DIALECTS = [
    *(registry.choose(Config(rolling_batch="disable", tgi_compat=compat)) for compat in (False, True)),
    *(registry.choose(Config(tgi_compat=compat), task) for compat in (False, True) for task in Task),
    *registry.routes("tgi").values(),
    *registry.routes("mindie").values(),
    *(dialect for task in Task for dialect in registry.routes("tgi", task).values()),
]


@in_one_test("dialect", {dialect.name: dialect for dialect in BODIES_DIALECTS}.values(), ids=lambda one: one.name)
def test_a_key_that_stands_twice_is_read_as_the_original_does(dialect: Dialect) -> None:
    is_strict = dialect.name.startswith(STRICT) and dialect.name != "tgi_compat"  # that is LMI's
    if is_strict:
        with pytest.raises(NotJson, match=r'the key "[ac]" appears twice'):
            decode(TWICE, unique_keys=dialect.unique_keys)
    else:
        assert decode(TWICE, unique_keys=dialect.unique_keys) == {"a": {"c": 4}, "b": 2}


def size_of(value: Any, seen: set[int]) -> int:
    """Return the bytes of a value with all that it holds."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    held = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return sys.getsizeof(value) + sum(size_of(one, seen) for one in held)


@pytest.mark.parametrize(
    "value",
    [
        "a" * 10_000,
        "a" * 10_000 + "\U0001f600",
        "\u4e00" * 10_000,
        [[]] * 5_000,
        [{"a": {"b": []}}] * 5_000,
        [*range(300, 10_000)],
        [f"ab{number}" for number in range(5_000)],
        {f"k{number}": number for number in range(5_000)},
    ],
    ids=["text", "a wide text", "another script", "lists", "objects", "numbers", "texts", "names"],
)
@pytest.mark.parametrize("escaped", [True, False])
def test_what_a_body_is_decoded_to_is_estimated_from_its_bytes(value: Any, escaped: bool) -> None:
    body = json.dumps(value, ensure_ascii=escaped, separators=(",", ":")).encode()
    decoded = decode(body, unique_keys=False)
    assert 0.85 < decoded_size(body) / size_of(decoded, set()) < 5
    assert 1 <= value_size(decoded) / size_of(decoded, set()) < 1.5


@pytest.mark.parametrize("mark", ["[", ",", "{", '"[', "\\[", '\\"[', '\\\\"{', '[\n"'])
@pytest.mark.parametrize("first", range(3))
def test_marks_inside_strings_need_no_memory_of_lists(mark: str, first: int) -> None:
    """`first` moves what is escaped across the borders of the pieces that are counted."""
    for value in ({"x": "a" * first + mark * 100_000, "y": [1]}, [mark] * 1000):
        body = json.dumps(value).encode()
        size = size_of(decode(body, unique_keys=False), set())
        assert 0.85 < decoded_size(body) / size < 5, mark


def test_text_that_is_not_json_has_no_lists() -> None:
    assert decoded_size(b"[" * 100_000, 0) == 100_000
    assert decoded_size(b"[" * 100_000, 5_000) == 105_000


def test_an_estimate_counts_characters_marks_and_widths() -> None:
    assert decoded_size(b'"abc"') == 5
    assert decoded_size('"\u00e9\u00e9"'.encode()) == 4 * 4, "all characters are as wide as the widest may be"
    assert decoded_size(b'"\\u00e9"') == 4 * 3
    assert decoded_size(b"[1,2]") == 5 + 88 * 2
    assert decoded_size(b'{"a":{}}') == 8 + 240 * 2
    assert decoded_size(b"[1,2]", 100) == 5 + 100
    assert decoded_size(b"[1,2]", 0) == 5


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 16])
def test_marks_in_strings_are_left_out_wherever_a_piece_ends(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_PIECE", piece)
    monkeypatch.setattr(bodies, "_FEW", 0)
    for text in (r'["[[",1]', r'["\"[,",1]', r'["\\",1]', r'["\\\"[",1]', r'["a[\\","[",1][2]'):
        marks = re.sub(r'"(\\.|[^"\\])*"', "", text)
        assert decoded_size(text.encode()) == len(text) + 88 * (marks.count(",") + marks.count("["))


def test_few_marks_are_counted_in_strings_too() -> None:
    marks = (1 << 14) // 88
    exact = b'"' + b"[" * marks + b'"'
    assert decoded_size(exact) == len(exact) + 88 * marks
    assert decoded_size(exact.replace(b"[", b"[[", 1)) == len(exact) + 1, "more of them are not"


def test_a_value_has_the_size_of_its_parts() -> None:
    text, numbers, names = "a" * 100, [1, 2.5, None, True], {"one": 1, "two": "b"}
    assert value_size(text) == sys.getsizeof(text)
    assert value_size(numbers) == sys.getsizeof(numbers) + 4 * 32
    assert value_size(names) == sys.getsizeof(names) + sum(map(sys.getsizeof, ("one", "two", 1, "b")))
    outer: list[Any] = [numbers, names, text]
    assert value_size(outer) == sys.getsizeof(outer) + sum(map(value_size, (numbers, names, text)))
    twice = [numbers, numbers]
    assert value_size(twice) == sys.getsizeof(twice) + 2 * sys.getsizeof(numbers) + 4 * 32
    assert value_size([[], []], 3) < value_size([[], []], 2) == sys.maxsize


# -- names that no dialect knows ---------------------------------------------------------------------------------

NEUTRAL: dict[str, tuple[list[Any], list[Any]]] = {
    **dict.fromkeys(("repetition_penalty", "length_penalty", "top_p", "typical_p"), ([1, 1.0], [0, 2, True])),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), ([0, 0.0], [1, False])),
    **dict.fromkeys(("n", "best_of", "num_beams", "beam_width", "num_return_sequences"), ([1], [0, 2, True])),
    **dict.fromkeys(("min_length", "min_tokens", "no_repeat_ngram_size", "top_n_tokens"), ([0], [1, False])),
    **dict.fromkeys(("early_stopping", "use_beam_search", "decoder_input_details"), ([False], [True, 0])),
    **dict.fromkeys(("watermark", "ignore_eos", "ignore_eos_token"), ([False], [True, 0])),
    "include_stop_str_in_output": ([False], [True, 0]),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), ([True], [False, 1])),
    **dict.fromkeys(("stop", "stop_sequences", "stop_token_ids", "bad_words", "bad_sequences"), ([[]], [["a"], ""])),
    "top_k": ([0, -1], [1, -2, False]),
    "logit_bias": ([{}], [{"1": 1}, []]),
    "another": ([], [0, "", False]),
}


@in_one_test("name", NEUTRAL)
def test_a_name_without_effect_is_reported_unless_its_value_has_none(name: str) -> None:
    neutral, others = NEUTRAL[name]
    for value in (None, *neutral):
        assert report_unknown({name: value}, (), CAPABLE) == []
        assert report_unknown({"a": {name: value}}, ("a",), CAPABLE, [f"a.{name}"]) == []
    for value in others:
        assert report_unknown({name: value}, (), CAPABLE) == [name]
        assert report_unknown({"a": {name: value}}, ("a",), CAPABLE, [f"a.{name}"]) == [f"a.{name}"]


@pytest.mark.parametrize("where", ["{}", "extra_body.{}", "messages[].{}"])
def test_what_is_stored_elsewhere_is_refused_if_it_names_something(where: str) -> None:
    path = where.format("thread_id")
    body = {"thread_id": "a", "extra_body": {"thread_id": "a"}}
    why = "is not supported: this route does not read what the field refers to; send the whole request"
    with pytest.raises(InvalidParameter, match=rf"^{re.escape(path)}: {why}$"):
        report_unknown(body, body, CAPABLE, [path], generates=False)
    falsy: tuple[Any, ...] = ("", 0, [])
    for nothing in falsy:
        assert report_unknown({"thread_id": nothing}, (), CAPABLE) == ["thread_id"]


def test_isolation_and_safety_are_never_ignored_where_text_is_generated() -> None:
    for body, path in (
        ({"guided_json": {"a": 1}}, "guided_json"),
        ({"extra_body": {"regex": "a"}}, "extra_body.regex"),
        ({"parameters": {"watermarking": True}}, "parameters.watermarking"),
    ):
        name = next(iter(body))
        with pytest.raises(InvalidParameter, match=rf"^{re.escape(path)}: is not supported: "):
            report_unknown(body, (), CAPABLE)
        assert report_unknown(body, (), CAPABLE, generates=False) == [name]
    for allowed in (
        {"guided_json": ""},
        {"metadata": {"regex": "a"}},
        {"extra_body": {"watermarking": False, "safety_mode": "OFF"}},
        {"extra_body": "regex"},
    ):
        (name,) = allowed
        assert report_unknown(allowed, (), CAPABLE) == [name]
    for path in ("chat_template_kwargs.regex", "messages[].regex"):
        within = {"chat_template_kwargs": {"regex": "a"}, "messages": [{"regex": "a"}]}
        assert report_unknown(within, within, CAPABLE, [path]) == [path]


def test_unknown_names_are_refused_where_the_option_says_so() -> None:
    strict = replace(CAPABLE, config=Config(unknown_parameters="refuse"))
    names = ["n" * 70, *map(str, range(10))]
    with pytest.raises(InvalidPayload) as raised:
        report_unknown({}, (), strict, names)
    listed = ", ".join(["n" * 64, *map(str, range(7))])
    assert raised.value.message == f"unknown names: {listed} (option.unknown_parameters=refuse)"
    assert report_unknown({"n": 1}, (), strict) == []
    assert report_unknown({}, (), CAPABLE, names) == names


@pytest.mark.parametrize("value", [[0] * 30_000, [[0.5] * 100] * 300, {"a": [True] * 30_000}])
def test_numbers_are_not_measured_one_by_one(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Mock(side_effect=sys.getsizeof)
    monkeypatch.setattr("sys.getsizeof", measured)
    assert value_size(value)
    assert measured.call_count < 400


def test_a_value_of_too_many_lists_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Mock(side_effect=sys.getsizeof)
    monkeypatch.setattr("sys.getsizeof", measured)
    many: tuple[Any, ...] = ([[] for _ in range(20_000)], {"a": [{"b": []} for _ in range(20_000)]})
    for value in many:
        assert value_size(value, 1_000) == sys.maxsize
    assert value_size([[[]] for _ in range(400)], 1_000) < 100_000
    assert measured.call_count < 2_000


def test_a_value_that_contains_itself_has_a_size() -> None:
    value: dict[str, Any] = {"a": [1]}
    value["b"] = value
    assert 0 < value_size(value) < 2_000


# -- lax ---------------------------------------------------------------------------------------------------------------
# Values of another JSON type than a field's: each dialect reads those that its original reads, and refuses the others.
#
# The originals of the first table are pydantic's models, in lax mode, or read JSON's own types alone, as its strict
# mode does: both are run here. LMI's prompts go through Python code that checks no types.


Body = Mapping[str, Any]

LAX_VALUES = (
    8, 8.0, 8.5, 0, 0.0, 1, 1.0, 2, -1, -0.0, 0.5, 1e20, 9.3e18, 10**30, True, False, ["a"], {"a": 1},
    "8", " 8 ", "\t8\n", "8\u00a0", "8.0", "8.", "8.00", "8.5", "8.0_0", "+8", "-8", "- 8", "+-1", "--1", "0008",
    "1_000", "1__0", "_1", "1_", "1_0.0", "1_0.5", "1_e5", "1._5", "1e2", "1e_5", "1.5e3", "0x10", "\u0663", "",
    " ", ".", "+", "-", ".0", ".5", " .5 ", "+.5", "5.", "e5", "0", "1", "-0", "0_0", "0.7", "1.0", "1 2", "9" * 30,
    "inf", "-Infinity", "nan", "1e400", "true", "True", "TRUE", " true", "t", "f", "yes", "No", "y", "on", "OFF", "hot",
)  # fmt: skip

CHAT: Body = {"messages": [{"role": "user", "content": "a"}]}
PROMPT: Body = {"prompt": "a"}
INPUTS: Body = {"inputs": "a"}
TEXTS: Body = {"input": "a"}


INT64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
COUNT = Annotated[int, Field(ge=1, lt=1 << 31)]
ID = Annotated[int, Field(ge=0, lt=1 << 31)]
SHARE = Annotated[float, Field(ge=0, le=1)]
NUMBER = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Case(NamedTuple):
    """A field of a dialect.

    Attributes:
        name: the field's, after a dot inside an object.
        kind: its type, with its range, as the original declares it.
        body: makes a body with a value of the field.
        found: what was read.
    """

    dialect: str
    name: str
    kind: Any
    body: Callable[[Any], Body]
    found: Callable[[Request], Any]


def field(dialect: str, rest: Body, name: str, kind: Any, found: Callable[[Request], Any]) -> Case:
    """Make a case of a field beside the others of a body."""
    outer, _, inner = name.rpartition(".")
    return Case(
        dialect, name, kind, lambda value: {**rest, **({outer: {inner: value}} if outer else {name: value})}, found
    )


def new_tokens(request: Request) -> int:
    return request.sampling.max_new_tokens


def temperature(request: Request) -> float:
    return request.sampling.temperature if request.sampling.do_sample else 0.0


def ignores_eos(request: Request) -> bool:
    return request.sampling.ignore_eos


def dimensions(request: Request) -> int | None:
    assert request.pooling
    return request.pooling.dimensions


def normalizes(request: Request) -> bool | None:
    assert request.pooling
    return request.pooling.normalize


def priority(request: Request) -> int:
    return request.priority


LAX = [
    *(
        field(dialect, CHAT, name, kind, found)
        for dialect in ("openai_chat", "lmi", "tgi_compat", "dynamic_batch", "lmi_async")
        for name, kind, found in (
            ("max_tokens", COUNT, new_tokens),
            ("temperature", Annotated[float, Field(ge=0, le=2)], temperature),
            ("ignore_eos", bool, ignores_eos),
        )
    ),
    field("openai_chat", CHAT, "logprobs", bool, lambda one: one.sampling.logprobs),
    field("openai_chat", CHAT, "add_generation_prompt", bool, lambda one: one.template.add_generation_prompt),
    field(
        "openai_chat",
        CHAT,
        "logit_bias.3",
        Annotated[float, Field(ge=-100, le=100)],
        lambda one: one.sampling.logit_bias[0][1] if one.sampling.logit_bias else 0.0,
    ),
    Case(
        "openai_chat",
        "stop_token_ids",
        ID,
        lambda value: {**CHAT, "stop_token_ids": [value]},
        lambda one: one.sampling.stop_token_ids[0],
    ),
    field("openai_completions", PROMPT, "n", Annotated[int, Field(ge=1, le=32)], lambda one: one.sampling.n),
    field("openai_completions", PROMPT, "include_stop_str_in_output", bool, lambda one: one.sampling.include_stop),
    field("lmi_async", PROMPT, "ignore_eos", bool, ignores_eos),
    field("lmi_async", INPUTS, "parameters.max_new_tokens", COUNT, new_tokens),
    field("lmi_async", INPUTS, "parameters.temperature", NUMBER, temperature),
    field("lmi_async", INPUTS, "parameters.ignore_eos_token", bool, ignores_eos),
    field("lmi_async", INPUTS, "parameters.details", bool, lambda one: one.details),
    field("lmi_async", INPUTS, "parameters.return_full_text", bool, lambda one: one.full_text),
    field("openai_responses", TEXTS, "max_output_tokens", COUNT, new_tokens),
    field("openai_responses", TEXTS, "top_p", SHARE, lambda one: one.sampling.top_p),
    field("anthropic_messages", {**CHAT, "max_tokens": 5}, "top_p", SHARE, lambda one: one.sampling.top_p),
    field("openai_embeddings", TEXTS, "dimensions", COUNT, dimensions),
    field("openai_embeddings", TEXTS, "use_activation", bool, normalizes),
    field("rerank", {"query": "a", "documents": ["b"]}, "priority", INT64, priority),
    field("vllm_score", {"text_1": "a", "text_2": "b"}, "priority", INT64, priority),
    field("vllm_pooling", TEXTS, "priority", INT64, priority),
]
"""Fields of vLLM's requests (its protocol.py files) and of LMI's ChatProperties."""

LAX_STRICT = [
    field("tgi", INPUTS, "parameters.max_new_tokens", COUNT, new_tokens),
    field(
        "tgi_generate",
        INPUTS,
        "parameters.seed",
        Annotated[int, Field(ge=0, lt=1 << 64)],
        lambda one: one.sampling.seed,
    ),
    field(
        "tgi",
        INPUTS,
        "parameters.repetition_penalty",
        Annotated[float, Field(gt=0, allow_inf_nan=False)],
        lambda one: one.sampling.repetition_penalty,
    ),
    field("tgi", INPUTS, "parameters.details", bool, lambda one: one.details),
    field("mindie", INPUTS, "parameters.max_new_tokens", COUNT, new_tokens),
    field("mindie", INPUTS, "parameters.details", bool, lambda one: one.details),
    field("tei_embed", INPUTS, "normalize", bool, normalizes),
    field("tei_embed", INPUTS, "dimensions", COUNT, dimensions),
]
"""Fields of the originals that take JSON's own types alone, by serde. Triton's vLLM backend reads texts too."""

REFUSED = "refused"


def read(case: Case, value: Any) -> Any:
    try:
        return case.found(DIALECTS[case.dialect].parse(case.body(value), CAPABLE).requests[0])
    except ServingError:
        return REFUSED


def original(kind: Any, value: Any, *, strict: bool) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value, strict=strict)
    except ValidationError:
        return REFUSED


CASES = [*((case, False) for case in LAX), *((case, True) for case in LAX_STRICT)]


@pytest.mark.parametrize(("case", "strict"), CASES, ids=[f"{case.dialect}-{case.name}" for case, _ in CASES])
def test_a_value_is_read_as_the_original_reads_it(case: Case, strict: bool) -> None:
    found = {repr(value): read(case, value) for value in LAX_VALUES}
    wanted = {repr(value): original(case.kind, value, strict=strict) for value in LAX_VALUES}
    assert {name: (found[name], one) for name, one in wanted.items() if found[name] != one} == {}


@in_one_test(
    ("name", "value", "wanted"),
    [
        ("max_new_tokens", 8.0, 8),
        ("max_new_tokens", "8", REFUSED),  # which Python does not compare with a number
        ("max_new_tokens", 8.5, REFUSED),
        ("max_new_tokens", True, REFUSED),
        ("temperature", "0.5", REFUSED),
        ("ignore_eos_token", 1, True),
        ("ignore_eos_token", 0.0, False),
        ("ignore_eos_token", 2, REFUSED),
        ("ignore_eos_token", "true", REFUSED),  # where "false" would be true too
        ("seed", "42", 42),
        ("seed", " 4_2 ", 42),
        ("seed", 42.9, 42),
        ("seed", True, 1),
        ("seed", "42.0", REFUSED),
        ("seed", float("inf"), REFUSED),
        ("seed", "9" * 5000, REFUSED),
        ("seed", [42], REFUSED),
    ],
)
def test_prompts_of_lmi_are_read_as_its_python_reads_them(name: str, value: Any, wanted: Any) -> None:
    fields = {"max_new_tokens": new_tokens, "temperature": temperature, "ignore_eos_token": ignores_eos}
    for dialect in ("lmi", "tgi_compat", "dynamic_batch"):
        found = fields.get(name, lambda request: request.sampling.seed)
        case = field(dialect, INPUTS, f"parameters.{name}", None, found)
        assert read(case, value) == wanted, dialect


@in_one_test(
    ("dialect", "body"),
    [
        ("openai_chat", {**CHAT, "stream": "yes", "stream_options": {"include_usage": 1}}),
        ("openai_completions", {**PROMPT, "stream": 1.0}),
        ("openai_responses", {**TEXTS, "stream": "true"}),
        ("anthropic_messages", {**CHAT, "max_tokens": 9, "stream": "on"}),
        ("lmi", {**INPUTS, "stream": 1}),
        ("lmi_async", {**INPUTS, "stream": "1"}),
        ("lmi_async", {**CHAT, "stream": 1}),
        ("openai_transcriptions", {"file": "aQ==", "stream": "1", "temperature": "0.0"}),
    ],
)
def test_a_flag_beside_the_parameters_is_read_so_too(dialect: str, body: Body) -> None:
    assert DIALECTS[dialect].parse(body, CAPABLE).streams
