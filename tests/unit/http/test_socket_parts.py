"""What the messages of a WebSocket are made of: framed events, lanes, and the items of a conversation."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from handler.core.errors import InvalidPayload, Overloaded, ServingError
from handler.http.sockets import conversation as conversations
from handler.http.sockets.conversation import ConversationItem, RealtimeConversation, read_item, readable
from handler.http.sockets.exchange import event_in, events_in, line_in, lines_in, refusal_event
from handler.http.sockets.lanes import MAX_LANES, MAX_RUNNING, InvalidLane, Lanes, LaneWork, TooManyLanes, lane_name
from handler.http.sockets.settings import EventError
from handler.serving.quota import Quota, Share
from tests.one_test import in_one_test

QUOTA = Quota(1 << 20, 0, 1 << 20, "too much")

# -- framed events -----------------------------------------------------------------------------------------------------


def test_the_json_of_events_is_what_was_framed() -> None:
    draw = random.Random(71)
    frames = (b"data: %b\n\n", b"event: x\ndata: %b\n\n", b": a comment\n\ndata: %b\n\n", b"data: %b\n\n: ping\n\n")
    for plain in (True, False):
        for _ in range(50):
            values = [json.dumps({"a": draw.choice(["", "data: ", "\n\n", "[DONE]"])}).encode() for _ in range(3)]
            data = b"".join((frames[0] if plain else draw.choice(frames)) % value for value in values)
            for end in (b"", b"data: [DONE]\n\n"):
                assert events_in(data + end) == values
    assert events_in(b"data: [DONE]\n\n") == []


def test_one_object_is_read_by_the_short_way_and_nothing_else_is() -> None:
    value = b'{"a": "b"}'
    assert event_in(b"data: %b\n\n" % value) == value
    assert line_in(b"%b\n" % value) == value
    assert lines_in(b"%b\n%b\n\n" % (value, value)) == [value, value]
    for other in (b"data: [DONE]\n\n", b": ping\n\n", b"data: %b\n\ndata: {}\n\n" % value, b"data: %b\n" % value):
        assert event_in(other) == b""
    for other in (b"%b\n%b\n" % (value, value), value, b"[1]\n"):
        assert line_in(other) == b""


def test_a_refusal_tells_its_status_and_when_to_try_again() -> None:
    event = refusal_event(InvalidPayload("no"), param="x")
    assert (event["type"], event["status"], event["error"]["param"]) == ("error", 400, "x")
    assert "no" in event["error"]["message"]
    assert "headers" not in event
    busy = refusal_event(Overloaded("busy"))
    assert busy["headers"] == busy["error"]["headers"]
    assert "retry-after" in busy["headers"]


# -- lanes -------------------------------------------------------------------------------------------------------------


def test_a_lane_is_named_by_letters_digits_and_few_signs() -> None:
    for name in ("a", "A-z_0.9", "x" * 256):
        value = {"stream_id": name, "other": 1}
        assert lane_name(value) == name
        assert value == {"other": 1}
    assert lane_name({}) == ""
    for wrong in ("", "x" * 257, "a b", "ä", "a\n", 7, None, ["a"]):
        with pytest.raises(InvalidLane):
            lane_name({"stream_id": wrong})


def test_a_connection_has_its_most_lanes_and_a_lane_that_exists_stays() -> None:
    async def play() -> None:
        lanes = Lanes(lambda error, lane: None, lambda: None)

        async def nothing() -> None:
            pass

        for number in range(MAX_LANES):
            lanes.check(str(number))
            lanes.add(str(number), LaneWork(nothing, Share(QUOTA)))
        with pytest.raises(TooManyLanes):
            lanes.check("another")
        for known in ("", "0", str(MAX_LANES - 1)):
            lanes.check(known)
        while lanes.running:
            await asyncio.sleep(0)
        with pytest.raises(TooManyLanes):
            lanes.check("another")

    asyncio.run(play())


def test_lanes_run_at_the_same_time_each_in_order_and_no_more_than_allowed() -> None:
    draw = random.Random(72)

    async def play() -> None:
        order: dict[str, list[int]] = {}
        running = most = 0
        idle: list[None] = []
        lanes = Lanes(lambda error, lane: pytest.fail(str(error)), lambda: idle.append(None))

        def step(name: str, number: int) -> Any:
            async def do() -> None:
                nonlocal running, most
                running += 1
                most = max(most, running)
                for _ in range(draw.randrange(1, 4)):
                    await asyncio.sleep(0)
                order.setdefault(name, []).append(number)
                running -= 1

            return do

        names = [str(number) for number in range(MAX_RUNNING + 4)]
        for number in range(3):
            for name in names:
                lanes.add(name, LaneWork(step(name, number), Share(QUOTA)))
        assert lanes.num_waiting == 3 * len(names)
        while lanes.running:
            await asyncio.sleep(0)
        assert all(numbers == [0, 1, 2] for numbers in order.values())
        assert order.keys() == {*names}
        assert most == MAX_RUNNING
        assert len(idle) == len(names)

    asyncio.run(play())


def test_work_that_has_not_begun_is_removed() -> None:
    done: list[int] = []

    async def play() -> None:
        lanes = Lanes(lambda error, lane: None, lambda: None)

        def step(number: int) -> Any:
            async def do() -> None:
                done.append(number)
                lanes.clear()

            return do

        for number in range(3):
            lanes.add("a", LaneWork(step(number), Share(QUOTA)))
        while lanes.running:
            await asyncio.sleep(0)
        assert lanes.num_waiting == 0

    asyncio.run(play())
    assert done == [0]


# -- the items of a conversation ---------------------------------------------------------------------------------------


def message(id: str, **fields: Any) -> ConversationItem:
    content = [{"type": "input_text", "text": id}]
    return read_item({"id": id, "type": "message", "role": "user", "content": content, **fields})


def held(size: int) -> Share:
    share = Share(QUOTA)
    share.take(size)
    return share


def test_items_stand_where_they_are_put_as_in_a_list() -> None:
    draw = random.Random(73)
    for _ in range(20):
        conversation, expected = RealtimeConversation(held), list[str]()
        for number in range(12):
            if expected and draw.random() < 0.3:
                gone = expected.pop(draw.randrange(len(expected)))
                conversation.remove(conversation.get(gone))
            place = draw.randint(0, len(expected))
            previous: Any = expected[place - 1] if place else "root"
            if place == len(expected) and draw.random() < 0.5:
                previous = None
            before = conversation.add(message(f"i{number}"), previous)
            assert before == (expected[place - 1] if place else None)
            expected.insert(place, f"i{number}")
            assert [*conversation.items] == expected
            assert conversation.last_id == expected[-1]
            assert QUOTA.taken == conversation.size == sum(item.size for item in conversation.items.values())
        for id in expected:
            conversation.remove(conversation.get(id))
        assert (QUOTA.taken, conversation.last_id) == (0, None)


def test_an_item_that_is_not_there_is_named_and_none_is_added_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = RealtimeConversation(lambda size: Share(QUOTA))
    conversation.add(message("a"))
    for wrong in ("b", 7, ["a"]):
        with pytest.raises(EventError, match="no item of the conversation has this id"):
            conversation.get(wrong)
        with pytest.raises(EventError, match="previous_item_id"):
            conversation.add(message("b"), wrong)
    with pytest.raises(EventError, match="an item with this id exists"):
        conversation.add(message("a"))
    monkeypatch.setattr(conversations, "_MAX_ITEMS", 2)
    conversation.add(message("b"))
    with pytest.raises(EventError, match="at most 2 items"):
        conversation.add(message("c"))
    assert [*conversation.items] == ["a", "b"]


def test_only_an_item_in_progress_is_replaced_and_without_memory_it_is_removed() -> None:
    def refuse(size: int) -> Share:
        if size == final.size:
            raise Overloaded("no memory")
        return Share(QUOTA)

    final = message("a", content=[{"type": "input_text", "text": "the end"}])
    begun = message("a")._replace(is_cut=True)
    conversation = RealtimeConversation(lambda size: Share(QUOTA))
    conversation.replace(final)
    assert conversation.items == {}, "it has been removed"
    conversation.add(begun)
    conversation.replace(final)
    conversation.replace(begun)
    assert conversation.items == {"a": final}
    short = RealtimeConversation(refuse)
    short.add(begun)
    with pytest.raises(ServingError):
        short.replace(final)
    assert short.items == {}


def test_a_call_that_was_cut_is_read_only_with_its_output() -> None:
    call = read_item({"id": "c", "type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"})
    output = read_item({"id": "o", "type": "function_call_output", "call_id": "1", "output": "x"})
    cut = call._replace(is_cut=True)
    assert (call.call, call.output_of, output.call, output.output_of) == ("1", "", "", "1")
    assert readable([call, output]) == [call, output]
    assert readable([cut, output]) == [cut, output]
    assert readable([cut]) == []
    assert readable([call]) == [call]


def test_an_item_is_completed_by_its_id_and_status_and_seen_by_the_check() -> None:
    seen: list[Any] = []
    value = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "hi"}]}
    item = read_item(value, seen.append)
    event = json.loads(item.event)
    assert (event["id"], event["status"], event["object"]) == (item.id, "completed", "realtime.item")
    assert item.id.startswith("item_")
    assert seen[0]["content"] == [{"type": "output_text", "text": "hi"}]
    assert "object" not in json.loads(item.input)
    assert json.loads(read_item({**value, "status": "incomplete"}).event)["status"] == "incomplete"
    assert read_item({**value, "id": "x" * 256}).id == "x" * 256


TEXT = {"type": "input_text", "text": "x"}
ROLES: tuple[Any, ...] = ("tool", None, [])


@in_one_test(
    ("value", "words"),
    [
        *((value, "item.type: must be") for value in (7, None, {}, {"type": "other"}, {"type": ["message"]})),
        *(({"type": "function_call", "id": id}, "item.id: must be") for id in ("", "x" * 257, 7)),
        *(({"type": "message", "role": role, "content": [TEXT]}, "item.role: must be") for role in ROLES),
        ({"type": "message", "role": "user", "content": "x"}, "item.content: must be a list"),
        ({"type": "message", "role": "user", "content": [TEXT, 7]}, "item.content[1].type: must be input_text or"),
        ({"type": "message", "role": "system", "content": [{"type": "input_image"}]}, "item.content[0].type"),
        ({"type": "message", "role": "assistant", "content": [TEXT]}, "item.content[0].type: must be output_text"),
    ],
)
def test_an_item_that_is_invalid_is_refused_by_its_field(value: Any, words: str) -> None:
    with pytest.raises(EventError) as refused:
        read_item(value)
    assert refused.value.message.startswith(words)
