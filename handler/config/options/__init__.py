"""Table of all options, from one file a group: common, engines, OpenVINO, vLLM, TensorRT-LLM, OpenAI's API, foreign names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from handler.config.engines import LLM_ENGINES
from handler.config.options.option import OF_JAVA, Gone, Option, declared
from handler.config.options.tables import ECHO, GPU, GUIDED, MEDIA, OPENVINO, REMOTE, TRTLLM, VLLM, Options

# -- foreign names: foreign.json has a line a name, which says what becomes of it --------------------------------------


class Foreign(NamedTuple):
    """How a foreign name is treated.

    Attributes:
        refused: why it stops the start, and what to write instead; "" if it does not.
        unless: values that ask for nothing, and so are not refused.
        idle: why it has no effect; of a variable with `same`, for engines that do not have it.
        same: the handler's own variable for it, or such variables by engine; of LMI's variables the option.
        convert: how `names.py` makes the own value; "" leaves it as it is.
        unread: who reads the variable in our place, so that nothing is said of it.
        heeded: by whom and how, where a host reads the variable itself.
        instead: of an option that only DJL Serving's Java side reads, what to write without it.
        aliases: further names.
    """

    refused: str = ""
    unless: tuple[str, ...] = ()
    idle: str = ""
    same: str | Mapping[str, str] = ""
    convert: str = ""
    unread: str = ""
    heeded: str = ""
    instead: str = ""
    aliases: tuple[str, ...] = ()

    def own(self, engine: str) -> str:
        """Return the handler's own variable; "" if there is none with this engine."""
        return self.same if isinstance(self.same, str) else self.same.get(engine, "")

    @property
    def owns(self) -> Mapping[str, str]:
        """The handler's own variables by engine; by "" one for all."""
        return ({"": self.same} if self.same else {}) if isinstance(self.same, str) else self.same

    @property
    def answer(self) -> str:
        """Return the effect of the variable here, in words."""
        if self.unread:
            return f"left alone: {self.unread}"
        if self.heeded:
            return f"supported {self.heeded}"
        if self.refused:
            return Gone(self.refused, self.unless).answer
        names = [f"`{own}` ({engine})" if engine else f"`{own}`" for engine, own in sorted(self.owns.items())]
        return f"same: {', '.join(names)}" if names else f"no effect: {self.idle}"


_DATA = json.loads((files("handler.config.options") / "foreign.json").read_text(encoding="utf-8"))
_REASONS = _DATA["reasons"]


def _value(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("@"):
        return _REASONS[value[1:]]
    return tuple(value) if isinstance(value, list) else value


def _read(names: Mapping[str, Mapping[str, Any]]) -> dict[str, Foreign]:
    return {name: Foreign(**{key: _value(value) for key, value in line.items()}) for name, line in names.items()}


def _java(key: str, line: Foreign) -> Option:
    parse = Gone(line.refused, line.unless) if line.refused else str
    help = "; ".join(filter(None, (OF_JAVA, line.instead)))
    return Option(key, None, parse, None, help, line.aliases, of_java=True)


def _option(key: str, line: Foreign, group: str) -> Option:
    engines = LLM_ENGINES[1:] if group == "lmi" else (group,)
    if not line.refused:
        return Option(key, None, str, None, line.idle, engines=engines)
    parse = Gone(line.refused, line.unless, argument=group != "trtllm")  # whose releases may still have an argument
    return Option(key, key.removeprefix("option."), parse, None, f"refused: {line.refused}", engines=engines)


_OPTIONS = {group: _read(names) for group, names in _DATA["options"].items()}

ENTRY_POINTS = tuple(name for name in _OPTIONS["java"]["option.entryPoint"].unless if name != "model.py")
"""Values of option.entryPoint that this handler serves: its own name, and those of LMI's handlers."""

JAVA = tuple(_java(key, line) for key, line in _OPTIONS.pop("java").items())
"""Options that only DJL Serving's Java side reads."""

FOREIGN = tuple(_option(key, line, group) for group, names in _OPTIONS.items() for key, line in names.items())
"""Options that are refused or have no effect here: of LMI for every engine, and of one engine's own."""

VARIABLES_OF = {group: _read(names) for group, names in _DATA["variables"].items()}
"""Environment variables by the product that defines them."""

ENVIRONMENT = {name: line.own("") for name, line in VARIABLES_OF.pop("lmi").items()}
"""LMI's variables outside the OPTION_ and SERVING_ patterns, and AWS's of its images, with their options."""

SERVER_ENVIRONMENT = frozenset(_DATA["server_environment"])
"""SERVING_* names that only DJL Serving's Java side reads; ignored here, as an image may set them."""

NO_ARGUMENTS = ("allowed_media_domains", "allowed_local_media_path")
"""Arguments of vLLM's that are options of this server: it fetches what a request names."""


__all__ = ["COMMON", "ENVIRONMENT", "KNOWN", "OPTIONS", "SERVER_ENVIRONMENT", "Option"]

COMMON = declared(Options)

OPTIONS = (*COMMON, *ECHO, *GUIDED, *MEDIA, *GPU, *OPENVINO, *VLLM, *TRTLLM, *REMOTE, *JAVA, *FOREIGN)

KNOWN: dict[str, list[Option]] = {}
"""Options by name and alias; two engines may have different options of one name."""

for _known in OPTIONS:
    for _name in (_known.key, *_known.aliases):
        KNOWN.setdefault(_name, []).append(_known)
