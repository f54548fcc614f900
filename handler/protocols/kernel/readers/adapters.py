"""Readers of the LoRA adapter that a request names: in `adapters`, in a parameter, or in a header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.values import Adapter
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.schema.readers import accepts
from handler.protocols.kernel.schema.shapes import NULL, TEXT, Shape, listing


@accepts(type="string", description="The name of a LoRA adapter")
def named_adapter(value: Any, context: ServerContext) -> Adapter | None:
    """Find the adapter of that name; "" means the model itself.

    Raises:
        ValueError: naming what is wrong.
    """
    if not isinstance(value, str):
        raise ValueError("must be the name of an adapter")
    if not value:
        return None
    check_adapters(context)
    adapter = context.adapters.find(value)
    if adapter is None:
        raise ValueError("no adapter of that name is registered")
    return adapter


def numbered_adapter(number: int, context: ServerContext) -> Adapter:
    """Find the adapter of that number.

    Raises:
        ValueError: no adapter has that number.
    """
    check_adapters(context)
    adapter = context.adapters.by_number(number)
    if adapter is None:
        raise ValueError("no adapter of that number is registered")
    return adapter


def check_adapters(context: ServerContext) -> None:
    """Raise ValueError where the engine serves no adapters."""
    if context.no_adapters:
        raise ValueError(f"the engine {context.engine} serves no LoRA adapters: {context.no_adapters}")


ADAPTERS: Mapping[str, Shape] = {
    "adapters": {
        "anyOf": [TEXT, listing(TEXT), NULL],
        "description": "The name of a LoRA adapter, or one for each prompt",
    }
}
"""What `read_adapters` reads."""


def read_adapters(body: Mapping[str, Any], num_prompts: int, context: ServerContext) -> Sequence[Adapter | None]:
    """Read a body's `adapters`, one for each prompt: a name for all of them, or a list of as many (LMI).

    Without it the adapter is that of the headers.

    Raises:
        InvalidPayload: no such adapter, another one than the headers', or a list of another length.
    """
    given = body.get("adapters")
    if given in (None, "", []):
        return [context.adapter] * num_prompts
    names = given if isinstance(given, list) else [given] * num_prompts
    if len(names) != num_prompts:
        raise InvalidPayload(
            f"'adapters' names {len(names)} for {num_prompts} prompts; it must be one name, or as many"
        )
    return [merge_adapters(context.adapter, _adapter(name, context), "the body") for name in names]


def _adapter(name: Any, context: ServerContext) -> Adapter | None:
    try:
        return named_adapter(name, context)
    except ValueError as error:
        raise InvalidPayload(f"'adapters': {quote(name) if isinstance(name, str) else 'one'}: {error}") from None


def quote(name: str) -> str:
    """Quote a client's text in a message, at most 80 characters of it."""
    return repr(name if len(name) <= 80 else f"{name[:80]}...")


def merge_adapters(first: Adapter | None, second: Adapter | None, what: str) -> Adapter | None:
    """Return the adapter that two places of a request name; either may name none.

    Raises:
        InvalidPayload: they contradict each other; the message begins with `what`, the second place.
    """
    if first is not None and second is not None and first != second:
        raise InvalidPayload(f"{what}: {second.name!r} contradicts the adapter {first.name!r}")
    return second if first is None else first
