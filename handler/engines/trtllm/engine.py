"""TensorRT-LLM by its LLM API: the PyTorch backend of 1.0 and later (nvidia.github.io/TensorRT-LLM/llm-api).

Tested on a double (`tests/doubles`); docs/trtllm.md lists the parts that have not run on a GPU.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
    score,
    warm_up,
)
from handler.engines.huggingface import files
from handler.engines.huggingface.media import QwenTokens, collapse, pillow_image, prompt_text, read_image_tokens
from handler.engines.process.supervisor import end_with_descendants, end_with_this_process
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
from handler.engines.trtllm.sampling import Model, own_stops, sampling_arguments, stops, structured_output_check

__all__ = ["TrtLlm", "capabilities", "check", "fetch", "load", "load_tokenizer", "prepare", "structured_output_check"]

_PATIENCE = 0.02  # seconds that a step waits for results, before new commands are read


class TrtLlm:
    """See `engines.base.Engine`.

    `generate_async` needs an event loop in the calling thread: our own, which runs inside `add` and `step`
    (`engine.py`). Each request has a task there that takes its results and wakes `step`.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.model is not None
        leave_mpi(os.environ)
        os.environ.update(environment(config))
        end_with_this_process()
        import tensorrt_llm

        version = installed_version()
        warn_of_newer(version)
        arguments = llm_arguments(config, tensor_parallel_gpus(config), release_of(version))
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
            eos=files.eos_ids(config),
            tokenizer_eos=files.tokenizer_eos_id(config.model),
            torch_sampler=torch_sampler(arguments),
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
        check_prompt(ids, self._max_prompt, self._model.vocabulary)
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
        """Return whether an exception concerns its request only; any other one breaks the engine.

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
            standstill = f"no request made progress for {self._inactivity:g} s (option.inactivity_timeout)"
            if (cause := background_error(self._llm)) is not None:
                raise TimeoutError(f"{describe(cause)}; {standstill}") from cause
            raise TimeoutError(standstill)

    def _expects_results(self) -> bool:
        """Return whether a working engine would soon return a result.

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
        warm_up(engine, [engine.first_id])
        on_failure.pop_all()
    return engine


load_tokenizer = files.load_tokenizer


# -- read one request's result while it grows --------------------------------------------------------------------------
# TensorRT-LLM returns one object whose lists grow (`GenerationResult` in executor/result.py), so the new tokens follow
# from our own count. Its `*_diff` lists repeat and lose tokens under load. Each message may have several tokens.


@dataclass(frozen=True)
class RequestOptions:
    """The parts of an answer that a request needs, and the ids that end it."""

    prompt: Sequence[int]
    width: int = 1  # sequences: beams
    stops: frozenset[int] = frozenset()  # ids that end it as STOP
    own_stops: frozenset[int] = frozenset()  # ids that the engine does not stop at
    least: int = 0  # tokens before which none of `own_stops` counts
    tops: int = 0
    prompt_logprobs: bool = False
    prompt_tops: int = 0
    context_logits: bool = False
    generation_logits: bool = False
    goes_on: bool = False  # the prompt ends with a part of the answer

    @property
    def whole(self) -> bool:
        """Return whether the answer comes at once: beams exist only at the end, and the last message has all logits."""
        return self.width > 1 or self.generation_logits

    @property
    def prompt_logits(self) -> bool:
        """Return whether the logits of all the prompt's tokens are needed."""
        return self.prompt_logprobs or self.context_logits

    @property
    def plain(self) -> bool:
        """Return whether the output has only tokens, and the engine alone decides where it ends."""
        return not (self.whole or self.own_stops or self.tops or self.prompt_logits)


def request_options(request: EngineRequest, model: Model) -> RequestOptions:
    sampling = request.sampling
    return RequestOptions(
        prompt=request.ids,
        width=sampling.num_beams,
        stops=frozenset(sampling.stop_token_ids),
        own_stops=stops(sampling, model) if own_stops(sampling, model) else frozenset(),
        least=sampling.min_new_tokens,
        tops=sampling.top_logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        prompt_tops=sampling.prompt_top_logprobs,
        context_logits=sampling.return_context_logits,
        generation_logits=sampling.return_generation_logits,
        goes_on=request.goes_on,
    )


