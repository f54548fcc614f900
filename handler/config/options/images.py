"""Reads the variables of AWS's SGLang and llama.cpp images as their entry points do.

The entry points convert `SM_SGLANG_X_Y=V` and `SM_LLAMA_CPP_X_Y=V` to `--x-y V` for the server. llama-server itself
reads `LLAMA_ARG_*`, which arguments override. Source: aws/deep-learning-containers, scripts/docker/sglang and
scripts/docker/llama_cpp; llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from handler.config.options import VARIABLES_OF, Foreign
from handler.core.numbers import is_digits

SGLANG, LLAMA_CPP, LLAMA_ARG = "SM_SGLANG_", "SM_LLAMA_CPP_", "LLAMA_ARG_"

PREFIXES = (SGLANG, LLAMA_CPP, LLAMA_ARG)
"""Prefixes of the variables that these images, or the servers in them, read."""

MODEL_DIR = f"{LLAMA_CPP}MODEL_DIR"
"""Variable with the directory in which llama.cpp's image looks for a model."""

MODELS = frozenset(f"{prefix}{name}" for prefix in (LLAMA_CPP, LLAMA_ARG) for name in ("MODEL", "MODEL_DIR", "HF_REPO"))
"""Variables that name the model of llama.cpp's image. Without them, it serves the first file of its directory."""

_LINES = {**VARIABLES_OF["aws-sglang"], **VARIABLES_OF["aws-llama-cpp"]}
_FALSE = ("false", "off", "disabled", "0")  # common/arg.cpp, is_falsey
_SAME = "AWS's image omits a flag whose value is false; set {}=true"
_FIRST_LINE = "AWS's image reads only the first line of its value"
_OVERRIDDEN = "{} overrides it, as in llama-server"


def flags(environ: Mapping[str, str]) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the variables of the images with the values that their servers get, and remarks on changed values.

    As in the entry points, an empty value is a flag without a value, and `false` omits the flag.

    Args:
        environ: the environment.

    Returns:
        The values by name, without omitted flags, and pairs of a name and a remark.
    """
    values: dict[str, str] = {}
    remarks: list[tuple[str, str]] = []
    for name in sorted(name for name in environ if name.startswith(PREFIXES)):
        value = environ[name].partition("\n")[0]
        if value != environ[name]:
            remarks.append((name, _FIRST_LINE))
        if value.lower() == "false" and not name.startswith(LLAMA_ARG):
            if (opposite := _opposite(name)) in _LINES:
                remarks.append((name, _SAME.format(opposite)))
            continue
        values[name] = "true" if value.lower() in ("", "true") else value
    _drop_overridden(values, remarks)
    _join_repository(values)
    _divide_context(values)
    return values, remarks


def _opposite(name: str) -> str:
    """Return the variable of an image that turns off what a variable with one of its prefixes turns on."""
    prefix = SGLANG if name.startswith(SGLANG) else LLAMA_CPP
    return f"{prefix}NO_{re.sub(f'^({prefix}|{LLAMA_ARG})', '', name)}"


def as_argument(name: str, value: str, line: Foreign) -> tuple[Foreign, str]:
    """Return the line and the value for a variable of llama-server, where a false value means the opposite argument."""
    opposite = _LINES.get(_opposite(name)) if name.startswith(LLAMA_ARG) and value.lower() in _FALSE else None
    return (line, value) if opposite is None else (opposite, "true")


def _drop_overridden(values: dict[str, str], remarks: list[tuple[str, str]]) -> None:
    """Drop the variables of llama-server that an argument overrides."""
    arguments = {_setting(name): name for name in values if name.startswith(LLAMA_CPP)}
    for name in [name for name in values if name.startswith(LLAMA_ARG) and _setting(name)]:
        argument = arguments.get(_setting(name))
        if argument is not None:
            if values[name] != values[argument]:
                remarks.append((name, _OVERRIDDEN.format(argument)))
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


def _divide_context(values: dict[str, str]) -> None:
    """Divide the context by the number of slots, as llama-server does unless the slots share one KV cache."""
    context = next((name for name in (f"{LLAMA_CPP}CTX_SIZE", f"{LLAMA_ARG}CTX_SIZE") if name in values), "")
    slots = values.get(f"{LLAMA_CPP}PARALLEL") or values.get(f"{LLAMA_ARG}N_PARALLEL") or ""
    shared = {f"{LLAMA_CPP}KV_UNIFIED", f"{LLAMA_ARG}KV_UNIFIED"} & values.keys()
    if context and not shared and is_digits(slots) and is_digits(values[context]) and int(slots) > 1:
        values[context] = str(int(values[context]) // int(slots))


def first_of(environ: Mapping[str, str]) -> str:
    """Return the first variable of llama.cpp's image, or "" if there is none."""
    return min((name for name in environ if name.startswith(LLAMA_CPP)), default="")


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
    "text": json.dumps,
    "on or off": _switch,
    "budget": lambda value: "false" if value == "0" else None,
    "reasoning format": _reasoning_format,
    "pooling": _pooling,
    "inverted": lambda value: json.dumps(not _is_on(value)),
    "embedding": lambda value: "text-embedding" if _is_on(value) else None,
    "rerank": lambda value: "rerank" if _is_on(value) else None,
    "store": lambda value: "memory" if _is_on(value) else None,
    "hub file": _hub_file,
}
"""Functions that convert the value of a variable in images.json."""
