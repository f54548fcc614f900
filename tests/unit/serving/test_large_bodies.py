"""Large bodies: how much they may contain, and how a value is taken apart and put together again."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from handler.core.errors import NotJson, TooLarge
from handler.core.framing import dumps
from handler.engines.process.sandbox import LimitExceeded, MemoryLimitExceeded
from handler.protocols.kernel.body import decode_in_python, value_size
from handler.serving import large_bodies
from handler.serving.large_bodies import LargeBodies, check_amount
from tests.limits import MIB, undocumented


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five values, four numbers, and ten characters in a string."""
    monkeypatch.setattr(large_bodies, "MAX_VALUES", 5)
    monkeypatch.setattr(large_bodies, "MAX_NUMBERS", 4)
    monkeypatch.setattr(large_bodies, "MAX_TEXT", 10)


@pytest.mark.parametrize(
    "value",
    [
        ["a"] * 4,
        [[], {}, [], "a"],
        {"a": "b", "c": []},
        [1, 2.5, True, None],
        {"a": [1, 2], "b": {}},
        "a" * 10,
        ["a" * 10],
        7,
    ],
)
@pytest.mark.usefixtures("few")
def test_as_much_as_a_large_body_may_contain_is_read(value: Any) -> None:
    check_amount(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["a"] * 5, "the body contains more than 5 strings, names, lists and objects"),
        ([[[[[["a"]]]]]], "the body contains more than 5 strings, names, lists and objects"),
        ({"a": 1, "b": 2, "c": {"d": 3, "e": 4}}, "the body contains more than 5 strings, names, lists and objects"),
        ([1, 2.5, True, None, False], "the body contains more than 4 numbers"),
        ([[1, 2], [3, 4, 5]], "the body contains more than 4 numbers"),
        ("a" * 11, "the body has a string of 11 characters; at most 10 are read"),
        ({"a" * 12: 1}, "the body has a string of 12 characters; at most 10 are read"),
    ],
)
@pytest.mark.usefixtures("few")
def test_more_than_a_large_body_may_contain_is_refused(value: Any, words: str) -> None:
    with pytest.raises(TooLarge) as raised:
        check_amount(value)
    assert raised.value.message == words


def read(body: bytes, *, plain: bool = False, unique_keys: bool = False) -> Any:
    """What becomes of a body, but within one process."""
    try:
        *parts, data = large_bodies.make_reader()(large_bodies.BodyForm(plain, unique_keys), memoryview(body))
    finally:
        gc.enable()
    value, size = large_bodies._Unpickler(data, parts).load()
    as_decoded = {"inputs": body.decode()} if plain else decode_in_python(body, unique_keys=False)
    assert size == value_size(as_decoded)
    return value


@pytest.mark.parametrize(
    "value",
    [
        {"a": "b" * 64, "numbers": list(range(64))},
        {"a": "b" * 65, "c": ["d" * 100_000, "e" * 65, 1]},
        {"numbers": [1.5, 2] * 100_000, "texts": ["a"] * 100},
        [list(range(65)), list(range(1 << 16)), list(range(70_000)), "f" * (1 << 16)],
        [[True] * 100, [None] * 100, [[1] * 100] * 100],
    ],
)
def test_a_value_is_the_same_after_its_parts_are_joined(value: Any) -> None:
    assert read(dumps(value)) == value


def test_a_plain_text_is_an_input() -> None:
    text = "é" * 100_000
    assert read(text.encode(), plain=True) == {"inputs": text}


def test_a_key_may_stand_twice_where_the_dialect_says_so() -> None:
    assert read(b'{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(NotJson):
        read(b'{"a": 1, "a": 2}', unique_keys=True)


def test_a_value_too_deep_to_be_taken_apart_is_not_valid() -> None:
    def deep(*given: Any) -> Any:
        raise RecursionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_bodies._Pickler, "persistent_id", deep)
        with pytest.raises(NotJson, match=r"^the body is not valid JSON: nested too deeply$"):
            read(b"[]")


def test_the_process_takes_the_limits_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = LargeBodies()
    jobs = list[Any]()

    def run(job: Any, body: bytes) -> Any:
        jobs.append(job)
        raise LimitExceeded

    monkeypatch.setattr(bodies.process, "run", run)
    with pytest.raises(TooLarge, match=r"^parsing the body takes more than 20 s, or crashes the parser$"):
        bodies.decode(bytes(100), plain=True, unique_keys=False)
    ((form, limits, size),) = jobs
    assert (form, limits.memory, limits.seconds, size) == ((True, False), (256 << 20) + 1200, 20, 100)

    def starve(job: Any, body: bytes) -> Any:
        raise MemoryLimitExceeded

    monkeypatch.setattr(bodies.process, "run", starve)
    with pytest.raises(TooLarge, match=r"^parsing the body needs more than 256 MiB$"):
        bodies.decode(bytes(100), plain=False, unique_keys=True)
    bodies.close()


def test_the_limits_of_large_bodies_are_documented() -> None:
    assert not undocumented(
        "wire/README.md",
        f"bodies of {large_bodies.LARGE / MIB:g} MiB or more",
        f"{large_bodies.MAX_VALUES:,} strings, names, lists and objects in total",
        f"{large_bodies.MAX_NUMBERS:,} numbers",
        f"{large_bodies.MAX_TEXT:,} characters in each string",
        f"{large_bodies.SECONDS:g} s of CPU time for parsing",
        f"{large_bodies.MEMORY / MIB:g} MiB of memory for parsing, plus {large_bodies.MEMORY_FACTOR} bytes for each",
        f"The server accepts {large_bodies.MAX_WAITING} such requests at a time, whether they are being parsed, "
        "tokenized or waiting",
        f"if their bodies are at most {large_bodies.QUICK_BODY / MIB:g} MiB",
    )


def test_a_body_that_was_read_makes_room_for_the_next() -> None:
    bodies = LargeBodies()
    for _ in range(2 * large_bodies.MAX_WAITING + 1):
        assert bodies.submit(1 << 30, int).result(20) == 0
        assert bodies.submit(1, int).result(20) == 0
    assert bodies._waiting.taken == 0
    bodies.close()
