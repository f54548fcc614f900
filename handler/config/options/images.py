"""Lists AWS's images, and reads the variables of the SGLang and llama.cpp images as their entry points do.

The entry points convert `SM_SGLANG_X_Y=V` and `SM_LLAMA_CPP_X_Y=V` to `--x-y V` for the server. llama-server itself
reads `LLAMA_ARG_*`, which arguments override. Source: aws/deep-learning-containers, scripts/docker/vllm, sglang and
llama_cpp; llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from handler.config import llama_server
from handler.config.options import VARIABLES_OF, Foreign
from handler.core.numbers import is_digits

VLLM, SGLANG, LLAMA_CPP, LLAMA_ARG = "SM_VLLM_", "SM_SGLANG_", "SM_LLAMA_CPP_", "LLAMA_ARG_"


class Image(NamedTuple):
    """One of AWS's images.

    Attributes:
        prefixes: the prefixes of its variables. Each variable sets an option, and implies the settings in `along`.
        engine: the engine that serves the same models, or "" if it depends on the hardware.
    """

    prefixes: tuple[str, ...]
    engine: str = ""

    def engine_in(self, environ: Mapping[str, str]) -> str:
        """Return the engine that the image's variables imply, or "" if there is none: the server of the image if it is
        here, or a similar one.
        """
        if not self.first_of(environ):
            return ""
        if LLAMA_CPP in self.prefixes and has_llama_server(environ):
            return LLAMACPP
        if SGLANG in self.prefixes and (url := environ.get(BASE_URL)):
            return "grpc" if url.startswith("grpc") else "openai"
        return self.engine

    def along(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the settings that the image's variables imply: the engine if it has one, and the /invocations API."""
        engine = self.engine_in(environ)
        kind = {"OPTION_BASE_URL_KIND": "sglang"} if engine in BY_URL else {}
        return {**({ENGINE: engine} if engine else {}), **kind, "OPTION_OPENAI_COMPAT": "true"}

    def first_of(self, environ: Iterable[str]) -> str:
        """Return the first variable of the image in alphabetical order, or "" if there is none."""
        return min((name for name in environ if name.startswith(self.prefixes)), default="")


ENGINE, BASE_URL, LLAMACPP = "OPTION_LLM_ENGINE", "OPTION_BASE_URL", "llamacpp"
BY_URL = ("openai", "grpc")
"""The engines that use a server at option.base_url."""
SERVER_ARGS, SAMPLING = "OPTION_LLAMA_SERVER_ARGS", "OPTION_OVERRIDE_GENERATION_CONFIG"


def has_llama_server(environ: Mapping[str, str]) -> bool:
    """Return whether an environment contains llama-server: on its PATH, in a package, or in the option for it."""
    path = environ.get("PATH")
    return bool(environ.get("OPTION_LLAMA_SERVER")) or (bool(path) and llama_server.find(path=path) is not None)


AWS: Mapping[str, Image] = {
    "vLLM": Image((VLLM,), "vllm"),
    "SGLang": Image((SGLANG,), "vllm"),
    "llama.cpp": Image((LLAMA_CPP, LLAMA_ARG)),
}
"""AWS's images, by the name of their server."""

ALL = tuple(prefix for image in AWS.values() for prefix in image.prefixes)
"""Prefixes of the variables of all images."""

PREFIXES = (SGLANG, LLAMA_CPP, LLAMA_ARG)
"""Prefixes of the variables in images.json."""

MODEL_DIR = f"{LLAMA_CPP}MODEL_DIR"
"""Variable with the directory in which llama.cpp's image looks for a model."""

MODELS = frozenset(f"{prefix}{name}" for prefix in (LLAMA_CPP, LLAMA_ARG) for name in ("MODEL", "MODEL_DIR", "HF_REPO"))
"""Variables that name the model of llama.cpp's image. Without them, it serves the first file of its directory."""

_LINES = {**VARIABLES_OF["aws-sglang"], **VARIABLES_OF["aws-llama-cpp"]}
_FALSE = ("false", "off", "disabled", "0")  # common/arg.cpp, is_falsey
_SAME = "AWS's image omits a flag whose value is false; set {}=true"
_FIRST_LINE = "AWS's image reads only the first line of its value"
_OVERRIDDEN = "{} overrides it, as in llama-server"
_GROUPS = (
    "with SM_SGLANG_ENABLE_DP_ATTENTION, this splits the GPUs of one replica; set option.replicas for more replicas"
)


class Note(NamedTuple):
    """A foreign variable or a setting that has no effect here, or a different one than in its own server.

    Attributes:
        foreign: the variable or setting.
        message: the reason, or the difference.
        has_effect: whether it has an effect.
    """

    foreign: str
    message: str
    has_effect: bool = False

    def __str__(self) -> str:
        """Return the line for the log."""
        return f"{self.foreign}{'' if self.has_effect else ' has no effect here'}: {self.message}"


