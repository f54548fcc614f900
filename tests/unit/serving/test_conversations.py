"""Conversations in the store, in any order of calls of two servers: nothing acknowledged is lost, out of order or seen
by another owner, and one request has its turn.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from handler.core.errors import ConversationLocked, InvalidPayload, NotKept, Unavailable
from handler.core.framing import loads
from handler.protocols.kernel.stored import KeptResponse, Wanted, kept_items
from handler.protocols.openai.api import Page
from handler.protocols.responses.conversations import new_conversation
from handler.serving import conversations, stored_responses
from handler.serving.conversations import Conversations, ResponseTurn
from handler.serving.stored_responses import OwnersKeeper, ResponseStore
from tests.stepped import Clock
from tests.unit.serving.test_stored_responses import ANN, BOB, open_store, open_with_connection

LIFETIME = 100  # seconds
WAIT = 20  # seconds
OWNERS, SERVERS, ANY = st.sampled_from([ANN, BOB]), st.integers(0, 1), st.integers(0, 99)


def take_nothing(num_bytes: int) -> None: ...


class Talk:
    """A conversation as it should be."""

    def __init__(self, owner: str, ids: list[str], used: float) -> None:
        self.owner, self.ids, self.used, self.metadata = owner, ids, used, dict[str, str]()


class Pending(NamedTuple):
    """A response in progress."""

    id: str
    server: int
    turn: ResponseTurn


class Stores(RuleBasedStateMachine):
    """Two servers on one directory. Each rule is a call whose result has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.clock = Clock(1_000_000.0)
        self.stores = [self.open(), self.open()]
        self.number = itertools.count().__next__
        self.talks: dict[str, Talk] = {}
        self.pending: list[Pending] = []

    def open(self) -> ResponseStore:
        return open_store(self.directory, self.clock, responses_expiration=LIFETIME)

    def items(self, number: int) -> list[dict[str, Any]]:
        return [{"id": f"msg_{self.number()}", "type": "message"} for _ in range(number)]

    def pick(self, index: int) -> tuple[str, Talk]:
        return [*self.talks.items()][index % len(self.talks)]

    def change(self, server: int, owner: str, change: Any) -> Any:
        return self.stores[server].change_conversation(owner, change).result(WAIT)

    def read(self, server: int, owner: str, read: Any) -> Any:
        return self.stores[server].read_conversations(owner, read).result(WAIT)

    def append(self, server: int, owner: str, id: str, items: list[dict[str, Any]]) -> None:
        def append(conversations: Conversations) -> tuple[int, None]:
            number = conversations.find(owner, id).number
            conversations.append(number, kept_items(items))
            return number, None

        self.change(server, owner, append)

    # -- conversations -------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.talks) < 4)
    @rule(server=SERVERS, owner=OWNERS, number=st.integers(0, 3))
    def create(self, server: int, owner: str, number: int) -> None:
        made, items = new_conversation({}), self.items(number)
        self.change(server, owner, lambda one: (one.create(owner, {**made}, kept_items(items)), None))
        self.talks[made["id"]] = Talk(owner, [item["id"] for item in items], self.clock.now)

    @precondition(lambda self: self.talks)
    @rule(server=SERVERS, index=ANY, number=st.integers(0, 3), repeats=st.booleans())
    def add(self, server: int, index: int, number: int, repeats: bool) -> None:
        id, talk = self.pick(index)
        items = self.items(number)
        if repeats and talk.ids:
            items.append({"id": talk.ids[index % len(talk.ids)], "type": "message"})
            with pytest.raises(InvalidPayload, match="Duplicate item"):
                self.append(server, talk.owner, id, items)
            return
        self.append(server, talk.owner, id, items)
        talk.ids += [item["id"] for item in items]
        talk.used = self.clock.now

    @precondition(lambda self: self.talks)
    @rule(server=SERVERS, index=ANY, place=ANY)
    def delete_item(self, server: int, index: int, place: int) -> None:
        id, talk = self.pick(index)
        if talk.ids:
            item_id = talk.ids.pop(place % len(talk.ids))
            found = self.change(server, talk.owner, lambda one: (0, one.delete_item(talk.owner, id, item_id)))
            assert found["id"] == id
            talk.used = self.clock.now

    @precondition(lambda self: self.talks)
    @rule(server=SERVERS, index=ANY)
    def update(self, server: int, index: int) -> None:
        id, talk = self.pick(index)
        talk.metadata = {"number": str(self.number())}
        found = self.change(server, talk.owner, lambda one: one.update(talk.owner, id, talk.metadata))
        assert found["metadata"] == talk.metadata
        talk.used = self.clock.now

    @precondition(lambda self: self.talks)
    @rule(server=SERVERS, index=ANY)
    def delete(self, server: int, index: int) -> None:
        id, talk = self.pick(index)
        self.change(server, talk.owner, lambda one: (0, one.delete(talk.owner, id)))
        del self.talks[id]

    @precondition(lambda self: self.talks)
    @rule(server=SERVERS, index=ANY, limit=st.integers(1, 3), newest_first=st.booleans())
    def pages(self, server: int, index: int, limit: int, newest_first: bool) -> None:
        id, talk = self.pick(index)
        found: list[str] = []
        more = True
        while more:
            page = Page(limit, found[-1] if found else "", newest_first)
            rows, more = self.read(
                server, talk.owner, lambda one, page=page: one.page(talk.owner, id, page, take_nothing)
            )
            assert len(rows) == limit or not more
            found += [loads(row)["id"] for row in rows]
        assert found == (talk.ids[::-1] if newest_first else talk.ids)

    @precondition(lambda self: self.talks)
    @rule(server=SERVERS, index=ANY)
    def strangers_see_nothing(self, server: int, index: int) -> None:
        id, talk = self.pick(index)
        other = BOB if talk.owner == ANN else ANN
        for call in (
            lambda one: one.find(other, id),
            lambda one: one.page(other, id, Page(1, "", True), take_nothing),
            lambda one: one.delete(other, id),
            lambda one: one.update(other, id, {}),
        ):
            with pytest.raises(NotKept):
                self.change(server, other, call)
        wanted = Wanted("response", True, items=talk.ids, conversation="")
        assert not self.stores[server].recall(other, wanted, take_nothing).result(WAIT).items

    # -- responses -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.talks)
    @rule(server=SERVERS, index=ANY)
    def begin(self, server: int, index: int) -> None:
        id, talk = self.pick(index)
        store = self.stores[server]
        turn = store.new_turn()
        recalling = store.recall(
            talk.owner, Wanted("response", True, conversation=id, appends=True), take_nothing, turn
        )
        if any(pending.id == id for pending in self.pending):
            with pytest.raises(ConversationLocked):
                recalling.result(WAIT)
            store.end_turn(talk.owner, turn)
            return
        assert [item["id"] for item in recalling.result(WAIT).history] == talk.ids
        talk.used = self.clock.now
        self.pending.append(Pending(id, server, turn))

    @precondition(lambda self: self.pending)
    @rule(index=ANY, how=st.sampled_from(["completed", "completed", "unstored", "failed", "cancelled", "late"]))
    def end(self, index: int, how: str) -> None:
        """End a response. One that ends late is stored although its request has ended meanwhile."""
        pending = self.pending.pop(index % len(self.pending))
        store, talk = self.stores[pending.server], self.talks.get(pending.id)
        owner = ANN if talk is None else talk.owner
        answer_id, given, output = f"resp_{self.number()}", self.items(1), self.items(2)
        answer = KeptResponse(
            answer_id, "response", pending.id, how == "failed", {"id": answer_id}, kept_items(given), output,
            stored=how != "unstored",
        )  # fmt: skip
        if how != "cancelled":
            keeper = OwnersKeeper(store, owner, pending.turn)
            keeping = store.write(owner, partial(keeper.keep, answer))
            if how == "late":
                store.end_turn(owner, pending.turn)
            assert keeping.result(WAIT) == (how != "unstored")
        if how != "late":
            store.end_turn(owner, pending.turn)
        if talk is not None and how not in ("failed", "cancelled"):
            talk.ids += [item["id"] for item in (*given, *output)]
            talk.used = self.clock.now
        self.expire()

    # -- time, and the ends of servers ---------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 30, 99]))
    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds
        self.expire()

    def expire(self) -> None:
        """Forget the conversations that may have expired. Those in which a response is in progress do not."""
        in_use, now = {pending.id for pending in self.pending}, self.clock.now
        self.talks = {id: talk for id, talk in self.talks.items() if id in in_use or talk.used + LIFETIME > now}

    @rule(server=SERVERS)
    def remove_expired(self, server: int) -> None:
        """As a server does from time to time."""
        self.change(server, ANN, lambda one: (0, None))

    @rule(server=SERVERS)
    def restart(self, server: int) -> None:
        self.stores[server].close()
        self.stores[server] = self.open()
        self.pending = [pending for pending in self.pending if pending.server != server]
        self.expire()

    @invariant()
    def both_servers_see_each_conversation(self) -> None:
        for id, talk in self.talks.items():
            for server in (0, 1):
                stored = self.read(server, talk.owner, lambda one, talk=talk, id=id: one.find(talk.owner, id))
                assert loads(stored.head)["metadata"] == talk.metadata
                rows = self.read(server, talk.owner, lambda one, stored=stored: one.items(stored.number))
                assert [loads(row)["id"] for row in rows] == talk.ids

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.directory)


