"""TensorRT-LLM through its LLM API, the PyTorch backend of 1.0 and later (contract trtllm.md; docs/trtllm.md).

Written to the contract and tried on a double: docs/trtllm.md says what no GPU has seen yet.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from handler.core.values import Adapter, Sampling
from handler.engines.base import Capabilities, EngineConfig, EngineInfo, Step, warm_up
from handler.engines.huggingface import checkpoint
from handler.engines.huggingface.tokenizer import HfTokenizer
from handler.engines.process.process_group import end_with_descendants, end_with_this_process
from handler.engines.trtllm.arguments import constructed, llm_arguments, named
from handler.engines.trtllm.results import Asked, Running
from handler.engines.trtllm.sampling import Model, own_stops, sampling_arguments, stops
from handler.engines.trtllm.setup import check_rank, environment, leave_mpi, max_prompt, visible_gpus, vocabulary_size
from handler.engines.trtllm.stepped_loop import SteppedLoop
from handler.engines.trtllm.structured_output import structured_output_check as structured_output_check
from handler.engines.trtllm.support import capabilities_of, installed_version, release_of, torch_sampler

_PATIENCE = 0.02  # seconds that a step waits for news, before it lets new commands be taken


class TrtLlm:
    """See `engines.base.Engine`.

    `generate_async` wants an event loop that runs in the calling thread: one of our own, run inside `add` and `step`
    (`stepped_loop.py`). Each request has a task there that takes its items and wakes `step`.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.model is not None
        leave_mpi(os.environ)
        os.environ.update(environment(config))
        end_with_this_process()
        import tensorrt_llm

        version = installed_version()
        arguments = llm_arguments(config, visible_gpus(config), release_of(version))
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._running: dict[int, Running] = {}
        self._fresh: dict[int, Running] = {}  # those with news, in the order in which these came
        self._broken: BaseException | None = None
        self._moved = time.monotonic()
        self._inactivity = float(config.options.get("inactivity_timeout", math.inf))
        self._sampling_params = tensorrt_llm.SamplingParams
        self._refusal = named("RequestError", "tensorrt_llm.executor.utils", "tensorrt_llm.executor")
        built = constructed(arguments)
        self._lora = built.get("lora_config")
        self._checked: set[int] = set()  # ids of adapters
        self._llm = tensorrt_llm.LLM(**built)
        self._leave = end_with_descendants("mpi4py")  # Open MPI 4 tells nobody of an MPI worker's death
        self._loop = SteppedLoop()
        self._salted = "cache_salt" in inspect.signature(self._llm.generate_async).parameters
        self._max_prompt = max_prompt(arguments)
        self._model = Model(
            vocabulary=vocabulary_size(config.model),
            eos=checkpoint.eos_ids(config.model),
            tokenizer_eos=checkpoint.tokenizer_eos_id(config.model),
            torch_sampler=torch_sampler(arguments),
            max_beam_width=arguments.get("max_beam_width") or 1,
        )
        self.info = EngineInfo(
            name="trtllm",
            version=version,
            device=f"{arguments['tensor_parallel_size'] * arguments['pipeline_parallel_size']} GPU",
            dtype=config.dtype,
            max_total_tokens=arguments["max_seq_len"],
        )

    @property
    def first_id(self) -> int:
        """A token that the model has."""
        return min(self._model.eos, default=0)

    def add(self, key: int, ids: Sequence[int], sampling: Sampling, adapter: Adapter | None = None) -> None:
        self._check_prompt(ids)
        arguments = sampling_arguments(sampling, self._model)
        if (guide := arguments.pop("guided_decoding", None)) is not None:
            arguments["guided_decoding"] = named("GuidedDecodingParams", "tensorrt_llm.llmapi")(**guide)
        asked = self._asked(ids, sampling)
        more: dict[str, Any] = {}
        if adapter is not None:
            if adapter.id not in self._checked:
                self.load_adapter(adapter)
            request = named("LoRARequest", "tensorrt_llm.executor", "tensorrt_llm.llmapi")
            more["lora_request"] = request(adapter.name, adapter.id, adapter.path)
        if self._salted and (asked.prompt_logprobs or asked.context_logits):
            # Of tokens that are taken from the prefix cache there are no logits: let it share nothing with others.
            more["cache_salt"] = f"{os.getpid()}.{key}"
        if not self._expects():
            self._moved = time.monotonic()
        self._loop.run_until_complete(self._submit(key, list(ids), arguments, asked, more))

    def load_adapter(self, adapter: Adapter) -> None:
        """TensorRT-LLM loads adapters with the first request that names one: what is wrong shall show before."""
        if self._lora is not None:
            check_rank(Path(adapter.path), self._lora.max_lora_rank)
        self._checked.add(adapter.id)

    def drop_adapter(self, adapter: Adapter) -> None:
        """There is no call for it: its cache drops those that were not used for the longest."""
        self._checked.discard(adapter.id)

    def cancel(self, key: int) -> None:
        self._fresh.pop(key, None)
        running = self._running.pop(key, None)
        if running is not None and not running.ended and self._broken is None:
            running.result.abort()  # its end comes later, to its task, where nobody listens

    def step(self) -> Step:
        if not self._fresh and self._broken is None:
            self._loop.run_until_complete(self._news())
        if not self._fresh and self._broken is not None:
            raise self._broken
        step = Step([], [], [], [])
        fresh, self._fresh = self._fresh, {}
        for running in fresh.values():
            self._deliver(running, step)
        self._check_silence(heard=bool(fresh))
        return step

    def close(self) -> None:
        self._leave()
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
        self, key: int, ids: list[int], arguments: Mapping[str, Any], asked: Asked, more: Mapping[str, Any]
    ) -> None:
        """
        Raises:
            Exception: this request is refused.
        """
        try:
            result = self._llm.generate_async(
                ids,
                # TensorRT-LLM writes into it, and reads what it wrote where it finds it again: a new one each time.
                sampling_params=self._sampling_params(**arguments),
                streaming=not asked.whole,
                **more,
            )
        except Exception as error:
            if not self._of_one_request(error):
                self._break(error)  # the next step says so: a refusal here would end this request alone
                return
            raise
        running = self._running[key] = Running(key, result, asked)
        task = self._loop.create_task(self._follow(running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, running: Running) -> None:
        """Take a request's items to the end, also after it was cancelled, when they go nowhere."""
        try:
            async for _ in running.result:
                if error := getattr(running.result, "error", None):  # since 1.3 not every failure is raised
                    running.error = str(error)
                    break
                self._arrived(running)
        except Exception as error:
            # After an exception the result must not be touched: the next item would be waited for for ever.
            if not self._of_one_request(error):
                self._break(error)
                return
            running.error = f"{type(error).__name__}: {error}"
            if not (isinstance(error, self._refusal) or running.result.aborted()):
                # It failed in reading what came, which the engine does not know. So does the last item of an aborted
                # request in 1.2, which counts the log-probabilities there too (`_handle_sequence` in result.py).
                running.result.abort()
        running.ended = True
        self._arrived(running)

    async def _news(self) -> None:
        """Wait a little for something, then take all that has come with it."""
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(_PATIENCE, self._wake)
        await self._waiter
        self._waiter = None
        timer.cancel()
        for _ in range(2):  # one message of the engine's wakes many tasks: let them all run
            await asyncio.sleep(0)

    def _arrived(self, running: Running) -> None:
        if self._running.get(running.key) is running:
            self._fresh[running.key] = running
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _break(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._wake()

    def _of_one_request(self, error: Exception) -> bool:
        """Whether an exception concerns its request alone; others are the engine's end.

        RequestError is a RuntimeError too, as are "LLM is shutting down", CppExecutorError and EngineDeadError.
        """
        return isinstance(error, (self._refusal, ValueError, TypeError, AssertionError, IndexError))

    # -- silence -------------------------------------------------------------------------------------------------

    def _check_silence(self, *, heard: bool) -> None:
        """
        Raises:
            TimeoutError: its executor can die without a word, and nothing else would ever tell (contract, section 2.3).
        """
        if heard or not self._expects():
            self._moved = time.monotonic()
        elif (silent := time.monotonic() - self._moved) > self._inactivity:
            raise TimeoutError(f"no request got anywhere for {silent:.1f} s (option.inactivity_timeout)")

    def _expects(self) -> bool:
        """Whether a living engine would say something soon.

        Not so of answers that come whole: they may take any time, and what has not begun may wait for their places.
        """
        running = self._running.values()
        return bool(running) and (any(one.begun for one in running) or not any(one.asked.whole for one in running))

    # -- one request ---------------------------------------------------------------------------------------------

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            raise ValueError("the prompt is empty")
        if len(ids) > self._max_prompt:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, more than the {self._max_prompt} that TensorRT-LLM was started for "
                "(option.max_input_len; option.max_num_batched_tokens without option.enable_chunked_prefill=true)"
            )
        if not all(0 <= id < self._model.vocabulary for id in ids):
            raise ValueError(f"the prompt's token ids must be below {self._model.vocabulary}")

    def _asked(self, ids: Sequence[int], sampling: Sampling) -> Asked:
        ours = own_stops(sampling, self._model)
        return Asked(
            prompt=ids,
            width=sampling.num_beams,
            stops=frozenset(sampling.stop_token_ids),
            own_stops=stops(sampling, self._model) if ours else frozenset(),
            least=sampling.min_new_tokens,
            tops=sampling.top_logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            prompt_tops=sampling.prompt_top_logprobs,
            context_logits=sampling.return_context_logits,
            generation_logits=sampling.return_generation_logits,
        )

    def _deliver(self, running: Running, step: Step) -> None:
        if running.one_token(step):  # nearly always
            return
        for output in running.outputs():
            step.others.append(output)
            if output.finish is not None:
                self._running.pop(running.key, None)
        if running.stopped or (running.error and not running.ended):
            running.result.abort()


def prepare(model_id: str | None, dtype: str, options: Mapping[str, Any]) -> Path:
    return checkpoint.prepared(model_id, options)


def capabilities(config: EngineConfig) -> Capabilities:
    release = release_of(installed_version())
    return capabilities_of(llm_arguments(config, 1, release), release)


def load(config: EngineConfig) -> TrtLlm:
    engine = TrtLlm(config)
    try:
        warm_up(engine, engine.first_id)
    except BaseException:
        engine.close()
        raise
    return engine


def load_tokenizer(config: EngineConfig) -> HfTokenizer:
    return checkpoint.load_tokenizer(config)