def flags(environ: Mapping[str, str]) -> tuple[dict[str, str], list[Note]]:
    """Return the variables of the images with the values that their servers get, and notes on changed values.

    As in the entry points, an empty value is a flag without a value, and `false` omits the flag.

    Args:
        environ: the environment.

    Returns:
        The values by name, without omitted flags, and the notes.
    """
    values: dict[str, str] = {}
    notes: list[Note] = []
    for name in sorted(name for name in environ if name.startswith(PREFIXES)):
        value = environ[name].partition("\n")[0]
        if value != environ[name]:
            notes.append(Note(name, _FIRST_LINE, has_effect=True))
        if value.lower() == "false" and not name.startswith(LLAMA_ARG):
            if (opposite := _opposite(name)) in _LINES:
                notes.append(Note(name, _SAME.format(opposite)))
            continue
        values[name] = "true" if value.lower() in ("", "true") else value
    notes += _drop_overridden(values)
    notes += _drop_attention_groups(values)
    _join_repository(values)
    _divide_context(values)
    if f"{SGLANG}SCHEDULE_LOW_PRIORITY_VALUES_FIRST" in values:
        values.pop(f"{SGLANG}ENABLE_PRIORITY_SCHEDULING", None)  # this server does the same
    return values, notes


def _opposite(name: str) -> str:
    """Return the variable of an image that turns off what a variable with one of its prefixes turns on."""
    prefix = SGLANG if name.startswith(SGLANG) else LLAMA_CPP
    return f"{prefix}NO_{re.sub(f'^({prefix}|{LLAMA_ARG})', '', name)}"


def as_argument(name: str, value: str, line: Foreign) -> tuple[Foreign, str]:
    """Return the line and the value for a variable of llama-server, where a false value means the opposite argument."""
    opposite = _LINES.get(_opposite(name)) if name.startswith(LLAMA_ARG) and value.lower() in _FALSE else None
    return (line, value) if opposite is None else (opposite, "true")


def _drop_overridden(values: dict[str, str]) -> Iterator[Note]:
    """Drop the variables of llama-server that an argument overrides, and yield a note if their values differ."""
    arguments = {_setting(name): name for name in values if name.startswith(LLAMA_CPP)}
    for name in [name for name in values if name.startswith(LLAMA_ARG) and _setting(name)]:
        argument = arguments.get(_setting(name))
        if argument is not None:
            if values[name] != values[argument]:
                yield Note(name, _OVERRIDDEN.format(argument))
            del values[name]


def _setting(name: str) -> str:
    """Return the setting of this package that a variable sets, or "" if it sets none."""
    line = _LINES.get(name)
    return f"{line.same}.{line.field}" if line is not None and line.same else ""


def _join_repository(values: dict[str, str]) -> None:
    """Combine the repository and the file of a model on the hub into one name."""
    for prefix in (LLAMA_CPP, LLAMA_ARG):
        repository, file = f"{prefix}HF_REPO", f"{prefix}HF_FILE"
        if repository in values and file in values:
            values[repository] = f"{values[repository].partition(':')[0]}/{values.pop(file)}"


def _drop_attention_groups(values: dict[str, str]) -> Iterator[Note]:
    """With DP attention, drop the data-parallel size, which then is not a number of replicas, and yield a note.

    SGLang divides the GPUs of a model into `--dp-size` groups if `--enable-dp-attention` is set (parallel_hook.py).
    """
    if f"{SGLANG}ENABLE_DP_ATTENTION" in values:
        for name in (f"{SGLANG}DP", f"{SGLANG}DP_SIZE", f"{SGLANG}DATA_PARALLEL_SIZE"):
            if values.pop(name, None) is not None:
                yield Note(name, _GROUPS)


LLAMA_SAMPLING = {"temperature": "0.8", "top_k": "40", "top_p": "0.95", "min_p": "0.05"}
"""llama-server's defaults of sampling parameters, by field of `SAMPLING`."""


class ServerFlags(NamedTuple):
    """Flags for llama-server, as the text of an option, and the variables that set them."""

    names: tuple[str, ...]
    text: str


def server_flags(values: Mapping[str, str]) -> Iterator[ServerFlags | InvalidVariable]:
    """Yield the flags that the llamacpp engine passes to llama-server, and the variables with invalid values.

    Args:
        values: the variables with the values that their server gets; see `flags`.
    """
    names, words = list[str](), list[str]()
    for name, value in values.items():
        line = _LINES.get(name)
        if line is None or not line.flag:
            continue
        try:
            words += _words(name, value, line)
        except ValueError as error:
            yield InvalidVariable(name, value, str(error))
        names.append(name)
    if _is_set(values, "KV_UNIFIED") and (size := _number(values, "CTX_SIZE")):
        words += ["--ctx-size", str(size)]  # of all slots together
    if words:
        yield ServerFlags(tuple(names), " ".join(words))


