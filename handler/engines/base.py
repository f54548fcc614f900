"""The engine interface. An engine runs in its own process or thread (`process/engine_process.py`)."""

from __future__ import annotations

import functools
import json
import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from handler.config.config import Config
from handler.config.environment import secrets
from handler.core.errors import GenerationFailed, Overloaded, RefusedByEngine, ServingError, client_words, log_words
from handler.core.media import MediaFile, MediaPrompt, MediaTokens
from handler.core.text import Prompt, Vocabulary
from handler.core.values import (
    BY_HANDLER,
    PLAIN_TEMPLATE,
    Adapter,
    Extras,
    Finish,
    Objects,
    Pooling,
    Sampling,
    StructuredOutput,
    Task,
    TemplateOptions,
)

NO_LORA = "it was started without option.enable_lora=true"
NO_MEDIA = "the model accepts text only"

Alternatives = Sequence[tuple[int, float]]
"""The most likely token ids at one position, with their log-probabilities, best first."""


class Output(NamedTuple):
    """The result of one step for one sequence.

    Attributes:
        key: id of the engine request, chosen by the caller.
        ids: new token ids.
        logprobs: log-probability of each of `ids`, or None if the engine does not compute it.
        finish: why the sequence ended, or None if it continues.
        sequence: index of the sequence within its request; only beam search has several.
        prompt_logprobs: log-probability of each prompt token, None for the first; only in the first output, if
            requested.
        error: why the sequence ended with ERROR, in words that clients may see. Messages from other programs must have
            been passed through `client_words`.
        tops: most likely alternatives to each of `ids`, if requested.
        prompt_tops: most likely alternatives to each prompt token, if requested; the first token has none.
        extras: values that the host passes on unchanged.
        refused: whether `error` describes a problem with the request.
        detail: details of the error, for the log only.
        retry_after: if the engine was too busy, the number of seconds to wait before sending the request again, or 0
            if that is unknown. None for any other error.
    """

    key: int
    ids: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    finish: Finish | None = None
    sequence: int = 0
    prompt_logprobs: Sequence[float | None] | None = None
    error: str | None = None
    tops: Sequence[Alternatives] | None = None
    prompt_tops: Sequence[Alternatives] | None = None
    extras: Extras | None = None
    refused: bool = False
    detail: str = ""
    retry_after: float | None = None

    @property
    def failure(self) -> ServingError:
        """The exception to raise for a request that ended with ERROR."""
        if self.refused:
            return RefusedByEngine(self.error or "", self.detail)
        if self.retry_after is not None:
            return Overloaded(self.error or "the engine is busy", retry_after=self.retry_after, detail=self.detail)
        failed = "request failed in the engine"
        return GenerationFailed(f"{failed}: {self.error}" if self.error else failed, detail=self.detail)

    @property
    def is_plain(self) -> bool:
        """Whether the output contains nothing but tokens and perhaps the end of the sequence."""
        return self.prompt_logprobs is None and self.tops is None and self.extras is None


class Unsupported(ValueError):
    """The engine does not support a request, because of the request's own values."""


def failed(key: int, error: Exception | str) -> Output:
    """Return the output that ends a request because of an engine error.

    Args:
        error: an exception, or a message from another program.
    """
    words, detail = _messages(error)
    return Output(key, finish=Finish.ERROR, error=words, detail=detail, refused=isinstance(error, Unsupported))


def first_stop(ids: Sequence[int], stops: Collection[int], num_before: int, sampling: Sampling) -> int | None:
    """Return the index of the first of `ids` that ends the sequence, or None. Use this if an engine misses stop ids.

    Args:
        ids: new ids of the sequence.
        stops: ids that end the sequence, but only after `min_new_tokens` ids.
        num_before: number of ids that the sequence already has.
    """
    places = (at for at, id in enumerate(ids) if id in stops and num_before + at >= sampling.min_new_tokens)
    return next(places, None)


def engine_failure(error: Exception | str) -> GenerationFailed:
    """Return the error for the requests that an engine was processing when it failed."""
    words, detail = _messages(error)
    return GenerationFailed(f"engine failure: {words}", detail=detail)


def describe(error: BaseException) -> str:
    """Return an exception's type and message, for the log."""
    name, text = type(error).__name__, str(error).strip()
    return f"{name}: {text}" if text else name


