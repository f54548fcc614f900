"""GptManager's input tensors, read as request parameters, and its output tensors.

Source: TensorRT-LLM's page "Inference Request" (0.11 and earlier). The offsets in word lists have the meaning
documented before 0.11. A name that is also an LMI parameter accepts LMI's plain value or the tensor. A tensor without
an equivalent is refused unless it is empty, with an error that contains its name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar

from handler.core.values import NO_EXTRAS, Delta, Token
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import PARAMETERS, SEVERAL, UINT64, Parameter, ParsedParameters, unsupported
from handler.protocols.kernel.readers import INT32, MAX_STOPS, boolean, integer, number, numbered_adapter
from handler.protocols.kernel.schema import Count, accepts, schema_of_reader

# GptManager's output tensors in `outputs` of a response, as nested lists (TensorRT-LLM, "Inference Request").
#
# A non-streaming response has one row for each returned sequence, padded to the longest row. A line of a stream has one
# token.

OUTPUTS = {
    "output_ids": "",
    "sequence_length": "",
    "output_log_probs": "return_log_probs",
    "cum_log_probs": "return_log_probs",
    "context_logits": "return_context_logits",
    "generation_logits": "return_generation_logits",
}
"""Maps each output tensor to the input tensor that requests it, or to "" if only `outputs` can request it."""

LOGITS = {"context_logits", "generation_logits"}
"""Output tensors that the engine computes only on request."""

Rows = Sequence[Sequence[float]]

Numbers = list[list[list[float | None]]]
"""Numbers in three dimensions, such as [1, sequences, tokens]. A number that is not finite is null."""


class TensorValues(TypedDict, total=False):
    """The output tensors of a response, by name."""

    output_ids: list[list[int]]
    sequence_length: list[Count]
    output_log_probs: Numbers
    cum_log_probs: list[list[float | None]]
    context_logits: Numbers
    generation_logits: list[Numbers]


class OutputTensors(NamedTuple):
    """The output tensors that a request selects, and the token id that pads shorter sequences."""

    names: tuple[str, ...]
    pad: int = -1


def select_tensors(read: ParsedParameters, names: Sequence[str] = (), pad: int = -1) -> OutputTensors | None:
    """Return the output tensors that the request selects, or None if it selects none.

    Args:
        read: the parameters of the request, some of which select output tensors.
        names: the names in the `outputs` of the request.
        pad: the token id that pads shorter sequences.
    """
    logits = {OUTPUTS[name]: getattr(read.sampling, OUTPUTS[name]) for name in LOGITS}
    flags = {**read.others, **logits}
    selected = tuple(name for name, flag in OUTPUTS.items() if name in names or flags.get(flag))
    return OutputTensors(selected, pad) if selected else None


def document(
    tensors: OutputTensors, sequences: Sequence[tuple[Sequence[Token], Rows]], context: Rows | None
) -> TensorValues:
    """Build the `outputs` of a non-streaming response.

    Args:
        sequences: the tokens of each sequence, and a row of logits over the vocabulary for each token, or no rows.
        context: the logits of the prompt, with one row for each token, or None if the request does not select them.
    """
    tokens = [[token for token in sequence if token.id >= 0] for sequence, _ in sequences]
    longest = max(map(len, tokens), default=0)
    values: TensorValues = {}
    if "output_ids" in tensors.names:
        values["output_ids"] = [_padded([token.id for token in sequence], longest, tensors.pad) for sequence in tokens]
    if "sequence_length" in tensors.names:
        values["sequence_length"] = [len(sequence) for sequence in tokens]
    if "output_log_probs" in tensors.names:
        values["output_log_probs"] = [
            [_padded([token.logprob for token in sequence], longest, 0.0) for sequence in tokens]
        ]
    if "cum_log_probs" in tensors.names:
        values["cum_log_probs"] = [[sum(token.logprob or 0.0 for token in sequence) for sequence in tokens]]
    if "context_logits" in tensors.names:
        values["context_logits"] = [_lists(context or ())]
    if "generation_logits" in tensors.names:
        logits = [_lists(rows[: len(sequence)]) for (_, rows), sequence in zip(sequences, tokens, strict=True)]
        pad: list[float | None] = [0.0] * max(map(len, itertools.chain(*logits)), default=0)
        values["generation_logits"] = [[_padded(sequence, longest, pad) for sequence in logits]]
    return values


Value = TypeVar("Value")


def _padded(values: list[Value], size: int, pad: Value) -> list[Value]:
    return [*values, *[pad] * (size - len(values))]


class Lines:
    """Builds the `outputs` of each line of a stream."""

    def __init__(self, names: OutputTensors) -> None:
        self._names = names
        self._total = 0.0
        self._context: Rows | None = None
        self._rows: Iterator[Sequence[float]] = iter(())

    def take(self, delta: Delta) -> None:
        """Set the delta that contains the tokens passed to the next calls of `line`."""
        extras = delta.extras or NO_EXTRAS
        self._context = self._context if extras.context_logits is None else extras.context_logits
        self._rows = iter(extras.generation_logits or ())

    def line(self, token: Token) -> TensorValues:
        """Build the `outputs` of the line for a token.

        `cum_log_probs` is the sum up to this token. Only the first line contains the logits of the prompt.
        """
        self._total += token.logprob or 0.0
        row = next(self._rows, None)
        outputs = document(self._names, [((token,), () if row is None else (row,))], self._context)
        if "cum_log_probs" in outputs:
            outputs["cum_log_probs"] = [[self._total]]
        if self._context is None:
            outputs.pop("context_logits", None)
        self._context = None
        return outputs


def _lists(rows: Rows) -> list[list[float | None]]:
    """Convert rows of any array type to lists."""
    return [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]


_NGRAM_OFF = 1 << 30  # TensorRT-LLM's default, which disables the check: no sequence has so many tokens

_TENSOR: dict[str, Any] = {"type": "array", "minItems": 1}
_ID = {"type": "integer", "minimum": -1, "maximum": INT32}

Words = tuple[tuple[int, ...], ...]


# -- shapes ------------------------------------------------------------------------------------------------------


def one_of(schema: dict[str, Any], depth: int = 1) -> list[dict[str, Any]]:
    """Return the JSON schemas of a value, and of tensors that contain a single value of this kind.

    Args:
        depth: the maximum number of dimensions of the tensors.
    """
    forms = [schema]
    for _ in range(depth):
        forms.append({"type": "array", "minItems": 1, "maxItems": 1, "items": forms[-1]})
    return forms


def single(read: Callable[[Any], Any], shape: str = "[1]") -> Callable[[Any], Any]:
    """Return a reader that accepts a plain value or a tensor with a single element.

    Args:
        read: the reader of the value itself.
    """
    depth = shape.count("1")

    @accepts(anyOf=one_of(schema_of_reader(read), depth))
    def read_single(value: Any) -> Any:
        for _ in range(depth):
            if isinstance(value, list):
                if len(value) != 1:
                    raise ValueError(f"must be a single value or a tensor of shape {shape}")
                value = value[0]
        return read(value)

    return read_single


def _row(value: Any, shape: str) -> list[Any]:
    """Return the only row of a tensor of shape [1, N], or a flat list unchanged."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list):
        raise ValueError(f"must be a tensor of shape {shape}")
    return value


