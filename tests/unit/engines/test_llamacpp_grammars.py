"""Grammars for llama.cpp: how they are read, which are too slow for it, and what the grammars of schemas allow."""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.llamacpp.check import LlamaCheck
from handler.engines.llamacpp.files import model_directory
from handler.engines.llamacpp.gbnf import read
from handler.engines.llamacpp.parameters import grammar
from handler.engines.llamacpp.schema import schema_grammar
from handler.engines.llamacpp.stacks import GrammarTrial, Sample, Stacks, TooAmbiguous
from handler.engines.structured_output.formats import FORMATS
from handler.engines.structured_output.validator import StructuredOutputValidator
from tests.one_test import in_one_test
from tests.unit.engines.schema_cases import CASES, NONE, written

VOCABULARY = 150_000


def vocabulary() -> Iterator[str]:
    """Texts as in a large vocabulary: words with and without a space, punctuation, digits, and long runs."""
    draw = random.Random(0)
    vowels, consonants = "aeiou", "bcdfghklmnprst"
    for number in range(VOCABULARY):
        word = "".join(draw.choice(consonants) + draw.choice(vowels) for _ in range(draw.randint(1, 5)))
        yield " " * (number % 2) + word
    yield from string.printable
    yield from (sign * length for sign in ' \n\t-=_.#*"[{,' for length in range(2, 40))
    yield from (first + second for first in '"{}[]:,' for second in '"{}[]:, \n')
    yield from map(str, range(1000))


SAMPLE = Sample(vocabulary())


def check(text: str) -> None:
    GrammarTrial(Stacks(read(text)), SAMPLE).check()


def allows(text: str, response: str) -> bool:
    """Whether a grammar allows a response, by the stacks that llama.cpp would have."""
    stacks = Stacks(read(text))
    current = stacks.roots()
    for kind in stacks.classes(response):
        after = stacks.after(current, kind)
        current = list(dict.fromkeys(found for _, stack in after for found in stacks.expand(stack)))
    return 0 in current


# -- reading -----------------------------------------------------------------------------------------------------------


@in_one_test(
    ("text", "allowed", "forbidden"),
    [
        ('root ::= "a" | "b"c\nc ::= [0-9]', ["a", "b7"], ["b", "7", "ab7"]),
        ('root ::= "ab"{2}', ["abab"], ["ab", "ababab"]),
        ('root ::= "a"{0,3} "b"{2,}', ["bb", "aaabbbb"], ["aaaabb", "ab"]),
        ('root ::= ("a" | "b")+ "c"?', ["ab", "abbac"], ["c", "acc"]),
        ('root ::= [^a-c\\n"]*', ["", "xyz", "-"], ["xa", "\n", '"']),
        ("root ::= [a-] .", ["-x", "a\n"], ["b-"]),
        ('# a comment\nroot ::= ( # in brackets\n  "a"\n  | "b"\n)\n\n', ["a", "b"], [""]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\t\\]"', ["Aé😀\t]"], ["A"]),
        ('root ::= "a" {0} "b"', ["b"], ["ab"]),
        ('root ::= "a"{0,2001}', ["a" * 2500], ["b"]),
        ('root ::= x\nx ::= ""\nroot ::= [x]', ["x"], [""]),
    ],
)
def test_a_grammar_is_read_as_llama_cpp_reads_it(text: str, allowed: list[str], forbidden: list[str]) -> None:
    assert [response for response in allowed if not allows(text, response)] == []
    assert [response for response in forbidden if allows(text, response)] == []


