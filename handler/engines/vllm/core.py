"""Starts vLLM's LLMEngine, whose core runs in a separate process, and converts the core's results to outputs."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from handler.core.values import Extras, Finish
from handler.engines.base import Alternatives, EngineConfig, EngineInfo, EngineStatistics, Output, Step, override
from handler.engines.process.supervisor import end_with_children, end_with_this_process
from handler.engines.vllm.arguments import construct, engine_arguments, environment, lmcache_environment
from handler.engines.vllm.inline_client import patch_sync_client


class CoreEngine:
    """The part of an `engines.base.Engine` that communicates with vLLM's core.

    Args:
        config: the engine's configuration.
        more: arguments of EngineArgs, which override arguments from the options. JSON objects are merged.

    Attributes:
        arguments: the arguments of EngineArgs.
    """

    def __init__(self, config: EngineConfig, **more: Any) -> None:
        os.environ.update(environment(config, os.environ))
        end_with_this_process()
        import vllm
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = engine_arguments(config, current_platform.device_count() or 1, cpu=current_platform.is_cpu())
        self.arguments = arguments = override(arguments, more)
        os.environ.update(lmcache_environment(config, os.environ, arguments["tensor_parallel_size"]))
        # With vLLM's default, 0, each replica would draw the same tokens, and so would an engine after a restart.
        arguments.setdefault("seed", random.getrandbits(31))
        # vLLM's default for the number of tokens in a step depends on this context.
        context = UsageContext.OPENAI_API_SERVER
        with patch_sync_client():
            # The core sends its statistics after each step. Without them, a long prompt would count as a hang.
            engine_args = vllm.EngineArgs(**construct({**arguments, "disable_log_stats": False}, vllm.EngineArgs))
            self._engine = LLMEngine.from_engine_args(engine_args, context, enable_multiprocessing=True)
        self._core = self._engine.engine_core
        self._results = self._engine.output_processor = Results()
        self._stop_watch = end_with_children()  # vLLM notices the core's death only when it sends a message
        self._statistics = Statistics()

    def interrupt_on(self, fd: int) -> bool:
        if not hasattr(self._core, "interrupt_on"):
            return False  # vLLM's own client cannot be interrupted
        self._core.interrupt_on(fd)
        return True

    def _submit_as(self, pending: Pending, prompt: Any, params: Any, **more: Any) -> None:
        """Submit a request to vLLM under the key of `pending`."""
        self._results.next = pending
        self._engine.add_request(str(pending.key), prompt, params, **more)

    def _abort(self, ids: Collection[str]) -> None:
        self._engine.abort_request(list(ids), internal=True)

    def _outputs(self) -> Sequence[Any]:
        """Wait for the core's next outputs. Return immediately if there are no requests, as no output would arrive."""
        if not self._results.pending:
            return ()
        step = self._core.get_output()
        if step.scheduler_stats is not None:
            self._statistics.add(step.scheduler_stats)
        outputs: Sequence[Any] = step.outputs
        return outputs

    def statistics(self) -> EngineStatistics:
        if self.arguments["disable_log_stats"]:
            return EngineStatistics()
        return self._statistics.report(idle=not self._results.pending, num_preemptions=self._results.num_preemptions)

    def close(self) -> None:
        self._stop_watch()
        self._core.shutdown()


def engine_info(engine: Any, seconds: float = 0.0) -> EngineInfo:
    """Return the engine's information. `seconds` is the measured duration of a step of one token."""
    import vllm
    from vllm.platforms import current_platform

    model = engine.model_config
    # A GPU computes a full step in hardly more time than a step of one token.
    most = engine.vllm_config.scheduler_config.max_num_batched_tokens if current_platform.is_cpu() else 0
    return EngineInfo(
        name="vllm",
        version=vllm.__version__,
        device=str(current_platform.device_name),
        dtype=str(model.dtype).removeprefix("torch."),
        max_total_tokens=model.max_model_len,
        longest_step=round(seconds * most, 1),
    )


# -- convert the results of vLLM's core to outputs ---------------------------------------------------------------------


