"""Values of request bodies, each declared once.

A declaration says what is read (`read`), which names an object has, and what the API document shows (`shape`).
The leaves are the readers of `readers.py`, which raise ValueError with the reason. An error is a path and a reason.

    MESSAGE = Obj({"role": leaf(string), "content": CONTENT, "id": IGNORED})
    ITEM = Variant("type", {"message": MESSAGE}, default="message")
    items = ListOf(ITEM, "items", maximum=100).read(body["input"], Path(("input",)), Scope(context, unknown))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.path import Path
from handler.protocols.kernel.readers import only, show, unread
from handler.protocols.kernel.schema import TEXT, Shape, accepts, listing, nullable, record, schema_of_reader


class Scope(NamedTuple):
    """What a declaration needs besides the value.

    Attributes:
        unknown: receives the paths of names that have no effect.
    """

    context: ServerContext
    unknown: dict[str, None]


class Declaration(Protocol):
    """A declared value."""

    @property
    def shape(self) -> Shape:
        """The JSON schema of the value."""

    def read(self, value: Any, at: Path, scope: Scope) -> Any:
        """Return what the value means. A missing value is None.

        Raises:
            InvalidField: the value is refused.
        """


class Leaf(NamedTuple):
    """A value without declared members. Its reader raises ValueError with the reason."""

    reader: Callable[[Any], Any]
    shape: Shape

    def read(self, value: Any, at: Path, scope: Scope) -> Any:
        try:
            return self.reader(value)
        except ValueError as error:
            raise at.refused(str(error)) from None


def leaf(reader: Callable[[Any], Any], **shape: Any) -> Leaf:
    """Return the declaration of a reader. Its schema is that of `accepts`, with the keywords in `shape`."""
    return Leaf(reader, {**schema_of_reader(reader), **shape})


class Placed(NamedTuple):
    """A value whose reader needs its path and the scope."""

    read: Callable[[Any, Path, Scope], Any]
    shape: Shape


class Optional(NamedTuple):
    """A value that may be missing or null."""

    value: Declaration

    @property
    def shape(self) -> Shape:
        return nullable(self.value.shape)

    def read(self, value: Any, at: Path, scope: Scope) -> Any:
        return None if value is None else self.value.read(value, at, scope)


class Only(NamedTuple):
    """A field of the API that must be missing or null.

    Attributes:
        reason: why other values are refused.
    """

    reason: str

    @property
    def shape(self) -> Shape:
        return {"enum": [None]}

    def read(self, value: Any, at: Path, scope: Scope) -> None:
        if value is not None:
            raise at.refused(self.reason)


IGNORED = Leaf(lambda value: None, {})
"""A known field that has no effect and is not reported, because clients copy it from responses."""


def among(*values: Any) -> Leaf:
    """Return the declaration of a value that is one of several."""
    *first, last = [value for value in values if value is not None]
    reason = f"must be {', '.join(map(str, first))} or {last}" if first else f"must be {last}"

    def read(value: Any) -> Any:
        if not any(value is known or (value == known and type(value) is type(known)) for known in values):
            raise ValueError(reason)
        return value

    return Leaf(read, {"enum": [*values]})


def members(must: str, **fields: Leaf) -> Callable[[Any], dict[str, Any]]:
    """Return the reader of a parameter that is an object. Its errors name the member, but not the parameter.

    Args:
        must: what is said of another value. Other names are refused, too, unless their value is null.
    """

    @accepts(type="object", properties={name: field.shape for name, field in fields.items()})
    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(must)
        only(value, *fields)
        values = {}
        for name, field in fields.items():
            try:
                values[name] = field.reader(value.get(name))
            except ValueError as error:
                raise ValueError(f"{name!r} {error}") from None
        return values

    return read


class ListOf(NamedTuple):
    """A list.

    Attributes:
        noun: the plural of what the list has.
    """

    item: Declaration
    noun: str
    maximum: int
    minimum: int = 0

    @property
    def shape(self) -> Shape:
        return listing(self.item.shape, maxItems=self.maximum, minItems=self.minimum)

    @property
    def _form(self) -> str:
        if self.minimum > 1:
            return f"a list of {self.minimum} to {self.maximum} {self.noun}"
        return f"a {'non-empty ' if self.minimum else ''}list of {self.noun}"

    def read(self, value: Any, at: Path, scope: Scope) -> list[Any]:
        if not isinstance(value, list) or (self.minimum == 1 and not value):
            raise at.refused(f"must be {self._form}")
        if self.minimum > 1 and not self.minimum <= len(value) <= self.maximum:
            raise at.refused(f"has {len(value)} {self.noun}; must be {self._form}")
        if len(value) > self.maximum:
            raise at.refused(f"has {len(value)} {self.noun}; the maximum is {self.maximum}")
        return [self.item.read(item, at.at(index), scope) for index, item in enumerate(value)]


class MapOf(NamedTuple):
    """An object whose names are the client's.

    Attributes:
        noun: the plural of what the object has.
        must: what is said of another value.
        name: reader of the names, which raises ValueError with the reason.
        empty: what is said of an empty object, or "" if it is the same.
    """

    item: Declaration
    noun: str
    maximum: int
    must: str
    name: Callable[[str], Any]
    empty: str = ""

    @property
    def shape(self) -> Shape:
        return {
            "type": "object",
            "minProperties": 1,
            "maxProperties": self.maximum,
            "additionalProperties": self.item.shape,
        }

    def read(self, value: Any, at: Path, scope: Scope) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise at.refused(self.must)
        if not value:
            raise at.refused(self.empty or self.must)
        if len(value) > self.maximum:
            raise at.refused(f"has {len(value)} {self.noun}; the maximum is {self.maximum}")
        for name in value:
            Leaf(self.name, {}).read(name, at.at(name), scope)
        return {name: self.item.read(item, at.at(name), scope) for name, item in value.items()}


class TextOr(NamedTuple):
    """A string, or a list."""

    other: ListOf

    @property
    def shape(self) -> Shape:
        return {"anyOf": [TEXT, self.other.shape]}

    def read(self, value: Any, at: Path, scope: Scope) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise at.refused(f"must be a string or a list of {self.other.noun}")
        return self.other.read(value, at, scope)


class Obj(NamedTuple):
    """An object.

    Attributes:
        fields: the fields by name. They are read in this order.
        must: what is said of another value.
        extra: why other names are refused, or "" if they are only reported.
    """

    fields: Mapping[str, Declaration]
    must: str = "must be an object"
    extra: str = ""

    @property
    def shape(self) -> Shape:
        shapes: dict[bool, dict[str, Shape]] = {True: {}, False: {}}
        for name, field in self.fields.items():
            shapes[_allows_null(field.shape)][name] = field.shape
        more = {"additionalProperties": False} if self.extra else {}
        return record(shapes[False], shapes[True], **more)

    def with_field(self, name: str, field: Declaration) -> Obj:
        return self._replace(fields={name: field, **self.fields})

    def read(self, value: Any, at: Path, scope: Scope) -> dict[str, Any]:
        """Return the values of the fields by name, without those that have no effect."""
        if not isinstance(value, dict):
            raise at.refused(self.must)
        if self.extra:
            at.only(value, self.fields, self.extra)
        elif not value.keys() <= self.fields.keys():
            scope.unknown.update(unread(value, at.general, self.fields))
        values = {}
        for name, field in self.fields.items():
            if not isinstance(field, Leaf):
                values[name] = field.read(value.get(name), at.at(name), scope)
            elif field is not IGNORED:  # most fields, whose path is needed only for an error
                try:
                    values[name] = field.reader(value.get(name))
                except ValueError as error:
                    raise at.at(name).refused(str(error)) from None
        return values


def _allows_null(shape: Shape) -> bool:
    """Return whether a schema allows null, which counts as missing."""
    if "anyOf" in shape:
        return any(map(_allows_null, shape["anyOf"]))
    kind = shape.get("type", () if {"enum", "const"} & shape.keys() else "null")
    return "null" in ([kind] if isinstance(kind, str) else kind) or None in shape.get("enum", ())


class Variant:
    """An object whose fields depend on the value of one of them.

    Args:
        tag: the name of this field.
        kinds: the objects by its value.
        must: what is said of a value that is no object.
        default: the value if the field is missing or null, or "" if it is required.
        refused: why other values of the API are refused.
    """

    def __init__(
        self,
        tag: str,
        kinds: Mapping[str, Obj | Variant],
        must: str = "must be an object",
        *,
        default: str = "",
        refused: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._tag = tag
        self._must = must
        self._default = default
        self._refused = refused
        self._kinds = {kind: known.with_field(tag, self._tag_of(kind)) for kind, known in kinds.items()}

    def _tag_of(self, kind: str) -> Declaration:
        tag = Leaf(lambda value: kind, {"const": kind})
        return tag._replace(shape={"enum": [kind, None]}) if kind == self._default else tag

    @property
    def shape(self) -> Shape:
        return {"anyOf": [known.shape for known in self._kinds.values()]}

    def with_field(self, name: str, field: Declaration) -> Variant:
        kinds = {kind: known.with_field(name, field) for kind, known in self._kinds.items()}
        return Variant(self._tag, kinds, self._must, default=self._default, refused=self._refused)

    def read(self, value: Any, at: Path, scope: Scope) -> dict[str, Any]:
        """Return the values of the fields by name, that of the tag among them."""
        if not isinstance(value, dict):
            raise at.refused(self._must)
        kind, expected = value.get(self._tag), f"must be {' or '.join(self._kinds)}"
        if kind is None and (self._default or self._tag not in value):
            if not self._default:
                raise at.at(self._tag).missing(f"it {expected}")
            kind = self._default
        if not isinstance(kind, str) or kind not in self._kinds:
            reason = self._refused.get(kind, expected) if isinstance(kind, str) else expected
            raise at.at(self._tag).refused(f"{show(kind)} is not supported: {reason}")
        return self._kinds[kind].read(value, at, scope)
