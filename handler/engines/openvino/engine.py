"""The engine for text generation on CPUs with OpenVINO GenAI's continuous batching, and workarounds for its bugs."""

from __future__ import annotations

import importlib.metadata
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from handler.core.errors import ConfigError
from handler.core.media import MediaPrompt, MediaTokens, Medium
from handler.core.values import Extras, Finish, Pooling, Sampling, Task
from handler.engines.base import (
    Capabilities,
    EngineConfig,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    NoAdapters,
    Output,
    Rule,
    Step,
    Tokenizer,
    Unsupported,
    arguments,
    failed,
    first_stop,
    passed_otherwise,
    warm_up,
)
from handler.engines.huggingface.media import collapse, media_tokens, no_media, prompt_text
from handler.engines.huggingface.pooling import HfPoolingTokenizer
from handler.engines.huggingface.whisper import TRANSCRIBING
from handler.engines.openvino.ir_files import conversion, fetch, ids_of, is_vision, prefers_f32
from handler.engines.openvino.model import (
    OpenVinoTokenizer,
    check,
    context_length,
    eos_ids,
    load_whisper_tokenizer,
    prepare,
)
from handler.engines.openvino.penalties import PenaltyPipeline
from handler.engines.openvino.pooling import OpenVinoPooling
from handler.engines.openvino.scorers import NO_TOPS, LogitScorer, PipelineScorer, Scores, has_logits
from handler.engines.openvino.structured_output import (
    GrammarCompiler,
    OpenVinoCheck,
    genai_arguments,
    structured_output_check,
)
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

_NO_ADAPTERS = "it ignores the LoRA adapter that a request selects"

_DEFAULT_CONTEXT = 2048  # tokens, for models whose files specify no context length

_WARM_UP = 16  # tokens; from 8 on, the CPU plugin prepares 4-bit weights, which takes a second for 135M parameters


@dataclass
class _Running:
    handle: Any
    sampling: Sampling
    eos: frozenset[int]  # ids that end the sequence with Finish.EOS
    handler_stops: frozenset[int]  # stop ids that we must look for, as the engine does not: see `_ends`
    scores: Scores | None  # of the prompt, returned with the first output
    num_tokens: int = 0


