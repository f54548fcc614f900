"""Finds options by name, suggests similar names, and translates foreign environment variables."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from handler.config.options import ENVIRONMENT, KNOWN, NO_ARGUMENTS, SERVER_ENVIRONMENT, VARIABLES_OF, images
from handler.config.options.engine_arguments import NAMES, check, engine_arguments, parser, shipped
from handler.config.options.images import Note
from handler.config.options.option import Gone, Option, is_secret, read_json, redacted, true_or_false
from handler.core.errors import Problem
from handler.core.numbers import whole


def find_option(key: str, engine: str) -> Option | None:
    """Return the option with this name, preferably that of the engine, or None if there is no such option.

    Args:
        key: the name of the option.
        engine: the name of the engine, or "" if it is unknown.
    """
    options = KNOWN.get(key, [])
    matching = [option for option in options if engine in option.engines]
    matching += [option for option in options if not option.engines]
    if matching:  # nearly always; the engines' arguments are not read then
        return matching[0]
    arguments = (_argument(key, other) for other in NAMES)
    return _argument(key, engine) or next(iter(options), None) or next(filter(None, arguments), None)


def _argument(key: str, engine: str) -> Option | None:
    """Return a native argument of an engine as an option, or None if the engine has no such argument."""
    name = key.removeprefix("option.")
    argument = None if name == key else engine_arguments(engine).arguments.get(name)
    return argument and Option(key, None, parser(argument.types), None, "", engines=(engine,), argument=True)


def option_key(name: str) -> str | None:
    """Return the key of the option that DJL passes under a name without `option.`, or None if there is none."""
    key = next((name for name in (f"option.{name}", name) if name in KNOWN and _is_accepted(KNOWN[name], "")), None)
    if key is None:
        return None
    keys = {option.key for option in KNOWN[key]}
    return keys.pop() if len(keys) == 1 else key  # options of two engines, between which `find_option` decides


def variable(key: str) -> str:
    """Return the environment variable of an option, or "" if only serving.properties and `-o` can set the option."""
    if not key.startswith("option."):
        return f"SERVING_{key.upper()}" if key == key.lower() and "." not in key and key != "engine" else ""
    name = key.removeprefix("option.")
    return f"OPTION_{name.upper() if name in (name.lower(), 'entryPoint') else name}"


def key_of(name: str) -> str:
    """Return the key of the option that a handler variable sets."""
    if name.startswith("SERVING_"):
        return name.removeprefix("SERVING_").lower()
    if name in ENVIRONMENT:
        return ENVIRONMENT[name]
    suffix = name.removeprefix("OPTION_")
    key = "option." + (suffix.lower() if suffix == suffix.upper() else suffix)  # DJL keeps mixed case as it is
    return {"option.entrypoint": "option.entryPoint", "option.engine": "engine"}.get(key, key)


class Unknown(NamedTuple):
    """A name that is unknown to the handler and to the engines.

    Attributes:
        key: the unknown name.
        origin: where the name is set.
        message: error message, with similar names that would be accepted.
        is_near: whether there are similar names, so that this name is probably misspelled and the start is refused.
        hint: a similar name for a warning if the start is not refused, or "".
    """

    key: str
    origin: str
    message: str
    is_near: bool
    hint: str = ""


def unknown_option(key: str, engine: str, origin: str = "") -> Unknown:
    """Describe an unknown option, and suggest similar names that the handler and the engine accept."""
    name = key.removeprefix("option.")
    hints, releases = [*_similar(name, engine)], _releases(name, engine)
    hint = f"did you mean {' or '.join(hints)}?" if hints else "`lmi options` lists all options"
    return Unknown(key, origin, f"unknown option {key!r}{releases}; {hint}", bool(hints or releases))


def _similar(name: str, engine: str) -> Iterator[str]:
    """Yield the names of the option and the engine argument that are most similar to an unknown name."""
    bare = {key.removeprefix("option."): key for key, options in KNOWN.items() if _is_accepted(options, engine)}
    yield from (repr(bare[near]) for near in _nearest(name, bare))
    arguments = engine_arguments(engine).arguments
    names = [other for other in arguments if _is_accepted(KNOWN.get(f"option.{other}", ()), engine)]
    yield from (f"{NAMES[engine]}'s 'option.{near}'" for near in _nearest(name, names) if near not in bare)


SETTINGS: Mapping[str, str] = {
    "LMI_API_KEY": "the API keys, separated by commas; commands that call a server send the first one",
    "LMI_CACHE": "the directory for converted models and the demo model (default: ~/.cache/lmi-handler)",
    "LMI_DEFAULT_MODEL": "the model that a container serves if no option names one",
    "LMI_FRONT": "what serves HTTP in a container: djl or embedded",
    "LMI_HOST": "the address to listen on, unless --host is given",
    "LMI_LOG_FORMAT": "the format of the log: text or json (default: text)",
    "LMI_LOG_LEVEL": "the level of the log: debug, info, warning or error (default: info)",
    "LMI_SCRATCH": "the directory of a container for caches and DJL Serving's files (default: /tmp/lmi)",
    "LMI_UNKNOWN_OPTIONS": "error refuses names of options that are unknown and not similar to a known one",
}
"""Variables LMI_X of the server, with their meanings."""

LMI_VARIABLES = frozenset({
    *SETTINGS,
    "LMI_ACCEPT_AWS", "LMI_DEBUG_NODE", "LMI_ENGINE_MARKER", "LMI_LAUNCH_KEY", "LMI_REHEARSAL", "LMI_URL",
})  # fmt: skip
"""Variables LMI_X: those of the server, and those of its tools, examples and base images."""

_OF_KUBERNETES = re.compile(r"LMI_(.+_)?(SERVICE_(HOST|PORT)(_.+)?|PORT(_[0-9]+_.+)?)")
"""Variables that Kubernetes sets in each container for a service whose name begins with `lmi`."""


def is_unknown(name: str) -> bool:
    """Return whether a variable's name has the prefix LMI_ or SERVING_, but is not a known variable."""
    if name.startswith("LMI_"):
        return name not in LMI_VARIABLES and not _OF_KUBERNETES.fullmatch(name)
    key = key_of(name)
    return name.startswith("SERVING_") and key not in KNOWN and key not in SERVER_ENVIRONMENT