def _messages(error: Exception | str) -> tuple[str, str]:
    """Return two messages for an engine error: one for clients, and one for the log ("" if both are equal)."""
    keys = secrets()
    text = str(error).strip()
    reason = text if isinstance(error, str) else describe(error)
    words = client_words(text, keys).removesuffix(":") or "it raised an error"
    return words, "" if words == reason else log_words(reason, keys)


class Step(NamedTuple):
    """The result of one step for all sequences.

    Most sequences get one token per step and nothing else. Those tokens are stored in three columns: `keys`, `ids` and
    `logprobs`, which needs far fewer objects than an `Output` for each token. All other results are in `others`.
    """

    keys: list[int]
    ids: list[int]
    logprobs: list[float | None]
    others: list[Output]

    @classmethod
    def of(cls, outputs: list[Output]) -> Step:
        """Return a step without columns of tokens."""
        return cls([], [], [], outputs)

    def add(self, key: int, id: int, logprob: float | None) -> None:
        """Add a sequence's only new token to the columns."""
        self.keys.append(key)
        self.ids.append(id)
        self.logprobs.append(logprob)


new_step: Callable[[tuple[Any, ...]], Step] = functools.partial(tuple.__new__, Step)
"""Create a step from a tuple of all its fields, faster than `Step(...)`."""


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine.

    Attributes:
        options: values of all options; for None, the engine chooses a value. `engine_options` contains the options that
            are specific to this engine.
        model: path of the files to load for `option.model_id`.
        source: directory from which these files were converted, or None if they were not converted.
        chat_template: template that replaces the model's own.
        task: what the model computes, according to `option.task` and the model's files.
        weights: file with the model's weights, for engines that load it and use `model` only for the rest.
    """

    options: Config = field(default_factory=Config)
    model: Path | None = None
    chat_template: str | None = None
    task: Task = Task.GENERATION
    source: Path | None = None
    weights: Path | None = None

    @property
    def engine_options(self) -> Mapping[str, Any]:
        """The options that are specific to the engine."""
        return self.options.engine_options

    @property
    def model_path(self) -> Path:
        """The path of the files to load, for engines that have a model."""
        assert self.model is not None
        return self.model

    @property
    def weights_path(self) -> Path:
        """The file with the model's weights, for engines that load a file."""
        assert self.weights is not None
        return self.weights


@dataclass(frozen=True)
class EngineInfo:
    """Information about a loaded engine.

    Attributes:
        max_total_tokens: maximum number of tokens in the prompt and the response together.
        dimensions: number of dimensions of an embedding, if the model computes embeddings; 0 if it generates text.
        longest_step: upper estimate of a step's duration in seconds, as measured while loading; 0 if unknown.
        adapters: names and paths of the LoRA adapters that the engine's servers have loaded.
    """

    name: str
    version: str
    device: str
    dtype: str
    max_total_tokens: int
    dimensions: int = 0
    longest_step: float = 0.0
    adapters: tuple[tuple[str, str], ...] = ()


class EngineRequest(NamedTuple):
    """A request to an engine for one sequence, or for several if it uses beam search.

    Attributes:
        key: id of the request, which outputs refer to.
        ids: token ids of the prompt.
        parameters: `Sampling`; or `Pooling` if the engine was loaded for a pooling task, or if the kind is labels.
        media: description of the prompt's media; may be None if there are none.
        goes_on: whether `ids` end with a part of the response that was already delivered.
    """

    key: int
    ids: Sequence[int]
    parameters: Sampling | Pooling
    adapter: Adapter | None = None
    media: MediaFile | None = None
    goes_on: bool = False

    @property
    def sampling(self) -> Sampling:
        """Parameters of a request to an engine that generates text."""
        assert isinstance(self.parameters, Sampling)
        return self.parameters

    @property
    def pooling(self) -> Pooling:
        """Parameters of a request for an embedding, scores or log-probabilities."""
        assert isinstance(self.parameters, Pooling)
        return self.parameters

    def read_media(self) -> MediaPrompt | None:
        """Read the prompt's media. Return None if `media` is None.

        Raises:
            OSError: the process that owns the media has freed them.
        """
        return None if self.media is None else self.media.read()


