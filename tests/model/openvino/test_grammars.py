"""Answers that OpenVINO GenAI's xgrammar lets a model give: calls of tools, and each keyword of a JSON schema."""

from __future__ import annotations

import json
import random
import re
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
from tests.unit.engines.characters import LATIN, pairs
from tests.unit.engines.format_texts import FORMAT_TEXTS
from tests.unit.engines.schema_cases import CASES, INT, NONE, Case, written
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


ASKED = ("two", "other arguments", "text before")  # of each notation


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
def num_logits(model: Path) -> int:
    found = count_logits(model)
    assert found
    return found


@pytest.fixture(scope="module")
def speaker(model: Path, num_logits: int) -> Speaker:
    of_notations = [lines(notation) for notation in NOTATIONS.values()]
    asked = [candidates[what] for candidates in of_notations for what in ASKED]  # side by side, so in few scripts
    return Speaker(model, num_logits, [*asked, *(line for each in of_notations for line in each.values())])


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


# -- letters stay what they are, whatever stands beside them, in each kind of rule -------------------------------------


LETTERS = [*LATIN[32:], "\x7f", "\x85", "\u0301", "\u2028", "漢", "😀"]
TEXTS = ["".join(pairs(LETTERS[at::3], ["0", "c", "F", "é"])) for at in range(3)]


def rooms(text: str) -> dict[str, tuple[StructuredOutput, str]]:
    """Return a rule for each place that a client's text may stand at, and the answer that it allows."""
    named = {"type": "object", "properties": {text: {"type": "null"}}, "required": [text]}
    quoted, escaped = json.dumps(text, ensure_ascii=False), re.escape(text)
    by_call = f'{{"name": "f", "arguments": {{{quoted}: true}}}}'
    pattern: dict[str, Any] = {"type": "string", "pattern": f"^{escaped}$"}
    tool = {**named, "properties": {text: {"const": True}}}

    def schema(value: Any) -> StructuredOutput:
        return StructuredOutput("json_schema", json.dumps(value, ensure_ascii=False))

    def tag(part: dict[str, Any]) -> StructuredOutput:
        return StructuredOutput("structural_tag", json.dumps({"type": "structural_tag", "format": part}))

    return {
        "choice": (StructuredOutput("choice", json.dumps([text, "x"])), text),
        "grammar": (StructuredOutput("grammar", f'root ::= "{text}" | "x"'), text),
        "class": (StructuredOutput("grammar", f"root ::= [{''.join(dict.fromkeys(text))}]+"), text),
        "regex": (StructuredOutput("regex", escaped), text),
        "regex class": (StructuredOutput("regex", f"[{''.join(dict.fromkeys(text))}]+"), text),
        "enum": (schema({"enum": ["x", text]}), quoted),
        "const": (schema({"const": {"a": text}}), f'{{"a": {quoted}}}'),
        "key": (schema(named), f"{{{quoted}: null}}"),
        "pattern": (schema(pattern), quoted),
        "pattern of names": (
            schema({"type": "object", "patternProperties": {f"^{escaped}$": INT}}),
            f"{{{quoted}: 1}}",
        ),
        "text in a tag": (tag({"type": "const_string", "value": text}), text),
        "regex in a tag": (tag({"type": "regex", "pattern": escaped}), text),
        "grammar in a tag": (tag({"type": "grammar", "grammar": f'root ::= "{text}"'}), text),
        "arguments": (structural_tag(calls(FORMATS["hermes"].notations[""], [function(tool)], single=True)), by_call),
    }


