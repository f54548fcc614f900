"""Limits that owners share: one that takes all it can leaves room for another, and everyone may take all of each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection

from handler.config.config import Config
from handler.core.errors import Overloaded
from handler.core.fair_queue import FairQueue, OwnerCounts
from handler.http import batch_routes, inference, message_batch_routes, stored_calls
from handler.scheduler.batcher import OwnerQueues
from handler.serving.admission import memory_quota
from handler.serving.large_bodies import MAX_WAITING, LargeBodies
from handler.serving.media.loader import MediaLoader, media_rules
from handler.serving.quota import Quota, Share
from handler.serving.request.gate import BatchGate
from tests.app.server import BY_KEY, serve
from tests.app.sockets.client import open_socket
from tests.servers import LiveServer, options, wait_for

MOST = 12
Take = Callable[[str], None]
"""Takes a place for an owner, and raises an error if there is none."""


def in_queue(owner: str, queue: Any = None) -> None:
    if not queue.has_room(MOST, owner):
        raise Overloaded("full")
    number = len(queue)
    queue.add(number, 0, number, owner) if isinstance(queue, OwnerQueues) else queue.put(number, None, owner)


def of_fair_queue() -> Take:
    queue = FairQueue[None]()
    return lambda owner: in_queue(owner, queue)


def of_counts() -> Take:
    counts, held = OwnerCounts(MOST, "full"), contextlib.ExitStack()

    def take(owner: str) -> None:
        held.enter_context(counts.hold(owner))

    return take


def of_owner_queues() -> Take:
    queues = OwnerQueues[int]()
    return lambda owner: in_queue(owner, queues)


def of_gate() -> Take:
    gate = BatchGate(Config(job_queue_size=MOST, batch_size=100, max_batch_delay=100_000))

    def take(owner: str) -> None:
        gate.join(owner)

    return take


def of_memory() -> Take:
    quota, shares = memory_quota(Config(requests_total_bytes=16 << 20)), list[Share]()

    def take(owner: str) -> None:
        shares.append(Share(quota.of(owner)))
        shares[-1].take(1 << 20)

    return take


def of_large_bodies() -> Take:
    bodies = LargeBodies()
    return lambda owner: vars(bodies)["_waiting"].of(owner).change(0, 1, large=False)


def of_media() -> Take:
    loader = MediaLoader(media_rules(Config()))
    return lambda owner: vars(loader)["_waiting"].of(owner).change(0, 1)


LIMITS = (of_fair_queue, of_counts, of_owner_queues, of_gate, of_memory, of_large_bodies, of_media)


def fill(take: Take, owner: str) -> int:
    """How many places an owner gets."""
    number = 0
    with contextlib.suppress(Overloaded):
        while number < 1 << 14:
            take(owner)
            number += 1
    return number


@pytest.mark.parametrize("limit", LIMITS)
def test_an_owner_that_takes_all_it_can_leaves_room_for_another(limit: Callable[[], Take]) -> None:
    async def check() -> None:
        take = limit()
        first = fill(take, "ann")
        assert 0 < first < 1 << 14, "it is a limit"
        assert fill(take, "bob") >= 1
        assert fill(limit(), "") >= first, "without owners, everyone may take all of it"

    asyncio.run(check())


def test_large_bodies_count_by_owner() -> None:
    """`submit` passes the owner on."""
    bodies = LargeBodies()
    with contextlib.closing(bodies):
        quota = vars(bodies)["_waiting"]
        quota.of("ann").change(0, MAX_WAITING, large=True)
        done = bodies.submit(1, lambda: vars(quota)["_taken_by_owner"].copy(), owner="bob").result(30)
        assert done == {"ann": MAX_WAITING, "bob": 1}


def test_all_memory_of_a_request_is_its_owners(tmp_path: Path) -> None:
    found: list[Quota] = []

    class Noted(Share):
        def __init__(self, quota: Quota) -> None:
            found.append(quota)
            super().__init__(quota)

    def post(path: str, body: Any) -> None:
        found.clear()
        response = httpx.post(f"{opened.url}{path}", json=body, headers={"authorization": "Bearer ann"}, timeout=30)
        assert response.status_code in (200, 400), response.text
        assert found, path
        assert {type(quota).__name__ for quota in found} == {"_OwnersQuota"}, path

    stores = options(f"option.batches_store={tmp_path}", "option.responses_store=memory")
    places = (inference, message_batch_routes, batch_routes, stored_calls)
    with contextlib.ExitStack() as patches, serve("--engine", "echo", *BY_KEY, *stores) as opened:
        for place in places:
            patches.enter_context(mock.patch.object(place, "Share", Noted))
        message = {"custom_id": "a", "params": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}}
        post("/v1/messages/batches", {"requests": [message]})
        post("/v1/batches", {"input_file_id": "a", "endpoint": "/v1/completions", "completion_window": "24h"})
        post("/v1/conversations", {"items": [{"role": "user", "content": "a"}]})


# -- WebSockets --------------------------------------------------------------------------------------------------------

PLACES = 6


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    keys = {"LMI_API_KEY": "ann,bob,carl"}
    with serve("--engine", "echo", *options(f"option.websockets_max={PLACES}"), env=keys) as server:
        yield server


def sockets(server: LiveServer, key: str, number: int, stack: contextlib.ExitStack) -> list[ClientConnection]:
    """The WebSockets that a key gets when it opens so many."""
    found = []
    for _ in range(number):
        with contextlib.suppress(InvalidStatus):
            headers = {"Authorization": f"Bearer {key}"}
            found.append(stack.enter_context(open_socket(server, "/v1/realtime", additional_headers=headers)))
    return found


def closed(sockets: Sequence[ClientConnection]) -> list[bool]:
    """Whether the server has closed each WebSocket."""
    closes = [socket.protocol.close_rcvd for socket in sockets]
    assert {(close.code, "option.websockets_max" in close.reason) for close in closes if close} <= {(1013, True)}
    return [close is not None for close in closes]


def test_the_key_with_the_most_sockets_gives_way(server: LiveServer) -> None:
    with contextlib.ExitStack() as stack:
        anns = sockets(server, "ann", 2 * PLACES, stack)
        assert len(anns) == PLACES
        bobs = sockets(server, "bob", PLACES, stack)
        assert len(bobs) == PLACES // 2
        wait_for(lambda: closed(anns) == [False] * 3 + [True] * 3, 30, "the newest are closed")
        assert not any(closed(bobs))
        carls = sockets(server, "carl", PLACES, stack)
        assert len(carls) == PLACES // 3
        wait_for(lambda: (sum(closed(anns)), sum(closed(bobs))) == (4, 1), 30, "each gives one")
        assert not sockets(server, "ann", 1, stack), "it has its share"
        assert not any(closed(carls))
    assert server.ping() == 200
