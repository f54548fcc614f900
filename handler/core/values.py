"""Values of every layer: requests, sampling parameters, tokens and deltas. All are immutable."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import partial
from typing import Annotated, Any, NamedTuple, get_type_hints

from handler.core.errors import ServingError
from handler.core.media import MediaSource


class Thoughts(NamedTuple):
    """A reasoning model's first thought: its marks, and the state in which the prompt leaves it.

    Attributes:
        is_open: the answer begins within it.
        calls: those marks in `end` that begin a call.
        closing: ids of the mark that ends a thought in the model's place; empty if none does.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    is_open: bool
    calls: tuple[str, ...] = ()
    closing: tuple[int, ...] = ()


class AnswerStart:
    """Finds the end of an answer's first thought, within which nothing else is parsed.

    Attributes:
        is_open: the thought has begun.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._thoughts = thoughts
        self.is_open = thoughts.is_open
        self._held = ""
        self._space: list[str] = []  # before the first word

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text up to the thought's end, and what follows it; None while it has not ended."""
        self._held += text
        if not self.is_open:
            start = self._held.lstrip()
            self._space.append(self._held[: len(self._held) - len(start)])
            self._held = start
            if not start.startswith(self._thoughts.begin):
                undecided = any(mark.startswith(start) for mark in self._thoughts.begin)
                return "", None if undecided else self.flush()
            self.is_open = True
            text = self._held = "".join([*self._space, start])
        ends = [at + len(mark) for mark in self._thoughts.end if (at := self._held.find(mark)) >= 0]
        if not ends:
            self._held = self._held[1 - max(map(len, self._thoughts.end)) :]
            return text, None
        cut = len(text) - len(self._held) + min(ends)
        return text[: max(cut, 0)], text[max(cut, 0) :]

    def flush(self) -> str:
        """Return the text that was held back."""
        return "" if self.is_open else "".join([*self._space, self._held])


class Finish(str, Enum):
    """Why a sequence ended; the values are LMI's and TGI's `finish_reason`."""

    LENGTH = "length"
    EOS = "eos_token"
    STOP = "stop_sequence"
    ERROR = "error"