def test_conversations_in_any_order_of_calls() -> None:
    run_state_machine_as_test(
        Stores,
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[*hypothesis.HealthCheck]
        ),
    )


def test_a_conversation_in_use_is_not_deleted_to_make_room(tmp_path: Path) -> None:
    """The response in it is not lost, whichever server deletes, and other conversations of the key are."""
    clock = Clock(1_000_000.0, 0.001)
    stores = [open_store(tmp_path, clock, responses_max=2) for _ in range(2)]
    made = [new_conversation({}) for _ in range(4)]

    def create(number: int, server: int) -> None:
        stores[server].change_conversation(ANN, lambda one: (one.create(ANN, {**made[number]}, []), None)).result(WAIT)

    def exist() -> list[bool]:
        found = []
        for one in made:
            try:
                stores[0].read_conversations(ANN, partial(Conversations.find, owner=ANN, id=one["id"])).result(WAIT)
            except NotKept:
                found.append(False)
            else:
                found.append(True)
        return found

    create(0, 0)
    turn = stores[0].new_turn()
    wanted = Wanted("response", True, conversation=made[0]["id"], appends=True)
    assert stores[0].recall(ANN, wanted, take_nothing, turn).result(WAIT).state == "found"
    create(1, 0)
    create(2, 0)
    assert exist() == [True, False, True, False]
    create(3, 1)
    assert exist() == [True, False, False, True]
    response = KeptResponse("resp_1", "response", made[0]["id"], False, {}, kept_items([{"id": "a"}]), [], stored=False)
    stores[0].write(ANN, partial(OwnersKeeper(stores[0], ANN, turn).keep, response)).result(WAIT)
    number = stores[1].read_conversations(ANN, lambda one: one.find(ANN, made[0]["id"]).number).result(WAIT)
    assert len(stores[1].read_conversations(ANN, lambda one: one.items(number)).result(WAIT)) == 1
    for store in stores:
        store.close()


