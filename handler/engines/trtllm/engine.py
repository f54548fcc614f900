"""The engine for TensorRT-LLM's LLM API with the PyTorch backend, 1.0 or later (nvidia.github.io/TensorRT-LLM/llm-api).

The tests replace TensorRT-LLM with a double (`tests/doubles`). docs/trtllm.md lists the features that have not been
tested on a GPU.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import os
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from handler.config.environment import spread
from handler.core.media import MediaPrompt
from handler.core.values import NO_EXTRAS, Adapter, Extras, Finish
from handler.engines.base import (
    Alternatives,
    Capabilities,
    EngineConfig,
    EngineInfo,
    EngineRequest,
    Output,
    Silence,
    Step,
    describe,
    failed,
    first_stop,
    score,
    warm_up,
)
from handler.engines.huggingface import files
from handler.engines.huggingface.media import QwenTokens, collapse, pillow_image, prompt_text, read_tokens
from handler.engines.process.supervisor import end_with_descendants, end_with_this_process
from handler.engines.structured_output.xgrammar import for_xgrammar
from handler.engines.trtllm.arguments import (
    background_error,
    capabilities_of,
    check_prompt,
    check_rank,
    construct,
    environment,
    import_name,
    installed_release,
    installed_version,
    leave_mpi,
    llm_arguments,
    max_prompt,
    release_of,
    tensor_parallel_gpus,
    torch_sampler,
    vocabulary_size,
    warn_of_newer,
)
from handler.engines.trtllm.sampling import (
    ModelProperties,
    misses_stops,
    sampling_arguments,
    stops,
    structured_output_check,
    uses_xgrammar,
)

__all__ = ["TrtLlm", "capabilities", "check", "fetch", "load", "load_tokenizer", "prepare", "structured_output_check"]

_PATIENCE = 0.02  # seconds that a step waits for results, so that new commands are read soon


class TrtLlm:
    """An engine that submits requests to `LLM.generate_async`. See `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        leave_mpi(os.environ)
        os.environ.update(environment(config))
        end_with_this_process()
        import tensorrt_llm

        version = installed_version()
        warn_of_newer(version)
        arguments = llm_arguments(config, tensor_parallel_gpus(config), release_of(version))
        self._sampling_params = tensorrt_llm.SamplingParams
        refusal = import_name("RequestError", "tensorrt_llm.executor.utils", "tensorrt_llm.executor")
        classes = construct(arguments)
        self._lora = classes.get("lora_config")
        self._checked_adapters: set[int] = set()  # ids
        self._llm = tensorrt_llm.LLM(**classes)
        self._stop_watch = end_with_descendants("mpi4py")  # Open MPI 4 does not report the death of an MPI worker
        self._requests = _Requests(refusal)
        self._activity = _Activity(
            self._llm, self._requests, float(config.engine_options.get("inactivity_timeout", math.inf))
        )
        self._salted = "cache_salt" in inspect.signature(self._llm.generate_async).parameters
        self._max_prompt = max_prompt(arguments)
        self._vision = vision_prompts(config.model_path, self._llm.tokenizer, vocabulary_size(config.model_path))
        self._model = ModelProperties(
            vocabulary=vocabulary_size(config.model_path),
            eos=files.eos_ids(config),
            tokenizer_eos=files.tokenizer_eos_id(config.model_path),
            torch_sampler=torch_sampler(arguments),
        )
        self._uses_xgrammar = uses_xgrammar(config)
        self.info = EngineInfo(
            name="trtllm",
            version=version,
            device=f"{spread(str(arguments['tensor_parallel_size']), config.engine_options).least} GPU",
            dtype=config.options.dtype,
            max_total_tokens=arguments["max_seq_len"],
        )

    def add(self, request: EngineRequest) -> None:
        media = request.read_media()
        check_prompt(request.ids, self._max_prompt, self._model.vocabulary)
        inputs = list(request.ids) if self._vision is None else self._vision.inputs(request.ids, media)
        sampling = request.sampling
        if sampling.structured_output is not None and self._uses_xgrammar:
            sampling = sampling._replace(structured_output=for_xgrammar(sampling.structured_output))
        arguments = sampling_arguments(sampling, self._model)
        if (guide := arguments.pop("guided_decoding", None)) is not None:
            arguments["guided_decoding"] = import_name("GuidedDecodingParams", "tensorrt_llm.llmapi")(**guide)
        running = TrtRequest(
            request, stops(sampling, self._model) if misses_stops(sampling, self._model) else frozenset()
        )
        more: dict[str, Any] = {}
        if request.adapter is not None:
            more["lora_request"] = self._lora_request(request.adapter)
        if self._salted:
            # Tokens from the prefix cache have no logits, so a request that needs all logits gets a separate cache.
            separate_salt = f"{os.getpid()}.{request.key}"
            more["cache_salt"] = separate_salt if running.prompt_logits else cache_salt(media, sampling.cache_salt)
        self._activity.begin()
        self._requests.run(self._submit(running, inputs, arguments, more))

    def load_adapter(self, adapter: Adapter) -> None:
        """Check the rank of the adapter. TensorRT-LLM loads an adapter when a request first uses it."""
        if self._lora is not None:
            check_rank(Path(adapter.path), self._lora.max_lora_rank)
        self._checked_adapters.add(adapter.id)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Forget that the adapter was checked. TensorRT-LLM's cache evicts the least recently used adapters itself."""
        self._checked_adapters.discard(adapter.id)

    def _lora_request(self, adapter: Adapter) -> Any:
        if adapter.id not in self._checked_adapters:
            self.load_adapter(adapter)
        lora_request = import_name("LoRARequest", "tensorrt_llm.executor", "tensorrt_llm.llmapi")
        return lora_request(adapter.name, adapter.id, adapter.path)

    def cancel(self, key: int) -> None:
        self._requests.cancel(key)

    def step(self) -> Step:
        step = Step.of([])
        fresh = self._requests.take_fresh()
        for running in fresh:
            self._deliver(running, step)
        self._activity.check(heard=bool(fresh))
        return step

    def close(self) -> None:
        self._stop_watch()
        self._requests.end()
        self._llm.shutdown()
        self._requests.close()

    async def _submit(
        self, running: TrtRequest, inputs: Any, arguments: Mapping[str, Any], more: Mapping[str, Any]
    ) -> None:
        """Submit a request, or raise an exception if TensorRT-LLM refuses it."""
        try:
            result = running.result = self._llm.generate_async(
                inputs,
                # A new object for each request, because TensorRT-LLM changes it.
                sampling_params=self._sampling_params(**arguments),
                streaming=not running.whole,
                **more,
            )
        except Exception as error:  # it affects only this request, or means that the engine is broken
            # Code that processes an image here may raise any exception. An LLM that has ended raises RuntimeError.
            if self._requests.is_refusal(error) or (
                "multi_modal_data" in inputs and not isinstance(error, RuntimeError)
            ):
                raise
            return self._requests.fail(error)  # the next step raises the error
        self._requests.follow(running)
        if self._vision is not None and (wrong := self._vision.check(result.prompt_token_ids, running.request.ids)):
            result.abort()
            raise ValueError(wrong)
        self._requests.running[running.key] = running

    def _deliver(self, running: TrtRequest, step: Step) -> None:
        if running.single_token(step):  # nearly always
            return
        for output in running.outputs():
            step.others.append(output)
            if output.finish is not None:
                self._requests.running.pop(running.key, None)
        if running.stopped or (running.error and not running.ended):
            running.result.abort()


class _Requests:
    """Reads the results of all requests.

    `generate_async` needs an event loop in the calling thread. This loop runs only during calls of these methods. Each
    request has a task on the loop, which reads the results and wakes `take_fresh`.

    Args:
        refusal: TensorRT-LLM's exception for a refused request.

    Attributes:
        running: requests by key.
    """

    def __init__(self, refusal: type[Exception]) -> None:
        self.running: dict[int, TrtRequest] = {}
        self._fresh: dict[int, TrtRequest] = {}  # requests with unread results, in order of arrival
        self._broken: BaseException | None = None
        self._refusal = refusal
        self._loop = SteppedLoop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiter: asyncio.Future[None] | None = None

    def run(self, work: Coroutine[Any, Any, object]) -> None:
        self._loop.run_until_complete(work)

    def follow(self, running: TrtRequest) -> None:
        task = self._loop.create_task(self._follow(running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take_fresh(self) -> Collection[TrtRequest]:
        """Return the requests with unread results, after a short wait if necessary, or raise the engine's error."""
        if not self._fresh and self._broken is None:
            self._loop.run_until_complete(self._news())
        if not self._fresh and self._broken is not None:
            raise self._broken
        fresh, self._fresh = self._fresh, {}
        return fresh.values()

    def cancel(self, key: int) -> None:
        self._fresh.pop(key, None)
        running = self.running.pop(key, None)
        if running is not None and not running.ended and self._broken is None:
            running.result.abort()  # its last result arrives later, and is ignored

    def end(self) -> None:
        """Abort all requests."""
        for key in list(self.running):
            self.cancel(key)
        tasks = list(self._tasks)  # a copy, because tasks that end are removed from the set
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=1))

    def close(self) -> None:
        self._loop.run_until_complete(asyncio.sleep(0))  # run the coroutines of the last notifications
        self._loop.close()

    async def _follow(self, running: TrtRequest) -> None:
        """Read all of a request's results, even if the request is cancelled."""
        try:
            async for _ in running.result:
                if error := getattr(running.result, "error", None):  # since 1.3 some failures are not raised
                    running.error = str(error)
                    break
                self._notify(running)
        except Exception as error:  # it affects only this request, or means that the engine is broken
            # No more results must be read after an exception, because that would wait forever.
            if not self.is_refusal(error):
                return self.fail(error)
            running.error = describe(error)
            if not (isinstance(error, self._refusal) or running.result.aborted()):
                # The engine does not know that reading a result has failed. In 1.2, reading the last result of an
                # aborted request also fails (`_handle_sequence` in executor/result.py).
                running.result.abort()
        running.ended = True
        self._notify(running)

    async def _news(self) -> None:
        """Wait briefly for a result, then let the tasks read all results that have arrived."""
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(_PATIENCE, self._wake)
        await self._waiter
        self._waiter = None
        timer.cancel()
        for _ in range(2):  # let all tasks run, because one message from the engine may wake many
            await asyncio.sleep(0)

    def _notify(self, running: TrtRequest) -> None:
        if self.running.get(running.key) is running:
            self._fresh[running.key] = running
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Make `take_fresh` raise the error, because the engine is broken."""
        self._broken = self._broken or error
        self._wake()

    def is_refusal(self, error: Exception) -> bool:
        """Return whether an exception affects only its request. Any other exception means that the engine is broken.

        RequestError is a RuntimeError, but so are CppExecutorError, EngineDeadError and the error of an LLM that is
        shutting down.
        """
        return isinstance(error, (self._refusal, ValueError, TypeError, AssertionError, IndexError))


class _Activity:
    """Checks that results still arrive, because the executor can die without reporting an error.

    Args:
        timeout: number of seconds without progress after which the engine is considered dead.
    """

    def __init__(self, llm: Any, requests: _Requests, timeout: float) -> None:
        self._llm, self._requests, self._timeout = llm, requests, timeout
        self._silence = Silence()

    def begin(self) -> None:
        """Start waiting for the results of a new request."""
        if not self._expects_results():
            self._silence.begin()

    def check(self, *, heard: bool) -> None:
        """Check that the last progress is recent enough.

        Args:
            heard: whether this step has read results.

        Raises:
            TimeoutError: no request has made progress for `option.inactivity_timeout` seconds.
        """
        if heard or not self._expects_results():
            self._silence.begin()
        elif self._silence.look() > self._timeout:
            standstill = f"no request made progress for {self._timeout:g} s (option.inactivity_timeout)"
            if (cause := background_error(self._llm)) is not None:
                raise TimeoutError(f"{describe(cause)}; {standstill}") from cause
            raise TimeoutError(standstill)

    def _expects_results(self) -> bool:
        """Return whether a working engine would soon return a result.

        A non-streaming response may take any amount of time, and requests without output may be waiting for it.
        """
        running = self._requests.running.values()
        return bool(running) and (
            any(request.begun for request in running) or not any(request.whole for request in running)
        )


def check(model_id: str | None, config: EngineConfig) -> None:
    files.check_model(model_id, config, partial(llm_arguments, gpus=1, release=installed_release()))


fetch = files.fetch


def prepare(model_id: str | None, config: EngineConfig) -> Path:
    return files.prepare_checkpoint(model_id)


def capabilities(config: EngineConfig) -> Capabilities:
    release = installed_release()
    return capabilities_of(llm_arguments(config, 1, release), release)


def load(config: EngineConfig) -> TrtLlm:
    with ExitStack() as on_failure:
        engine = TrtLlm(config)
        on_failure.callback(engine.close)
        warm_up(engine, [min(files.eos_ids(config), default=0)])  # an id that is certainly in the vocabulary
        on_failure.pop_all()
    return engine


load_tokenizer = files.load_tokenizer


# -- read a request's result while it grows ----------------------------------------------------------------------------
# TensorRT-LLM returns one object per request, whose lists grow (`GenerationResult` in executor/result.py). We count the
# tokens that have been read to find the new ones, because its `*_diff` lists repeat and lose tokens under load. A
# message may contain several tokens.


class TrtRequest:
    """A request in the engine. `single_token` and `outputs` return only results since the last call to either method.

    Args:
        handler_stops: ids at which the handler ends the response, because the engine does not.
        result: the object that `generate_async` returned, set as soon as it is known.
    """

    def __init__(self, request: EngineRequest, handler_stops: Set[int] = frozenset(), result: Any = None) -> None:
        self.key = request.key
        self.request, self.sampling = request, request.sampling
        self.result = result  # keeps a reference, without which the result may be freed too early
        self.ended = False  # whether the last result has been read
        self.error = ""
        self.stopped = False  # whether one of `handler_stops` ended the response; the engine continues until `abort`
        self._handler_stops = handler_stops
        # Whether the output consists only of tokens, and the engine itself stops at all end tokens.
        self._plain = not (self.whole or handler_stops or self.sampling.top_logprobs or self.prompt_logits)
        self._sent = 0

    @property
    def whole(self) -> bool:
        """Whether the response must be non-streaming because only the last message contains the beams or all logits."""
        return self.sampling.num_beams > 1 or self.sampling.return_generation_logits

    @property
    def prompt_logits(self) -> bool:
        """Whether the logits of all prompt tokens are needed."""
        return self.sampling.prompt_logprobs or self.sampling.return_context_logits

    @property
    def begun(self) -> bool:
        """Whether any tokens of the response have been returned."""
        return self._sent > 0

    @property
    def _num_cached(self) -> int | None:
        """The number of prompt tokens from the prefix cache, or None if it is zero, unknown or reported before."""
        return None if self.request.goes_on else getattr(self.result, "cached_tokens", 0) or None

    def single_token(self, step: Step) -> bool:
        """Add a single new token to the columns of `step`, or return False if there is anything else to return."""
        if not self._plain or self.ended or self.error or (not self._sent and self._num_cached):
            return False
        try:
            output, sent = self.result.outputs[0], self._sent
            if output.finish_reason is not None or len(output.token_ids) != sent + 1:
                return False
            id, entries = output.token_ids[sent], output.logprobs
            logprob = _logprob(entries[sent], id) if entries else None
        except (AttributeError, IndexError, KeyError, TypeError):  # `outputs` reports the error
            return False
        step.add(self.key, id, logprob)
        self._sent = sent + 1
        return True

    def outputs(self) -> list[Output]:
        try:
            if self.error:
                raise ValueError(self.error)
            if self.sampling.num_beams > 1:
                return self._beams() if self.ended else []
            return self._single()
        except Exception as error:  # unexpected objects in the result must only fail this request
            self.error = self.error or describe(error)
            return [failed(self.key, self.error)]

    def _single(self) -> list[Output]:
        output = self.result.outputs[0]
        if output.finish_reason is None and (self.ended or self.whole):
            if self.ended:
                raise ValueError("the engine ended the request without a finish reason")
            return []
        pending = self.prompt_logits and not self._sent
        if pending and self.result.context_logits is None:
            if output.finish_reason is not None:
                raise ValueError("the engine returned no logits for the prompt")
            return []  # the logits arrive before the first output, or with it
        ids = self._ids(output)[self._sent :]
        finish = self._finish(output, ids)
        if (at := first_stop(ids, self._handler_stops, self._sent, self.sampling)) is not None:
            ids, self.stopped = ids[: at + 1], output.finish_reason is None
            finish = Finish.STOP if ids[-1] in self.sampling.stop_token_ids else Finish.EOS
        result = self._output(output, ids, finish, 0, self._sent, with_prompt=pending)
        self._sent += len(ids)
        return [result] if ids or finish is not None else []

    def _beams(self) -> list[Output]:
        """Return all beams, best first, in the engine's order."""
        beams = []
        for number, output in enumerate(self.result.outputs[: self.sampling.num_beams]):
            ids = self._ids(output)
            finish = self._finish(output, ids)
            if finish is None:
                raise ValueError("the engine ended a beam without a finish reason")
            beams.append(self._output(output, ids, finish, number, 0, with_prompt=self.prompt_logits and not number))
        if len(beams) != self.sampling.num_beams:
            raise ValueError(f"the engine returned only {len(beams)} of {self.sampling.num_beams} beams")
        return beams

    def _ids(self, output: Any) -> Sequence[int]:
        """Return all ids so far. If a stop id ended the response, include it, although some versions remove the id."""
        ids, reason = output.token_ids, output.stop_reason
        if output.finish_reason == "stop" and isinstance(reason, int) and ids[-1:] != [reason]:
            return [*ids, reason]
        return ids  # type: ignore[no-any-return]

    def _finish(self, output: Any, ids: Sequence[int]) -> Finish | None:
        match output.finish_reason:
            case None:
                return None
            case "length":
                return Finish.LENGTH
            case "stop":
                reason = output.stop_reason
                last = reason if isinstance(reason, int) else ids[-1] if ids else None
                return Finish.STOP if last in self.sampling.stop_token_ids or isinstance(reason, str) else Finish.EOS
        raise ValueError(f"the engine ended the request with the finish reason {output.finish_reason!r}")

    def _output(
        self, output: Any, ids: Sequence[int], finish: Finish | None, number: int, start: int, *, with_prompt: bool
    ) -> Output:
        entries = (output.logprobs or [])[start : start + len(ids)]  # may be longer than token_ids, or absent
        logprobs = [_logprob(entry, id) for entry, id in zip(entries, ids, strict=False)]
        logprobs += [None] * (len(ids) - len(logprobs))
        tops = [_top(entry, self.sampling.top_logprobs) for entry in entries] if self.sampling.top_logprobs else None
        if tops is not None:
            tops += [()] * (len(ids) - len(tops))
        context = self._context() if with_prompt else None
        extras = Extras(
            context.tolist() if context is not None and self.sampling.return_context_logits else None,
            _rows(output.generation_logits)[: len(ids)].tolist() if self.sampling.return_generation_logits else None,
            num_cached_tokens=None if self._sent or number else self._num_cached,
        )
        result = Output(
            self.key, ids, logprobs, finish, number, tops=tops, extras=None if extras == NO_EXTRAS else extras
        )
        return self._with_prompt_scores(result, context) if with_prompt and self.sampling.prompt_logprobs else result

    def _with_prompt_scores(self, output: Output, context: Any) -> Output:
        num_tops = self.sampling.prompt_top_logprobs
        scored, tops = score(context[:-1], self.request.ids[1:], num_tops)
        return output._replace(prompt_logprobs=[None, *scored], prompt_tops=[(), *tops] if num_tops else None)

    def _context(self) -> Any:
        rows, size = _rows(self.result.context_logits), len(self.request.ids)
        if len(rows) != size:
            raise ValueError(
                f"the engine returned logits for only {len(rows)} of the prompt's {size} tokens; "
                "set option.enable_prefix_caching=false and option.enable_chunked_prefill=false"
            )
        return rows


def _logprob(entry: Any, id: int) -> float | None:
    """Return a token's log-probability, or None if it is missing. Old samplers omit it for unlikely tokens."""
    value = entry.get(id) if isinstance(entry, Mapping) else entry
    return getattr(value, "logprob", value)


def _top(entry: Mapping[int, Any], count: int) -> Alternatives:
    """Return the `count` most likely ids, best first. `entry` may also contain the chosen id."""
    best_first = sorted(((id, value.logprob) for id, value in entry.items()), key=lambda pair: -pair[1])
    return tuple(best_first[:count])


def _rows(tensor: Any) -> Any:
    """Convert a tensor [..., rows, vocabulary] to a float32 numpy array [rows, vocabulary]."""
    if tensor is None:
        raise ValueError("the engine returned no logits")
    array = tensor.float().cpu().numpy()
    return array.reshape(-1, array.shape[-1])


# -- an event loop that runs only during calls by its owner; other threads may schedule callbacks at any time ----------


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop that other threads see as running until it is closed.

    A thread of TensorRT-LLM's proxy puts results into a request's queue, but wakes the reader only if
    `loop.is_running()`. A request would never end if its reader was not woken for the last result
    (`_SyncQueue.notify_many` in tensorrt_llm/llmapi/utils.py and `dispatch_result_task` in executor/proxy.py, 1.0 to
    1.4). Before October 2025, the resulting error even shuts down an LLM whose executor is in the same process.

    Callbacks from `call_soon_threadsafe` are queued until the loop runs again, so no notification is lost. With 256
    streams, a loop on a separate thread took 10 % more CPU time per token.
    """

    def __init__(self) -> None:
        self._owner = threading.get_ident()  # set first, because asyncio's constructor calls `is_running`
        super().__init__()

    def is_running(self) -> bool:
        """Return the real state on the owner's thread, where asyncio checks it before it runs or closes the loop."""
        if threading.get_ident() == self._owner:
            return super().is_running()
        return not self.is_closed()


# -- prompts of vision models, which are passed as text, because TensorRT-LLM computes the ids itself ------------------
# What we know of 1.0 to 1.3 (llmapi/llm.py, inputs/registry.py, _torch/models/modeling_qwen2vl.py):
#
# * Ids with images are decoded and encoded again. Before 1.3, this fails without `mm_processor_kwargs`.
# * Before 1.3, prompts of ids do not get Qwen2-VL's positions, and a step with such prompts and images fails.
# * The hash of an image in the KV cache does not depend on its width. If hashing fails once, it is turned off for good.


def cache_salt(media: MediaPrompt | None, salt: str) -> str | None:
    """Return the name of the prefix cache for prompts with these media and this salt, or None if both are missing."""
    parts = [salt, *(medium.digest for medium in (media.media if media else ()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() if any(parts) else None


class QwenVisionPrompts:
    """Converts prompts to the inputs of `generate_async`, and checks the ids that TensorRT-LLM computes.

    Args:
        tokenizer: the LLM's tokenizer.
        tokens: the model's image tokens.
        vocabulary: number of ids in the vocabulary.
    """

    def __init__(self, tokenizer: Any, tokens: QwenTokens, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._vocabulary = vocabulary

    def inputs(self, ids: Sequence[int], media: MediaPrompt | None) -> dict[str, Any]:
        """Return the prompt's text, and its images as Pillow images.

        Raises:
            ValueError: there is no text that encodes to these ids, or the numbers of placeholders and images differ.
        """
        text, images = ("", ()) if media is None else media
        short = collapse(ids, images, {"image": self._tokens})
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        decode = partial(self._tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        inputs: dict[str, Any] = {"prompt": prompt_text(short, text, encode, decode)}
        if images:
            inputs["multi_modal_data"] = {"image": [pillow_image(image) for image in images]}
        return inputs

    def check(self, computed: Sequence[int], ids: Sequence[int]) -> str:
        """Compare the ids that TensorRT-LLM has computed with the expected ids, and return an error message or "".

        Before 1.3, the ids of images are outside the vocabulary.

        Args:
            computed: the ids that TensorRT-LLM has computed.
            ids: the expected ids.
        """
        placeholder = self._tokens.placeholder
        if len(computed) != len(ids):
            return f"TensorRT-LLM computes {len(computed)} tokens for a prompt of {len(ids)} tokens, which is a bug"
        for at, (other, id) in enumerate(zip(computed, ids, strict=True)):
            if other != id and not (id == placeholder and other >= self._vocabulary):
                return f"TensorRT-LLM computes the id {other} instead of {id} at position {at}, which is a bug"
        return ""


def vision_prompts(model: Path, tokenizer: Any, vocabulary: int) -> QwenVisionPrompts | None:
    """Return the prompt converter for a model that accepts images, or None if prompts are passed as ids."""
    tokens = read_tokens(model, "image")
    return QwenVisionPrompts(tokenizer, tokens, vocabulary) if isinstance(tokens, QwenTokens) else None
