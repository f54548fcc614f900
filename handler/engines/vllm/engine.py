"""The engine for vLLM's synchronous LLMEngine, which runs in the engine's process, with vLLM's core in another process.

vLLM does not decode ids (`detokenize=False`), and each output contains only a request's new tokens.
"""

from __future__ import annotations

import heapq
import json
import math
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from handler.core.errors import ConfigError, Problems
from handler.core.media import SAMPLE_RATE, MediaPrompt, MediaTokens, Medium
from handler.core.values import Adapter, Finish, Pooling, Sampling, StructuredOutput, Task
from handler.engines.base import (
    NO_LORA,
    Alternatives,
    Capabilities,
    EngineConfig,
    EngineRequest,
    NoAdapters,
    Output,
    Step,
    Tokenizer,
    failed,
    warm_up,
)
from handler.engines.huggingface import files
from handler.engines.huggingface.files import check_model, eos_ids, fetch, prepare_checkpoint
from handler.engines.huggingface.media import collapse, media_tokens, no_media, pillow_image
from handler.engines.huggingface.pooling import NO_POOLED_LORA, HfPoolingTokenizer, read_pooling
from handler.engines.huggingface.tokenizer import MistralTokenizer
from handler.engines.huggingface.whisper import TRANSCRIBING, WhisperTokenizer, whisper_ids
from handler.engines.structured_output.xgrammar import for_xgrammar
from handler.engines.vllm.arguments import engine_arguments
from handler.engines.vllm.core import BeamToken, CoreEngine, Pending, engine_info
from handler.engines.vllm.labels import LabelRequest
from handler.engines.vllm.sampling import (
    SUPPORTS,
    sampling_arguments,
    structural_tags,
    structured_output_check,
    uses_xgrammar,
)
from handler.engines.vllm.whisper import VllmWhisper

__all__ = ["Vllm", "capabilities", "check", "fetch", "load", "load_tokenizer", "prepare", "structured_output_check"]

_REASONS = {
    "typical_p": "it does not implement typical decoding",
    "no_repeat_ngram_size": "it cannot forbid repeated n-grams",
    "return_context_logits": "it does not return logits",
    "return_generation_logits": "it does not return logits",
}


NO_SCORES = "it cannot score prompts while it serves LoRA adapters"