def test_a_turn_that_ends_before_it_begins_is_not_taken() -> None:
    store = open_store(None)
    made = new_conversation({})
    store.change_conversation(ANN, lambda one: (one.create(ANN, {**made}, []), None)).result(WAIT)
    wanted = Wanted("response", True, conversation=made["id"], appends=True)
    turn = store.new_turn()
    store.end_turn(ANN, turn)
    with pytest.raises(ConversationLocked):
        store.recall(ANN, wanted, take_nothing, turn).result(WAIT)
    assert store.recall(ANN, wanted, take_nothing, store.new_turn()).result(WAIT).state == "found"
    store.close()


@pytest.mark.parametrize("how", ["deleted", "expired", "displaced"])
def test_a_conversation_of_many_items_goes_a_few_items_at_a_time(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not seen any more meanwhile, and does not count for its owner."""
    monkeypatch.setattr(conversations, "MAX_REMOVED", 10)
    monkeypatch.setattr(stored_responses, "_PERIOD", 3600)
    clock = Clock(1_000_000.0)
    store, connection = open_with_connection(None, clock, responses_max=1, responses_expiration=LIFETIME)
    made, after = new_conversation({}), new_conversation({})
    items = kept_items({"id": f"msg_{number}", "text": "a"} for number in range(35))
    store.change_conversation(ANN, lambda one: (one.create(ANN, {**made}, items), None)).result(WAIT)

    def delete(one: Conversations) -> tuple[int, None]:
        one.delete(ANN, made["id"])
        return 0, None

    if how == "expired":
        clock.now += LIFETIME
    elif how == "deleted":
        store.change_conversation(ANN, delete).result(WAIT)
    else:
        clock.now += 1
        store.change_conversation(ANN, lambda one: (one.create(ANN, {**after}, []), None)).result(WAIT)
    with pytest.raises(NotKept):
        store.read_conversations(ANN, lambda one: one.find(ANN, made["id"])).result(WAIT)
    assert store.read_conversations(ANN, lambda one: one.latest_item(ANN, "msg_34")).result(WAIT) is None

    def count() -> int:
        (number,) = connection.execute("SELECT count(*) FROM conversation_items").fetchone()
        assert isinstance(number, int)
        return number

    counts = [store.write(BOB, count).result(WAIT)]
    while store.write(BOB, store._database.remove_expired).result(WAIT):
        counts.append(store.write(BOB, count).result(WAIT))
    counts.append(store.write(BOB, count).result(WAIT))
    assert counts[-1] == 0
    assert all(0 <= before - later <= 10 for before, later in itertools.pairwise(counts))
    if how != "displaced":
        store.change_conversation(ANN, lambda one: (one.create(ANN, {**after}, []), None)).result(WAIT)
    assert store.read_conversations(ANN, lambda one: one.find(ANN, after["id"])).result(WAIT).size > 0
    store.close()


def test_what_a_conversation_holds_is_given_back() -> None:
    """A conversation of the largest size is emptied item by item, and has room again."""
    store = open_store(None, responses_max_bytes=1 << 20)
    made = new_conversation({})

    def add(*items: dict[str, Any]) -> None:
        def append(conversations: Conversations) -> tuple[int, None]:
            number = conversations.find(ANN, made["id"]).number
            conversations.append(number, kept_items(items))
            return number, None

        store.change_conversation(ANN, append).result(WAIT)

    def delete_item(id: str) -> None:
        store.change_conversation(ANN, lambda one: (0, one.delete_item(ANN, made["id"], id))).result(WAIT)

    def size() -> int:
        return store.read_conversations(ANN, lambda one: one.find(ANN, made["id"]).size).result(WAIT)

    store.change_conversation(ANN, lambda one: (one.create(ANN, {**made}, []), None)).result(WAIT)
    empty = size()
    for _ in range(3):
        add(*({"id": f"msg_{number}", "text": "x" * 300_000} for number in range(3)))
        full = size()
        with pytest.raises(Unavailable, match="more than an API key may store"):
            add({"id": "msg_9", "text": "x" * 300_000})
        assert size() == full
        for number in range(3):
            delete_item(f"msg_{number}")
        assert size() == empty
    store.close()