class RunningRequest:
    """A request in the engine; `one_token` and `outputs` return what is new since the last call of either."""

    def __init__(self, key: int, result: Any, options: RequestOptions) -> None:
        self.key = key
        self.result = result  # without a reference it may be freed before its end
        self.ended = False  # no result will come any more
        self.error = ""
        self.stopped = False  # by one of `own_stops`; the engine goes on until `abort`
        self.options = options
        self._plain = options.plain
        self._sent = 0
        self._prompt_pending = options.prompt_logits

    @property
    def begun(self) -> bool:
        """Return whether tokens have come."""
        return self._sent > 0

    @property
    def _num_cached(self) -> int | None:
        """Return the number of the prompt's tokens that were in the prefix cache; None: unknown."""
        return None if self.options.goes_on else getattr(self.result, "cached_tokens", 0) or None

    def one_token(self, step: Step) -> bool:
        """Add the new token to the columns of `step`; False if there is more to return, or less."""
        if not self._plain or self.ended or self.error or (not self._sent and self._num_cached):
            return False
        try:
            output, sent = self.result.outputs[0], self._sent
            if output.finish_reason is not None or len(output.token_ids) != sent + 1:
                return False
            id, entries = output.token_ids[sent], output.logprobs
            logprob = _logprob(entries[sent], id) if entries else None
        except (AttributeError, IndexError, KeyError, TypeError):  # `outputs` reports it
            return False
        step.keys.append(self.key)
        step.ids.append(id)
        step.logprobs.append(logprob)
        self._sent = sent + 1
        return True

    def outputs(self) -> list[Output]:
        try:
            if self.error:
                raise ValueError(self.error)
            if self.options.width > 1:
                return self._beams() if self.ended else []
            return self._single()
        except Exception as error:  # foreign objects: this request fails, its neighbours go on
            self.error = self.error or describe(error)
            return [failed(self.key, self.error)]

    def _single(self) -> list[Output]:
        output = self.result.outputs[0]
        if output.finish_reason is None and (self.ended or self.options.whole):
            if self.ended:
                raise ValueError("the engine ended the request without a reason")
            return []
        pending = self._prompt_pending
        if pending and self.result.context_logits is None:
            if output.finish_reason is not None:
                raise ValueError("the engine gave no logits of the prompt")
            return []  # they come before the first output, or with it
        self._prompt_pending = False
        ids = self._ids(output)[self._sent :]
        finish = self._finish(output, ids)
        if (at := self._own_stop(ids)) is not None:
            ids, self.stopped = ids[: at + 1], output.finish_reason is None
            finish = Finish.STOP if ids[-1] in self.options.stops else Finish.EOS
        result = self._output(output, ids, finish, 0, self._sent, with_prompt=pending)
        self._sent += len(ids)
        return [result] if ids or finish is not None else []

    def _beams(self) -> list[Output]:
        """Return all beams, in the engine's order: the best first."""
        beams = []
        for number, output in enumerate(self.result.outputs[: self.options.width]):
            ids = self._ids(output)
            finish = self._finish(output, ids)
            if finish is None:
                raise ValueError("the engine ended a beam without a reason")
            beams.append(self._output(output, ids, finish, number, 0, with_prompt=self._prompt_pending and not number))
        if len(beams) != self.options.width:
            raise ValueError(f"the engine gave {len(beams)} of {self.options.width} beams")
        return beams

    def _ids(self, output: Any) -> Sequence[int]:
        """Return all ids so far, with a stop id that ended the answer, which some versions cut off."""
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
                return Finish.STOP if last in self.options.stops or isinstance(reason, str) else Finish.EOS
        raise ValueError(f"the engine ended the request: {output.finish_reason}")  # cancelled, timeout, not_finished

    def _own_stop(self, ids: Sequence[int]) -> int | None:
        for at, id in enumerate(ids):
            if id in self.options.own_stops and self._sent + at >= self.options.least:
                return at
        return None

    def _output(
        self, output: Any, ids: Sequence[int], finish: Finish | None, number: int, start: int, *, with_prompt: bool
    ) -> Output:
        entries = (output.logprobs or [])[start : start + len(ids)]  # may be longer than token_ids, or absent
        logprobs = [_logprob(entry, id) for entry, id in zip(entries, ids, strict=False)]
        logprobs += [None] * (len(ids) - len(logprobs))
        tops = [_top(entry, self.options.tops) for entry in entries] if self.options.tops else None
        if tops is not None:
            tops += [()] * (len(ids) - len(tops))
        context = self._context() if with_prompt else None
        scores = context if self.options.context_logits else None
        generation = _rows(output.generation_logits)[: len(ids)] if self.options.generation_logits else None
        cached = None if self._sent or number else self._num_cached
        extras = Extras(_to_lists(scores), _to_lists(generation), num_cached_tokens=cached)
        said = None if extras == NO_EXTRAS else extras
        result = Output(self.key, ids, logprobs, finish, number, tops=tops, extras=said)
        if context is None or not self.options.prompt_logprobs:
            return result
        scored, prompt_tops = score(context[:-1], self.options.prompt[1:], self.options.prompt_tops)
        return result._replace(
            prompt_logprobs=[None, *scored], prompt_tops=[(), *prompt_tops] if self.options.prompt_tops else None
        )

    def _context(self) -> Any:
        rows, size = _rows(self.result.context_logits), len(self.options.prompt)
        if len(rows) != size:
            raise ValueError(
                f"the engine gave logits of {len(rows)} of the prompt's {size} tokens: the others were in its prefix "
                "cache, or in parts (option.enable_prefix_caching=false, option.enable_chunked_prefill=false)"
            )
        return rows


