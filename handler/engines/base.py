"""What an engine is: a few methods, stepped by `process/engine_loop.py` in a process or thread of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from handler.core.text import Prompt, Vocabulary
from handler.core.values import Adapter, Finish, Logits, Sampling, StructuredOutput


class Output(NamedTuple):
    """What one step brought to one sequence.

    `key` is the caller's id of the engine request, `sequence` numbers its sequences (beam search has several).
    With `finish` ERROR, `error` says why. `tops` has, for each id, the most likely ids in its place with their
    log-probabilities, the first one first, when asked for. `prompt_logprobs` and `prompt_tops` come once, with the
    first output, when asked for: one for each prompt id, None and nothing for the first.
    """

    key: int
    ids: Sequence[int]
    logprobs: Sequence[float | None]
    finish: Finish | None = None
    sequence: int = 0
    prompt_logprobs: Sequence[float | None] | None = None
    error: str | None = None
    tops: Sequence[Sequence[tuple[int, float]]] | None = None
    logits: Logits | None = None
    prompt_tops: Sequence[Sequence[tuple[int, float]]] | None = None


class Step(NamedTuple):
    """What a step brought.

    Nearly always that is one token for each of many requests: those come as three columns, `keys`, `ids` and
    `logprobs`, which cost a tenth of as many objects to make, send and read. All else is in `others`.
    """

    keys: list[int]
    ids: list[int]
    logprobs: list[float | None]
    others: list[Output]


@dataclass(frozen=True)
class EngineConfig:
    """What an engine needs to load; None leaves it to the engine. `options` are its own, already validated."""

    model: Path | None = None
    dtype: str = "auto"
    max_sequences: int = 32
    max_tokens_per_step: int | None = None
    max_total_tokens: int | None = None
    cache_gib: int = 0
    prefix_cache: bool | None = None
    devices: str = "1"  # a number, or max
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineInfo:
    """What a loaded engine says of itself. Token limits count ids; `max_total_tokens` is prompt and answer together."""

    name: str
    version: str
    device: str
    dtype: str
    max_total_tokens: int


class Engine(Protocol):
    """An engine steps many sequences at once. It is used by one thread only and may block it, holding the GIL.

    It may raise from `add` to refuse one request. An exception from `step` means that the engine is broken: it will be
    built anew, unless it never loaded. It never returns anything for a key after it was cancelled, or after the step
    in which its sequences, all of them at once, finished.
    """

    info: EngineInfo

    def add(self, key: int, ids: Sequence[int], sampling: Sampling, adapter: Adapter | None = None) -> None:
        """Start a request; its first output comes from a later `step`."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Make an adapter ready, so that what is wrong with it shows now; requests may also name one that never was."""

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free what an adapter holds; no later request names it, earlier ones may still run."""

    def cancel(self, key: int) -> None:
        """Forget a request; unknown keys are ignored."""

    def step(self) -> Step:
        """Make progress on some requests, blocking as long as that takes; may bring nothing (a part of a prefill)."""

    def close(self) -> None:
        """Free what the engine holds."""


class Interrupted(Exception):
    """A step ended before it brought anything: there may be something to read."""


@runtime_checkable
class Interruptible(Protocol):
    """An engine whose steps are waits, which new requests need not sit out."""

    def interrupt_on(self, fd: int) -> bool:
        """From now on a `step` raises Interrupted soon after `fd` became readable, whatever else it brings: nobody else
        looks. Perhaps once more when it has been read. False where it cannot, after all.
        """


class SteppedEngine(Protocol):
    """What the batcher needs of an engine; `engines.remote.EngineSupervisor` is one."""

    @property
    def ready(self) -> bool: ...
    def add(self, key: int, ids: Sequence[int], sampling: Sampling, adapter: Adapter | None = None) -> None: ...
    def cancel(self, key: int) -> None: ...
    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None: ...
    def step(self, timeout: float = 0.0) -> list[Step]: ...


class Tokenizer(Protocol):
    """Text to ids, in the host's process and off the event loop; thread-safe.

    `vocabulary` is what the ids of every answer stand for; None where each prompt brings its own. `chat_template` is
    the model's own, as text; "" where it has none.
    """

    vocabulary: Vocabulary | None
    chat_template: str

    def encode(self, text: str) -> Prompt:
        """The prompt's ids, special marks in the text recognised, none added but those the model always begins with."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """Messages, each with `role` and `content`, as the model's chat template lays them out, up to where the
        assistant's answer begins. Special marks are recognised and none added: the template has them all.

        Args:
            messages: where the template has a place for tools, the assistant's may have `tool_calls` too, in OpenAI's
                form but for their `arguments`, which are objects, and there may be some of role `tool`.
            tools: in OpenAI's form; only where the template has a place for them.

        Raises:
            InvalidPayload: the model has no chat template, or its template refuses these messages.
        """


class StructuredOutputCheck(Protocol):
    """Does with a guide what the engine would do, in a process that may be lost (`sandbox_tasks.py`)."""

    def __call__(self, structured_output: StructuredOutput) -> int | None:
        """Raises any exception that says why the engine cannot follow it.

        Returns:
            Bytes that the engine keeps of it for as long as it lives, where it does so.
        """


NO_LORA = "it was started without option.enable_lora=true"


@dataclass(frozen=True)
class Capabilities:
    """Which generation parameters an engine lacks.

    Attributes:
        unsupported: Sampling field -> why; a value that would have an effect is refused.
        limits: Sampling field -> the largest value that it takes.
        no_adapters: why it serves no LoRA adapters; "" where it does.
        sampling_defaults: Sampling fields, used with `do_sample` where a client names none: LMI's for this engine.
    """

    unsupported: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_adapters: str = ""
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
