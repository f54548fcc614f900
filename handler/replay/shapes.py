"""The shape of an answer: its keys at each level, the JSON types of its values and its framing, whatever was said.

A shape is JSON itself. A scalar is the name of its type, or several as `null|string`; `{"a": …, "b?": …}` is an object,
where `b` is not always there; `[…]` is a list, of one shape for all its items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from handler.replay.documents import NotJson, read_documents

_ANY_OF = "any of"
_NAMES: Mapping[type, str] = {list: "list", dict: "object"}
_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}


def body_shape(body: str) -> dict[str, Any]:
    """Return the shape of a body.

    `frames` are those of its first JSON document, of all between, and of its last one; `glue` is the text before them,
    between them (each different one once) and after them. A body that is not JSON has its text alone.
    """
    try:
        documents = read_documents(body.encode())
    except NotJson:
        return {"text": body}
    glue = documents.glue
    return {
        "glue": [glue[0], *dict.fromkeys(glue[1:-1]), glue[-1]],
        "frames": [merged([shape(value) for value in part]) for part in frames(documents.values).values()],
    }


def frames(values: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Return a body's first document, all between and its last one, as far as there are any."""
    parts = {"first": values[:1], "between": values[1:-1], "last": values[1:][-1:]}
    return {name: part for name, part in parts.items() if part}


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _TYPES.get(type(part)) or _field(name, part, value) for name, part in value.items()}
    if isinstance(value, list):
        return [merged([_TYPES.get(type(part)) or shape(part) for part in value])] if value else []
    return _TYPES[type(value)]


def _field(name: str, value: Any, of: Mapping[str, Any]) -> Any:
    if name == "top_logprobs":
        return _by_token(value)
    if isinstance(value, dict) and (name == "arguments" or (name == "input" and of.get("type") == "tool_use")):
        return "object"  # the model's own fields
    return shape(value)


def _by_token(value: Any) -> Any:
    """Return the shape of a completion's `top_logprobs`: the names in its objects are what the model could say."""
    if isinstance(value, list) and any(isinstance(part, dict) and "logprob" not in part for part in value):
        return [merged([{"TOKEN": merged([shape(logprob) for logprob in part.values()])} for part in value])]
    return shape(value)


def merged(shapes: Sequence[Any]) -> Any:
    """Return the shape that covers all of them."""
    if len(shapes := _different(shapes)) == 1:  # most events of a stream have one shape
        return shapes[0]
    shapes = [part for one in shapes for part in _alternatives(one)]
    objects = [one for one in shapes if isinstance(one, dict)]
    lists = [one for one in shapes if isinstance(one, list)]
    scalars = sorted({name for one in shapes if isinstance(one, str) for name in one.split("|")})
    found: list[Any] = ["|".join(scalars)] if scalars else []
    if lists:
        items = [one[0] for one in lists if one]
        found.append([merged(items)] if items else [])
    if objects:
        found.append(_merged_objects(objects))
    return found[0] if len(found) == 1 else {_ANY_OF: found}


def _alternatives(shape: Any) -> list[Any]:
    """Return the scalar, the list and the object that a value may be, as far as it may."""
    return list(shape[_ANY_OF]) if isinstance(shape, dict) and _ANY_OF in shape else [shape]


def _different(shapes: Sequence[Any]) -> Sequence[Any]:
    """Return each shape once."""
    found: list[Any] = []
    for one in shapes:
        if one not in found:
            found.append(one)
    return found


def _merged_objects(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name.removesuffix("?") for one in objects for name in one)
    always = [name for name in names if all(name in one for one in objects)]
    return {
        name if name in always else f"{name}?": merged(
            [one[key] for one in objects for key in (name, f"{name}?") if key in one]
        )
        for name in names
    }


def differences(old: Any, new: Any, path: str = "$", *, one_of_many: bool = False) -> Iterator[str]:
    """Yield what a client of the old shape finds changed in the new one.

    A value that may be of several types may be of fewer of them. A field that was not always there need not always be.

    Args:
        one_of_many: the old shape is that of many answers, the new one of a single one, which may lack such fields.
    """
    if old == new:
        return
    known = {type(part): part for part in _alternatives(old)}
    for part in _alternatives(new):
        was = known.get(type(part))
        if isinstance(was, dict):
            yield from _object_differences(was, part, path, one_of_many)
        elif isinstance(was, list):
            if was and part:
                yield from differences(was[0], part[0], f"{path}[]", one_of_many=one_of_many)
        elif was is None or not set(part.split("|")) <= set(was.split("|")):
            yield f"{path}: {_name(old)} -> {_name(new)}"


def _object_differences(old: dict[str, Any], new: dict[str, Any], path: str, one_of_many: bool) -> Iterator[str]:
    here, there = ({name.removesuffix("?"): name for name in one} for one in (old, new))
    for name, key in here.items():
        if name not in there:
            if not (one_of_many and key.endswith("?")):
                yield f"{path}.{name}: {_name(old[key])} -> absent"
            continue
        if there[name].endswith("?") and not key.endswith("?"):
            yield f"{path}.{name}: always -> sometimes"
        yield from differences(old[key], new[there[name]], f"{path}.{name}", one_of_many=one_of_many)
    for name, key in there.items():
        if name not in here:
            yield f"{path}.{name}: absent -> {_name(new[key])}"


def _name(shape: Any) -> str:
    names = (part if isinstance(part, str) else _NAMES[type(part)] for part in _alternatives(shape))
    return "|".join(names)
