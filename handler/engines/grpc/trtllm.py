"""TensorRT-LLM's contract: trtllm_service.proto, as in `trtllm-serve --grpc` 1.3 (tensorrt_llm/grpc/smg)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from handler.core.values import Sampling
from handler.engines.base import PENALTIES, Rule, arguments, drawn_seed, regex_of, unless_neutral
from handler.engines.grpc.contract import Chunk, Contract, GrpcModel, ranked
from handler.engines.remote.servers import Failed, Software, structured_output_of

_COLDEST = 1e-5  # lower temperatures become greedy decoding, as logits divided by them may be infinite


def _choice(sampling: Sampling) -> dict[str, Any]:
    greedy = not sampling.do_sample or sampling.temperature < _COLDEST or sampling.top_p == 0 or sampling.top_k == 1
    return {"temperature": 1.0, "top_p": 1.0, "top_k": 1} if greedy else arguments(_DRAWN, sampling)


_DRAWN: Mapping[str, Rule] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": drawn_seed,
}
"""Rules for the fields that matter only when sampling."""

_TABLE: Mapping[str, Rule] = {
    "do_sample": _choice,
    "min_new_tokens": unless_neutral("min_new_tokens", "min_tokens"),
    **PENALTIES,
    "no_repeat_ngram_size": "no_repeat_ngram_size",
}
"""Rules for all other fields. With `generation_config: auto`, the server takes `min_p` and `no_repeat_ngram_size` from
the model's generation_config.json if a request omits them. So these two are sent even if they are neutral.
"""

_OF_THE_REQUEST = frozenset(
    {"max_new_tokens", "ignore_eos", "stop_token_ids", "logprobs", "top_logprobs", "structured_output"}
)
"""Fields that are set in the request itself, not in its sampling configuration."""

_GUIDES = {
    "json_schema": "GUIDE_TYPE_JSON_SCHEMA",
    "json_object": "GUIDE_TYPE_JSON",
    "regex": "GUIDE_TYPE_REGEX",
    "choice": "GUIDE_TYPE_REGEX",
    "grammar": "GUIDE_TYPE_EBNF_GRAMMAR",
    "structural_tag": "GUIDE_TYPE_STRUCTURAL_TAG",
}


class TrtLlmContract(Contract):
    software = Software("trtllm", "; without guided_decoding_backend, it never does so")
    module = "trtllm_service"
    service = "TrtllmService"
    no_adapters = "TensorRT-LLM's gRPC contract identifies adapters by numbers of its own"
    no_media = "TensorRT-LLM's gRPC server has not been tested with media"
    no_embeddings = "TensorRT-LLM's gRPC server does not implement Embed"
    reports_load = False
    command = ("tensorrt_llm.commands.serve", "serve", "--grpc")
    context_flag = "--max_seq_len"
    trust_flag = "--trust_remote_code"
    dtype_flag = None
    supports = frozenset({*_TABLE, *_DRAWN, *_OF_THE_REQUEST})
    reasons: ClassVar[Mapping[str, str]] = {
        "bad_sequences": "TorchSampler cannot forbid sequences of tokens",
        "bad_token_ids": "TorchSampler cannot forbid tokens",
        "logit_bias": "the servers' gRPC contract needs a bias for every token of the vocabulary",
        "prompt_logprobs": "the server sends them only with the response's last message",
        "cache_salt": "the server drops the contract's cache_salt_id",
    }

    def misses_stops(self, sampling: Sampling) -> bool:
        """Return whether the server would miss stop tokens.

        With ignore_eos, TensorRT-LLM passes no stop tokens to its executor (tensorrt_llm/executor/base_worker.py). A
        minimum length suppresses only the model's own end token.
        """
        return sampling.ignore_eos or sampling.min_new_tokens > 0

    def request(self, id: str, ids: Sequence[int], sampling: Sampling) -> Any:
        scored = sampling.logprobs or sampling.top_logprobs
        return self.messages.GenerateRequest(
            request_id=id,
            tokenized=self.messages.TokenizedInput(input_token_ids=ids),
            sampling_config=self.messages.SamplingConfig(
                beam_width=1, num_return_sequences=1, **arguments(_TABLE, sampling)
            ),
            output_config=self.messages.OutputConfig(
                logprobs=max(sampling.top_logprobs, 1) if scored else None,  # 0 means no log-probabilities
                exclude_input_from_output=True,
            ),
            max_tokens=max(sampling.max_new_tokens, 1),
            streaming=True,
            stop_token_ids=() if self.misses_stops(sampling) else sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            include_stop_token_in_output=True,
            guided_decoding=self._guide(sampling),
        )

    def _guide(self, sampling: Sampling) -> Any:
        rule = structured_output_of(sampling)
        if rule is None:
            return None
        params = self.messages.GuidedDecodingParams
        # The server ignores an empty guide.
        guide = regex_of(rule.value) if rule.kind == "choice" else rule.value or "{}"
        return params(guide_type=params.GuideType.Value(_GUIDES[rule.kind]), guide=guide)

    def model(self, info: Any) -> GrpcModel:
        if not info.model_id:
            raise Failed("does not report its model")
        return GrpcModel(info.model_id, max(info.max_seq_len, 0) or None, num_pieces=max(info.vocab_size, 0) or None)

    def unhealthy_reason(self, health: Any) -> str:
        return "" if health.status == "OK" else health.status or "it gives no reason"

    def chunk(self, response: Any, num_tops: int, num_prompt_tops: int) -> Chunk:
        chunk = response.chunk
        tops = [[(top.token_id, top.logprob) for top in token.top_logprobs] for token in chunk.logprobs]
        return Chunk(
            chunk.token_ids,
            [
                _chosen_logprob(token.token_id, token.logprob, best)
                for token, best in zip(chunk.logprobs, tops, strict=True)
            ],
            [ranked(best, num_tops) for best in tops] if num_tops else (),
            num_cached=chunk.cached_tokens,
        )


def _chosen_logprob(id: int, logprob: float, best: Sequence[tuple[int, float]]) -> float | None:
    """Return a token's log-probability, or None if the server returned 0 because it does not know the value."""
    return logprob if not best or any(id == top_id for top_id, _ in best) else None


KINDS = {"trtllm": TrtLlmContract()}
