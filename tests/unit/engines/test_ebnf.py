"""xgrammar's EBNF: rules that derive themselves alone are refused, and long parts can be passed by in a trial."""

from __future__ import annotations

import contextlib
import time

import pytest

from handler.core.values import StructuredOutput
from handler.engines.structured_output.ebnf import Unreadable, acyclic
from handler.engines.structured_output.json_grammar import json_grammar
from handler.engines.trtllm.sampling import check
from tests.one_test import in_one_test

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
        with pytest.raises(Unreadable, match="EBNF"):
            acyclic(text)
    else:
        assert acyclic(text).abridged() == [""]


@in_one_test(
    ("text", "abridged"),
    [
        ("root ::= [a-z]{300} s", '([a-z] { 300 } | "~") (s | "~")'),
        ('root ::= "x" (w ","?)+ [0-9]* s{1,4}', '"x" (( w "," ? ) + | "~") ([0-9] * | "~") (s { 1 , 4 } | "~")'),
        ('root ::= w{0, -1} "y"{31}', '(w { 0 , -1 } | "~") "y" { 31 }'),
        ('root ::= [^.]* "." [ -~]', '([^.~] * | "~") "." [ -}]'),
        ("root ::= long w", '(long | "~") w'),
        (f'root ::= "{"x" * 32}" w?', f'("{"x" * 32}" | "~") w ?'),
        ('root ::= Regex("^[a-z]+$", json_string=true) w', 'Regex ( "^(?:[a-z]+|~)$" , json_string = true ) w'),
    ],
)
def test_what_can_be_long_can_be_passed_by(text: str, abridged: str) -> None:
    rules = '\ns ::= "(" s ")" | "x"\nlong ::= half half\nhalf ::= w{16} | "y"{20} w\nw ::= "w"'
    assert acyclic(text + rules).abridged()[0].split("\n")[0].strip() == f"root ::= {abridged}"


def test_a_recursion_may_go_on_or_end() -> None:
    assert acyclic('root ::= [a-z]* s\ns ::= "(" s ")" | "x"').abridged() == [
        'root ::= ([a-z] * | "~") (s | "~") \ns ::= "(" (s | "~") ")" | "x"',
        'root ::= ([a-z] * | "~") s \ns ::= "(" s ")" | "x"',
    ]


def test_what_is_written_can_be_read_again() -> None:
    for text in FINE.values():
        for abridged in acyclic(text).abridged():
            acyclic(abridged)


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
def test_the_work_is_linear(text: str) -> None:
    began = time.thread_time()
    with contextlib.suppress(Unreadable):  # too many brackets
        acyclic(text).abridged()
    assert time.thread_time() - began < 1


def test_tensorrt_llm_gets_no_cyclic_rule_either() -> None:
    with pytest.raises(ValueError, match="rule 's' is cyclic"):
        check(StructuredOutput("grammar", HIDDEN))
    check(StructuredOutput("grammar", 'root ::= "a"'))
    check(StructuredOutput("grammar", 'start: "a"'))  # llguidance's notation
