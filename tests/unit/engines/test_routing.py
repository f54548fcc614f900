"""Which replica gets a request."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from handler.core.media import Medium, SharedMedia
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Adapter, Pooling, Request
from handler.engines.process.replicas import Load, Router
from tests.one_test import in_one_test

NO_WORDS = Vocabulary([])
IDLE = [Load(0, 0, 0), Load(1, 0, 0)]


def choose(router: Router, text: str, loads: list[Load] = IDLE, **fields: Any) -> int:
    return router.choose(Request(text, **fields), Prompt(text, [], NO_WORDS), loads)


def test_the_fewest_tokens_to_come_decide_and_the_longest_pause_among_equals() -> None:
    router = Router(16)
    assert [choose(router, str(number)) for number in range(4)] == [0, 1, 0, 1]
    assert choose(router, "x", [Load(0, 1, 500), Load(1, 4, 400)]) == 1
    assert choose(router, "y", [Load(1, 9, 900)]) == 1, "the only one that takes it"


@in_one_test(("slots", "ahead", "stays"), [(16, 4, True), (16, 5, False), (2, 0, True), (2, 1, False), (256, 64, True)])
def test_a_conversation_stays_unless_its_replica_is_far_busier(slots: int, ahead: int, stays: bool) -> None:
    router = Router(slots)
    first = choose(router, "user: hi\nassistant:")
    loads = [Load(first, ahead, 1000), Load(1 - first, 0, 0)]
    assert (choose(router, "user: hi\nassistant: hello\nuser: and?\nassistant:", loads) == first) is stays


@pytest.mark.parametrize("opening", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_a_thought_that_the_template_opened_is_not_in_the_next_turn(opening: str) -> None:
    router = Router(16)
    assert choose(router, f"system\nuser one<a>\n{opening}") == 0
    assert choose(router, f"system\nuser two<a>\n{opening}") == 1, "another conversation with the same beginning"
    assert choose(router, f"system\nuser one<a>\nyes\nuser more<a>\n{opening}") == 0


def test_another_adapter_is_another_cache_and_prompts_of_ids_are_prompts() -> None:
    router = Router(16)
    assert choose(router, "a b", adapter=Adapter("one", 1, "/one")) == 0
    assert choose(router, "a b c", adapter=Adapter("two", 2, "/two")) == 1
    assert choose(router, "a b d", adapter=Adapter("one", 1, "/one")) == 0
    ids = [router.choose(Request(""), Prompt("", list(range(length)), NO_WORDS), IDLE) for length in (5, 6, 70, 71)]
    assert len(set(ids)) == 1


def test_pairs_of_one_query_spread() -> None:
    router = Router(16)
    assert [choose(router, "query", pooling=Pooling("score"), pair=str(number)) for number in range(4)] == [0, 1, 0, 1]


def test_an_empty_prompt_is_the_beginning_of_none() -> None:
    router = Router(16)
    assert [choose(router, text) for text in (" ", "a", "b", "", "c")] == [0, 1, 0, 1, 0]


def test_without_a_cache_prompts_do_not_count() -> None:
    router = Router(16, follows_prompts=False)
    assert [choose(router, "same") for _ in range(4)] == [0, 1, 0, 1]


def test_a_session_stays_while_its_replica_takes_requests() -> None:
    router = Router(4)
    first = choose(router, "a", session="s")
    busy = [Load(first, 3, 900), Load(1 - first, 0, 0)]
    assert choose(router, "b", busy, session="s") == first
    assert choose(router, "c", [Load(1 - first, 0, 0)], session="s") == 1 - first
    assert choose(router, "d", session="s") == 1 - first, "it lives there now"


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.engines.process.replicas._MOST_CHARACTERS", 100)
    monkeypatch.setattr("handler.engines.process.replicas._MOST_SESSIONS", 2)
    router = Router(16)
    for number in range(50):
        choose(router, f"{number:03} " + "x" * (number % 40), session=str(number))
    assert sum(len(start.text) for start in router._prompts) == router._num_characters <= 100
    assert len(router._sessions) == 2
    choose(router, "y" * 101)
    assert not router._prompts


@in_one_test("shared", ["", "system: You are a helpful assistant that answers at length\n"])
@in_one_test("order", ["one after another", "in turns", "at random"])
def test_ten_conversations_of_ten_turns_stay_and_spread(order: str, shared: str) -> None:
    router, rng = Router(16), random.Random(order)
    turns = [number for number in range(10) for _ in range(10)]
    if order == "in turns":
        turns = list(range(10)) * 10
    elif order == "at random":
        rng.shuffle(turns)
    texts = [f"{shared}user: conversation {number}\nassistant:" for number in range(10)]
    went: list[list[int]] = [[] for _ in range(10)]
    running: list[int] = []  # the replicas of requests that have not ended
    for number in turns:
        counts = [running.count(replica) for replica in range(2)]
        replica = choose(router, texts[number], [Load(at, count, 50 * count) for at, count in enumerate(counts)])
        went[number].append(replica)
        texts[number] += f" {number} words\nuser: and then?\nassistant:"
        running = [*running, replica][-4:] if order != "one after another" else []
    stayed = sum(one == next for of in went for one, next in itertools.pairwise(of))
    assert stayed >= 81, "of 90 turns that had one before"
    assert min(sum(of[0] == replica for of in went) for replica in range(2)) >= 3


def test_a_conversation_with_another_image_is_another_one() -> None:
    router = Router(16)

    def ask(text: str, *digests: str) -> int:
        media = SharedMedia(text, [Medium("image", (1, 1), b"rgb", digest) for digest in digests])
        return router.choose(Request(text), Prompt(text, [], NO_WORDS, media), IDLE)

    assert [ask("user: <image>", "a"), ask("user: <image>", "b")] == [0, 1]
    assert [ask("user: <image> one: and?", "b"), ask("user: <image> one: and <image>?", "a", "c")] == [1, 0]
