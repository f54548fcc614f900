"""Values of request bodies, each declared once.

A declaration says what is read (`read`), which names an object has, and what the API document shows (`shape`).
The leaves are the readers of `readers.py`, which raise ValueError with the reason. An error is a path and a reason.

    MESSAGE = Obj({"role": leaf(string), "content": CONTENT, "id": IGNORED})
    ITEM = Variant("type", {"message": MESSAGE}, default="message")
    items = ListOf(ITEM, "items", maximum=100).read(body["input"], Path(("input",)), Scope(context, unknown))
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.path import InvalidField, Path, in_quotes
from handler.protocols.kernel.readers import only, show, unread
from handler.protocols.kernel.schema import NULL, TEXT, Shape, accepts, listing, nullable, record, schema_of_reader


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
    """A value that may be missing or null.

    Attributes:
        default: the result in this case.
    """

    value: Declaration
    default: Any = None

    @property
    def shape(self) -> Shape:
        return nullable(self.value.shape)

    def read(self, value: Any, at: Path, scope: Scope) -> Any:
        return self.default if value is None else self.value.read(value, at, scope)


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


AS_IS = Leaf(lambda value: value, {})
"""A value that is read as it is."""

IGNORED = Leaf(lambda value: None, {})
"""A known field that has no effect and is not reported, because clients copy it from responses."""


def either(words: Sequence[str]) -> str:
    """Return words as a choice, such as "a, b or c"."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def among(*values: Any, must: str = "") -> Leaf:
    """Return the declaration of a value that is one of several.

    Args:
        must: what is said of another value, or "" for a list of the values.
    """
    reason = must or f"must be {either([str(value) for value in values if value is not None])}"

    def read(value: Any) -> Any:
        for known in values:
            if value is known or (value == known and type(value) is type(known)):
                return value
        raise ValueError(reason)

    return Leaf(read, {"enum": [*values]})


class ListOf(NamedTuple):
    """A list.

    Attributes:
        noun: the plural of what the list has.
    """

    item: Declaration
    noun: str
    maximum: int = sys.maxsize
    minimum: int = 0

    @property
    def shape(self) -> Shape:
        limits = {} if self.maximum == sys.maxsize else {"maxItems": self.maximum, "minItems": self.minimum}
        return listing(self.item.shape, **limits)

    @property
    def _form(self) -> str:
        if self.minimum > 1:
            return f"a list of {self.minimum} to {self.maximum} {self.noun}"
        return f"a {'non-empty ' if self.minimum else ''}list of {self.noun}"

    def read(self, value: Any, at: Path, scope: Scope) -> list[Any]:
        item, noun, maximum, minimum = self
        if isinstance(value, list) and minimum <= len(value) <= maximum:
            return list(map(item.read, value, map(at.at, range(len(value))), itertools.repeat(scope)))
        if not isinstance(value, list) or (minimum == 1 and not value):
            raise at.refused(f"must be {self._form}")
        rule = f"must be {self._form}" if minimum > 1 else f"the maximum is {maximum}"
        raise at.refused(f"has {len(value)} {noun}; {rule}")


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


_READ: Any = object()
"""The default of a member that is read even if it is missing."""


def _is_ignored(declared: Declaration) -> bool:
    return isinstance(declared, Leaf) and declared.reader is IGNORED.reader


def _step(declared: Declaration) -> tuple[Any, Callable[[Any], Any] | None, Callable[[Any, Path, Scope], Any] | None]:
    """Return a member's value if it is missing, and its reader, without and with a path."""
    value, default = declared if isinstance(declared, Optional) else (declared, _READ)
    if not isinstance(value, Leaf):
        return default, None, value.read
    if value.reader is AS_IS.reader:
        return None if default is _READ else default, None, None
    return default, value.reader, None


class Obj:
    """An object.

    Attributes:
        fields: the fields by name. They are read in this order.

    Args:
        must: what is said of another value.
        extra: why other names are refused, or "" if they are only reported.
    """

    def __init__(self, fields: Mapping[str, Declaration], must: str = "must be an object", extra: str = "") -> None:
        self.fields = fields
        self._must = must
        self._extra = extra
        self._names = frozenset(fields)
        self._steps = [(name, *_step(declared)) for name, declared in fields.items() if not _is_ignored(declared)]

    @property
    def shape(self) -> Shape:
        shapes: dict[bool, dict[str, Shape]] = {True: {}, False: {}}
        for name, field in self.fields.items():
            shapes[_allows_null(field.shape)][name] = field.shape
        more = {"additionalProperties": False} if self._extra else {}
        return record(shapes[False], shapes[True], **more)

    def with_field(self, name: str, field: Declaration) -> Obj:
        return Obj({name: field, **self.fields}, self._must, self._extra)

    def read(self, value: Any, at: Path, scope: Scope) -> dict[str, Any]:
        """Return the values of the fields by name, without those that have no effect.

        What depends only on the declarations is found before. A path is made only for a field that needs it.
        """
        if not isinstance(value, dict):
            raise at.refused(self._must)
        if self._extra:
            at.only(value, self.fields, self._extra)
        elif not self._names.issuperset(value):
            scope.unknown.update(unread(value, at.general, self.fields))
        values: dict[str, Any] = {}
        for name, default, reader, read in self._steps:
            item = value.get(name)
            if item is None and default is not _READ:
                values[name] = default
            elif reader is not None:
                try:
                    values[name] = reader(item)
                except ValueError as error:
                    raise at.at(name).refused(str(error)) from None
            else:
                values[name] = item if read is None else read(item, at.at(name), scope)
        return values


