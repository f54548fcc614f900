"""An event loop that runs only inside its owner's calls, and takes what other threads schedule in between."""

from __future__ import annotations

import asyncio
import threading


class SteppedLoop(asyncio.SelectorEventLoop):
    """Says to other threads that it runs as long as it is open.

    A thread of TensorRT-LLM's proxy delivers the results. It puts an item into the queue of its request and then wakes
    the reader, but only if `loop.is_running()`; else it drops the notice. The item stays in the queue, and if it is the
    request's last one, the request never ends (`_SyncQueue.notify_many` in tensorrt_llm/llmapi/utils.py and
    `dispatch_result_task` in executor/proxy.py, 1.0 to 1.4). Before October 2025, and with an executor in the LLM's own
    process, the error of such a notice even shuts the LLM down.

    What a thread schedules by `call_soon_threadsafe` is kept until the loop runs again, so the notice is good while the
    loop rests. A loop that runs all the time on a thread of its own would hear it too. It took a tenth more CPU a token
    with 256 streams, as each request and each step had to go through that thread.
    """

    def __init__(self) -> None:
        self._owner = threading.get_ident()  # asyncio's constructor asks already
        super().__init__()

    def is_running(self) -> bool:
        """The owner gets the truth: asyncio itself asks there, before it runs or closes the loop."""
        if threading.get_ident() == self._owner:
            return super().is_running()
        return not self.is_closed()
