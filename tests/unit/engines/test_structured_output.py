"""Guides before an engine sees them: grammars, expressions, schemas and structural tags."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from handler.core.values import StructuredOutput
from handler.engines.openvino.structured_output import genai_arguments
from handler.engines.structured_output import keywords
from handler.engines.structured_output.abridged import abridged_expression, abridged_parts
from handler.engines.structured_output.ebnf import InvalidGrammar, acyclic
from handler.engines.structured_output.json_grammar import json_grammar
from handler.engines.structured_output.xgrammar import (
    Walker,
    cyclic_reference,
    ignored,
    rewrite,
    unescaped_pattern,
    with_schemas,
    without_text,
)
from handler.engines.trtllm.sampling import check
from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.grammar import calls, calls_in_text
from handler.protocols.kernel.readers import structural_tag
from tests.doubles.steps import steps
from tests.one_test import in_one_test
from tests.unit.engines.schema_cases import CASES, Case

# -- ebnf --------------------------------------------------------------------------------------------------------------
# xgrammar's EBNF: rules that derive themselves alone are refused, and long parts can be passed by in a trial.


HIDDEN = 'root ::= [a-z]{300} s\ns ::= s s s s | [a-z] | ""'

CYCLIC = {
    "itself": ("root ::= root", "root"),
    "one of several": ('root ::= "a" s\ns ::= "b" | s', "s"),
    "after a prefix": (HIDDEN, "s"),
    "by way of others": ('root ::= "x" a\na ::= b | "a"\nb ::= c\nc ::= a', "a"),
    "in a bracket": ('root ::= "x" a\na ::= ("b" | (a)) | "c"', "a"),
    "beside what may be empty": ('root ::= "x" a\na ::= n a n | "a"\nn ::= " "? [a]* ("b" | "") "c"{0,3}', "a"),
    "beside a rule that is empty by another": ('root ::= "x" a\na ::= a n | "a"\nn ::= m m\nm ::= "" | "b"', "a"),
    "repeated": ('root ::= "x" a\na ::= a+ | "a"', "a"),
    "optional": ('root ::= "x" a\na ::= (a?) | "a"', "a"),
    "with a comment and attributes": ('root ::= "#" a # "\na[lazy] ::= "b" | a # c', "a"),
    "in a macro": ('root ::= TagDispatch(("a", root), loop_after_dispatch=false)', "root"),
}

FINE = {
    "on the left": 'root ::= root "a" | "a"',
    "on the right": 'root ::= "a" root | ""',
    "in the middle": 'root ::= "(" root ")" | "x"',
    "beside what is never empty": 'root ::= "x" a\na ::= n a | "a"\nn ::= " "+ | [b]{1,3}',
    "a repetition of what may be empty": 'root ::= (ws "a")*\nws ::= [ \\n]*',
    "signs in texts": 'root ::= "::= root \\" (" ["root)\\]|] | "\\\\"',
    "what only xgrammar may refuse": r'root ::= "\U00110000" | [\U00110000-\UFFFFFFFF] | "a"',
    "a look-ahead": 'root ::= a "b"\na ::= "a" (= "b" root)',
}


@in_one_test("name", CYCLIC)
def test_a_cyclic_rule_is_refused_by_its_name(name: str) -> None:
    text, rule = CYCLIC[name]
    with pytest.raises(ValueError, match="is cyclic") as refusal:
        acyclic(text)
    assert str(refusal.value).startswith(f"the rule '{rule}' ") or name in ("by way of others", "in a macro")


@in_one_test("name", FINE)
def test_recursion_with_text_beside_it_is_fine(name: str) -> None:
    acyclic(FINE[name])


@in_one_test("text", ["", 'start: "a"', "root ::= x", 'root ::= ("a"', "root ::= a{}\na ::= [b]", "a\0"])
def test_what_is_no_grammar_is_unreadable(text: str) -> None:
    if text:
        with pytest.raises(InvalidGrammar, match="EBNF"):
            acyclic(text)
    else:
        assert acyclic(text).abridged() == [""]


@in_one_test(
    ("text", "abridged"),
    [
        ("root ::= [a-z]{300} s", '((([a-z]{300,300}) | "~") (s | "~"))'),
        (
            'root ::= "x" (w ","?)+ [0-9]* s{1,4}',
            '("x" (((w (","?))+) | "~") (([0-9]*) | "~") ((s{1,4}) | "~"))',
        ),
        ('root ::= w{0, -1} "y"{31}', '(((w*) | "~") ("y"{31,31}))'),
        ('root ::= [^.]* "." [ -~]', '((([^.~]*) | "~") "." [ -}])'),
        (r"root ::= [~!]* [a-z~+] [\]~] [~]", r'((("!"*) | "~") [a-z+] "]~")'),
        ("root ::= long w", '((long | "~") w)'),
        (f'root ::= "{"x" * 32}" w?', f'(("{"x" * 32}" | "~") (w?))'),
        (
            'root ::= Regex("^[a-z]+$", json_string=true) w',
            r'(Regex ( "(?:(?:[a-z]){1,}|\\u007e)" , json_string = true ) w)',
        ),
        ('root ::= Regex("(?=a)") w', '(Regex ( "(?=a)" ) w)'),
    ],
)
def test_what_can_be_long_can_be_passed_by(text: str, abridged: str) -> None:
    rules = '\ns ::= "(" s ")" | "x"\nlong ::= half half\nhalf ::= w{16} | "y"{20} w\nw ::= "w"'
    assert acyclic(text + rules).abridged()[0].split("\n")[0].strip() == f"root ::= {abridged}"


def test_a_recursion_may_go_on_or_end() -> None:
    assert acyclic('root ::= [a-z]* s\ns ::= "(" s ")" | "x"').abridged() == [
        'root ::= ((([a-z]*) | "~") (s | "~"))\ns ::= (("(" (s | "~") ")") | "x")',
        'root ::= ((([a-z]*) | "~") s)\ns ::= (("(" s ")") | "x")',
    ]


def test_what_is_written_can_be_read_again() -> None:
    for text in FINE.values():
        for shorter in acyclic(text).abridged():
            acyclic(shorter)


def test_a_schema_that_leads_back_to_itself_gives_a_cyclic_grammar() -> None:
    for schema in ({"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"type": "string"}]}):
        grammar = json_grammar(schema)
        assert grammar is not None
        with pytest.raises(ValueError, match="cyclic"):
            acyclic(grammar)
    tree = json_grammar(
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"items": {"$ref": "#"}, "type": "array"}}}
    )
    assert tree is not None
    acyclic(tree)


@in_one_test(
    "text",
    [
        "\n".join(["root ::= a0", *(f"a{n} ::= a{n + 1} a{n + 1}" for n in range(300)), 'a300 ::= ""']),
        "root ::= " + " ".join(f"a{n}" for n in range(700)) + "\n" + "\n".join(f'a{n} ::= ""' for n in range(700)),
        "root ::= " + "(" * 90 + '"a" ' * 3900 + ")" * 90,
        "root ::= " + "(" * 8000 + '"a"' + ")" * 8000,
        "\n".join(["root ::= a0", *(f'a{n} ::= "a" a{n + 1}' for n in range(5_000)), 'a5000 ::= "a"']),
    ],
    ids=["doubling", "many that are empty", "brackets", "too many brackets", "a chain"],
)
def test_the_work_is_linear_in_structured_output(text: str) -> None:

    def read() -> None:
        with contextlib.suppress(InvalidGrammar):  # too many brackets
            acyclic(text).abridged()

    assert steps(read) < 3_000_000


def test_tensorrt_llm_gets_no_cyclic_rule_either() -> None:
    with pytest.raises(ValueError, match="rule 's' is cyclic"):
        check(StructuredOutput("grammar", HIDDEN))
    check(StructuredOutput("grammar", 'root ::= "a"'))
    check(StructuredOutput("grammar", 'start: "a"'))  # llguidance's notation


# -- expressions in which one character may stand for each part that can be long ---------------------------------------


@in_one_test(
    ("expression", "allowed", "refused"),
    [
        ("[a-z]{300}(([a-z]+ ?)+,?)+", ["~~", "~~ ,ab,~", "a" * 300 + "~"], ["~", "a~", "", "~ ~"]),
        (r"\d{3}-x{2,40}|(?:ab)*", ["123-~", "123-xx", "~", "abab", ""], ["~-~", "~~", "12~"]),
        ("(a)?(b)c{2,}?", ["abcc", "b~"], ["~bcc", "~"]),
        (r"([()\]]|[^)])*[](]", ["~]", "~(", "x]"], ["~~]", "x~]", "~~"]),
        (".*x[ -~]?[!-é0-9]{40}", ["~x~", "~x ~", "abx}~"], ["a~x~", "~x~~", "~x "]),
        (r"[~a]x[b\~]{40}[~]*[-~][\x20-~]", ["ax~~-}", "ax~--"], ["~x~~-a", "ax~~-~", "ax~~a-"]),
        ("^" + "x" * 32 + "y?$", ["~", "~y", "x" * 32], ["~yy", "x~"]),
        ("^" + "[q-z]" * 32 + "z?[ab]$", ["~a", "~zb", "q" * 32 + "a"], ["a", "~~", "~qa"]),
        ("(" + "x" * 16 + "[ab]?){2}c", ["~c"], ["~~c", "~"]),
    ],
)
def test_what_can_be_long_in_an_expression_can_be_passed_by(
    expression: str, allowed: list[str], refused: list[str]
) -> None:
    pattern = re.compile(abridged_expression(expression))
    assert [text for text in allowed if not pattern.fullmatch(text)] == []
    assert [text for text in refused if pattern.fullmatch(text)] == []


@in_one_test("expression", ["((((a))", "a)+", "\\", "[", "(?", "a+(?=b)"])
def test_what_is_no_expression_is_left_to_the_engine(expression: str) -> None:
    assert abridged_parts(StructuredOutput("regex", expression)) == []


def test_patterns_are_found_wherever_a_schema_has_them() -> None:
    schema = {"anyOf": [{"pattern": "(a)+"}, {"patternProperties": {"(b)+": {"items": {"pattern": "c"}}}}]}
    found = abridged_parts(StructuredOutput("json_schema", json.dumps(schema)))
    assert {part.value for part in found} == {abridged_expression(text) for text in ("a+", "b+", "c")}
    assert {part.kind for part in found} == {"regex"}
    assert abridged_parts(StructuredOutput("json_schema", '{"enum": [{"pattern": 1}, "pattern"], "pattern": []}')) == []
    assert abridged_parts(StructuredOutput("choice", '["(a)+"]')) == ()


# -- which keyword of a schema is found to be lost; that it would be, the engines' own tests show ----------------------


ALL, NEITHER = True, False  # whether xgrammar is recent


@in_one_test("case", CASES, ids=lambda case: json.dumps(case.schema)[:80])
def test_a_keyword_is_found(case: Case) -> None:
    assert (ignored(case.schema, ALL) or "") == case.lost


@in_one_test("case", [case for case in CASES if case.lost_openvino], ids=lambda case: case.lost_openvino)
def test_what_an_older_one_loses_is_found(case: Case) -> None:
    assert ignored(case.schema, NEITHER) == case.lost_openvino


def test_what_allows_everything_is_not_lost() -> None:
    idle = {
        "uniqueItems": False,
        "required": [],
        "dependentRequired": {},
        "patternProperties": {},
        "propertyNames": True,
    }
    assert ignored({"type": ["array", "object"], **idle}, NEITHER) is None
    assert ignored(idle, NEITHER) is None


def deep(levels: int, inside: Any) -> Any:
    for _ in range(levels):
        inside = {"type": "array", "items": inside}
    return inside


def test_depth_is_no_matter() -> None:
    found = ignored(deep(5000, {"not": {}}), ALL)
    assert found is not None
    assert found.startswith("...")
    assert found.endswith("items.items.not")
    assert len(found) < 200


def test_references_may_go_round() -> None:
    assert ignored({"$ref": "#"}, ALL) is None
    tree = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "string"}]}
    assert ignored({"$defs": {"tree": tree}, "$ref": "#/$defs/tree", "type": "string"}, ALL) is None
    assert ignored({"$defs": {"tree": tree}, "$ref": "#/$defs/tree", "type": "array"}, ALL) == "type beside $ref"
    assert ignored({"$ref": "#/nowhere"}, ALL) is None  # which xgrammar refuses


def test_many_branches_are_looked_at_once() -> None:
    """Each refers twice to the next: 2 to the power of 60 ways."""
    steps = {str(n): {"type": "string", "anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(60)}
    last = {"60": {"type": "string", "not": {}}}
    assert ignored({"$defs": {**steps, **last}, "$ref": "#/$defs/0"}, ALL) == "$defs.60.not"


ODD: list[Any] = [None, True, 0, 1.5, "", "#/x", [], [1], [[]], {}, {"type": 1}, {"a": []}, ["string", 1]]


def test_what_is_no_schema_raises_nothing() -> None:
    """xgrammar says what is wrong with it."""
    chance = random.Random(0)
    names = sorted({name for case in CASES if isinstance(case.schema, dict) for name in case.schema})
    for _ in range(20_000):
        some = {name: chance.choice(ODD) for name in chance.sample(names, 3)}
        ignored(some if chance.random() < 0.5 else {"type": chance.choice(["object", "array", "string"]), **some}, ALL)
    for odd in ODD:
        ignored(odd, ALL)


TYPED: dict[str, Callable[[int], Any]] = {
    "a chain of references": lambda n: {
        **{str(k): {"type": "string", "$ref": f"#/{k + 1}"} for k in range(n)}, str(n): {"type": "string"},
        "type": "string", "$ref": "#/0",
    },
    "many references to many branches": lambda n: {
        "anyOf": [{"type": "string", "$ref": "#/a"}] * n, "a": {"anyOf": [{"type": "string"}] * n}
    },
    "many references to many values": lambda n: {
        "anyOf": [{"type": "integer", "$ref": "#/a"}] * n, "a": {"enum": [*range(n)]}
    },
    "branches in branches": lambda n: nested(n, lambda inside: {"type": "string", "anyOf": [inside]}),
    "objects in objects": lambda n: nested(n, lambda inside: {"type": "object", "properties": {"a": inside}}),
    "many properties": lambda n: {"type": "object", "properties": {str(k): {} for k in range(20 * n)}},
}  # fmt: skip


def nested(depth: int, around: Callable[[Any], Any]) -> Any:
    found: Any = {"type": "string"}
    for _ in range(depth):
        found = around(found)
    return found


def lookups(monkeypatch: pytest.MonkeyPatch, schema: Any) -> int:
    """How often the types of a subschema are looked up."""
    count = 0
    real = keywords.names_in

    def names(value: Any) -> list[str]:
        nonlocal count
        count += 1
        return real(value)

    monkeypatch.setattr(keywords, "names_in", names)
    ignored(schema, ALL)
    monkeypatch.undo()
    return count


@pytest.mark.parametrize("name", TYPED)
def test_types_are_looked_up_within_a_budget(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A schema's text has at most 16,384 characters, so it has some hundred subschemas of these."""
    schema = json.loads(json.dumps(TYPED[name](300)))
    assert lookups(monkeypatch, schema) <= 20_000
    assert steps(lambda: ignored(schema, ALL)) < 1_000_000