class InvalidVariable(NamedTuple):
    """A variable with an invalid value, and the reason."""

    name: str
    value: str
    reason: str


def _words(name: str, value: str, line: Foreign) -> list[str]:
    """Return the words for a variable in llama-server's command.

    Raises:
        ValueError: the value is invalid.
    """
    if not line.is_switch:
        # As in the entry point, `true` is a flag without a value.
        return [line.flag] if value == "true" and name.startswith(LLAMA_CPP) else [line.flag, quote(value)]
    if _is_on(value):
        return [line.flag]
    opposite = _LINES.get(_opposite(name))
    return [] if opposite is None or not opposite.flag else [opposite.flag]


def _divide_context(values: dict[str, str]) -> None:
    """Set the context of a slot, as llama-server does (server-context.cpp, n_ctx_slot).

    The slots share the context equally unless they share one KV cache. The limit of a slot applies to its part.
    """
    parts = [_number(values, "CTX_SIZE"), _number(values, "KV_UNIFIED_PER_SLOT")]
    slots = _number(values, "PARALLEL", "N_PARALLEL")
    if not _is_set(values, "KV_UNIFIED"):
        parts[0] //= max(slots, 1)
    name = next((name for name in _names("CTX_SIZE", "KV_UNIFIED_PER_SLOT") if name in values), "")
    if any(parts):
        for other in _names("CTX_SIZE", "KV_UNIFIED_PER_SLOT"):
            if is_digits(values.get(other, "")):
                del values[other]
        values[name] = str(min(part for part in parts if part))


def _names(*arguments: str) -> list[str]:
    return [f"{prefix}{argument}" for prefix in (LLAMA_CPP, LLAMA_ARG) for argument in arguments]


def _number(values: Mapping[str, str], *arguments: str) -> int:
    """Return the number that the first of these arguments or variables sets, or 0 if there is none."""
    text = next((values[name] for name in _names(*arguments) if name in values), "")
    return int(text) if is_digits(text) else 0


def _is_set(values: Mapping[str, str], argument: str) -> bool:
    """Return whether a flag of llama-server is set."""
    return any(values.get(name, "false").lower() not in _FALSE for name in _names(argument))


def first_gguf(directory: Path) -> Path | None:
    """Return the .gguf file that llama.cpp's image serves from a directory, or None if there is none.

    It is the first in alphabetical order, and files of the directory precede those of its subdirectories.
    """
    for pattern in ("*.gguf", "*/*.gguf"):
        files = (file for file in directory.glob(pattern) if not file.relative_to(directory).as_posix().startswith("."))
        if (file := min((file for file in files if not file.name.startswith(".")), default=None)) is not None:
            return file
    return None


# -- conversions of values: they return None if the value has no effect, and raise ValueError if it is invalid ---------


_TEMPLATE = re.compile(r"\{[{%#]|/|\.jinja2?$")
_SGLANG_TOOLS = {
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4", "deepseekv41": "deepseek_v41", "glm": "glm45", "gpt-oss": "openai",
    "llama3": "llama3_json", "qwen": "hermes", "qwen25": "hermes", "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3", "interns1": "internlm", "hunyuan": "hunyuan_a13b", "muse": "muse_glimmer",
    "apertus2509": "apertus", "nanbeige": "qwen3_coder",
}  # fmt: skip
"""Maps names of tool call formats in SGLang (function_call_parser.py) to names here, where they differ."""

_SGLANG_REASONING = {
    "deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_v3", "deepseek-v4": "deepseek_v4",
    "deepseek-v41": "deepseek_v41", "gpt-oss": "openai_gptoss", "hunyuan": "hunyuan_a13b", "kimi": "auto",
    "qwen3-thinking": "qwen3", "minimax": "minimax_m2", "minimax-append-think": "minimax_m2_append_think",
    "minimax-m3": "minimax_m3", "nemotron_3": "nemotron_v3", "muse": "muse_glimmer", "dots": "qwen3",
    "nanbeige": "qwen3", "interns1": "qwen3", "gigachat35": "deepseek_r1",
}  # fmt: skip
"""Maps names of reasoning formats in SGLang (reasoning_parser.py) to names here, where they differ."""

_DEFAULTS = {"model": "auto", "openai": "vllm"}
_POOLINGS = ("mean", "cls", "last")


def _template(value: str) -> str:
    if not _TEMPLATE.search(value) or value.endswith(".json"):
        raise ValueError("it names a built-in template; write the path of a Jinja file, or omit it for the model's own")
    return value