def pack_step(step: Step) -> tuple[Any, ...]:
    """Return a step as plain values, as `pack` does for a request."""
    if not step.others:
        return tuple(step)
    packed = [(*output[:3], output.finish and output.finish.value, *output[4:]) for output in step.others]
    return (*step[:3], packed)


def unpack_step(packed: tuple[Any, ...]) -> Step:
    if not packed[3]:
        return new_step(packed)
    others = [Output._make((*output[:3], _FINISHES[output[3]], *output[4:])) for output in packed[3]]
    return new_step((*packed[:3], others))


_FINISHES: Mapping[str | None, Finish | None] = {None: None, **{finish.value: finish for finish in Finish}}

PackedRequest = tuple[int, Sequence[int], tuple[Any, ...] | Pooling, Adapter | None, MediaFile | None, bool]
"""An EngineRequest as a plain tuple, because sending the class names would take longer than sending the values."""


def pack(request: EngineRequest) -> PackedRequest:
    key, ids, parameters, adapter, media, goes_on = request
    packed = tuple(parameters) if isinstance(parameters, Sampling) else parameters
    return key, ids, packed, adapter, media, goes_on


def unpack(packed: PackedRequest) -> EngineRequest:
    key, ids, parameters, adapter, media, goes_on = packed
    sampling = parameters if isinstance(parameters, Pooling) else Sampling._make(parameters)
    return EngineRequest(key, ids, sampling, adapter, media, goes_on)


class Engine(Protocol):
    """Computes many sequences at once. Only one thread uses an engine. A call may block, even while it holds the GIL.

    `add` may raise an exception to refuse a request. An exception from `step` means that the engine is broken; an
    engine that breaks after it was loaded is loaded again. There is no further output with the key of a request after
    the request is cancelled, or after the step in which its last sequence ended.
    """

    info: EngineInfo

    def add(self, request: EngineRequest) -> None:
        """Start a request. A later `step` returns its first output."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, or raise an exception if it is broken. Requests may use adapters that are not loaded."""

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free an adapter. Requests added earlier may still be using it, but no later request will."""

    def cancel(self, key: int) -> None:
        """End a request without further output. Unknown keys are ignored."""

    def step(self) -> Step:
        """Advance some requests, blocking as long as needed. The result may be empty, e.g. during a long prefill."""

    def close(self) -> None:
        """Free the engine's resources."""


class Interrupted(Exception):
    """Raised by `step` when it returns early because commands may have arrived."""


class OwnServerLost(RuntimeError):
    """The server that an engine has started has ended, or does not respond. The message is written for clients."""


@runtime_checkable
class OwnsServer(Protocol):
    """An engine that may have started a server."""

    def end_of_server(self) -> int | None:
        """Return a file descriptor that becomes readable when the server ends; `step` then raises OwnServerLost.

        Returns:
            None if there is no such server, or the system cannot watch it.
        """


@runtime_checkable
class Interruptible(Protocol):
    """An engine whose steps wait for another process, but can stop waiting when a request arrives."""

    def interrupt_on(self, fd: int) -> bool:
        """Make `step` raise Interrupted soon after `fd` becomes readable.

        Interrupted may be raised once more after `fd` has been read.

        Returns:
            Whether this engine supports interruptions.
        """


@runtime_checkable
class RunsLoop(Protocol):
    """An engine whose steps run an event loop of uvloop.

    On the main thread, each run sets up the signals again, which takes longer than a step. So the steps run on a
    thread.
    """

    def run_steps(self, deliver: Callable[[Step], object]) -> None:
        """Run the loop, and pass each step to `deliver` until it returns false. Raises the exceptions of `step`.

        This is faster than calling `step` again and again, because each call of `step` starts the loop again.
        """


class EngineStatistics(NamedTuple):
    """Statistics of an engine. A value is None if the engine does not report it.

    Attributes:
        num_waiting: number of requests that are waiting in the engine, or are suspended because its cache is full.
        kv_cache_usage: fraction of the KV cache in use, from 0 to 1.
        prefix_cache_queries: number of prompt tokens looked up in the prefix cache since the engine started.
        prefix_cache_hits: number of prompt tokens found in the prefix cache since the engine started.
        num_preemptions: number of times since the engine started that a request was suspended to free cache for other
            requests.
    """

    num_waiting: int | None = None
    kv_cache_usage: float | None = None
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    num_preemptions: int | None = None


