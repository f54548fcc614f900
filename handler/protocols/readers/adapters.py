"""Which LoRA adapter a request is for: by `adapters` beside the prompt, by a parameter, or by a header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.values import Adapter
from handler.protocols.base import ServerContext
from handler.protocols.readers.values import accepts


@accepts(type="string", description="The name of a LoRA adapter")
def named_adapter(value: Any, context: ServerContext) -> Adapter | None:
    """The adapter of that name; "" is the model itself.

    Raises:
        ValueError: saying what is wrong with the name.
    """
    if not isinstance(value, str):
        raise ValueError("must be the name of an adapter")
    if not value:
        return None
    check_adapters(context)
    found = context.adapters.find(value)
    if found is None:
        raise ValueError("no adapter of that name is registered")
    return found


def numbered_adapter(number: int, context: ServerContext) -> Adapter:
    """The adapter of that number; ValueError says that there is none."""
    check_adapters(context)
    found = context.adapters.by_number(number)
    if found is None:
        raise ValueError("no adapter of that number is registered")
    return found


def check_adapters(context: ServerContext) -> None:
    """ValueError where the engine serves none."""
    if context.no_adapters:
        raise ValueError(f"the engine {context.engine} serves no LoRA adapters: {context.no_adapters}")


def read_adapters(body: Mapping[str, Any], num_prompts: int, context: ServerContext) -> Sequence[Adapter | None]:
    """`adapters` of a body, one for each of its prompts: a name for all of them, or a list of as many (LMI).

    Raises:
        InvalidPayload: there is no such adapter, or the list has another length.
    """
    given = body.get("adapters")
    if given in (None, "", []):
        return [None] * num_prompts
    names = given if isinstance(given, list) else [given] * num_prompts
    if len(names) != num_prompts:
        raise InvalidPayload(
            f"'adapters' names {len(names)} for {num_prompts} prompts; it must be one name, or as many"
        )
    return [_one(name, context) for name in names]


def _one(name: Any, context: ServerContext) -> Adapter | None:
    try:
        return named_adapter(name, context)
    except ValueError as error:
        raise InvalidPayload(f"'adapters': {quote(name) if isinstance(name, str) else 'one'}: {error}") from None


def quote(name: str) -> str:
    """A client's own text in a message: quoted, and not all of a long one."""
    return repr(name if len(name) <= 80 else f"{name[:80]}...")


def merge_adapters(one: Adapter | None, other: Adapter | None, what: str) -> Adapter | None:
    """The adapter that two places of a request name, either of which may name none.

    Raises:
        InvalidPayload: beginning with `what`, the second place.
    """
    if one is not None and other is not None and one != other:
        raise InvalidPayload(f"{what}: {other.name!r} contradicts the adapter {one.name!r}")
    return other if one is None else one
