"""The pump: a sink that fails is told so, and its neighbours do not notice."""

from __future__ import annotations

import asyncio

from handler.batcher import Batcher
from handler.core import Delta, Finish, Request, Sampling
from handler.errors import InternalError
from handler.hosts.pump import Pump
from tests.test_batcher import Scripted, prompt


def test_a_failing_sink_is_ended_with_an_error_and_the_others_go_on() -> None:
    bad: list[Delta] = []
    good: list[Delta] = []

    def fail_once(delta: Delta) -> None:
        bad.append(delta)
        if len(bad) == 1:
            raise TypeError("cannot be written")

    async def story() -> None:
        pump = Pump(Batcher(Scripted()))
        for sink in (fail_once, good.append):
            pump.submit(Request("ab", Sampling(max_new_tokens=2)), prompt("ab"), sink)
        for _ in range(3):
            pump._step()
        pump.close()

    asyncio.run(story())
    assert (bad[1].finish, type(bad[1].error), len(bad)) == (Finish.ERROR, InternalError, 2)
    assert [delta.finish for delta in good] == [None, Finish.LENGTH]
