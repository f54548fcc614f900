"""Ids to text: stop strings and sequences, however the text is cut."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from handler.core.text import Detokenizer, Prompt, SequenceState, StopMatcher, Vocabulary, spans
from handler.core.values import Finish, Sampling, Thoughts
from tests.one_test import in_one_test

# -- ids to text and stop strings: the outcome never depends on how the text is cut ------------------------------------


BYTES = Vocabulary([bytes([value]) for value in range(256)] + [b"<|end|>"], special=[256])


def detokenize(data: bytes) -> list[str]:
    detokenizer = Detokenizer(BYTES)
    return [detokenizer.feed(value) for value in data]


def match(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, bool, list[str]]:
    """What is shown in all, whether a stop was found, and what each piece showed."""
    matcher = StopMatcher(stops, include=include)
    shown = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.matched:
            break
    if not matcher.matched:
        shown.append(matcher.flush())
    return "".join(shown), bool(matcher.matched), shown


@given(st.text())
def test_a_byte_at_a_time_gives_the_text_back(text: str) -> None:
    assert "".join(detokenize(text.encode())) == text


@given(st.text())
def test_no_piece_holds_half_a_character(text: str) -> None:
    assert "\ufffd" not in "".join(detokenize(text.replace("\ufffd", "").encode()))


def test_a_character_appears_with_its_last_byte() -> None:
    assert detokenize("a😀b".encode()) == ["a", "", "", "", "😀", "b"]


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    assert detokenize("é".encode()[:1]) == [""]


def test_bytes_that_are_no_character_become_a_replacement_once() -> None:
    assert "".join(detokenize(b"a\xffb")) == "a\ufffdb"


def test_a_character_that_breaks_off_is_no_part_of_a_later_one() -> None:
    assert detokenize(b"\xc3a\xa9b") == ["", "\ufffda", "\ufffd", "b"]


def test_texts_that_are_known_are_not_decoded_again() -> None:
    assert Vocabulary([b"\xff"], texts=["known"]).text(0) == "known"


def test_special_tokens_show_only_when_asked() -> None:
    assert Detokenizer(BYTES).feed(256) == ""
    assert Detokenizer(BYTES, skip_special=False).feed(256) == "<|end|>"


def test_a_hidden_token_does_not_disturb_a_character_under_way() -> None:
    first, second = "é".encode()
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.feed(id) for id in (first, 256, second)] == ["", "", "é"]


def test_a_prompt_token_that_is_half_a_character_shows_as_a_replacement() -> None:
    assert BYTES.text(0xC3) == "\ufffd"


def test_a_stop_string_across_pieces_never_leaks() -> None:
    assert match(["Hello", " S", "T", "OP", " more"], ["STOP"]) == ("Hello ", True, ["Hello", " ", "", ""])


def test_a_near_miss_is_shown_when_it_turns_out_to_be_none() -> None:
    assert match(["a ST", "X"], ["STOP"]) == ("a STX", False, ["a ", "STX", ""])
    assert match(["a ST"], ["STOP"]) == ("a ST", False, ["a ", "ST"])


def test_include_shows_the_stop_string_and_nothing_after_it() -> None:
    assert match(["one tw", "o three"], ["two"], include=True)[0] == "one two"


def test_the_first_complete_stop_wins_and_of_two_the_longer() -> None:
    assert match(["xabcd"], ["abcd", "bc"])[0] == "xa"
    assert match(["xabcd"], ["bcd", "abcd"])[0] == "x"


@given(
    text=st.text("ab\n😀", max_size=30),
    stops=st.lists(st.text("ab\n😀", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30)),
    include=st.booleans(),
)
def test_the_cuts_do_not_matter(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole = match([text], stops, include=include)
    assert match(pieces, stops, include=include)[:2] == whole[:2]
    assert match(list(text), stops, include=include)[:2] == whole[:2]


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_shown_holds_no_stop_string(text: str, stops: list[str]) -> None:
    shown, matched, _ = match(list(text), stops)
    assert not any(stop in shown for stop in stops)
    assert matched == any(stop in text for stop in stops)


# -- where tokens stand ----------------------------------------------------------------------------------------------


def test_what_is_included_is_never_held_back() -> None:
    assert match(["on", "e tw", "o three"], ["two"], include=True)[2] == ["on", "e tw", "o"]
    assert match(["one tw"], ["two"], include=True) == ("one tw", False, ["one tw", ""]), "nor is it shown twice"


WORDS = Vocabulary([b"Hi", b" you", "é".encode()[:1], "é".encode()[1:], b"<s>", b"\n"], special={4})


@in_one_test(
    ("text", "ids", "found"),
    [
        ("Hi you\n", [0, 1, 5], [(0, 2), (2, 6), (6, 7)]),
        ("Hié", [0, 2, 3], [(0, 2), (2, 4), (2, 4)]),  # parts of a character have all of it
        ("Hi", [4, 0], [(0, 0), (0, 2)]),  # put in front by the tokenizer
        ("<s>Hi", [4, 0], [(0, 3), (3, 5)]),  # part of the text
        ("you Hi", [1, 0], [(0, 3), (4, 6)]),  # SentencePiece's space; echo leaves spaces out
        ("HI", [0], None),
        ("Hi there", [0], None),
        ("", [], []),
    ],
)
def test_spans(text: str, ids: list[int], found: list[tuple[int, int]] | None) -> None:
    assert spans(Prompt(text, ids, WORDS)) == found


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=8))
def test_spans_cover_the_text_in_order(pieces: list[bytes]) -> None:
    text = b"".join(pieces).decode("utf-8", "ignore")
    data = text.encode()
    found = spans(Prompt(text, list(range(len(data))), Vocabulary([bytes([byte]) for byte in data])))
    assert found is not None
    assert "".join(data[a:b].decode() for a, b in dict.fromkeys(found)) == text


def test_a_control_character_that_the_vocabulary_lacks_is_no_space() -> None:
    vocabulary = Vocabulary([b" ", b" a"])
    assert spans(Prompt("  a", [0, 1], vocabulary)) == [(0, 1), (1, 3)]
    assert spans(Prompt(" \x1d a", [0, 1], vocabulary)) is None


# -- one sequence: tokens whose texts add up, whatever ends it ---------------------------------------------------------


SEQUENCE_WORDS = Vocabulary(
    [b"one", b" two", b" thr", b"ee", "é".encode()[:1], "é".encode()[1:], b"<eos>"], special=[6]
)
PROMPT = Prompt("", [0], SEQUENCE_WORDS)


def generate(ids: list[int], finish: Finish | None = None, **sampling: Any) -> tuple[list[str], Finish | None]:
    """Feeds one id at a time, the last one with `finish`; what each token shows, and the end."""
    generation = SequenceState(PROMPT, Sampling(**sampling))
    texts = []
    ended = None
    for index, id in enumerate(ids):
        tokens, ended = generation.feed([id], [-0.5], finish if index == len(ids) - 1 else None)
        texts += [token.text for token in tokens]
        if ended:
            break
    return texts, ended


def test_texts_add_up_to_the_text() -> None:
    assert generate([0, 1, 2, 3], Finish.LENGTH) == (["one", " two", " thr", "ee"], Finish.LENGTH)


def test_the_end_token_counts_and_shows_nothing() -> None:
    assert generate([0, 6], Finish.EOS) == (["one", ""], Finish.EOS)


def test_a_stop_string_ends_a_sequence_that_the_engine_would_go_on_with() -> None:
    assert generate([0, 1, 2, 3, 0], stop=(" three",)) == (["one", " two", "", ""], Finish.STOP)


def test_tokens_after_a_stop_string_in_the_same_step_are_dropped() -> None:
    generation = SequenceState(PROMPT, Sampling(stop=("two",)))
    tokens, finish = generation.feed([0, 1, 2], [-1.0, -1.0, -1.0], None)
    assert ([(token.id, token.text) for token in tokens], finish) == ([(0, "one"), (1, " ")], Finish.STOP)


def test_held_back_text_comes_with_the_last_token() -> None:
    assert generate([0, 2], Finish.LENGTH, stop=(" three",)) == (["one", " thr"], Finish.LENGTH)


def test_held_back_text_comes_even_without_a_token() -> None:
    generation = SequenceState(PROMPT, Sampling(stop=(" three",)))
    generation.feed([2], [-0.5], None)
    tokens, finish = generation.feed([], [], Finish.LENGTH)
    assert ([token.text for token in tokens], finish) == ([" thr"], Finish.LENGTH)


def test_a_stop_token_shows_its_text_only_with_include() -> None:
    assert generate([0, 1], Finish.STOP, stop_token_ids=(1,))[0] == ["one", ""]
    assert generate([0, 1], Finish.STOP, stop_token_ids=(1,), include_stop=True)[0] == ["one", " two"]


def test_an_end_token_shows_its_text_only_with_include() -> None:
    """vLLM and SGLang take the token that ends a response from its text, even where special tokens show."""
    shown: dict[str, Any] = {"skip_special_tokens": False}
    assert generate([6, 6], Finish.EOS, **shown)[0] == ["<eos>", ""]
    assert generate([6, 6], Finish.LENGTH, **shown)[0] == ["<eos>", "<eos>"]
    assert generate([6, 6], Finish.EOS, stop=("two",), **shown)[0] == ["<eos>", ""]
    assert generate([0, 1], Finish.EOS, **shown)[0] == ["one", " two"]
    assert generate([6, 6], Finish.EOS, include_stop=True, **shown)[0] == ["<eos>", "<eos>"]
    assert generate([6, 6], Finish.EOS, marks=frozenset({"<call>"}), **shown)[0] == ["<eos>", ""]
    assert generate([6, 6], Finish.EOS, marks=frozenset({"<eos>"}), **shown)[0] == ["<eos>", "<eos>"]


@in_one_test(
    ("least", "stop", "wanted"),
    [
        (0, "two", ["one", " "]),
        (1, "two", ["one", " "]),
        (2, "two", ["one", " two", " thr", "ee", "one", " "]),
        (5, "two", ["one", " two", " thr", "ee", "one", " "]),
        (6, "two", ["one", " two", " thr", "ee", "one", " two", "one"]),
        (3, " three", ["one", " two", "", ""]),
        (4, " three", ["one", " two", "", " three", "one", " two", "one"]),
    ],
)
def test_a_stop_string_may_only_end_after_the_least_number_of_tokens(least: int, stop: str, wanted: list[str]) -> None:
    """It may begin before, as in vLLM (v1/engine/detokenizer.py)."""
    texts, finish = generate([0, 1, 2, 3, 0, 1, 0], Finish.LENGTH, stop=(stop,), min_new_tokens=least)
    assert (texts, finish) == (wanted, Finish.LENGTH if len(wanted) == 7 else Finish.STOP)
    included, _ = generate([0, 1, 2, 3, 0, 1, 0], Finish.LENGTH, stop=(stop,), min_new_tokens=least, include_stop=True)
    assert "".join(included) == "one two threeone twoone"[: len("".join(included))]
    assert len(included) == len(wanted)


def test_a_shorter_stop_string_within_a_held_one_does_not_end_late() -> None:
    """`b` came while no stop string could end, and is held only because `abc` could follow."""
    matcher = StopMatcher(["abc", "b"])
    assert matcher.feed("xab", may_end=False) == "x"
    assert (matcher.feed("x"), matcher.matched) == ("abx", "")
    assert (matcher.feed("b"), matcher.matched) == ("", "b")


def test_a_stop_string_behind_the_reasoning_of_the_same_chunk_does_not_end_early() -> None:
    matcher = StopMatcher(["b"], thoughts=Thoughts(("<t>",), ("</t>",), True, (), ()))
    assert (matcher.feed("a</t>b", may_end=False), matcher.matched) == ("a</t>b", "")
    assert (matcher.feed("cb"), matcher.matched) == ("c", "b")


def test_a_split_character_is_never_shown_in_parts() -> None:
    assert generate([4, 5], Finish.LENGTH)[0] == ["", "é"]
    assert generate([4], Finish.LENGTH)[0] == [""]
