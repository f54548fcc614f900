"""Immutable values for all layers: requests and their ids, sampling parameters, tokens and deltas."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

from handler.core.errors import ServingError
from handler.core.media import MediaSource

if TYPE_CHECKING:
    from handler.core.text import Prompt


def new_uuid() -> str:
    """Return a random UUID (version 4) without a system call, which would release and reacquire the GIL."""
    digits = new_digits()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def new_digits() -> str:
    """Return 128 random bits as 32 hexadecimal digits."""
    return f"{random.getrandbits(128):032x}"


def new_secret() -> str:
    """Return 128 unguessable bits in hexadecimal, for ids that give access to data."""
    return secrets.token_hex(16)


class Thoughts(NamedTuple):
    """The markers of the reasoning at the beginning of a response, and whether the prompt already opens the reasoning.

    Attributes:
        begin: the markers that begin reasoning.
        end: the markers that end reasoning.
        is_open: whether the response begins inside the reasoning.
        calls: the markers in `end` that begin a tool call.
        closing: the ids of the marker that the handler inserts to end reasoning early, or empty if it never does this.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    is_open: bool
    calls: tuple[str, ...] = ()
    closing: tuple[int, ...] = ()


class Finish(str, Enum):
    """Reason why a sequence ended. The values are those of `finish_reason` in LMI and TGI."""

    LENGTH = "length"
    EOS = "eos_token"
    STOP = "stop_sequence"
    ERROR = "error"


class StructuredOutput(NamedTuple):
    """A rule for the whole response, or for the part after its reasoning.

    Attributes:
        kind: json_schema, json_object, regex, grammar (EBNF), choice or structural_tag (xgrammar's).
        value: the rule as a string: JSON for a schema, a list of choices and a structural tag; "" for json_object.
        allows_text: whether any text may precede the part of the response to which the rule applies.
    """

    kind: str
    value: str
    allows_text: bool = False


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter. Its `id` is at least 1, and is never reused for another path or other weights.

    Requests refer to the registered object itself, so a weak reference shows whether any request still uses it.
    """

    name: str
    id: int
    path: str  # a directory


class Nature(Flag):
    """Properties of a field of Sampling. With beam search, a field without any property is refused."""

    SAMPLED = auto()  # without effect if decoding is greedy
    BY_HANDLER = auto()  # implemented by the handler for all engines; an engine may ignore that `logprobs` is false
    WITH_BEAMS = auto()  # supported by beam search, or without effect there
    ONLY_BEAMS = auto()  # without effect unless beam search is used


class Sampling(NamedTuple):
    """Generation parameters. Dialects map their names and neutral values to these fields and their neutral values.

    The default of a field is its neutral value. Without `do_sample` decoding is greedy, and fields with
    `Nature.SAMPLED` have no effect.
    """

    max_new_tokens: Annotated[int, Nature.WITH_BEAMS] = 30
    min_new_tokens: int = 0
    do_sample: Annotated[bool, Nature.WITH_BEAMS] = False
    temperature: Annotated[float, Nature.SAMPLED] = 1.0
    top_k: Annotated[int, Nature.SAMPLED] = 0  # 0: all
    top_p: Annotated[float, Nature.SAMPLED] = 1.0  # 1: all
    min_p: Annotated[float, Nature.SAMPLED] = 0.0  # 0: all
    typical_p: Annotated[float, Nature.SAMPLED] = 1.0  # 1: off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0  # 0: no limit
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, number added to its logit
    seed: Annotated[int | None, Nature.SAMPLED] = None  # None: the engine chooses a seed
    stop: Annotated[tuple[str, ...], Nature.BY_HANDLER] = ()
    include_stop: Annotated[bool, Nature.BY_HANDLER] = False
    stop_token_ids: Annotated[tuple[int, ...], Nature.WITH_BEAMS] = ()
    bad_sequences: tuple[str, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # the only ids that a response may have; empty: all
    ignore_eos: Annotated[bool, Nature.WITH_BEAMS] = False
    skip_special_tokens: Annotated[bool, Nature.BY_HANDLER] = True
    marks: Annotated[frozenset[str], Nature.BY_HANDLER] = frozenset()  # special tokens to be shown as text
    # Stop strings and structured output apply only after the reasoning.
    thoughts: Annotated[Thoughts | None, Nature.BY_HANDLER] = None
    # Maximum number of tokens in the reasoning; None: no limit.
    thinking_token_budget: Annotated[int | None, Nature.BY_HANDLER] = None
    n: Annotated[int, Nature.BY_HANDLER] = 1  # sequences returned
    best_of: Annotated[int, Nature.BY_HANDLER] = 1  # sequences generated, of which the best `n` are returned
    num_beams: Annotated[int, Nature.WITH_BEAMS] = 1
    length_penalty: Annotated[float, Nature.ONLY_BEAMS] = 1.0
    early_stopping: Annotated[bool, Nature.ONLY_BEAMS] = False
    # Report each generated token's log-probability; an engine may always do so.
    logprobs: Annotated[bool, Nature.BY_HANDLER] = True
    top_logprobs: int = 0  # alternatives reported for each generated token
    prompt_logprobs: bool = False
    # With `prompt_logprobs`: alternatives reported for each of the prompt's tokens.
    prompt_top_logprobs: Annotated[int, Nature.WITH_BEAMS] = 0
    structured_output: StructuredOutput | None = None
    return_context_logits: Annotated[bool, Nature.WITH_BEAMS] = False
    return_generation_logits: Annotated[bool, Nature.WITH_BEAMS] = False
    cache_salt: Annotated[str, Nature.WITH_BEAMS] = ""  # only requests with the same salt share the prefix cache

    def seed_of(self, sequence: int) -> int | None:
        """Return the seed that reproduces one of several sequences on its own."""
        return None if self.seed is None else (self.seed + sequence) % (1 << 64)

    @property
    def signed_seed(self) -> int | None:
        """The seed as a signed 64-bit integer, as expected by the random generators of vLLM."""
        return None if self.seed is None else self.seed - (1 << 64 if self.seed >> 63 else 0)

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate."""
        return max(self.n, self.best_of, self.num_beams)


