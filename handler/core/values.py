"""The values that flow through every layer: what is asked, and what comes back. Nobody changes one after it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from handler.core.errors import ServingError


class Finish(str, Enum):
    """Why a sequence ended; the values are LMI's and TGI's `finish_reason`."""

    LENGTH = "length"
    EOS = "eos_token"
    STOP = "stop_sequence"
    ERROR = "error"


class StructuredOutput(NamedTuple):
    """What an answer must be, from its first token on.

    `kind` is json_schema (`value` is the schema as JSON text), json_object (any; `value` is ""), regex, grammar (EBNF)
    or choice (`value` is the JSON text of a list of strings).
    """

    kind: str
    value: str


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter; `id`, at least 1, is never used again for another path or other weights.

    Requests hold the very object that was registered, so that a weak reference tells whether any still does.
    """

    name: str
    id: int
    path: str  # a directory


@dataclass(frozen=True)
class Sampling:
    """Every generation parameter, normalised: a schema maps its own names and neutral values onto these.

    With `do_sample` False the choice is greedy and temperature, top_k, top_p, min_p, typical_p and seed have no effect.
    """

    max_new_tokens: int = 30
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # 1: all
    min_p: float = 0.0  # 0: all
    typical_p: float = 1.0  # 1: off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0  # 0: any may repeat
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit
    seed: int | None = None  # None: drawn when the request is accepted
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    bad_sequences: tuple[str, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1  # sequences returned
    best_of: int = 1  # sequences generated, of which the best `n` are returned
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    logprobs: bool = True  # report each generated token's log-probability; an engine may do so unasked
    top_logprobs: int = 0  # the most likely tokens reported beside each generated one
    prompt_logprobs: bool = False
    prompt_top_logprobs: int = 0  # with `prompt_logprobs`: the most likely tokens reported beside each of the prompt's
    structured_output: StructuredOutput | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False

    def seed_of(self, sequence: int) -> int | None:
        """The seed of one of several sequences: what gives it again by itself."""
        return None if self.seed is None else (self.seed + sequence) % (1 << 64)

    @property
    def num_sequences(self) -> int:
        """How many sequences the client gets back."""
        return max(self.n, self.best_of, self.num_beams)


class FieldNames(NamedTuple):
    """What the client's dialect calls things, for messages about them."""

    prompt: str = "inputs"
    max_new_tokens: str = "parameters.max_new_tokens"
    stop_token_ids: str = "parameters.stop_token_ids"
    bad_token_ids: str = "parameters.bad_words_list"
    logit_bias: str = "parameters.logit_bias"
    logits: str = "parameters.outputs"
    structured_output: str = "parameters.grammar"


LMI_NAMES = FieldNames()


@dataclass(frozen=True)
class Request:
    """One prompt to continue, and what the client wants to see of the continuation.

    The prompt is text; or messages that the model's chat template turns into text, and then `prompt` is empty; or
    token ids, and then `prompt` is what an answer shows for them.
    """

    prompt: str
    sampling: Sampling = field(default_factory=Sampling)
    truncate: int | None = None  # keep only the last n prompt tokens
    details: bool = False
    full_text: bool = False  # put the prompt in front of generated_text
    messages: tuple[Mapping[str, Any], ...] = ()  # each with `role` and `content`; with `tools` see encode_chat
    tools: tuple[Mapping[str, Any], ...] = ()  # what the chat template is to show; it has a place for them
    prompt_ids: tuple[int, ...] | None = None
    adapter: Adapter | None = None
    eos_token_id: int | None = None  # one of the stop tokens, whose end is shown as EOS
    fill_context: bool = False  # as many new tokens as the model's context leaves, whatever the sampling says
    min_free_tokens: int | None = (
        None  # of the new tokens so many must fit, of those beyond as many as do; None: all must fit
    )
    names: FieldNames = LMI_NAMES


class Token(NamedTuple):
    """One generated (or prompt) token. `text` is what became safe to show with it, possibly nothing.

    `top` are the most likely tokens in its place, the first one first, when asked for; their text is their own.
    """

    id: int
    text: str
    logprob: float | None
    special: bool
    top: Sequence[Token] = ()


NO_TOKEN = Token(-1, "", None, True)
"""What stands where the last token would, when an engine ends a sequence without one."""


class Logits(NamedTuple):
    """Raw scores, a row of the vocabulary's size for each prompt token, and for each of these generated ones."""

    context: Sequence[Sequence[float]] | None = None
    generation: Sequence[Sequence[float]] | None = None


class Delta(NamedTuple):
    """What one step brought to one sequence of one request; the finishing one carries the last token, if any."""

    id: int
    sequence: int
    tokens: Sequence[Token]
    finish: Finish | None = None
    error: ServingError | None = None
    prefill: Sequence[Token] | None = None  # the prompt's tokens, on the first delta, when asked for
    logits: Logits | None = None
