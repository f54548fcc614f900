"""Calls about adapters: the names that DJL's query and SageMaker's body share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from handler.core.errors import BadRequest

_KNOWN = {"name", "src", "preload", "pin"}


class AdapterCall(NamedTuple):
    """A call about an adapter; None where it says nothing. `ignored` lists its unknown names."""

    name: str | None = None
    src: str | None = None
    preload: bool | None = None
    ignored: tuple[str, ...] = ()


def read_adapter_call(values: Mapping[str, Any], *, refuse_unknown: bool) -> AdapterCall:
    """Read a call: `name`, `src`, `preload`, `pin`.

    Raises:
        BadRequest: a value has a wrong type, a name is unknown, or `pin` is true.
    """
    ignored = tuple(name for name in values if name not in _KNOWN)
    if ignored and refuse_unknown:
        raise BadRequest(f"unknown parameter {ignored[0]!r}; there are name, src, preload and pin")
    if _boolean(values, "pin"):
        raise BadRequest("pin=true: no engine here keeps an adapter from making room for others")
    return AdapterCall(_text(values, "name"), _text(values, "src"), _boolean(values, "preload"), ignored)


def required(value: str | None, name: str) -> str:
    """Return a value that must be there.

    Raises:
        BadRequest: it is missing.
    """
    if value is None:
        raise BadRequest(f"Parameter {name} is required.")
    return value


def _text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name}={value!r}: must be a string that is not empty")
    return value


def _boolean(values: Mapping[str, Any], name: str) -> bool | None:
    value = values.get(name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise BadRequest(f"{name}={value!r}: must be true or false")
