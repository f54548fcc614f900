"""Every word of an answer is in a call, in the text, or in the marks of a call; whatever a model spoils.

Calls in each format's notation are spoilt by one edit, and read whole and in pieces.
"""

from __future__ import annotations

import collections
import functools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.values import Finish, Token
from handler.protocols.assistant.answer import ResponseReader
from handler.protocols.assistant.events import Arguments, CallEnd, CallStart, Event
from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.grammar import Notation, write_calls

Call = tuple[str, Mapping[str, Any]]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


STRING = {"type": "string"}
TOOLS = [
    tool("erase", pattern=STRING, depth={"type": "integer"}, flags={"type": "array", "items": STRING}),
    tool("fetch", city=STRING, place={"type": "object", "properties": {"street": STRING}}),
    tool("clock"),
]
CALLS: Sequence[Sequence[Call]] = [
    [("erase", {"pattern": "kiwi mango", "depth": 37, "flags": ["lemon", "olive"]})],
    [("fetch", {"city": "quince", "place": {"street": "papaya"}})],
    [("clock", {})],
    [("clock", {}), ("fetch", {"city": "guava"})],
    [("erase", {"pattern": "melon", "depth": 5281}), ("clock", {})],
    [("fetch", {"city": "a } ] ) < plum"}), ("erase", {"flags": ["fig"], "pattern": "nut"})],
]
_DSML = "<｜DSML｜ "
OTHER_KEYS = ("args", "params", "input", "payload")
NOTATIONS = [(name, notation) for name, format in FORMATS.items() for notation in format.notations.values()]
FORMATS_WRITTEN = sorted({name for name, _ in NOTATIONS})


class Answer(NamedTuple):
    """What a client sees: the text, and of each call its name, its arguments and whether they are complete."""

    text: str
    calls: list[tuple[str, str, bool]]


def read(format: str, pieces: Sequence[str], finish: Finish = Finish.EOS) -> Answer:
    reader = ResponseReader(FORMATS[format].make(TOOLS))
    events: list[Event] = [event for piece in pieces for event in reader.feed(Token(5, piece, None, False))]
    text, calls = "", list[list[Any]]()
    for event in [*events, *reader.flush(finish)]:
        if isinstance(event, str):
            text += event
        elif isinstance(event, CallStart):
            calls.append([event.name, "", False])
        elif isinstance(event, Arguments):
            calls[event.number][1] += event.text
        elif isinstance(event, CallEnd):
            calls[event.number][2] = event.whole
    return Answer(text, [(name, arguments, whole) for name, arguments, whole in calls])


_WORD = re.compile(r"[^\W_]{2,}")
_ESCAPE = re.compile(r"\\.?", re.DOTALL)


def words(text: str) -> list[str]:
    return _WORD.findall(_ESCAPE.sub(" ", text))


@functools.cache
def markup(notation: Notation) -> frozenset[str]:
    """The words of a notation's marks: those of its calls without their own words."""
    written = write_calls(notation, [("NAME", {"KEY": "VALUE", "OBJECT": {"KEY": [1]}, "NUMBER": 7}), ("NAME", {})])
    known = {"NAME", "KEY", "VALUE", "OBJECT", "NUMBER", "_"}
    return frozenset(words(written)) - known | {"arguments", "parameters", "id", "true", "false", "functions"}


_PART = re.compile(r"<[^<>\n]*>|\[[A-Z_]+\]|\]<\]minimax\[>\[|\w+|\s+|.", re.DOTALL)
_SIGNS = "{}[]()<>\"',:=\\/|#"


def replaced(parts: Sequence[str], at: int, *others: str) -> str:
    return "".join([*parts[:at], *others, *parts[at + 1 :]])


def spoil(text: str, draw: random.Random) -> Iterator[str]:
    """Make one edit of each kind, each at a place that is drawn, in an answer that ends where it ended before."""
    parts = _PART.findall(text)
    at, place = draw.randrange(len(parts)), draw.randrange(len(text))
    for others in ([], [parts[at]] * 2, [parts[at], "zork"], [parts[at], " zork "]):
        yield replaced(parts, at, *others)
    sign = text[place]
    for signs in ("", sign * 2, "x", draw.choice(_SIGNS), sign + draw.choice(_SIGNS)):
        yield text[:place] + signs + text[place + 1 :]
    marks = [n for n, part in enumerate(parts) if len(part) > 2 and part[0] in "<[]"]
    brackets = [n for n, part in enumerate(parts) if part in {*"{}[](),\"'"}]
    for places in filter(None, (marks, brackets)):
        at = draw.choice(places)
        yield replaced(parts, at)
        yield replaced(parts, at, *[parts[at]] * 2)
    yield re.sub("arguments|parameters", draw.choice(OTHER_KEYS), text, count=1)
    yield re.sub(r'"(?:arguments|parameters)":\s*\{(.*?)\}', r"\1", text, count=1)