def _ids(row: Sequence[Any], least: int = 0) -> list[int]:
    if not all(type(id) is int and least <= id <= INT32 for id in row):
        raise ValueError(f"must contain integers from {least} to {INT32}")
    return list(row)


# -- values that depend on the vocabulary ------------------------------------------------------------------------


def _check_vocabulary(ids: Sequence[int], context: ServerContext) -> None:
    """Raise ValueError if an id is not in the vocabulary.

    If prompts have no common vocabulary, `serving/encoder.py` checks the ids later.
    """
    if context.vocabulary is not None and (worst := max(ids, default=0)) >= len(context.vocabulary):
        raise ValueError(f"{worst} is not in the vocabulary of {len(context.vocabulary)} tokens")


def _no_vocabulary(context: ServerContext) -> ValueError:
    return ValueError(f"is not supported: the engine {context.engine} has no vocabulary of its own")


@accepts(**_TENSOR, items={"type": ["integer", "array"]})
def input_ids(value: Any, context: ServerContext) -> tuple[int, ...]:
    ids = _ids(_row(value, "[1, num_input_tokens] or [num_input_tokens]"))
    if not ids:
        raise ValueError("must contain at least one token")
    if context.vocabulary is None:
        raise _no_vocabulary(context)
    _check_vocabulary(ids, context)
    return tuple(ids)


@accepts(anyOf=one_of(_ID))
def end_id(value: Any, context: ServerContext) -> dict[str, Any]:
    """Read the id of the end token.

    -1 disables the model's own end tokens, and the id of any of them has no effect. Any other id replaces them.
    """
    id = single(integer(-1))(value)
    if id < 0:
        return {"ignore_eos": True}
    _check_vocabulary((id,), context)
    return {"end_id": id} if id in context.eos else {"ignore_eos": True, "end_id": id}