def _logprob(entry: Any, id: int) -> float | None:
    """Read one token's log-probability; old samplers leave it out for an unlikely token."""
    value = entry.get(id) if isinstance(entry, Mapping) else entry
    return getattr(value, "logprob", value)


def _top(entry: Mapping[int, Any], count: int) -> Alternatives:
    """Return the most likely ids, best first; `entry` may have the chosen one in addition."""
    best_first = sorted(((id, value.logprob) for id, value in entry.items()), key=lambda pair: -pair[1])
    return tuple(best_first[:count])


def _rows(tensor: Any) -> Any:
    """Convert a tensor [..., rows, vocabulary] to a numpy array of float32 [rows, vocabulary]."""
    if tensor is None:
        raise ValueError("the engine gave no logits")
    array = tensor.float().cpu().numpy()
    return array.reshape(-1, array.shape[-1])


def _to_lists(rows: Any) -> Any:
    return None if rows is None else rows.tolist()


# -- event loop that runs only inside its owner's calls; other threads may schedule callbacks in between ---------------


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
        """Return the real state on the thread that created the loop: asyncio checks it before it runs or
        closes the loop.
        """
        if threading.get_ident() == self._owner:
            return super().is_running()
        return not self.is_closed()


# -- prompts of vision models, which TensorRT-LLM reads as text, and computes the ids itself ---------------------------
# Facts of 1.0 to 1.3 (llmapi/llm.py, inputs/registry.py, _torch/models/modeling_qwen2vl.py, NVIDIA/TensorRT-LLM):
#
# * Ids with images are decoded and encoded again; before 1.3 that fails without `mm_processor_kwargs`.
# * Before 1.3 a step that has prompts of ids beside images fails for all of them: texts alone get Qwen2-VL's positions.
# * The images' hashes in the KV cache leave out the width, and one image that cannot be hashed ends hashing for good.


def cache_salt(media: MediaPrompt | None) -> str | None:
    """Name the prefix cache of prompts with the same media; None without media."""
    if media is None or not media.media:
        return None
    return hashlib.sha256(",".join(medium.digest for medium in media.media).encode()).hexdigest()


class VisionPrompts:
    """Makes the inputs of `generate_async`, and checks the ids that TensorRT-LLM computes.

    Args:
        tokenizer: the LLM's.
        tokens: the model's.
        vocabulary: size of it.
    """

    def __init__(self, tokenizer: Any, tokens: QwenTokens, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._vocabulary = vocabulary

    def inputs(self, ids: Sequence[int], media: MediaPrompt | None) -> dict[str, Any]:
        """Return the text, with images as Pillow's.

        Raises:
            ValueError: no text has these ids, or not as many placeholders as images.
        """
        text, images = ("", ()) if media is None else media
        short = collapse(ids, images, {"image": self._tokens})
        inputs: dict[str, Any] = {"prompt": prompt_text(short, text, self._encode, self._decode)}
        if images:
            inputs["multi_modal_data"] = {"image": [pillow_image(image) for image in images]}
        return inputs

    def check(self, found: Sequence[int], ids: Sequence[int]) -> str:
        """Compare the ids that TensorRT-LLM computes; return what is wrong, or "".

        Before 1.3 ids of images are outside the vocabulary.
        """
        placeholder = self._tokens.placeholder
        if len(found) != len(ids):
            return f"TensorRT-LLM computes {len(found)} tokens for a prompt of {len(ids)}: a bug"
        for at, (one, id) in enumerate(zip(found, ids, strict=True)):
            if one != id and not (id == placeholder and one >= self._vocabulary):
                return f"TensorRT-LLM computes the id {one} in the prompt's place {at}, which has {id}: a bug"
        return ""

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def vision_prompts(model: Path, tokenizer: Any, vocabulary: int) -> VisionPrompts | None:
    """Make them for a model with images; None if prompts are ids."""
    tokens = read_image_tokens(model)
    return VisionPrompts(tokenizer, tokens, vocabulary) if isinstance(tokens, QwenTokens) else None
