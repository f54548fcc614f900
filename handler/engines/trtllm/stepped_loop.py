"""Event loop that runs only inside its owner's calls; other threads may schedule callbacks in between."""

from __future__ import annotations

import asyncio
import threading


class SteppedLoop(asyncio.SelectorEventLoop):
    """Reports to other threads that it runs, as long as it is open.

    A thread of TensorRT-LLM's proxy puts results into a request's queue and wakes the reader only if
    `loop.is_running()`. Otherwise a request whose last result it was would never end (`_SyncQueue.notify_many` in
    tensorrt_llm/llmapi/utils.py and `dispatch_result_task` in executor/proxy.py, 1.0 to 1.4). Before October 2025, and
    with an executor in the LLM's process, the error of that even shuts the LLM down.

    Callbacks of `call_soon_threadsafe` are kept until the loop runs again, so no notice is lost. A loop on a thread of
    its own took a tenth more CPU a token with 256 streams.
    """

    def __init__(self) -> None:
        self._owner = threading.get_ident()  # asyncio's constructor calls is_running
        super().__init__()

    def is_running(self) -> bool:
        """Return the real state to the owner: asyncio checks it before it runs or closes the loop."""
        if threading.get_ident() == self._owner:
            return super().is_running()
        return not self.is_closed()
