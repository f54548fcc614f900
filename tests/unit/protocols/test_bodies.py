"""Bodies are decoded by orjson as by Python's json: the same values and types, or the same words of refusal."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handler.config.config import Config
from handler.core.errors import NotJson
from handler.core.framing import MAX_DEPTH
from handler.core.values import Task
from handler.protocols import registry
from handler.protocols.kernel.body import decode, decode_in_python, decoded_size
from handler.protocols.kernel.dialect import Dialect
from tests.one_test import in_one_test

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

DIALECTS = [
    *(registry.choose(Config(rolling_batch="disable", tgi_compat=compat)) for compat in (False, True)),
    *(registry.choose(Config(tgi_compat=compat), task) for compat in (False, True) for task in Task),
    *registry.routes("tgi").values(),
    *registry.routes("mindie").values(),
    *(dialect for task in Task for dialect in registry.routes("tgi", task).values()),
]


@in_one_test("dialect", {dialect.name: dialect for dialect in DIALECTS}.values(), ids=lambda one: one.name)
def test_a_key_that_stands_twice_is_read_as_the_original_does(dialect: Dialect) -> None:
    is_strict = dialect.name.startswith(STRICT) and dialect.name != "tgi_compat"  # that is LMI's
    if is_strict:
        with pytest.raises(NotJson, match=r'the key "[ac]" is there twice'):
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
    assert 0.85 < decoded_size(body) / size_of(decode(body, unique_keys=False), set()) < 5