@in_one_test(
    ("text", "words"),
    [
        ("", "does not define the rule 'root'"),
        ("root ::= x", "does not define the rule 'x'"),
        ('root := "a"', """has ':= "a"' where llama.cpp expects '::='"""),
        ('root ::= "a', "expects a character"),
        ('root ::= "\\d"', "expects a character"),
        ("root ::= (", "has the end where llama.cpp expects ')'"),
        ("root ::= )", "expects the end of a line"),
        ("root ::= *", "expects something to repeat before it"),
        ('root ::= ""*', "expects something to repeat before it"),
        ("root ::= [a]{x}", "expects a number of repetitions"),
        ("root ::= [a]{3,2}", "whose maximum is less than its minimum"),
        ("root ::= [a]{2001}", "repeats an element more than 2000 times"),
        ("root ::= ([a]{0,300}){9}", "a repetition of more than 2000 rules"),
        ("root ::= a_b", "expects"),
        ("root ::= []", "an empty class of characters"),
        ("root ::= <think>", "must not contain tokens in angle brackets"),
        ("root ::= " + "(" * 201 + "[a]" + ")" * 201, "more than 200 nested groups"),
        ("root ::= " + "(" * 100_000, "more than 200 nested groups"),
        ('root ::= "' + "a" * (1 << 18) + '"', "must not exceed 262,144 characters"),
        ("root ::= " + "[a]{1900} " * 200, "becomes too large when its repetitions are written out"),
        ("root ::= " + "([a] [b]{0,30}){0,30} " * 900, "becomes too large when its repetitions are written out"),
    ],
)
def test_a_grammar_that_llama_cpp_would_refuse_is_refused_with_a_reason(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"grammar|llama") as caught:
        read(text)
    assert words in str(caught.value)


# -- the time that llama.cpp would need --------------------------------------------------------------------------------
# Each of these stalled all slots of a real llama-server for seconds, or for ever (with a vocabulary of 49,152 tokens).


def optional_letters(count: int) -> str:
    """The letters that are the beginnings of most tokens, and then others. Each token is tried on all that follow."""
    letters = [chr(0x61 + at) for at in range(26)] + [chr(0x100 + at) for at in range(26, count)]
    return "root ::= " + " ".join(f'"{letter}"?' for letter in letters[:count])


SLOW = {
    "optional parts": "root ::= " + "[a-z]? " * 30,
    "400 optional parts through references": "root ::= b b\nb ::= c c\nc ::= d d\nd ::= " + "[a-z]? " * 50,
    "the same, late": 'root ::= "' + "x" * 2000 + '" ' + "[a-z]? " * 30,
    "the same, behind two rules": "root ::= [0-9]{500} x\nx ::= [0-9]{500} y\ny ::= " + "[a-z]? " * 30,
    "repetitions in repetitions": "root ::= ([a-z ]{0,40}){0,40}",
    "adjacent repetitions": "root ::= " + "a " * 20 + "\na ::= [a-z ]{0,99}",
    "an end that grows with each level": 'root ::= x "!"\nx ::= [a-z ] x? [b]?',
    "many alternatives": "root ::= " + " | ".join(f'"v{number} x"' for number in range(1000)),
    "many references to the same rules": "\n".join(
        ["root ::= r0", *(f'r{number} ::= r{number + 1} | r{number + 1} "x"' for number in range(40)), 'r40 ::= "a"']
    ),
    "left recursion behind rules that may be empty": 'root ::= e root "a" | "b"\ne ::= f f\nf ::= "" | "c"',
    "left recursion behind one such rule": 'root ::= e root "a" | "b"\ne ::= f\nf ::= ""',
    "many optional letters that are repeated": "root ::= " + '("a" | "a"?)+ ' * 90,  # 361 stacks after each letter
    "400 optional letters that differ": "root ::= " + " ".join(f'"{chr(0x100 + at)}"?' for at in range(400)),
    "letters of tokens among 80 optional ones": optional_letters(80),
    "400 letters in a loop": "root ::= (" + " | ".join(f'"{chr(0x100 + at)}"' for at in range(400)) + ")*",
    "a chain of rules": "".join(f"r{at} ::= r{at + 1}\n" for at in range(3000)) + "r3000 ::= [a]\nroot ::= r0",
}  # fmt: skip


@in_one_test("text", SLOW.values(), ids=SLOW)
def test_a_grammar_that_would_stall_all_requests_is_refused(text: str) -> None:
    began = time.process_time()
    with pytest.raises(TooAmbiguous, match="too ambiguous for llama-server"):
        check(text)
    assert time.process_time() - began < 5