@accepts(**_TENSOR, items={"type": ["number", "array"]})
def embedding_bias(value: Any, context: ServerContext) -> tuple[tuple[int, float], ...]:
    read = number(-math.inf)
    bias = [read(item) for item in _row(value, "[1, vocab_size] or [vocab_size]")]
    result = tuple((id, item) for id, item in enumerate(bias) if item)
    if result and context.vocabulary is None:
        raise _no_vocabulary(context)
    if context.vocabulary is not None and len(bias) != len(context.vocabulary):
        raise ValueError(f"has {len(bias)} numbers, but the vocabulary has {len(context.vocabulary)} tokens")
    return result


def word_list(value: Any) -> Words:
    """Read a word list, a tensor of shape [2, N] or [1, 2, N].

    The first row contains the token ids of all words in sequence. The second row contains the end offset of each word.
    """
    shape = "[2, N] or [1, 2, N]"
    rows = _row(value, shape) if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(rows, list) or len(rows) != 2 or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"must be a tensor of shape {shape}")
    ids, ends = _ids(rows[0], -1), _ids(rows[1], -1)
    if len(ids) != len(ends):
        raise ValueError(f"must be a tensor of shape {shape}: its rows have {len(ids)} and {len(ends)} numbers")
    offsets = [end for end in ends if end >= 0]
    used = offsets[-1] if offsets else 0
    spans = list(itertools.pairwise([0, *offsets]))
    if ends[: len(offsets)] != offsets or used > len(ids) or any(a >= b for a, b in spans):
        raise ValueError("must have in its second row increasing offsets up to the row's length, and -1 after them")
    if any(id < 0 for id in ids[:used]) or any(id > 0 for id in ids[used:]):
        raise ValueError("must have token ids in its first row up to the last offset, and 0 or -1 after it")
    if len(offsets) > MAX_STOPS:
        raise ValueError(f"must contain at most {MAX_STOPS} words")
    return tuple(tuple(ids[a:b]) for a, b in spans)


def words(strings: str, singles: str) -> Callable[[Any, ServerContext], dict[str, Any]]:
    """Return a reader of a word list.

    Args:
        strings: the field that receives the text of words with several tokens.
        singles: the field that receives the ids of words with a single token.
    """

    @accepts(**_TENSOR, maxItems=2, items={"type": "array"})
    def read(value: Any, context: ServerContext) -> dict[str, Any]:
        all_words = word_list(value)
        for word in all_words:
            _check_vocabulary(word, context)
        single_ids = tuple(word[0] for word in all_words if len(word) == 1)
        texts = tuple(_text(word, context) for word in all_words if len(word) > 1)
        return {**({singles: single_ids} if single_ids else {}), **({strings: texts} if texts else {})}

    return read


def _text(word: tuple[int, ...], context: ServerContext) -> str:
    """Return the text of a word that consists of several tokens, because engines match these words as text."""
    vocabulary = context.vocabulary
    if vocabulary is None:
        raise _no_vocabulary(context)
    if not vocabulary.special.isdisjoint(word):
        raise ValueError("has a special token, which has no text, in a word of several tokens")
    try:
        return b"".join([vocabulary.pieces[id] for id in word]).decode()
    except UnicodeDecodeError:
        raise ValueError("has a word of several tokens that begins or ends in the middle of a character") from None


# -- values with a meaning of their own --------------------------------------------------------------------------


@accepts(anyOf=one_of({"type": "integer", "minimum": -1, "maximum": INT32}))
def _top_k(value: Any) -> dict[str, Any]:
    """Read top_k. A value above 1 enables sampling, because TensorRT-LLM has no `do_sample`."""
    k = max(single(integer(-1))(value), 0)
    return {"top_k": k, "do_sample": True} if k > 1 else {"top_k": k}


@accepts(anyOf=one_of({"type": "number", "minimum": 0, "maximum": 1}))
def _top_p(value: Any) -> dict[str, Any]:
    """Read top_p. 0, TensorRT-LLM's default, disables it; any other value enables sampling."""
    p = single(number(0, 1))(value)
    return {"top_p": p, "do_sample": True} if p else {"top_p": 1.0}


