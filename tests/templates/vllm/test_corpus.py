"""Answers in vLLM's own tests are read as vLLM reads them, but for those in differences.json, each with a reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from handler.config.options.tables import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    VLLM_REASONING_PARSERS,
    VLLM_TOOL_CALL_PARSERS,
)
from handler.core.values import Finish
from handler.protocols.assistant.events import Arguments, CallStart, Event, EventParser, Reasoning
from handler.protocols.assistant.reasoning import thinking_parser
from handler.protocols.assistant.reasoning_families import choose_family
from handler.protocols.assistant.tools.formats import get_format
from handler.protocols.assistant.tools.parsing import CheckedCalls

DIFFERENCES = Path(__file__).with_name("differences.json")
"""Reasons, and by format the digests of the answers that have them: the answers themselves are vLLM's."""

Case = Mapping[str, Any]
Read = tuple[str, str, list[tuple[str, Any]]]


@pytest.fixture(scope="session")
def recorded(request: pytest.FixtureRequest) -> Sequence[Any]:
    found = request.config.getoption("--templates")
    assert found, "`make test-templates` names the directory"
    return [json.loads(line) for line in (Path(found) / "vllm.jsonl").read_text().splitlines()]


def names(case: Case) -> tuple[str, str]:
    """Return the names of the case's reasoning and tool parsers, "" for none."""
    reasoning, _, tools = case["name"].partition(" ")
    return {"reasoning": (reasoning, ""), "tools": ("", reasoning), "both": (reasoning, tools)}[case["kind"]]


def read_here(case: Case) -> bool:
    reasoning, tools = names(case)
    if "hf" in (reasoning, tools):  # its cases have no template with them; tests/unit has its own
        return False
    return reasoning in ("", *REASONING_PARSERS) and tools in ("", *TOOL_CALL_PARSERS) and "error" not in case


def parser(case: Case) -> EventParser:
    reasoning, tools = names(case)
    inner = get_format(tools).make(case["tools"]) if tools else None
    family = choose_family(reasoning, "") if reasoning else None
    if family is None:
        assert inner is not None
        return inner
    return thinking_parser(family, inner, thinking=family.thinks)


def ours(case: Case, size: int) -> Read:
    """Read an answer as our dialects do, in pieces of so many characters."""
    text, made, calls = case["text"], parser(case), CheckedCalls()
    events: list[Event] = []
    for at in range(0, len(text), size):
        events += calls.read(made.feed(text[at : at + size]))
    thought, shown, found = "", "", list[list[str]]()
    for event in [*events, *calls.end(made.flush(), Finish.EOS)]:
        if isinstance(event, str):
            shown += event
        elif isinstance(event, Reasoning):
            thought += event.text
        elif isinstance(event, CallStart):
            found.append([event.name, ""])
        elif isinstance(event, Arguments):
            found[event.number][1] += event.text
    return comparable(thought, shown, found)


def comparable(thought: str, shown: str, calls: Sequence[Sequence[str]]) -> Read:
    return thought.strip(), shown.strip(), [(name, loads(arguments)) for name, arguments in calls]


def loads(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return f"not JSON: {text}"


def digest(case: Case) -> str:
    key = json.dumps([case[part] for part in ("kind", "name", "tools", "text")], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def different(recorded: Sequence[Any]) -> Iterator[Case]:
    for case in recorded:
        if read_here(case) and ours(case, len(case["text"]) or 1) != comparable(
            case["reasoning"], case["content"], case["calls"]
        ):
            yield case


def test_answers_are_read_as_vllm_reads_them(recorded: Sequence[Any]) -> None:
    cases = recorded[1:]
    assert sum(map(read_here, cases)) > 1200, "vLLM's tests gave too few answers"
    found = {(f"{case['kind']} {case['name']}", digest(case)): case for case in different(cases)}
    listed = {
        (format, one)
        for formats in json.loads(DIFFERENCES.read_text()).values()
        for format, digests in formats.items()
        for one in digests
    }
    new = [(format, one, case["text"]) for (format, one), case in found.items() if (format, one) not in listed]
    assert new == [], "vLLM reads these in another way"
    assert listed - found.keys() == set(), "these differ no more"


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.nightly) for size in (3, 7, 64))])
def test_pieces_of_an_answer_are_read_as_the_whole(recorded: Sequence[Any], size: int) -> None:
    for case in filter(read_here, recorded[1:]):
        assert ours(case, size) == ours(case, len(case["text"]) or 1), (case["name"], case["text"])


def test_every_name_of_vllms_is_known(recorded: Sequence[Any]) -> None:
    known = {
        "tools": {*TOOL_CALL_PARSERS, *VLLM_TOOL_CALL_PARSERS},
        "reasoning": {*REASONING_PARSERS, *VLLM_REASONING_PARSERS},
    }
    for kind, groups in recorded[0].items():
        assert {name for group in groups for name in group} - known[kind] == set()


def test_names_of_one_parser_of_vllms_are_one_here(recorded: Sequence[Any]) -> None:
    """Not `hf`, whose parser is made from a model's files."""
    for group in recorded[0]["tools"]:
        made = {type(get_format(name).make([])) for name in group if name in TOOL_CALL_PARSERS and name != "hf"}
        assert len(made) <= 1, group
    for group in recorded[0]["reasoning"]:
        families = {choose_family(name, "") for name in group if name in REASONING_PARSERS}
        assert len({family._replace(name="") for family in families if family is not None}) <= 1, group