def test_a_type_that_is_too_costly_to_look_up_is_refused_by_its_name() -> None:
    assert ignored(TYPED["many references to many branches"](30), ALL) is None
    schema = json.loads(json.dumps(TYPED["many references to many branches"](300)))
    assert str(ignored(schema, ALL)).endswith(".type beside $ref")


@in_one_test(
    ("schema", "path"),
    [
        ({"type": "string", "pattern": "^[a-z]+$"}, None),
        ({"type": "string", "pattern": "^.{3}$"}, "pattern"),
        ({"properties": {"a": {"items": {"type": "string", "pattern": '"'}}}}, "properties.a.items.pattern"),
        ({"type": "object", "patternProperties": {r"^\n": {}}}, "patternProperties"),
        ({"type": "object", "propertyNames": {"pattern": "\\\\"}}, "propertyNames.pattern"),
        ({"type": "object", "properties": {"pattern": {"enum": ['"']}}}, None),
        ({"type": "string", "pattern": "("}, None),  # which xgrammar refuses
    ],
)
def test_a_pattern_that_xgrammar_does_not_escape_is_found(schema: Any, path: str | None) -> None:
    assert unescaped_pattern(schema) == (path and f"{path} that allows a quote, a backslash or a control character")


# -- what the installed xgrammar would misread is rewritten ------------------------------------------------------------