@dataclass
class Pending:
    """A request in vLLM, which may be for a beam's next token.

    Attributes:
        key: the caller's key.
        stops: ids that end the request with Finish.STOP instead of Finish.EOS.
        num_tops: number of alternatives to each token.
        prompt_logprobs: log-probabilities of the prompt so far, or None if they are not requested.
        num_prompt_tops: number of alternatives to each prompt token.
        beam: index of the beam that the request continues, or None.
        id: vLLM's id for the request, or "" before the request is submitted to vLLM.
        begun: whether the request, or an earlier part of it, has produced any output.
        prompt_tops: alternatives to the prompt tokens so far.
        plain: whether an output consists only of tokens with their log-probabilities.
    """

    key: int
    stops: frozenset[int] = frozenset()
    num_tops: int = 0
    prompt_logprobs: list[float | None] | None = None
    num_prompt_tops: int = 0
    beam: int | None = None
    id: str = ""
    begun: bool = False
    prompt_tops: list[Alternatives] = field(init=False, default_factory=lambda: [()])
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.plain = not self.num_tops and self.prompt_logprobs is None and self.beam is None

    def take_prompt_scores(self) -> tuple[list[float | None] | None, list[Alternatives] | None]:
        """Return the prompt's log-probabilities and alternatives on the first call, and (None, None) on later calls."""
        scores = self.prompt_logprobs, self.prompt_tops if self.num_prompt_tops else None
        self.prompt_logprobs, self.num_prompt_tops = None, 0
        self.__post_init__()
        return scores


class BeamToken(NamedTuple):
    """The candidates for a beam's next token, most likely first, or an error."""

    pending: Pending
    alternatives: Alternatives
    error: str | None


_PREEMPTED = 3  # EngineCoreEventType.PREEMPTED in vllm/v1/engine/__init__.py
_SPOILT = "the model computes NaN"  # an error of the engine, because the KV cache may contain NaN for later requests


class Results:
    """A replacement for LLMEngine's OutputProcessor (vLLM 0.20 to 0.33). Each step of an engine calls `read`.

    vLLM's own class takes four times as much CPU time. It creates objects, texts and statistics that are not used here.
    """

    def __init__(self) -> None:
        self.pending: dict[str, Pending] = {}
        self.next = Pending(0)  # the request that LLMEngine adds next
        self.num_preemptions = 0

    def add_request(self, request: Any, *prompt_parent_and_index: Any) -> None:
        self.next.id = request.request_id
        self.pending[request.request_id] = self.next

    def abort_requests(self, request_ids: Collection[str], internal: bool) -> list[str]:
        return [id for id in request_ids if self.pending.pop(id, None) is not None]

    def read(self, outputs: Iterable[Any]) -> tuple[Step, list[BeamToken]]:
        """Convert the outputs of a step. The hot path is one token for each of many requests."""
        keys: list[int] = []
        ids: list[int] = []
        logprobs: list[float | None] = []
        results: list[Output] = []
        beams: list[BeamToken] = []
        for output in outputs:
            if output.events:  # hardly ever
                self.num_preemptions += sum(event.type == _PREEMPTED for event in output.events)
            pending = self.pending.get(output.request_id)
            if pending is None:  # cancelled
                continue
            tokens, finish = output.new_token_ids, output.finish_reason
            cached = None if pending.begun else _take_cached(pending, output)
            if pending.plain and finish is None and len(tokens) == 1 and not cached:  # nearly all outputs
                keys.append(pending.key)
                ids.append(tokens[0])
                scores = output.new_logprobs
                logprob = None if scores is None else float(scores.logprobs[0, 0])
                if logprob != logprob:
                    raise RuntimeError(_SPOILT)
                logprobs.append(logprob)
                continue
            if finish is not None:
                del self.pending[output.request_id]
            if pending.beam is not None:
                if finish is not None:
                    beams.append(_beam_token(pending, output))
            elif (result := _output(pending, output, cached)) is not None:
                results.append(result)
        return Step(keys, ids, logprobs, results), beams