def unknown_variable(name: str) -> Unknown:
    """Describe an unknown variable SERVING_X or LMI_X, and suggest a similar variable if there is one."""
    key = key_of(name)
    if name.startswith("LMI_"):
        suffixes = {suffix.removeprefix("LMI_") for suffix in LMI_VARIABLES}
        near = [f"LMI_{suffix}" for suffix in _nearest(name.removeprefix("LMI_"), suffixes, cutoff=0.6)]
    elif f"option.{key}" in KNOWN:
        near = [f"OPTION_{key.upper()}"]
    else:
        bare = {key_name for key_name in KNOWN if not key_name.startswith("option.")} | SERVER_ENVIRONMENT
        near = [f"SERVING_{key_name.upper()}" for key_name in _nearest(key, bare)]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return Unknown(name, f"environment variable {name}", f"unknown setting{hint}", bool(near))


_OF_THE_HUB = re.compile(
    r"HF_(HOME|ENDPOINT|TOKEN_PATH|DEBUG|ASSETS_CACHE|STORED_TOKENS_PATH|(HUB|DATASETS|XET|INFERENCE)_.+)"
)
"""Variables HF_X that huggingface_hub and its libraries read (huggingface_hub/constants.py)."""

_FAMILIES = ("SM_", "HF_", "LLAMA_ARG_", "SAGEMAKER_TRITON_", "MIES_", "MINDIE_")
"""Prefixes of the variables of other servers. An unknown variable with such a prefix is always reported."""

_SHORTEST = 8  # letters of a variable of TGI for which a similar name is probably misspelled


def unfamiliar(environ: Mapping[str, str]) -> Iterator[Unknown]:
    """Yield the variables that have a prefix of another server's variables, or resemble one of TGI's, but are unknown.

    They do not refuse the start, because other servers have new variables every week.
    """
    of_tgi = [name for name in VARIABLES_OF["tgi"] if len(name) >= _SHORTEST]
    for name in environ:
        if name in VARIABLES or name in ENVIRONMENT or name.startswith(images.VLLM) or _OF_THE_HUB.fullmatch(name):
            continue
        family = next((prefix for prefix in _FAMILIES if name.startswith(prefix)), "")
        near = _nearest(name, [*VARIABLES, *ENVIRONMENT], 0.85) if family else _nearest(name, of_tgi, 0.93)
        if family or near:
            hint = near[0] if near else ""
            message = f"unknown variable{f'; did you mean {hint!r}?' if hint else ''}"
            yield Unknown(name, f"environment variable {name}", message, False, hint)


