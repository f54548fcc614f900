"""What a server tells its dialects: options, the engine's limits, adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from handler.config.config import Config
from handler.core.text import Vocabulary
from handler.core.values import Adapter, Task
from handler.protocols.kernel.generation import NO_DEFAULTS, GenerationDefaults
from handler.protocols.kernel.kept import NOTHING, Keeper, Recalled

log = logging.getLogger("handler.requests")

DEFAULT_MAX_MEDIA = 32
"""Media of one kind in a request, where option.limit_mm_per_prompt names no number."""


class AdapterLookup(Protocol):
    """The LoRA adapters that requests may name."""

    def find(self, name: str) -> Adapter | None:
        """Find an adapter by the name under which it was registered."""

    def by_number(self, number: int) -> Adapter | None:
        """Find an adapter by the number that it got when it was registered."""

    def names(self) -> Iterable[str]:
        """Return the names of those that requests may name."""


class NoAdapters:
    """The lookup of a server without adapters."""

    def find(self, name: str) -> Adapter | None:
        return None

    def by_number(self, number: int) -> Adapter | None:
        return None

    def names(self) -> Iterable[str]:
        return ()


class Notices:
    """What the log says once of a server, however many requests bring it about. Thread-safe."""

    def __init__(self) -> None:
        self._given: dict[str, object] = {}

    def once(self, message: str) -> None:
        """Log a warning, the first time that it is given. It names no client's text, so that there are few."""
        this = object()
        if self._given.setdefault(message, this) is this:
            log.warning("%s", message)


@dataclass(frozen=True)
class ServerContext:
    """The server's options and its engine's limits, for dialects.

    Attributes:
        engine: the engine's name.
        config: the options.
        unsupported: Sampling field -> why the engine does not support it.
        limits: Sampling field -> the largest value that the engine takes.
        no_adapters: why the engine serves no LoRA adapters; "" where it does.
        adapters: the registered adapters; thread-safe.
        adapter: the one that this request's headers name; the body may name no other.
        sampling_defaults: Sampling fields for a request that has `do_sample` true and no value of its own.
        generation: the model's defaults, for dialects that read parameters by `read_sampled`.
        vocabulary: the tokens that ids stand for; None where each prompt brings its own vocabulary.
        most_tokens: tokens of prompt and answer together that the model takes; None until it has been loaded.
        chat_template: the model's own chat template; "" without one.
        model_names: names that requests may give the model, its own first; "*" among them allows any name.
        source: the last part of where the model came from; "" where there is none, as with echo.
        fingerprint: the `system_fingerprint` of answers.
        tool_format: a `Format` of `assistant/`, that of `option.tool_parser_plugin`, which comes before
            `option.tool_call_parser`; or None.
        response_template: a `ResponseTemplate` of `assistant/`, the model's own, where it reads the answers; or None.
        structural_tags: xgrammar's styles of arguments that the engine's structural tags have.
        task: what the model computes; requests for anything else are refused when they have been parsed.
        labels: names of the numbers of a classification.
        no_media: by kind, why messages may have no such media; "" where they may. Other kinds: none.
        max_media: by kind, the most of one request.
        prompts: the model's own prompts for embeddings by name, each the beginning of a text.
        tokenizer_config: the model's tokenizer_config.json, where `option.enable_tokenizer_info_endpoint` shows it.
        notices: what the log has said.
        keeper: keeps this request's answer; None where nothing is kept.
        recalled: what is kept of the answers that this request goes on from.
        parsed: what `read_all` keeps; a context that is made of another begins anew.
    """

    engine: str
    config: Config = field(default_factory=Config)
    unsupported: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_adapters: str = "it has none"
    adapters: AdapterLookup = field(default_factory=NoAdapters)
    adapter: Adapter | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    generation: GenerationDefaults = NO_DEFAULTS
    vocabulary: Vocabulary | None = None
    most_tokens: Callable[[], int | None] = lambda: None
    chat_template: str = ""
    model_names: Sequence[str] = ("model",)
    source: str = ""
    fingerprint: str = "lmi"
    tool_format: Any = None
    response_template: Any = None
    structural_tags: frozenset[str] = frozenset()
    task: Task = Task.GENERATION
    labels: Sequence[str] = ()
    no_media: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    max_media: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    tokenizer_config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    notices: Notices = field(default_factory=Notices, compare=False)
    keeper: Keeper | None = None
    recalled: Recalled = NOTHING
    parsed: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def own_name(self) -> str:
        """The model's name in answers to bodies that name none: the first of option.served_model_name, as in vLLM."""
        return next((name for name in self.config.served_model_name or () if name != "*"), self.model_names[0])