def cut(text: str, draw: random.Random) -> Iterator[str]:
    """Make edits after which the model has not written all that it meant."""
    parts = _PART.findall(text)
    yield text[: draw.randrange(len(text))]
    yield replaced(parts, draw.randrange(len(parts)), draw.choice(parts))


NOT_WORDS = [
    re.compile(r"<\|start\|>(?:(?!<\|message\|>).)*<\|message\|>", re.DOTALL),  # the header of a message
    re.compile(r"(?<=\]<\]minimax\[>\[)</\w+>?"),  # an end of a parameter
    re.compile(r'"tool_call_id": "[^"]*"'),
    re.compile(r'(?:type|index)="[^"]*"'),
    re.compile(r"(?<=\w):\d+(?=<\|)"),  # the index of a call
]
"""What is a mark, whatever its words are."""


def lost(answer: Answer, text: str, notation: Notation) -> list[str]:
    """The words of an answer that its client does not see."""
    shown = answer.text + "\n" + "\n".join(f"{name} {arguments}" for name, arguments, _ in answer.calls)
    told = text
    for pattern in NOT_WORDS:
        told = pattern.sub(" ", told)
    tail = told[max(map(told.rfind, "<[]")) :]
    if tail and tail in write_calls(notation, CALLS[3]):  # the answer ends within a mark
        told = told.removesuffix(tail)
    marks = re.compile("|".join(sorted(markup(notation), key=len, reverse=True)))
    counted = collections.Counter(word for word in words(told) if word not in markup(notation))
    return [
        word
        for word, count in counted.items()
        if shown.count(word) < count and shown.count(marks.sub("", word)) < count
    ]


class Drawn(NamedTuple):
    format: str
    notation: Notation
    calls: Sequence[Call]
    text: str
    finish: Finish
    split: int
    meant: bool  # whether the model wrote all arguments


def draws(format: str, seed: int) -> Iterator[Drawn]:
    """Spoil a drawn answer in each of the format's notations by one edit of each kind."""
    draw = random.Random(f"{format} {seed}")
    for notation in [notation for name, notation in NOTATIONS if name == format]:
        calls = draw.choice(CALLS)[: None if notation.several else 1]
        before, after = draw.choice(["", "", "Let me see. "]), draw.choice(["", "", " Then more."])
        whole = before + write_calls(notation, calls) + after
        texts = [*((text, True) for text in spoil(whole, draw)), *((text, False) for text in cut(whole, draw))]
        for text, meant in texts:
            finish = draw.choice((Finish.EOS, Finish.EOS, Finish.LENGTH))
            yield Drawn(format, notation, calls, text, finish, draw.randrange(len(text) + 1), meant)


def fault(drawn: Drawn) -> str:
    """Return what is wrong with how an answer is read, or ""."""
    format, notation, calls, text, finish, split, meant = drawn
    whole = read(format, [text], finish)
    for pieces in (text, [text[:split], text[split:]]):
        if (found := read(format, pieces, finish)) != whole:
            return f"streamed {found}, but whole {whole}"
    if missing := lost(whole, text, notation):
        return f"lost {missing}: {whole}"
    without = {name for name, arguments in calls if not arguments}
    values = {word for _, arguments in calls for word in words(json.dumps(arguments))}
    for name, arguments, complete in whole.calls:
        elsewhere = meant and values.intersection(words(whole.text))
        if complete and json.loads(arguments) == {} and name not in without and elsewhere:
            return f"complete, but its arguments stand elsewhere: {whole}"
    return ""


def faults(format: str, seeds: Sequence[int]) -> list[str]:
    wrong = [(drawn, fault(drawn)) for seed in seeds for drawn in draws(format, seed)]
    return [f"{drawn.text!r} at {drawn.split}, {drawn.finish}: {told}" for drawn, told in wrong if told]


def test_every_format_is_drawn() -> None:
    assert set(FORMATS) == {*FORMATS_WRITTEN}
    assert sum(1 for format in FORMATS_WRITTEN for _ in draws(format, 0)) > 15 * len(FORMATS)


