"""TensorRT-LLM by its LLM API: the PyTorch backend of 1.0 and later (nvidia.github.io/TensorRT-LLM/llm-api).

Tested on a double (`tests/doubles`); docs/trtllm.md lists the parts that have not run on a GPU.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from handler.config.gpus import spread
from handler.core.values import Adapter
from handler.engines.base import Capabilities, EngineConfig, EngineInfo, EngineRequest, Step, describe, warm_up
from handler.engines.huggingface import checkpoint, hub
from handler.engines.process.process_group import end_with_descendants, end_with_this_process
from handler.engines.silence import Silence
from handler.engines.trtllm import support
from handler.engines.trtllm.arguments import construct, import_name, llm_arguments
from handler.engines.trtllm.media import cache_salt, vision_prompts
from handler.engines.trtllm.results import RequestOptions, RunningRequest, request_options
from handler.engines.trtllm.sampling import Model, sampling_arguments
from handler.engines.trtllm.setup import check_rank, environment, leave_mpi, max_prompt, visible_gpus, vocabulary_size
from handler.engines.trtllm.stepped_loop import SteppedLoop
from handler.engines.trtllm.structured_output import structured_output_check as structured_output_check

_PATIENCE = 0.02  # seconds that a step waits for results, before new commands are read


class TrtLlm:
    """See `engines.base.Engine`.

    `generate_async` needs an event loop in the calling thread: our own, which runs inside `add` and `step`
    (`stepped_loop.py`). Each request has a task there that takes its results and wakes `step`.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.model is not None
        leave_mpi(os.environ)
        os.environ.update(environment(config))
        end_with_this_process()
        import tensorrt_llm

        version = support.installed_version()
        support.warn_of_newer(version)
        arguments = llm_arguments(config, visible_gpus(config), support.release_of(version))
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._running: dict[int, RunningRequest] = {}
        self._fresh: dict[int, RunningRequest] = {}  # requests with new results, in order of arrival
        self._broken: BaseException | None = None
        self._silence = Silence()
        self._inactivity = float(config.options.engine_options.get("inactivity_timeout", math.inf))
        self._sampling_params = tensorrt_llm.SamplingParams
        self._refusal = import_name("RequestError", "tensorrt_llm.executor.utils", "tensorrt_llm.executor")
        classes = construct(arguments)
        self._lora = classes.get("lora_config")
        self._checked: set[int] = set()  # ids of adapters
        self._llm = tensorrt_llm.LLM(**classes)
        self._stop_watch = end_with_descendants("mpi4py")  # Open MPI 4 does not report an MPI worker's death
        self._loop = SteppedLoop()
        self._salted = "cache_salt" in inspect.signature(self._llm.generate_async).parameters
        self._max_prompt = max_prompt(arguments)
        self._vision = vision_prompts(config.model, self._llm.tokenizer, vocabulary_size(config.model))
        self._model = Model(
            vocabulary=vocabulary_size(config.model),
            eos=checkpoint.eos_ids(config),
            tokenizer_eos=checkpoint.tokenizer_eos_id(config.model),
            torch_sampler=support.torch_sampler(arguments),
            max_beam_width=arguments.get("max_beam_width") or 1,
        )
        self.info = EngineInfo(
            name="trtllm",
            version=version,
            device=f"{spread(str(arguments['tensor_parallel_size']), config.options.engine_options).least} GPU",
            dtype=config.options.dtype,
            max_total_tokens=arguments["max_seq_len"],
        )

    @property
    def first_id(self) -> int:
        """An id in the model's vocabulary."""
        return min(self._model.eos, default=0)

    def add(self, request: EngineRequest) -> None:
        ids, sampling, adapter, media = request.ids, request.sampling, request.adapter, request.read_media()
        support.check_prompt(ids, self._max_prompt, self._model.vocabulary)
        inputs = list(ids) if self._vision is None else self._vision.inputs(ids, media)
        arguments = sampling_arguments(sampling, self._model)
        if (guide := arguments.pop("guided_decoding", None)) is not None:
            arguments["guided_decoding"] = import_name("GuidedDecodingParams", "tensorrt_llm.llmapi")(**guide)
        options = request_options(request, self._model)
        more: dict[str, Any] = {}
        if adapter is not None:
            if adapter.id not in self._checked:
                self.load_adapter(adapter)
            lora_request = import_name("LoRARequest", "tensorrt_llm.executor", "tensorrt_llm.llmapi")
            more["lora_request"] = lora_request(adapter.name, adapter.id, adapter.path)
        if self._salted:
            # Tokens from the prefix cache have no logits: give such a request a cache of its own.
            more["cache_salt"] = f"{os.getpid()}.{request.key}" if options.prompt_logits else cache_salt(media)
        if not self._expects_results():
            self._silence.begin()
        self._loop.run_until_complete(self._submit(request.key, inputs, arguments, options, more))

    def load_adapter(self, adapter: Adapter) -> None:
        """Check the adapter: TensorRT-LLM loads it only with the first request that names it."""
        if self._lora is not None:
            check_rank(Path(adapter.path), self._lora.max_lora_rank)
        self._checked.add(adapter.id)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Forget the check; TensorRT-LLM's cache evicts the least recently used adapters by itself."""
        self._checked.discard(adapter.id)

    def cancel(self, key: int) -> None:
        self._fresh.pop(key, None)
        running = self._running.pop(key, None)
        if running is not None and not running.ended and self._broken is None:
            running.result.abort()  # its end comes later, and its task ignores it

    def step(self) -> Step:
        if not self._fresh and self._broken is None:
            self._loop.run_until_complete(self._news())
        if not self._fresh and self._broken is not None:
            raise self._broken
        step = Step([], [], [], [])
        fresh, self._fresh = self._fresh, {}
        for running in fresh.values():
            self._deliver(running, step)
        self._check_activity(heard=bool(fresh))
        return step

    def close(self) -> None:
        self._stop_watch()
        for running in self._running.values():
            if not running.ended and self._broken is None:
                running.result.abort()
        self._running.clear()
        tasks = list(self._tasks)  # the set empties itself as they end
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=1))
        self._llm.shutdown()
        self._loop.run_until_complete(asyncio.sleep(0))  # the last notices: a coroutine each, which must not be left
        self._loop.close()

    # -- on the event loop ---------------------------------------------------------------------------------------

    async def _submit(
        self, key: int, inputs: Any, arguments: Mapping[str, Any], options: RequestOptions, more: Mapping[str, Any]
    ) -> None:
        """Submit a request; an exception means that it is refused."""
        try:
            result = self._llm.generate_async(
                inputs,
                # A new one for each request: TensorRT-LLM writes into it, and reads that again.
                sampling_params=self._sampling_params(**arguments),
                streaming=not options.whole,
                **more,
            )
        except Exception as error:  # foreign code: it concerns this request, or breaks the engine
            # An image is processed here, by code that raises anything; an LLM that has ended raises RuntimeError.
            if self._is_refusal(error) or ("multi_modal_data" in inputs and not isinstance(error, RuntimeError)):
                raise
            return self._break(error)  # the next step raises it
        running = RunningRequest(key, result, options)
        task = self._loop.create_task(self._follow(running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._vision is not None and (wrong := self._vision.check(result.prompt_token_ids, options.prompt)):
            result.abort()
            raise ValueError(wrong)
        self._running[key] = running

    async def _follow(self, running: RunningRequest) -> None:
        """Take a request's results to the end, also after its cancellation."""
        try:
            async for _ in running.result:
                if error := getattr(running.result, "error", None):  # since 1.3 some failures are not raised
                    running.error = str(error)
                    break
                self._notify(running)
        except Exception as error:  # foreign code: it concerns this request, or breaks the engine
            # The result must not be read after an exception: it would wait for ever.
            if not self._is_refusal(error):
                return self._break(error)
            running.error = describe(error)
            if not (isinstance(error, self._refusal) or running.result.aborted()):
                # Reading a result has failed, which the engine does not know. In 1.2 reading the last one of an aborted
                # request fails too (`_handle_sequence` in executor/result.py).
                running.result.abort()
        running.ended = True
        self._notify(running)

    async def _news(self) -> None:
        """Wait shortly for a result, then let the tasks take all that have come."""
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(_PATIENCE, self._wake)
        await self._waiter
        self._waiter = None
        timer.cancel()
        for _ in range(2):  # one message of the engine wakes many tasks: let them all run
            await asyncio.sleep(0)

    def _notify(self, running: RunningRequest) -> None:
        if self._running.get(running.key) is running:
            self._fresh[running.key] = running
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _break(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._wake()

    def _is_refusal(self, error: Exception) -> bool:
        """Whether an exception concerns its request only; any other one breaks the engine.

        RequestError is a RuntimeError, as are "LLM is shutting down", CppExecutorError and EngineDeadError.
        """
        return isinstance(error, (self._refusal, ValueError, TypeError, AssertionError, IndexError))

    # -- inactivity ----------------------------------------------------------------------------------------------

    def _check_activity(self, *, heard: bool) -> None:
        """Check that results still come: the executor can die without an error anywhere.

        Raises:
            TimeoutError: no request advanced for option.inactivity_timeout.
        """
        if heard or not self._expects_results():
            self._silence.begin()
        elif self._silence.look() > self._inactivity:
            standstill = f"no request got anywhere for {self._inactivity:g} s (option.inactivity_timeout)"
            if (cause := support.background_error(self._llm)) is not None:
                raise TimeoutError(f"{describe(cause)}; {standstill}") from cause
            raise TimeoutError(standstill)

    def _expects_results(self) -> bool:
        """Whether a working engine would soon return a result.

        An answer that comes whole may take any time, and requests that have not begun may wait for it.
        """
        running = self._running.values()
        return bool(running) and (
            any(request.begun for request in running) or not any(request.options.whole for request in running)
        )

    # -- one request ---------------------------------------------------------------------------------------------

    def _deliver(self, running: RunningRequest, step: Step) -> None:
        if running.one_token(step):  # nearly always
            return
        for output in running.outputs():
            step.others.append(output)
            if output.finish is not None:
                self._running.pop(running.key, None)
        if running.stopped or (running.error and not running.ended):
            running.result.abort()


def check(model_id: str | None, config: EngineConfig) -> None:
    checkpoint.check_model(model_id, config, partial(llm_arguments, gpus=1, release=support.installed_release()))


fetch = hub.fetch


def prepare(model_id: str | None, config: EngineConfig) -> Path:
    return checkpoint.prepare_checkpoint(model_id)


def capabilities(config: EngineConfig) -> Capabilities:
    release = support.installed_release()
    return support.capabilities_of(llm_arguments(config, 1, release), release)


def load(config: EngineConfig) -> TrtLlm:
    with ExitStack() as on_failure:
        engine = TrtLlm(config)
        on_failure.callback(engine.close)
        warm_up(engine, engine.first_id)
        on_failure.pop_all()
    return engine


load_tokenizer = checkpoint.load_tokenizer