@runtime_checkable
class Reporting(Protocol):
    """An engine that reports statistics."""

    def statistics(self) -> EngineStatistics:
        """Return current statistics. Called at most once per second, and whenever the engine runs out of requests."""


class NoAdapters:
    """Methods for engines that do not support LoRA adapters."""

    no_adapters: ClassVar[str]

    def load_adapter(self, adapter: Adapter) -> None:
        raise ValueError(self.no_adapters)

    def drop_adapter(self, adapter: Adapter) -> None:
        pass


class Tokenizer(Protocol):
    """Converts text to token ids in the host's process: long texts on threads, short texts on the event loop.

    A tokenizer must be thread-safe.

    Attributes:
        chat_template: text of option.chat_template or, if it is not set, of the model's template; "" if there is
            neither.
        media_tokens: token counters for the kinds of media that the model accepts, by kind.
    """

    chat_template: str
    media_tokens: Mapping[str, MediaTokens]

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary of every response, or None if each prompt has its own."""

    def encode(self, text: str) -> Prompt:
        """Encode a prompt, and add the special tokens that the tokenizer usually adds, such as the BOS token.

        Special tokens in the prompt are recognised, except by `MistralTokenizer`.
        """

    def encode_chat(self, messages: Objects, tools: Objects = (), options: TemplateOptions = PLAIN_TEMPLATE) -> Prompt:
        """Encode messages with the chat template.

        Special tokens in messages are recognised, except by `MistralTokenizer`. No other special tokens are added,
        because the template contains them.

        Args:
            messages: objects with `role` and `content`; the latter is a string or a list of parts (see `Request`). If
                the template supports tools, the role may be `tool`, and an assistant's message may have `tool_calls` in
                OpenAI's format, but with objects as `arguments`.
            tools: tools in OpenAI's format; empty unless the template supports tools.

        Raises:
            InvalidPayload: the model has no chat template, or its template refuses these messages.
        """


class StructuredOutputCheck(Protocol):
    """Compiles schemas and grammars as the engine would, but in a sandbox process (`process/sandbox.py`).

    An optional method `prepare`, without arguments, is called before the limits for schemas and grammars apply.
    """

    def __call__(self, structured_output: StructuredOutput) -> int | None:
        """Compile a schema or grammar.

        If the engine cannot enforce it, any exception may be raised; its message is the reason.

        Returns:
            Number of bytes that the engine would never free, or None if it would free everything.
        """


JSON_TAGS = frozenset({"json"})
"""The argument styles that every release of xgrammar since 0.1.25 supports in structural tags."""

_UNMAPPED = "it has no such parameter"


@dataclass(frozen=True)
class Capabilities:
    """The parts of a request that an engine supports.

    Attributes:
        supports: fields of Sampling that the engine implements, excluding those that the handler implements.
        reasons: maps a Sampling field to the reason why its non-neutral values are refused. May include fields in
            `supports`.
        limits: maps a Sampling field to its largest allowed value.
        no_adapters: why the engine does not support LoRA adapters; "" if it does.
        labels: whether the engine computes the log-probabilities of labels. For other engines, `LabelEngine` reads them
            from alternatives, scored prompts or tokens that are the only allowed ones.
        label_reason: why `LabelEngine` cannot be used either; "" if the other fields determine that.
        no_media: maps a kind of media to the reason why the engine does not accept it, or to "" if it does. The reason
            for any other kind is NO_MEDIA.
        sampling_defaults: maps a Sampling field to LMI's default for this engine, used with `do_sample`.
        structural_tags: argument styles that the engine supports in xgrammar's structural tags; empty if it does not
            support such tags.
    """

    supports: Collection[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_adapters: str = ""
    labels: bool = False
    label_reason: str = ""
    no_media: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    structural_tags: frozenset[str] = frozenset()

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Maps each Sampling field that may be refused to the reason, including fields that have no implementation."""
        mapped = {*self.supports, *self.reasons, *BY_HANDLER}
        return {**self.reasons, **{name: _UNMAPPED for name in Sampling._fields if name not in mapped}}

    @property
    def no_labels(self) -> str:
        """Why the log-probabilities of labels are not available; "" if they are."""
        if self.labels or self.label_reason:
            return self.label_reason
        reasons = self.unsupported
        is_read = "top_logprobs" not in reasons or "prompt_logprobs" not in reasons
        return "" if is_read else reasons["top_logprobs"]


