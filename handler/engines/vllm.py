"""vLLM: its synchronous LLMEngine, stepped in the worker's process, with its core in a further one.

The front half that runs here only passes ids: vLLM makes no text (`detokenize=False`), and what it says of a request
comes as differences.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from handler.core import Adapter, Finish, Sampling
from handler.engines.base import NO_LORA, Capabilities, EngineConfig, EngineInfo, Output, Step
from handler.engines.beam import BeamSearch
from handler.engines.checkpoint import eos_ids, load_tokenizer, prepared
from handler.engines.family import end_with_children, end_with_this_process
from handler.engines.turns import Turns
from handler.engines.vllm_arguments import engine_arguments, guide_arguments, sampling_arguments
from handler.engines.vllm_results import Running, output_of, ranked

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
        self._adapters: OrderedDict[int, None] = OrderedDict()  # ids of those in memory, as far as we know
        self._max_adapters = int(arguments.get("max_cpu_loras") or arguments.get("max_loras") or 0)
        self._turns: Turns | None = None
        if arguments.get("enable_lora") and current_platform.is_cpu():
            # Measured with 0.32: in a batch with others, a request that names no adapter gets one's weights.
            self._turns = Turns()
        self._late: list[Output] = []  # of requests that failed when their turn came
        self._running: dict[str, Running] = {}
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
            start = partial(self._search, _Beams(key, ids, adapter, search))
        else:
            plain = not sampling.top_logprobs and not sampling.prompt_logprobs
            running = Running(key, frozenset(sampling.stop_token_ids), sampling.top_logprobs, plain)
            start = partial(self._run, running, ids, self._params(sampling), adapter)
        if self._turns is None:
            start()
        else:
            self._turns.enter(key, adapter is not None, start)

    def _run(self, running: Running, ids: Sequence[int], params: Any, adapter: Adapter | None) -> None:
        id = str(running.key)
        self._submit(id, ids, params, adapter)
        self._running[id] = running

    def _search(self, beams: _Beams) -> None:
        self._searches[beams.key] = beams
        try:
            self._continue(beams)
        except Exception:
            self._drop(beams.key)
            raise

    def _params(self, sampling: Sampling) -> Any:
        arguments = sampling_arguments(sampling)
        if sampling.guide is not None:
            from vllm.sampling_params import StructuredOutputsParams

            arguments["structured_outputs"] = StructuredOutputsParams(**guide_arguments(sampling.guide))
        from vllm.sampling_params import RequestOutputKind

        return self._vllm.SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)

    def _submit(self, id: str, ids: Sequence[int], params: Any, adapter: Adapter | None) -> None:
        lora = None
        if adapter is not None:
            if adapter.id not in self._adapters:
                self.load_adapter(adapter)  # vLLM would load it too, but die of one that is broken
            self._adapters.move_to_end(adapter.id)
            lora = _lora_request(adapter)
        self._engine.add_request(id, self._vllm.inputs.tokens_input(list(ids)), params, lora_request=lora)

    def cancel(self, key: int) -> None:
        self._drop(key)
        self._leave_turn(key)

    def _drop(self, key: int) -> None:
        if self._running.pop(str(key), None) is not None:
            self._engine.abort_request([str(key)])
        search = self._searches.pop(key, None)
        if search is not None and search.waiting:
            for id in search.waiting:
                self._by_request.pop(id, None)
            self._engine.abort_request(list(search.waiting))

    def _leave_turn(self, key: int) -> None:
        if self._turns is not None:
            failed = self._turns.leave(key)
            self._late += [Output(late, (), (), Finish.ERROR, error=str(error)) for late, error in failed]

    def step(self) -> Step:
        late, self._late = self._late, []
        step = Step([], [], [], late)
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
            others.append(output_of(running, result))
            if output.finish_reason is not None:
                del self._running[id]
        for ended in others:
            if ended.finish is not None:
                self._leave_turn(ended.key)
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
        beams.found[beams.waiting.pop(id)] = ranked(output.logprobs[0])
        if beams.waiting:
            return []
        if not beams.search.advance(beams.found):
            try:
                self._continue(beams)
            except Exception as error:  # a beam that has outgrown the model: this search ends, the others go on
                self._drop(beams.key)
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
        self._adapters[adapter.id] = None
        while len(self._adapters) > self._max_adapters:  # vLLM, too, forgets the one that was used the longest ago
            self._adapters.popitem(last=False)

    def drop_adapter(self, adapter: Adapter) -> None:
        self._engine.remove_lora(adapter.id)
        self._adapters.pop(adapter.id, None)

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


def prepare(model_id: str | None, dtype: str, options: Mapping[str, Any]) -> Path:
    return prepared(model_id, options)


def capabilities(config: EngineConfig) -> Capabilities:
    if config.options.get("enable_lora"):
        # Measured with 0.32: in company of other requests such a one brings the whole engine down.
        return Capabilities({**_LACKS, "prompt_logprobs": "it cannot score prompts while it serves LoRA adapters"})
    return Capabilities(_LACKS, NO_LORA)


def load(config: EngineConfig) -> Vllm:
    return Vllm(config)