def _nearest(name: str, names: Iterable[str], cutoff: float = 0.75) -> list[str]:
    """Return the most similar of `names` in a list, which is empty if none has at least the similarity `cutoff`."""
    return difflib.get_close_matches(name, names, n=1, cutoff=cutoff)


def _releases(name: str, engine: str) -> str:
    """Return the part of a message that lists the engine releases with this argument, or "" if no release has it."""
    other = shipped(engine).arguments.get(name) if engine in NAMES else None
    if other is None:
        return ""
    return f": not in {engine_arguments(engine).source}, only in {NAMES[engine]} {other.first} to {other.last}"


def wrong_arguments(values: dict[str, Any], engine: str) -> Iterator[str]:
    """Yield a message for each argument in option.engine_args whose name or type is wrong."""
    arguments = engine_arguments(engine)
    for name, value in values.items():
        option = next((other for other in KNOWN.get(f"option.{name}", ()) if engine in other.engines), None)
        argument = arguments.arguments.get(name)
        try:
            if name in NO_ARGUMENTS:
                yield f"{name!r}: set option.{name} instead"
            elif option and getattr(option.parse, "argument", False):
                option.parse(value if isinstance(value, str) else json.dumps(value))
            elif argument:
                check(value, argument.types)
            else:
                near = _nearest(name, arguments.arguments)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                yield f"{name!r} is not an argument of {arguments.source}{hint}"
        except ValueError as error:
            yield f"{name!r}: {error}"


def _is_accepted(options: Sequence[Option], engine: str) -> bool:
    return not options or any(
        (not engine or not option.engines or engine in option.engines or option.idle)
        and not isinstance(option.parse, Gone)
        and (option.field or option.of_java)
        for option in options
    )


# -- translation of the environment variables of TGI, Hugging Face and AWS's images ------------------------------------


class Own(NamedTuple):
    """An environment variable of the handler, with a value from the variable of another server.

    Attributes:
        foreign: the name of the foreign variable.
        name: the name of the handler's variable.
        value: the value for the handler's variable.
        field: the field of the variable's JSON object that has the value, or "" if it is the whole value.
    """

    foreign: str
    name: str
    value: str
    field: str = ""


VARIABLES = {name: line for names in VARIABLES_OF.values() for name, line in names.items()}
"""The foreign variables in foreign.json, by name."""

KEYS = "LMI_API_KEY"
"""Variable with the keys that the embedded server requires from clients, separated by commas."""

SECRET = frozenset({"HF_TOKEN", KEYS})

KEY_VARIABLES = (KEYS, *(name for name, variable in VARIABLES.items() if variable.same == KEYS))
"""Variables with keys for clients: ours, and those of other servers."""

FRONTS = ("djl", "embedded")
"""Values of LMI_FRONT, which selects the HTTP server of the container."""


def _truth(value: str) -> bool:
    return value == "1" or (value != "0" and true_or_false(value))


def _graphs(value: str, engine: str) -> str:
    on = true_or_false(value)
    return json.dumps(not on if engine == "vllm" else on)


def _graph_sizes(value: str, engine: str) -> str | None:
    sizes = [whole(size) for size in value.split(",")]
    return None if sizes == [0] else json.dumps(sizes)


def _single_key(value: str, engine: str) -> str:
    if "," in value:
        raise ValueError(f"it contains a comma, which separates keys here; set {KEYS}=KEY,... instead")
    return value


_PROTECTING = re.compile(r"--(http-restricted|grpc-restricted|grpc-use-ssl|grpc-server-|grpc-root-cert)")


def _triton_flags(value: str, engine: str) -> None:
    if _PROTECTING.search(value):
        raise ValueError(
            f"its keys and certificates are not read; set {KEYS}=KEY,..., and `lmi serve --ssl-certfile` for TLS"
        )


def _address(value: str, engine: str) -> None:
    if value.lower().startswith("https"):
        raise ValueError("`lmi serve --ssl-certfile` and `--ssl-keyfile` serve HTTPS")


def _without_engine(convert: Callable[[str], str | None]) -> Callable[[str, str], str | None]:
    return lambda value, engine: convert(value)


CONVERSIONS: dict[str, Callable[[str, str], str | None]] = {
    "": lambda value, engine: value,
    "boolean": lambda value, engine: json.dumps(_truth(value)),
    "shards": lambda value, engine: "max" if _truth(value) else "1",
    "fp8": lambda value, engine: value.replace("e4m3fn", "e4m3"),
    "graphs": _graphs,
    "graph sizes": _graph_sizes,
    "one key": _single_key,
    "triton flags": _triton_flags,
    "address": _address,
    **{name: _without_engine(convert) for name, convert in images.CONVERSIONS.items()},
}
"""Functions that convert the value of a foreign variable for an engine. They return None if the value has no effect,
and raise ValueError if it is invalid.
"""