_FIRST_REQUEST = Sampling(max_new_tokens=2, ignore_eos=True)


def warm_up(engine: Engine, ids: Sequence[int], sampling: Sampling = _FIRST_REQUEST) -> float:
    """Run a request with the prompt `ids`, so that no client's request has to wait for compilation or allocation.

    Returns:
        The duration of the last step in seconds. That step computes a single token, so a step that computes n tokens
        takes at most n times as long.

    Raises:
        RuntimeError: the request failed. `add` and `step` may raise other exceptions.
    """
    engine.add(EngineRequest(0, ids, sampling))  # the hosts' keys begin at 1
    while True:
        began = time.monotonic()
        for output in engine.step().others:
            if output.error is not None:
                raise RuntimeError(f"the engine's first request failed: {output.error}")
            if output.finish is not None:
                return time.monotonic() - began


# -- for engines: conversion of Sampling to an engine's arguments. Fields that its table does not contain are refused --


Rule = str | Callable[..., Mapping[str, Any]]
"""The engine's name for a field, or a function that returns the engine's arguments for one or more Sampling fields."""


def arguments(table: Mapping[str, Rule], sampling: Sampling, *more: Any) -> dict[str, Any]:
    """Return the engine's arguments that correspond to a Sampling object.

    Args:
        table: maps a Sampling field to its rule. If several fields share a function as their rule, it is called once.
        more: arguments that functions receive after `sampling`.
    """
    values: dict[str, Any] = {}
    for name, rule in table.items():
        if isinstance(rule, str):
            values[rule] = getattr(sampling, name)
    for rule in dict.fromkeys(table.values()):
        if not isinstance(rule, str):
            values |= rule(sampling, *more)
    return values


