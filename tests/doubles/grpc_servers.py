"""Doubles of the gRPC servers of vLLM, SGLang and TensorRT-LLM, as their servicers are written.

Sources: smg_grpc_servicer 0.14.1 (vllm/servicer.py, sglang/servicer.py, sglang/request_manager.py) and TensorRT-LLM 1.3
(tensorrt_llm/grpc/smg). The model repeats its prompt. Where it samples, it draws from the prompt's ids.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import grpc
from google.protobuf.message import Message

HANG = "hang"
"""In a script: send nothing more, and wait until the client leaves."""

THREADS = 80
VOCABULARY = 460
THOUGHT_END = 4
"""The id that ends a thought, for vLLM's reasoning parsers."""


class Status(NamedTuple):
    """In a script: end the answer with a status."""

    code: grpc.StatusCode
    details: str = "no such thing"
    trailers: tuple[tuple[str, str], ...] = ()


class Asked(NamedTuple):
    """The part of a request that the model needs."""

    id: str
    prompt: Sequence[int]
    most: int
    least: int
    stops: frozenset[int]
    ends: frozenset[int]
    seed: int | None
    samples: bool
    tops: int | None  # None: no log-probabilities
    prompt_tops: int | None
    includes_stop: bool = True


class Token(NamedTuple):
    """A step of an answer."""

    id: int
    finish: str | None
    matched: int | None


def _require(holds: bool, words: str) -> None:
    if not holds:
        raise ValueError(words)


