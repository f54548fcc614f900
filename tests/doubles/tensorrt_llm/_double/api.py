"""The names, types and defaults of the version that is played, from trtllm_api.json: the classes are made of it.

The file has those of 1.2, and under "releases" what others lack or add.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import typing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pydantic

# -- which version is played, and what goes wrong: `TLLM_DOUBLE=version=1.2.1;die_after=50;burst=3` --------------------


MISUSES: list[str] = []
"""What the adapter did that real versions punish with a hang, or with wrong answers."""


class Misuse(SystemExit):
    """Nothing catches it by accident: it ends the process, or the test."""


def misuse(what: str) -> Misuse:
    MISUSES.append(what)
    print(f"TensorRT-LLM's double: {what}", file=sys.stderr, flush=True)
    return Misuse(what)


@dataclass
class Manners:
    """Counts are tokens of all requests together.

    Attributes:
        die_after: then every pending result raises, and the LLM is shutting down.
        death: what they raise: runtime, cpp, or dead (since 1.3, by default there).
        stall_after: then nothing comes any more, without a word.
        stall_error: what a thread of the executor's has met then, and told nobody.
        exit_after: then the process is gone.
        init_fails: the LLM cannot be made.
        burst: tokens an item.
        late_abort: tokens that still come after an abort.
        assert_logprobs: the number of the item with which requests that want log-probabilities fail in reading.
        late_finish: the end comes as an item of its own, without tokens.
        cancel_all: requests end by themselves as cancelled, after as many tokens.
        gpus: how many there seem to be.
        pause: seconds between steps.
        worker: start a process, as MPI's workers are; it does nothing. Its death ends this process, as with Open MPI 5.
        silent_mpi: its death is told to nobody, as with Open MPI 4, and nothing comes any more.
        mpi: start a worker by MPI itself, which must be there.
        notices: what becomes of one to an event loop that does not run: caught by the proxy, or uncaught, which is the
            LLM's end. By default as the version does.
        fast: tokens cost nothing, and follow no model.
    """

    version: str = "1.2.1"
    die_after: int = 0
    death: str = ""
    stall_after: int = 0
    stall_error: str = ""
    exit_after: int = 0
    init_fails: bool = False
    burst: int = 1
    late_abort: int = 0
    assert_logprobs: int = 0
    late_finish: bool = False
    cancel_all: int = 0
    gpus: int = 1
    pause: float = 0.001
    worker: bool = False
    silent_mpi: bool = False
    mpi: bool = False
    notices: str = ""
    fast: bool = False

    @property
    def release(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def notices_are_caught(self) -> bool:
        """The proxy does since October 2025."""
        return self.notices == "caught" if self.notices else self.release >= (1, 2)


def read(text: str) -> Manners:
    found = Manners()
    kinds = {name: type(value) for name, value in asdict(found).items()}
    for part in filter(None, text.split(";")):
        name, _, value = part.partition("=")
        kind = kinds[name]
        setattr(found, name, True if kind is bool else kind(value))
    return found


MANNERS = read(os.environ.get("TLLM_DOUBLE", ""))
"""A test in the same process may change it before it makes an LLM."""


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


def kind(text: str, known: dict[str, Any]) -> Any:
    """The type that a text of the file means; what is not among `known` may be anything."""
    if "..." in text or "DecodingConfig" in text:
        return Any
    if text == "Union[str, SamplerType]":
        text = "SamplerType"
    simple = {"str": str, "int": int, "bool": bool, "float": float, "dict": dict, "object": Any, "None": None}
    unknown = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text), Any)
    return eval(text, {**unknown, **_TYPES, **_ENUMS, **simple, **known})


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


# -- what is raised ----------------------------------------------------------------------------------------------------


class RequestError(RuntimeError):
    """One request failed."""


class CppExecutorError(RuntimeError):
    """The executor's C++ thread failed."""

    def __init__(self, message: str | None = None) -> None:
        self.message, self.stack_trace = message, ""
        super().__init__(message)


class EngineDeadError(RuntimeError):
    """The engine is gone: pending requests raise it, and all later ones."""

    def __init__(self, root_cause: BaseException | None = None) -> None:
        self.root_cause = root_cause
        cause = f": {type(root_cause).__name__}: {root_cause}" if root_cause is not None else ""
        super().__init__(f"Engine has died{cause}")


# -- LoraConfig, whose module depends on the version -------------------------------------------------------------------


class _Checked:
    def __post_init__(self: Any) -> None:
        assert self.lora_ckpt_source in ("hf", "nemo"), f"Unsupported: {self.lora_ckpt_source}"


LoraConfig: Any = record("LoraConfig", (_Checked,))
