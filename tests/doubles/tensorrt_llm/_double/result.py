"""Results: one mutable object per request, which each iteration yields (TensorRT-LLM 1.2, executor/result.py)."""

from __future__ import annotations

import asyncio
import collections
import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from tensorrt_llm._double.api import MANNERS, RequestError, misuse, record

# -- delivery ----------------------------------------------------------------------------------------------------------
# How the executor's responses reach the results, as llmapi/utils.py and executor/proxy.py of 1.0 to 1.4 do it.
#
# A thread of the proxy's puts all responses of a step into their queues, then wakes the readers by one notice to their
# event loop. A loop that does not run at this moment gets none: the response stays in its queue, and nobody is told.


class EventLoopShutdownError(Exception):
    """The readers' event loop does not run."""


class AsyncQueue:
    """Read in an event loop, written by another thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: collections.deque[Any] = collections.deque()
        self._event = asyncio.Event()

    def put_nowait(self, item: Any) -> None:
        """Tells nobody."""
        self._items.append(item)

    def notify(self) -> None:
        """To be called in the loop. What lies there may have been read already."""
        if self._items:
            self._event.set()

    async def get(self) -> Any:
        if MANNERS.release < (1, 2):
            await self._event.wait()  # also when something lies there without a notice
        while not self._items:
            await self._event.wait()
        found = self._items.popleft()
        if not self._items:
            self._event.clear()
        return found


def notify_many(loop: asyncio.AbstractEventLoop, queues: Sequence[AsyncQueue]) -> None:
    """
    Raises:
        EventLoopShutdownError: the loop does not run, and none of the queues was told.
    """
    if not loop.is_running():
        raise EventLoopShutdownError

    async def notify() -> None:
        for one in set(queues):
            one.notify()

    # As run_coroutine_threadsafe does, but a loop that stops first leaves no coroutine that was never awaited.
    loop.call_soon_threadsafe(lambda: loop.create_task(notify()))


class Delivery:
    """
    Args:
        in_process: the executor runs in the LLM's process, so its own thread delivers and nothing catches its errors.
    """

    def __init__(self, *, in_process: bool) -> None:
        self.errors: queue.Queue[Exception] = queue.Queue()
        self.dropped = 0  # notices
        self._caught = not in_process and MANNERS.notices_are_caught
        self._steps: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._thread = None
        if not in_process:
            self._thread = threading.Thread(target=self._run, name="proxy_dispatch_result_thread", daemon=True)
            self._thread.start()

    def send(self, responses: list[tuple[Any, Any]]) -> None:
        """One step's, each with its result."""
        if self._thread is None:
            self._dispatch(responses)
        else:
            self._steps.put(responses)

    def close(self) -> None:
        self._steps.put(None)
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def _run(self) -> None:
        while (responses := self._steps.get()) is not None:
            self._dispatch(responses)

    def _dispatch(self, responses: list[tuple[Any, Any]]) -> None:
        waiting: list[AsyncQueue] = []
        for result, response in responses:
            result.queue.put_nowait(response)
            if isinstance(result.queue, AsyncQueue):
                waiting.append(result.queue)
        if not waiting:
            return
        try:
            notify_many(waiting[0].loop, waiting)  # the loop of all, as upstream has it
        except EventLoopShutdownError as error:
            self.dropped += 1
            if self._caught:
                print(
                    "[TRT-LLM] [W] proxy.py: EventLoopShutdownError because event loop is not running", file=sys.stderr
                )
            else:
                self.errors.put(error)
        except Exception as error:  # whatever a thread of the executor's meets
            self.errors.put(error)


Logprob: Any = record("Logprob")

_FINISH = {"END_ID": "stop", "STOP_WORDS": "stop", "LENGTH": "length", "TIMED_OUT": "timeout", "CANCELLED": "cancelled"}


def entry(logprobs: Any, id: int, count: int) -> dict[int, Any]:
    """The most likely ids, and the chosen one in any case."""
    top = numpy.argsort(-logprobs, kind="stable")[:count].tolist()
    ranks = {one: rank for rank, one in enumerate(top, 1)}
    if id not in ranks:
        ranks[id] = int((logprobs > logprobs[id]).sum()) + 1
    return {one: Logprob(logprob=float(logprobs[one]), rank=rank) for one, rank in ranks.items()}


