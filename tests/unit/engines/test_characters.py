"""Literals, classes and expressions in EBNF, as xgrammar reads them after it has printed them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest

from handler.engines.structured_output.characters import (
    LAST,
    Range,
    character_class,
    complement,
    joined,
    literal,
    without,
)
from handler.engines.structured_output.ebnf import respelled
from handler.engines.structured_output.regex import is_written_unescaped, regex_grammar, rewritten
from tests.one_test import in_one_test
from tests.unit.engines.characters import CONTROLS, LATIN, OTHERS, SIGNS, pairs

# -- what xgrammar makes of a literal or a class: it reads it, prints it with escapes, and reads that ------------------


_READ = re.compile(r"\\x([0-9a-fA-F]+)|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL)
_SIGNS = {"n": "\n", "t": "\t", "r": "\r"}


def read(text: str) -> list[tuple[str, bool]]:
    """Return the characters between the delimiters, and whether each was escaped."""
    found = []
    for match in _READ.finditer(text):
        digits = match[1] or match[2] or match[3]
        character = chr(int(digits, 16)) if digits else _SIGNS.get(match[4], match[4]) if match[4] else match[5]
        found.append((character, not match[5]))
    return found


def printed(character: str) -> str:
    if character in '"\\[]^-':
        return f"\\{character}"
    if " " <= character <= "~":
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def reread(element: str) -> str:
    """Return the text that an element of literals stands for after xgrammar has printed it."""
    literals = re.findall(r'"((?:\\.|[^"\\])*)"', element)
    assert re.fullmatch(r'\(?"((?:\\.|[^"\\])*)"( "((?:\\.|[^"\\])*)")*\)?', element)
    return "".join(
        character
        for text in literals
        for character, _ in read("".join(printed(character) for character, _ in read(text)))
    )


def reread_class(text: str) -> list[Range]:
    """Return the characters that a class stands for after xgrammar has printed it."""
    negated = text.startswith("[^")
    return ranges_of(
        "".join(
            "-" if (character, escaped) == ("-", False) else printed(character)
            for character, escaped in read(text[1 + negated : -1])
        ),
        negated,
    )


def ranges_of(text: str, negated: bool) -> list[Range]:
    characters, found = read(text), list[Range]()
    assert not negated or max(character for character, _ in characters) <= "\x7f", "xgrammar ignores the others"
    while characters:
        (first, _), *characters = characters
        last = first
        if len(characters) > 1 and characters[0] == ("-", False):
            (_, (last, _), *characters) = characters
        assert first <= last
        found.append((ord(first), ord(last)))
    return complement(found) if negated else joined(found)


def test_the_reader_here_spoils_what_xgrammar_spoils() -> None:
    assert reread('"Fläche"') == "Fl\u0e4che"
    assert reread_class("[äbcd]") == [(0xE4BCD, 0xE4BCD)]


# -- literals ----------------------------------------------------------------------------------------------------------


def test_each_letter_stays_what_it_is_before_each_other() -> None:
    assert [text for text in pairs() if reread(literal(text)) != text] == []
    together = "".join(pairs())
    assert reread(literal(together)) == together


def test_a_grammar_of_a_clients_keeps_its_letters() -> None:
    for text in pairs():
        written = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
        [_, element] = respelled(f'root ::= "{written}"').split(" ::= ")
        assert reread(element) == text


@in_one_test(
    "grammar",
    ['root ::= "a" [a-z] [^"\\\\] # ä5', 'root ::= "é" "a"', 'root ::= [aé-] "\\xe9"', "root ::= (", "root ::= \0", ""],
)
def test_a_grammar_that_is_read_as_it_stands_is_left_alone(grammar: str) -> None:
    assert respelled(grammar) == grammar


def test_a_string_in_a_macro_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="macro"):
        respelled('root ::= TagDispatch(("Fläche", a))\na ::= "b"')
    assert "macro" not in respelled('root ::= TagDispatch(("Fleche", a))\na ::= "é"')


# -- classes -----------------------------------------------------------------------------------------------------------


def drawn_ranges(chance: random.Random) -> list[Range]:
    letters = [*LATIN, *CONTROLS, *OTHERS, *SIGNS, *"0afAFgz"]
    found = list[Range]()
    for _ in range(chance.randint(1, 6)):
        first, last = sorted(chance.choices(letters, k=2))
        found.append((ord(first), ord(last if chance.random() < 0.4 else first)))
    return found


def test_a_class_keeps_its_characters() -> None:
    chance = random.Random(0)
    for _ in range(3000):
        ranges = joined(drawn_ranges(chance))
        assert reread_class(character_class(ranges)) == ranges
        others = complement(ranges)
        assert others == without([(0, LAST)], ranges)
        assert reread_class(character_class(others)) == others


def test_a_class_of_a_clients_keeps_its_characters() -> None:
    for text, characters in (
        ("[äbcd]", "äbcd"),
        ("[ä-öa-c]", "abcäåæçèéêëìíîïðñòóôõö"),
        ("[0ä1]", "01ä"),
        ("[äbcd\\-\\]]", "äbcd-]"),
        ("[äb-]", "äb-"),
    ):
        wanted = joined((ord(character), ord(character)) for character in characters)
        assert reread_class(respelled(f"root ::= {text}").split(" ::= ")[1]) == wanted
        negated = f"root ::= [^{text[1:]}"
        assert reread_class(respelled(negated).split(" ::= ")[1]) == complement(wanted)
    assert reread_class(respelled("root ::= [^é]").split(" ::= ")[1]) == complement([(0xE9, 0xE9)])
    assert respelled("root ::= [äz-b]") == "root ::= [äz-b]"  # xgrammar refuses the range


# -- expressions -------------------------------------------------------------------------------------------------------


def pattern_of(element: str) -> re.Pattern[str]:
    """Return Python's expression for an EBNF element without rules, as xgrammar reads it after it has printed it."""
    token = re.compile(r'"((?:\\.|[^"\\])*)"|(\[(?:\\.|[^\]\\])*\])|([ ()|*+?]|\{[0-9,]+\})')
    parts, at = [], 0
    while at < len(element):
        match = token.match(element, at)
        assert match is not None, element[at:]
        at = match.end()
        if match[1] is not None:
            parts.append(f"(?:{re.escape(reread(match[0]))})")
        elif match[2]:
            parts.append("[" + "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in reread_class(match[2])) + "]")
        else:
            parts.append({"(": "(?:", " ": ""}.get(match[3], match[3]))
    return re.compile("".join(parts))


