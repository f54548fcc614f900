"""The output of an engine whose event loop runs inside the engine, step by step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from handler.core.values import Finish
from handler.engines.base import Output, Step
from handler.engines.remote.servers import Part

Deliver = Callable[[Step], object]
"""Receives a step, and returns whether the event loop should go on."""


class StepLoop:
    """Runs an event loop, and delivers the output of the requests on it in steps.

    All output of one iteration of the loop is delivered in one step.

    Args:
        interval: number of seconds without output after which an empty step is delivered.
        look: function that checks the requests. It is called at least once per interval while the loop runs.

    Attributes:
        interval: as above. It can be changed until the first run.
        parts: what the next step will contain of responses, by the keys of their requests.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float, look: Callable[[], object]) -> None:
        self._loop = loop
        self.interval = interval
        self._look = look
        self.parts: dict[int, Part] = {}
        self._tokens = Step.of([])  # of requests that have no part; they come before the parts
        self._deliver: Deliver | None = None  # None: there is no run, or it has ended
        self._is_stopped = False
        self._delivery: asyncio.Handle | None = None  # the next call of `_pass_on`
        self._timer: asyncio.TimerHandle | None = None  # the next call of `_end_interval`
        self._delivered_at = 0.0  # time of the last step, or of the first run since `deliver` ended one
        self._error: BaseException | None = None  # from `_deliver`

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the next step."""
        return not (self.parts or self._tokens.keys)

    def add(self, key: int, part: Part) -> None:
        """Add a part of a request's response to the next step. It replaces the request's part in `parts`, if any."""
        self.parts[key] = part
        self.wake()

    def add_token(self, key: int, id: int) -> None:
        """Add a token without a log-probability."""
        if (part := self.parts.get(key)) is None:
            self._tokens.add(key, id, None)
        else:
            part.ids.append(id)
            part.logprobs.append(None)
        if self._delivery is None:
            self.wake()

    def drop(self, key: int) -> None:
        """Remove the output of a request."""
        self.parts.pop(key, None)
        if key in self._tokens.keys:
            kept = [row for row in zip(*self._tokens[:3], strict=True) if row[0] != key]
            self._tokens = Step.of([])
            for row in kept:
                self._tokens.add(*row)

    def wake(self) -> None:
        """Deliver a step in the next iteration of the loop if `run` is running. Otherwise, `run` will do so."""
        if self._deliver is not None and self._delivery is None:
            self._delivery = self._loop.call_soon(self._pass_on)

    def take(self) -> Step:
        """Return the next step, and begin another one."""
        step, self._tokens = self._tokens, Step.of([])
        if self.parts:
            parts, self.parts = self.parts, {}
            for key, part in parts.items():
                if _is_plain(part):  # nearly all parts
                    step.add(key, part.ids[0], part.logprobs[0])
                else:
                    step.others.extend(_outputs(key, part))
        return step

    def run(self, deliver: Deliver) -> bool:
        """Run the loop until `stop` is called, or `deliver` returns false. Return whether `deliver` has ended the run.

        Exceptions of `deliver` end the run, and are raised here.
        """
        if not self._is_stopped:
            self._delivered_at = time.monotonic()
        self._deliver, self._is_stopped = deliver, False
        if self._timer is None:
            self._timer = self._loop.call_later(self.interval, self._end_interval)
        if not self.is_empty:
            self.wake()
        self._loop.run_forever()
        self._deliver = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return not self._is_stopped

    def stop(self) -> None:
        """End the run before the next step."""
        if self._deliver is not None:
            self._deliver, self._is_stopped = None, True
        self._loop.stop()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end_interval(self) -> None:
        self._look()
        left = self._delivered_at + self.interval - time.monotonic()
        if left <= 0:
            self._pass_on()
            left = self.interval
        self._timer = self._loop.call_later(left, self._end_interval)

    def _pass_on(self) -> None:
        self._delivery = None
        if self._deliver is None:
            return
        self._delivered_at = time.monotonic()
        try:
            goes_on = self._deliver(self.take())
        except BaseException as error:
            self._error, goes_on = error, False
        if not goes_on:
            self._deliver = None
            self._loop.stop()


def _is_plain(part: Part) -> bool:
    """Return whether exactly one token and nothing else has arrived."""
    return len(part.ids) == 1 and not any((part.tops, part.finish, part.failure, part.prompt_logprobs, part.extras))


def _outputs(key: int, part: Part) -> Iterator[Output]:
    """Yield an output with the tokens or finish reason of a part, if any, and then its error, if any."""
    finish: Finish | None = None if part.failure is not None else part.finish
    if part.ids or finish is not None:
        output = Output(key, part.ids, part.logprobs, finish, tops=part.tops or None, extras=part.extras)
        yield output._replace(prompt_logprobs=part.prompt_logprobs, prompt_tops=part.prompt_tops)
    if part.failure is not None:
        yield part.failure
