"""The documents' language: no word that riddles, no sentence above 20 words."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import MAX_WORDS, ROOT, pages, prose, sentences
from tests.one_test import in_one_test

BANNED = {
    r"\bdoors?\b": "a metaphor: name the thing",
    r"\bhouse\b": "a metaphor: name the thing",
    r"\battics?\b": "a metaphor: name the thing",
    r"\bworn\b": "a metaphor: name the thing",
    r"\bpassed over\b": "ignored",
    r"\bwas not had\b": "not tested",
    r"\bno good to\b": "unused",
    r"\b(the|a|each|no) (found|said|asked|told|made|shown|taken)\b(?=[.,:;)]| (is|are|of|and|or)\b)": "no noun",
    r"\bseed 0\d\d\b": "state the fact, with its public source",
    r"(?<!here) is no (json|whole number|directory|number|report|command|regular)\b": "is not a",
    r"\brefused,? but for\b": "refused, except for",
    r"\bcontract [a-z_/]+\.md\b": "state the fact, with its public source",
}
"""Expressions, and what to write in their place."""

OF_PAGES = {
    r"\bheed(s|ed)?\b": "use, apply",
    r"\bamid\b": "among, during",
    r"\bfor ever\b": "forever",
    r"\bin company\b": "beside others",
    r"\bwithout a word\b": "silently",
    r"\blies?\b(?! (on|to)\b)": "is, are",
    r"\bcomes? again\b": "retry",
    r"\bas ever\b": "as before",
    r"\bnobody asked\b": "unrequested",
    r"\bat hand\b": "available",
    r"\bwhoever\b": "anybody who",
    r"\bstands? (there|here|twice)\b": "is there, is duplicate",
    r"\b(is|are) no (json|object|number|directory|vulnerability|plain|whole|block|item|tool|text)\b": "is not a",
    r"\bdialects?\b": "API: a dialect is in the code",
    r"\b(which|what) nobody\b": "turn the sentence around",
}
"""Expressions of pages alone, which the code's comments and messages may have."""
ABOUT_CODE = ("docs/structure.md", "docs/glossary.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages whose words are the code's, or of the past."""

CODE = ("handler", "deploy")

_RIDDLE = re.compile(r"(What|Which|Whose|Whoever) [^?]*$")  # "What an engine lacks is refused."


def texts() -> dict[str, str]:
    names = [path.relative_to(ROOT).as_posix() for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    return {name: (ROOT / name).read_text() for name in (*pages(), *names, "deploy/data/causes.yaml")}


@in_one_test("word", BANNED)
def test_no_page_comment_or_message_has_a_banned_word(word: str) -> None:
    expression = re.compile(word, re.IGNORECASE)
    places = {
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in texts().items()
        for match in expression.finditer(text)
    }
    assert places == set(), BANNED[word]


@in_one_test("word", OF_PAGES)
def test_no_page_for_users_reads_like_a_translation(word: str) -> None:
    places = {
        f"{name}: {match[0]}"
        for name in pages()
        if name not in ABOUT_CODE and not name.startswith("handler/")
        for match in re.finditer(word, prose((ROOT / name).read_text()), re.IGNORECASE)
    }
    assert places == set(), OF_PAGES[word]


@in_one_test("page", pages())
def test_sentences_are_short_and_begin_with_their_subject(page: str) -> None:
    text = (ROOT / page).read_text()
    faults = [f"{fault(words)}: {sentence}" for sentence, words in sentences(text) if is_hard(sentence, words)]
    assert not faults, "\n".join(faults)


def test_the_glossary_is_in_the_order_of_the_alphabet() -> None:
    terms = re.findall(r"^\*\*([^*:]+):?\*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 40
    assert terms == sorted(set(terms), key=str.casefold)


def fault(words: int) -> str:
    return (
        f"split it, {words} words are over {MAX_WORDS}"
        if words > MAX_WORDS
        else "begin with the subject, not with a clause"
    )


def is_hard(sentence: str, words: int) -> bool:
    return words > MAX_WORDS or bool(_RIDDLE.match(sentence))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Run `lmi serve`, then open the page. It answers.", [6, 2]),
        ("* **Keys:** set `a`, `b` and `c`.\n  Then restart.", [2, 2]),
        ("# A heading\n| a | table |\n```sh\nsome code\n```\nA [link to a page](x.md).", [5]),
        ("vLLM is fast. vLLM 0.32 is newer, e.g. here.", [3, 6]),
    ],
)
def test_sentences_are_counted_without_code_tables_and_labels(text: str, expected: list[int]) -> None:
    assert [words for _, words in sentences(text)] == expected


def test_hard_sentences_are_found() -> None:
    assert is_hard("What an engine lacks is refused by name.", 8)
    assert not is_hard("What does it cost?", 4)
    assert is_hard("word " * (MAX_WORDS + 1), MAX_WORDS + 1)