class Vllm(CoreEngine):
    """An engine that generates text. See `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        from vllm.lora.request import LoRARequest
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        self._lora_request = LoRARequest
        self._structured_outputs = StructuredOutputsParams
        self._sampling_params = partial(SamplingParams, output_kind=RequestOutputKind.DELTA)
        self._adapters: OrderedDict[int, None] = OrderedDict()  # ids of loaded adapters, least recently used first
        self._max_adapters = int(self.arguments.get("max_cpu_loras") or self.arguments.get("max_loras") or 0)
        self._exclusion: Exclusion | None = None
        if self.arguments.get("enable_lora") and current_platform.is_cpu():
            # Measured with vLLM 0.32: a request without an adapter uses the adapter of another request in the batch.
            self._exclusion = Exclusion()
        # If requests for alternatives and for selected ids are in a batch, the V1 model runner returns the selected ids
        # to all of them (`Sampler.forward` in vllm/v1/sample/sampler.py, 0.33).
        is_v2 = getattr(self._engine.vllm_config, "use_v2_model_runner", False)
        self._alternatives = None if is_v2 else Exclusion()
        self._selects_ids = hasattr(SamplingParams, "logprob_token_ids") and hasattr(SamplingParams, "num_logprobs")
        self._labels: dict[int, LabelRequest] = {}
        self._late: list[Output] = []  # errors of requests that could not be started after waiting
        self._running: dict[int, Pending] = {}
        self._searches: dict[int, Beams] = {}
        self._eos = eos_ids(config)
        self._media_tokens = media_tokens(config.model)
        first = min(self._eos, default=0)
        self.info = engine_info(self._engine, warm_up(self, [first]))
        if config.engine_options.get("guided_decoding", True):
            # The first schema decides which backend vLLM's core uses for all others.
            built_in = Sampling(max_new_tokens=2, structured_output=StructuredOutput("json_object", ""))
            try:
                warm_up(self, [first], built_in)
            except (RuntimeError, ValueError) as error:
                print(f"structured output cannot be used with this model: {error}", file=sys.stderr, flush=True)

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        key, media = request.key, request.read_media()
        if isinstance(request.parameters, Pooling):
            self._enter(request, partial(self._read_labels, request, media))
            return
        sampling = request.sampling
        if sampling.num_beams > 1:
            search = BeamSearch(sampling, () if sampling.ignore_eos else self._eos)
            start = partial(self._search, Beams(request, media, search))
        else:
            pending = Pending(
                key,
                frozenset(sampling.stop_token_ids),
                sampling.top_logprobs,
                [None] if sampling.prompt_logprobs else None,  # the first token has no log-probability
                sampling.prompt_top_logprobs,
                begun=request.goes_on,
            )
            start = partial(
                self._run, pending, self._prompt(request.ids, media, sampling), self._params(sampling), request.adapter
            )
        if self._alternatives is not None and (sampling.top_logprobs or sampling.num_beams > 1):
            start = partial(self._alternatives.enter, key, True, start)
        self._enter(request, start)

    def _enter(self, request: EngineRequest, start: Callable[[], None]) -> None:
        if self._exclusion is None:
            start()
        else:
            self._exclusion.enter(request.key, request.adapter is not None, start)

    def _read_labels(self, request: EngineRequest, media: MediaPrompt | None) -> None:
        selects = self._selects_ids and (self._alternatives is None or self._alternatives.enters(request.key, False))
        if not selects and self.arguments.get("enable_lora"):
            raise ValueError(f"labels cannot be scored now: {NO_SCORES}")
        labels = self._labels[request.key] = LabelRequest(request, media, selects_ids=selects)
        with ExitStack() as on_failure:
            on_failure.callback(self._leave_alternatives, request.key)
            on_failure.callback(self._labels.pop, request.key)
            self._submit_part(labels)
            on_failure.pop_all()

    def _submit_part(self, labels: LabelRequest) -> None:
        request, part = labels.request, labels.part
        prompt = engine_input(
            self._engine.renderer, part.ids, labels.media, self._media_tokens, request.pooling.cache_salt
        )
        self._run(part.pending(request.key), prompt, self._sampling_params(**part.arguments()), request.adapter)

    def _run(self, pending: Pending, prompt: Any, params: Any, adapter: Adapter | None) -> None:
        self._submit(pending, prompt, params, adapter)
        self._running[pending.key] = pending

    def _search(self, beams: Beams) -> None:
        self._searches[beams.key] = beams
        with ExitStack() as on_failure:
            on_failure.callback(self._drop, beams.key)
            self._continue(beams)
            on_failure.pop_all()

    def _prompt(self, ids: Sequence[int], media: MediaPrompt | None, sampling: Sampling) -> Any:
        return engine_input(self._engine.renderer, ids, media, self._media_tokens, sampling.cache_salt)

    def _params(self, sampling: Sampling) -> Any:
        if sampling.structured_output is not None and uses_xgrammar(self.arguments):
            sampling = sampling._replace(structured_output=for_xgrammar(sampling.structured_output))
        arguments = sampling_arguments(sampling)
        if (rule := arguments.get("structured_outputs")) is not None:
            arguments["structured_outputs"] = self._structured_outputs(**rule)
        return self._sampling_params(**arguments)

    def _submit(self, pending: Pending, prompt: Any, params: Any, adapter: Adapter | None) -> None:
        lora = None
        if adapter is not None:
            if adapter.id not in self._adapters:
                self.load_adapter(adapter)  # vLLM would load it by itself, but crash if it is broken
            self._adapters.move_to_end(adapter.id)
            lora = self._lora(adapter)
        self._submit_as(pending, prompt, params, lora_request=lora)

    def cancel(self, key: int) -> None:
        self._drop(key)
        self._leave_exclusion(key)

    def _drop(self, key: int) -> None:
        self._labels.pop(key, None)
        if (pending := self._running.pop(key, None)) is not None:
            self._abort([pending.id])
        if (beams := self._searches.pop(key, None)) is not None:
            self._abort([pending.id for pending in beams.waiting.values()])

    def _leave_exclusion(self, key: int) -> None:
        self._leave_alternatives(key)
        if self._exclusion is not None:
            self._late += [failed(late, error) for late, error in self._exclusion.leave(key)]

    def _leave_alternatives(self, key: int) -> None:
        if self._alternatives is not None:
            self._late += [failed(late, error) for late, error in self._alternatives.leave(key)]

    def step(self) -> Step:
        """Run the necessary parts of LLMEngine.step, without its loggers and caches."""
        step, beam_tokens = self._results.read(self._outputs())
        if self._labels:
            step = step._replace(others=list(filter(None, map(self._label_output, step.others))))
        outputs = step.others
        for token in beam_tokens:
            outputs.extend(self._beam_output(token))
        for output in outputs:
            if output.finish is not None:
                self._running.pop(output.key, None)
                self._leave_exclusion(output.key)
        if self._late:
            outputs.extend(self._late)
            self._late = []
        return step

    def _label_output(self, output: Output) -> Output | None:
        """Return an output, or None if it belongs to a request with labels that continues."""
        labels = self._labels.get(output.key)
        if labels is None:
            return output
        result = labels.take(output)
        if result is None:
            try:
                self._submit_part(labels)
            except Exception as refusal:  # vLLM refuses the part; only this request fails
                result = failed(output.key, refusal)
        if result is not None:
            del self._labels[output.key]
        return result

    # -- beams ---------------------------------------------------------------------------------------------------

    def _continue(self, beams: Beams) -> None:
        """Request the candidates for each beam's next token. The prefix cache contains all but a beam's last token."""
        search = beams.search
        beams.alternatives = [()] * len(search.beams)
        sampling = search.sampling._replace(num_beams=1, max_new_tokens=1, top_logprobs=search.width, stop_token_ids=())
        for number, beam in enumerate(search.beams):
            beams.waiting[number] = pending = Pending(beams.key, num_tops=search.width, beam=number)
            prompt = self._prompt([*beams.request.ids, *beam.ids], beams.media, sampling)
            self._submit(pending, prompt, self._params(sampling), beams.request.adapter)

    def _beam_output(self, token: BeamToken) -> list[Output]:
        """Add the candidates for a beam's next token to its search, and return the outputs if the search has ended."""
        number = token.pending.beam
        beams = self._searches.get(token.pending.key)
        if beams is None or number is None:
            return []
        del beams.waiting[number]
        beams.alternatives[number] = token.alternatives
        error = token.error
        if error is None:
            if beams.waiting:
                return []
            try:
                if not beams.search.advance(beams.alternatives):
                    self._continue(beams)
                    return []
                del self._searches[beams.key]
                best = enumerate(beams.search.best())
                return [Output(beams.key, beam.ids, beam.logprobs, beam.finish, number) for number, beam in best]
            except Exception as refusal:  # vLLM refuses a beam, for example if it is too long; only this search fails
                error = str(refusal)
        self._drop(beams.key)
        return [failed(beams.key, error)]

    # -- adapters ------------------------------------------------------------------------------------------------

    def load_adapter(self, adapter: Adapter) -> None:
        check_weights(Path(adapter.path))
        self._engine.add_lora(self._lora(adapter))
        self._adapters[adapter.id] = None
        while len(self._adapters) > self._max_adapters:  # vLLM also evicts the least recently used adapter
            self._adapters.popitem(last=False)

    def drop_adapter(self, adapter: Adapter) -> None:
        self._engine.remove_lora(adapter.id)
        self._adapters.pop(adapter.id, None)

    def _lora(self, adapter: Adapter) -> Any:
        return self._lora_request(
            lora_name=f"{adapter.name}/{adapter.id}", lora_int_id=adapter.id, lora_path=adapter.path
        )


