"""Readers of a body's texts: prompts, texts to embed or to compare. Each is a string, or token ids where they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.values import Adapter, FieldNames, Pooling, Request, Truncation
from handler.protocols.kernel.dialect import ServerContext
from handler.protocols.kernel.parameters import PARAMETERS, Parameter, unsupported
from handler.protocols.kernel.readers import boolean, integer, show
from handler.protocols.kernel.schema import COUNT, TEXT, Shape, accepts, listing

MAX_TEXTS = 2048
"""Texts to embed or to compare in one body: OpenAI's limit of `input`."""

MAX_QUERIES = 1 << 24
"""Characters of a body's query, which is prepended to every text, times the number of texts."""

_WANTED = "must be a string, a list of strings, a list of token ids, or a list of those"

Text = str | tuple[int, ...]

NON_EMPTY: Shape = {**TEXT, "minLength": 1}

_IDS = listing(COUNT, minItems=1)


def text_list(items: Shape, most: int = MAX_TEXTS) -> Shape:
    return listing(items, minItems=1, maxItems=most)


def texts_shape(most: int = MAX_TEXTS) -> Shape:
    """Describe a text, token ids, or a list of those."""
    return {"anyOf": [NON_EMPTY, _IDS, text_list({"anyOf": [TEXT, _IDS]}, most)]}


class NoTexts(InvalidPayload):
    """Raised for an empty list of texts."""


class TooManyTexts(InvalidPayload):
    """Raised for more texts than one body may have."""


def read_texts(value: Any, name: str, most: int = MAX_TEXTS, noun: str = "texts") -> list[Text]:
    """Read one or more texts; a text, or a list of ids, counts as a list of one.

    Args:
        name: the client's name of the field, for messages.

    Raises:
        InvalidPayload: naming the field.
    """
    if isinstance(value, str) or (isinstance(value, list) and value and _is_number(value[0])):
        return [_read_text(value, name)]
    return [_read_text(text, name) for text in read_list(value, name, _WANTED, most, noun)]


def read_strings(value: Any, name: str) -> list[str]:
    """Read a list of texts that are strings.

    Raises:
        InvalidPayload: naming the field.
    """
    texts = read_list(value, name, "must be a list of strings")
    return [read_string(text, f"{name}[{index}]") for index, text in enumerate(texts)]


def read_string(value: Any, name: str) -> str:
    """Read a text that is a string."""
    if not isinstance(value, str) or not value:
        raise InvalidPayload(f"'{name}' must be a non-empty string")
    return value


def read_list(value: Any, name: str, wanted: str, most: int = MAX_TEXTS, noun: str = "texts") -> list[Any]:
    """Check the length of a list of texts; `wanted` describes a valid field."""
    if value == []:
        raise NoTexts(f"'{name}' {wanted}")
    if not isinstance(value, list):
        raise InvalidPayload(f"'{name}' {wanted}")
    if len(value) > most:
        raise TooManyTexts(f"'{name}' has {len(value)} {noun}; at most {most}")
    return value


def _read_text(value: Any, name: str) -> Text:
    if isinstance(value, str) and value:
        return value
    if value in ("", []):
        raise InvalidPayload(f"'{name}' must not be empty")
    if not isinstance(value, list) or not all(map(_is_number, value)):
        raise InvalidPayload(f"'{name}' {_WANTED}")
    try:
        return tuple(map(integer(0), value))
    except ValueError:
        raise InvalidPayload(f"'{name}' must contain token ids of at least 0") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def text_of(text: Text, name: str, context: ServerContext) -> str:
    """Return the text that an answer shows. Ids become their tokens' text, special tokens included."""
    if isinstance(text, str):
        return text
    vocabulary = context.vocabulary
    if vocabulary is None:
        raise InvalidPayload(f"'{name}': the engine has no vocabulary of its own; send text")
    if any(id >= len(vocabulary) for id in text):
        raise InvalidPayload(f"'{name}' contains ids that are not in the vocabulary of {len(vocabulary)} tokens")
    return vocabulary.decode(text)


def embedding_requests(
    texts: Sequence[Text], name: str, pooling: Pooling, context: ServerContext, **fields: Any
) -> list[Request]:
    """Return a request for each text's vector; `fields` are the requests' own."""
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


def score_requests(query: str, texts: Sequence[str], name: str, pooling: Pooling, **fields: Any) -> list[Request]:
    """Return a request for the score of each text with the query; `fields` are the requests' own.

    Raises:
        TooManyTexts: the query is too long for so many texts.
    """
    if len(query) * len(texts) > MAX_QUERIES:
        each = f"'query' has {len(query)} characters for each of {len(texts)} texts"
        raise TooManyTexts(f"{each}; at most {MAX_QUERIES} in all")
    return [
        Request(query, pooling=pooling, pair=text, names=FieldNames(prompt=f"{name}[{index}]"), **fields)
        for index, text in enumerate(texts)
    ]


@accepts(enum=["left", "right", "Left", "Right"])
def truncation_side(value: Any) -> str:
    """Read the side on which tokens are cut off, as vLLM and text-embeddings-inference name it."""
    side = value.lower() if isinstance(value, str) else ""
    if side not in ("left", "right"):
        raise ValueError("must be left or right")
    return str(side)


@accepts(type="integer", minimum=-1)
def most_tokens(value: Any) -> int:
    """Read vLLM's limit of a text's tokens; -1 is the model's own."""
    tokens = integer(-1)(value)
    if not tokens:
        raise ValueError("must be -1, the model's limit, or at least 1")
    return tokens


VLLM_POOLING: Mapping[str, Parameter] = {
    "use_activation": Parameter("normalize", boolean),
    "truncate_prompt_tokens": Parameter("most_tokens", most_tokens),
    "truncation_side": Parameter("side", truncation_side),
    "priority": PARAMETERS["priority"],
    "padding": unsupported("the engine pads its batches itself", "do_not_pad"),
    "mm_processor_kwargs": unsupported("the engine reads text only", {}),
    "truncate": unsupported("write truncate_prompt_tokens=-1", False),
}
"""vLLM's parameters of all pooling requests (vllm/entrypoints/pooling/base/protocol.py), and TEI's `truncate`."""


def vllm_fields(
    others: Mapping[str, Any], adapter: Adapter | None, truncation: Truncation | None = None
) -> dict[str, Any]:
    """Return the fields of a request that these parameters and the adapter decide.

    Args:
        truncation: used if `truncate_prompt_tokens` is missing.
    """
    if (most := others.get("most_tokens")) is not None:
        truncation = Truncation(None if most == -1 else most, others.get("side", "right"))
    return {"truncation": truncation, "adapter": adapter, "priority": others.get("priority", 0)}


def check_prompt_name(name: str, context: ServerContext) -> str:
    """Return the model's own prompt of that name, which is put before each text.

    Source: sentence-transformers' `prompts` in config_sentence_transformers.json.
    """
    if name not in context.prompts:
        known = f"has {', '.join(sorted(context.prompts))}" if context.prompts else "has none"
        raise InvalidParameter(f"prompt_name={show(name)}: the model has no such prompt; it {known}")
    return context.prompts[name]
