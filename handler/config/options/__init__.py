"""The table of all options: the options in `tables.py`, and the foreign names in `foreign.json` and `images.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from handler.config.engines import LLM_ENGINES
from handler.config.options.option import OF_JAVA, Gone, Option, declared
from handler.config.options.tables import ECHO, GPU, GUIDED, LLAMACPP, MEDIA, OPENVINO, REMOTE, TRTLLM, VLLM, Options

# -- foreign names: foreign.json has a line for each name, which defines how the name is treated -----------------------


class Foreign(NamedTuple):
    """A line of foreign.json, which defines the treatment of a foreign option or environment variable.

    Attributes:
        refused: why the name is refused at startup, and what to use instead; "" if it is not refused.
        unless: values that have no effect and are therefore not refused.
        idle: why the name has no effect. For a variable with `same`, this applies to engines that lack that option.
        same: the handler variable with the same meaning, or these variables by engine. For an LMI variable, it is the
            option with the same meaning.
        convert: the name of the conversion in `names.py` for the value, or "" if the value is not converted.
        field: the field of the JSON object in `same` that the variable sets, or "" if it sets the whole value.
        unread: the other software that reads the variable, which the handler ignores.
        heeded: the host that reads the variable itself, and how.
        instead: what to use instead of an option that only the Java side of DJL Serving reads.
        aliases: other names of the option.
        note: how the effect differs from that in the foreign server, for a line at startup, or "".
        flag: the flag of llama-server that the llamacpp engine passes on instead, or "".
        is_switch: whether the flag has no value.
        of_server: whether the variable has no effect if the model runs on a server at option.base_url.
    """

    refused: str = ""
    unless: tuple[str, ...] = ()
    idle: str = ""
    same: str | Mapping[str, str] = ""
    convert: str = ""
    field: str = ""
    unread: str = ""
    heeded: str = ""
    instead: str = ""
    aliases: tuple[str, ...] = ()
    note: str = ""
    flag: str = ""
    is_switch: bool = False
    of_server: bool = False

    def variable_of(self, engine: str) -> str:
        """Return the handler variable with the same meaning, or "" if there is none for this engine."""
        return self.same if isinstance(self.same, str) else self.same.get(engine, "")

    @property
    def owns(self) -> Mapping[str, str]:
        """The handler variables by engine. The key "" means all engines."""
        return ({"": self.same} if self.same else {}) if isinstance(self.same, str) else self.same

    @property
    def answer(self) -> str:
        """Return a description of the effect of the variable, for `lmi options` and the documentation."""
        passed = "; the llamacpp engine passes it to llama-server" if self.flag else ""
        by_url = "; no effect with a server at option.base_url" if self.of_server else ""
        return f"{self.otherwise}{passed}{by_url}"

    @property
    def otherwise(self) -> str:
        """The description of the effect with all engines except llamacpp."""
        if self.unread:
            return f"left alone: {self.unread}"
        if self.heeded:
            return f"supported {self.heeded}"
        if self.refused:
            return Gone(self.refused, self.unless).answer
        field = f", field `{self.field}`" if self.field else ""
        names = [
            f"`{variable}`{field} ({engine})" if engine else f"`{variable}`{field}"
            for engine, variable in sorted(self.owns.items())
        ]
        note = f"; {self.note}" if self.note else ""
        return f"same as {', '.join(names)}{note}" if names else f"no effect: {self.idle}"


_DATA = json.loads((files("handler.config.options") / "foreign.json").read_text(encoding="utf-8"))
_IMAGES = json.loads((files("handler.config.options") / "images.json").read_text(encoding="utf-8"))
_REASONS = {**_DATA["reasons"], **_IMAGES.pop("reasons")}


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
    # Some releases of TensorRT-LLM still have arguments of these names.
    parse = Gone(line.refused, line.unless, argument=group != "trtllm")
    return Option(key, key.removeprefix("option."), parse, None, f"refused: {line.refused}", engines=engines)


_OPTIONS = {group: _read(names) for group, names in _DATA["options"].items()}

ENTRY_POINTS = tuple(name for name in _OPTIONS["java"]["option.entryPoint"].unless if name != "model.py")
"""Values of option.entryPoint that this handler supports: its own module, and the modules of LMI handlers."""

JAVA = tuple(_java(key, line) for key, line in _OPTIONS.pop("java").items())
"""Options that only the Java side of DJL Serving reads."""

FOREIGN = tuple(_option(key, line, group) for group, names in _OPTIONS.items() for key, line in names.items())
"""Options of LMI or of a single engine that are refused or ignored here."""


def _of_image(image: Mapping[str, Any]) -> dict[str, Foreign]:
    """Return the variables of an image of AWS, which images.json lists by argument and groups by reason."""
    lines = dict(image["lines"])
    for verdict in ("refused", "idle"):
        lines |= {name: {verdict: reason} for reason, names in image[verdict].items() for name in names}
    for kind, names in image.get("llamacpp", {}).items():
        for name in names:
            flag = f"--{name.lower().replace('_', '-')}"
            lines[name] = {**lines[name], "flag": flag, "is_switch": kind == "switches"}
    if "by_url" in image:
        lines = {name: {**line, "of_server": name not in image["by_url"]} for name, line in lines.items()}
    variables = {f"{image['prefix']}{name}": line for name, line in lines.items()}
    environment = image.get("environment", {"same": [], "other": {}})
    for name, argument in {**{name: name for name in environment["same"]}, **environment["other"]}.items():
        variables[f"LLAMA_ARG_{name}"] = lines[argument]
    return _read(variables)


IMAGES: Mapping[str, str] = {group: image["source"] for group, image in _IMAGES.items() if group != "about"}
"""Maps each group of variables in images.json to the server and release whose arguments it lists."""

VARIABLES_OF = {group: _read(names) for group, names in _DATA["variables"].items()}
VARIABLES_OF |= {group: _of_image(_IMAGES[group]) for group in IMAGES}
"""Foreign environment variables, by product."""

ENVIRONMENT = {name: line.variable_of("") for name, line in VARIABLES_OF.pop("lmi").items()}
"""Maps variables of LMI and AWS images that do not begin with OPTION_ or SERVING_ to options."""

SERVER_ENVIRONMENT = frozenset(_DATA["server_environment"])
"""SERVING_* variables that only the Java side of DJL Serving reads. They are ignored, as images may set them."""

NO_ARGUMENTS = ("allowed_media_domains", "allowed_local_media_path")
"""Arguments of vLLM that option.engine_args must not contain, because this server fetches media itself."""


__all__ = ["COMMON", "ENVIRONMENT", "KNOWN", "OPTIONS", "SERVER_ENVIRONMENT", "Option"]

COMMON = declared(Options)

OPTIONS = (*COMMON, *ECHO, *GUIDED, *MEDIA, *GPU, *OPENVINO, *VLLM, *TRTLLM, *REMOTE, *LLAMACPP, *JAVA, *FOREIGN)

KNOWN: dict[str, list[Option]] = {}
"""Maps names and aliases to options. Two engines may have different options with the same name."""

for _entry in OPTIONS:
    for _name in (_entry.key, *_entry.aliases):
        KNOWN.setdefault(_name, []).append(_entry)