# -- pooling models: embeddings, scores and classifications of whole texts ---------------------------------------------


_MODES = {"cls": "CLS", "last": "LAST", "mean": "MEAN"}


def pooling_type(mode: str, where: str) -> str:
    """Return vLLM's name for a pooling mode.

    Args:
        mode: the handler's name for the mode.
        where: the option or directory that selects the mode, for the error message.

    Raises:
        ConfigError: vLLM does not support the mode.
    """
    if mode not in _MODES:
        raise ConfigError(f"{where}: vLLM does not support pooling={mode}; the engine openvino does")
    return _MODES[mode]


class VllmPooling(NoAdapters, CoreEngine):
    """An engine whose requests contain `Pooling` instead of `Sampling`. See `engines.base.Engine`.

    vLLM returns the pooled embedding or the logits. All further computation takes place here, as in other engines.
    """

    no_adapters = NO_POOLED_LORA

    def __init__(self, config: EngineConfig) -> None:
        self._files = read_pooling(config.model_path, config.options.pooling)
        embeds = config.task is Task.EMBEDDING
        more: dict[str, Any] = {"pooler_config": {"use_activation": not embeds}}
        if embeds:
            more["pooler_config"]["seq_pooling_type"] = pooling_type(self._files.mode, str(config.model))
        else:
            # Without an activation, vLLM before 0.31 also omits the activation inside BERT's pooler. The activation of
            # a regression is the identity (vllm/model_executor/layers/pooler/activations.py, get_act_fn).
            more["hf_overrides"] = {"problem_type": "regression"}
        self._task = "embed" if embeds else "classify"
        super().__init__(config, runner="pooling", **more)
        from vllm.inputs import tokens_input
        from vllm.pooling_params import PoolingParams

        self._tokens_input, self._params = tokens_input, PoolingParams
        self._running: dict[int, tuple[Pending, Pooling]] = {}
        dimensions = self._warm_up()
        began = time.monotonic()
        self._warm_up()
        info = engine_info(self._engine, time.monotonic() - began)
        self.info = self._files.described(info, dimensions)

    def _warm_up(self) -> int:
        """Process a text of one token, and return the number of dimensions of the result."""
        self.add(EngineRequest(0, [0], Pooling("embed", normalize=False)))
        while True:
            for output in self.step().others:
                if output.extras is None or output.extras.vector is None:
                    raise RuntimeError(f"the first request failed: {output.error}")
                return len(output.extras.vector)

    def add(self, request: EngineRequest) -> None:
        pooling = request.pooling
        types = None if pooling.second is None else {"compressed_token_type_ids": pooling.second}
        params = self._params(use_activation=self._task == "classify", task=self._task, extra_kwargs=types)
        pending = Pending(request.key)
        prompt = self._tokens_input(list(request.ids), cache_salt=pooling.cache_salt or None)
        self._submit_as(pending, prompt, params)
        self._running[request.key] = pending, pooling

    def cancel(self, key: int) -> None:
        if (running := self._running.pop(key, None)) is not None:
            self._abort([running[0].id])

    def step(self) -> Step:
        outputs: list[Output] = []
        for output in self._outputs():
            if output.finish_reason is None or (pending := self._results.pending.pop(output.request_id, None)) is None:
                continue
            _, pooling = self._running.pop(pending.key)
            if output.pooling_output is None:
                error = f"vLLM ended the request: {output.finish_reason!s}"
                outputs.append(Output(pending.key, finish=Finish.ERROR, error=error))
                continue
            values = output.pooling_output.float().numpy().reshape(-1)
            outputs.append(self._files.output(pending.key, values, pooling))
        return Step.of(outputs)