def rewritten_schema(schema: Any) -> Any:
    return json.loads(rewrite(StructuredOutput("json_schema", json.dumps(schema))).value)


def test_patterns_and_formats_are_rewritten_where_they_are_schemas() -> None:
    quote: Any = {"type": "string", "pattern": '^"$'}
    ours = {"type": "string", "pattern": r"\u005c\u0022"}
    same = {"enum": [quote], "default": quote, "examples": [quote], "pattern": "x" * 0}
    schema = {
        "$defs": {"a": quote},
        "properties": {"pattern": quote, "format": {"type": "string", "format": "ipv4"}, "b": {"anyOf": [quote, True]}},
        "items": {"prefixItems": [quote], "propertyNames": quote},
        "patternProperties": {'"': quote},
        "x-mine": quote,  # a reference may lead to it
        **same,
    }
    found = rewritten_schema(schema)
    ipv4 = found["properties"].pop("format")
    assert re.fullmatch(ipv4["pattern"], "1.2.3.4")
    assert not re.fullmatch(ipv4["pattern"], "01.2.3.4")
    assert ipv4.keys() == {"type", "pattern"}
    assert found == {
        "$defs": {"a": ours},
        "properties": {"pattern": ours, "b": {"anyOf": [ours, True]}},
        "items": {"prefixItems": [ours], "propertyNames": ours},
        "patternProperties": {r"\u005c\u0022": ours},
        "x-mine": ours,
        **same,
    }


