"""Convert a container's environment to options and variables of this project's images.

Foreign names are translated with the handler's own table (handler/config/options/foreign.json), so the result matches
how the handler itself would read the variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from deploy.adopt.triton import IDLE, MISSING
from deploy.data import table
from deploy.errors import Refused
from deploy.redaction import HIDDEN, is_secret, redact
from deploy.resolve.instances import LLAMACPP
from deploy.resources.environment import MODEL_DATA
from deploy.spec.options import Value, settings_of, variable_of, wrong_options
from handler.config.environment import CONTEXTS, STAGES
from handler.config.implied import as_lmi_reads, selected_engine
from handler.config.lmi_version import KEY, release_of
from handler.config.options import ENVIRONMENT, SERVER_ENVIRONMENT, VARIABLES_OF, Option, images
from handler.config.options.names import (
    VARIABLES,
    Own,
    find_option,
    key_of,
    translate,
    unknown_option,
    unknown_variable,
    variable,
)
from handler.config.sources import Setting, joined
from handler.core.numbers import is_digits


class Container(NamedTuple):
    """The kind and release of a serving container.

    Attributes:
        kind: `lmi`, `tgi`, `triton`, `vllm`, `sglang`, `llama-cpp` or `ours`.
        engine: engine that the container's variables configure.
        release: release of TGI, or the nearest known release of LMI such as `0.36`, or "" if the tag has no release.
        tagged_release: release as written in the tag.
        repository: settings from the Triton model repository, as variables.
    """

    kind: str
    engine: str
    release: str = ""
    tagged_release: str = ""
    repository: Mapping[str, str] = MappingProxyType({})


_CONTAINERS: Mapping[str, Any] = table("containers")
KINDS: Mapping[str, str] = {kind: entry["name"] for kind, entry in _CONTAINERS["kinds"].items()}

_NEURON = re.compile(r"neuron|inf2|trn1|optimum", re.IGNORECASE)

_ADVICE = (
    f"If it is one of these under another name, pass its kind: --container {{{','.join(KINDS)}}}. The image "
    "itself is not carried over."
)


def container_kind(image: str, override: str | None) -> Container:
    """Return the kind and release of the container in an image.

    Args:
        override: kind that the user specified, or None to derive it from the image name.

    Raises:
        Refused: the container is not supported.
    """
    repository, _, tag = image.partition("@")[0].partition(":")
    if _NEURON.search(image):
        raise Refused(f"the image {image} is for AWS Neuron, which this project's images do not support", "")
    kind = override or _kind(repository)
    if kind is None:
        supported = ", ".join(KINDS.values())
        raise Refused(
            f"the image {image or '(none)'} cannot be replaced by lmi deploy; it replaces {supported}", _ADVICE
        )
    if kind == "tgi" and (match := _TGI.search(tag)):
        return Container(kind, "vllm", match[1], match[1])
    engine = "trtllm" if kind == "lmi" and "tensorrtllm" in tag else LLAMACPP if kind == "llama-cpp" else "vllm"
    release = str(release_of(tag) or "") if kind == "lmi" else ""
    return Container(kind, engine, release, ".".join(tag.lstrip("v").split(".")[:2]) if release else "")


def _kind(repository: str) -> str | None:
    """Return the kind of the container in an image repository, or None if it is unknown."""
    kinds = _CONTAINERS["kinds"].items()
    return next((kind for kind, entry in kinds if re.search(entry["repository"], repository)), None)


_TGI = re.compile(r"(?:-tgi|^v?)([0-9]+\.[0-9]+(?:\.[0-9]+)?)(?!.*-tgi)")  # 2.4.0-tgi2.3.1-gpu, and TGI's own tags

_MODEL_ID = "option.model_id"
_LENGTH = "option.max_model_len"
_ASYNC = "option.async_mode"
_DEGREES = {f"option.{name}" for name in ("tensor_parallel_degree", "tensor_parallel_size", *STAGES, *CONTEXTS)}
"""Options that determine how many GPUs a model uses."""

_IGNORED: Mapping[str, str] = {**_CONTAINERS["of_sdk"], **IDLE}
"""Maps each variable of SageMaker's SDK, JumpStart or their toolkits, and each parameter of Triton's backends, to the
reason why it has no effect here.
"""

_READERS = {
    "OPTION_": "lmi",
    "SERVING_": "lmi",
    images.VLLM: "vllm",
    images.SGLANG: "sglang",
    images.LLAMA_CPP: "llama-cpp",
    images.LLAMA_ARG: "llama-cpp",
}
"""Maps each prefix to the kind of container that reads variables with that prefix."""


_OF_AWS = {"vllm": "vLLM", "sglang": "SGLang", "llama-cpp": "llama.cpp"}
"""Maps each kind of AWS's images that speak OpenAI's API on /invocations to the name of its server."""


_NAMES_MODEL = {"tgi": "TGI", "vllm": "vLLM", "sglang": "SGLang"}
"""Maps each kind of container that names the model in chats by its path or its name on the hub to its server's name."""