class OpenVino(NoAdapters):
    """An engine with one pipeline, and one handle per request. See `engines.base.Engine`."""

    no_adapters = _NO_ADAPTERS

    def __init__(self, config: EngineConfig) -> None:
        import openvino_genai

        self._statuses = openvino_genai.GenerationStatus
        self._reasons = openvino_genai.GenerationFinishReason
        self._max_beams = config.options.max_num_batched_tokens or TOKENS_PER_STEP
        self._pipeline = make_pipeline(config)
        self._penalties = PenaltyPipeline(config.model_path, lambda model: make_pipeline(replace(config, model=model)))
        self._cache_is_fixed = config.options.kv_cache_gib > 0
        self._preparation = Preparation(config, self._pipeline.get_tokenizer())
        self._eos = eos_ids(config, self._pipeline.get_tokenizer())
        tokens = media_tokens(config.model_path) if is_vision(config.model_path) else {}
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
                context_length(config.model_path) or _DEFAULT_CONTEXT, config.options.max_model_len or 1 << 62
            ),
        )
        # A vision model's prompt is passed as text, and only a single token is certain to be encoded as the same id.
        length = 1 if tokens else max(1, min(_WARM_UP, self.info.max_total_tokens - 2))
        seconds = warm_up(self, [min(self._eos, default=0)] * length)
        self.info = replace(self.info, longest_step=round(seconds * self._max_beams, 1))

    def add(self, request: EngineRequest) -> None:
        import numpy
        import openvino

        if isinstance(request.parameters, Pooling):
            self._preparation.add_labels(request)
            return
        ids, sampling = request.ids, request.sampling
        prompt: tuple[Any, ...]
        if self._vision is None:
            prompt = (openvino.Tensor(numpy.array([ids], dtype=numpy.int64)),)
        else:
            prompt = self._vision.arguments(ids, request.read_media())
        # The configuration is made here, where an exception affects only this request.
        begin = partial(self._begin, request.key, prompt, generation_config(sampling, self._eos), sampling)
        self._preparation.add(request, partial(self._start, request, begin))

    def _start(
        self, request: EngineRequest, begin: Callable[[Scores | None, Any], None], scores: Scores | None
    ) -> None:
        if _is_penalized(request.sampling):
            self._penalties.add(request.key, partial(begin, scores))
        else:
            begin(scores, self._pipeline)

    def _begin(
        self, key: int, prompt: tuple[Any, ...], config: Any, sampling: Sampling, scores: Scores | None, pipeline: Any
    ) -> None:
        is_missed = sampling.structured_output is not None
        self._running[key] = _Running(
            pipeline.add_request(key, *prompt, config),
            sampling,
            eos=frozenset() if sampling.ignore_eos else self._eos,
            handler_stops=frozenset(sampling.stop_token_ids if is_missed else ()),
            scores=scores,
        )

    def cancel(self, key: int) -> None:
        self._preparation.cancel(key)
        self._penalties.cancel(key)
        running = self._running.pop(key, None)
        if running is not None:
            running.handle.cancel()

    def step(self) -> Step:
        step = Step.of([])
        self._preparation.step(step, idle=not self._running)
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._penalties.step(step, idle=not self._running)
        ended: list[int] = []
        for key, running in self._running.items():
            handle = running.handle
            if handle.can_read():
                if self._read(key, running, step):
                    ended.append(key)
            elif (status := handle.get_status()) != self._statuses.RUNNING:  # no more output will come
                step.others.append(Output(key, finish=Finish.ERROR, error=self._error_of(status)))
                ended.append(key)
        for key in ended:
            del self._running[key]
        return step

    def _error_of(self, status: Any) -> str:
        too_large = status == self._statuses.IGNORED
        return "the request does not fit in the KV cache" if too_large else f"the request ended with status {status}"

    def statistics(self) -> EngineStatistics:
        """Report the KV cache usage if the cache has a fixed size. A cache that grows as needed is always nearly full.

        GenAI reports the usage of its last step, in percent. When no request is running, there are no steps, so the
        result is 0.
        """
        if not self._cache_is_fixed:
            return EngineStatistics()
        return EngineStatistics(kv_cache_usage=self._pipeline.get_metrics().cache_usage / 100 if self._running else 0.0)

    def close(self) -> None:
        self._running.clear()
        self._penalties.close()
        if self._pipeline.has_non_finished_requests():  # one more step frees the memory of cancelled requests
            self._pipeline.step()

    # -- one request ---------------------------------------------------------------------------------------------

    def _read(self, key: int, running: _Running, step: Step) -> bool:
        """Read the results of a request, and return whether it has ended. All beams arrive together at the end."""
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
                if output.is_plain and output.finish is None and len(output.ids) == 1 and not output.sequence:
                    step.add(key, output.ids[0], output.logprobs[0])
                else:
                    step.others.append(output)
        return ended

    def _output(self, key: int, sequence: int, running: _Running, result: Any) -> Output:
        ids = result.generated_ids
        logprobs = result.generated_log_probs if running.sampling.logprobs else [None] * len(ids)
        scores, running.scores = running.scores, None
        finish = self._finish(running, ids, result.finish_reason)
        if (at := first_stop(ids, running.handler_stops, running.num_tokens, running.sampling)) is not None:
            ids, logprobs, finish = ids[: at + 1], logprobs[: at + 1], Finish.STOP
            running.handle.cancel()
        running.num_tokens += len(ids)
        output = Output(key, ids, logprobs, finish, sequence)
        return output if scores is None else output._replace(prompt_logprobs=scores.logprobs, prompt_tops=scores.tops)

    def _finish(self, running: _Running, ids: Sequence[int], reason: Any) -> Finish | None:
        if reason == self._reasons.NONE:
            return None
        if reason == self._reasons.LENGTH:
            return Finish.LENGTH
        is_end = ids and ids[-1] in running.eos and ids[-1] not in running.sampling.stop_token_ids
        return Finish.EOS if is_end else Finish.STOP


