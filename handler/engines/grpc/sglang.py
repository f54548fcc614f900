"""SGLang's contract: sglang_scheduler.proto, as implemented by smg-grpc-servicer 0.14 (smg_grpc_servicer/sglang)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from handler.core.values import Sampling
from handler.engines.base import Rule
from handler.engines.grpc.contract import NO_FIELD, Contract, GrpcModel
from handler.engines.remote.sglang import DRAWN, SOFTWARE, TABLE, SglangFlags, guide, misses_stops, version_of

_TABLE: Mapping[str, Rule] = {**TABLE, "structured_output": lambda sampling: guide(sampling, "ebnf_grammar")}

_RESERVED = 6  # tokens of the context that SGLang keeps back (managers/tp_worker.py)
_OF_THE_REQUEST = frozenset({"logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"})
"""Fields that are set in the request itself, not in SGLang's sampling parameters."""


class SglangContract(Contract):
    software = SOFTWARE
    module = "sglang_scheduler"
    service = "SglangScheduler"
    table = _TABLE
    no_adapters = "SGLang's gRPC server (smg-grpc-servicer 0.14) does not load adapters"
    no_media = "SGLang's gRPC API accepts only preprocessed pixels"
    command = ("sglang.launch_server", "--grpc-mode", "--model-path")
    context_flag = "--context-length"
    pools = frozenset({"cls", "last"})  # SGLang's models choose the mode, and none uses the mean (models/bert.py, 2026)
    supports = frozenset({*_TABLE, *DRAWN, *_OF_THE_REQUEST})
    reasons: ClassVar[Mapping[str, str]] = {
        "seed": NO_FIELD,
        "no_repeat_ngram_size": "repeated n-grams cannot be forbidden",
        "bad_sequences": NO_FIELD,
    }

    def model(self, info: Any) -> GrpcModel:
        """Read the response to GetModelInfo.

        The Python servicer reports the size of the KV cache as the context, which may be larger. SGLang silently
        shortens responses that exceed either, so the limit for prompts applies to the prompt and the response.
        """
        model = super().model(info)
        limits = [limit for limit in (info.max_context_length - _RESERVED, info.max_req_input_len) if limit > 0]
        return model._replace(max_tokens=min(limits, default=None)) if model.generates else model

    def with_server_info(self, model: GrpcModel, info: Any) -> GrpcModel:
        """Add the server's flags, which its servicer reports as a Struct of all arguments."""
        return model._replace(flags=SglangFlags.read(dict(info.server_args), version_of(info.sglang_version)))

    def refusal(self, flags: SglangFlags, message: Any) -> str:
        parameters = message.sampling_params
        guide_name = parameters.WhichOneof("constraint")
        return flags.refusal(
            min_p=parameters.min_p,
            min_tokens=parameters.min_new_tokens,
            repetition_penalty=parameters.repetition_penalty,
            guide=guide_name,
        )

    def misses_stops(self, sampling: Sampling) -> bool:
        return misses_stops(sampling)

    def beside(self, sampling: Sampling) -> dict[str, Any]:
        tops = max(sampling.top_logprobs, sampling.prompt_top_logprobs if sampling.prompt_logprobs else 0)
        return {
            "return_logprob": bool(sampling.logprobs or sampling.prompt_logprobs or tops),
            "logprob_start_len": 0 if sampling.prompt_logprobs else -1,
            "top_logprobs_num": tops,
        }

    def embed(self, id: str, ids: Sequence[int]) -> Any:
        message = super().embed(id, ids)
        message.token_type_ids.extend([0] * len(ids))  # encoder models fail without them
        return message

    def embedding_flags(self, mode: str) -> Sequence[str]:
        return ("--is-embedding",)


KINDS = {"sglang": SglangContract()}