@accepts(anyOf=one_of({"enum": [True, False, 0, 1]}))
def _early_stopping(value: Any) -> bool:
    """Read LMI's boolean, or TensorRT-LLM's 0 or 1."""
    value = single(lambda item: item)(value)
    if type(value) not in (bool, int) or value not in (0, 1):
        raise ValueError("must be true, false, 1, 0, or a tensor of shape [1] that contains one of these values")
    return bool(value)


@accepts(anyOf=one_of({"type": "integer", "minimum": 0, "maximum": INT32}))
def _ngram(value: Any) -> int:
    size: int = single(integer(0))(value)
    return 0 if size >= _NGRAM_OFF else size


@accepts(type="array", items={"enum": list(OUTPUTS)})
def read_outputs(value: Any) -> dict[str, Any]:
    """Read `outputs`, LMI's list of output tensor names."""
    if not isinstance(value, list) or not all(isinstance(name, str) and name in OUTPUTS for name in value):
        raise ValueError(f"must be a list of tensor names, which are {', '.join(OUTPUTS)}")
    result: dict[str, Any] = {"outputs": tuple(name for name in OUTPUTS if name in value)} if value else {}
    return {**result, **{OUTPUTS[name]: True for name in value if name in LOGITS}}


def _never(reason: str) -> Parameter:
    """Return a parameter that accepts only an empty tensor or 0.

    Args:
        reason: the reason why other values are not supported, for the error message.
    """
    return unsupported(reason, [], [[]], 0, [0])


def plain_or_tensor(name: str) -> Parameter:
    """Return a variant of LMI's parameter `name` that also accepts a single-element tensor."""
    field, read, informed = PARAMETERS[name]
    assert not informed, "single() passes only the value to its reader"
    return Parameter(field, single(read))


_P_TUNING = "no engine accepts prompt embeddings (P-tuning) in a request"
_WEIGHTS = "a request cannot contain adapter weights; register the adapter and send its name or lora_task_id"
_DRAFT = (
    "speculative decoding is configured for the engine (option.speculative_*); a request cannot supply draft tokens"
)

TENSORS: Mapping[str, Parameter] = {
    "request_output_len": Parameter("max_new_tokens", single(integer(1), "[1,1]")),
    "input_ids": Parameter("prompt_ids", input_ids, informed=True),
    "streaming": Parameter("stream", single(boolean)),
    "beam_width": plain_or_tensor("num_beams"),
    "temperature": plain_or_tensor("temperature"),
    "runtime_top_k": Parameter(SEVERAL, _top_k),
    "runtime_top_p": Parameter(SEVERAL, _top_p),
    "len_penalty": plain_or_tensor("length_penalty"),
    "early_stopping": Parameter("early_stopping", _early_stopping),
    "repetition_penalty": plain_or_tensor("repetition_penalty"),
    "min_length": plain_or_tensor("min_length"),
    "presence_penalty": plain_or_tensor("presence_penalty"),
    "frequency_penalty": plain_or_tensor("frequency_penalty"),
    "no_repeat_ngram_size": Parameter("no_repeat_ngram_size", _ngram),
    "random_seed": plain_or_tensor("seed"),
    "end_id": Parameter(SEVERAL, end_id, informed=True),
    "pad_id": Parameter(
        "pad_id", single(integer(-1))
    ),  # outside the vocabulary too: a client of TensorRT-LLM sends 50256
    "embedding_bias": Parameter("logit_bias", embedding_bias, informed=True),
    "bad_words_list": Parameter(SEVERAL, words("bad_sequences", "bad_token_ids"), informed=True),
    "stop_words_list": Parameter(SEVERAL, words("stop", "stop_token_ids"), informed=True),
    "prompt_embedding_table": _never(_P_TUNING),
    "prompt_vocab_size": _never(_P_TUNING),
    "lora_task_id": Parameter(
        "adapter",
        accepts(anyOf=one_of({"type": "integer", "minimum": 0, "maximum": UINT64}))(
            lambda value, context: numbered_adapter(single(integer(0, UINT64))(value), context)
        ),
        informed=True,
    ),
    "lora_weights": _never(_WEIGHTS),
    "lora_config": _never(_WEIGHTS),
    "return_log_probs": Parameter("return_log_probs", single(boolean)),
    "return_context_logits": Parameter("return_context_logits", single(boolean)),
    "return_generation_logits": Parameter("return_generation_logits", single(boolean)),
    "draft_input_ids": _never(_DRAFT),
    "draft_logits": _never(_DRAFT),
}
"""All thirty input tensors on TensorRT-LLM's page, by name."""
