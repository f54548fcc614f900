"""Interface of an engine, which `process/engine_process.py` calls in a process or thread of its own."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
NO_MEDIA = "the model takes text only"

Alternatives = Sequence[tuple[int, float]]
"""The most likely ids at one position with their log-probabilities, best first."""


class Output(NamedTuple):
    """One step's result for one sequence.

    Attributes:
        key: the caller's id of the engine request.
        ids: new token ids.
        logprobs: a log-probability for each of `ids`, None if the engine has none.
        finish: why the sequence ended; None while it goes on.
        sequence: number of the sequence within its request; only beam search has several.
        prompt_logprobs: on request, once, with the first output: one a prompt token, None for the first.
        error: the reason of `finish` ERROR, in words for the client: a foreign program's only by `client_words`.
        tops: on request, for each of `ids`.
        extras: what is passed on as it is.
        prompt_tops: as `tops`, for the prompt's tokens; nothing for the first.
        refused: `error` says what is wrong with the request.
        detail: what only the log may say of the error.
        retry_after: the engine is busy: seconds after which the request may come again, 0 if nobody knows. None:
            `error` is something else.
    """

    key: int
    ids: Sequence[int]
    logprobs: Sequence[float | None]
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
        """The error of a request that ended with ERROR."""
        if self.refused:
            return RefusedByEngine(self.error or "", self.detail)
        if self.retry_after is not None:
            return Overloaded(self.error or "the engine is busy", retry_after=self.retry_after, detail=self.detail)
        failed = "request failed in the engine"
        return GenerationFailed(f"{failed}: {self.error}" if self.error else failed, detail=self.detail)

    @property
    def is_plain(self) -> bool:
        """Return whether nothing comes with its tokens but the sequence's end."""
        return self.prompt_logprobs is None and self.tops is None and self.extras is None


def failed(key: int, error: Exception | str) -> Output:
    """Return the output that ends a request with an error of foreign code."""
    words, detail = _said(error)
    return Output(key, (), (), Finish.ERROR, error=words, detail=detail)


def engine_failure(error: Exception | str) -> GenerationFailed:
    """Return the error of all requests in an engine that is lost."""
    words, detail = _said(error)
    return GenerationFailed(f"engine failure: {words}", detail=detail)


def describe(error: BaseException) -> str:
    """Return an exception's type and message, for the log."""
    name, text = type(error).__name__, str(error).strip()
    return f"{name}: {text}" if text else name


def _said(error: Exception | str) -> tuple[str, str]:
    """Return foreign code's message for clients, and a longer one for the log if needed."""
    known = secrets()
    text = str(error).strip()
    reason = text if isinstance(error, str) else describe(error)
    words = client_words(text, known) or "it raised an error"
    return words, "" if words == reason else log_words(reason, known)


class Step(NamedTuple):
    """One step's result for all sequences.

    Most sequences get one token a step, and nothing with it. Those lie in three columns, `keys`, `ids` and `logprobs`,
    which need a tenth of the objects to create, send and read. All else is in `others`.
    """

    keys: list[int]
    ids: list[int]
    logprobs: list[float | None]
    others: list[Output]


@dataclass(frozen=True)
class EngineConfig:
    """The model that an engine loads, and how.

    Attributes:
        options: every option by its name; None leaves a value to the engine. `engine_options` are its own.
        model: the files that `option.model_id` stands for.
        source: the directory that they were converted from; None if they were not, or from no directory.
        chat_template: replaces the model's own.
        task: what the model computes, by `option.task` and its files.
    """

    options: Config = field(default_factory=Config)
    model: Path | None = None
    chat_template: str | None = None
    task: Task = Task.GENERATION
    source: Path | None = None


@dataclass(frozen=True)
class EngineInfo:
    """Facts of a loaded engine. `max_total_tokens` counts the ids of prompt and answer together."""

    name: str
    version: str
    device: str
    dtype: str
    max_total_tokens: int
    dimensions: int = 0  # numbers of an embedding


class EngineRequest(NamedTuple):
    """A request as an engine gets it: one sequence, or a beam search with several.

    Attributes:
        key: the caller's id, which outputs name.
        ids: of the prompt.
        parameters: Pooling where the engine was loaded for that.
        media: of the prompt, where the model takes them.
        goes_on: `ids` end with a part of the answer, which has been delivered.
    """

    key: int
    ids: Sequence[int]
    parameters: Sampling | Pooling
    adapter: Adapter | None = None
    media: MediaFile | None = None
    goes_on: bool = False

    @property
    def sampling(self) -> Sampling:
        """The parameters, in an engine that generates."""
        assert isinstance(self.parameters, Sampling)
        return self.parameters

    @property
    def pooling(self) -> Pooling:
        """The parameters, in an engine that pools."""
        assert isinstance(self.parameters, Pooling)
        return self.parameters

    def read_media(self) -> MediaPrompt | None:
        """Read the media; None if the model takes none.

        Raises:
            OSError: their owner has freed them.
        """
        return None if self.media is None else self.media.read()