_LAST_TGI = "3.3"
"""TGI's last release, to which a tag without a release refers."""


@dataclass
class Variables:
    """The result of classifying the variables in a container's environment.

    Attributes:
        options: options of the specification, without the prefix `option.`.
        environment: variables that are kept unchanged.
        model_id: model that the container loads, or "" if no variable names it.
        context: value of `model.context`, or None if no variable sets it.
        unmapped: pairs `(NAME=value, reason)` for variables that cannot be mapped.
        idle: pairs of the same form for variables that have no effect here.
        differences: pairs `(NAME=value, difference)` for variables that have another effect here.
        defaults: pairs `(setting, origin)` for the container's defaults of settings that no variable sets.
        hub_token: names of the variables that contain a token of the Hugging Face hub.
        origins: maps each option to the name of the variable that sets it.
        keys: values of the options that variables set, as strings, by option key.
    """

    options: dict[str, Value] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    model_id: str = ""
    context: int | None = None
    unmapped: list[tuple[str, str]] = field(default_factory=list)
    idle: list[tuple[str, str]] = field(default_factory=list)
    differences: list[tuple[str, str]] = field(default_factory=list)
    defaults: list[tuple[str, str]] = field(default_factory=list)
    hub_token: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def setting_text(name: str, value: str) -> str:
    """Return `NAME=value` for a comment, on one line, truncated, and with secrets hidden."""
    text = escaped_line(HIDDEN if is_secret(name, value) else str(redact(value)))
    return f"{name}={text[:_MOST]}{'...' if len(text) > _MOST else ''}"


_MOST = 200  # maximum characters of a value in a comment


