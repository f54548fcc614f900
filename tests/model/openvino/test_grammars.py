"""Answers that OpenVINO GenAI's xgrammar lets a model give: calls of tools, and each keyword of a JSON schema."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.openvino.structured_output import (
    OpenVinoCheck,
    count_logits,
    genai_arguments,
    structured_output_check,
)
from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.grammar import Notation, calls, calls_in_text
from handler.protocols.kernel.readers import structural_tag
from tests.model.openvino.scripted_model import Speaker
from tests.unit.engines.schema_cases import CASES, NONE, Case, written
from tests.unit.protocols.assistant.tool_texts import TOOLS, write

pytestmark = [pytest.mark.model, pytest.mark.long]

# -- what OpenVINO GenAI lets a model say under the rules for tool calls, with the demo model's tokenizer --------------


NOTATIONS = {
    f"{name} {text}".strip(): notation
    for name, format in FORMATS.items()
    for text, notation in format.notations.items()
    if notation.style == "json" and name != "granite4"  # which is hermes'
}
Call = tuple[str, dict[str, Any]]
BONN: Call = ("weather", {"city": "Bonn", "days": 3})
TIME: Call = ("time", {})
OTHERS: dict[str, Call] = {
    "another tool": ("rain", {}),
    "other arguments": ("weather", {"city": 3}),
    "half a name": ("weath", {"city": "Bonn"}),
}


def lines(notation: Notation) -> dict[str, str]:
    one = write(notation, BONN)
    return {
        "one": one,
        "two": write(notation, BONN, TIME),
        "text": "It rains.",
        "text before": f"Let me look. {one}",
        **{what: write(notation, call) for what, call in OTHERS.items()},
    }


@pytest.fixture(scope="module")
def speaker(model: Path) -> Speaker:
    rows = count_logits(model)
    assert rows
    return Speaker(model, rows, [line for notation in NOTATIONS.values() for line in lines(notation).values()])


def said(speaker: Speaker, rule: StructuredOutput, candidates: Mapping[str, str]) -> set[str]:
    arguments = genai_arguments(rule)
    return {what for what, line in candidates.items() if speaker.says(line, arguments)}


@pytest.mark.parametrize("name", NOTATIONS)
def test_the_model_can_say_calls_in_its_format(speaker: Speaker, name: str) -> None:
    notation, candidates = NOTATIONS[name], lines(NOTATIONS[name])
    rule = structural_tag(calls(notation, TOOLS[:2], single=False))
    asked = {what: candidates[what] for what in ("two", "other arguments")}
    assert said(speaker, rule, asked) == ({"two"} if notation.several else set())
    if notation.mark:
        rule = structural_tag(calls_in_text(notation, TOOLS[:2], ["weather"], single=False), allows_text=True)
        asked = {what: candidates[what] for what in ("text before", "other arguments")}
        assert said(speaker, rule, asked) == {"text before"}


def test_a_rule_allows_calls_of_these_tools_and_nothing_else(speaker: Speaker) -> None:
    notation, tools = NOTATIONS["hermes"], TOOLS[:2]
    candidates = lines(notation)
    assert said(speaker, structural_tag(calls(notation, tools, single=False)), candidates) == {"one", "two"}
    counted = {what: candidates[what] for what in ("one", "two")}
    assert said(speaker, structural_tag(calls(notation, tools, single=True)), counted) == {"one"}
    rule = structural_tag(calls_in_text(notation, tools, [], single=False), allows_text=True)
    assert said(speaker, rule, candidates) == {"one", "two", "text", "text before", "other arguments"}
    rule = structural_tag(calls_in_text(notation, tools, [], single=True), allows_text=True)
    assert said(speaker, rule, counted) == {"one"}


def test_many_tools_pass_the_check(model: Path) -> None:
    check: OpenVinoCheck = structured_output_check(EngineConfig(model=model))
    tools = [
        {
            "type": "function",
            "function": {"name": f"get_{kind}_{number}", "parameters": TOOLS[2]["function"]["parameters"]},
        }
        for kind in ("weather", "wine", "news", "newt")
        for number in range(8)
    ]
    notation = FORMATS["hermes"].notations[""]
    check(structural_tag(calls(notation, tools, single=False)))
    strict = {"get_wine_1", "get_newt_7"}
    check(structural_tag(calls_in_text(notation, tools, strict, single=False), allows_text=True))


# -- each keyword of a JSON schema is followed by OpenVINO GenAI's xgrammar, or refused by its name --------------------


def lost(case: Case) -> str:
    return case.lost if case.lost_openvino is None else case.lost_openvino


FOLLOWED = [case for case in CASES if not lost(case)]
REFUSED = [case for case in CASES if lost(case)]


@pytest.fixture(scope="module")
def num_logits(model: Path) -> int:
    found = count_logits(model)
    assert found
    return found


@pytest.fixture(scope="module")
def keywords_speaker(model: Path, num_logits: int) -> Speaker:
    lines = [written(one) for case in FOLLOWED for one in (case.valid, case.invalid) if one is not NONE]
    return Speaker(model, num_logits, lines)


@pytest.mark.parametrize("case", FOLLOWED, ids=lambda case: json.dumps(case.schema)[:80])
def test_it_is_followed(keywords_speaker: Speaker, case: Case) -> None:
    structured_output = genai_arguments(StructuredOutput("json_schema", json.dumps(case.schema)))
    if case.valid is not NONE:
        assert keywords_speaker.says(written(case.valid), structured_output)
    if case.invalid is not NONE:
        assert not keywords_speaker.says(written(case.invalid), structured_output)


@pytest.mark.nightly
def test_none_of_many_values_is_taken_for_another(model: Path, num_logits: int) -> None:
    """Words of few letters, which GenAI's xgrammar confuses where they stand side by side."""
    chance = random.Random(1)

    def drawn(count: int) -> list[str]:
        return list(dict.fromkeys("".join(chance.choices("abc", k=chance.randint(1, 4))) for _ in range(count)))

    values = drawn(60)
    texts = [*values, *drawn(120)]
    speaker = Speaker(model, num_logits, [*texts, *map(json.dumps, texts)])
    choice = genai_arguments(StructuredOutput("choice", json.dumps(values)))
    enum = genai_arguments(StructuredOutput("json_schema", json.dumps({"enum": values})))
    assert [text for text in texts if speaker.says(text, choice) != (text in values)] == []
    assert [text for text in texts if speaker.says(json.dumps(text), enum) != (text in values)] == []


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: json.dumps(case.schema)[:80])
def test_it_is_refused_by_name(case: Case) -> None:
    with pytest.raises(ValueError, match="is not supported by OpenVINO") as refusal:
        genai_arguments(StructuredOutput("json_schema", json.dumps(case.schema)))
    assert f"the schema's {lost(case)} is not supported" in str(refusal.value)