EXPRESSIONS = [
    "Fläche",
    "(début|Fläche)",
    "[äbcd]+",
    "[À-ÿA-Z]{2}",
    "é0",
    "[^é]",
    "[^äbc]x",
    ".",
    r"\d\D",
    r"\w\W",
    r"[\dé]",
    r"[é\d]",
    r"\s\S",
    r"[^\s]",
    r"\xe9a",
    r"\u00e9a",
    "a|b|",
    "(a|)b?",
    "a{2}",
    "a{2,}b{0}",
    "a{0,2}?",
    "(ab){1,2}c*",
    "",
    r"\Aab\Z",
    "^ab$",
    "^(a|b)$",
    "^a|b$",
    "(?:^a)b",
    "a(b$)",
    r"\.\*\[\]\-",
    "[]a]",
    "[^]a]",
    "[-a]",
    "[a-]",
    r"[\]\\^-]",
    "a{,2}",
    "a{x}",
    "(?P<n>a)(?<m>b)",
    r"\0",
    "[\\0]",
    r"\t\n",
    "(foo|fob|fab)",
    "😀[漢-龥]",
    r"\ud83d\ude00",
    r"[\b]",
    "a-z",
    r"[a\-z]",
    "{}",
]
TEXTS = [
    *pairs([*"äéÀ漢😀aB0"], [*"abc0é-x", ""]),
    "",
    "Fläche",
    "début",
    "äbcd",
    "\U000e4bcd",
    "жж",
    "ab",
    "aab",
    "aabb",
    "b",
    "AabZ",
    "abc",
    "ababc",
    ".*[]-",
    "\0",
    "\t\n",
    "foo",
    "fob",
    "fab",
    "😀漢",
    "a{,2}",
    "a{x}",
    "-",
    "]",
    "\\",
    "^",
    "\b",
    "a-z",
    "{}",
    "1x",
    "x1",
    " x",
    "\u00a0x",
    "\x0c",
    "\u2028",
    "\ufeff",
    "\u3000",
    "x",
    "\n",
    '"',
    "a_",
    "_-",
]


def ours(expression: str) -> str:
    """Return Python's notation, with the meaning that ECMAScript gives the escapes."""
    space = "\\t-\\r \\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\ufeff"
    known = {
        r"\ud83d\ude00": "😀",
        r"[\dé]": "[0-9é]",
        r"[é\d]": "[0-9é]",
        r"[^\s]": f"[^{space}]",
        r"\s\S": f"[{space}][^{space}]",
        ".": "[^\\n\\r\\u2028\\u2029]",
        r"\w\W": "[A-Za-z0-9_][^A-Za-z0-9_]",
        r"\d\D": "[0-9][^0-9]",
        "(?P<n>a)(?<m>b)": "ab",
        "a{,2}": r"a\{,2\}",
    }
    return known.get(expression, expression)


@in_one_test("expression", EXPRESSIONS)
def test_an_expression_allows_what_it_says(expression: str) -> None:
    wanted, found = re.compile(ours(expression)), pattern_of(regex_grammar(expression))
    assert [text for text in TEXTS if bool(found.fullmatch(text)) != bool(wanted.fullmatch(text))] == []