def unless_neutral(field: str, name: str = "", make: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Return a rule that passes a field on only if its value is not the default.

    Args:
        name: name of the engine's argument; defaults to the field's name.
        make: function that converts the field's value to the argument's value.
    """
    neutral = Sampling._field_defaults[field]

    def rule(sampling: Sampling, *more: Any) -> dict[str, Any]:
        value = getattr(sampling, field)
        return {} if value == neutral else {name or field: make(value)}

    return rule


def passed_otherwise(*parameters: Any) -> dict[str, Any]:
    """Return no arguments. This is the rule for fields that do not reach the engine as arguments."""
    return {}


def drawn_seed(sampling: Sampling, *more: Any) -> dict[str, Any]:
    """Return the request's seed, or a random seed, for an engine whose default is the same for all requests."""
    return {"seed": random.getrandbits(64) if sampling.seed is None else sampling.seed}


def drawn_rules(no_top_k: int = 0) -> dict[str, Rule]:
    """Return the rules for the fields that matter only when sampling, with the names that vLLM and SGLang use.

    Args:
        no_top_k: value of top_k that makes the engine choose among all tokens.
    """

    def top(sampling: Sampling) -> dict[str, Any]:
        if sampling.top_p == 0:  # the smallest nucleus is one token
            return {"top_k": 1, "top_p": 1.0}
        return {"top_k": sampling.top_k or no_top_k, "top_p": sampling.top_p}

    return {"temperature": "temperature", "top_k": top, "top_p": top, "min_p": "min_p"}


def drawn_or(greedy: Mapping[str, Any], drawn: Mapping[str, Rule]) -> Rule:
    """Return a rule for `do_sample`.

    Args:
        greedy: arguments for greedy decoding.
        drawn: rules for the fields that matter only when sampling. When sampling, their arguments override `greedy`.
    """

    def rule(sampling: Sampling, *more: Any) -> dict[str, Any]:
        return {**greedy, **(arguments(drawn, sampling) if sampling.do_sample and sampling.temperature > 0 else {})}

    return rule


def logprob_rules(count: Callable[[int], int] = int) -> dict[str, Rule]:
    """Return the rules for log-probabilities in vLLM, in which a count of 0 requests no alternatives to the tokens.

    Args:
        count: function that converts the number of alternatives requested by the client to the number to request from
            vLLM.
    """

    def logprobs(sampling: Sampling) -> dict[str, Any]:
        return {"logprobs": count(sampling.top_logprobs)} if sampling.logprobs or sampling.top_logprobs else {}

    def prompt_logprobs(sampling: Sampling) -> dict[str, Any]:
        return {"prompt_logprobs": count(sampling.prompt_top_logprobs)} if sampling.prompt_logprobs else {}

    of_prompt = dict.fromkeys(("prompt_logprobs", "prompt_top_logprobs"), prompt_logprobs)
    return {"logprobs": logprobs, "top_logprobs": logprobs, **of_prompt}


def override(arguments: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine's arguments, extended and overridden by `more`. JSON objects are merged key by key."""
    nested = {
        name: {**arguments[name], **value}
        for name, value in more.items()
        if isinstance(value, dict) and isinstance(arguments.get(name), dict)
    }
    return {**arguments, **more, **nested}


COMMON_RULES: Mapping[str, Rule] = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": unless_neutral("stop_token_ids", make=list),
}
"""Rules for fields that vLLM, SGLang and servers with OpenAI's API accept under these names."""


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
PENALTIES: Mapping[str, Rule] = {name: unless_neutral(name) for name in _PENALTIES}
"""Rules for TensorRT-LLM's penalties. Neutral values are omitted, so that TensorRT-LLM applies no penalty."""


_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")


def regex_of(choices: str) -> str:
    """Return a regular expression that matches any of the strings in a JSON list."""
    return "|".join(_SPECIAL.sub(r"\\\g<0>", choice) for choice in json.loads(choices))


# -- for engines: log-probabilities of given tokens and of their most likely alternatives, computed from logits --------


def score(rows: Any, ids: Sequence[int], num_tops: int) -> tuple[list[float], list[Alternatives]]:
    """Return the log-probability of each of `ids`, and the `num_tops` most likely alternatives to each, best first.

    Args:
        rows: the logits that predict each id, as a float32 numpy array of shape [ids, vocabulary].
    """
    import numpy

    if not len(ids):
        return [], []
    highest = rows.max(axis=-1, keepdims=True)
    norms = highest[:, 0] + numpy.log(numpy.exp(rows - highest).sum(axis=-1))
    logprobs = (rows[numpy.arange(len(ids)), list(ids)] - norms).tolist()
    if not num_tops:
        return logprobs, [()] * len(ids)
    num_tops = min(num_tops, rows.shape[-1])
    best = numpy.argpartition(rows, -num_tops, axis=-1)[:, -num_tops:]
    values = numpy.take_along_axis(rows, best, axis=-1)
    order = numpy.argsort(-values, axis=-1, kind="stable")
    best = numpy.take_along_axis(best, order, axis=-1)
    values = numpy.take_along_axis(values, order, axis=-1) - norms[:, None]
    return logprobs, [tuple(zip(*row, strict=True)) for row in zip(best.tolist(), values.tolist(), strict=True)]


def score_labels(row: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each of `ids`, and after them the highest log-probability of any id.

    Args:
        row: the logits of the next token, as a float32 numpy array of shape [vocabulary].
    """
    import numpy

    row = row.astype(numpy.float64)
    highest = row.max()
    norm = highest + numpy.log(numpy.exp(row - highest).sum())
    numbers: list[float] = (numpy.append(row[list(ids)], highest) - norm).tolist()
    return numbers


# -- for engines: the silence of another process -----------------------------------------------------------------------


_STANDSTILL = 2.0  # seconds between two calls of `look`; usually at most 1


class Silence:
    """Measures how long another process has been silent. Waiting code should call `look` at least once per second.

    While a container or virtual machine is paused, neither that code nor the engine runs, so pauses do not count.
    """

    def __init__(self) -> None:
        self._held = False
        self.begin()

    def begin(self) -> None:
        self._began = self._looked = time.monotonic()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Do not count the time in this context, in which the other process has nothing to do."""
        self._held = True
        began = time.monotonic()
        try:
            yield
        finally:
            self._held = False
            self._looked = time.monotonic()
            self._began += self._looked - began

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def look(self, waited: float = 0.0) -> float:
        """Return how long the process has been silent, in seconds.

        Args:
            waited: maximum number of seconds that the caller has deliberately waited since the last call.
        """
        if self._held:
            return 0.0
        now = time.monotonic()
        if now - self._looked > waited + _STANDSTILL:
            self._began += now - self._looked
        self._looked = now
        return now - self._began
