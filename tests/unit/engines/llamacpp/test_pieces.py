"""Token ids that llama-server does not send are found from the text of the tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from handler.engines.llamacpp.pieces import MAX_MISSING, Pieces, is_incomplete

LETTERS = "aé€😀߿ࠀ￿𐀀"
BYTES = [bytes([byte]) for byte in range(256)]


def drawn(random: random.Random, most: int) -> str:
    return "".join(random.choices(LETTERS, k=random.randint(1, most)))


def cut(random: random.Random, vocabulary: Sequence[bytes], text: bytes) -> list[int]:
    """Tokens of a text, each drawn from those that fit."""
    ids: list[int] = []
    while text:
        fitting = [id for id, piece in enumerate(vocabulary) if piece and text.startswith(piece)]
        ids.append(random.choice(fitting))
        text = text[len(vocabulary[ids[-1]]) :]
    return ids


def test_a_text_is_incomplete_where_a_character_has_begun() -> None:
    for text in ("", "a", LETTERS, LETTERS[::-1]):
        data = text.encode()
        ends = {len(text[:count].encode()) for count in range(len(text) + 1)}
        for size in range(len(data) + 1):
            assert is_incomplete(data[:size]) is (size not in ends), data[:size]
    for data in (b"\x80", b"\xbf\xbf\xbf", b"\xff", b"\xf8", b"\xf0\x9f\x98\x80\x80"):
        assert not is_incomplete(data), "no character that could be completed"


def test_the_text_after_each_token_is_incomplete_as_that_of_all_tokens_so_far() -> None:
    draw = random.Random(11)
    vocabulary = [*BYTES, "é".encode(), "😀".encode(), b"a\xf0", b"\x98\x80a", b""]
    for _ in range(100):
        ids = cut(draw, vocabulary, drawn(draw, 6).encode())
        texts = itertools.accumulate(vocabulary[id] for id in ids)
        assert Pieces(vocabulary).incomplete(ids) == [is_incomplete(text) for text in texts]
    assert Pieces(BYTES).incomplete([0xC3, 1000, 0xA9]) == [True, True, False], "an unknown token has no text"


def test_missing_tokens_are_all_that_may_precede_the_last_one() -> None:
    """Compared with a search through all lists of ids of that length."""
    draw = random.Random(12)
    for _ in range(60):
        data = draw.choice(LETTERS[1:]).encode()
        more = [data[at:end] for at in range(len(data)) for end in range(at + 1, len(data) + 1) if draw.random() < 0.5]
        vocabulary = [*[bytes([byte]) for byte in sorted({*data})], *more, b"x"]
        ids = cut(draw, vocabulary, data)
        count, last = len(ids) - 1, ids[-1]
        possible = [
            list(found)
            for found in itertools.product(range(len(vocabulary)), repeat=count)
            if b"".join(vocabulary[id] for id in (*found, last)) == data
        ]
        missing = Pieces(vocabulary).missing(data.decode(), count, last)
        if len(data) == len(vocabulary[last]):
            assert missing == [], "nothing is missing before a whole character"
        else:
            assert len(missing) == min(len(possible), 2)
            assert all(found in possible for found in missing)
            assert len(missing) < 2 or missing[0] != missing[1]


def test_what_cannot_be_missing_is_not_found() -> None:
    pieces = Pieces(BYTES)
    first, second = "é".encode()
    assert pieces.missing("é", 1, second) == [[first]]
    assert pieces.missing("é", 2, second) == [], "two tokens have at least two bytes"
    assert pieces.missing("é", 1, 256) == [], "no token of the vocabulary"
    assert pieces.missing("é", 1, ord("a")) == [], "the text does not end with the token"
    assert pieces.missing("aé", 1, second) == [], "one token has one byte"
    assert pieces.missing("aa", 1, ord("a")) == [], "llama-server sends a token with a whole character"
    most = Pieces([b"", b"\xf0", b"\x9f", b"\x98", b"\x80", *["😀".encode()[:1]] * 2])
    assert len(most.missing("😀", 3, 4)) == 2, "three tokens may be the first"


def test_the_search_for_missing_tokens_is_bounded() -> None:
    limit = 1 << 10
    for before, is_searched in (("é" * (limit // 2 - 1), True), ("é" * (limit // 2), False)):
        data = before.encode() + b"\xc3"
        whole = Pieces([data, b"\xa9"])
        assert whole.missing(before + "é", 1, 1) == ([[0]] if is_searched else [])
    nested = [b"\xc3", *[b"\xa9\xc3"] * MAX_MISSING, b"\xa9"]
    for count in (MAX_MISSING, MAX_MISSING + 1):
        found = Pieces(nested[:2] + nested[-1:]).missing("é" * count, count, 2)
        assert found == ([[0] + [1] * (count - 1)] if count <= MAX_MISSING else [])


def test_the_text_of_tokens_ends_with_a_whole_character_or_is_none() -> None:
    draw, vocabulary = random.Random(13), [*BYTES, "é".encode()]
    for _ in range(50):
        text = drawn(draw, 5)
        ids = cut(draw, vocabulary, text.encode())
        assert Pieces(vocabulary).text(ids) == text
    assert Pieces(BYTES).text([0xC3]) is None
    assert Pieces(BYTES).text([97, 256]) is None
    assert Pieces(BYTES).text([]) == ""