# -- functions that an engine's module must define (`engines/README.md`) -----------------------------------------------


def check(model_id: str | None, config: EngineConfig) -> None:
    problems = Problems()
    with problems:
        if config.options.pooling != "auto":
            pooling_type(config.options.pooling, f"option.pooling={config.options.pooling}")
    with problems:
        check_model(model_id, config, partial(engine_arguments, num_devices=1, cpu=False))
    problems.check()


def prepare(model_id: str | None, config: EngineConfig) -> Path:
    return prepare_checkpoint(model_id)


def capabilities(config: EngineConfig) -> Capabilities:
    if config.task is Task.TRANSCRIPTION:
        return TRANSCRIBING
    reasons, no_adapters = dict(_REASONS), NO_LORA
    arguments = engine_arguments(config, 1, cpu=False)
    mode = str(arguments.get("logprobs_mode", "raw_logprobs"))
    if arguments.get("enable_lora"):
        # Measured with vLLM 0.32: a request for prompt log-probabilities in a batch with others crashes the engine.
        reasons["prompt_logprobs"] = NO_SCORES
        no_adapters = ""
    if not config.engine_options.get("guided_decoding", True):
        reasons["structured_output"] = "option.guided_decoding=false"
    return Capabilities(
        SUPPORTS,
        reasons,
        limits={"temperature": 2.0},
        no_adapters=no_adapters,
        labels=mode.endswith("logprobs"),
        label_reason="" if mode.endswith("logprobs") else f"logprobs_mode={mode} reports logits",
        no_media=no_media(config.model),
        structural_tags=structural_tags(arguments),
    )


def load(config: EngineConfig) -> Vllm | VllmPooling | VllmWhisper:
    if config.task is Task.TRANSCRIPTION:
        return VllmWhisper(config)
    return Vllm(config) if config.task is Task.GENERATION else VllmPooling(config)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    if config.task is Task.TRANSCRIPTION:
        tokenizer = files.load_tokenizer(config)
        return WhisperTokenizer(tokenizer.vocabulary, tokenizer.ids, whisper_ids(config.model_path))
    if config.task is not Task.GENERATION:
        return HfPoolingTokenizer(config.model_path, config.chat_template)
    if config.engine_options.get("tokenizer_mode") == "mistral":
        return MistralTokenizer(config.model_path)
    return files.load_tokenizer(config)