class Tensor:
    """As much of torch.Tensor as there is to do with logits."""

    def __init__(self, array: Any) -> None:
        self._array = numpy.asarray(array, dtype=numpy.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)

    def float(self) -> Tensor:
        return self

    cpu = float

    def numpy(self) -> Any:
        return self._array

    def tolist(self) -> Any:
        return self._array.tolist()


class _Differences:
    __slots__ = ()

    @property
    def length(self: Any) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self: Any) -> str:
        return str(self.text[self._last_text_len :])

    @property
    def token_ids_diff(self: Any) -> list[int]:
        return list(self.token_ids[self._last_token_ids_len :])

    @property
    def logprobs_diff(self: Any) -> list[Any]:
        return list(self.logprobs[self._last_logprobs_len :])


CompletionOutput: Any = record(
    "CompletionOutput", (_Differences,), slots=True,
    _last_text_len=0, _last_token_ids_len=0, _last_logprobs_len=0, _incremental_states=None,
)  # fmt: skip


@dataclass
class Response:
    """What the executor says: new tokens of one sequence, and of beams all so far."""

    sequence: int = 0
    ids: list[int] | None = None
    logprobs: list[Any] | None = None
    finish: str | None = None
    stop_id: int | None = None
    context_logits: Any = None
    generation_logits: Any = None
    cumulative: float = 0.0
    last: bool = True  # of all sequences
    error: str | None = None
    fatal: BaseException | None = None