@in_one_test(
    "schema",
    [
        {"type": "string", "format": "email"},
        {"type": "string", "format": "date", "pattern": "("},
        {"type": "integer", "format": "date"},
        {"type": "string", "pattern": "(?=a)"},
        {"pattern": 3, "properties": [], "anyOf": {}, "format": []},
        True,
    ],
)
def test_what_is_not_ours_to_rewrite_stays(schema: Any) -> None:
    assert rewritten_schema(schema) == schema


def test_a_schema_may_be_nested_deeply() -> None:
    assert rewrite(StructuredOutput("json_schema", '{"pattern": "a", "items":' * 900 + "{}" + "}" * 900))
    assert rewritten_schema(deep(9, {"pattern": "a"})) == deep(9, {"pattern": "a"})


@in_one_test(
    ("structured_output", "value"),
    [
        (StructuredOutput("regex", r"\A\xe4b\Z"), r"\u00e4b"),
        (StructuredOutput("regex", "(?=a)"), "(?=a)"),
        (StructuredOutput("grammar", 'root ::= "a"'), 'root ::= "a"'),
        (StructuredOutput("choice", '["\\\\A"]'), '["\\\\A"]'),
    ],
)
def test_an_expression_is_rewritten(structured_output: StructuredOutput, value: str) -> None:
    assert rewrite(structured_output).value == value


