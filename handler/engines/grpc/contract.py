"""The base class of the gRPC contracts. A contract is the protocol of one kind of server, published in smg-grpc-proto.

Most messages are the same in two of the three contracts. This module contains the code that the contracts share.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from handler.core.media import MEDIA
from handler.core.values import Extras, Finish, Sampling
from handler.engines.base import (
    JSON_TAGS,
    Alternatives,
    Capabilities,
    EngineRequest,
    EngineStatistics,
    Rule,
    arguments,
    first_stop,
)
from handler.engines.remote.servers import Failed, Part, ResponseCheck, Software, score, with_ends
from handler.engines.remote.sglang import SglangFlags

MOST_BYTES = 1 << 22
"""Maximum size of a message in bytes. A prompt is refused if its log-probabilities would not fit."""
_BYTES_A_SCORE = 12  # of an encoded id with its log-probability
_NAME = 1000  # characters of a model's name

UNREADABLE = "sent a message that cannot be read"
NO_FIELD = "the servers' gRPC contract has no field for it"
REASONS = {
    "num_beams": "beam search cannot be streamed",
    "typical_p": "typical decoding is not supported",
    "return_context_logits": "logits cannot be streamed",
    "return_generation_logits": "logits cannot be streamed",
    "allowed_token_ids": NO_FIELD,
    "cache_salt": NO_FIELD,
}
"""Maps each Sampling field that no contract supports to the reason."""


class GrpcModel(NamedTuple):
    """A server's description of its model.

    Attributes:
        max_tokens: maximum number of tokens in the prompt and the response together; None if not reported.
        vocabulary: number of token ids in the model's vocabulary; None if not reported.
        eos: ids that end a response; empty if not reported.
        num_pieces: number of ids in the tokenizer vocabulary, excluding added tokens; None if not reported.
        generates: whether the model generates text; otherwise it computes embeddings.
        dimensions: number of dimensions of an embedding.
        normalizes: whether embeddings are normalized to length 1.
        constrained_decoding_start: where the server starts to enforce structured output: `first_token`,
            `after_reasoning` (both vLLM's), or "" if not reported.
        flags: flags of SGLang's server.
    """

    name: str
    max_tokens: int | None
    vocabulary: int | None = None
    eos: frozenset[int] = frozenset()
    num_pieces: int | None = None
    generates: bool = True
    dimensions: int = 0
    normalizes: bool = False
    constrained_decoding_start: str = ""
    flags: SglangFlags = SglangFlags()


class Chunk(NamedTuple):
    """The tokens in one message of a response."""

    ids: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    tops: Sequence[Alternatives] = ()
    prompt_logprobs: Sequence[float | None] = ()
    prompt_tops: Sequence[Alternatives] = ()
    num_cached: int = 0


class Contract:
    """The gRPC protocol of one kind of server.

    Attributes:
        software: the servers' name, and what messages to clients say of them.
        module: name of the generated module, without `_pb2`.
        service: name of the service in that module.
        table: rules for the fields of SamplingParams.
        reasons, limits, supports: as in `Capabilities`.
        no_adapters: why requests cannot use a LoRA adapter.
        no_media: why requests cannot contain images or audio.
        no_embeddings: why the server cannot compute embeddings; "" if it can.
        pools: pooling modes that the server supports, named as in a model's files.
        reports_load: whether the server implements GetLoads.
        command: part of the command that starts a server: the words after `python -m` and before the model.
        context_flag: the server's flag that limits the number of tokens in the prompt and the response together.
        trust_flag: the server's flag that allows code from the model's directory to run.
        dtype_flag: the server's flag for the precision; None if it has no such flag.
    """

    software: Software
    module: str
    service: str
    table: ClassVar[Mapping[str, Rule]]
    supports: frozenset[str]
    reasons: ClassVar[Mapping[str, str]]
    limits: ClassVar[Mapping[str, float]] = {}
    no_adapters: str
    no_media: str
    no_embeddings = ""
    pools: ClassVar[Set[str]] = frozenset({"cls", "last", "mean"})
    reports_load = True
    command: Sequence[str]
    context_flag: str
    trust_flag = "--trust-remote-code"
    dtype_flag: str | None = "--dtype"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            self.supports,
            {**REASONS, **self.reasons},
            limits=self.limits,
            no_adapters=self.no_adapters,
            no_media=dict.fromkeys(MEDIA, self.no_media),
            structural_tags=JSON_TAGS,
        )

    @cached_property
    def messages(self) -> Any:
        return importlib.import_module(f"smg_grpc_proto.generated.{self.module}_pb2")

    def stub(self, channel: Any) -> Any:
        module = importlib.import_module(f"smg_grpc_proto.generated.{self.module}_pb2_grpc")
        return getattr(module, f"{self.service}Stub")(channel)

    def request(self, id: str, ids: Sequence[int], sampling: Sampling) -> Any:
        """Return a Generate message. It also contains neutral values, because the server may have different defaults.

        Raises:
            ValueError: the server does not support a value in `sampling`; the exception says why.
        """
        return self.messages.GenerateRequest(
            request_id=id,
            tokenized=self.messages.TokenizedInput(input_ids=ids),
            sampling_params=self.messages.SamplingParams(n=1, **arguments(self.table, sampling)),
            stream=True,
            **self.beside(sampling),
        )

    def misses_stops(self, sampling: Sampling) -> bool:
        """Return whether this engine must look for stop tokens in a response because the server does not."""
        return False

    def beside(self, sampling: Sampling) -> dict[str, Any]:
        """Return the fields of a Generate message that are not in its SamplingParams."""
        return {}

    def embed(self, id: str, ids: Sequence[int]) -> Any:
        """Return an Embed message."""
        return self.messages.EmbedRequest(request_id=id, tokenized=self.messages.TokenizedInput(input_ids=ids))

    def embedding_flags(self, mode: str) -> Sequence[str]:
        """Return the flags for a server that computes embeddings.

        Args:
            mode: pooling mode, named as in the model's files.
        """
        return ()

    def abort(self, id: str) -> Any:
        """Return an Abort message."""
        return self.messages.AbortRequest(request_id=id)

    def model(self, info: Any) -> GrpcModel:
        """Read the response to GetModelInfo.

        Raises:
            Failed: the response does not name a model. Only TensorRT-LLM's contract checks this.
        """
        name = info.served_model_name or info.model_path
        eos = frozenset(info.eos_token_ids)
        most, vocabulary = max(info.max_context_length, 0) or None, max(info.vocab_size, 0) or None
        return GrpcModel(name[:_NAME], most, vocabulary, eos, generates=info.is_generation)

    def with_server_info(self, model: GrpcModel, info: Any) -> GrpcModel:
        """Add what the response to GetServerInfo says."""
        return model._replace(constrained_decoding_start=getattr(info, "constrained_decoding_start", ""))

    def refusal(self, flags: SglangFlags, message: Any) -> str:
        """Return why a server with these flags would ignore a part of a Generate message, or "" if it would not."""
        return ""

    def unhealthy_reason(self, health: Any) -> str:
        """Read the response to HealthCheck. Return why the server is unhealthy, or "" if it is healthy."""
        return "" if health.healthy else health.message or "it gives no reason"

    def chunk(self, response: Any, num_tops: int, num_prompt_tops: int) -> Chunk:
        """Read a message of a response. Do not call this for the last message, which repeats ids."""
        chunk = response.chunk
        scores, prompt = chunk.output_logprobs, chunk.input_logprobs
        return Chunk(
            chunk.token_ids,
            scores.token_logprobs,
            _tops(scores.top_logprobs, num_tops),
            [entry.value if entry.HasField("value") else None for entry in prompt.token_logprobs],
            _tops(prompt.top_logprobs, num_prompt_tops),
            chunk.cached_tokens,
        )


def _tops(lists: Any, count: int) -> list[Alternatives]:
    return [ranked(zip(entry.token_ids, entry.values, strict=True), count) for entry in lists] if count else []


def statistics(loads: Sequence[Any]) -> EngineStatistics:
    """Combine the loads that the servers reported for all ranks in response to GetLoads."""
    usage = [min(max(load.token_usage, 0.0), 1.0) for load in loads if math.isfinite(load.token_usage)]
    if not usage:
        return EngineStatistics()
    return EngineStatistics(sum(max(load.num_waiting_reqs, 0) for load in loads), sum(usage) / len(usage))


def ranked(pairs: Any, count: int) -> Alternatives:
    """Return the `count` most likely ids with their log-probabilities, best first.

    Servers add the chosen token to the most likely tokens, so they may return one more token than requested.
    """
    return sorted(pairs, key=lambda pair: -pair[1])[:count]


class GrpcCall(ResponseCheck):
    """A request to a server, with the state needed to read the response.

    Args:
        most_id: upper limit for token ids; all ids are smaller.
        eos: ids that end a response.

    Attributes:
        message: the Generate message; each attempt has a new request id.
        stopped: whether this engine has ended the response at a stop token. The server keeps generating until the
            request is aborted.

    Raises:
        ValueError: the server does not support the request.
    """

    def __init__(self, contract: Contract, request: EngineRequest, most_id: int, eos: frozenset[int]) -> None:
        check_size(request)
        super().__init__(request.sampling)
        self._contract = contract
        self._request, self._sampling = request, request.sampling
        self._ends = self._stops if self._sampling.ignore_eos else self._stops | eos
        sampling = with_ends(request.sampling, eos)
        self.message = contract.request("", request.ids, sampling)
        self._most_id = most_id
        self._last = -1
        self._missed_stops = self._ends if contract.misses_stops(sampling) else frozenset()
        self.stopped = False

    @property
    def awaits_finish_reason(self) -> bool:
        """Whether only the message with the finish reason is still missing, as the last token has probably arrived."""
        return self._num_ids == self._most or self._last in self._ends

    def read(self, response: Any, part: Part) -> bool:
        """Read a message and add its tokens to `part`. Return whether it contains tokens or the end of the response.

        Raises:
            Failed: the message does not belong to this response, or cannot be read.
        """
        if response is None:
            raise Failed(UNREADABLE)
        sampling = self._sampling
        if getattr(response, "request_id", self.message.request_id) != self.message.request_id:
            raise Failed("sent another request's message")
        if response.HasField("complete"):
            part.finish = self._finish(response.complete)
            return True
        try:
            chunk = self._contract.chunk(response, sampling.top_logprobs, sampling.prompt_top_logprobs)
            if chunk.ids:
                self._take(chunk, part)
        except ValueError as error:
            raise Failed(UNREADABLE, str(error)) from None
        return bool(chunk.ids)

    def _take(self, chunk: Chunk, part: Part) -> None:
        ids = list(chunk.ids)
        if max(ids) >= self._most_id:
            raise Failed(
                "sent an id outside the vocabulary", f"id {max(ids)}, but the vocabulary has {self._most_id} ids"
            )
        tops, logprobs = [*map(self._checked, chunk.tops)], chunk.logprobs
        first = not self._num_ids
        if (at := first_stop(ids, self._missed_stops, self._num_ids, self._sampling)) is not None:
            ids, tops, logprobs = ids[: at + 1], tops[: at + 1], logprobs[: at + 1]
            part.finish, self.stopped = self.finish("stop", ids[-1]), True
        if self._sampling.prompt_logprobs and first:
            self._take_prompt(chunk, part)
        self.take(part, ids, logprobs, tops)
        if chunk.num_cached > 0 and first and not self._request.goes_on:
            part.extras = Extras(num_cached_tokens=min(chunk.num_cached, len(self._request.ids)))
        self._last = ids[-1]

    def _take_prompt(self, chunk: Chunk, part: Part) -> None:
        count = len(self._request.ids)
        tops = self._sampling.prompt_top_logprobs
        if len(chunk.prompt_logprobs) != count or (tops and len(chunk.prompt_tops) != count):
            raise ValueError("log-probabilities of the prompt are missing")
        scores = chunk.prompt_logprobs[1:]
        part.prompt_logprobs = [None, *(None if logprob is None else score(logprob) for logprob in scores)]
        if tops:
            part.prompt_tops = [(), *map(self._checked, chunk.prompt_tops[1:])]

    def _checked(self, tops: Alternatives) -> Alternatives:
        if any(id >= self._most_id for id, _ in tops):
            raise ValueError("an alternative is outside the vocabulary")
        return [(id, score(logprob)) for id, logprob in tops]

    def _finish(self, complete: Any) -> Finish:
        has_id = complete.HasField("matched_token_id")
        return self.finish(complete.finish_reason, complete.matched_token_id if has_id else self._last)


def check_size(request: EngineRequest) -> None:
    """Raise ValueError if the log-probabilities of a prompt are too large for a message."""
    sampling = request.sampling
    size = len(request.ids) * (2 + sampling.prompt_top_logprobs) * _BYTES_A_SCORE
    if sampling.prompt_logprobs and size > MOST_BYTES:
        raise ValueError(
            f"prompt_logprobs: the values of {len(request.ids)} tokens do not fit into a message of {MOST_BYTES} bytes"
        )