def escaped_line(text: str) -> str:
    """Return the text with line breaks and control characters escaped."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def variables(environ: Mapping[str, str], container: Container) -> Variables:
    """Classify the variables of a container. As in LMI, `OPTION_*` overrides other names of the same option."""
    result, environ = Variables(), {**container.repository, **environ}
    names = {name: value for name, value in environ.items() if not _taken_out(name, value, result, container)}
    names = _joined(names, result)
    engine, settings = _read(names, container)
    if container.kind == "lmi" and container.release and variable(KEY) not in names:
        result.options[KEY.removeprefix("option.")] = container.release
    for name, value in names.items():
        if name.startswith(("OPTION_", "SERVING_")):
            _classify(result, name, value, key_of(name), value, engine)
    _translate(result, names, engine)
    for name, value in names.items():
        _as_it_is(result, name, value, engine)
    if settings.get(_ASYNC) == "true":  # implied by the name of LMI's handler
        result.options.setdefault(_ASYNC.removeprefix("option."), True)
    _checked(result)
    _write_defaults(result, container)
    rolling = Setting("option.rolling_batch", str(result.options.get("rolling_batch", "auto")), "")
    if "llm_engine" not in result.options and not selected_engine([rolling], ""):
        result.options["llm_engine"] = engine
    return result


def _translate(result: Variables, names: Mapping[str, str], engine: str) -> None:
    """Classify the variables whose names are in the table of foreign names."""
    for item in translate(names, engine):
        if isinstance(item, images.Note):
            pairs = result.differences if item.has_effect else result.idle
            pairs.append((setting_text(item.foreign, names[item.foreign]), item.message))
        elif not isinstance(item, Own):
            setting = setting_text(item.name, names.get(item.name, ""))
            result.unmapped.append((setting, item.message.removeprefix(f"{setting}: ")))
        elif item.name not in names:
            _classify(result, item.foreign, names.get(item.foreign, ""), key_of(item.name), item.value, engine)


def _joined(names: Mapping[str, str], settings: Variables) -> dict[str, str]:
    """Join variables with dotted names, such as SM_VLLM_LIMIT_MM_PER_PROMPT.IMAGE=2, into one JSON value per option."""
    dotted = [name for name in names if "." in name and name.startswith(("OPTION_", images.VLLM))]
    result = {name: value for name, value in names.items() if name not in dotted}
    keys = {name: key_of(f"OPTION_{name.removeprefix(images.VLLM).removeprefix('OPTION_')}") for name in dotted}
    for item in joined(Setting(keys[name], names[name], name) for name in dotted):
        if not isinstance(item, Setting) or item.key == keys[item.origin]:  # not part of an option
            origin = item.origin if isinstance(item, Setting) else str(getattr(item, "where", ""))
            result.setdefault(origin, names.get(origin, ""))
            continue
        prefix = images.VLLM if item.origin.startswith(images.VLLM) else "OPTION_"
        name = prefix + item.key.removeprefix("option.").upper()
        if name in result:
            settings.idle.append(
                (setting_text(name, result[name]), "variables with dotted names override it, as in vLLM")
            )
        result[name] = item.value
    return result


def _write_defaults(result: Variables, container: Container) -> None:
    """Add the container's defaults that differ from this project's, except for options that a variable sets."""
    for key, value, whose in _defaults(result, container):
        if key in result.keys:
            continue
        path = f"options.{key.removeprefix('option.')}"
        if key == _LENGTH:
            path, result.context = "model.context", value
        else:
            result.options[key.removeprefix("option.")] = value
        result.defaults.append((f"{path}: {str(value).lower() if isinstance(value, bool) else value}", whose))


def _defaults(result: Variables, container: Container) -> Iterator[tuple[str, Any, str]]:
    """Yield a triple `(option, value, reason)` for each default of the container."""
    if container.kind == "lmi" and not result.keys.keys() & _DEGREES:
        yield "option.tensor_parallel_degree", "max", "LMI's default: it uses all visible GPUs"
    if container.kind in _OF_AWS:
        server = _OF_AWS[container.kind]
        yield "option.openai_compat", True, f"{server}'s default: its /invocations speaks OpenAI's API"
    if (namer := _NAMES_MODEL.get(container.kind)) is not None:
        names = [result.model_id or MODEL_DATA, *(["*"] if container.kind == "tgi" else [])]
        yield "option.served_model_name", ",".join(names), f"{namer}'s name for the model in chats"
    if container.kind == "tgi":
        yield "option.tgi_version", container.release or _LAST_TGI, "TGI's schema, statuses and defaults"
        yield "option.generation_config", "vllm", "TGI takes no sampling defaults from the model"
        yield "job_queue_size", 128, "TGI's default of max_concurrent_requests"
        for key, (value, remark) in _of_tgi(container.release).items():
            if key not in _DEGREES or not result.keys.keys() & _DEGREES:
                yield key, value, f"TGI {container.release}'s default: {remark}"


def _of_tgi(release: str) -> dict[str, tuple[Any, str]]:
    """Return the launcher's defaults in a release of TGI, each with a remark, or {} if the release is unknown."""
    numbers = [int(number) for number in release.split(".") if number]
    rows = [row for row in _CONTAINERS["of_tgi"] if numbers and numbers <= row["to"]]
    return {key: (value, row["why"]) for row in reversed(rows) for key, value in row["options"].items()}


def _taken_out(name: str, value: str, result: Variables, container: Container) -> bool:
    """Return whether to omit a variable because it is a secret, empty, or not read by the container."""
    line = VARIABLES.get(name)
    is_token = name in ("HF_TOKEN", f"{images.VLLM}HF_TOKEN") or (line is not None and line.same == "HF_TOKEN")
    if is_token:
        result.hub_token += [name] if value else []
        return True
    if is_secret(name, value):
        reason = "anyone who may describe the model can read this secret; pass it to the container in another way"
        result.unmapped.append((f"{name}={HIDDEN}", reason))
        return True
    if not _is_read(name, container):
        result.idle.append((setting_text(name, value), f"{KINDS[container.kind]} does not read it"))
        return True
    if value or name in VARIABLES or name.startswith(images.VLLM):
        return False
    result.idle.append((f"{name}=", "it is empty"))
    return True


def _is_read(name: str, container: Container) -> bool:
    """Return whether the container reads a variable. Variables unknown to this project's image count as read."""
    if container.kind == "ours" or name in container.repository:
        return True
    for prefix, reader in _READERS.items():
        if name.startswith(prefix):
            return container.kind == reader
    line = VARIABLES.get(name)
    if name not in ENVIRONMENT and (line is None or line.unread):
        return True
    entry = _CONTAINERS["kinds"][container.kind]
    return name in entry["reads"] or name in VARIABLES_OF.get(entry["group"], ())


