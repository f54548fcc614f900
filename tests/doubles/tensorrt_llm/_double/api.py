"""The names, types and defaults of the version that is played, from trtllm_api.json: the classes are made of it.

The file has those of 1.2, and under "releases" what others lack or add.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pydantic
from tensorrt_llm._double.manners import MANNERS


def _played() -> dict[str, dict[str, list[dict[str, Any]]]]:
    api = json.loads((Path(__file__).parents[2] / "trtllm_api.json").read_text())
    for name, releases in api["releases"].items():
        change = releases.get("{}.{}".format(*MANNERS.release), {})
        for part, parameters in api[name].items():
            if part != "trt":
                api[name][part] = [one for one in parameters if one["name"] not in change.get("without", ())]
        last = "torch" if name == "LLM" else "params"
        api[name][last] += change.get("with", ())
    return api  # type: ignore[no-any-return]


API = _played()
_TYPES = {name: getattr(typing, name) for name in ("Any", "Dict", "List", "Literal", "Optional", "Sequence", "Union")}
_ENUMS = {
    "CapacitySchedulerPolicy": typing.Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"],
    "ContextChunkingPolicy": typing.Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"],
    "SamplerType": typing.Literal["TRTLLMSampler", "TorchSampler", "auto"],
}


class _Namespace(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return Any


def kind(text: str, known: dict[str, Any]) -> Any:
    """The type that a text of the file means; what is not among `known` may be anything."""
    if "..." in text or "DecodingConfig" in text:
        return Any
    if text == "Union[str, SamplerType]":
        text = "SamplerType"
    simple = {"str": str, "int": int, "bool": bool, "float": float, "dict": dict, "object": Any, "None": None}
    return eval(text, {"__builtins__": {}}, _Namespace(_TYPES | _ENUMS | simple | known))


def default(parameter: dict[str, Any], known: dict[str, Any]) -> Any:
    """A value, or a function that makes one."""
    value = parameter.get("default")
    if isinstance(value, str) and value.startswith("<factory:"):
        return known.get(value.removeprefix("<factory:").removesuffix("()>"), lambda: None)
    if isinstance(value, list | dict):
        return type(value)
    return value


def model(name: str, parameters: list[dict[str, Any]], known: dict[str, Any]) -> type[pydantic.BaseModel]:
    """A pydantic model that refuses what it does not know."""
    found: dict[str, Any] = {}
    for parameter in parameters:
        first = default(parameter, known)
        how = pydantic.Field(default_factory=first) if callable(first) else first
        if parameter.get("default") == "<required>":
            how = ...
        found[parameter["name"].lstrip("_")] = (kind(parameter.get("type", "Any"), known), how)
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
    return pydantic.create_model(name, __config__=config, **found)


def record(name: str, bases: tuple[type, ...] = (), *, kw_only: bool = False, slots: bool = False, **more: Any) -> type:
    """A dataclass."""
    found: list[Any] = []
    for parameter in API[name]["params"]:
        first = default(parameter, {})
        if parameter.get("default") == "<required>":
            found.append((parameter["name"], Any))
        else:
            how = {"default_factory": first} if callable(first) else {"default": first}
            found.append((parameter["name"], Any, dataclasses.field(**how)))
    found += [(field, Any, dataclasses.field(default=first, init=False)) for field, first in more.items()]
    return dataclasses.make_dataclass(name, found, bases=bases, kw_only=kw_only, slots=slots)