@in_one_test("expression", [one for one in EXPRESSIONS if one not in (r"\0", "[\\0]", r"[\b]")])
def test_the_content_of_a_string_is_json(expression: str) -> None:
    """Whatever the grammar allows between quotes is a JSON string of a text that the expression allows."""
    wanted, found = re.compile(ours(expression)), pattern_of(regex_grammar(expression, in_json=True))
    for text in [*TEXTS, *(json.dumps(text, ensure_ascii=False)[1:-1] for text in TEXTS)]:
        if found.fullmatch(text):
            assert wanted.fullmatch(json.loads(f'"{text}"')), text


@in_one_test(
    ("expression", "contents"),
    [
        ('^"{2}$', ['\\"\\"']),
        ("^\\n{2}$", ["\\n\\n"]),
        ("^[\\n]$", ["\\n"]),
        ("^[\\x00-\\x1f]$", ["\\u0001", "\\t"]),
        ('^["\\\\a]$', ['\\"', "\\\\", "a"]),
        ("^.{3}$", ["abc"]),
        ("^\\s$", [" "]),
        ('say "(yes|no)"', ['say \\"yes\\"']),
        ("^[^a]$", ["b", "é"]),
    ],
)
def test_what_an_expression_names_is_escaped(expression: str, contents: list[str]) -> None:
    found = pattern_of(regex_grammar(expression, in_json=True))
    assert [content for content in contents if not found.fullmatch(content)] == []
    for raw in ('""', "\n\n", "\n", "\x01", "\t", '"', "\\", 'a"b', "a\\b", "a\nb", 'say "yes"'):
        assert not found.fullmatch(raw), raw


@in_one_test(
    ("expression", "unescaped"),
    [("^[a-z ]+$", False), ("^.{3}$", True), ("[^a]", True), (r"\s", True), (r"a\n(b|c)", True), (r"(x[ -~]?)*", True)],
)
def test_an_expression_may_allow_what_json_escapes(expression: str, unescaped: bool) -> None:
    assert is_written_unescaped(expression) is unescaped


@in_one_test("expression", EXPRESSIONS)
def test_a_rewritten_expression_means_the_same(expression: str) -> None:
    """Python reads it as xgrammar does; the content of a string has escapes in the place of what JSON escapes."""
    plain, content = re.compile(rewritten(expression)), re.compile(rewritten(expression, in_json=True))
    wanted, escaped = pattern_of(regex_grammar(expression)), pattern_of(regex_grammar(expression, in_json=True))
    for text in TEXTS:
        assert bool(plain.fullmatch(text)) == bool(wanted.fullmatch(text)), text
        for written in (text, json.dumps(text, ensure_ascii=False)[1:-1]):
            assert bool(content.fullmatch(written)) == bool(escaped.fullmatch(written)), written


def test_a_part_that_may_not_occur_is_left_out_of_a_rewritten_expression() -> None:
    assert rewritten("ab{0}c") == rewritten("ac")
    assert rewritten("a(b|c){0,0}") == rewritten("a")


def test_alternatives_that_begin_alike_are_repeated_as_a_whole() -> None:
    for in_json in (False, True):
        found = pattern_of(regex_grammar("(abc|abx){2}", in_json=in_json))
        assert found.fullmatch("abcabx")
        assert not found.fullmatch("abcd")


REFUSED: dict[str, str] = {
    "(?=a)": "Lookahead",
    "(?!a)": "Lookahead",
    "(?<=a)b": "Lookbehind",
    "(?<!a)b": "Lookbehind",
    r"(a)\1": "Backreference",
    "(?P<x>a)(?P=x)": "Backreference",
    r"\p{L}": "Unicode character class",
    r"[\P{L}]": "Unicode character class",
    r"a\b": "Word boundary",
    "(?i)a": "flag",
    "(?>a)": "Atomic",
    "a^b": "anchor",
    "(a$|b)c": "anchor",
    "(^a)*": "anchor",
    r"a\Ab": "anchor",
    "^*": "anchor",
    "a++": "repetition of a repetition",
    "a{2}{3}": "repetition of a repetition",
    "*a": "nothing to repeat",
    "(": "not closed",
    "a)": "not open",
    "[a": "not complete",
    "a\\": "not complete",
    "[b-a]": "range",
    r"[a-\d]": "range",
    r"\q": "escape",
    r"\ud800": "does not exist",
    "\ud800": "surrogate",
    "a{3,2}": "maximum",
    r"[^\s\S]": "no character",
    "(" * 100 + ")" * 100: "nested",
}


@in_one_test("expression", REFUSED)
def test_what_has_no_grammar_is_refused_by_its_name(expression: str) -> None:
    for in_json in (False, True):
        with pytest.raises(ValueError, match=REFUSED[expression]):
            regex_grammar(expression, in_json=in_json)


def test_no_text_raises_another_error() -> None:
    chance = random.Random(0)
    write: Callable[[], str] = lambda: "".join(chance.choices("ab()[]{}|*+?^$.\\-,0é:<=!Pd\n", k=chance.randint(1, 14)))  # noqa: E731
    accepted = 0
    for _ in range(20_000):
        expression = write()
        try:
            element = regex_grammar(expression)
        except ValueError:
            continue
        accepted += 1
        pattern_of(element)
    assert accepted > 1000
