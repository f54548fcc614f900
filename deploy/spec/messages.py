"""Turn pydantic's errors into messages with the place and the valid values."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError

from deploy.spec import Spec
from deploy.spec.values import EXAMPLES, Section

_TAGS = ("prefix_aware", "strategy")
"""Names of union branches in pydantic's places, which are left out of messages."""

_SECRET = ("token", "secret", "key", "password")


def messages(error: ValidationError) -> list[str]:
    """Return one line for each error, e.g. `instance.count: must be at least 1 (given: 0)`."""
    return [
        _placed(_place(item["loc"]), line)
        for item in error.errors(include_url=False)
        for line in _describe(item).splitlines()
    ]


def _placed(place: str, line: str) -> str:
    """Put the place before a line; one that begins with a dot names what is below it."""
    return f"{place}{line}" if line.startswith(".") or not place else f"{place}: {line}"


def _place(loc: Sequence[int | str]) -> str:
    """Return the place with dots, "" for the whole; a list's items by number from 0, e.g. `components.0.name`."""
    return ".".join(str(part) for part in loc if part not in (*_TAGS, "[key]"))


def _describe(error: Mapping[str, Any]) -> str:
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return "there is no such setting" + _suggestion(error["loc"])
        case "missing":
            return "must be given"
        case "string_pattern_mismatch" if context["pattern"] in EXAMPLES:
            text = f"must be {_without_as(EXAMPLES[context['pattern']])}"
        case "greater_than_equal":
            text = f"must be at least {context['ge']:g}"
        case "less_than_equal":
            text = f"must be at most {context['le']:g}"
        case "greater_than":
            text = f"must be more than {context['gt']:g}"
        case "literal_error":
            text = f"must be {context['expected']}".replace("'", "")
        case "string_too_long":
            text = f"must have at most {context['max_length']} characters"
        case "string_too_short":
            text = "must not be empty"
        case "too_long":
            return f"must have at most {context['max_length']} entries"
        case "model_type" | "dict_type":
            text = "must be a mapping of names to values"
        case "string_type":
            text = "must be a text (put it in quotes)"
        case "int_type" | "int_parsing" | "int_from_float":
            text = "must be a whole number"
        case "float_type" | "float_parsing":
            text = "must be a number"
        case "bool_type" | "bool_parsing":
            text = "must be true or false"
        case "tuple_type":
            text = "must be a list"
        case _:
            text = str(error["msg"]).removeprefix("Value error, ")
    return text + _actual(error)


def _without_as(example: str) -> str:
    return f"written {example}" if example.startswith("as ") else example


def _actual(error: Mapping[str, Any]) -> str:
    given = error.get("input")
    if not isinstance(given, str | int | float) or any(word in _place(error["loc"]).lower() for word in _SECRET):
        return ""
    return f" (given: {json.dumps(given, ensure_ascii=False)})"


def _suggestion(loc: Sequence[int | str]) -> str:
    """Return e.g. `; did you mean instance.type?`: a similar name in the section, or the same name in another one."""
    *parents, wrong = loc
    section: type[Section] | None = Spec
    prefix = ""
    for part in parents:
        if isinstance(part, int) or part in _TAGS:
            continue
        section = _sections(section).get(str(part)) if section else None
        prefix += f"{part}."
    here = {name: f"{prefix}{name}" for name in _names(section)} if section else {}
    everywhere = {**_everywhere(Spec), **here}
    if str(wrong) in everywhere:
        return f"; did you mean {everywhere[str(wrong)]}?"
    for candidates in (here, everywhere):
        if close := difflib.get_close_matches(str(wrong), candidates, n=1, cutoff=0.6):
            return f"; did you mean {candidates[close[0]]}?"
    return ""


def _everywhere(section: type[Section], prefix: str = "") -> dict[str, str]:
    """Map what people write (`type`, `instance_type`) to the dotted name (`instance.type`)."""
    names: dict[str, str] = {}
    for name in _names(section):
        names.setdefault(f"{prefix}{name}".replace(".", "_"), f"{prefix}{name}")
        names.setdefault(name, f"{prefix}{name}")
        if (below := _sections(section).get(name)) is not None:
            names = {**_everywhere(below, f"{prefix}{name}."), **names}
    return names


def _names(section: type[Section]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _sections(section: type[Section]) -> dict[str, type[Section]]:
    """Return the sections below, by name."""
    return {
        field.alias or name: below
        for name, field in section.model_fields.items()
        if (below := _section_in(field.annotation)) is not None
    }


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the section in an annotation: itself, in a union, or in a tuple; None: there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((below for item in get_args(annotation) if (below := _section_in(item)) is not None), None)
