"""vLLM's outputs, fetched by the thread that steps it.

vLLM's own client has a thread for that, which waits for its core, decodes what comes and puts it into a queue: with few
requests, waking a further thread at each step costs more than all that is done with the step.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import logging
import threading
from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from handler.engines.base import Interrupted

_log = logging.getLogger("handler.engine")

_ATTRIBUTES = {"is_dp", "outputs_queue", "output_queue_thread", "output_socket", "shutdown_path"}
"""All that vLLM's client sets when it is made, beyond its base class (0.20 to 0.33)."""

_USED = {"decoder", "resources", "utility_results"}
"""What its base class sets, and is used here."""


_NAMES = ("zmq", "SyncMPClient", "MPClient", "BackgroundResources", "_process_utility_output")


@contextlib.contextmanager
def patch_sync_client() -> Iterator[None]:
    """Meanwhile, the clients that LLMEngine makes of its core fetch their outputs themselves.

    In a version of vLLM whose client is not the known one nothing changes.
    """
    from vllm.v1.engine import core_client

    if not _is_known(core_client):
        _log.info(
            "this vLLM's client is not known here: it fetches its outputs in its own thread, which is a little slower"
        )
        yield
        return
    ordinary = core_client.SyncMPClient
    core_client.SyncMPClient = _polled(core_client)
    try:
        yield
    finally:
        core_client.SyncMPClient = ordinary


def _is_known(core_client: ModuleType) -> bool:
    if not all(hasattr(core_client, name) for name in _NAMES):
        return False
    client, base = core_client.SyncMPClient, core_client.MPClient
    if not (hasattr(client, "_send_input") and hasattr(core_client.BackgroundResources, "validate_alive")):
        return False
    return _stored(client.__init__) == _ATTRIBUTES and _stored(base.__init__) >= _USED


def _stored(function: Any) -> set[str]:
    """Names of the attributes that a function sets."""
    return {step.argval for step in dis.get_instructions(inspect.unwrap(function)) if step.opname == "STORE_ATTR"}


def _polled(core_client: ModuleType) -> type:
    zmq = core_client.zmq

    class InlineClient(core_client.SyncMPClient):  # type: ignore[misc, name-defined]
        """All of it belongs to one thread, but for vLLM's monitor, which shuts it down when the core has died."""

        def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool, **more: Any) -> None:
            core_client.MPClient.__init__(self, False, vllm_config, executor_class, log_stats, **more)
            self.is_dp = vllm_config.parallel_config.data_parallel_size > 1
            self._thread = threading.get_ident()
            self._fetched: deque[Any] = deque()  # during a call
            self._socket = self.resources.output_socket
            self.resources.output_socket = None  # to be closed by this thread
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._interrupted = False

        def interrupt_on(self, fd: int) -> None:
            """From now on `get_output` raises Interrupted when `fd` is readable; first it may bring one output more."""
            self._poller.register(fd, zmq.POLLIN)

        def get_output(self) -> Any:
            """Each step waits here: few calls, as an engine on the same cores has emptied their caches meanwhile."""
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
            """Waits for what the core says next; None where that is the answer to a call."""
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
            while self.utility_results:  # a call, whose result is waited for
                if (outputs := self._fetch()) is not None:
                    self._fetched.append(outputs)

        def shutdown(self, timeout: float | None = None) -> None:
            super().shutdown(timeout)
            if threading.get_ident() == self._thread:
                self._socket.close(linger=0)

    return InlineClient