def _lora_paths(value: str) -> str:
    if value.lstrip().startswith("{"):
        try:
            adapter = json.loads(value)
            return json.dumps({"name": adapter["lora_name"], "path": adapter["lora_path"]})
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError('must be {"lora_name": ..., "lora_path": ...}') from None
    if len(value.split()) > 1:
        raise ValueError("AWS's image passes it as one path; set OPTION_LORA_MODULES, which accepts several adapters")
    return value if "=" in value else f"{value}={value}"


def _json(value: str) -> str:
    try:
        number = float(value)
    except ValueError:
        raise ValueError("must be a number") from None
    return json.dumps(int(number) if number.is_integer() and re.fullmatch(r"[+-]?[0-9]+", value) else number)


def _unless(nothing: str, convert: Callable[[str], str] = str) -> Callable[[str], str | None]:
    return lambda value: None if value == nothing else convert(value)


_UNITS = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
}  # fmt: skip
"""Units of sizes in SGLang (utils/common.py, human_readable_int)."""


def _size(value: str) -> str:
    match = re.fullmatch(r"([0-9]{1,12})(\.[0-9]{1,12})?([kMGT]|[KMGT]i)?", value.strip())
    if match is None or (match[2] and not re.fullmatch("[kMGT]", match[3] or "")):
        return value
    return str(int(Decimal(match[1] + (match[2] or "")) * _UNITS[match[3] or ""]))


def _switch(value: str) -> str | None:
    if value not in ("on", "off", "auto"):
        raise ValueError("must be on, off or auto")
    return None if value == "auto" else json.dumps(value == "on")


def _reasoning_format(value: str) -> str | None:
    if value not in ("none", "auto", "deepseek", "deepseek-legacy"):
        raise ValueError("must be none, auto, deepseek or deepseek-legacy")
    if value == "deepseek-legacy":
        raise ValueError("reasoning is either in the text (none) or separate (auto)")
    return "none" if value == "none" else "auto"


def _pooling(value: str) -> str:
    if value == "rank":
        raise ValueError("set SM_LLAMA_CPP_RERANKING=true")
    if value not in _POOLINGS:
        raise ValueError(f"must be one of {', '.join(_POOLINGS)}")
    return value


def _default_source(value: str) -> str:
    if value not in _DEFAULTS:
        raise ValueError("must be model or openai")
    return _DEFAULTS[value]


def _is_on(value: str) -> bool:
    if value.lower() not in ("true", "on", "enabled", "1", *_FALSE):
        raise ValueError("must be true or false")
    return value.lower() not in _FALSE


def _mebibytes(value: str) -> str:
    if not is_digits(value) or value == "0":
        raise ValueError("must be a whole number of at least 1")
    return str(int(value) << 20)


def _norm(value: str) -> str:
    if value not in ("-1", "2"):
        raise ValueError("must be -1 (none) or 2 (the length is 1)")
    return json.dumps(value == "2")


def _budget(value: str) -> str | None:
    if value not in ("0", "-1"):
        raise ValueError("there is no default of the server; requests can set thinking_token_budget")
    return "false" if value == "0" else None


def _hub_file(value: str) -> str:
    if not value.lower().endswith(".gguf"):
        raise ValueError("name the file too, in SM_LLAMA_CPP_HF_FILE=NAME.gguf (llama-server itself takes Q4_K_M)")
    return value


CONVERSIONS: dict[str, Callable[[str], str | None]] = {
    "template": _template,
    "lora paths": _lora_paths,
    "sglang tools": lambda value: _SGLANG_TOOLS.get(value, value),
    "sglang reasoning": lambda value: _SGLANG_REASONING.get(value, value),
    "sampling defaults": _default_source,
    "unless -1": _unless("-1"),
    "unless 0": _unless("0"),
    "json": _json,
    "json unless -1": _unless("-1", _json),
    "text unless default": _unless("default", json.dumps),
    "size": _size,
    "size unless -1": _unless("-1", _size),
    "mebibytes": _mebibytes,
    "norm": _norm,
    "kv dtype": lambda value: "bfloat16" if value == "bf16" else value,
    "sglang model": lambda value: "vllm" if value == "sglang" else value,
    "grammar": lambda value: {"none": None, "llguidance": "guidance"}.get(value, value),
    "offload group": lambda value: "0" if value == "-1" else value,
    "more than one": lambda value: json.dumps(value != "1"),
    "on or off": _switch,
    "budget": _budget,
    "reasoning format": _reasoning_format,
    "pooling": _pooling,
    "inverted": lambda value: json.dumps(not _is_on(value)),
    "embedding": lambda value: "text-embedding" if _is_on(value) else None,
    "rerank": lambda value: "rerank" if _is_on(value) else None,
    "store": lambda value: "memory" if _is_on(value) else None,
    "hub file": _hub_file,
}
"""Functions that convert the value of a variable in images.json."""
