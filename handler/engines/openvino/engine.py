"""OpenVINO GenAI's continuous batching on a CPU, with its faults worked around."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from handler.core.values import Adapter, Finish, Sampling, StructuredOutput, Task
from handler.engines.base import (
    Capabilities,
    EngineConfig,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    Output,
    Step,
    Tokenizer,
    failed,
    warm_up,
)
from handler.engines.huggingface.media_tokens import media_tokens, no_media
from handler.engines.huggingface.pooling_tokenizer import HfPoolingTokenizer
from handler.engines.huggingface.whisper import TRANSCRIBING
from handler.engines.openvino.convert import conversion, fetch
from handler.engines.openvino.grammar_compiler import GrammarCompiler
from handler.engines.openvino.ir_files import is_vision
from handler.engines.openvino.media import VisionPrompts
from handler.engines.openvino.model import (
    OpenVinoTokenizer,
    check,
    context_length,
    eos_ids,
    load_whisper_tokenizer,
    prepare_model,
    quantization_of,
)
from handler.engines.openvino.pipeline import TOKENS_PER_STEP, make_pipeline, make_scorer, properties
from handler.engines.openvino.pooling.engine import OpenVinoPooling
from handler.engines.openvino.sampling import SUPPORTS, generation_config
from handler.engines.openvino.scorers.logit_scorer import Scores, has_logits
from handler.engines.openvino.scorers.pipeline_scorer import NO_TOPS
from handler.engines.openvino.structured_output import OpenVinoCheck, structured_output_check
from handler.engines.openvino.whisper import OpenVinoWhisper

__all__ = [
    "OpenVino",
    "capabilities",
    "check",
    "conversion",
    "fetch",
    "load",
    "load_tokenizer",
    "prepare",
    "structured_output_check",
]

_NO_ADAPTERS = "it ignores LoRA adapters that are chosen by request"

_CAPABILITIES = Capabilities(
    SUPPORTS,
    structural_tags=frozenset({"json"}),  # its qwen_xml allows no line ends, which models write
    reasons={
        "typical_p": "it has no typical decoding",
        "bad_sequences": "it cannot forbid token sequences",
        "bad_token_ids": "it cannot forbid tokens",
        "no_repeat_ngram_size": "it cannot forbid repeated n-grams",
        "logit_bias": "it has no logit bias",
        "top_logprobs": "it reports the chosen token's log-probability only",
        "return_context_logits": "it does not give its logits",
        "return_generation_logits": "it does not give its logits",
    },
    no_adapters=_NO_ADAPTERS,
)

_DEFAULT_CONTEXT = 2048  # tokens, where a model names none


@dataclass
class _Running:
    handle: Any
    eos: frozenset[int]  # ids that end the sequence as EOS
    stops: frozenset[int]  # ids that end it as STOP
    own_stops: bool  # the engine does not look for `stops`: see sampling.py
    scores: Scores | None  # of the prompt, to come with the first output
    logprobs: bool
    num_tokens: int = 0
    least: int = 0


class OpenVino:
    """See `engines.base.Engine`. One pipeline, one handle a request."""

    def __init__(self, config: EngineConfig) -> None:
        import openvino_genai

        assert config.model is not None
        self._genai = openvino_genai
        self._in_progress = openvino_genai.GenerationStatus.RUNNING
        self._ignored = openvino_genai.GenerationStatus.IGNORED
        self._max_beams = config.options.max_num_batched_tokens or TOKENS_PER_STEP
        self._pipeline = make_pipeline(config)
        self._cache_is_fixed = config.options.kv_cache_gib > 0
        self._compiler = GrammarCompiler(partial(self._compile, config))
        self._check: OpenVinoCheck | None = None
        self._uncompiled: dict[int, Callable[[], None]] = {}  # functions that start requests, once compiled
        self._scorer = make_scorer(config, config.model)
        self._unscored: dict[int, Callable[[Scores], None]] = {}  # functions that start requests, given the scores
        self._eos = eos_ids(config, self._pipeline.get_tokenizer())
        tokens = media_tokens(config.model) if is_vision(config.model) else {}
        self._vision: VisionPrompts | None = None
        if tokens:
            self._vision = VisionPrompts(self._pipeline.get_tokenizer(), tokens)
        self._running: dict[int, _Running] = {}
        self.info = EngineInfo(
            name="openvino",
            version=importlib.metadata.version("openvino-genai"),
            device="CPU",
            dtype=config.options.dtype,
            max_total_tokens=min(
                context_length(config.model) or _DEFAULT_CONTEXT, config.options.max_model_len or 1 << 62
            ),
        )
        warm_up(self, min(self._eos, default=0))

    def add(self, request: EngineRequest) -> None:
        import numpy
        import openvino

        key, ids, sampling = request.key, request.ids, request.sampling
        if sampling.num_beams > self._max_beams:
            raise ValueError(f"num_beams must be at most {self._max_beams} (option.max_num_batched_tokens)")
        prompt: tuple[Any, ...]
        if self._vision is None:
            prompt = (openvino.Tensor(numpy.array([ids], dtype=numpy.int64)),)
        else:
            prompt = self._vision.arguments(ids, request.read_media())
        # Made here, where an exception refuses this request only.
        if sampling.prompt_logprobs:
            self._scorer.check(sampling.prompt_top_logprobs)
        start = partial(self._start, key, prompt, generation_config(sampling, self._eos), sampling)
        if sampling.structured_output is not None:
            self._uncompiled[key] = partial(self._score, key, ids, sampling, start)
            self._compiler.add(key, sampling.structured_output)
        else:
            self._score(key, ids, sampling, start)

    def _score(self, key: int, ids: Sequence[int], sampling: Sampling, start: Callable[[Scores | None], None]) -> None:
        if sampling.prompt_logprobs:
            self._scorer.add(key, ids, sampling.prompt_top_logprobs)
            self._unscored[key] = start
        else:
            start(None)

    def _compile(self, config: EngineConfig, structured_output: StructuredOutput) -> None:
        """Compile on a thread; making the check takes a quarter of a second, so the first text does it."""
        if self._check is None:
            self._check = OpenVinoCheck(config, self._pipeline.get_tokenizer())
        self._check.compile(structured_output)

    def _start(self, key: int, prompt: tuple[Any, ...], config: Any, sampling: Sampling, scores: Scores | None) -> None:
        self._running[key] = _Running(
            self._pipeline.add_request(key, *prompt, config),
            eos=frozenset() if sampling.ignore_eos else self._eos,
            stops=frozenset(sampling.stop_token_ids),
            own_stops=bool(sampling.stop_token_ids) and (sampling.ignore_eos or sampling.structured_output is not None),
            scores=scores,
            logprobs=sampling.logprobs,
            least=sampling.min_new_tokens,
        )

    def cancel(self, key: int) -> None:
        if self._uncompiled.pop(key, None) is not None:
            self._compiler.cancel(key)
        if self._unscored.pop(key, None) is not None:
            self._scorer.cancel(key)
        running = self._running.pop(key, None)
        if running is not None:
            running.handle.cancel()

    def step(self) -> Step:
        step = Step([], [], [], [])
        if self._uncompiled:
            self._start_compiled(step)
        if self._unscored and (scored := self._scorer.step()) is not None:
            self._unscored.pop(scored.key)(scored)
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        ended: list[int] = []
        for key, running in self._running.items():
            handle = running.handle
            if handle.can_read():
                if self._read(key, running, step):
                    ended.append(key)
            elif (status := handle.get_status()) != self._in_progress:  # it will never bring anything again
                error = "the KV cache cannot hold this request" if status == self._ignored else f"ended as {status}"
                step.others.append(Output(key, (), (), Finish.ERROR, error=error))
                ended.append(key)
        for key in ended:
            del self._running[key]
        return step

    def _start_compiled(self, step: Step) -> None:
        for key, error in self._compiler.step(idle=not self._running and not self._unscored):
            begin = self._uncompiled.pop(key, None)
            if begin is None:  # cancelled
                continue
            if error:
                step.others.append(failed(key, f"the schema or grammar cannot be followed: {error}"))
            else:
                begin()

    def statistics(self) -> EngineStatistics:
        """Report the cache's usage where it has a size: one that grows as needed is always nearly full.

        GenAI's figure is that of the last step, in percent. Nothing is computed without requests.
        """
        if not self._cache_is_fixed:
            return EngineStatistics()
        return EngineStatistics(kv_cache_usage=self._pipeline.get_metrics().cache_usage / 100 if self._running else 0.0)

    def load_adapter(self, adapter: Adapter) -> None:
        raise ValueError(_NO_ADAPTERS)

    drop_adapter = load_adapter

    def close(self) -> None:
        self._running.clear()
        if self._pipeline.has_non_finished_requests():  # a step frees the memory of cancelled requests
            self._pipeline.step()

    # -- one request ---------------------------------------------------------------------------------------------

    def _read(self, key: int, running: _Running, step: Step) -> bool:
        """Take a request's results; return whether it has ended. Beams come together, at the end."""
        sequences: dict[int, int] = {}
        ended = False
        while running.handle.can_read():
            results = running.handle.read()
            best_first = (
                sorted(results.items(), key=lambda item: -item[1].score) if len(results) > 1 else results.items()
            )
            for sequence, result in best_first:
                output = self._output(key, sequences.setdefault(sequence, len(sequences)), running, result)
                ended = ended or output.finish is not None
                if _is_one_token(output):
                    step.keys.append(key)
                    step.ids.append(output.ids[0])
                    step.logprobs.append(output.logprobs[0])
                else:
                    step.others.append(output)
        return ended

    def _output(self, key: int, sequence: int, running: _Running, result: Any) -> Output:
        ids = result.generated_ids
        logprobs = result.generated_log_probs if running.logprobs else [None] * len(ids)
        scores, running.scores = running.scores, None
        finish = self._finish(running, ids, result.finish_reason)
        if (at := self._own_stop(running, ids)) is not None:
            ids, logprobs, finish = ids[: at + 1], logprobs[: at + 1], Finish.STOP
            running.handle.cancel()
        running.num_tokens += len(ids)
        output = Output(key, ids, logprobs, finish, sequence)
        return output if scores is None else output._replace(prompt_logprobs=scores.logprobs, prompt_tops=scores.tops)

    def _finish(self, running: _Running, ids: Sequence[int], reason: Any) -> Finish | None:
        reasons = self._genai.GenerationFinishReason
        if reason == reasons.NONE:
            return None
        if reason == reasons.LENGTH:
            return Finish.LENGTH
        return Finish.EOS if ids and ids[-1] in running.eos and ids[-1] not in running.stops else Finish.STOP

    def _own_stop(self, running: _Running, ids: Sequence[int]) -> int | None:
        """Find a stop id that the engine does not stop at, after the first `least` tokens."""
        if running.own_stops:
            for index, id in enumerate(ids):
                if id in running.stops and running.num_tokens + index >= running.least:
                    return index
        return None