def hub_token(environ: Mapping[str, str]) -> str | None:
    """Return the token for the Hugging Face hub: HF_TOKEN, or else the first foreign variable for it that is set."""
    names = ["HF_TOKEN", *(name for name, variable in VARIABLES.items() if variable.same == "HF_TOKEN")]
    return next((value for name in names if (value := environ.get(name))), None)


def translate(environ: Mapping[str, str], engine: str) -> Iterator[Own | Note | Problem]:
    """Translate foreign variables. Two different values for the same handler variable are a problem.

    Args:
        environ: the environment. Empty values are treated as unset.
        engine: the engine selected by the options, or "" if they select none. In that case, one of AWS's images may
            imply one.
    """
    values = {name: (name, value) for name, value in environ.items() if value}
    read, notes = images.flags(environ)
    yield from notes
    others = {name: value for name, value in environ.items() if not name.startswith(images.PREFIXES)}
    of_tables = _of_all_tables({**others, **_protecting(environ), **read}, read, engine or _engine_of(environ), environ)
    of_vllms_image = _of_vllms_image(environ)
    set_names = {*environ, *(item.name for item in of_vllms_image), *([images.ENGINE] if engine else [])}
    for item in (*of_vllms_image, *_implied(environ, set_names), *of_tables):
        if isinstance(item, Own):
            first, value = values.setdefault(item.name, (item.foreign, item.value))
            if value != item.value:
                yield contradiction(item.foreign, item.value, first, value)
                continue
        yield item


def _protecting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that protect the servers in AWS's images, whose values are not those of flags."""
    names = {*VARIABLES_OF["sglang"], *VARIABLES_OF["llama.cpp"]}
    return {name: value for name, value in environ.items() if name in names}


def _engine_of(environ: Mapping[str, str]) -> str:
    """Return the engine of AWS's image whose variables are set, or "" if there is none."""
    engines = (image.engine_in(environ) for image in images.AWS.values() if image.first_of(environ))
    return next(filter(None, engines), "")


def _implied(environ: Mapping[str, str], set_names: Collection[str]) -> Iterator[Own]:
    """Yield the variables that the images' own variables imply, unless they are set."""
    for image in images.AWS.values():
        name = image.first_of(environ)
        for variable, value in image.along(environ).items() if name else ():
            if variable not in set_names:
                yield Own(name, variable, value)


def _of_all_tables(
    variables: Mapping[str, str], read: Mapping[str, str], engine: str, environ: Mapping[str, str]
) -> list[Own | Note | Problem]:
    """Translate the variables in the tables.

    With llama-server, its defaults apply to the users of its image, unless they set their own under our name.

    Args:
        variables: all variables.
        read: the variables of the images.
        engine: the name of the engine, or "" if it is unknown.
        environ: the environment, which may contain an earlier translation.
    """
    items = [*_of_tables(variables, engine)]
    if engine != images.LLAMACPP:
        return [*_merged(items)]
    items += _server_flags(read)
    name, own = images.AWS["llama.cpp"].first_of(environ), environ.get(images.SAMPLING)
    fields = images.LLAMA_SAMPLING.items() if name else ()
    with_defaults = [*_merged([*(Own(name, images.SAMPLING, value, field) for field, value in fields), *items])]
    is_own = own and all(item.value != own for item in with_defaults if isinstance(item, Own))
    return [*_merged(items)] if is_own else with_defaults


def _server_flags(values: Mapping[str, str]) -> Iterator[Own | Problem]:
    """Yield the option with the flags that the llamacpp engine passes to llama-server."""
    for item in images.server_flags(values):
        if isinstance(item, images.InvalidVariable):
            text = redacted(f"{item.name}={item.value}")
            yield Problem(f"environment variable {item.name}", item.name, f"{text}: {item.reason}")
        else:
            yield Own(", ".join(item.names), images.SERVER_ARGS, item.text)


def _merged(items: Iterable[Own | Note | Problem]) -> Iterator[Own | Note | Problem]:
    """Merge the fields of a variable with a JSON object, which several foreign variables set, into one value."""
    fields: dict[str, list[Own]] = {}
    rest: list[Own | Note | Problem] = []
    for item in items:
        if isinstance(item, Own) and item.field:
            fields.setdefault(item.name, []).append(item)
        else:
            rest.append(item)
    for item in rest:
        if isinstance(item, Own) and item.name in fields:
            fields[item.name].insert(0, item)
        else:
            yield item
    for name, parts in fields.items():
        yield _joined_fields(name, parts)


