"""One sequence: tokens whose texts add up, whatever ends it."""

from __future__ import annotations

from typing import Any

from handler.core.text import Prompt, SequenceState, Vocabulary
from handler.core.values import Finish, Sampling

WORDS = Vocabulary([b"one", b" two", b" thr", b"ee", "é".encode()[:1], "é".encode()[1:], b"<eos>"], special=[6])
PROMPT = Prompt("", [0], WORDS)


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


def test_a_split_character_is_never_shown_in_parts() -> None:
    assert generate([4, 5], Finish.LENGTH)[0] == ["", "é"]
    assert generate([4], Finish.LENGTH)[0] == [""]