@in_one_test("text", ['root ::= root "a" | "b"', "root ::= a\na ::= b\nb ::= a | [x]", "root ::= root"])
def test_left_recursion_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="does not support left recursion"):
        check(text)


JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

QUICK = {
    "30 optional letters that differ": optional_letters(30),
    "JSON, as in llama.cpp's examples": JSON,
    "a list": 'root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"',
    "arithmetic": 'root ::= (expr "=" ws term "\\n")+\nexpr ::= term ([-+*/] term)*\n'
    'term ::= ident | num | "(" ws expr ")" ws\nident ::= [a-z] [a-z0-9_]* ws\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*',
    "two ways": 'root ::= ([a-z ] | [a-z ])* "!"',
    "a long repetition": "root ::= [a-z ]{0,1900}",
    "a few optional parts": 'root ::= "a"? "b"? [0-9]? [a-z]? "!"',
    "a loop of loops": 'root ::= (("a"?)*)* "b"',
    "150 optional letters that differ": "root ::= " + " ".join(f'"{chr(0x100 + at)}"?' for at in range(150)),
    "words": "root ::= [a-z]+ ( [ ,] [a-z]+ ){0,50}",
}


@in_one_test("text", QUICK.values(), ids=QUICK)
def test_an_ordinary_grammar_is_quick(text: str) -> None:
    check(text)


def test_nul_characters_are_refused_because_llama_cpp_ends_there() -> None:
    for text in ('root ::= "a" \0 "b"', 'root ::= "a"\nb ::= [\0-a]'):
        with pytest.raises(ValueError, match="must not contain NUL characters"):
            read(text)


def test_a_loop_without_an_end_does_not_hang() -> None:
    assert allows(QUICK["a loop of loops"], "aaab")


def test_the_sandbox_refuses_it_with_the_reason(demo_model: Path) -> None:
    config = EngineConfig(model=model_directory(demo_model))
    found = StructuredOutputValidator(partial(LlamaCheck, config), seconds=5.0)
    try:
        slow, quick = StructuredOutput("grammar", SLOW["optional parts"]), StructuredOutput("grammar", JSON)
        assert "too ambiguous for llama-server" in found.check(slow).result(60)
        assert found.check(quick).result(60) == ""
    finally:
        found.close()


# -- schemas -----------------------------------------------------------------------------------------------------------


def schema(value: Any) -> dict[str, Any]:
    return dict(grammar(StructuredOutput("json_schema", json.dumps(value))))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


