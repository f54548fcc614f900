"""vLLM's LLMEngine, whose core runs in a process of its own: its start, and what our engines on it share."""

from __future__ import annotations

import contextlib
import dis
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from types import ModuleType
from typing import Any

from handler.engines.base import EngineConfig, EngineInfo, EngineStatistics, Interrupted
from handler.engines.process.supervisor import end_with_children, end_with_this_process
from handler.engines.vllm.arguments import construct, engine_arguments, environment, lmcache_environment
from handler.engines.vllm.results import Pending, Results, Statistics

log = logging.getLogger("handler.engine")


class CoreEngine:
    """The part of an `engines.base.Engine` that talks to vLLM's core.

    Args:
        more: arguments of EngineArgs that beat those of the options.

    Attributes:
        arguments: those that the engine was made of.
    """

    def __init__(self, config: EngineConfig, **more: Any) -> None:
        self._engine, self.arguments = start_engine(config, **more)
        self._core = self._engine.engine_core
        self._results = self._engine.output_processor = Results()
        self._stop_watch = end_with_children()  # vLLM notices its core's death only when it sends something
        self._statistics = Statistics()

    def interrupt_on(self, fd: int) -> bool:
        if not hasattr(self._core, "interrupt_on"):
            return False  # this client is not ours, and cannot be interrupted
        self._core.interrupt_on(fd)
        return True

    def _submit_as(self, pending: Pending, prompt: Any, params: Any, **more: Any) -> None:
        """Give vLLM a request, by the key of `pending`."""
        self._results.next = pending
        self._engine.add_request(str(pending.key), prompt, params, **more)

    def _abort(self, ids: Collection[str]) -> None:
        self._engine.abort_request(list(ids), internal=True)

    def _outputs(self) -> Sequence[Any]:
        """Wait for the core's next outputs; none where it has no request, as it would say nothing for ever."""
        if not self._results.pending:
            return ()
        found = self._core.get_output()
        if found.scheduler_stats is not None:
            self._statistics.add(found.scheduler_stats)
        outputs: Sequence[Any] = found.outputs
        return outputs

    def statistics(self) -> EngineStatistics:
        return self._statistics.report(idle=not self._results.pending, num_preemptions=self._results.num_preemptions)

    def close(self) -> None:
        self._stop_watch()
        self._core.shutdown()


def start_engine(config: EngineConfig, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Return the engine, and the arguments that it was made of.

    Args:
        more: arguments that beat those of the options.
    """
    os.environ.update(environment(config, os.environ))
    end_with_this_process()
    import vllm
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = engine_arguments(config, current_platform.device_count() or 1, cpu=current_platform.is_cpu()) | more
    os.environ.update(lmcache_environment(config, os.environ, arguments["tensor_parallel_size"]))
    # By this vLLM chooses how many tokens a step computes.
    context = UsageContext.OPENAI_API_SERVER
    with patch_sync_client():
        made = vllm.EngineArgs(**construct(arguments, vllm.EngineArgs))
        return LLMEngine.from_engine_args(made, context, enable_multiprocessing=True), arguments


def engine_info(engine: Any) -> EngineInfo:
    import vllm
    from vllm.platforms import current_platform

    model = engine.model_config
    return EngineInfo(
        name="vllm",
        version=vllm.__version__,
        device=str(current_platform.device_name),
        dtype=str(model.dtype).removeprefix("torch."),
        max_total_tokens=model.max_model_len,
    )


# -- patch of vLLM's SyncMPClient: the thread that steps the engine fetches the outputs itself -------------------------
# vLLM's own client has a thread that waits for the core, decodes each message and puts it into a queue. With few
# requests, waking that thread costs more than everything else in a step.


_ATTRIBUTES = {"is_dp", "outputs_queue", "output_queue_thread", "output_socket", "shutdown_path"}
"""Attributes that the constructor of vLLM's client sets, beyond its base class (0.20 to 0.33)."""

_USED = {"decoder", "resources", "utility_results"}
"""Attributes that its base class sets, and this patch uses."""

_NAMES = ("zmq", "SyncMPClient", "MPClient", "BackgroundResources", "_process_utility_output")


@contextlib.contextmanager
def patch_sync_client() -> Iterator[None]:
    """Patch the client that LLMEngine makes within this context; without effect where the client is unknown."""
    from vllm.v1.engine import core_client

    if not _is_known(core_client):
        log.info(
            "this vLLM's client is not known here: it fetches its outputs in its own thread, which is a little slower"
        )
        yield
        return
    original = core_client.SyncMPClient
    core_client.SyncMPClient = _make_client(core_client)
    try:
        yield
    finally:
        core_client.SyncMPClient = original


def _is_known(core_client: ModuleType) -> bool:
    if not all(hasattr(core_client, name) for name in _NAMES):
        return False
    client, base = core_client.SyncMPClient, core_client.MPClient
    if not (hasattr(client, "_send_input") and hasattr(core_client.BackgroundResources, "validate_alive")):
        return False
    return _assigned(client.__init__) == _ATTRIBUTES and _assigned(base.__init__) >= _USED


def _assigned(function: Any) -> set[str]:
    """Return the names of the attributes that a function sets."""
    return {step.argval for step in dis.get_instructions(inspect.unwrap(function)) if step.opname == "STORE_ATTR"}


def _make_client(core_client: ModuleType) -> type:
    zmq = core_client.zmq

    class InlineClient(core_client.SyncMPClient):  # type: ignore[misc, name-defined]
        """Used by one thread; only vLLM's monitor shuts it down from another when the core has died."""

        def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool, **more: Any) -> None:
            core_client.MPClient.__init__(self, False, vllm_config, executor_class, log_stats, **more)
            self.is_dp = vllm_config.parallel_config.data_parallel_size > 1
            self._thread = threading.get_ident()
            self._fetched: deque[Any] = deque()  # outputs that came during a call
            self._socket = self.resources.output_socket
            self.resources.output_socket = None  # to be closed by this thread
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._interrupted = False

        def interrupt_on(self, fd: int) -> None:
            """Make `get_output` raise Interrupted when `fd` is readable, perhaps after one more output."""
            self._poller.register(fd, zmq.POLLIN)

        def get_output(self) -> Any:
            """Wait for an output. Few calls: an engine on the same cores has emptied their caches meanwhile."""
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
            """Wait for the core's next message; None where it answers a call."""
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
