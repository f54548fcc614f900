"""Guides made ready on a thread beside the engine's, so that no other request waits for it."""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from handler.core.values import StructuredOutput

_NICE = 10  # those who get tokens go first
_MAX_KNOWN = 1024
_SOON = 0.005  # seconds that one step waits for a guide: those which are known to GenAI are ready by then
_IDLE = 0.05  # seconds, where a step has nothing else to do


class _Waiting(NamedTuple):
    key: int
    structured_output: StructuredOutput


class GrammarCompiler:
    """Used by the engine's thread only.

    GenAI locks what it has compiled while it compiles, and a request with a guide needs that when it begins. So one
    guide is compiled at a time, and not before the requests that are ready have begun.

    Args:
        compile: makes a guide ready, or raises ValueError; called on a thread.
    """

    def __init__(self, compile: Callable[[StructuredOutput], None]) -> None:
        self._compile = compile
        self._waiting: deque[_Waiting] = deque()
        self._current: _Waiting | None = None
        self._known: OrderedDict[StructuredOutput, None] = OrderedDict()  # the one used last comes last
        self._jobs: queue.SimpleQueue[StructuredOutput] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._started = False

    def add(self, key: int, structured_output: StructuredOutput) -> None:
        self._waiting.append(_Waiting(key, structured_output))

    def cancel(self, key: int) -> None:
        """Nobody waits for it any more; what is being compiled goes on, others may ask for it."""
        self._waiting = deque(one for one in self._waiting if one.key != key)

    def step(self, *, idle: bool) -> list[tuple[int, str]]:
        """Requests whose guides are ready, or what is wrong with those; one of them may have been cancelled.

        Args:
            idle: the engine has nothing else to do.
        """
        found: list[tuple[int, str]] = []
        patience = 0.0  # in the step that has it compiled only: those after that are other requests' tokens
        while self._current is not None or self._waiting:
            if self._current is None:
                if self._waiting[0].structured_output in self._known:
                    key, structured_output = self._waiting.popleft()
                    self._known.move_to_end(structured_output)
                    found.append((key, ""))
                    continue
                if found:
                    break
                self._current = self._waiting.popleft()
                self._start(self._current.structured_output)
                patience = _SOON
            try:
                error = self._results.get(timeout=_IDLE if idle else patience)
            except queue.Empty:
                break
            key, structured_output = self._current
            self._current = None
            found.append((key, error))
            if not error:
                self._known[structured_output] = None
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        return found

    def _start(self, structured_output: StructuredOutput) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="guides", daemon=True).start()
        self._jobs.put(structured_output)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # xgrammar's own threads get it, too
        while True:
            structured_output = self._jobs.get()
            try:
                self._compile(structured_output)
            except Exception as error:  # foreign code; the request is told
                self._results.put(str(error) or type(error).__name__)
            else:
                self._results.put("")
