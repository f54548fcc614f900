"""Readers of the texts in a body, such as prompts and texts to embed. A text is a string or a list of token ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.values import Adapter, FieldNames, Pooling, Request, Truncation
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import PARAMETERS, Parameter, ParsedParameters, unsupported
from handler.protocols.kernel.readers import boolean, integer, is_token_id
from handler.protocols.kernel.schema import COUNT, TEXT, Shape, accepts, listing

MAX_TEXTS = 2048
"""Maximum number of texts to embed or to compare in a body. It is OpenAI's limit for `input`."""

MAX_QUERIES = 1 << 24
"""Maximum query length in characters times the number of texts, because the query is repeated for each text."""

_EXPECTED = "must be a string, a list of strings, a list of token ids, or a list of token id lists"

Text = str | tuple[int, ...]

NON_EMPTY: Shape = {**TEXT, "minLength": 1}

_IDS = listing(COUNT, minItems=1)


def text_list(items: Shape, most: int = MAX_TEXTS) -> Shape:
    return listing(items, minItems=1, maxItems=most)


def texts_shape(most: int = MAX_TEXTS) -> Shape:
    """Return the schema of a text, a list of token ids, or a list of either."""
    return {"anyOf": [NON_EMPTY, _IDS, text_list({"anyOf": [TEXT, _IDS]}, most)]}


class NoTexts(InvalidPayload):
    """Raised for an empty list of texts."""


class TooManyTexts(InvalidPayload):
    """Raised for more texts than a body may contain."""


def read_texts(value: Any, name: str, most: int = MAX_TEXTS, noun: str = "texts") -> list[Text]:
    """Read one or more texts. A string or a list of token ids is a single text.

    Args:
        name: the client's name for the field, for error messages.
        most: the maximum number of texts.
        noun: the plural noun for the texts in error messages.

    Raises:
        InvalidPayload: the value is invalid. The message names the field.
    """
    if isinstance(value, str) or (isinstance(value, list) and value and _is_number(value[0])):
        return [_read_text(value, name)]
    return [_read_text(text, name) for text in read_list(value, name, _EXPECTED, most, noun)]


def read_strings(value: Any, name: str, expected: str = "must be a list of strings") -> list[str]:
    """Read a list of non-empty strings.

    Args:
        expected: a description of valid values, for messages.

    Raises:
        InvalidPayload: the value is invalid. The message names the field.
    """
    texts = read_list(value, name, expected)
    return [read_string(text, f"{name}[{index}]") for index, text in enumerate(texts)]


def read_string(value: Any, name: str) -> str:
    """Read a non-empty string."""
    if not isinstance(value, str) or not value:
        raise InvalidPayload(f"'{name}' must be a non-empty string")
    return value


def read_list(value: Any, name: str, expected: str, most: int = MAX_TEXTS, noun: str = "texts") -> list[Any]:
    """Check that a value is a non-empty list with an allowed number of texts, and return it.

    Args:
        expected: a description of valid values, for messages.
    """
    if value == []:
        raise NoTexts(f"'{name}' {expected}")
    if not isinstance(value, list):
        raise InvalidPayload(f"'{name}' {expected}")
    if len(value) > most:
        raise TooManyTexts(f"'{name}' has {len(value)} {noun}; the maximum is {most}")
    return value