def test_the_parts_of_a_tag_are_rewritten() -> None:
    parts: list[dict[str, Any]] = [
        {"type": "regex", "pattern": r"\Aa"},
        {"type": "json_schema", "json_schema": {"type": "string", "pattern": "^a$"}},
        {"type": "json_schema", "style": "qwen_xml", "json_schema": {"type": "string", "pattern": "^a$"}},
    ]
    value = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    found = json.loads(rewrite(StructuredOutput("structural_tag", json.dumps(value))).value)["format"]["elements"]
    assert found[0]["pattern"] == found[1]["json_schema"]["pattern"] == "a"
    assert found[2] == parts[2]


@in_one_test(
    ("schema", "reference"),
    [
        ({"$ref": "#"}, "#"),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"$ref": "#"}]}]}, "#"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "#/$defs/a"),
        ({"properties": {"a": {"$ref": "#"}}, "items": {"$ref": "#"}}, None),
        ({"$defs": {"a": {"type": "string"}}, "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/missing"}]}, None),
    ],
)
def test_a_reference_that_leads_back_to_itself_is_found(schema: Any, reference: str | None) -> None:
    assert cyclic_reference(schema) == reference


# -- the schemas in structural tags, as the engines find and replace them ----------------------------------------------


FLAG = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
DATE = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
PAIR = {"type": "object", "properties": {"a": {"type": "array", "prefixItems": [{"type": "integer"}]}}}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def rule(name: str, *schemas: dict[str, Any]) -> StructuredOutput:
    return structural_tag(calls(FORMATS[name].notations[""], map(tool, schemas), single=False))


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "deepseek_v3"])
def test_each_schema_is_replaced_where_it_stands(name: str) -> None:
    tag = json.loads(rule(name, FLAG, DATE).value)["format"]
    found: list[Any] = []

    def number(part: Any) -> dict[str, Any]:
        found.append(part["json_schema"])
        return {"type": "const_string", "value": "x"}

    replaced = json.dumps(with_schemas(tag, number))
    assert found == [FLAG, DATE]
    assert replaced.count('{"type": "const_string", "value": "x"}') == 2
    assert "json_schema" not in replaced