PackedRequest = tuple[int, Sequence[int], tuple[Any, ...] | Pooling, Adapter | None, MediaFile | None, bool]
"""An EngineRequest without class names, which cost more to send than what they name."""


def pack(request: EngineRequest) -> PackedRequest:
    key, ids, parameters, adapter, media, goes_on = request
    packed = tuple(parameters) if isinstance(parameters, Sampling) else parameters
    return key, ids, packed, adapter, media, goes_on


def unpack(packed: PackedRequest) -> EngineRequest:
    key, ids, parameters, adapter, media, goes_on = packed
    sampling = parameters if isinstance(parameters, Pooling) else Sampling._make(parameters)
    return EngineRequest(key, ids, sampling, adapter, media, goes_on)


class Engine(Protocol):
    """Steps many sequences at once; used by one thread, which it may block while it holds the GIL.

    `add` may raise to refuse one request. An exception from `step` means that the engine is broken; once it has been
    ready, it is loaded again. No output comes for a key after `cancel`, or after the step in which its sequences ended.
    """

    info: EngineInfo

    def add(self, request: EngineRequest) -> None:
        """Start a request; its first output comes from a later `step`."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter and raise where it is broken. Requests may also name an adapter that was not loaded."""

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free an adapter. Earlier requests may still use it; no later one names it."""

    def cancel(self, key: int) -> None:
        """Forget a request; unknown keys are ignored."""

    def step(self) -> Step:
        """Advance some requests, blocking as long as needed. The result may be empty, as within a long prefill."""

    def close(self) -> None:
        """Free the engine's resources."""


class Interrupted(Exception):
    """Raised by a step that ended early, because commands may be there to read."""


@runtime_checkable
class Interruptible(Protocol):
    """An engine whose steps wait for another process, and can stop waiting when a request comes."""

    def interrupt_on(self, fd: int) -> bool:
        """Make `step` raise Interrupted soon after `fd` becomes readable, perhaps once more after it was read.

        Returns:
            False if this engine cannot do so after all.
        """


class EngineStatistics(NamedTuple):
    """An engine's report on itself; None if it does not know.

    Attributes:
        num_waiting: the engine's requests that it does not compute yet, or no more, as its cache has no room.
        kv_cache_usage: used part of the KV cache, 0 to 1.
        prefix_cache_queries: prompt tokens that were looked up in the prefix cache, since the engine's start.
        prefix_cache_hits: those of them that were found.
        num_preemptions: times that a request lost its place in the cache to others, since the engine's start.
    """

    num_waiting: int | None = None
    kv_cache_usage: float | None = None
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    num_preemptions: int | None = None


@runtime_checkable
class Reporting(Protocol):
    """An engine that has statistics."""

    def statistics(self) -> EngineStatistics:
        """Return the present ones; called about once a second, and whenever the last request has ended."""


class Tokenizer(Protocol):
    """Turns text into ids, in the host's process and off the event loop; thread-safe.

    Attributes:
        vocabulary: that of every answer; None if each prompt brings its own.
        chat_template: option.chat_template or the model's own, as text; "" if it has none.
        media_tokens: by kind, of the media that the model takes.
    """

    vocabulary: Vocabulary | None
    chat_template: str
    media_tokens: Mapping[str, MediaTokens]

    def encode(self, text: str) -> Prompt:
        """Encode a prompt. Special tokens in the text are recognised; only the model's usual first token is added."""

    def encode_chat(self, messages: Objects, tools: Objects = (), options: TemplateOptions = PLAIN_TEMPLATE) -> Prompt:
        """Encode messages by the chat template. Special tokens are recognised, and none is added: it has them all.

        Args:
            messages: each with `role` and `content`, a text or a list of parts (`Request`). Where the template knows
                tools, the assistant's may also have `tool_calls` in OpenAI's form with `arguments` as
                objects, and the role `tool` is allowed.
            tools: in OpenAI's form; only where the template knows tools.

        Raises:
            InvalidPayload: the model has no chat template, or its template refuses these messages.
        """


class StructuredOutputCheck(Protocol):
    """Does with a schema or grammar what the engine would do, inside a sandbox process (`process/sandbox.py`).

    Where it has a method `prepare` without arguments, that is called before the limits of a schema or grammar apply.
    """

    def __call__(self, structured_output: StructuredOutput) -> int | None:
        """Compile it; raise any exception whose text says why the engine cannot follow it.

        Returns:
            Bytes that the engine would keep of it for the rest of its life; None if it frees them.
        """


_UNMAPPED = "it has no such parameter"