def fields_of(nature: Nature) -> list[str]:
    """Return the fields of Sampling that have one of these properties."""
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in _HINTS.items()}
    return [name for name in Sampling._fields if any(nature & mark for mark in marks.get(name, ()))]


_HINTS = get_type_hints(Sampling, include_extras=True)
SAMPLED, BY_HANDLER = frozenset(fields_of(Nature.SAMPLED)), frozenset(fields_of(Nature.BY_HANDLER))


class Task(str, Enum):
    """The task of a server (`option.task`); the values are Hugging Face's names, as in `HF_TASK`."""

    GENERATION = "text-generation"
    EMBEDDING = "text-embedding"
    CLASSIFICATION = "text-classification"
    RERANK = "rerank"
    TRANSCRIPTION = "automatic-speech-recognition"


POOLED = (Task.EMBEDDING, Task.CLASSIFICATION, Task.RERANK)
"""Tasks that return an embedding or scores for a whole text."""


class Pooling(NamedTuple):
    """Parameters of a request for an embedding, scores or log-probabilities.

    The result is the `vector` of its only delta, not text.

    Attributes:
        kind: embed (an embedding of the text), score (one number for a text or a pair), classify (a number for each
            label of the model) or labels (the log-probabilities of `labels` as the next token of a generating model,
            and after them the highest log-probability of any token).
        dimensions: number of leading components of an embedding to return, for Matryoshka models (arXiv 2205.13147), or
            None to return all components.
        normalize: whether an embedding is scaled to length 1. None follows the modules of the model. For score and
            classify, whether logits are converted to numbers between 0 and 1 (sigmoid, or softmax if exactly one label
            applies).
        second: index of the first token of the second text in a pair. It is set when the texts are tokenized.
        texts: the texts as truncated, if the engine needs them besides their ids. They are set when the texts are
            tokenized.
        cache_salt: as in Sampling. It is set when the request is sent to the engine.
        labels: texts, each of which must be a single token after the prompt.
        label_ids: ids of these tokens. They are set when the prompt is tokenized.
        suffix: the end of the last message. Other requests may share the part of the prompt before it.
        num_shared: number of tokens before `suffix`. It is set when the prompt is tokenized.
    """

    kind: str
    dimensions: int | None = None
    normalize: bool | None = True
    second: int | None = None
    cache_salt: str = ""
    labels: tuple[str, ...] = ()
    label_ids: tuple[int, ...] = ()
    suffix: str = ""
    num_shared: int = 0
    texts: tuple[str, ...] = ()


