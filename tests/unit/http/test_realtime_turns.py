"""The ends of a realtime response: whenever and why it ends, what has begun ends, and what was read is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from handler.core.errors import Overloaded
from handler.core.values import Delta, Finish
from handler.http.sockets.conversation import ConversationItem, RealtimeConversation
from handler.http.sockets.exchange import EventSender, events_in
from handler.http.sockets.realtime import RealtimeReader
from handler.http.sockets.requests import JSON
from handler.http.sockets.transcription import Transcriber
from handler.serving.quota import Quota, Share
from tests.unit.protocols.answers import CAPABLE, answer, failing, saying, with_options

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>[{"name": "weather", "arguments": {"city": "Bonn"}}]</tool_call>'
CONTEXT = replace(CAPABLE, chat_template="{{ tools, tool_calls, message.reasoning, reasoning_effort }} <tool_call>")

SCRIPTS: dict[str, Sequence[Delta]] = {
    "text": saying("One, two, three."),
    "thought": saying("<think>Hm, so.</think>\n\nYes.", 9),
    "call": saying(f"Wait. {CALL}", 9),
    "calls": saying(CALL + CALL, 9),
    "broken": saying(CALL.replace('"}}', '"', 1), 9),
    "length": saying("One, two", 2, Finish.LENGTH),
    "cut": saying(CALL[:60], 9, Finish.LENGTH),
    "failing": failing(2),
}


def stream(name: str) -> list[bytes]:
    """The events of a response of /v1/responses."""
    context = with_options(CONTEXT, reasoning_parser="qwen3") if name == "thought" else CONTEXT
    asked = {"input": "a", "tools": [TOOL], "stream": True}
    return events_in(answer("openai_responses", asked, [*SCRIPTS[name]], context).body)


End = Callable[["Session", EventSender], Awaitable[None]]


class Session:
    """The session of a WebSocket. Its responses have the first events of a stream, and then end."""

    def __init__(self, events: Sequence[bytes], end: End) -> None:
        admission = SimpleNamespace(check_media=self._check_media)
        config = SimpleNamespace(max_request_size=1 << 20)
        self.model: Any = SimpleNamespace(context=CONTEXT, config=config, admission=admission)
        self.owner = ""
        self.socket = self
        self._quota = Quota(1 << 20, 0, 1 << 20, "too much")
        self.events = events
        self.end = end
        self._work: list[Callable[[], Awaitable[None]]] = []
        self.sent: list[Any] = []
        self.bodies: list[Any] = []
        self.reader = RealtimeReader(self)  # type: ignore[arg-type]

    async def _check_media(self, media: object, owner: str) -> None: ...

    def send_text(self, data: bytes) -> None:
        self.sent.append(json.loads(data))

    def hold(self, size: int) -> Share:
        share = Share(self._quota)
        share.take(size)
        return share

    async def decode(self, message: bytes) -> Any:
        return json.loads(message)

    async def call(self, size: int, use: Callable[[], Any]) -> Any:
        return use()

    def start(self, lane: str, size: int, do: Callable[[], Awaitable[None]]) -> None:
        self._work.append(do)

    async def respond(self, path: str, body: bytes, output: EventSender, content_type: str = JSON) -> None:
        self.bodies.append(json.loads(body) if content_type == JSON else body)
        for event in self.events:
            output.events([event])
        await self.end(self, output)

    async def read(self, kind: str, **fields: Any) -> None:
        await self.reader.read(json.dumps({"type": kind, **fields}).encode())

    async def run(self) -> None:
        while self._work:
            await self._work.pop(0)()

    @property
    def response(self) -> Any:
        """The last response that was created."""
        return [event["response"] for event in self.sent if event["type"] == "response.created"][-1]


async def cancelled(session: Session, output: EventSender) -> None:
    """Events that are already on their way come after the end."""
    await session.read("response.cancel", response_id=session.response["id"])
    output.events(session.events)


async def cancelled_after_more(session: Session, output: EventSender) -> None:
    """The user interrupts the model with a message, and the client cancels after it."""
    await session.read("conversation.item.create", item=said("Stop."))
    await cancelled(session, output)


async def refused(session: Session, output: EventSender) -> None:
    output.error({"type": "error", "status": 400, "error": {"code": None, "message": "no"}})


async def failed(session: Session, output: EventSender) -> None:
    output.error({"type": "error", "status": 500, "message": "Internal Server Error"})


async def gone(session: Session, output: EventSender) -> None:
    """The stream breaks off."""


STATUSES = {
    cancelled: "cancelled",
    cancelled_after_more: "cancelled",
    refused: "failed",
    failed: "failed",
    gone: "failed",
}
ENDED = ("completed", "incomplete", "failed")


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "id": text, "role": "user", "content": [{"type": "input_text", "text": text}]}


def text_of(item: Any) -> str:
    return str(item["content"][0]["text"] if item["type"] == "message" else item["arguments"])


def check(events: Sequence[Any], conversation: str | None) -> Any:
    """Check the events of a response, and return it."""
    first, *others, last = [event for event in events if event["type"].startswith("response.")]
    assert (first["type"], last["type"]) == ("response.created", "response.done")
    assert first["response"]["id"] == last["response"]["id"]
    assert last["response"]["conversation_id"] == conversation
    details = last["response"]["status_details"] or {}
    assert details.get("reason") in (None, "client_cancelled", "max_output_tokens")
    shown, whole, part = "", None, None
    item: Any = None
    done: list[Any] = []
    for event in others:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(done)
        assert event["response_id"] == first["response"]["id"]
        assert kind == "output_item.added" or item is not None
        assert event.get("item_id", (event.get("item") or {}).get("id")) == (item or event["item"])["id"]
        if kind == "output_item.added":
            assert (item, event["item"]["status"]) == (None, "in_progress")
            item, shown, whole, part = event["item"], "", None, None
        elif kind == "content_part.added":
            assert (item["type"], part) == ("message", None)
            part = "begun"
        elif kind.endswith(".delta"):
            assert whole is None
            shown += event["delta"]
        elif kind in ("output_text.done", "function_call_arguments.done"):
            assert whole is None
            whole = event["text"] if "text" in event else event["arguments"]
        elif kind == "content_part.done":
            assert (part, event["part"]["text"]) == ("begun", whole)
            part = "done"
        else:
            assert kind == "output_item.done"
            assert part == ("done" if item["type"] == "message" else None)
            assert event["item"]["status"] in ("completed", "incomplete")
            assert text_of(event["item"]) == whole == shown
            done.append(event["item"])
            item = None
    assert item is None
    assert last["response"]["output"] == done
    return last["response"]


async def converse(events: Sequence[bytes], end: End, *, joins: bool) -> None:
    """Have a response that ends, and check it and the request for the next one."""
    session = Session(events, end)
    await session.read("conversation.item.create", item=said("Hello."))
    fields = {"conversation": "auto" if joins else "none", "tools": [TOOL]}
    start = len(session.sent)
    await session.read("response.create", response=fields)
    await session.run()
    new = session.sent[start:]
    assert not [event for event in new if event["type"] == "error"]
    response = check(new, session.response["conversation_id"] if joins else None)
    if end in STATUSES and not any(json.loads(event)["type"].split(".")[1] in ENDED for event in events):
        assert response["status"] == STATUSES[end]
        assert all(item["status"] == "completed" for item in response["output"][:-1] if item["type"] == "message")
    items = {}
    for kind in ("added", "done"):
        of_response = [event["item"] for event in new if event["type"] == f"conversation.item.{kind}"]
        items[kind] = [item for item in of_response if item.get("role") != "user"]
    assert [item["id"] for item in items["added"]] == [item["id"] for item in items["done"]]
    assert items["done"] == (response["output"] if joins else [])
    for item in items["done"]:
        await session.read("conversation.item.retrieve", item_id=item["id"])
        assert session.sent[-1]["item"] == item
    await session.read("response.create")
    await session.run()
    read = [item for item in response["output"] if item["type"] == "message" or item["status"] == "completed"]
    more = ["Stop."] if end is cancelled_after_more else []
    prompt = [item["id"] for item in session.bodies[-1]["input"]]
    assert prompt == ["Hello.", *[item["id"] for item in read if joins], *more]
    texts = [text_of(item) for item in session.bodies[-1]["input"] if item["id"] in [one["id"] for one in read]]
    assert texts == [text_of(item) for item in read if joins]


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("name", SCRIPTS)
def test_what_has_begun_ends_however_a_response_ends(name: str, joins: bool) -> None:
    events = stream(name)

    async def run() -> None:
        for end in STATUSES:
            for cut in range(2 if end in (cancelled, cancelled_after_more) else 0, len(events)):
                await converse(events[:cut], end, joins=joins)
        await converse(events, gone, joins=joins)

    asyncio.run(run())


def test_a_response_that_is_cancelled_before_its_turn_is_created_first() -> None:
    async def run() -> None:
        session = Session(stream("text"), gone)
        await session.read("conversation.item.create", item=said("Hello."))
        start = len(session.sent)
        await session.read("response.create")
        await session.read("response.cancel")
        assert [event["type"] for event in session.sent[start:]] == ["response.created", "response.done"]
        for fields in ({}, {"response_id": session.response["id"]}):
            await session.read("response.cancel", **fields)
            assert session.sent[-1]["error"]["code"] == "response_cancel_not_active"
        await session.read("response.create")
        await session.run()
        assert len(session.bodies) == 1, "a cancelled response sends no request"
        check(session.sent[start + 4 :], session.response["conversation_id"])

    asyncio.run(run())


def test_without_an_id_only_the_response_of_the_conversation_is_cancelled() -> None:
    events = stream("text")

    async def unnamed(session: Session, output: EventSender) -> None:
        await session.read("response.cancel")
        output.events(events[5:])

    async def run() -> None:
        session = Session(events[:5], unnamed)
        await session.read("response.create", response={"conversation": "none", "input": [said("Hello.")]})
        await session.run()
        errors = [event["error"]["code"] for event in session.sent if event["type"] == "error"]
        assert (errors, session.sent[-1]["response"]["status"]) == (["response_cancel_not_active"], "completed")

    asyncio.run(run())


def test_an_item_that_is_deleted_while_it_is_generated_stays_deleted() -> None:
    async def deleted(session: Session, output: EventSender) -> None:
        (id,) = (event["item"]["id"] for event in session.sent if event["type"] == "response.output_item.added")
        await session.read("conversation.item.delete", item_id=id)
        await session.read("conversation.item.create", item={**said("Mine."), "id": id})
        await cancelled(session, output)

    async def run() -> None:
        session = Session(stream("text")[:5], deleted)
        await session.read("conversation.item.create", item=said("Hello."))
        await session.read("response.create")
        await session.run()
        assert check(session.sent, session.response["conversation_id"])["output"]
        await session.read("response.create")
        texts = [event["item"]["content"] for event in session.sent if event["type"] == "conversation.item.done"]
        assert texts == [said("Hello.")["content"], said("Mine.")["content"]]
        session.end = gone
        await session.run()
        assert [text_of(item) for item in session.bodies[-1]["input"]] == ["Hello.", "Mine."]

    asyncio.run(run())


def test_a_call_that_was_cut_is_in_a_prompt_with_its_output_only() -> None:
    async def run() -> None:
        session = Session(stream("cut"), gone)
        await session.read("conversation.item.create", item=said("Hello."))
        await session.read("response.create", response={"tools": [TOOL]})
        await session.run()
        (call,) = session.sent[-1]["response"]["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
        kinds = ["message", "message"]
        for item in (said("So?"), output):
            await session.read("conversation.item.create", item=item)
            await session.read("response.create", response={"conversation": "none"})
            await session.run()
            assert [one["type"] for one in session.bodies[-1]["input"]] == kinds
            kinds = ["message", "function_call", "message", "function_call_output"]

    asyncio.run(run())


def test_an_item_in_progress_is_in_no_prompt() -> None:
    async def asked(session: Session, output: EventSender) -> None:
        session.end = gone
        await session.read("response.create", response={"conversation": "none"})

    async def run() -> None:
        session = Session(stream("text")[:5], asked)
        await session.read("conversation.item.create", item=said("Hello."))
        await session.read("response.create")
        await session.run()
        assert [[item["id"] for item in body["input"]] for body in session.bodies] == [["Hello."]] * 2

    asyncio.run(run())


@pytest.mark.parametrize("size", [10, 1000])
def test_an_item_holds_its_memory_or_is_removed(size: int) -> None:
    quota = Quota(800, 0, 800, "too much")

    def hold(size: int) -> Share:
        share = Share(quota)
        share.take(size)
        return share

    conversation = RealtimeConversation(hold)
    begun = {**said("a"), "status": "in_progress"}
    conversation.add(ConversationItem.of_response(begun))
    ended = ConversationItem.of_response({**said("a" * size), "id": "a", "status": "incomplete"})
    if size == 10:
        conversation.replace(ended)
    else:
        with pytest.raises(Overloaded):
            conversation.replace(ended)
    assert [*conversation.items.values()] == ([ended] if size == 10 else [])
    assert quota.taken == conversation.size


@pytest.mark.parametrize(("end", "message"), [(refused, "no"), (failed, "Internal Server Error")])
def test_a_transcript_that_fails_says_why(end: End, message: str) -> None:
    sent: list[Any] = []
    session: Any = Session([], end)
    asyncio.run(Transcriber().run(session, bytes(96), lambda kind, **fields: sent.append((kind, fields)), "item"))
    ((kind, fields),) = sent
    assert kind == "conversation.item.input_audio_transcription.failed"
    assert (fields["item_id"], fields["error"]["message"]) == ("item", message)
