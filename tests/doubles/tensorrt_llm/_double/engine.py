"""The executor: a thread that steps all requests at once, checks them as C++ does, and can die in several ways."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy
from tensorrt_llm import inputs
from tensorrt_llm._double import api, guide
from tensorrt_llm._double.api import MANNERS
from tensorrt_llm._double.model import Model, chosen, forbidden, log_softmax, penalized
from tensorrt_llm._double.request import Request, Sequence, check_sampling
from tensorrt_llm._double.result import Delivery, Logprob, Response, entry

# -- beam search, which the executor does at once ----------------------------------------------------------------------


def search(engine: Any, request: Request) -> None:
    params, width = request.params, request.params.best_of
    alive: list[tuple[float, list[int], list[Any]]] = [(0.0, [], [])]
    ended: list[tuple[float, list[int], list[Any], str]] = []
    penalty = params.length_penalty or 0.0
    while alive and len(ended) < width:
        found: list[tuple[float, list[int], list[Any]]] = []
        for total, ids, entries in alive:
            logprobs = log_softmax(engine.model.logits([*request.prompt, *ids]))
            for id in numpy.argsort(-logprobs, kind="stable")[: 2 * width].tolist():
                found_entry = entry(logprobs, id, params.logprobs or 1)
                found.append((total + float(logprobs[id]), [*ids, id], [*entries, found_entry]))
        alive = []
        for total, ids, entries in sorted(found, key=lambda one: -one[0])[: 2 * width]:
            sequence = Sequence(None, ids)
            if (finish := engine.finish_of(request, sequence)) is not None:
                ended.append((total, ids, entries, finish))
            elif len(alive) < width:
                alive.append((total, ids, entries))
    best = sorted(ended, key=lambda one: -one[0] / len(one[1]) ** penalty)[:width]
    engine.active.pop(request.id, None)
    for number, (total, ids, entries, finish) in enumerate(best):
        engine.num_tokens += len(ids)
        logprobs = entries if params.logprobs else None
        last = number == len(best) - 1
        engine.say(request, Response(number, ids, logprobs, finish, cumulative=total, last=last))


class Engine:
    """Started by LLM; knows nothing of it."""

    def __init__(self, model: Model, arguments: Any, tokenizer: Any, worker: Any = None) -> None:
        self.model, self.arguments, self._tokenizer = model, arguments, tokenizer
        self.max_seq_len = arguments.max_seq_len or model.context
        self.leaked = 0  # requests that go on although their result has ended
        self.aborted: list[int] = []
        self.shut = False
        self.dead: BaseException | None = None
        self._worker = worker  # a process; without it there is silence, or an end of this process
        self.num_tokens = 0
        self._shared = numpy.random.Generator(numpy.random.PCG64(42))  # TorchSampler's before 1.3
        self.cached: dict[str | None, list[Request]] = {}
        self._new: list[Request] = []
        self.active: dict[int, Request] = {}
        self._lock = threading.Lock()
        self._ids = 0
        self._work = threading.Event()
        self.delivery = Delivery(in_process=bool(arguments.gather_generation_logits))
        self._said: list[tuple[Any, Response]] = []  # in this step
        self._thread = threading.Thread(target=self._run, name="double-executor", daemon=True)
        self._thread.start()

    @property
    def torch_sampler(self) -> bool:
        if MANNERS.release == (1, 0):
            return not self.arguments.enable_trtllm_sampler
        if MANNERS.release >= (1, 3):
            return True
        kind = self.arguments.sampler_type
        if kind == "auto":
            beams = (self.arguments.max_beam_width or 1) > 1
            return not beams and MANNERS.release != (1, 1)
        return bool(kind != "TRTLLMSampler")

    @property
    def num_active(self) -> int:
        return len(self.active) + len(self._new)

    def submit(self, request: Request) -> None:
        with self._lock:
            self._ids += 1
            request.id = request.result.request_id = self._ids
            self._new.append(request)
        self._work.set()

    def cancel(self, id: int) -> None:
        with self._lock:
            self.aborted.append(id)
            for request in [*self.active.values(), *self._new]:
                if request.id == id:
                    request.cancelled_in = MANNERS.late_abort
        self._work.set()

    def shutdown(self) -> None:
        self.shut = True
        self._work.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.delivery.close()
        if self._worker is not None:
            self._worker.close()

    def raise_background_error(self) -> None:
        """Each request that is submitted and each response that is read looks for what a thread has met.

        Raises:
            Exception: it did, and the engine has been shut down for it.
        """
        if not self.delivery.errors.empty():
            error = self.delivery.errors.get()
            self.shutdown()
            raise error

    # -- the thread

    def _run(self) -> None:
        going = True
        while going and not self.shut:
            self._work.wait()
            going = self._step()
            if self._said:
                said, self._said = self._said, []
                self.delivery.send(said)

    def say(self, request: Request, response: Response) -> None:
        self._said.append((request.result, response))

    def _step(self) -> bool:
        """Whether it goes on."""
        with self._lock:
            new, self._new = self._new, []
        for request in new:
            try:
                self._enqueue(request)
            except Exception as error:
                self.say(request, Response(error=str(error)))
            else:
                self.active[request.id] = request
        if not self.active and not self._new:
            self._work.clear()
            if self._new or self.shut:  # it came just now
                self._work.set()
            return True
        time.sleep(MANNERS.pause)
        if MANNERS.release < (1, 3) and self._mixed():
            self._die(RuntimeError("The size of tensor a must match the size of tensor b at non-singleton dimension 2"))
            return False
        for request in list(self.active.values()):
            try:
                self._advance(request)
            except Exception as error:  # one request's fault is everybody's end
                self._die(error)
                return False
            if self._misbehaves():
                return False
        return True

    def _mixed(self) -> bool:
        """Whether a step has prompts with positions by axes and without, which the model's engine cannot join."""
        return len({request.processed is None for request in self.active.values()}) > 1

    def _misbehaves(self) -> bool:
        if MANNERS.exit_after and self.num_tokens >= MANNERS.exit_after:
            os._exit(134)
        if MANNERS.stall_after and self.num_tokens >= MANNERS.stall_after:
            if MANNERS.stall_error:
                error = RuntimeError(MANNERS.stall_error)  # after what has been said, which would be told of it
                threading.Timer(0.3, self.delivery.errors.put, (error,)).start()
            return True
        if self._worker is not None and self._worker.dead:
            return True
        if MANNERS.die_after and self.num_tokens >= MANNERS.die_after:
            self._die(_death())
            return True
        return False

    def _die(self, error: Exception) -> None:
        self.dead, self.shut = error, True
        for request in [*self.active.values(), *self._new]:
            self.say(request, Response(fatal=error))

    # -- requests

    def _enqueue(self, request: Request) -> None:
        """
        Raises:
            Exception: what becomes a RequestError when the result is consumed.
        """
        params = request.params
        check_sampling(params)
        width = params.best_of if params.use_beam_search else 1
        if width > (self.arguments.max_beam_width or 1):
            raise ValueError(f"beam width {width} exceeds max_beam_width")
        if not all(0 <= id < self.model.vocabulary for id in request.prompt):
            raise ValueError("Token ID out of range")
        most = self.max_seq_len - len(request.prompt)
        if most <= 0:
            raise ValueError(f"prompt length {len(request.prompt)} leaves no room in max_seq_len {self.max_seq_len}")
        request.room = most if params.max_tokens is None else min(params.max_tokens, most)
        if request.room <= 0:
            raise ValueError("max_tokens must be positive")
        request.stop, request.bad = params._words("stop"), params._words("bad")
        if params.embedding_bias is not None and params.embedding_bias.shape != (self.model.vocabulary,):
            raise ValueError("embedding_bias must have the vocabulary's size")
        if request.lora is not None:
            self._check_lora(request.lora)
        if params.guided_decoding is not None:
            if self.arguments.guided_decoding_backend is None:
                raise ValueError("guided decoding needs guided_decoding_backend")
            allowed = guide.texts(params.guided_decoding)
            request.guide = [self._tokenizer.encode(text, add_special_tokens=False) for text in allowed]
        if params.return_generation_logits and not self.arguments.gather_generation_logits:
            raise ValueError("return_generation_logits needs gather_generation_logits")
        request.sequences = [Sequence(self._random(params, number)) for number in range(params.best_of)]
        request.context = self._context(request)

    def _check_lora(self, lora: Any) -> None:
        if not self.arguments.enable_lora and self.arguments.lora_config is None:
            raise ValueError("LoRA is not enabled")
        config = json.loads((Path(lora.path) / "adapter_config.json").read_text())
        if config["r"] > (self.arguments.lora_config.max_lora_rank if self.arguments.lora_config else 64):
            raise ValueError("the adapter's rank is above max_lora_rank")

    def _random(self, params: Any, number: int) -> Any:
        if self.torch_sampler and MANNERS.release < (1, 3):
            return self._shared
        return numpy.random.Generator(numpy.random.PCG64((params.seed or 0) + number))

    def _context(self, request: Request) -> Any:
        """Logits of the prompt's tokens: none of those whose KV blocks are reused."""
        cache, size = self.arguments.kv_cache_config, self.arguments.kv_cache_config.tokens_per_block
        known = self.cached.setdefault(request.salt, [])
        keys = request.keys[:-1]
        common, nearest = max(((_common(keys, one.keys), at) for at, one in enumerate(known)), default=(0, 0))
        reused = common // size * size if cache.enable_block_reuse else 0
        if request.processed is not None:
            request.seen = tuple(pixels for _, pixels in request.processed.images)
            if reused:
                request.seen = inputs.reused(request.images, known[nearest].images, reused)
        known.append(request)
        if not (request.params.return_context_logits or request.params._context_logits_auto_enabled):
            return None
        return numpy.stack(
            [self.model.logits(request.prompt[: at + 1], request.world) for at in range(reused, len(request.prompt))]
        )

    def _advance(self, request: Request) -> None:
        if request.cancelled_in is not None:
            if request.cancelled_in <= 0:
                self._end_all(request, "CANCELLED")
                return
            request.cancelled_in -= 1
        if request.params.use_beam_search and request.params.best_of > 1:
            search(self, request)
            return
        stepped = [number for number, sequence in enumerate(request.sequences) if sequence.finish is None]
        for number in stepped:
            self._token(request, request.sequences[number])
        if all(sequence.finish for sequence in request.sequences):
            self.active.pop(request.id, None)  # before anybody hears of the end, who may count at once
        for number in stepped:
            self._post(request, number)
        if MANNERS.cancel_all and max(len(one.ids) for one in request.sequences) >= MANNERS.cancel_all:
            self._end_all(request, "CANCELLED")

    def _token(self, request: Request, sequence: Sequence) -> None:
        params = request.params
        if request.processed is not None and request.processed.faulty:
            raise RuntimeError("shape mismatch: the images' embeddings cannot be broadcast to the placeholders")
        raw = self.model.logits([*request.prompt, *sequence.ids], request.world)
        logits = raw.copy()
        if params.embedding_bias is not None:
            logits += params.embedding_bias
        if not self.torch_sampler or MANNERS.release >= (1, 3):
            logits = penalized(logits, request.prompt, sequence.ids, params)
        if not self.torch_sampler:
            logits = forbidden(logits, sequence.ids, request.bad)
        if params.min_tokens and len(sequence.ids) < params.min_tokens:
            logits[request.end] = -numpy.inf  # also where it is -1, as Python's index has it
        if request.guide:
            logits = guide.allow(logits, sequence.ids, request.guide, self._tokenizer.eos_token_id)
        id = chosen(logits, params, sequence.random)
        logprobs = log_softmax(logits)
        self.num_tokens += 1
        sequence.ids.append(id)
        sequence.cumulative += float(logprobs[id])
        if params.logprobs:
            sequence.logprobs.append(entry(logprobs, id, params.logprobs))
        if params.return_generation_logits:
            sequence.logits.append(raw)
        sequence.finish = self.finish_of(request, sequence)

    def finish_of(self, request: Request, sequence: Sequence) -> str | None:
        if sequence.ids[-1] == request.end:
            return "END_ID"
        if len(sequence.ids) >= request.room:
            return "LENGTH"
        if any(sequence.ids[-len(word) :] == word for word in request.stop):
            return "STOP_WORDS"
        return None

    def _post(self, request: Request, number: int) -> None:
        sequence = request.sequences[number]
        waiting = len(sequence.ids) - sequence.posted
        if sequence.finish is None and (not request.streaming or waiting < MANNERS.burst):
            return
        start, sequence.posted = sequence.posted, len(sequence.ids)
        logprobs = None
        if request.params.logprobs:
            logprobs = sequence.logprobs[start if self.torch_sampler else 0 :]
        response = Response(
            sequence=number,
            ids=sequence.ids[start:],
            logprobs=logprobs,
            context_logits=request.context,
            generation_logits=numpy.stack(sequence.logits)[None] if sequence.logits else None,
            cumulative=sequence.cumulative,
        )
        if MANNERS.late_finish and request.streaming and sequence.finish is not None:
            self.say(request, response)
            response = Response(sequence=number, ids=[], finish=sequence.finish, cumulative=sequence.cumulative)
        response.finish = sequence.finish
        self.say(request, response)

    def _end_all(self, request: Request, finish: str) -> None:
        self.active.pop(request.id, None)
        for number, sequence in enumerate(request.sequences):
            if sequence.finish is None:
                sequence.finish = finish
                if request.params.logprobs and MANNERS.release == (1, 2):
                    sequence.ids.append(sequence.ids[-1] if sequence.ids else 5)  # a token without its log-probability
                self._post(request, number)


def _death() -> Exception:
    error: Exception = RuntimeError("the executor died")
    if MANNERS.death == "cpp":
        error = api.CppExecutorError("the executor died")
    elif MANNERS.death == "dead" or (not MANNERS.death and MANNERS.release >= (1, 3)):
        error = api.EngineDeadError(error)
    return error


def _common(one: list[int], other: list[int]) -> int:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


# -- an executor whose tokens cost nothing, to load what lies between it and the adapter -------------------------------


class FastEngine(Engine):
    def _context(self, request: Request) -> Any:
        return None

    def _token(self, request: Request, sequence: Sequence) -> None:
        id = 100 + (len(request.prompt) + len(sequence.ids)) % 100
        self.num_tokens += 1
        sequence.ids.append(id)
        if request.params.logprobs:
            sequence.logprobs.append({id: Logprob(logprob=-0.5, rank=1)})
        sequence.finish = self.finish_of(request, sequence)
