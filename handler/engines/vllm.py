"""vLLM: its synchronous LLMEngine, stepped in the worker's process, with its core in a further one.

The front half that runs here only passes ids: vLLM makes no text (`detokenize=False`), and what it says of a request
comes as differences.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from handler.core import Adapter, Finish, Sampling
from handler.engines.base import NO_LORA, Capabilities, EngineConfig, EngineInfo, Output, Step
from handler.engines.beam import BeamSearch
from handler.engines.checkpoint import eos_ids, load_tokenizer, prepared
from handler.engines.family import end_with_children, end_with_this_process
from handler.engines.vllm_arguments import engine_arguments, guide_arguments, sampling_arguments

__all__ = ["Vllm", "capabilities", "load", "load_tokenizer", "prepare"]

_LACKS = {
    "typical_p": "it has no typical decoding",
    "no_repeat_ngram_size": "it cannot forbid repeated n-grams",
    "bad_token_ids": "it forbids words, not token ids",
    "return_context_logits": "it does not give its logits",
    "return_generation_logits": "it does not give its logits",
}

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing is told to anybody
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Its own processes must not be forks of this one, which has threads.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@dataclass
class _Running:
    key: int
    stops: frozenset[int]  # ids that end it as STOP, not as EOS
    num_tops: int  # alternatives that were asked for
    plain: bool  # its outputs hold nothing but the chosen token


@dataclass
class _Beams:
    """A beam search under way: every beam's next token is a request of vLLM's."""

    key: int
    ids: Sequence[int]
    adapter: Adapter | None
    search: BeamSearch
    steps: int = 0
    waiting: dict[str, int] | None = None  # vLLM's request ids -> the beam's place
    found: list[Sequence[tuple[int, float]]] | None = None


class Vllm:
    """See `engines.base.Engine`. vLLM's request ids are our keys as text, a beam's `key/step/beam`."""

    def __init__(self, config: EngineConfig) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if config.cache_gib:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.cache_gib)
        end_with_this_process()
        import vllm
        import vllm.inputs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        self._vllm = vllm
        arguments = engine_arguments(config, current_platform.device_count() or 1)
        if config.cache_gib and not current_platform.is_cpu():
            arguments["kv_cache_memory_bytes"] = config.cache_gib << 30
        self._engine: Any = LLMEngine.from_engine_args(vllm.EngineArgs(**arguments), enable_multiprocessing=True)
        self._leave = end_with_children()  # it notices its core's death only when it sends something
        self._running: dict[str, _Running] = {}
        self._searches: dict[int, _Beams] = {}
        self._by_request: dict[str, _Beams] = {}
        assert config.model is not None
        self._eos = eos_ids(config.model)
        model = self._engine.model_config
        self.info = EngineInfo(
            name="vllm",
            version=vllm.__version__,
            device=str(current_platform.device_name),
            dtype=str(model.dtype).removeprefix("torch."),
            max_total_tokens=model.max_model_len,
        )
        self._warm_up()

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, key: int, ids: Sequence[int], sampling: Sampling, adapter: Adapter | None = None) -> None:
        if sampling.num_beams > 1:
            search = BeamSearch(sampling, () if sampling.ignore_eos else self._eos)
            self._searches[key] = beams = _Beams(key, ids, adapter, search)
            try:
                self._continue(beams)
            except Exception:
                self.cancel(key)
                raise
            return
        self._submit(str(key), ids, self._params(sampling), adapter)
        plain = not sampling.top_logprobs and not sampling.prompt_logprobs
        self._running[str(key)] = _Running(key, frozenset(sampling.stop_token_ids), sampling.top_logprobs, plain)

    def _params(self, sampling: Sampling) -> Any:
        arguments = sampling_arguments(sampling)
        if sampling.guide is not None:
            from vllm.sampling_params import StructuredOutputsParams

            arguments["structured_outputs"] = StructuredOutputsParams(**guide_arguments(sampling.guide))
        from vllm.sampling_params import RequestOutputKind

        return self._vllm.SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)

    def _submit(self, id: str, ids: Sequence[int], params: Any, adapter: Adapter | None) -> None:
        lora = _lora_request(adapter) if adapter is not None else None
        self._engine.add_request(id, self._vllm.inputs.tokens_input(list(ids)), params, lora_request=lora)

    def cancel(self, key: int) -> None:
        if self._running.pop(str(key), None) is not None:
            self._engine.abort_request([str(key)])
        search = self._searches.pop(key, None)
        if search is not None and search.waiting:
            for id in search.waiting:
                self._by_request.pop(id, None)
            self._engine.abort_request(list(search.waiting))

    def step(self) -> Step:
        step = Step([], [], [], [])
        if not self._engine.has_unfinished_requests():  # it would wait for ever
            return step
        keys, ids, logprobs, others = step
        for result in self._engine.step():
            id = result.request_id
            output = result.outputs[0]
            running = self._running.get(id)
            if running is None:
                if (beams := self._by_request.pop(id, None)) is not None:
                    others += self._beam_output(beams, id, output)
                continue
            tokens = output.token_ids
            if output.finish_reason is None and len(tokens) == 1 and running.plain:  # nearly every one
                token = tokens[0]
                keys.append(running.key)
                ids.append(token)
                logprobs.append(output.logprobs[0][token].logprob)
                continue
            others.append(_output(running, result))
            if output.finish_reason is not None:
                del self._running[id]
        return step

    # -- beams ---------------------------------------------------------------------------------------------------

    def _continue(self, beams: _Beams) -> None:
        """Ask for what may come after each beam; the prefix cache has all but the last token."""
        search = beams.search
        beams.steps += 1
        beams.waiting = {f"{beams.key}/{beams.steps}/{index}": index for index in range(len(search.beams))}
        beams.found = [()] * len(search.beams)
        one = replace(search.sampling, num_beams=1, max_new_tokens=1, top_logprobs=search.width, stop_token_ids=())
        for id, index in beams.waiting.items():
            self._by_request[id] = beams
            self._submit(id, [*beams.ids, *search.beams[index].ids], self._params(one), beams.adapter)

    def _beam_output(self, beams: _Beams, id: str, output: Any) -> list[Output]:
        """What a beam's next token brings: nothing, until the search has ended."""
        assert beams.waiting is not None
        assert beams.found is not None
        beams.found[beams.waiting.pop(id)] = _ranked(output.logprobs[0])
        if beams.waiting:
            return []
        if not beams.search.advance(beams.found):
            try:
                self._continue(beams)
            except Exception as error:  # a beam that has outgrown the model: this search ends, the others go on
                self.cancel(beams.key)
                return [Output(beams.key, (), (), Finish.ERROR, error=str(error))]
            return []
        del self._searches[beams.key]
        return [
            Output(beams.key, beam.ids, beam.logprobs, beam.finish, sequence)
            for sequence, beam in enumerate(beams.search.best())
        ]

    # -- adapters ------------------------------------------------------------------------------------------------

    def load_adapter(self, adapter: Adapter) -> None:
        self._engine.add_lora(_lora_request(adapter))

    def drop_adapter(self, adapter: Adapter) -> None:
        self._engine.remove_lora(adapter.id)

    def close(self) -> None:
        self._leave()
        self._engine.engine_core.shutdown()

    def _warm_up(self) -> None:
        """The first step compiles and allocates; the first client must not wait for that."""
        self.add(0, [min(self._eos, default=0)], Sampling(max_new_tokens=2, ignore_eos=True))
        while self._running:
            self.step()