class GenerationResult:
    def __init__(self, *, engine: Any = None, params: Any = None, prompt: Any = None, **more: Any) -> None:
        if engine is None:
            raise RuntimeError(f"{type(self).__name__} is made by generate_async")
        self.request_id = 0
        self._engine, self.sampling_params, self._ids = engine, params, prompt
        self.prompt: str | None = more.get("text")
        self.aqueue: Any
        self.queue: Any
        self.tokenizer = more.get("tokenizer")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.aqueue, self.queue = None, queue.Queue[Response]()
        else:
            self.queue = self.aqueue = AsyncQueue()
        self._outputs = [CompletionOutput(index=index) for index in range(max(params.best_of, 1))]
        self._done = self._aborted = self._raised = False
        self._error: str | None = None
        self._items = 0
        self._context: Any = None
        self.mm_embedding_handle = self.disaggregated_params = self.trace_headers = None
        self.decoding_iter = self.cached_tokens = 0
        self.avg_decoded_tokens_per_iter = None
        self.metrics_dict: dict[str, Any] = {}

    # -- what is read

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._ids  # type: ignore[no-any-return]

    @property
    def context_logits(self) -> Any:
        return self._context

    @property
    def finished(self) -> bool:
        return self._done

    @property
    def outputs(self) -> list[Any]:
        params = self.sampling_params
        if params.use_beam_search or params.n == params.best_of:
            return self._outputs[: params.n]
        best = sorted(self._outputs, key=lambda one: -(one.cumulative_logprob or -numpy.inf))[: params.n]
        for index, output in enumerate(best):
            output.index = index
        return best

    def __getattr__(self, name: str) -> Any:
        if name == "error" and MANNERS.release >= (1, 3):
            return self._error
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- what is done with it

    def abort(self) -> None:
        assert self._engine is not None
        self._aborted = True
        self._engine.cancel(self.request_id)

    def aborted(self) -> bool:
        return self._aborted

    def clear_logprob_params(self) -> None:
        self.sampling_params.logprobs = self.sampling_params.prompt_logprobs = None

    def result(self, timeout: float | None = None) -> GenerationResult:
        for _ in self:
            pass
        return self

    async def aresult(self) -> GenerationResult:
        self._need_loop()
        async for _ in self:
            pass
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def __iter__(self) -> GenerationResult:
        return self

    def __next__(self) -> GenerationResult:
        if self._done:
            raise StopIteration
        self._may_go_on()
        self._take(self.queue.get())
        return self

    def __aiter__(self) -> GenerationResult:
        self._need_loop()
        return self

    async def __anext__(self) -> GenerationResult:
        if self._done:
            raise StopAsyncIteration
        self._need_loop()
        self._may_go_on()
        self._take(await self.aqueue.get())
        return self

    def _need_loop(self) -> None:
        assert self.aqueue is not None, (
            "The asyncio event loop was not present during initialization, so async operations are not available."
        )

    def _may_go_on(self) -> None:
        if self._raised:
            raise misuse("a result was iterated again after it had raised: the real one waits for ever")

    # -- what comes

    def _take(self, response: Response) -> None:
        try:
            self._handle(response)
        except Exception:
            self._raised = True
            raise

    def _handle(self, response: Response) -> None:
        if response.fatal is not None:
            raise response.fatal
        if response.error is not None:
            if MANNERS.release >= (1, 3):
                self._error, self._done = response.error, True
                return
            raise RequestError(response.error)
        self._items += 1
        self.decoding_iter += 1
        params, output = self.sampling_params, self._outputs[response.sequence]
        if response.context_logits is not None:
            self._context = Tensor(response.context_logits)
        output._last_token_ids_len, output._last_logprobs_len = len(output.token_ids), len(output.logprobs)
        beams = params.use_beam_search and params.best_of > 1
        new = list(response.ids or [])
        output.token_ids = new if beams else [*output.token_ids, *new]
        if response.logprobs is not None:
            output.logprobs = response.logprobs if beams else [*output.logprobs, *response.logprobs]
            self._compare(output, response)
        output.cumulative_logprob = response.cumulative
        if response.generation_logits is not None:
            output.generation_logits = Tensor(response.generation_logits)
        if response.finish is not None:
            self._finish(output, response)
        if params.detokenize and self.tokenizer is not None:
            for one in self._outputs if MANNERS.release < (1, 3) else [output]:  # all: which repeats the others' text
                self._detokenize(one, response)
        self._done = self._done or (response.last and all(one.finish_reason for one in self._outputs))
        self._engine.raise_background_error()

    def _compare(self, output: Any, response: Response) -> None:
        if MANNERS.release < (1, 2) and response.finish == "CANCELLED":
            return
        wrong = len(output.logprobs) != len(output.token_ids) or self._items == MANNERS.assert_logprobs
        assert not wrong, f"logprobs length: {len(output.logprobs)} != output.length: {len(output.token_ids)}"

    def _finish(self, output: Any, response: Response) -> None:
        assert response.finish is not None
        output.finish_reason = _FINISH[response.finish]
        if response.finish != "STOP_WORDS":
            return
        params = self.sampling_params
        for word in params._words("stop"):
            if output.token_ids[-len(word) :] == word:
                ids = params.stop_token_ids or []
                of_id = len(word) == 1 and word[0] in ids
                at = params._words("stop").index(word) - len(ids)
                strings = [params.stop] if isinstance(params.stop, str) else params.stop
                output.stop_reason = word[0] if of_id else strings[at]
                if not params.include_stop_str_in_output:
                    output.token_ids = output.token_ids[: -len(word)]  # and not its logprobs
                return

    def _detokenize(self, output: Any, response: Response) -> None:
        assert self.tokenizer is not None
        params = self.sampling_params
        output._last_text_len = len(output.text)
        if MANNERS.release >= (1, 3) or output.token_ids_diff:
            added = self.tokenizer.decode(output.token_ids_diff, skip_special_tokens=params.skip_special_tokens)
            output.text += added
        for stop in [params.stop] if isinstance(params.stop, str) else params.stop or []:
            at = output.text.find(stop)
            if at >= 0:
                output.text = output.text[: at + len(stop) * params.include_stop_str_in_output]
                output.finish_reason, output.stop_reason = "stop", stop
                self._done = True
                if MANNERS.release < (1, 2):
                    self.abort()
                elif response.finish is None:
                    self._engine.leaked += 1  # it goes on to the end, and nobody reads it