class Truncation(NamedTuple):
    """Truncation of a prompt that has too many tokens.

    Attributes:
        most: maximum number of tokens to retain, or None to retain as many as fit together with the response.
        side: side where tokens are cut off, left or right. Only requests with Pooling support right.
    """

    most: int | None = None
    side: str = "left"


def keep_last(most: int | None) -> Truncation | None:
    """Return the truncation of a prompt to its last `most` tokens. -1 means the model's limit, None no truncation."""
    return None if most is None else Truncation(None if most == -1 else most)


class FieldNames(NamedTuple):
    """Names of fields in the dialect of the client, for error messages and reports of fields without effect.

    Attributes:
        without_reasoning: what a client sends to turn reasoning off.
    """

    prompt: str = "inputs"
    max_new_tokens: str = "parameters.max_new_tokens"
    stop_token_ids: str = "parameters.stop_token_ids"
    bad_token_ids: str = "parameters.bad_words_list"
    allowed_token_ids: str = "allowed_token_ids"
    logit_bias: str = "parameters.logit_bias"
    logits: str = "parameters.outputs"
    dimensions: str = "dimensions"
    structured_output: str = "parameters.grammar"
    message_reasoning: str = "messages[].reasoning"
    reasoning_effort: str = "reasoning_effort"
    thinking_token_budget: str = "thinking_token_budget"
    without_reasoning: str = "chat_template_kwargs with enable_thinking false"


LMI_NAMES = FieldNames()


Objects = Sequence[Mapping[str, Any]]
"""JSON objects, such as the messages of a chat or its tools."""