@pytest.mark.parametrize("format", FORMATS_WRITTEN)
def test_nothing_of_a_spoilt_answer_vanishes(format: str) -> None:
    assert faults(format, range(3)) == []


NESTED: Call = (
    "fetch",
    {"city": "guava", "place": {"street": "papaya", "doors": ["lemon", {"key": "olive"}], "x": "fig"}},
)


@pytest.mark.parametrize("format", FORMATS_WRITTEN)
def test_nothing_of_a_nested_value_vanishes_with_other_text_before_its_cut(format: str) -> None:
    draw = random.Random(format)
    wrong = []
    for notation in [notation for name, notation in NOTATIONS if name == format]:
        parts = _PART.findall(write_calls(notation, [NESTED]))
        for end in range(1, len(parts), 2):
            at = draw.randrange(end)
            text = "".join([*parts[:at], draw.choice(["zork", " zork ", "'", '"zork"']), *parts[at:end]])
            finish = draw.choice((Finish.EOS, Finish.LENGTH))
            drawn = Drawn(format, notation, [NESTED], text, finish, draw.randrange(len(text)), meant=False)
            wrong += [f"{text!r}: {told}"] if (told := fault(drawn)) else []
    assert wrong == []


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("pythonic", "[erase(pattern={'lemon': 1, 'olive'"),
        ("lfm2", "<|tool_call_start|>[erase(pattern='a', flags=['fig', {'olive'"),
        ("llama4_pythonic", "<|python_start|>[erase(pattern={'lemon'kiwi: 'olive'})]<|python_end|>"),
        (
            "deepseek_v41",
            f'{_DSML}invoke name="clock">{_DSML}parameter name="arguments" string="false">{{"lemon": "olive"}}',
        ),
        ("qwen3_coder", "<tool_call><function=erase>lemon\n<parameter=pattern>olive\n"),
    ],
)
def test_nothing_of_a_value_that_is_cut_vanishes(format: str, text: str) -> None:
    for finish in (Finish.EOS, Finish.LENGTH):
        whole = read(format, [text], finish)
        shown = f"{whole.text} {whole.calls}"
        assert [word for word in ("lemon", "kiwi", "olive", "fig") if text.count(word) != shown.count(word)] == []
        assert read(format, text, finish) == whole


@pytest.mark.parametrize(("format", "begin"), [("phi4_mini_json", "functools["), ("xlam", "["), ("llama3_json", "[")])
def test_an_object_of_a_broken_list_is_shown_once(format: str, begin: str) -> None:
    call = '{"name": "fetch", "arguments": {"city": "fig"}}'
    answer = read(format, [f'{begin}{{"name": "erase", "arguments": "olive": 1}}}}, {call}]'])
    assert answer.text.count("olive") == 1
    assert answer.calls == [("fetch", '{"city": "fig"}', True)]


def test_a_name_before_a_broken_call_of_inkling_is_no_part_of_the_next() -> None:
    call = '<|content_invoke_tool_json|>{"name": "clock", "args": {}}<|end_message|>'
    broken = 'lemon<|content_invoke_tool_json|>{"name": 1}'
    answer = read("inkling", [f"{broken}<|end_message|><|message_model|>{call}"])
    assert answer == Answer(broken, [("clock", "{}", True)])


@pytest.mark.parametrize("format", FORMATS_WRITTEN)
def test_a_spoilt_answer_is_read_alike_at_every_cut(format: str) -> None:
    drawn = random.Random(format).choice([*draws(format, 3)])
    whole = read(format, [drawn.text], drawn.finish)
    for split in range(len(drawn.text) + 1):
        assert read(format, [drawn.text[:split], drawn.text[split:]], drawn.finish) == whole, split


@given(format=st.sampled_from(FORMATS_WRITTEN), seed=st.integers(4, 1_000_000))
def test_nothing_of_any_spoilt_answer_vanishes(format: str, seed: int) -> None:
    assert faults(format, [seed]) == []


@pytest.mark.parametrize("format", FORMATS_WRITTEN)
def test_well_formed_answers_are_read(format: str) -> None:
    for notation in [notation for name, notation in NOTATIONS if name == format]:
        for calls in CALLS if notation.several else [calls[:1] for calls in CALLS]:
            text = write_calls(notation, calls)
            answer = read(format, [text])
            assert answer == read(format, text)
            assert answer.text.strip() == ""
            assert [(name, json.loads(arguments), whole) for name, arguments, whole in answer.calls] == [
                (name, dict(arguments), True) for name, arguments in calls
            ]
