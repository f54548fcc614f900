"""Replace moto's operations with the emulator's while the emulator runs."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from moto.core.responses import ActionResult, BaseResponse, EmptyResult

Replacements = Sequence[tuple[Any, Mapping[str, Any]]]
"""Replacements for attributes of moto's classes and modules, by attribute name."""
Operation = Callable[[dict[str, Any], str], Any]
"""An API operation. It accepts the parameters, which it may modify, and the region."""


@contextlib.contextmanager
def patched(replacements: Replacements) -> Iterator[None]:
    """Replace attributes of moto, and restore them on exit."""
    with contextlib.ExitStack() as stack:
        for target, attributes in replacements:
            stack.enter_context(mock.patch.multiple(target, create=True, **attributes))
        yield


def result(operation: Operation) -> Any:
    """Return a method for moto's response classes that responds with the result of an operation, which may be None.
    The method is for services whose responses moto encodes according to botocore's API model.
    """

    def respond(self: BaseResponse) -> Any:
        response = operation(copy.deepcopy(self.params), self.region)
        return EmptyResult() if response is None else ActionResult(response)

    return respond


def json_result(operation: Operation) -> Any:
    """Return a method for moto's response classes that decodes the request's JSON and encodes the result as JSON."""

    def respond(self: BaseResponse) -> str:
        return json.dumps(operation(json.loads(self.body), self.region))

    return respond


def methods(operations: object, method: Callable[[Operation], Any], *excluded: str) -> dict[str, Any]:
    """Return methods for a response class of moto, one for each public method of `operations`.

    Args:
        method: `result` or `json_result`.
        excluded: names of public methods that are not operations.
    """
    names = [name for name in vars(type(operations)) if not name.startswith("_") and name not in excluded]
    return {name: method(getattr(operations, name)) for name in names}