# -- convert prompts to inputs of vLLM's engine; vLLM's own processor of the model reads media -------------------------


def engine_input(
    renderer: Any, ids: Sequence[int], prompt: MediaPrompt | None, tokens: Mapping[str, MediaTokens], salt: str = ""
) -> Any:
    """Return the engine's input for a prompt, which may contain media.

    vLLM's caches identify media by their digests, so only media with equal digests share entries.

    Args:
        renderer: the engine's renderer.
        ids: ids of the prompt, with one placeholder for each token of the media.
        prompt: the prompt's media, or None.
        tokens: the model's media tokens, by kind of medium.
        salt: the prompt shares the prefix cache only with prompts that have the same salt. "" means no salt.

    Raises:
        ValueError: vLLM refuses the media, or computes different ids.
    """
    if prompt is None:
        from vllm.inputs import tokens_input

        return tokens_input(list(ids), cache_salt=salt or None)
    data: dict[str, list[Any]] = {}
    names: dict[str, list[str]] = {}
    for medium in prompt.media:
        data.setdefault(medium.kind, []).append(_DATA[medium.kind](medium))
        names.setdefault(medium.kind, []).append(medium.digest)
    request = {
        "prompt_token_ids": collapse(ids, prompt.media, tokens),
        "multi_modal_data": data,
        "multi_modal_uuids": names,
        **({"cache_salt": salt} if salt else {}),
    }
    (result,) = renderer.render_cmpl([request])
    if list(result["prompt_token_ids"]) != list(ids):
        computed = len(result["prompt_token_ids"])
        raise ValueError(f"vLLM computes {computed} tokens for a prompt of {len(ids)} tokens, which is a bug")
    return result


def _samples(clip: Medium) -> tuple[Any, int]:
    import numpy

    return numpy.frombuffer(clip.data, dtype=numpy.float32), SAMPLE_RATE


_DATA: dict[str, Callable[[Medium], Any]] = {"image": pillow_image, "audio": _samples}
"""Functions that convert media to vLLM's format, by kind of media."""


# -- beam search for an engine that has none: every beam is extended by one token at a time ----------------------------
# The usual method is used: of the likely continuations of all beams, the most likely are kept. A beam that ends with an
# end token is set aside, and ranked by its log-probability divided by its length to the power of `length_penalty`.


@dataclass(frozen=True)
class Beam:
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: Finish | None = None

    def score(self, length_penalty: float) -> float:
        return sum(self.logprobs) / float(max(len(self.ids), 1) ** length_penalty)


@dataclass
class BeamSearch:
    """A beam search. Each call to `advance` extends all running beams by one token.

    Args:
        sampling: parameters, of which only num_beams, max_new_tokens, length_penalty, early_stopping and
            stop_token_ids are used.
        eos: ids that end a beam with Finish.EOS.
        beams: running beams.
        ended: beams that have ended.
    """

    sampling: Sampling
    eos: Collection[int]
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    ended: list[Beam] = field(default_factory=list)

    @property
    def width(self) -> int:
        """The number of candidates for each beam's next token: enough for a single beam to replace all others."""
        return 2 * self.sampling.num_beams

    def advance(self, alternatives: Sequence[Alternatives]) -> bool:
        """Extend every running beam by one token, and return whether the search has ended.

        Args:
            alternatives: candidates for the next token of each running beam, most likely first.
        """
        size, penalty = self.sampling.num_beams, self.sampling.length_penalty
        candidates = (
            Beam((*beam.ids, id), (*beam.logprobs, logprob), self._finish(id))
            for beam, options in zip(self.beams, alternatives, strict=True)
            for id, logprob in options[: self.width]
        )
        best = heapq.nlargest(self.width, candidates, key=lambda beam: sum(beam.logprobs))
        # A beam may end only among the best `size`, because the search would not keep it otherwise.
        self.ended += [beam for beam in best[:size] if beam.finish]
        self.ended = heapq.nlargest(size, self.ended, key=lambda beam: beam.score(penalty))
        self.beams = [beam for beam in best if not beam.finish][:size]
        if not self.beams or len(self.beams[0].ids) >= self.sampling.max_new_tokens:
            return True
        if len(self.ended) < size:
            return False
        return self.sampling.early_stopping or self.ended[-1].score(penalty) >= self.beams[0].score(penalty)

    def best(self) -> list[Beam]:
        """Return the best `num_beams` beams, ordered from best to worst."""
        length = self.sampling.max_new_tokens
        unended = [Beam(beam.ids, beam.logprobs, Finish.LENGTH) for beam in self.beams if len(beam.ids) >= length]
        candidates = self.ended + unended
        return heapq.nlargest(
            self.sampling.num_beams, candidates, key=lambda beam: beam.score(self.sampling.length_penalty)
        )

    def _finish(self, id: int) -> Finish | None:
        if id in self.sampling.stop_token_ids:
            return Finish.STOP
        return Finish.EOS if id in self.eos else None


