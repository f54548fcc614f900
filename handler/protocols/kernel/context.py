"""The contexts in which a dialect parses a body: that of the server, and that of the request."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from handler.config.config import Config
from handler.core.sealing import Sealer
from handler.core.text import Vocabulary
from handler.core.values import Adapter, Sampling, Task
from handler.protocols.kernel.schema import Shape
from handler.protocols.kernel.stored import NOTHING, Keeper, Recalled

log = logging.getLogger("handler.requests")

DEFAULT_MAX_MEDIA = 32
"""Maximum number of media of one kind in a request, unless option.limit_mm_per_prompt sets a different maximum."""


class GenerationDefaults(NamedTuple):
    """The model's defaults for parameters that a client omits, and its limit on new tokens.

    Attributes:
        sampling: the default values of Sampling fields that the engine supports, by field.
        max_new_tokens: the default maximum number of new tokens, or None if a response may fill the context.
        most_new_tokens: the maximum number of new tokens of any request, or None for no maximum.
    """

    sampling: Mapping[str, Any] = MappingProxyType({})
    max_new_tokens: int | None = None
    most_new_tokens: int | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The default values, by their names in generation_config.json."""
        length = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return {**self.sampling, **length}


NO_DEFAULTS = GenerationDefaults()


class AdapterLookup(Protocol):
    """Finds registered LoRA adapters by name or number."""

    def find(self, name: str) -> Adapter | None:
        """Return the adapter that is registered under a name, or None if there is none."""

    def by_number(self, number: int) -> Adapter | None:
        """Return the adapter with this registration number, or None if there is none."""

    def names(self) -> Iterable[str]:
        """Return the names of the registered adapters."""


class EmptyLookup:
    """The adapter lookup of a server without adapters."""

    def find(self, name: str) -> Adapter | None:
        return None

    def by_number(self, number: int) -> Adapter | None:
        return None

    def names(self) -> Iterable[str]:
        return ()


class Notices:
    """Logs each warning of a server only once, even if many requests cause the warning. Thread-safe."""

    def __init__(self) -> None:
        self._given: dict[str, object] = {}

    def once(self, message: str) -> None:
        """Log a warning unless it was logged before.

        The message must not contain text from clients, because all messages are retained in memory.
        """
        this = object()
        if self._given.setdefault(message, this) is this:
            log.warning("%s", message)


class RequestContext(NamedTuple):
    """The values of a request that the host passes to `parse` in addition to the body.

    Attributes:
        adapter: the adapter that the headers name, or None. The body must not name another adapter.
        model: the model name in the path, or "" if there is none.
        keeper: the object that stores the response, or None if the response should not be stored.
        recalled: the stored responses that the request continues.
        owner: the owner of the request's API key, or "" without a key.
        may_detach: whether the host can generate the response in the background.
        may_be_formatted: whether an output formatter of the user may read the tokens with their log-probabilities.
    """

    adapter: Adapter | None = None
    model: str = ""
    keeper: Keeper | None = None
    recalled: Recalled = NOTHING
    may_be_formatted: bool = True
    owner: str = ""
    may_detach: bool = False


NO_REQUEST = RequestContext()


@dataclass(frozen=True)
class ServerContext:
    """The server options, model properties and engine limits that dialects use.

    Attributes:
        engine: the engine's name.
        config: the server's options.
        unsupported: maps a Sampling field to the reason why the engine does not support it.
        limits: maps a Sampling field to the largest value that the engine accepts.
        no_adapters: the reason why the engine serves no LoRA adapters, or "" if it serves them.
        no_labels: the reason why the log-probabilities of labels are not available, or "" if they are.
        native_labels: whether the engine itself computes them.
        adapters: the lookup of registered adapters, which is thread-safe.
        sampling_defaults: the default values of Sampling fields in a request with `do_sample` true.
        generation: the model's generation defaults, for dialects that call `read_sampled`.
        vocabulary: the vocabulary of token ids, or None if it depends on the prompt.
        eos: the ids of the end tokens that the model files list.
        most_tokens: returns the maximum number of tokens in a prompt and its response together, or None while the model
            loads.
        chat_template: the model's chat template, or "" if it has none.
        model_names: the model names that requests may use, with the model's own name first. "*" allows any name.
        source: the last part of the path or address of the model, or "" if the engine (such as echo) has no model.
        fingerprint: the `system_fingerprint` of responses.
        tool_format: the `Format` of `option.tool_parser_plugin`, which overrides `option.tool_call_parser`, or None.
        response_template: the model's `ResponseTemplate` if it is used to parse responses, or None.
        structural_tags: the styles of arguments that the engine supports in xgrammar's structural tags.
        task: the model's task. A request for another task is refused after it has been parsed.
        labels: the labels of a classification model, by class index.
        no_media: maps a kind of media to the reason why messages may not contain it, or to "" if they may. Kinds that
            are missing are not allowed either.
        max_media: maps a kind of media to its maximum number in a request.
        prompts: the model's own prompts for embeddings by name, each of which is prepended to a text.
        tokenizer_config: the model's tokenizer_config.json if `option.enable_tokenizer_info_endpoint` is set, or empty.
        sealer: encrypts values that clients send back.
        notices: logs each warning only once.
        parsed: the cache of `remember` (parameters.py).
    """

    engine: str
    config: Config = field(default_factory=Config)
    unsupported: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_adapters: str = "none is registered"
    no_labels: str = ""
    native_labels: bool = True
    adapters: AdapterLookup = field(default_factory=EmptyLookup)
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    generation: GenerationDefaults = NO_DEFAULTS
    vocabulary: Vocabulary | None = None
    eos: frozenset[int] = frozenset()
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
    sealer: Sealer = field(default_factory=Sealer, compare=False)
    notices: Notices = field(default_factory=Notices, compare=False)
    parsed: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @functools.cached_property
    def own_name(self) -> str:
        """The name in responses to requests that name no model: the first of option.served_model_name, as in vLLM."""
        return next((name for name in self.config.served_model_name or () if name != "*"), self.model_names[0])

    @property
    def refuses_chats(self) -> bool:
        """Whether chats are refused, because the model has no chat template. Engines without a vocabulary need none."""
        return self.vocabulary is not None and not self.chat_template

    def with_seed(self, sampling: Sampling) -> Sampling:
        """Return the parameters, adding a random seed to unseeded sampling if the engine supports seeds.

        Call this only for a response that reports the seed, because vLLM samples more slowly with a seed
        (vllm/v1/sample/ops/topk_topp_sampler.py).
        """
        needed = sampling.do_sample and sampling.seed is None and "seed" not in self.unsupported
        return sampling._replace(seed=random.getrandbits(53)) if needed else sampling


RequestShape = Callable[[ServerContext], Shape]
"""Returns the schema of a request body for a server. The schema says which parameters the engine does not support."""