class TemplateOptions(NamedTuple):
    """Values that a chat template receives in addition to messages and tools.

    Attributes:
        arguments: values of further template variables by name, such as `documents`.
        add_generation_prompt: whether the prompt ends with the beginning of the assistant's response.
        continue_final_message: whether the prompt ends within the last message, which the response continues.
    """

    arguments: tuple[tuple[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False


PLAIN_TEMPLATE = TemplateOptions()


class Request(NamedTuple):
    """One request: a prompt, its parameters, and the required contents of the response.

    The prompt is text, messages or token ids. With messages, `prompt` is empty. With token ids, `prompt` is their text,
    which the response may repeat. The `content` of a message with media is a list of parts. Each image or audio is a
    part such as `{"type": "image"}`, and `media` contains the sources in the same order.
    """

    prompt: str
    sampling: Sampling = Sampling()
    pooling: Pooling | None = None  # compute numbers for the prompt; most of `sampling` is then ignored
    transcribes: bool = False  # transcribe the only audio; `template.arguments` have language and task
    pair: str | None = None  # with `pooling`: a second text, tokenized as a pair with the prompt
    truncation: Truncation | None = None  # None: a prompt with too many tokens is refused
    details: bool = False
    full_text: bool = False  # put the prompt in front of generated_text
    messages: tuple[Mapping[str, Any], ...] = ()  # each with `role` and `content`; with `tools` see encode_chat
    media: tuple[MediaSource, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # for a chat template that supports tools
    template: TemplateOptions = PLAIN_TEMPLATE
    read_prompt: Callable[[Request, str], Request] | None = None  # sets fields that depend on the rendered messages
    # Shortens a request. It gets a function that renders prompts, and returns the new request and its prompt.
    edit: Callable[[Request, Callable[[Request], Prompt]], tuple[Request, Prompt]] | None = None
    prompt_ids: tuple[int, ...] | None = None
    adapter: Adapter | None = None
    priority: int = 0  # in the queue; lower is earlier
    timeout: float = math.inf  # seconds after which the request fails unless it has ended
    time_limit: float | None = None  # seconds within which it must start and end, instead of the usual limits
    background: str | None = None  # owner of the batch (`/v1/batches`) that the request belongs to
    session: str = ""  # id of the client's session
    id: str = ""  # the client's id, by which its owner can stop the request
    eos_token_id: int | None = None  # a stop token that is reported as EOS
    fill_context: bool = False  # reduce the number of new tokens to what the context has room for
    min_free_tokens: int | None = None  # number of new tokens that must fit, if less than requested; None: all must fit
    names: FieldNames = LMI_NAMES

    @property
    def pools_text(self) -> bool:
        """Whether the result is computed by a pooling model, for the whole text."""
        return self.pooling is not None and not self.pooling.labels

    @property
    def num_needed(self) -> int:
        """The minimum number of new tokens that must fit into the context, or 1 if any number is enough."""
        if self.pooling is not None or self.fill_context:
            return 1
        limit = self.sampling.max_new_tokens
        return limit if self.min_free_tokens is None else min(limit, self.min_free_tokens)

    @property
    def text_before(self) -> str:
        """The text before the generated text in the response: the prompt, or nothing."""
        return self.prompt if self.full_text else ""


class Token(NamedTuple):
    """One token of a response or a prompt.

    Attributes:
        text: text that can be shown when this token has arrived; may be empty.
        top: the most likely alternatives, best first, if requested. Each alternative has its own text.
    """

    id: int
    text: str
    logprob: float | None
    special: bool
    top: Sequence[Token] = ()


new_token: Callable[[tuple[int, str, float | None, bool, Sequence[Token]]], Token] = partial(tuple.__new__, Token)
"""Create a token from a tuple of all its fields. For the hot path, since this takes half the time of `Token(...)`."""

NO_TOKEN = Token(-1, "", None, True)
"""Placeholder for the last token if an engine ends a sequence without a token."""


class Heard(NamedTuple):
    """A transcribed segment of audio: its start and end in seconds, and its language, such as `en`."""

    start: float
    end: float
    language: str  # "" if the model does not report it


class Extras(NamedTuple):
    """Values of a sequence other than its tokens. They are passed unchanged from the engine to the code that
    writes the response.

    Attributes:
        context_logits: logits of the prompt, of shape [tokens, vocabulary]. Reported once, if requested.
        generation_logits: logits of the tokens in this step, of shape [tokens, vocabulary], if requested.
        vector: result of a request with Pooling, in its only delta: an embedding, one score, a number for each label,
            or the log-probabilities of labels.
        num_cached_tokens: number of prompt tokens that were in the engine cache. Reported once.
        num_media_tokens: number of prompt tokens of media, beyond one placeholder each. Reported once, by engines that
            determine it themselves.
        heard: segment of the audio that begins with these tokens. Only in transcriptions.
        stop: the stop string that ended the sequence. The batcher sets it.
    """

    context_logits: Sequence[Sequence[float]] | None = None
    generation_logits: Sequence[Sequence[float]] | None = None
    vector: Sequence[float] | None = None
    num_cached_tokens: int | None = None
    num_media_tokens: int | None = None
    heard: Heard | None = None
    stop: str | None = None

    def with_defaults(self, earlier: Extras) -> Extras:
        """Return these values, with missing values filled in from an earlier step."""
        return earlier._replace(**{name: value for name, value in self._asdict().items() if value is not None})


NO_EXTRAS = Extras()


class Delta(NamedTuple):
    """Result of one step for one sequence of a request. The last delta of a sequence has `finish`."""

    id: int
    sequence: int
    tokens: Sequence[Token]
    finish: Finish | None = None
    error: ServingError | None = None
    prefill: Sequence[Token] | None = None  # the prompt's tokens, with the first delta, on request
    extras: Extras | None = None

    @property
    def num_media_tokens(self) -> int:
        """Number of prompt tokens that the engine reports in addition to those of the prompt's ids."""
        if self.extras is None or self.sequence:  # all sequences of a request report the same prompt
            return 0
        return self.extras.num_media_tokens or 0


_PlainDelta = tuple[int, int, Sequence[Token], None, None, None, None]
new_delta: Callable[[_PlainDelta], Delta] = partial(tuple.__new__, Delta)
"""Create a delta that has only tokens. For the hot path, since this takes half the time of `Delta(...)`."""
