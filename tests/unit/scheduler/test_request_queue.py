"""The order of the queue, its bound on waiting, and that nothing is lost, in any order of calls."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from handler.core.values import Request, Sampling
from handler.protocols.registry import INVOCATIONS
from handler.scheduler.batcher import MAX_OVERTAKES, Batcher, RequestQueue
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CONTEXT, DIALECTS
from tests.unit.scheduler.test_batcher import Scripted, prompt, run

ACTIONS = st.lists(
    st.tuples(st.just("add"), st.integers(-(1 << 62), 1 << 62) | st.integers(-2, 2))
    | st.tuples(st.just("take"), st.just(0))
    | st.tuples(st.just("discard"), st.integers(0, 60)),
    max_size=120,
)


@given(actions=ACTIONS)
def test_order_bound_and_nothing_lost(actions: list[tuple[str, int]]) -> None:
    queue = RequestQueue[int]()
    waiting: dict[int, int] = {}  # id -> priority
    most: dict[int, int] = {}  # id -> the number of the `take` by which it is taken
    num_taken = overtakes = 0
    for id, (action, value) in enumerate(actions):
        if action == "add":
            most[id] = num_taken + (len(waiting) + 1) * (MAX_OVERTAKES + 1)
            queue.add(id, value, id)
            waiting[id] = value
        elif action == "discard":
            queue.discard(value)
            waiting.pop(value, None)
        elif waiting:
            oldest = min(waiting)
            wanted = oldest if overtakes == MAX_OVERTAKES else min(waiting, key=lambda one: (waiting[one], one))
            assert queue.first() == wanted == queue.take()
            overtakes = 0 if wanted == oldest else overtakes + 1
            num_taken += 1
            assert num_taken <= most[wanted]
            del waiting[wanted]
        assert (list(queue), len(queue)) == (sorted(waiting), len(waiting))


def test_an_endless_stream_of_urgent_requests_starves_nobody() -> None:
    queue = RequestQueue[str]()
    queue.add(0, 1 << 62, "patient")
    taken = []
    for id in range(1, 2 * MAX_OVERTAKES):
        queue.add(id, -id, "urgent")
        taken.append(queue.take())
    assert taken.index("patient") == MAX_OVERTAKES


def test_the_batcher_starts_the_lowest_priority_first_and_forgets_what_is_cancelled() -> None:
    batcher = Batcher(Scripted(), max_active=1)
    ids = [
        batcher.submit(Request("a", Sampling(max_new_tokens=1), priority=priority), prompt("a"))
        for priority in (0, 5, 0, -1, 5)
    ]
    batcher.cancel(ids[2])
    assert list(run(batcher)) == [ids[0], ids[3], ids[1], ids[4]]
    assert batcher.idle


BODIES: dict[str, dict[str, Any]] = {
    "lmi": {"inputs": "a", "parameters": {"priority": -3}},
    "tgi_compat": {"inputs": "a", "parameters": {"priority": -3}},
    "dynamic_batch": {"inputs": ["a", "b"], "parameters": {"priority": -3}},
    "openai_chat": {"messages": [{"role": "user", "content": "a"}], "priority": -3},
    "openai_completions": {"prompt": ["a", "b"], "priority": -3},
}


@in_one_test("dialect", BODIES)
def test_a_request_has_the_priority_of_its_body(dialect: str) -> None:
    body = BODIES[dialect]
    assert {request.priority for request in DIALECTS[dialect].parse(body, CONTEXT).requests} == {-3}
    if "messages" in body:
        assert INVOCATIONS["lmi"].parse(body, CONTEXT).requests[0].priority == -3


def test_bodies_of_many_texts_take_turns() -> None:
    queue, ids = RequestQueue[str](), itertools.count()

    def body(name: str, count: int, priority: int = 0) -> None:
        for number in range(count):
            queue.add(next(ids), priority, name, follows=number > 0)

    body("a", 30)
    taken = [queue.take() for _ in range(10)]
    body("b", 3)
    body("c", 1)
    body("urgent", 1, priority=-1)
    taken += [queue.take() for _ in range(len(queue))]
    assert taken[:10] == ["a"] * 10
    assert taken[10] == "urgent"
    assert taken[11:18] == ["a", "b", "c", "a", "b", "a", "b"]
    assert taken.count("a") == 30