def _is_one_token(output: Output) -> bool:
    return output.finish is None and len(output.ids) == 1 and output.prompt_logprobs is None and not output.sequence


def prepare(model_id: str | None, config: EngineConfig) -> Path:
    options = config.options
    return prepare_model(model_id, options.dtype, config.task, options.pooling, quantization_of(config))


def capabilities(config: EngineConfig) -> Capabilities:
    if config.task is Task.TRANSCRIPTION:
        return TRANSCRIBING
    if config.model is None or has_logits(config.model):
        return _CAPABILITIES
    if is_vision(config.model):
        reasons = {**_CAPABILITIES.reasons, "prompt_logprobs": "it cannot score the prompts of a vision model"}
        return replace(
            _CAPABILITIES,
            reasons=reasons,
            no_media={**no_media(config.model), "audio": "OpenVINO GenAI takes no audio clips in chats"},
        )
    return replace(_CAPABILITIES, reasons={**_CAPABILITIES.reasons, "prompt_top_logprobs": NO_TOPS})


def load(config: EngineConfig) -> OpenVino | OpenVinoPooling | OpenVinoWhisper:
    if config.task is Task.TRANSCRIPTION:
        return OpenVinoWhisper(config, properties(config.options.dtype))
    if config.task is not Task.GENERATION:
        return OpenVinoPooling(config, properties(config.options.dtype))
    return OpenVino(config)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    assert config.model is not None
    if config.task is Task.TRANSCRIPTION:
        return load_whisper_tokenizer(config.model)
    if config.task is not Task.GENERATION:
        return HfPoolingTokenizer(config.model)
    return OpenVinoTokenizer(config.model, config.chat_template)