def _take_cached(pending: Pending, output: Any) -> int:
    """Return the number of prompt tokens from the prefix cache. Only the first output of a request contains it.

    It is in the field `num_cached_tokens` in the oldest versions, and in `prefill_stats` in later versions
    (vllm/v1/engine/__init__.py).
    """
    pending.begun = True
    stats = getattr(output, "prefill_stats", None) or output
    cached: int = getattr(stats, "num_cached_tokens", 0)
    return cached


def _output(pending: Pending, output: Any, cached: int | None) -> Output | None:
    if pending.prompt_logprobs is not None and (scores := output.new_prompt_logprobs_tensors) is not None:
        pending.prompt_logprobs += scores.logprobs[:, 0].tolist()  # for a part of the prompt; column 0 is its own ids
        if pending.num_prompt_tops:
            pending.prompt_tops += _tops(scores, pending.num_prompt_tops)
    ids = list(output.new_token_ids)
    finish = _finish(output, pending.stops)
    if finish is Finish.ERROR:
        reason = "perhaps its schema, its grammar or its forbidden tokens left no allowed token"
        return Output(pending.key, finish=finish, error=f"vLLM ended the request: {output.finish_reason!s}; {reason}")
    if not ids and finish is None:
        return None
    scores = output.new_logprobs
    prompt_logprobs, prompt_tops = pending.take_prompt_scores()
    return Output(
        pending.key,
        ids,
        [None] * len(ids) if scores is None else scores.logprobs[:, 0].tolist(),
        finish,
        prompt_logprobs=prompt_logprobs,
        tops=_tops(scores, pending.num_tops) if pending.num_tops else None,
        prompt_tops=prompt_tops,
        extras=Extras(num_cached_tokens=cached) if cached else None,
    )


def _beam_token(pending: Pending, output: Any) -> BeamToken:
    if _finish(output, frozenset()) is Finish.ERROR:
        return BeamToken(pending, (), f"vLLM ended a beam: {output.finish_reason!s}")
    return BeamToken(pending, _tops(output.new_logprobs, pending.num_tops)[0], None)


def _tops(scores: Any, count: int) -> list[list[tuple[int, float]]]:
    """Return the most likely ids at each position. Omit column 0, which always contains the chosen id."""
    ids, logprobs = scores.logprob_token_ids[:, 1 : count + 1], scores.logprobs[:, 1 : count + 1]
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]


def _finish(output: Any, stops: frozenset[int]) -> Finish | None:
    if output.finish_reason is None:
        return None
    match str(output.finish_reason):
        case "length":
            return Finish.LENGTH
        case "stop":
            return Finish.STOP if output.new_token_ids and output.new_token_ids[-1] in stops else Finish.EOS
        case _:
            return Finish.ERROR


# -- statistics that vLLM's scheduler sends with each step (SchedulerStats in vllm/v1/metrics/stats.py) ----------------


class Statistics:
    """Combines the statistics of vLLM's steps (vLLM 0.20 to 0.33)."""

    def __init__(self) -> None:
        self._last: Any = None
        self._queries = 0
        self._hits = 0

    def add(self, stats: Any) -> None:
        """Add a step's statistics: the scheduler's state, and lookups in the prefix cache since the previous step."""
        self._last = stats
        cache = stats.prefix_cache_stats
        if cache is not None and cache.queries:
            self._queries += cache.queries
            self._hits += cache.hits

    def report(self, *, idle: bool, num_preemptions: int = 0) -> EngineStatistics:
        """Return the current statistics.

        Args:
            idle: whether the engine has no requests. The statistics of the last step do not show this if its requests
                were cancelled.
            num_preemptions: number of preemptions so far.
        """
        last = self._last
        if last is None:
            return EngineStatistics()
        skipped = getattr(last, "num_skipped_waiting_reqs", 0)  # does not exist in all versions
        waiting = 0 if idle else last.num_waiting_reqs + skipped
        usage = 0.0 if idle else last.kv_cache_usage
        return EngineStatistics(waiting, usage, self._queries, self._hits, num_preemptions)
