"""A patch for vLLM's SyncMPClient that lets the thread that steps the engine fetch the outputs itself.

vLLM's own client has a thread that waits for the core, decodes each message and puts it into a queue. With few
requests, waking that thread costs more than everything else in a step.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import logging
import threading
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from types import ModuleType
from typing import Any

from handler.engines.base import Interrupted

log = logging.getLogger("handler.engine")

_ATTRIBUTES = {"is_dp", "outputs_queue", "output_queue_thread", "output_socket", "shutdown_path"}
"""Attributes that the constructor of vLLM's client sets in addition to those of its base class (0.20 to 0.33)."""

_USED = {"decoder", "resources", "utility_results"}
"""Attributes that the base class of vLLM's client sets and this patch uses."""

_NAMES = attrgetter(
    "SyncMPClient._send_input", "BackgroundResources.validate_alive", "_process_utility_output", "zmq.Poller"
)
"""Reads the other names that this patch uses, and raises AttributeError if one is missing."""


@contextlib.contextmanager
def patch_sync_client() -> Iterator[None]:
    """Within this context, replace the client that LLMEngine creates, unless the installed client is unknown."""
    from vllm.v1.engine import core_client

    if (client := inline_client(core_client)) is None:
        log.info("unknown vLLM client: outputs are fetched in its own thread, which is a little slower")
        yield
        return
    original = core_client.SyncMPClient
    core_client.SyncMPClient = client
    try:
        yield
    finally:
        core_client.SyncMPClient = original


def inline_client(core_client: ModuleType) -> type | None:
    """Return a client without an output thread, or None if vLLM's client differs from the clients of 0.20 to 0.33.

    Only the code of the constructors shows which attributes they set.
    """
    try:
        _NAMES(core_client)
        client, base = core_client.SyncMPClient, core_client.MPClient
        is_supported = _assigned(client.__init__) == _ATTRIBUTES and _assigned(base.__init__) >= _USED
    except (AttributeError, TypeError):  # something is missing, or a constructor has no Python code
        return None
    return _make_client(core_client) if is_supported else None


def _assigned(function: Any) -> set[str]:
    """Return the names of the attributes that a function sets."""
    return {step.argval for step in dis.get_instructions(inspect.unwrap(function)) if step.opname == "STORE_ATTR"}


def _make_client(core_client: ModuleType) -> type:
    zmq = core_client.zmq

    class InlineClient(core_client.SyncMPClient):  # type: ignore[misc, name-defined]
        """A client for a single thread. If the core dies, vLLM's monitor calls `shutdown` from another thread."""

        def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool, **more: Any) -> None:
            core_client.MPClient.__init__(self, False, vllm_config, executor_class, log_stats, **more)
            self.is_dp = vllm_config.parallel_config.data_parallel_size > 1
            self._thread = threading.get_ident()
            self._fetched: deque[Any] = deque()  # outputs that arrived while a call waited for its result
            self._socket = self.resources.output_socket
            self.resources.output_socket = None  # so that only this thread closes it
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._interrupted = False

        def interrupt_on(self, fd: int) -> None:
            """Make `get_output` raise Interrupted when `fd` is readable, perhaps after one more output."""
            self._poller.register(fd, zmq.POLLIN)

        def get_output(self) -> Any:
            """Wait for an output in as few calls as possible, as an engine on the same cores clears the CPU caches."""
            outputs = self._fetched.popleft() if self._fetched else None
            while outputs is None:
                if self._interrupted:
                    self._interrupted = False
                    raise Interrupted
                ready = self._poller.poll()
                self._interrupted = len(ready) > 1 or ready[0][0] is not self._socket
                if ready[0][0] is self._socket:
                    outputs = self._fetch()
            if outputs.wave_complete is not None:
                self.engines_running = False
            return outputs

        def _fetch(self) -> Any:
            """Wait for the core's next message. Return its outputs, or None if the message is the result of a call."""
            frame = self._socket.recv(copy=False)
            frames = [frame]
            while frame.more:
                frame = self._socket.recv(copy=False)
                frames.append(frame)
            self.resources.validate_alive(frames)
            outputs = self.decoder.decode(frames)
            if not outputs.utility_output:
                return outputs
            core_client._process_utility_output(outputs.utility_output, self.utility_results)
            return None

        def _send_input(self, request_type: Any, request: Any) -> None:
            super()._send_input(request_type, request)
            while self.utility_results:  # a call is waiting for its result
                if (outputs := self._fetch()) is not None:
                    self._fetched.append(outputs)

        def shutdown(self, timeout: float | None = None) -> None:
            super().shutdown(timeout)
            if threading.get_ident() == self._thread:
                self._socket.close(linger=0)

    return InlineClient
