"""Prints the request types of anthropic, Anthropic's own client, as JSON: TypedDicts by name, and those of each call.

A type is {"fields": {name: form}, "required": [names]}. A form is {"values": [...]} for literals, {"plain": name},
{"list": form}, {"type": name} or {"any": [forms]}.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from typing import Any

import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params, model_list_params
from anthropic.types.beta import message_count_tokens_params as beta_count
from anthropic.types.beta import message_create_params as beta_create
from anthropic.types.beta import model_list_params as beta_models

CALLS: dict[str, Any] = {
    "messages": message_create_params.MessageCreateParamsNonStreaming,
    "count": message_count_tokens_params.MessageCountTokensParams,
    "beta messages": beta_create.MessageCreateParamsNonStreaming,
    "beta count": beta_count.MessageCountTokensParams,
    "models": model_list_params.ModelListParams,
    "beta models": beta_models.ModelListParams,
}
_WRAPPERS = (typing_extensions.Required, typing_extensions.NotRequired, typing_extensions.Annotated)
_UNIONS = (typing.Union, types.UnionType)


class Catalogue:
    def __init__(self) -> None:
        self.types: dict[str, Any] = {}

    def form(self, declared: Any) -> Any:
        origin, arguments = typing.get_origin(declared), typing.get_args(declared)
        if origin in _WRAPPERS:
            return self.form(arguments[0])
        if isinstance(declared, typing_extensions.TypeAliasType):
            return self.form(declared.__value__)
        if typing_extensions.is_typeddict(declared):
            return {"type": self._declare(declared)}
        if origin in _UNIONS:
            return {"any": [self.form(argument) for argument in arguments]}
        if origin in (typing.Literal, typing_extensions.Literal):
            return {"values": [*arguments]}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"plain": "object"}
        if arguments:
            return {"list": self.form(arguments[0])}
        return {"plain": getattr(declared, "__name__", "object")}

    def _declare(self, declared: Any) -> str:
        name = f"{declared.__module__.partition('.types.')[2]}.{declared.__name__}"
        if name not in self.types:
            self.types[name] = {}
            hints = typing_extensions.get_type_hints(declared, include_extras=True)
            self.types[name]["fields"] = {field: self.form(hint) for field, hint in hints.items()}
            origins: dict[str, Any] = {field: typing.get_origin(hint) for field, hint in hints.items()}
            self.types[name]["required"] = [
                field for field, origin in origins.items() if origin is typing_extensions.Required
            ]
        return name


if __name__ == "__main__":
    catalogue = Catalogue()
    calls = {name: catalogue.form(declared)["type"] for name, declared in CALLS.items()}
    print(json.dumps({"calls": calls, "types": catalogue.types}))