@dataclass(frozen=True)
class Capabilities:
    """The fields of a request that an engine follows.

    Attributes:
        supports: the fields of Sampling that its table maps (`engines/base.py`); without the handler's own.
        reasons: Sampling field -> why a value that would have an effect is refused; also of fields in `supports`.
        limits: Sampling field -> largest value.
        no_adapters: the reason why the engine serves no LoRA adapters; "" if it does.
        no_media: by kind, the reason why it takes no such media; "" if it does. NO_MEDIA for a kind left out.
        sampling_defaults: Sampling field -> LMI's default for this engine, used with `do_sample`.
        structural_tags: xgrammar's styles of arguments that its structural tags have; empty if it takes none.
    """

    supports: Collection[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_adapters: str = ""
    no_media: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    structural_tags: frozenset[str] = frozenset()

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Sampling field -> why it is refused: each field that has a reason, or that no table maps."""
        mapped = {*self.supports, *self.reasons, *BY_HANDLER}
        return {**self.reasons, **{name: _UNMAPPED for name in Sampling._fields if name not in mapped}}


_FIRST_REQUEST = Sampling(max_new_tokens=2, ignore_eos=True)


def warm_up(engine: Engine, ids: Sequence[int], sampling: Sampling = _FIRST_REQUEST) -> None:
    """Run a request with the prompt `ids`, which compiles and allocates before a client's request waits for that.

    Raises:
        RuntimeError: the request failed; also whatever `add` and `step` raise.
    """
    engine.add(EngineRequest(0, ids, sampling))  # the hosts' keys begin at 1
    finished = False
    while not finished:
        for output in engine.step().others:
            if output.error is not None:
                raise RuntimeError(f"its first request failed: {output.error}")
            finished = finished or output.finish is not None


# -- for engines: from the fields of Sampling to an engine's arguments; what its table lacks is refused by name --------


Rule = str | Callable[..., Mapping[str, Any]]
"""An engine's name for a field; or a function that makes arguments of a Sampling, for one field or several."""


def arguments(table: Mapping[str, Rule], sampling: Sampling, *more: Any) -> dict[str, Any]:
    """Make an engine's arguments.

    Args:
        table: field of Sampling -> rule. A function that occurs there several times is called once.
        more: for the functions, after `sampling`.
    """
    made: dict[str, Any] = {}
    for name, rule in table.items():
        if isinstance(rule, str):
            made[rule] = getattr(sampling, name)
    for rule in dict.fromkeys(table.values()):
        if not isinstance(rule, str):
            made |= rule(sampling, *more)
    return made


def unless_neutral(field: str, name: str = "", make: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Make a rule that passes a field on where it has another value than its default.

    Args:
        name: the engine's, by default the field's own.
        make: turns the field's value into the argument's.
    """
    neutral = Sampling._field_defaults[field]

    def rule(sampling: Sampling, *more: Any) -> dict[str, Any]:
        value = getattr(sampling, field)
        return {} if value == neutral else {name or field: make(value)}

    return rule


def top_choice(sampling: Sampling, no_top_k: int = 0) -> dict[str, Any]:
    """Make top_k and top_p.

    Args:
        no_top_k: the engine's value for all tokens.
    """
    if sampling.top_p == 0:  # the smallest nucleus is one token
        return {"top_k": 1, "top_p": 1.0}
    return {"top_k": sampling.top_k or no_top_k, "top_p": sampling.top_p}


TOP_CHOICE_OR_MINUS_1: Rule = functools.partial(top_choice, no_top_k=-1)
"""Rule of the engines whose value for all tokens is -1."""


def drawn_or(greedy: Mapping[str, Any], drawn: Mapping[str, Rule]) -> Rule:
    """Make a rule for `do_sample`.

    Args:
        greedy: arguments that choose the most likely token.
        drawn: the table of fields that only matter when sampling; its arguments replace those of `greedy`.
    """

    def rule(sampling: Sampling, *more: Any) -> dict[str, Any]:
        return {**greedy, **(arguments(drawn, sampling) if sampling.do_sample and sampling.temperature > 0 else {})}

    return rule


COMMON_RULES: Mapping[str, Rule] = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": unless_neutral("stop_token_ids", make=list),
}
"""Fields that vLLM, SGLang and servers of OpenAI's API take by these names."""


_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")


def regex_of(choices: str) -> str:
    """Return the regular expression of a JSON list of texts."""
    return "|".join(_SPECIAL.sub(r"\\\g<0>", choice) for choice in json.loads(choices))


# -- for engines: log-probabilities of given tokens, and the most likely alternatives, of logits -----------------------


def score(rows: Any, ids: Sequence[int], num_tops: int) -> tuple[list[float], list[Alternatives]]:
    """Return the log-probability of each of `ids`, and its `num_tops` most likely alternatives, best first.

    Args:
        rows: logits before each id, a numpy array [ids, vocabulary] of float32.
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


# -- for engines: the silence of another process -----------------------------------------------------------------------


_STANDSTILL = 2.0  # seconds between two looks; usually 1 at most


class Silence:
    """Begins when it is made. Whoever waits for its end looks at least once a second, or as often as it can.

    A paused container or virtual machine does not look, and its engine does not work. Such a time does not count.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._began = self._looked = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def look(self, waited: float = 0.0) -> float:
        """Return its seconds.

        Args:
            waited: seconds that the caller may have waited on purpose since the last look.
        """
        now = time.monotonic()
        if now - self._looked > waited + _STANDSTILL:
            self._began += now - self._looked
        self._looked = now
        return now - self._began