def _lora_request(adapter: Adapter) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=f"{adapter.name}/{adapter.id}", lora_int_id=adapter.id, lora_path=adapter.path)


def _output(running: _Running, result: Any) -> Output:
    output = result.outputs[0]
    ids, finish = list(output.token_ids), _finish(output, running.stops)
    if finish is Finish.ERROR:
        return Output(running.key, (), (), finish, error=f"vLLM ended it as {output.finish_reason!r}")
    positions = output.logprobs or ()
    prompt = result.prompt_logprobs
    return Output(
        running.key,
        ids,
        [position[id].logprob for id, position in zip(ids, positions, strict=True)],
        finish,
        prompt_logprobs=_prompt_logprobs(result.prompt_token_ids, prompt) if prompt else None,
        tops=[_ranked(position)[: running.num_tops] for position in positions] if running.num_tops else None,
    )


def _finish(output: Any, stops: frozenset[int]) -> Finish | None:
    match output.finish_reason:
        case None:
            return None
        case "length":
            return Finish.LENGTH
        case (
            "stop"
        ):  # stop_reason is None or an id that the model's generation_config.json names, where it is an end token
            return Finish.STOP if output.token_ids and output.token_ids[-1] in stops else Finish.EOS
        case _:
            return Finish.ERROR


def _ranked(position: Mapping[int, Any]) -> list[tuple[int, float]]:
    """All ids of a position, the most likely first; the chosen one is among them, whatever its rank."""
    found = sorted(position.items(), key=lambda item: item[1].rank)
    return [(id, logprob.logprob) for id, logprob in found]


def _prompt_logprobs(ids: Sequence[int], positions: Sequence[Any]) -> list[float | None]:
    return [None if not found else found[id].logprob for id, found in zip(ids, positions, strict=True)]


def prepare(model_id: str | None, dtype: str, options: Mapping[str, Any]) -> Path:
    return prepared(model_id, options)


def capabilities(config: EngineConfig) -> Capabilities:
    if config.options.get("enable_lora"):
        # Measured with 0.32: in company of other requests such a one brings the whole engine down.
        return Capabilities({**_LACKS, "prompt_logprobs": "it cannot score prompts while it serves LoRA adapters"})
    return Capabilities(_LACKS, NO_LORA)


def load(config: EngineConfig) -> Vllm:
    return Vllm(config)
