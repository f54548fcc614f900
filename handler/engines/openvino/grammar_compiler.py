"""Compiles schemas, expressions and grammars on a thread, so that no other request waits."""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from handler.core.values import StructuredOutput
from handler.engines.structured_output.fair_queue import FairQueue, sort

_NICE = 10  # token generation goes first
_MAX_KNOWN = 1024
_SOON = 0.005  # seconds that a step waits for a text: GenAI has those that it knows by then
_IDLE = 0.05  # seconds, where a step has nothing else to do


class _Waiting(NamedTuple):
    key: int
    structured_output: StructuredOutput


class GrammarCompiler:
    """Used by the engine's thread only.

    GenAI locks its compiled grammars while it compiles, and a request needs them when it starts. So one text is
    compiled at a time, after the start of all requests that are ready. Those with known texts go before all that wait;
    they cannot begin while one is compiled, as the whole engine would wait for the lock.

    Args:
        compile: compiles a text, or raises ValueError; called on a thread.
    """

    def __init__(self, compile: Callable[[StructuredOutput], None]) -> None:
        self._compile = compile
        self._waiting = FairQueue[_Waiting]()
        self._current: _Waiting | None = None
        self._known: OrderedDict[StructuredOutput, None] = OrderedDict()  # the one used last comes last
        self._jobs: queue.SimpleQueue[StructuredOutput] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._started = False

    def add(self, key: int, structured_output: StructuredOutput) -> None:
        self._waiting.put(sort(structured_output), _Waiting(key, structured_output))

    def cancel(self, key: int) -> None:
        """Forget a request; its text still gets compiled, as others may need it."""
        self._waiting.drop(lambda waiting: waiting.key == key)

    def step(self, *, idle: bool) -> list[tuple[int, str]]:
        """Return the requests whose texts are ready, with an error or "", perhaps cancelled ones too.

        Args:
            idle: the engine has no other work.
        """
        ready: list[tuple[int, str]] = []
        patience = 0.0  # only in the step that starts a compilation: later ones would delay other requests
        while True:
            if self._current is None:
                ready += [(key, "") for key in self._take_known()]
                if ready or (following := self._waiting.first()) is None:
                    break
                self._waiting.get()
                self._current = following
                self._start(following.structured_output)
                patience = _SOON
            try:
                error = self._results.get(timeout=_IDLE if idle else patience)
            except queue.Empty:
                break
            key, structured_output = self._current
            self._current = None
            ready.append((key, error))
            if not error:
                self._known[structured_output] = None
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        return ready

    def _take_known(self) -> list[int]:
        """Take out the requests whose texts are known."""
        keys: list[int] = []

        def is_known(waiting: _Waiting) -> bool:
            if waiting.structured_output not in self._known:
                return False
            self._known.move_to_end(waiting.structured_output)
            keys.append(waiting.key)
            return True

        self._waiting.drop(is_known)
        return keys

    def _start(self, structured_output: StructuredOutput) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="guides", daemon=True).start()
        self._jobs.put(structured_output)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # xgrammar's threads inherit it
        while True:
            structured_output = self._jobs.get()
            try:
                self._compile(structured_output)
            except Exception as error:  # foreign code: it refuses this request
                self._results.put(str(error) or type(error).__name__)
            else:
                self._results.put("")