@dataclass
class Beams:
    """A request's beam search in progress. Each beam's next token is a separate request to vLLM."""

    request: EngineRequest
    media: MediaPrompt | None
    search: BeamSearch
    waiting: dict[int, Pending] = field(default_factory=dict)  # by the beam's number
    alternatives: list[Sequence[tuple[int, float]]] = field(default_factory=list)

    @property
    def key(self) -> int:
        return self.request.key


# -- LoRA adapters: a check of their weights, which vLLM does not do, and batches either with or without adapters ------


_RANK_AXIS = {"lora_A.weight": 0, "lora_B.weight": 1}


def check_weights(directory: Path) -> None:
    """Check that an adapter's weights are finite and have the rank specified in adapter_config.json.

    In measurements with vLLM 0.32, weights that are not finite corrupted the responses to all later requests, even
    without adapters.

    Raises:
        ValueError: a tensor is not finite or has a different rank, or lora_alpha is not a finite number. The message
            names the tensor or lora_alpha.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if alpha is not None and not (isinstance(alpha, int | float) and math.isfinite(alpha)):
        raise ValueError(f"adapter_config.json: lora_alpha={alpha} is not a number")
    for name, tensor in _tensors(directory):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"the tensor {name} contains infinity or NaN")
        for end, axis in _RANK_AXIS.items():
            if name.endswith(end) and (tensor.ndim != 2 or tensor.shape[axis] != rank):
                raise ValueError(f"the tensor {name} has shape {list(tensor.shape)}, which does not fit rank {rank}")


def _tensors(directory: Path) -> list[tuple[str, Any]]:
    safe = directory / "adapter_model.safetensors"
    if safe.is_file():
        from safetensors.torch import load_file

        return list(load_file(safe).items())
    import torch

    return list(torch.load(directory / "adapter_model.bin", map_location="cpu", weights_only=True).items())


class Exclusion:
    """A queue for two kinds of requests, in order of arrival. The engine runs requests of only one kind at a time.

    `enter` starts a request at once if possible. `leave` starts requests that have waited.
    """

    def __init__(self) -> None:
        self._inside: dict[int, bool] = {}  # key -> kind; all have the same kind
        self._waiting: deque[tuple[int, bool, Callable[[], None]]] = deque()

    def enter(self, key: int, kind: bool, start: Callable[[], None]) -> None:
        """Call `start`, either now or in a later call to `leave`. If `start` fails now, the request is not added."""
        if self._waiting or not self._fits(kind):
            self._waiting.append((key, kind, start))
            return
        start()
        self._inside[key] = kind

    def enters(self, key: int, kind: bool) -> bool:
        """Add a request that does not wait. Return whether it may run now; otherwise it is not added."""
        if self._waiting or not self._fits(kind):
            return False
        self._inside[key] = kind
        return True

    def leave(self, key: int) -> list[tuple[int, Exception]]:
        """Remove a running or waiting request, and start requests that can start now. Ignore unknown keys.

        Returns:
            The keys of requests that could not be started, with their errors.
        """
        self._inside.pop(key, None)
        if self._waiting:
            self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != key)
        failed: list[tuple[int, Exception]] = []
        while self._waiting and self._fits(self._waiting[0][1]):
            next_key, kind, start = self._waiting.popleft()
            try:
                start()
            except Exception as error:  # the engine refuses this request, but the others continue
                failed.append((next_key, error))
            else:
                self._inside[next_key] = kind
        return failed

    def _fits(self, kind: bool) -> bool:
        return not self._inside or next(iter(self._inside.values())) == kind