class Closed:
    """An object whose other names must be null.

    Args:
        must: what is said of another value, or of another type.
        types: the values of its field `type`, which is required, or none if it has no such field.
    """

    def __init__(self, must: str, fields: Mapping[str, Declaration], types: tuple[str, ...] = ()) -> None:
        self._must = must
        self._types = types
        self._fields = fields
        self._members = Obj({"type": IGNORED, **fields} if types else fields)

    @property
    def shape(self) -> Shape:
        fields = {name: field.shape for name, field in self._fields.items()}
        kind = {"type": {"enum": [*self._types]}} if self._types else {}
        return {**record(kind, fields), "additionalProperties": NULL}

    def read(self, value: Any, at: Path, scope: Scope) -> dict[str, Any]:
        """Return the values of the fields by name, and the type."""
        if not isinstance(value, dict) or (self._types and value.get("type") not in self._types):
            raise at.refused(self._must)
        try:
            only(value, *self._members.fields)
        except ValueError as error:
            raise at.refused(str(error)) from None
        kind = {"type": value["type"]} if self._types else {}
        return {**kind, **self._members.read(value, at, scope)}


class WithValue(NamedTuple):
    """A value that errors show after its path, as they show a parameter."""

    value: Declaration

    @property
    def shape(self) -> Shape:
        return self.value.shape

    def read(self, value: Any, at: Path, scope: Scope) -> Any:
        try:
            return self.value.read(value, _MEMBER, scope)
        except InvalidField as error:
            with_value = at._replace(words=lambda path, reason: f"{path}={show(value)}: {reason}")
            raise with_value.refused(error.message) from None


def reader_of(declared: Declaration) -> Callable[[Any], Any]:
    """Return a declaration as the reader of a parameter."""

    @accepts(**declared.shape)
    def read(value: Any) -> Any:
        try:
            return declared.read(value, _MEMBER, Scope(_NO_SERVER, {}))
        except InvalidField as error:
            raise ValueError(error.message) from None

    return read


_MEMBER = Path((), in_quotes)
_NO_SERVER = ServerContext("")


def members(must: str, **fields: Declaration) -> Callable[[Any], dict[str, Any]]:
    """Return the reader of a parameter that is an object. Its errors name the member, but not the parameter.

    Args:
        must: what is said of another value. Other names are refused, too, unless their value is null.
    """
    declared = Closed(must, fields)
    return reader_of(Placed(declared.read, {"type": "object", "properties": declared.shape["properties"]}))


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
        """Return the declaration of the tag, which `read` itself reads."""
        return IGNORED._replace(shape={"enum": [kind, None]} if kind == self._default else {"const": kind})

    @property
    def shape(self) -> Shape:
        return {"anyOf": [known.shape for known in self._kinds.values()]}

    @property
    def _expected(self) -> str:
        return f"must be {' or '.join(self._kinds)}"

    def with_field(self, name: str, field: Declaration) -> Variant:
        kinds = {kind: known.with_field(name, field) for kind, known in self._kinds.items()}
        return Variant(self._tag, kinds, self._must, default=self._default, refused=self._refused)

    def read(self, value: Any, at: Path, scope: Scope) -> dict[str, Any]:
        """Return the values of the fields by name, that of the tag among them."""
        if not isinstance(value, dict):
            raise at.refused(self._must)
        kind = value.get(self._tag)
        if kind is None and (self._default or self._tag not in value):
            if not self._default:
                raise at.at(self._tag).missing(f"it {self._expected}")
            kind = self._default
        known = self._kinds.get(kind) if isinstance(kind, str) else None
        if known is None:
            reason = self._refused.get(kind, self._expected) if isinstance(kind, str) else self._expected
            raise at.at(self._tag).refused(f"{show(kind)} is not supported: {reason}")
        values = known.read(value, at, scope)
        values[self._tag] = kind
        return values