def _joined_fields(name: str, parts: Sequence[Own]) -> Own:
    """Return one variable with all fields. An object that is not valid JSON is returned, so that it is refused."""
    values: dict[str, Any] = {}
    for part in parts:
        try:
            value = json.loads(part.value)
        except (ValueError, RecursionError):
            return part._replace(field="")
        values |= {part.field: value} if part.field else value
    return Own(parts[0].foreign, name, json.dumps(values))


_OF_SERVER = "the server at option.base_url has its own flags"
_WITH_LLAMACPP = "; the llamacpp engine passes it to llama-server (OPTION_LLM_ENGINE=llamacpp)"


def _of_tables(environ: Mapping[str, str], engine: str) -> Iterator[Own | Note | Problem]:
    for name, line in VARIABLES.items():
        value = environ.get(name)
        if not value or line.unread or line.heeded or (line.flag and engine == images.LLAMACPP):
            continue
        if line.of_server and engine in images.BY_URL:
            yield Note(name, _OF_SERVER)
            continue
        variable, argument = images.as_argument(name, value, line)
        try:
            if variable.refused and argument.lower() not in variable.unless:
                raise ValueError(variable.refused + (_WITH_LLAMACPP if variable.flag else ""))
            converted = CONVERSIONS[variable.convert](argument, engine)
        except ValueError as error:
            yield Problem(f"environment variable {name}", name, f"{redacted(f'{name}={value}')}: {error}")
            continue
        if (variable_name := variable.variable_of(engine)) and converted is not None:
            yield Own(name, variable_name, converted, variable.field)
            if variable.note:
                yield Note(name, variable.note, has_effect=True)
        elif variable.idle:
            yield Note(name, variable.idle)


def contradiction(first: str, value: str, second: str, other: str) -> Problem:
    """Return a problem with two variables that set an option to different values. Secret values are not shown."""
    secret = is_secret(f"{first}={value}") or is_secret(f"{second}={other}")
    values = "" if secret else f" ({value} and {other})"
    return Problem("", first, f"environment variables {first} and {second} contradict each other{values}: remove one")


def _of_vllms_image(environ: Mapping[str, str]) -> list[Own]:
    names = sorted(name for name in environ if name.startswith(images.VLLM) and not _is_empty_array(environ[name]))
    return [of_vllms_variable(name, environ[name]) for name in names]


def of_vllms_variable(name: str, value: str) -> Own:
    """Translate a variable of AWS's vLLM image to the handler variable for the same option."""
    key, value = name.removeprefix(images.VLLM).lower(), value or "true"
    if key.startswith("no_") and f"option.{key}" not in KNOWN and value.lower() in ("true", "false"):
        key, value = key.removeprefix("no_"), json.dumps(value.lower() == "false")
    for option in KNOWN.get(f"option.{key}", ()):
        if not option.engines or "vllm" in option.engines:
            key = option.key.removeprefix("option.")
            value = value if key in _READ_AS_ARRAYS and value.startswith("[") else _joined(value)
    return Own(name, f"OPTION_{key.upper()}", value)


_READ_AS_ARRAYS = ("lora_modules",)
"""Options that accept a JSON array of strings, whose elements commas would not separate."""


def _is_empty_array(value: str) -> bool:
    """Return whether a value is an empty JSON array, for which AWS's vLLM image omits the argument."""
    return value.startswith("[") and not value.strip("[] \n")


def _joined(value: str) -> str:
    """Join a JSON array of strings with commas, as the handler options expect, and several JSON objects into a JSON array.

    AWS's vLLM image passes each element of an array, and each of several objects, as an argument of its own. Other
    values are returned unchanged.
    """
    try:
        if value.startswith("{"):
            return _as_array(value)
        items = read_json(value) if value.startswith("[") else None
    except ValueError:
        return value
    return ",".join(items) if items and all(isinstance(item, str) for item in items) else value


def _as_array(text: str) -> str:
    """Return several JSON objects, separated by white space, as a JSON array, and a single object as it is."""
    decoder, items, position = json.JSONDecoder(), [], 0
    while position < len(text):
        item, position = decoder.raw_decode(text, position)
        items.append(item)
        position += len(text) - position - len(text[position:].lstrip())
    return text if len(items) == 1 else json.dumps(items)