def function(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.fixture(scope="module")
def writer(model: Path, num_logits: int) -> Speaker:
    answers = [answer for text in TEXTS for _, answer in rooms(text).values()]
    answers += [answer.join(("<tool_call>\n", "\n</tool_call>")) for answer in answers if "arguments" in answer]
    others = [other for _, members in CLASSES.values() for other in members]
    strings = [answer for _, allowed, wrong in PATTERNS for answer in (*allowed, *wrong)]
    return Speaker(model, num_logits, [*answers, *others, *strings, *OF_FORMATS])


@pytest.mark.parametrize("room", rooms(""))  # varies faster than the text, so that rooms with equal answers follow
@pytest.mark.parametrize("text", TEXTS, ids=("first", "second", "third"))
def test_letters_stay_what_they_are(writer: Speaker, room: str, text: str) -> None:
    rule, answer = rooms(text)[room]
    line = f"<tool_call>\n{answer}\n</tool_call>" if room == "arguments" else answer
    assert writer.says(line, genai_arguments(rule))


CLASSES: dict[str, tuple[str, dict[str, bool]]] = {
    "letters": ("[äbcd]", {"ä": True, "b": True, "d": True, "e": False, "\U000e4bcd": False}),
    "ranges": ("[À-ÿA-Z]", {"À": True, "é": True, "Z": True, "ж": False, "a": False}),
    "negated": ("[^éa]", {"è": True, "ж": True, "é": False, "a": False, "c": True}),
}


@pytest.mark.parametrize("kind", ["grammar", "regex"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_allows_its_characters_alone(writer: Speaker, kind: str, name: str) -> None:
    text, members = CLASSES[name]
    rule = genai_arguments(StructuredOutput(kind, f"root ::= {text}" if kind == "grammar" else text))
    assert {member: writer.says(member, rule) for member in members} == members


PATTERNS = [
    ('^"{2}$', ['"\\"\\""'], ['""""']),
    ("^\\n{2}$", ['"\\n\\n"'], ['"\n\n"']),
    ("^.{3}$", ['"abc"', '"éäc"'], ['"a"b"', '"a\\b"', '"a\nb"', '"\\"""']),
    ("^[^a]{2}$", ['"bc"'], ['"b\\"', '"b""', '"ab"']),
    ("\\Aab\\Z", ['"ab"'], ['"AabZ"']),
]


@pytest.mark.parametrize(("pattern", "allowed", "wrong"), PATTERNS)
def test_what_a_pattern_allows_is_json(writer: Speaker, pattern: str, allowed: list[str], wrong: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern}
    rule = genai_arguments(StructuredOutput("json_schema", json.dumps(schema)))
    assert [answer for answer in allowed if not writer.says(answer, rule)] == []
    assert [answer for answer in wrong if writer.says(answer, rule)] == []


OF_FORMATS = [json.dumps(text) for texts in FORMAT_TEXTS.values() for text in (*texts.valid, *texts.invalid)]


@pytest.mark.parametrize("name", FORMAT_TEXTS)
def test_a_format_is_what_its_rfc_says(writer: Speaker, name: str) -> None:
    rule = genai_arguments(StructuredOutput("json_schema", json.dumps({"type": "string", "format": name})))
    valid, invalid = FORMAT_TEXTS[name]
    assert [text for text in valid if not writer.says(json.dumps(text), rule)] == []
    assert [text for text in invalid if writer.says(json.dumps(text), rule)] == []


def test_a_letter_that_only_xgrammars_converter_would_write_is_refused() -> None:
    schema = {"type": "array", "prefixItems": [{"enum": ["Fläche"]}]}
    with pytest.raises(ValueError, match=r"'Fläche'.*misread"):
        genai_arguments(StructuredOutput("json_schema", json.dumps(schema)))
    schema = {"type": "array", "prefixItems": [{"type": "string", "pattern": "^.$"}]}
    with pytest.raises(ValueError, match="pattern that allows a quote"):
        genai_arguments(StructuredOutput("json_schema", json.dumps(schema)))


# -- each keyword of a JSON schema is followed by OpenVINO GenAI's xgrammar, or refused by its name --------------------


def lost(case: Case) -> str:
    return case.lost if case.lost_openvino is None else case.lost_openvino


FOLLOWED = [case for case in CASES if not lost(case)]
REFUSED = [case for case in CASES if lost(case)]


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
