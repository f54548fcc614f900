"""Read a specification from a file and the command line, and format messages about its errors."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from deploy.errors import SpecError
from deploy.spec import Spec
from deploy.spec.options import is_aws_image, misplaced, settings_of, wrong_options
from deploy.spec.values import EXAMPLES, Section
from handler.core.text_files import read_text

_TAGS = ("prefix_aware", "strategy")
"""Names of union branches in the locations of pydantic's errors. Messages omit them."""

_SECRET = ("token", "secret", "key", "password")


def messages(error: ValidationError) -> list[str]:
    """Return a line for each error, e.g. `instance.count: must be at least 1 (given: 0)`."""
    return [
        _placed(_location(item["loc"]), line)
        for item in error.errors(include_url=False)
        for line in _describe(item).splitlines()
    ]


def _placed(path: str, line: str) -> str:
    """Return a line prefixed with the error location. A line that starts with a dot continues the location."""
    return f"{path}{line}" if line.startswith(".") or not path else f"{path}: {line}"


def _location(loc: Sequence[int | str]) -> str:
    """Return an error's location as a dotted name such as `components.0.name`, or "" for the whole specification."""
    return ".".join(str(part) for part in loc if part not in (*_TAGS, "[key]"))


def _describe(error: Mapping[str, Any]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"there is no such setting{_suggestion(error['loc'])}"
    if kind in ("missing", "too_long"):
        return _MESSAGES[kind].format_map(context)
    if kind == "literal_error":
        text = f"must be {context['expected']}".replace("'", "")
    elif kind == "string_pattern_mismatch" and (example := EXAMPLES.get(context["pattern"])) is not None:
        text = f"must be {'written ' * example.startswith('as ')}{example}"
    elif kind in _MESSAGES:
        text = _MESSAGES[kind].format_map(context)
    else:
        text = str(error["msg"]).removeprefix("Value error, ")
    return text + _actual(error)


_MESSAGES = {
    "missing": "is required",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "greater_than": "must be greater than {gt:g}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "model_type": "must be a mapping of names to values",
    "dict_type": "must be a mapping of names to values",
    "string_type": "must be a string (put it in quotes)",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "tuple_type": "must be a list",
}
"""Maps the types of pydantic's errors to messages, in which names stand for values of the error's context."""


def _actual(error: Mapping[str, Any]) -> str:
    value = error.get("input")
    if not isinstance(value, str | int | float) or any(word in _location(error["loc"]).lower() for word in _SECRET):
        return ""
    return f" (given: {json.dumps(value, ensure_ascii=False)})"


def _suggestion(loc: Sequence[int | str]) -> str:
    """Return text such as `; did you mean instance.type?`, or an empty string if there is no similar name.

    The same name in another section has priority over a similar name in the same section.
    """
    parents = [str(part) for part in loc[:-1] if not isinstance(part, int) and part not in _TAGS]
    here, wrong = _siblings(parents), str(loc[-1])
    everywhere = {**_everywhere(Spec), **here}
    if wrong in everywhere:
        return f"; did you mean {everywhere[wrong]}?"
    for candidates in (here, everywhere):
        if close := difflib.get_close_matches(wrong, candidates, n=1, cutoff=0.6):
            return f"; did you mean {candidates[close[0]]}?"
    return ""


def _siblings(parents: Sequence[str]) -> dict[str, str]:
    """Return the dotted names of a section's settings by name, or an empty dict if there is no such section."""
    section: type[Section] | None = Spec
    for part in parents:
        section = _sections(section).get(part) if section else None
    return {name: ".".join([*parents, name]) for name in _names(section)} if section else {}


def _everywhere(section: type[Section], prefix: str = "") -> dict[str, str]:
    """Map names that users may write (`type`, `instance_type`) to the dotted names of settings (`instance.type`)."""
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
    """Return the subsections of a section, by name."""
    return {
        field.alias or name: below
        for name, field in section.model_fields.items()
        if (below := _section_in(field.annotation)) is not None
    }


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the section class that a type annotation contains, even in a union or tuple, or None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((below for item in get_args(annotation) if (below := _section_in(item)) is not None), None)


def read_spec(path: Path | None, settings: Sequence[str] = ()) -> Spec:
    """Read a specification from a file, and apply settings from the command line to it.

    Args:
        path: a YAML or JSON file, or None to use only `settings`.
        settings: settings as NAME=VALUE, e.g. `instance.type=ml.g5.xlarge`. The value is YAML, so `3` is a number, and
            `[a, b]` is a list.

    Raises:
        SpecError: the file cannot be read, or the specification is invalid. The message lists all errors.
    """
    if path is None and not settings:
        raise SpecError("there is no specification", "Pass its FILE, or its settings with --set KEY=VALUE.")
    content = _content(path) if path is not None else {}
    for setting in settings:
        _set(content, setting)
    try:
        return Spec.model_validate(content)
    except ValidationError as error:
        where = str(path) if path is not None else "the command line"
        lines = [*messages(error), *_disagreements(content, error), *_options_problems(content)]
        raise SpecError(f"{where}: {lines[0]}" if len(lines) == 1 else f"{where}:\n  " + "\n  ".join(lines)) from None


def content_problems(content: Mapping[str, Any]) -> list[str]:
    """Return a line for each error in the content of a specification. Each line starts with the error location."""
    try:
        Spec.model_validate(content)
    except ValidationError as error:
        return messages(error)
    return []


FILLERS: Mapping[str, Any] = {
    "name": "x",
    "role": "arn:aws:iam::111122223333:role/x",
    "image": {"repository": "x"},
    "model": {"id": "x"},
}
"""Valid values for the required fields. They allow the other fields to be checked if required fields are missing."""


def _disagreements(content: Mapping[str, Any], error: ValidationError) -> list[str]:
    """Return the contradictions between valid sections, which pydantic does not check if another section is invalid."""
    wrong = {str(item["loc"][0]) for item in error.errors() if item["loc"]}
    if not wrong:
        return []
    right = {name: value for name, value in content.items() if name not in wrong}
    try:
        Spec.model_validate({**FILLERS, **right})
    except ValidationError as left:
        filled = {*wrong, *(FILLERS.keys() - content.keys())}
        return [line for line in messages(left) if filled.isdisjoint(re.findall(r"\w+", line))]
    return []


def _options_problems(content: Mapping[str, Any]) -> list[str]:
    """Return the problems for which the container would reject the options, except for options with a wrong type."""
    image, model = content.get("image"), content.get("model")
    if isinstance(image, dict) and ("aws" in image or is_aws_image(str(image.get("uri")))):
        return []
    path = model.get("path") if isinstance(model, dict) else None
    options = {name: value for name, value in _entries(content, "options") if isinstance(value, str | int | float)}
    environment = {name: value for name, value in _entries(content, "environment") if isinstance(value, str)}
    directory = Path(path).expanduser() if isinstance(path, str) else None
    return [*misplaced(options), *wrong_options(settings_of(options, environment), directory)]


def _entries(content: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    entries = content.get(section)
    return (
        (name, value) for name, value in (entries.items() if isinstance(entries, dict) else ()) if isinstance(name, str)
    )


def schema() -> dict[str, Any]:
    """Return the JSON schema of specifications. A copy for editors is in `deploy/data/spec.schema.json`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}


_NOT_YAML = (yaml.YAMLError, ValueError, TypeError, RecursionError)
"""Errors that PyYAML raises for invalid YAML. Some are Python's own, e.g. for lists as keys or for deep nesting."""


_HALF = re.compile("[\ud800-\udfff]")
_SURROGATE = "a lone surrogate (half of a character)"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """A YAML loader that rejects lone surrogates and duplicate keys. PyYAML would silently use the last duplicate."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        if _HALF.search(str(node.value)):
            raise SpecError(f"line {node.start_mark.line + 1}: {ascii(node.value)[1:-1]} contains {_SURROGATE}")
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in names and key.tag != "tag:yaml.org,2002:merge":
                lines = f"lines {names[key.value]} and {line}" if line != names[key.value] else f"line {line}"
                raise SpecError(f"{key.value} occurs twice, in {lines}")
            names[key.value] = line
        return dict(super().construct_mapping(node, deep))


def _content(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(read_text(path), _Loader)  # JSON is YAML too
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    except _NOT_YAML as error:
        raise SpecError(f"{path}: is not valid YAML: {_where(error)}") from None
    if content is None:
        raise SpecError(f"{path}: is empty", "It needs at least name, role, image and model.")
    if not isinstance(content, dict):
        raise SpecError(f"{path}: must be a mapping of names to values")
    return content


def _set(content: dict[str, Any], setting: str) -> None:
    """Set one value in the content of a specification.

    Args:
        setting: pair NAME=VALUE. A dot in a part of the name is written as `\\.`, as in `tags.example\\.com/team=a`.
    """
    key, separator, text = setting.partition("=")
    names = [part.replace("\0", ".") for part in key.replace("\\.", "\0").split(".")]
    if _HALF.search(key):
        raise SpecError(f"--set {ascii(setting)[1:-1]}: the name contains {_SURROGATE}")
    if not separator or not all(names):
        raise SpecError(f"--set {setting}: must be KEY=VALUE, such as instance.type=ml.g5.xlarge")
    for parent in names[:-1]:
        if content.get(parent) is None:
            content[parent] = {}
        content = content[parent]
        if not isinstance(content, dict):
            raise SpecError(f"--set {setting}: {parent} is not a mapping, so it has no fields")
    try:
        value = yaml.load(text, _Loader)
    except _NOT_YAML as error:
        raise SpecError(f"--set {setting}: the value is not valid YAML: {_where(error)}") from None
    except SpecError as error:
        raise SpecError(f"--set {setting}: {error}") from None
    # The value of a variable is not converted: `environment.MODE=0777` is the text 0777.
    verbatim = names[0] == "environment" and not isinstance(value, str | dict | list | None)
    content[names[-1]] = text if verbatim else value


def _where(error: Exception) -> str:
    """Return the PyYAML message on one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark and problem else str(error)
