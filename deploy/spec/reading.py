"""A specification out of a file and what the command line adds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deploy.errors import SpecError
from deploy.spec import Spec


def read_spec(path: Path | None, settings: Sequence[str] = ()) -> Spec:
    """The specification in `path`, with `settings` (`instance.type=ml.g5.xlarge`) laid over it.

    Args:
        path: YAML or JSON; None: all is in `settings`.
        settings: dotted names and values; a value is read as YAML, so `3` is a number and `[a, b]` a list.

    Raises:
        SpecError: it cannot be read, or something in it is wrong: every error, with its place.
    """
    content = _content(path) if path is not None else {}
    for setting in settings:
        _set(content, setting)
    try:
        return Spec.model_validate(content)
    except ValidationError as error:
        where = str(path) if path is not None else "the command line"
        lines = [f"{'.'.join(str(part) for part in one['loc']) or 'it'}: {_said(one)}" for one in error.errors()]
        raise SpecError(f"{where}: {lines[0]}" if len(lines) == 1 else f"{where}:\n  " + "\n  ".join(lines)) from None


def schema() -> dict[str, Any]:
    """The specification's JSON schema."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}


def _content(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())  # JSON is YAML
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not YAML: {error}") from None
    if not isinstance(content, dict):
        raise SpecError(f"{path}: must be a mapping of names to values")
    return content


def _set(content: dict[str, Any], setting: str) -> None:
    key, separator, text = setting.partition("=")
    if not separator or not key:
        raise SpecError(f"--set {setting}: must be NAME=VALUE, as instance.type=ml.g5.xlarge")
    *parents, last = key.split(".")
    for parent in parents:
        below = content.setdefault(parent, {})
        if not isinstance(below, dict):
            raise SpecError(f"--set {setting}: {parent} has no names below it")
        content = below
    try:
        content[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"--set {setting}: the value is not YAML: {error}") from None


def _said(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "there is no such setting"
    said = str(error["msg"]).removeprefix("Value error, ")
    given = error.get("input")
    return f"{said} (given: {json.dumps(given)})" if isinstance(given, str | int | float | bool) else said