class Preparation:
    """Starts requests once their schemas or grammars have been compiled and their prompts have been scored.

    Requests for the log-probabilities of labels end here, because the pipeline cannot compute them.
    """

    def __init__(self, config: EngineConfig, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._compiler = GrammarCompiler(lambda structured_output: self._check.compile(structured_output))
        self._uncompiled: dict[int, Callable[[], None]] = {}  # functions that start requests after compilation
        self._scorer = make_scorer(config)
        self._unscored: dict[int, Callable[[Scores, Step], None]] = {}  # functions that use the scores, by key

    @cached_property
    def _check(self) -> OpenVinoCheck:
        """The checker, which is created for the first schema or grammar because this takes a quarter of a second."""
        return OpenVinoCheck(self._config, self._tokenizer)

    def add(self, request: EngineRequest, start: Callable[[Scores | None], None]) -> None:
        """Start a request, either at once or after its schema or grammar is compiled and its prompt is scored.

        Raises:
            ValueError: the prompt cannot be scored.
        """
        sampling = request.sampling
        if sampling.prompt_logprobs:
            self._scorer.check(sampling.prompt_top_logprobs)
        if sampling.structured_output is not None:
            self._uncompiled[request.key] = partial(self._score, request, start)
            self._compiler.add(request.key, sampling.structured_output)
        else:
            self._score(request, start)

    def _score(self, request: EngineRequest, start: Callable[[Scores | None], None]) -> None:
        if request.sampling.prompt_logprobs:
            self._scorer.add(request)
            self._unscored[request.key] = lambda scores, _: start(scores)
        else:
            start(None)

    def add_labels(self, request: EngineRequest) -> None:
        """Queue a request for the log-probabilities of labels.

        Raises:
            ValueError: the model cannot be scored.
        """
        self._scorer.check(0)
        self._scorer.add(request)
        self._unscored[request.key] = _report_labels

    def cancel(self, key: int) -> None:
        if self._uncompiled.pop(key, None) is not None:
            self._compiler.cancel(key)
        if self._unscored.pop(key, None) is not None:
            self._scorer.cancel(key)

    def step(self, step: Step, *, idle: bool) -> None:
        """Start the requests that are ready. For a schema or grammar that cannot be compiled, add an error to `step`.

        Args:
            idle: whether no request is running.
        """
        if self._uncompiled:
            for key, error in self._compiler.step(idle=idle and not self._unscored):
                begin = self._uncompiled.pop(key, None)  # None if the request was cancelled
                if begin is not None and error:
                    step.others.append(failed(key, f"the engine cannot compile the schema or grammar: {error}"))
                elif begin is not None:
                    begin()
        if self._unscored and (scored := self._scorer.step(idle=idle)) is not None:
            use = self._unscored.pop(scored.key)
            if scored.error:
                step.others.append(failed(scored.key, scored.error))
            else:
                use(scored, step)


def _report_labels(scores: Scores, step: Step) -> None:
    logprobs = [logprob for logprob in scores.logprobs if logprob is not None]
    step.others.append(Output(scores.key, finish=Finish.STOP, extras=Extras(vector=logprobs)))


def capabilities(config: EngineConfig) -> Capabilities:
    if config.task is Task.TRANSCRIPTION:
        return TRANSCRIBING
    served = replace(_CAPABILITIES, limits={"num_beams": config.options.max_num_batched_tokens or TOKENS_PER_STEP})
    if config.model is None or has_logits(config.model):
        return served
    if is_vision(config.model):
        unscored = "it cannot score the prompts of a vision model"
        reasons = {**_CAPABILITIES.reasons, **_WRONG_PENALTY, "prompt_logprobs": unscored}
        return replace(
            served,
            reasons=reasons,
            labels=False,
            no_media={**no_media(config.model), "audio": "OpenVINO GenAI does not accept audio in chats"},
        )
    return replace(served, reasons={**_CAPABILITIES.reasons, **_WRONG_PENALTY, "prompt_top_logprobs": NO_TOPS})


def load(config: EngineConfig) -> OpenVino | OpenVinoPooling | OpenVinoWhisper:
    if config.task is Task.TRANSCRIPTION:
        return OpenVinoWhisper(config, properties(config.options.dtype))
    if config.task is not Task.GENERATION:
        return OpenVinoPooling(config, properties(config.options.dtype))
    return OpenVino(config)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    if config.task is Task.TRANSCRIPTION:
        return load_whisper_tokenizer(config.model_path)
    if config.task is not Task.GENERATION:
        return HfPoolingTokenizer(config.model_path, config.chat_template)
    return OpenVinoTokenizer(config.model_path, config.chat_template)


# -- translate Sampling into GenAI's configuration ---------------------------------------------------------------------


_MAX_SEED = (1 << 63) - 1  # the Python binding requires a signed 64-bit integer


def _ends(sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    # xgrammar treats every stop id as an end token, so with a schema `_output` looks for the request's own.
    stop_ids = set() if sampling.structured_output is not None else set(sampling.stop_token_ids)
    if sampling.ignore_eos and not stop_ids:
        return {"ignore_eos": True}  # GenAI then ignores all stop ids
    ends = stop_ids if sampling.ignore_eos else {*eos}
    return {"eos_token_id": min(ends, default=-1), "stop_token_ids": ends | stop_ids}


def _structured_output(sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    import openvino_genai as genai

    if sampling.structured_output is None:
        return {}
    if sampling.num_beams > 1 or sampling.ignore_eos or sampling.min_new_tokens:
        raise ValueError("structured output cannot be combined with num_beams > 1, ignore_eos or a minimum length")
    return {"structured_output_config": genai.StructuredOutputConfig(**genai_arguments(sampling.structured_output))}


def _beams(sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    import openvino_genai as genai

    if sampling.num_beams == 1:
        return {}
    criteria = genai.StopCriteria
    return {
        "num_beams": sampling.num_beams,
        "num_return_sequences": sampling.num_beams,
        "length_penalty": sampling.length_penalty,
        "stop_criteria": criteria.EARLY if sampling.early_stopping else criteria.HEURISTIC,
    }


def _choice(sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    if sampling.num_beams > 1 or not sampling.do_sample or sampling.temperature <= 0:
        return {}
    return {"do_sample": True, **arguments(_DRAWN, sampling)}


def _is_penalized(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty)


def _penalties(sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    if sampling.num_beams > 1 and (_is_penalized(sampling) or sampling.repetition_penalty != 1):
        raise Unsupported(
            "presence_penalty, frequency_penalty and repetition_penalty cannot be combined with num_beams > 1 on "
            "OpenVINO; omit them"
        )
    if _is_penalized(sampling) and sampling.repetition_penalty != 1:
        raise Unsupported(
            "presence_penalty and frequency_penalty cannot be combined with repetition_penalty on OpenVINO; "
            "send repetition_penalty=1, or omit them"
        )
    return {name: getattr(sampling, name) for name in names}


def _seed(sampling: Sampling) -> dict[str, Any]:
    # GenAI's default is 0 for every request, so equal requests would get equal responses.
    return {"rng_seed": (random.getrandbits(63) if sampling.seed is None else sampling.seed) & _MAX_SEED}


def _top(sampling: Sampling) -> dict[str, Any]:
    if sampling.top_p == 0:  # the smallest nucleus contains only the most likely token
        return {"top_k": 1}
    return {"top_p": sampling.top_p, **({"top_k": sampling.top_k} if sampling.top_k > 0 else {})}


_DRAWN: Mapping[str, Rule] = {
    "temperature": "temperature",
    "seed": _seed,
    "min_p": "min_p",
    "top_p": _top,
    "top_k": _top,
}
"""Rules for the fields that matter only when sampling."""

_TABLE: Mapping[str, Rule] = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "repetition_penalty": _penalties,
    "presence_penalty": _penalties,
    "frequency_penalty": _penalties,
    "ignore_eos": _ends,
    "stop_token_ids": _ends,
    "structured_output": _structured_output,
    "num_beams": _beams,
    "length_penalty": _beams,
    "early_stopping": _beams,
    "do_sample": _choice,
    "prompt_logprobs": passed_otherwise,  # `scorers.py` computes them
    "prompt_top_logprobs": passed_otherwise,
}

SUPPORTS = frozenset({*_TABLE, *_DRAWN})

_WRONG_PENALTY = dict.fromkeys(
    ("presence_penalty", "frequency_penalty"),
    "OpenVINO GenAI adds it to negative logits, which makes their tokens more likely; use repetition_penalty",
)
"""Why models whose logits cannot be changed get no such penalties."""

_CAPABILITIES = Capabilities(
    SUPPORTS,
    structural_tags=frozenset({"json"}),  # its qwen_xml does not allow the line breaks that models write
    reasons={
        "typical_p": "it does not implement typical decoding",
        "bad_sequences": "it cannot forbid token sequences",
        "bad_token_ids": "it cannot forbid tokens",
        "allowed_token_ids": "it cannot forbid tokens",
        "cache_salt": "its prefix cache does not support salts",
        "no_repeat_ngram_size": "it cannot forbid repeated n-grams",
        "logit_bias": "it does not implement a logit bias",
        "top_logprobs": "it reports only the log-probability of the chosen token",
        "return_context_logits": "it does not return logits",
        "return_generation_logits": "it does not return logits",
    },
    no_adapters=_NO_ADAPTERS,
    labels=True,
)


def generation_config(sampling: Sampling, eos: frozenset[int]) -> Any:
    """Return GenAI's configuration for one request.

    Args:
        sampling: the request's parameters.
        eos: ids that end a response with Finish.EOS.

    Raises:
        ValueError: a parameter cannot be combined with structured output, or its schema or grammar is not supported.
        RuntimeError: GenAI rejects the parameters.
    """
    import openvino_genai as genai

    # Log-probabilities are computed only on request, as they make the step of a single sequence 5 % slower.
    config = genai.GenerationConfig(logprobs=int(sampling.logprobs))
    config.apply_chat_template = False  # the template has been applied already
    for name, value in arguments(_TABLE, sampling, eos).items():
        setattr(config, name, value)
    config.validate()
    return config


# -- make OpenVINO GenAI's pipeline and the scorer of prompts from the configuration -----------------------------------


TOKENS_PER_STEP = 256  # GenAI would prefill all new prompts in one step, and delay the tokens of running requests

_PROMPT = "The quick brown fox jumps over the lazy dog. 1 + 1 = 2"

_PRECISIONS = {"fp16": "f16", "bf16": "bf16"}


def make_scorer(config: EngineConfig) -> LogitScorer | PipelineScorer:
    if has_logits(config.model_path):
        return LogitScorer(config.model_path, properties(config.options.dtype, config.model_path))
    options = replace(config.options, enable_prefix_caching=False, max_rolling_batch_size=1)
    return PipelineScorer(lambda: make_pipeline(replace(config, options=options)))


def make_pipeline(config: EngineConfig) -> Any:
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = config.options.max_rolling_batch_size
    scheduler.max_num_batched_tokens = config.options.max_num_batched_tokens or TOKENS_PER_STEP
    # Off by default: in bf16 the numbers of a prompt change slightly if its beginning is cached, so a seed may not
    # reproduce a response. Log-probabilities differed by up to 0.07 on a CPU with AVX512-BF16.
    scheduler.enable_prefix_caching = bool(config.options.enable_prefix_caching)
    if config.options.kv_cache_gib:
        scheduler.cache_size = config.options.kv_cache_gib
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(config.model_path), scheduler, "CPU", properties(config.options.dtype, config.model_path)
    )
    if config.options.dtype == "fp16" and has_logits(config.model_path):
        _check_numbers(pipeline)
    return pipeline


def _check_numbers(pipeline: Any) -> None:
    """Run a prompt to check for NaN, which the CPU plugin may compute in fp16. All responses would then be noise.

    Raises:
        ConfigError: a log-probability is NaN.
    """
    import openvino_genai

    greedy = openvino_genai.GenerationConfig(max_new_tokens=1, logprobs=1, do_sample=False)
    handle = pipeline.add_request(0, pipeline.get_tokenizer().encode(_PROMPT).input_ids, greedy)
    try:
        while pipeline.has_non_finished_requests():
            pipeline.step()
        is_noise = any(math.isnan(logprob) for output in handle.read_all() for logprob in output.generated_log_probs)
    except RuntimeError as error:
        is_noise = "isnan" in str(error)
        if not is_noise:
            raise
    if is_noise:
        raise ConfigError("option.dtype=fp16: the model computes NaN in fp16 on this CPU; use bf16 or auto")


def properties(dtype: str, model: Path | None = None) -> dict[str, str]:
    """Return the CPU plugin properties for a dtype. For models converted from GGUF, `auto` depends on the model.

    fp32 needs three properties. With only the precision hint, the KV cache and the activations that are multiplied by
    compressed weights would still be quantized. With all three, greedy responses are the same as those of transformers,
    and do not depend on other requests.
    """
    if dtype == "auto":
        return {"INFERENCE_PRECISION_HINT": "f32"} if model is not None and prefers_f32(model) else {}
    import openvino

    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")  # also INT8, BIN and EXPORT_IMPORT
    precisions = [name for name in ("fp32", *_PRECISIONS) if name.upper() in capabilities]
    if dtype not in precisions:
        raise ConfigError(f"option.dtype={dtype}: this CPU supports only {', '.join(precisions)}")
    if dtype == "fp32":
        return {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return {"INFERENCE_PRECISION_HINT": _PRECISIONS[dtype]}


# -- prompts for OpenVINO GenAI's vision models, which accept text and images but no ids -------------------------------


_TAGS = ("<ov_genai_image_", "<ov_genai_video_", "<ov_genai_audio_")
"""GenAI's own placeholders, which it replaces anywhere in a prompt."""


class VisionPrompts:
    """Converts prompts from ids and images to the text and images that GenAI's vision models accept.

    Args:
        tokenizer: the pipeline's tokenizer.
        tokens: the model's media tokens, by kind of media.
    """

    def __init__(self, tokenizer: Any, tokens: Mapping[str, MediaTokens]) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens

    def arguments(self, ids: Sequence[int], media: MediaPrompt | None) -> tuple[str, list[Any]]:
        """Return the prompt's text, and its images as tensors [1, height, width, 3] of u8.

        Raises:
            ValueError: there is no text that encodes to these ids, or the text contains one of GenAI's placeholders.
        """
        text, images = ("", ()) if media is None else media
        text = prompt_text(collapse(ids, images, self._tokens), text, partial(ids_of, self._tokenizer), self._decode)
        if tag := next((tag for tag in _TAGS if tag in text), ""):
            raise ValueError(f"the prompt contains {tag!r}, which OpenVINO GenAI would replace with an image")
        return text, [_tensor(image) for image in images]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _tensor(image: Medium) -> Any:
    import numpy
    import openvino

    width, height = image.size
    return openvino.Tensor(numpy.frombuffer(image.data, dtype=numpy.uint8).reshape(1, height, width, 3).copy())