class StructuredOutput(NamedTuple):
    """A rule for the whole answer after its thought.

    Attributes:
        kind: json_schema, json_object, regex, grammar (EBNF), choice or structural_tag (xgrammar's).
        value: the rule as text: JSON for a schema, a list of choices and a structural tag, "" for json_object.
        allows_text: any text may come before the part that it governs.
    """

    kind: str
    value: str
    allows_text: bool = False


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter; `id`, at least 1, is never used again for another path or other weights.

    Requests hold the registered object itself, so a weak reference shows whether one still uses it.
    """

    name: str
    id: int
    path: str  # a directory


class Nature(Flag):
    """The nature of a field of Sampling. A beam search refuses fields that have none."""

    SAMPLED = auto()  # without effect on a greedy choice
    BY_HANDLER = auto()  # followed by the handler, whatever the engine; without `logprobs` one only has less to do
    WITH_BEAMS = auto()  # followed by beam searches too, or without effect there
    ONLY_BEAMS = auto()  # without effect where there is no beam search


class Sampling(NamedTuple):
    """Generation parameters; dialects map their own names and neutral values onto these.

    A field's default is its neutral value. Without `do_sample` decoding is greedy: `Nature.SAMPLED` has no effect.
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
    no_repeat_ngram_size: int = 0  # 0: any may repeat
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, number added to its logit
    seed: Annotated[int | None, Nature.SAMPLED] = None  # None: drawn when a request that samples is accepted
    stop: Annotated[tuple[str, ...], Nature.BY_HANDLER] = ()
    include_stop: Annotated[bool, Nature.BY_HANDLER] = False
    stop_token_ids: Annotated[tuple[int, ...], Nature.WITH_BEAMS] = ()
    bad_sequences: tuple[str, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: Annotated[bool, Nature.BY_HANDLER] = True
    marks: Annotated[frozenset[str], Nature.BY_HANDLER] = frozenset()  # special tokens that are text all the same
    # Stop strings and structured output begin after them.
    thoughts: Annotated[Thoughts | None, Nature.BY_HANDLER] = None
    # Tokens of the first thought, which then ends; None: any number.
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

    def with_seed(self) -> Sampling:
        """Draw a seed where one has an effect and none is set; an answer may name it."""
        return self if self.seed is not None or not self.do_sample else self._replace(seed=random.getrandbits(53))

    def seed_of(self, sequence: int) -> int | None:
        """Return the seed that reproduces one of several sequences by itself."""
        return None if self.seed is None else (self.seed + sequence) % (1 << 64)

    @property
    def signed_seed(self) -> int | None:
        """The seed as a signed number of 64 bits, as vLLM's generators take it."""
        return None if self.seed is None else self.seed - (1 << 64 if self.seed >> 63 else 0)

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate."""
        return max(self.n, self.best_of, self.num_beams)


def fields_of(nature: Nature) -> list[str]:
    """Return the fields of Sampling that have one of these natures."""
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
"""Tasks whose answers are numbers of a whole text."""


class Pooling(NamedTuple):
    """A computation on a whole text that returns numbers, not text: the `vector` of the last delta.

    Attributes:
        kind: embed (the text's vector), score (one number, of a text or a pair) or classify (a number for each label).
        dimensions: of an embedding its first n numbers alone, as Matryoshka models learn them (arXiv 2205.13147).
        normalize: embed: the vector has length 1; None: as the model's own modules say. score and classify: numbers
            between 0 and 1 (sigmoid; softmax over several labels of which one holds); otherwise the logits.
        second: index of the first token of a pair's second text; set when the texts are tokenized.
    """

    kind: str
    dimensions: int | None = None
    normalize: bool | None = True
    second: int | None = None


class Truncation(NamedTuple):
    """How a prompt with too many tokens is truncated.

    Attributes:
        most: tokens to keep; None: as many as the model accepts, in addition to the answer's.
        side: left or right, where tokens are cut off; the right only of a request with Pooling.
    """

    most: int | None = None
    side: str = "left"


def keep_last(most: int | None) -> Truncation | None:
    """Truncate a prompt to its last `most` tokens; -1 is the model's limit, None truncates nothing."""
    return None if most is None else Truncation(None if most == -1 else most)


class FieldNames(NamedTuple):
    """Field names of the client's dialect, for messages."""

    prompt: str = "inputs"
    max_new_tokens: str = "parameters.max_new_tokens"
    stop_token_ids: str = "parameters.stop_token_ids"
    bad_token_ids: str = "parameters.bad_words_list"
    logit_bias: str = "parameters.logit_bias"
    logits: str = "parameters.outputs"
    dimensions: str = "dimensions"
    structured_output: str = "parameters.grammar"


LMI_NAMES = FieldNames()


Objects = Sequence[Mapping[str, Any]]
"""JSON objects, such as the messages of a chat or its tools."""


class TemplateOptions(NamedTuple):
    """Values that a chat template gets in addition to messages and tools.

    Attributes:
        arguments: names with their values, `documents` among them.
        add_generation_prompt: end with the beginning of the assistant's answer.
        continue_final_message: end within the last message, which the answer continues.
    """

    arguments: tuple[tuple[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False


PLAIN_TEMPLATE = TemplateOptions()


class Request(NamedTuple):
    """One request: a prompt, sampling parameters and the parts of the answer.

    The prompt is text; or messages, and then `prompt` is empty; or token ids, and then `prompt` is their text in the
    answer. A medium of a message is a part `{"type": "image"}`, by its kind, in a list of parts as its `content`;
    `media` has one source for each, in their order.
    """

    prompt: str
    sampling: Sampling = Sampling()
    pooling: Pooling | None = None  # computes numbers of the prompt; the sampling then does not count
    transcribes: bool = False  # writes what its one audio clip says; the template's arguments name language and task
    pair: str | None = None  # with `pooling`: a second text, tokenized with the prompt as the model's pair
    truncation: Truncation | None = None  # None: too many tokens are refused
    details: bool = False
    full_text: bool = False  # put the prompt in front of generated_text
    messages: tuple[Mapping[str, Any], ...] = ()  # each with `role` and `content`; with `tools` see encode_chat
    media: tuple[MediaSource, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # for a chat template that knows tools
    template: TemplateOptions = PLAIN_TEMPLATE
    read_prompt: Callable[[Request, str], Request] | None = None  # settles what depends on the prompt of messages
    prompt_ids: tuple[int, ...] | None = None
    adapter: Adapter | None = None
    priority: int = 0  # in the queue; lower is earlier
    session: str = ""  # the client's, by its id
    eos_token_id: int | None = None  # a stop token that ends the answer as EOS
    fill_context: bool = False  # the sampling's new tokens, or as many as the context has room for
    min_free_tokens: int | None = None  # new tokens that must fit, others are cut off; None: all must fit
    names: FieldNames = LMI_NAMES

    @property
    def text_before(self) -> str:
        """The text before the generated one in the answer: the prompt, or none."""
        return self.prompt if self.full_text else ""


class Token(NamedTuple):
    """One token of an answer or a prompt.

    Attributes:
        text: the text that became safe to show with it, possibly none.
        top: on request the most likely alternatives, best first, each with its own text.
    """

    id: int
    text: str
    logprob: float | None
    special: bool
    top: Sequence[Token] = ()


new_token: Callable[[tuple[int, str, float | None, bool, Sequence[Token]]], Token] = partial(tuple.__new__, Token)
"""Make a token of all its fields, in half the time of `Token(...)`: for the hot path."""

NO_TOKEN = Token(-1, "", None, True)
"""Replaces the last token where an engine ends a sequence without one."""


class Heard(NamedTuple):
    """Where in an audio clip the transcribed piece begins, in seconds, and its language, such as `en`."""

    start: float
    end: float
    language: str  # "" where the model does not say


class Extras(NamedTuple):
    """A sequence's values other than its tokens; they go unchanged from the engine to the answer's writer.

    Attributes:
        context_logits: [tokens, vocabulary] of the prompt, once, on request.
        generation_logits: [tokens, vocabulary] of this step's tokens, on request.
        vector: of a request with Pooling, in its only output: an embedding, one score, or a number for each label.
        num_cached_tokens: of the prompt, which the engine had computed before; once.
        heard: of a transcription: these tokens are the first of a piece of the clip.
    """

    context_logits: Sequence[Sequence[float]] | None = None
    generation_logits: Sequence[Sequence[float]] | None = None
    vector: Sequence[float] | None = None
    num_cached_tokens: int | None = None
    heard: Heard | None = None

    def over(self, earlier: Extras) -> Extras:
        """Merge with older values: the newest of each field."""
        return earlier._replace(**{name: value for name, value in self._asdict().items() if value is not None})


NO_EXTRAS = Extras()


class Delta(NamedTuple):
    """One step's result for one sequence of one request; the last one has `finish`."""

    id: int
    sequence: int
    tokens: Sequence[Token]
    finish: Finish | None = None
    error: ServingError | None = None
    prefill: Sequence[Token] | None = None  # the prompt's tokens, with the first delta, on request
    extras: Extras | None = None


_PlainDelta = tuple[int, int, Sequence[Token], None, None, None, None]
new_delta: Callable[[_PlainDelta], Delta] = partial(tuple.__new__, Delta)
"""Make a delta of only tokens, in half the time of `Delta(...)`: for the hot path."""


# -- a user's handlers -------------------------------------------------------------------------------------------------


HANDLERS = "write @input_formatter and @output_formatter functions of handler.formatters in model.py"
MIDDLEWARE = "write an @input_formatter (before) or an @output_formatter (after) of handler.formatters in model.py"
PING = "leave it out: /ping answers 200 while the engine can serve, else 503"
THROTTLE = "SERVING_JOB_QUEUE_SIZE limits the requests that wait, and those beyond get 503"

SCRIPT = "CUSTOM_SCRIPT_FILENAME"
VARIABLES = {
    "invoke": "CUSTOM_FASTAPI_INVOCATION_HANDLER",
    "ping": "CUSTOM_FASTAPI_PING_HANDLER",
    "throttle": "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE",
    "pre_post_process": "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS",
    "pre": "CUSTOM_PRE_PROCESS",
    "post": "CUSTOM_POST_PROCESS",
}
"""What each variable names."""

INSTEAD = {
    SCRIPT: "name the file model.py",
    VARIABLES["invoke"]: HANDLERS,
    VARIABLES["ping"]: PING,
    VARIABLES["throttle"]: THROTTLE,
    **dict.fromkeys((VARIABLES["pre_post_process"], VARIABLES["pre"], VARIABLES["post"]), MIDDLEWARE),
}
"""What to write in place of each variable."""


class Role(Enum):
    """The role that the function `handle` of a model.py has in an embedded server."""

    NONE = "not called"
    ALONE = "answers alone: no engine is loaded"
    ENTRY = "answers, by the engine where it calls LMI's handler"
    FIRST = "is tried first; what it answers with None goes to the engine"