def test_openvino_has_our_own_grammar_where_there_is_one() -> None:
    (text,) = genai_arguments(rule("hermes", FLAG, PAIR)).values()
    ours, theirs = (tag["content"] for tag in json.loads(text)["format"]["tags"])
    assert ours["grammar"].startswith("root ::= ")
    assert theirs == {"type": "json_schema", "json_schema": PAIR}
    with pytest.raises(ValueError, match=r"properties\.a\.uniqueItems is not supported"):
        genai_arguments(rule("hermes", FLAG, UNIQUE))


def test_a_check_leaves_out_the_text_before_a_call() -> None:
    format = calls_in_text(FORMATS["hermes"].notations[""], [tool(FLAG)], ["f"], single=False)
    free = structural_tag(format, allows_text=True)
    ruled = without_text(free)
    assert json.loads(ruled.value)["format"] == {**format, "at_least_one": True}
    assert not ruled.allows_text
    assert without_text(ruled) is ruled


# -- a walk -----------------------------------------------------------------------------------------------------------
# The walk through an answer, with a matcher whose steps take what a test says.


class Mask:
    """A tensor of one row."""

    def __init__(self, size: int) -> None:
        numpy = pytest.importorskip("numpy")
        self.row = numpy.zeros((size + 31) // 32, numpy.int32)

    def __getitem__(self, index: int) -> Mask:
        return self

    def numpy(self) -> Any:
        return self.row


def steps_of_a_walk(monkeypatch: pytest.MonkeyPatch, allowed: int, seconds: Callable[[int], float]) -> int:
    """Return after how many tokens a walk ends that may choose between so many at each step."""
    now, steps, size = 0.0, 0, 96
    monkeypatch.setattr(time, "process_time", lambda: now)

    def fill(matcher: None, mask: Mask) -> None:
        mask.row[:] = 0
        mask.row.view("uint8")[: allowed // 8] = 255
        mask.row.view("uint8")[allowed // 8] = (1 << allowed % 8) - 1

    def accept(matcher: None, id: int) -> bool:
        nonlocal now, steps
        assert id < allowed
        now += seconds(steps)
        steps += 1
        return True

    walker = Walker({f"{id}": id for id in range(size)}, size, Mask(size), fill, accept)
    walker._walk(None)
    return steps


@pytest.mark.parametrize(("allowed", "steps"), [(0, 0), (1, 512), (64, 512), (65, 64)])
def test_a_walk_is_longer_where_few_tokens_are_allowed(
    monkeypatch: pytest.MonkeyPatch, allowed: int, steps: int
) -> None:
    """A literal's many tokens cost little; 64 of 65 and more are enough."""
    assert steps_of_a_walk(monkeypatch, allowed, lambda step: 1e-5) == steps


def test_a_walk_whose_steps_become_slower_goes_on_until_it_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="after 2000 tokens"):
        steps_of_a_walk(monkeypatch, 65, lambda step: 1e-4 if step < 45 else 1e-3 if step < 120 else 4e-3)