def _read(names: Mapping[str, str], container: Container) -> tuple[str, dict[str, str]]:
    """Return the engine and the options that LMI derives from the `OPTION_*` variables."""
    options = [Setting(key_of(name), value, name) for name, value in names.items() if name.startswith("OPTION_")]
    settings = as_lmi_reads(options, {}, "", java=False, is_mode_set=False)
    engine = selected_engine(settings, container.engine) or container.engine
    return engine, {setting.key: setting.value for setting in settings}


def _as_it_is(result: Variables, name: str, value: str, engine: str) -> None:
    """Classify a variable that is neither an option by its own name nor in the table of foreign names."""
    if name in ENVIRONMENT:
        _classify(result, name, value, ENVIRONMENT[name], value, engine)
    elif name in _IGNORED:
        result.idle.append((setting_text(name, value), _IGNORED[name]))
    elif name in MISSING:
        result.unmapped.append((setting_text(name, value), MISSING[name]))
    elif name.startswith(("OPTION_", "SERVING_", images.VLLM)):
        return
    elif name.startswith(images.PREFIXES) and name not in VARIABLES:
        result.unmapped.append((setting_text(name, value), "no argument of the container's server has this name"))
    elif (line := VARIABLES.get(name)) is None or line.unread or line.heeded:
        result.environment[name] = value


def _classify(result: Variables, origin: str, raw: str, key: str, value: str, engine: str) -> None:
    """Classify the option that a variable sets, according to how this project's image would treat it."""
    name = key.removeprefix("option.")
    if origin.startswith("SERVING_") and key in SERVER_ENVIRONMENT:
        result.idle.append((setting_text(origin, raw), "only DJL Serving's Java side reads it"))
        return
    option = find_option(key, engine)
    same = option.key if option is not None else key  # an option may have several names
    if same in result.keys:
        if result.keys[same] != value:
            result.idle.append((setting_text(origin, raw), f"another variable sets {same}, and overrides it"))
        return
    result.keys[same] = value
    if same == _MODEL_ID:
        result.model_id = value
        return
    if option is None:
        unknown = unknown_variable(origin) if origin.startswith("SERVING_") else unknown_option(key, engine)
        does = "silently ignores it"
        if origin.startswith(images.VLLM):  # AWS's image passes it to `vllm serve` as an argument
            does = "does not start, unless its vLLM has this argument"
        result.unmapped.append((setting_text(origin, raw), f"{unknown.message}; the original container {does}"))
    elif refusal := _refusal(option, value, engine):
        result.unmapped.append((setting_text(origin, raw), refusal))
    elif no_effect := _no_effect(option, engine):
        result.idle.append((setting_text(origin, raw), no_effect))
    elif same == _LENGTH and is_digits(value) and int(value):
        result.context = int(value)
    elif variable_of(name) not in (variable(key), origin):
        result.environment[origin] = raw
    else:
        result.options[name] = typed(value)
        result.origins[f"options.{name}"] = origin


def _refusal(option: Option, value: str, engine: str) -> str:
    try:
        option.parse(value.strip())
    except ValueError as error:
        return str(error)
    has_it = not option.engines or engine in option.engines
    if has_it or option.idle or not (option.field or option.argument) or value.strip().lower() in option.harmless:
        return ""
    return f"it applies only to {' and '.join(option.engines)}, but the container's engine is {engine}"


def _no_effect(option: Option, engine: str) -> str:
    if hasattr(option.parse, "unless") and not option.of_java:  # a refused option
        return "this value changes nothing"
    if option.engines and engine not in option.engines:
        return option.idle or "its value has no effect with this engine"
    return "" if option.field or option.argument else option.help or "this project's image does not use it"


def typed(text: str) -> Value:
    """Return a variable's value as a number or a boolean if it can be converted back to the same string."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"0|[1-9][0-9]{0,14}", text):
        return int(text)
    if re.fullmatch(r"(0|[1-9][0-9]{0,7})\.[0-9]{1,8}", text) and str(float(text)) == text:
        return float(text)
    return text


def _checked(result: Variables) -> None:
    """Move options that this project's image would reject in combination with other options to `unmapped`."""
    for _ in range(len(result.options) + len(result.environment)):
        path, reason = next(_problems(result), ("", ""))
        if not path:
            return
        section, _, name = path.partition(".")
        values = result.options if section == "options" else result.environment
        origin = result.origins.get(path, name)
        result.unmapped.append((setting_text(origin, str(values.pop(name))), reason))


def _problems(result: Variables) -> Iterator[tuple[str, str]]:
    settings = list(settings_of(result.options, result.environment))
    origins = {setting.origin for setting in settings}
    for line in wrong_options(settings, None):
        path, _, reason = line.partition(": ")
        if path in origins:
            yield path, reason