TREE = {
    "type": "object",
    "properties": {"n": {"pattern": "^x$"}, "c": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["n"],
}


def test_a_plain_schema_is_sent_as_it_is() -> None:
    assert schema(PERSON) == {"json_schema": PERSON}
    text = schema_grammar(PERSON).text
    check(text)
    for response in ('{"name":"é","age":7}', '{"name": "", "age": 150, "tags": ["a", "b"]}'):
        assert allows(text, response)
    for response in (
        '{"name":"x"}',
        '{"name":"x","age":200}',
        '{"name":"x","age":2,"tags":[]}',
        '{"age":2,"name":"x"}',
    ):
        assert not allows(text, response)


@in_one_test(
    ("value", "allowed", "forbidden"),
    [
        ({"type": "string", "pattern": "ab+"}, ['"abb"'], ['"xab"', '"a"', '"']),
        ({"type": "string", "pattern": '^"\\d{2}$'}, ['"\\"42"'], ['""42"', '"42"']),
        ({"type": "string", "format": "email"}, ['"a@b.c"'], ['"a"', '"a@"']),
        ({"enum": [f"v{number}" for number in range(1000)]}, ['"v0"', '"v999"'], ['"v1000"', '"v"']),
        ({"enum": [*range(40), "é\n"]}, ["39", '"é\\n"'], ["40"]),
        (
            {"properties": {f"p{number}": {"type": "boolean"} for number in range(40)}},
            ["{}", '{"p0": true}', '{"p3": true, "p17": false, "p39": true}'],
            ['{"p3": true, "p1": true}', '{"p40": true}', '{"p0": true,}'],
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {"pattern": "^b$"}}}],
                "$defs": {"a": {"properties": {"x": {"const": 1}}}},
            },
            ['{"x": 1, "y": "b"}'],
            ['{"x": 1}', "{}"],
        ),
        (
            {"items": [{"pattern": "^a$"}, {"type": ["null", "boolean"]}], "type": "array"},
            ['["a", null]', '["a", true]'],
            ['["a"]', '["b", null]'],
        ),
        (
            {"type": "array", "items": {"pattern": "^a$"}, "minItems": 3, "maxItems": 4},
            ['["a", "a", "a"]', '["a", "a", "a", "a"]'],
            ["[]", '["a", "a"]', '["a", "a", "a", "a", "a"]'],
        ),
        (
            {"type": "array", "items": {"pattern": "^a$"}, "minItems": 2},
            ['["a", "a"]', '["a", "a", "a", "a", "a"]'],
            ["[]", '["a"]'],
        ),
        (
            {"type": "array", "items": {"pattern": "^a$"}, "maxItems": 2},
            ["[]", '["a"]', '["a", "a"]'],
            ['["a", "a", "a"]'],
        ),
        (
            {"type": "array", "items": [{"pattern": "^a$"}, {"type": "array", "maxItems": 0}]},
            ['["a", []]'],
            ['["a", ["a"]]'],
        ),
        (
            {"type": "array", "items": [{"pattern": "^a$"}, {"type": "string", "minLength": 1, "maxLength": 2}]},
            ['["a", "b"]', '["a", "bb"]'],
            ['["a", ""]', '["a", "bbb"]'],
        ),
        (
            {"type": "array", "items": [{"pattern": "^a$"}, {"$ref": "#/items/0"}]},
            ['["a", "a"]'],
            ['["a", "b"]'],
        ),
        (
            {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
            ['{"n": "x"}', '{"n": "x", "c": [{"n": "x"}, {"n": "x", "c": []}]}'],
            ['{"c": []}', '{"n": "x", "c": [1]}'],
        ),
        (
            {"type": "object", "additionalProperties": {"type": "string", "pattern": "^a$"}},
            ["{}", '{"k": "a", "l": "a"}'],
            ['{"k": "b"}'],
        ),
        ({"type": "number", "minimum": 0, "maximum": 1}, ["0", "0.25", "1.0"], ["1.5", "-0.1", "2"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": 5}, ["6"], ["5", "3"]),
        ({"type": "integer", "maximum": 3, "exclusiveMaximum": 3}, ["2"], ["3"]),
        ({"type": "integer", "maximum": 1 << 53}, [str(1 << 53)], [str((1 << 53) + 1)]),
        ({"allOf": [{"type": "string", "maxLength": 1}], "type": "string"}, ['"a"'], ['"ab"', "{}"]),
        ({"allOf": [{"$ref": "#/$defs/tree"}], "$defs": {"tree": TREE}}, ['{"n": "x"}'], ["{}"]),
        ({"items": True, "maxItems": 1, "type": "array"}, ['["a"]', "[]"], ["[1, 2]"]),
        ({"type": "array", "items": False}, ["[]"], ["[1]"]),
        ({"prefixItems": [{"const": 1}], "items": {"const": 2}}, ["[1]"], ["[2]", "[]"]),
        (
            {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
            ['{"a": {"a": {}}}'],
            ['{"a": 1}', '{"b": {}}'],
        ),
    ],
)  # fmt: skip
def test_a_schema_that_llama_cpp_would_not_enforce_or_be_slow_with_becomes_a_grammar(
    value: Any, allowed: list[str], forbidden: list[str]
) -> None:
    ((field, text),) = schema(value).items()
    assert field == "grammar"
    check(text)
    assert [response for response in allowed if not allows(text, response)] == []
    assert [response for response in forbidden if allows(text, response)] == []


def test_a_schema_is_enforced_or_refused() -> None:
    """llama.cpp itself excludes the names in `properties` from additional ones; the converted grammar does not."""
    wrong, taken = [], 0
    for case in CASES:
        try:
            found = schema_grammar(case.schema)
        except ValueError:
            continue
        is_mixed = not found.unenforced and {"properties", "additionalProperties"} <= case.schema.keys()
        is_ignored = case.schema.get("format", "date") not in FORMATS or "other" in str(case.schema)  # `$id`
        taken += 1
        if case.invalid is not NONE and not is_mixed and not is_ignored and allows(found.text, written(case.invalid)):
            wrong.append(case)
    assert not wrong
    assert taken > 90


def nested(depth: int) -> Any:
    value: Any = {"type": "integer"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


@in_one_test(
    ("value", "words"),
    [
        (nested(65), "more than 64 nested subschemas"),
        (nested(500), "more than 64 nested subschemas"),
        ({"$ref": "#/$defs/x"}, "does not define the $ref '#/$defs/x'"),
        ({"items": [{}, {"$ref": "#/items/2"}]}, "does not define the $ref '#/items/2'"),
        ({"items": [{}, {"$ref": "#/items/a"}]}, "does not define the $ref '#/items/a'"),
        ({"$ref": "#/title/a", "title": "string"}, "does not define the $ref '#/title/a'"),
        ({"$ref": "#a"}, "does not support the $ref '#a'"),
        ({"$ref": []}, "does not support the $ref '[]'"),
        ({"$ref": {}}, "does not support the $ref '{}'"),
        ({"$ref": "http://other"}, "does not support the $ref"),
        ({"enum": []}, "'enum' in the schema must be a list with at least one element"),
        ({"items": 1}, "neither an object nor `true`"),
        ({"allOf": [{}, False]}, "neither an object nor `true`"),
        ({"properties": []}, "'properties' in the schema must be an object"),
        ({"type": "object", "required": ["a"]}, "'required' only for names in 'properties': add 'a'"),
        (
            {"properties": {"a": {}}, "required": ["a", "b"]},
            "only for names in 'properties': add 'b'",
        ),
        ({"allOf": [{"properties": {"a": {}}}, {"required": ["b"]}]}, "add 'b' to 'properties'"),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"a": {}}}]}, "the same property in several schemas of"),
        ({"allOf": [{"type": "string"}, {"properties": {}}]}, "only if all are objects or enums"),
        (
            {"allOf": [{"enum": [1]}, {"enum": [True, "1"]}]},
            "in an 'allOf' of the schema have no common value",
        ),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer within bounds that llama-server can enforce"),
        ({"type": "number", "exclusiveMinimum": True}, "'exclusiveMinimum' in the schema must be a number"),
        (
            {"type": "array", "items": {}, "minItems": "1"},
            "'minItems' in the schema must be a whole number of at least 0",
        ),
        (
            {"type": "array", "items": {}, "maxItems": -1},
            "'maxItems' in the schema must be a whole number of at least 0",
        ),
        ({"prefixItems": [{}, {}], "maxItems": 1}, "exactly 2 items for a list of 2 schemas"),
        ({"prefixItems": [{}, {}], "minItems": 3}, "exactly 2 items for a list of 2 schemas"),
        (
            {"type": "string", "pattern": "^a", "minLength": 3},
            "ignores 'minLength' in a JSON schema with a pattern or format",
        ),
        ({"type": "string", "pattern": "(?=a)b"}, "Lookahead is not supported"),
        (
            {"properties": {"a": {"pattern": "^a$"}}, "additionalProperties": True},
            "does not enforce 'pattern' in a schema with an object",
        ),
    ],
)
def test_a_schema_that_cannot_be_converted_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        schema(value)
    assert words in str(caught.value)


SLOW_SCHEMAS: dict[str, Any] = {
    "an ambiguous pattern": {"type": "string", "pattern": "^" + "[a-z]?" * 30 + "$"},
    "a reference to itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "alternatives at each level": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 10}},
    },
    "thousands of optional properties": {"properties": {f"p{number}": {} for number in range(2000)}},
}


@in_one_test("value", SLOW_SCHEMAS.values(), ids=SLOW_SCHEMAS)
def test_a_schema_that_would_stall_all_requests_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"too ambiguous|left recursion"):
        check(schema_grammar(value).text)