class GrpcServer:
    """A server on loopback.

    Attributes:
        scripts: each answers one Generate: messages, bytes, a Status or HANG, perhaps as they come.
        script: makes the answer to each Generate of its id, where there are no `scripts`.
        received: requests of Generate, in order.
        aborted: ids that Abort named.
        left: how many clients have left an answer before its end.
        model: fields of the answer to GetModelInfo.
        health: fields of the answer to HealthCheck.
        num_asked: how often it was asked for its model.
        eos: ids that end an answer.
        cached: tokens of the prompt that were in its cache, as each message says again.
        loads: of its ranks, fields of the answer to GetLoads, or its bytes; None: an older servicer without that.
        num_loads_asked: how often GetLoads was called.
        may_tell: GetLoads is answered once it is set.
        normalizes: embeddings have length 1, as vLLM and SGLang have them by default.
        embeddings: answers to further Embeds but those of one token: messages, bytes, a Status or HANG.
        embedded: requests of Embed, in order.
        rule_start: where the server applies structured output: `first_token`, `after_reasoning` (vLLM with
            --reasoning-parser) or `never` (TensorRT-LLM without guided_decoding_backend).
        tells_rule_start: whether GetServerInfo says so, as vLLM's servicer does since 0.14; SGLang's: its `arguments`.
        heeds_first_token: whether grammar_from_first_token has an effect; it has none in the Python servicer 0.14.1.
    """

    module: str
    service: str
    usual_model: ClassVar[dict[str, Any]]
    usual_health: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        self.messages = importlib.import_module(f"smg_grpc_proto.generated.{self.module}_pb2")
        self.scripts: list[Iterable[Any]] = []
        self.script: Callable[[str], Sequence[Any]] | None = None
        self.received: list[Any] = []
        self.aborted: list[str] = []
        self.left = threading.Semaphore(0)
        self.model: Any = dict(self.usual_model)
        self.health = dict(self.usual_health)
        self.num_asked = 0
        self.eos = frozenset({2})
        self.cached = 0
        self.loads: list[dict[str, Any]] | bytes | None = [{"num_waiting_reqs": 0, "token_usage": 0.0}]
        self.num_loads_asked = 0
        self.may_tell = threading.Event()
        self.may_tell.set()
        self.normalizes = True
        self.embeddings: list[Any] = []
        self.embedded: list[Any] = []
        self.rule_start = "first_token"
        self.tells_rule_start = True
        self.heeds_first_token = False
        self.refuses: Status | None = None
        self.port = 0
        self._running: dict[str, threading.Event] = {}
        self._server: grpc.Server | None = None

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    # -- a contract ------------------------------------------------------------------------------------------------

    def asked(self, request: Any) -> Asked:
        """Read a request as the servicer does; raise ValueError where the engine refuses it."""
        raise NotImplementedError

    def chunk(self, id: str, asked: Asked | None, ids: Sequence[int], **more: Any) -> Message:
        raise NotImplementedError

    def complete(self, id: str, asked: Asked | None, ids: Sequence[int], finish: str, **more: Any) -> Message:
        raise NotImplementedError

    def abort(self, request: Any) -> Message:
        raise NotImplementedError

    def rule(self, request: Any) -> str:
        """Return the text of a request's structured output, or "" if it has none: the first of its choices."""
        name = request.sampling_params.WhichOneof("constraint")
        value: Any = getattr(request.sampling_params, name) if name else ""
        return str(value.choices[0]) if name == "choice" else str(value)

    # -- the server ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen at the port that it had before, if any."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        messages = self.messages
        methods = {
            "Generate": stream(self._generate, messages.GenerateRequest.FromString, _bytes),
            "Abort": unary(self._abort, messages.AbortRequest.FromString, _bytes),
            "GetModelInfo": unary(self._model_info, messages.GetModelInfoRequest.FromString, _bytes),
            "HealthCheck": unary(self._health, messages.HealthCheckRequest.FromString, _bytes),
            "GetServerInfo": unary(self._server_info, messages.GetServerInfoRequest.FromString, _bytes),
        }
        if hasattr(messages, "EmbedRequest"):
            methods["Embed"] = unary(self._embed, messages.EmbedRequest.FromString, _bytes)
        if hasattr(messages, "GetLoadsRequest"):
            methods["GetLoads"] = unary(self._loads, messages.GetLoadsRequest.FromString, _bytes)
        name = messages.DESCRIPTOR.services_by_name[self.service].full_name
        self._server = grpc.server(ThreadPoolExecutor(THREADS), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """End all connections at once."""
        assert self._server is not None
        for event in [*self._running.values(), self.may_tell]:
            event.set()
        self._server.stop(None).wait()

    def _model_info(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.num_asked += 1
        if self.refuses is not None:
            context.abort(self.refuses.code, self.refuses.details)
        if isinstance(self.model, bytes):
            return self.model
        return self.messages.GetModelInfoResponse(**self.model)

    def _server_info(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = self.messages.GetServerInfoResponse
        if "constrained_decoding_start" not in answer.DESCRIPTOR.fields_by_name:
            return answer()
        if not self.tells_rule_start:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        return answer(constrained_decoding_start=self.rule_start)

    def _health(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self.messages.HealthCheckResponse(**self.health)

    def _loads(self, request: Any, context: grpc.ServicerContext) -> Any:
        loads = self.loads
        self.num_loads_asked += 1
        self.may_tell.wait()
        if loads is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        return loads if isinstance(loads, bytes) else self.messages.GetLoadsResponse(loads=loads)

    def _embed(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.embedded.append(request)
        scripted = self.embeddings and len(request.tokenized.input_ids) > 1
        answer = self.embeddings.pop(0) if scripted else self.embedding(request)
        if answer is HANG:
            gone = threading.Event()
            if context.add_callback(gone.set):
                gone.wait()
            self.left.release()
            return b""
        if isinstance(answer, Status):
            context.abort(answer.code, answer.details)
        return answer

    def embedding(self, request: Any) -> Any:
        """Answer an Embed."""
        return Status(grpc.StatusCode.UNIMPLEMENTED, "Embed RPC not yet implemented")

    def _abort(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self.abort(request)

    def stop_generating(self, is_meant: Callable[[str], bool]) -> bool:
        """End the answers that an Abort means; return whether there are any."""
        meant = [event for id, event in [*self._running.items()] if is_meant(id)]
        for event in meant:
            event.set()
        return bool(meant)

    def _generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.received.append(request)
        gone = self._running[request.request_id] = threading.Event()
        if not context.add_callback(gone.set):
            gone.set()
        ended = False
        try:
            for part in self._parts(request, gone):
                if isinstance(part, Status):
                    context.set_trailing_metadata(part.trailers)
                    ended = True
                    context.abort(part.code, part.details)
                if part is HANG:
                    gone.wait()
                    return
                yield part
            ended = True
        except ValueError as error:
            ended = True
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._running.pop(request.request_id, None)
            if not ended:
                self.left.release()

    def _parts(self, request: Any, gone: threading.Event) -> Iterable[Any]:
        if self.scripts:
            return self.scripts.pop(0)
        return self.script(request.request_id) if self.script else self._answer(request, gone)

    def _answer(self, request: Any, gone: threading.Event) -> Iterator[Message]:
        asked = self.asked(request)
        if (rule := self.rule(request)) and self._applies_rule(request, asked):
            asked = asked._replace(prompt=[*map(ord, rule)])  # an answer to which the rule applies repeats the rule
        ids: list[int] = []
        for step in _tokens(asked):
            if gone.is_set():
                yield self.complete(asked.id, asked, ids, "abort")
                return
            shown = [step.id] if asked.includes_stop or step.matched not in asked.stops else []
            ids += shown
            if shown:
                yield self.chunk(asked.id, asked, shown, is_first=len(ids) == 1, cached_tokens=self.cached)
            if step.finish is not None:
                end = {"last": shown, "matched": step.matched, "cached_tokens": self.cached}
                yield self.complete(asked.id, asked, ids, step.finish, **end)

    def _applies_rule(self, request: Any, asked: Asked) -> bool:
        if self.rule_start == "after_reasoning":
            first = self.heeds_first_token and request.sampling_params.grammar_from_first_token
            return first or THOUGHT_END in asked.prompt
        return self.rule_start == "first_token"


def _tokens(asked: Asked) -> Iterator[Token]:
    draw = random.Random(asked.seed)
    for index in range(asked.most):
        id = draw.choice(asked.prompt) if asked.samples else asked.prompt[index % len(asked.prompt)]
        ends = id in asked.ends | asked.stops
        if ends and index + 1 < asked.least:  # what min_tokens holds back
            id, ends = asked.prompt[0] if asked.prompt[0] not in asked.ends | asked.stops else 5, False
        finish = "stop" if ends else "length" if index + 1 == asked.most else None
        yield Token(id, finish, id if ends else None)
        if finish:
            return


def score(id: int) -> float:
    """The log-probability of an id, whatever comes before it."""
    return -((id % 7) + 1) / 8


def vector(ids: Sequence[int]) -> list[float]:
    """The pooled vector of ids."""
    return [float(sum((id + 1) * (place + index + 1) % 7 - 3 for place, id in enumerate(ids))) for index in range(4)]


def best(id: int, count: int) -> list[tuple[int, float]]:
    """The most likely ids in place of `id`: it is the second."""
    likelier = (id + 1) % VOCABULARY, score(id) / 2
    others = [((id + more) % VOCABULARY, score(id) * more) for more in range(2, count)]
    return [likelier, (id, score(id)), *others][:count]


def _bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


class _OfServicer(GrpcServer):
    """What the servicers of vLLM and SGLang have in common."""

    usual_health: ClassVar[dict[str, Any]] = {"healthy": True, "message": "Health"}
    usual_model: ClassVar[dict[str, Any]] = {
        "model_path": "/models/tiny",
        "served_model_name": "tiny",
        "is_generation": True,
        "max_context_length": 64,
        "vocab_size": VOCABULARY,
    }

    def embedding(self, request: Any) -> Any:
        ids = request.tokenized.input_ids
        if len(ids) > self.model["max_context_length"]:
            return Status(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is longer than the maximum model length")
        numbers = vector(ids)
        length = math.hypot(*numbers) if self.normalizes else 1.0
        return self.messages.EmbedResponse(
            embedding=[one / length for one in numbers], prompt_tokens=len(ids), embedding_dim=len(numbers)
        )

    def scores(self, ids: Sequence[int], tops: int | None) -> Any:
        """OutputLogProbs: the best as this contract orders them."""
        if tops is None:
            return None
        messages = self.messages
        return messages.OutputLogProbs(
            token_logprobs=map(score, ids),
            token_ids=ids,
            top_logprobs=[self._tops(id, tops) for id in ids] if tops else [],
        )

    def _tops(self, id: int, count: int) -> Any:
        pairs = self.order(id, count)
        return self.messages.TopLogProbs(token_ids=[id for id, _ in pairs], values=[value for _, value in pairs])

    def order(self, id: int, count: int) -> list[tuple[int, float]]:
        return best(id, count)

    def prompt_scores(self, asked: Asked) -> Any:
        if asked.prompt_tops is None:
            return None
        messages, count = self.messages, asked.prompt_tops
        values = [
            messages.InputTokenLogProb(),
            *(messages.InputTokenLogProb(value=score(id)) for id in asked.prompt[1:]),
        ]
        tops = [messages.TopLogProbs(), *(self._tops(id, count) for id in asked.prompt[1:])] if count else []
        return messages.InputLogProbs(token_logprobs=values, token_ids=asked.prompt, top_logprobs=tops)

    def chunk(self, id: str, asked: Asked | None, ids: Sequence[int], **more: Any) -> Message:
        first = asked if more.pop("is_first", False) else None
        body = self.messages.GenerateStreamChunk(
            token_ids=ids,
            output_logprobs=self.scores(ids, asked.tops) if asked else None,
            input_logprobs=self.prompt_scores(first) if first else None,
            **more,
        )
        return self._response(id, chunk=body)

    def complete(self, id: str, asked: Asked | None, ids: Sequence[int], finish: str, **more: Any) -> Message:
        """The last message repeats the last chunk's ids; an end token of the model's own counts as a stop in SGLang."""
        matched = more.pop("matched", None)
        last = more.pop("last", ids[-1:])
        body = self.messages.GenerateComplete(output_ids=last, finish_reason=finish, **more)
        if matched is not None and self.names(matched, asked):
            body.matched_token_id = matched
        if asked is not None:
            body.output_logprobs.CopyFrom(self.scores(last, asked.tops) or self.messages.OutputLogProbs())
        return self._response(id, complete=body)

    def names(self, matched: int, asked: Asked | None) -> bool:
        return True

    def _response(self, id: str, **body: Any) -> Message:
        raise NotImplementedError


class VllmServer(_OfServicer):
    module, service = "vllm_engine", "VllmEngine"

    def asked(self, request: Any) -> Asked:
        params = request.sampling_params
        _require(request.WhichOneof("input") == "tokenized" and len(request.tokenized.input_ids) > 0, "no prompt")
        temperature = params.temperature if params.HasField("temperature") else 1.0
        _require(temperature >= 0, f"temperature must be non-negative, got {temperature}")
        _require(0 <= params.top_p <= 1, f"top_p must be in (0, 1], got {params.top_p}")
        _require(params.repetition_penalty >= 0, "repetition_penalty must be greater than zero")
        _require(params.min_tokens <= params.max_tokens, "min_tokens must be less than or equal to max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            _require(getattr(params, name) <= 20, f"Requested {name} of more than max allowed: 20")
        _require(all(0 <= id < VOCABULARY for id in params.logit_bias), "token_id(s) in logit_bias out of vocabulary")
        return Asked(
            request.request_id,
            request.tokenized.input_ids,
            params.max_tokens,
            params.min_tokens,
            frozenset(params.stop_token_ids),
            frozenset() if params.ignore_eos else self.eos,
            params.seed if params.HasField("seed") and params.seed != -1 else None,
            temperature > 0,
            params.logprobs if params.HasField("logprobs") else None,
            params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        )

    def order(self, id: int, count: int) -> list[tuple[int, float]]:
        """The chosen token comes first, whatever its rank, and the list is cut."""
        others = [pair for pair in best(id, count) if pair[0] != id]
        return [(id, score(id)), *others][:count]

    def names(self, matched: int, asked: Asked | None) -> bool:
        """Only a stop token is named, not the model's own end."""
        return asked is None or matched in asked.stops

    def abort(self, request: Any) -> Message:
        self.aborted += request.request_ids
        self.stop_generating(lambda id: id in request.request_ids)
        return self.messages.AbortResponse()

    def _response(self, id: str, **body: Any) -> Message:
        return self.messages.GenerateResponse(**body)


class SglangServer(_OfServicer):
    """SGLang's server. Its servicer reports the size of the KV cache as `max_context_length`."""

    module, service = "sglang_scheduler", "SglangScheduler"
    usual_model: ClassVar[dict[str, Any]] = {
        **_OfServicer.usual_model,
        "max_context_length": 4096,
        "max_req_input_len": 64 - 6,
    }

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {"speculative_algorithm": None, "skip_tokenizer_init": False}
        self.version = "0.5.23"

    def _server_info(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Of GetServerInfo, whose Struct has all arguments of the server."""
        if not self.tells_rule_start:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        answer = self.messages.GetServerInfoResponse(sglang_version=self.version)
        answer.server_args.update(self.arguments)
        return answer

    def asked(self, request: Any) -> Asked:
        params = request.sampling_params
        _require(
            request.HasField("tokenized") and len(request.tokenized.input_ids) > 0, "Tokenized input must be provided"
        )
        _require(params.temperature >= 0, "temperature must be non-negative")
        _require(0 <= params.repetition_penalty <= 2, "repetition_penalty must be in [0, 2]")
        _require(-2 <= params.presence_penalty <= 2, "presence_penalty must be in [-2, 2]")
        _require(params.top_k >= -1, "top_k must be -1 (disable), or at least 1")
        _require(params.min_new_tokens <= params.max_new_tokens, "min_new_tokens must be in [0, max_new_tokens]")
        _require(
            all(0 <= int(id) < VOCABULARY for id in params.logit_bias), "logit_bias must have keys in the vocabulary"
        )
        return Asked(
            request.request_id,
            request.tokenized.input_ids,
            params.max_new_tokens,
            params.min_new_tokens,
            # With ignore_eos, managers/schedule_batch.py looks for no stop tokens either.
            frozenset() if params.ignore_eos else frozenset(params.stop_token_ids),
            frozenset() if params.ignore_eos else self.eos,
            None,
            params.temperature > 1e-6,
            request.top_logprobs_num if request.return_logprob else None,
            request.top_logprobs_num if request.return_logprob and request.logprob_start_len == 0 else None,
        )

    def embedding(self, request: Any) -> Any:
        """Answer an Embed: the tensors of an encoder's ids and of their types have one shape."""
        if len(request.token_type_ids) != len(request.tokenized.input_ids):
            return Status(grpc.StatusCode.INTERNAL, "The size of tensor a must match the size of tensor b")
        return super().embedding(request)

    def abort(self, request: Any) -> Message:
        """The scheduler ends all requests whose ids begin with the given one."""
        self.aborted.append(request.request_id)
        found = self.stop_generating(lambda id: id.startswith(request.request_id))
        return self.messages.AbortResponse(success=True, message="aborted" if found else "not found")

    def _response(self, id: str, **body: Any) -> Message:
        return self.messages.GenerateResponse(request_id=id, **body)


class TrtLlmServer(GrpcServer):
    module, service = "trtllm_service", "TrtllmService"
    usual_health: ClassVar[dict[str, Any]] = {"status": "OK"}
    usual_model: ClassVar[dict[str, Any]] = {"model_id": "/models/tiny", "max_seq_len": 64}
    of_the_model: Mapping[str, float] = MappingProxyType({})
    """Values in generation_config.json, which the server takes for a field that a request omits if it was started with
    `generation_config: auto`.
    """

    def rule(self, request: Any) -> str:
        return str(request.guided_decoding.guide)

    def asked(self, request: Any) -> Asked:
        config, output = request.sampling_config, request.output_config
        _require(request.HasField("tokenized"), "Missing tokenized input")
        for name, value in self.of_the_model.items():
            if not config.HasField(name):
                setattr(config, name, value)
        top_p = config.top_p if config.HasField("top_p") else 1.0
        _require(0 <= top_p <= 1, f"require 0 <= top_p <= 1, got top_p={top_p}")
        _require(config.top_k >= 0, f"require top_k >= 0, got top_k={config.top_k}")
        _require(config.temperature >= 0, "require temperature >= 0")
        _require(0 <= config.min_p <= 1, "min_p must be from 0 to 1")
        _require(config.no_repeat_ngram_size >= 0, "no_repeat_ngram_size must not be negative")
        repetition = config.repetition_penalty if config.HasField("repetition_penalty") else 1.0
        _require(repetition > 0, "repetition_penalty must be positive")
        scored = output.HasField("logprobs") and output.logprobs > 0
        return Asked(
            request.request_id,
            request.tokenized.input_token_ids,
            request.max_tokens,
            config.min_tokens,
            # tensorrt_llm/executor/base_worker.py passes no stop words if ignore_eos is set.
            frozenset() if request.ignore_eos else frozenset(request.stop_token_ids),
            frozenset() if request.ignore_eos else self.eos,
            config.seed,  # 0 if the request has none
            config.top_k != 1,
            output.logprobs if scored else None,
            None,
            request.include_stop_token_in_output,
        )

    def scores(self, ids: Sequence[int], tops: int | None) -> list[Any]:
        """TokenLogprob: all that the engine knows, in which the chosen token may be missing; it is 0 then."""
        if tops is None:
            return []
        found = []
        for id in ids:
            pairs = dict(best(id, tops))
            top = [self.messages.TopLogprob(token_id=one, logprob=value) for one, value in pairs.items()]
            found.append(self.messages.TokenLogprob(token_id=id, logprob=pairs.get(id, 0.0), top_logprobs=top))
        return found

    def chunk(self, id: str, asked: Asked | None, ids: Sequence[int], **more: Any) -> Message:
        more.pop("is_first", None)
        logprobs = self.scores(ids, asked.tops) if asked else []
        body = self.messages.GenerateStreamChunk(token_ids=ids, logprobs=logprobs, **more)
        return self.messages.GenerateResponse(request_id=id, chunk=body)

    def complete(self, id: str, asked: Asked | None, ids: Sequence[int], finish: str, **more: Any) -> Message:
        """The last message has all ids."""
        more.pop("last", None)
        matched = more.pop("matched", None)
        finish = "cancelled" if finish == "abort" else finish
        body = self.messages.GenerateComplete(output_token_ids=ids, finish_reason=finish, **more)
        if matched is not None and (asked is None or matched in asked.stops):
            body.matched_token_id = matched
        if asked is not None:
            body.logprobs.extend(self.scores(ids, asked.tops))
        return self.messages.GenerateResponse(request_id=id, complete=body)

    def abort(self, request: Any) -> Message:
        self.aborted.append(request.request_id)
        found = self.stop_generating(lambda id: id == request.request_id)
        return self.messages.AbortResponse(success=found)


SERVERS: dict[str, type[GrpcServer]] = {"vllm": VllmServer, "sglang": SglangServer, "trtllm": TrtLlmServer}
"""By the value of option.base_url_kind."""


@contextlib.contextmanager
def listening(kind: str = "vllm", *scripts: Sequence[Any]) -> Iterator[GrpcServer]:
    server = SERVERS[kind]()
    server.scripts = list(scripts)
    server.start()
    try:
        yield server
    finally:
        server.stop()


# -- as a program ------------------------------------------------------------------------------------------------------


PROGRAMS = {
    "vllm.entrypoints.grpc_server": ("vllm", ("--model", "--max-model-len")),
    "sglang.launch_server": ("sglang", ("--model-path", "--context-length")),
    "tensorrt_llm.commands.serve": ("trtllm", ("--max_seq_len",)),
}
"""Module -> its kind, and flags of it."""


def main() -> None:
    """Be `python -m MODULE ...` until SIGTERM or SIGINT, which have handlers once it listens.

    A flag that the module lacks ends it. SIGUSR1 ends vLLM's EngineCore, which the server outlives.
    """
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not {"PYTHONPATH", "PYTHONHOME", "LMI_API_KEY"} & {*os.environ}
    assert not [*Path.cwd().glob("*.py")], "modules of others come first before Python 3.11"
    python, module, *given = sys.argv[1:]
    kind, (*flags, context) = PROGRAMS[module]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    if kind == "trtllm":
        parser.add_argument("command", choices=["serve"])
        parser.add_argument("model")
    for flag in flags:
        parser.add_argument(flag, dest="model", required=True)
    if kind != "vllm":
        parser.add_argument({"sglang": "--grpc-mode", "trtllm": "--grpc"}[kind], action="store_true", required=True)
    parser.add_argument("--host", choices=["127.0.0.1"], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--trust_remote_code" if kind == "trtllm" else "--trust-remote-code", action="store_true")
    parser.add_argument(context, dest="context", type=int, default=64)
    if kind != "trtllm":
        parser.add_argument("--dtype", choices=["auto", "half", "float16", "bfloat16", "float", "float32"])
    arguments = parser.parse_args(given)
    assert python == "-m"
    assert (Path(arguments.model) / "config.json").is_file()
    server = SERVERS[kind]()
    server.port = arguments.port
    server.model["max_seq_len" if kind == "trtllm" else "max_context_length"] = arguments.context
    ended = threading.Event()

    def lose_core(*_: object) -> None:
        server.health = {"healthy": False, "message": "Engine is not alive"}
        server.script = lambda id: [Status(grpc.StatusCode.INTERNAL, "EngineCore encountered an issue.")]

    signal.signal(signal.SIGUSR1, lose_core)
    server.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    server.stop()