def _read_text(value: Any, name: str) -> Text:
    if isinstance(value, str) and value:
        return value
    if value in ("", []):
        raise InvalidPayload(f"'{name}' must not be empty")
    if not isinstance(value, list) or not all(map(_is_number, value)):
        raise InvalidPayload(f"'{name}' {_EXPECTED}")
    if not all(map(is_token_id, value)):
        raise InvalidPayload(f"'{name}' must contain token ids of at least 0")
    return tuple(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def text_of(text: Text, name: str, context: ServerContext) -> str:
    """Return a text as a string. Token ids are decoded, including special tokens."""
    if isinstance(text, str):
        return text
    vocabulary = context.vocabulary
    if vocabulary is None:
        raise InvalidPayload(f"'{name}': the engine has no vocabulary of its own to decode token ids; send text")
    if any(id >= len(vocabulary) for id in text):
        raise InvalidPayload(f"'{name}' contains ids that are not in the vocabulary of {len(vocabulary)} tokens")
    return vocabulary.decode(text)


def embedding_requests(
    texts: Sequence[Text], name: str, pooling: Pooling, context: ServerContext, **fields: Any
) -> list[Request]:
    """Return a request for the embedding of each text.

    Args:
        name: the client's name for the field of the texts, for messages.
        fields: further fields of all requests.
    """
    return [
        Request(
            text_of(text, name, context),
            pooling=pooling,
            prompt_ids=None if isinstance(text, str) else text,
            names=FieldNames(prompt=name if len(texts) == 1 else f"{name}[{index}]"),
            **fields,
        )
        for index, text in enumerate(texts)
    ]


def cosine(first: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two embeddings of length 1."""
    return math.fsum(a * b for a, b in zip(first, other, strict=True))


def score_requests(query: str, texts: Sequence[str], name: str, pooling: Pooling, **fields: Any) -> list[Request]:
    """Return a request for each text that scores it against the query.

    Args:
        name: the client's name for the field of the texts, for messages.
        fields: additional fields of all requests.

    Raises:
        TooManyTexts: the query is too long for so many texts.
    """
    if len(query) * len(texts) > MAX_QUERIES:
        each = f"'query' has {len(query)} characters for each of {len(texts)} texts"
        raise TooManyTexts(f"{each}; the maximum is {MAX_QUERIES} in total")
    return [score_request((query, text), f"{name}[{index}]", pooling, **fields) for index, text in enumerate(texts)]


def score_request(pair: tuple[str, str], name: str, pooling: Pooling, **fields: Any) -> Request:
    """Return a request for the score of a pair of texts."""
    return Request(pair[0], pair=pair[1], pooling=pooling, names=FieldNames(prompt=name), **fields)


@accepts(enum=["left", "right", "Left", "Right"])
def truncation_side(value: Any) -> str:
    """Read the side on which tokens are cut off, in the spelling of vLLM or text-embeddings-inference."""
    side = value.lower() if isinstance(value, str) else ""
    if side not in ("left", "right"):
        raise ValueError("must be left or right")
    return str(side)


@accepts(type="integer", minimum=-1)
def most_tokens(value: Any, context: ServerContext) -> int:
    """Read vLLM's maximum number of tokens per text. -1 is the model's limit; larger values are refused, as in vLLM."""
    tokens, most = integer(-1)(value), context.most_tokens()
    if not tokens:
        raise ValueError("must be at least 1, or -1 for the model's limit")
    if most is not None and tokens > most:
        raise ValueError(f"must be at most {most}, the model's limit, or -1 for that limit")
    return tokens


VLLM_POOLING: Mapping[str, Parameter] = {
    "use_activation": Parameter("normalize", boolean),
    "truncate_prompt_tokens": Parameter("most_tokens", most_tokens, informed=True),
    "truncation_side": Parameter("side", truncation_side),
    "priority": PARAMETERS["priority"],
    "cache_salt": PARAMETERS["cache_salt"],
    "padding": unsupported("the engine pads its batches itself", "do_not_pad"),
    "mm_processor_kwargs": unsupported("the engine reads text only", {}),
    "truncate": unsupported("use truncate_prompt_tokens=-1", False),
}
"""vLLM's parameters for all pooling requests (vllm/entrypoints/pooling/base/protocol.py), and TEI's `truncate`."""


def vllm_fields(
    parameters: ParsedParameters, adapter: Adapter | None, truncation: Truncation | None = None
) -> dict[str, Any]:
    """Return the request fields that are determined by vLLM's pooling parameters and the adapter.

    Args:
        parameters: the values of the parameters in `VLLM_POOLING`; their `sampling` contains the cache salt.
        truncation: the truncation if `truncate_prompt_tokens` is missing.
    """
    others = parameters.others
    if (most := others.get("most_tokens")) is not None:
        truncation = Truncation(None if most == -1 else most, others.get("side", "right"))
    beside = {"adapter": adapter, "priority": others.get("priority", 0)}
    return {"sampling": parameters.sampling, "truncation": truncation, **beside}
