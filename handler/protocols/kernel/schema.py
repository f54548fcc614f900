"""JSON schemas of response types and of readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

Shape = dict[str, Any]

TEXT: Shape = {"type": "string"}
FLAG: Shape = {"type": "boolean"}
COUNT: Shape = {"type": "integer", "minimum": 0}
NUMBER: Shape = {"type": "number"}
NULL: Shape = {"type": "null"}


def ref(name: str) -> Shape:
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None, **more: Any) -> Shape:
    """Return the schema of an object, which may also have other properties."""
    properties = {**required, **(optional or {})}
    shape: Shape = {"type": "object", "properties": properties, **more}
    return {**shape, "required": [*required]} if required else shape


def listing(items: Shape, **more: Any) -> Shape:
    return {"type": "array", "items": items, **more}


def nullable(shape: Shape) -> Shape:
    """Return a schema that also allows null."""
    if "anyOf" in shape:
        return {**shape, "anyOf": [*shape["anyOf"], NULL]}
    kind = shape.get("type")
    if kind == "null" or (isinstance(kind, list) and "null" in kind) or None in shape.get("enum", ()):
        return shape
    if isinstance(kind, str) and shape.keys().isdisjoint(("const", "enum")):
        return {**shape, "type": [kind, "null"]}
    description = {"description": shape["description"]} if "description" in shape else {}
    return {"anyOf": [{name: value for name, value in shape.items() if name != "description"}, NULL], **description}


Count = Annotated[int, ("minimum", 0)]
"""An integer that is at least 0. The pair in `Annotated` is a keyword of its schema in the OpenAPI document."""


if TYPE_CHECKING:
    from typing_extensions import NotRequired as NotRequired
else:

    class NotRequired:
        """Mark a field of a TypedDict as optional. Python 3.10 has no `typing.NotRequired`."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return Annotated[kind, OPTIONAL]


OPTIONAL = ("required", False)

_PLAIN: Mapping[Any, Shape] = {
    str: TEXT,
    bool: FLAG,
    int: {"type": "integer"},
    float: NUMBER,
    NoneType: NULL,
    Any: {},
}


def schema_of_type(kind: Any) -> Shape:
    """Return the JSON schema of a response type. For a TypedDict, it is a reference to the component of the same name.

    A pair in `Annotated[type, (keyword, value)]` adds a keyword to the schema.
    """
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if is_typeddict(kind):
        return ref(kind.__name__)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return {**schema_of_type(arguments[0]), **dict(pair for pair in arguments[1:] if pair != OPTIONAL)}
    if origin is Literal:
        return {"const": arguments[0]} if len(arguments) == 1 else {"enum": [*arguments]}
    if origin is list:
        return listing(schema_of_type(arguments[0]))
    if origin in (Union, UnionType):
        shapes = [schema_of_type(argument) for argument in arguments if argument is not NoneType]
        shape = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
        return nullable(shape) if NoneType in arguments else shape
    return {"type": "object"}


def components_of(kinds: Iterable[Any]) -> dict[str, Shape]:
    """Return the schemas of all TypedDicts in `kinds` and in the types of their fields, by name."""
    components: dict[str, Shape] = {}
    waiting = [*kinds]
    while waiting:
        kind = waiting.pop()
        if not is_typeddict(kind):
            waiting += [argument for argument in get_args(kind) if not isinstance(argument, str | tuple)]
        elif kind.__name__ not in components:
            fields = get_type_hints(kind, include_extras=True)
            required, optional = dict[str, Shape](), dict[str, Shape]()
            for name, field in fields.items():
                is_optional = name in kind.__optional_keys__ or OPTIONAL in getattr(field, "__metadata__", ())
                (optional if is_optional else required)[name] = schema_of_type(field)
            components[kind.__name__] = record(required, optional)
            waiting += fields.values()
    return components


# -- JSON schemas of readers -------------------------------------------------------------------------------------------


Reader = TypeVar("Reader", bound=Callable[..., Any])

_NAME = "json_schema"


def accepts(**schema: Any) -> Callable[[Reader], Reader]:
    """Return a decorator that attaches the JSON schema of the accepted values to a reader, for the OpenAPI document."""

    def mark(read: Reader) -> Reader:
        setattr(read, _NAME, schema)
        return read

    return mark


def schema_of_reader(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema that `accepts` attached to a reader, or an empty schema."""
    schema: dict[str, Any] = getattr(read, _NAME, {})
    return schema
