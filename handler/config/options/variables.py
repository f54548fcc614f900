"""Environment variables of TGI, Hugging Face and AWS's vLLM image, translated into the handler's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from handler.config.options import KNOWN
from handler.config.options.foreign import VARIABLES_OF
from handler.config.options.option import is_secret, read_json, shown
from handler.core.errors import Problem

SM_VLLM = "SM_VLLM_"
"""AWS's vLLM image makes `SM_VLLM_X_Y=V` into `--x-y V` (aws/deep-learning-containers, sagemaker_args.py)."""


class Own(NamedTuple):
    """A variable of the handler's with the value that a foreign one gives it."""

    foreign: str
    name: str
    value: str


class Note(NamedTuple):
    """A foreign variable without effect here."""

    foreign: str
    message: str


VARIABLES = {name: line for names in VARIABLES_OF.values() for name, line in names.items()}
"""By name; foreign.json has them."""

SECRET = frozenset({"HF_TOKEN"})

ALONG: Mapping[str, str] = {"OPTION_LLM_ENGINE": "vllm", "OPTION_OPENAI_COMPAT": "true"}
"""What each `SM_VLLM_*` sets beside its own option: the engine, and its /invocations, vLLM's /v1/chat/completions."""


def _truth(value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise ValueError("must be true or false")
    return value.lower() in ("true", "1")


def _graphs(value: str, engine: str) -> str:
    if value.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    on = value.lower() == "true"
    return json.dumps(not on if engine == "vllm" else on)


def _graph_sizes(value: str, engine: str) -> str | None:
    sizes = [int(size) for size in value.split(",")]
    return None if sizes == [0] else json.dumps(sizes)


_CONVERSIONS: dict[str, Callable[[str, str], str | None]] = {
    "": lambda value, engine: value,
    "boolean": lambda value, engine: json.dumps(_truth(value)),
    "shards": lambda value, engine: "max" if _truth(value) else "1",
    "fp8": lambda value, engine: value.replace("e4m3fn", "e4m3"),
    "graphs": _graphs,
    "graph sizes": _graph_sizes,
}
"""Make the handler's value of a foreign one for an engine; ValueError for a wrong one. None: nothing is to be set."""


def hub_token(environ: Mapping[str, str]) -> str | None:
    """Return the token for the Hugging Face hub from the first variable that has one, HF_TOKEN first."""
    names = ["HF_TOKEN", *(name for name, variable in VARIABLES.items() if variable.same == "HF_TOKEN")]
    return next((value for name in names if (value := environ.get(name))), None)


def translate(environ: Mapping[str, str], engine: str) -> Iterator[Own | Note | Problem]:
    """Translate foreign variables; an empty value counts as unset. Two values of one own variable are a problem.

    Args:
        engine: the one that options name; "" where they name none, which `SM_VLLM_*` then do.
    """
    given = {name: (name, value) for name, value in environ.items() if value}
    for item in (*_of_vllms_image(environ, engine), *_of_tables(environ, engine)):
        if isinstance(item, Own):
            first, value = given.setdefault(item.name, (item.foreign, item.value))
            if value != item.value:
                yield contradiction(item.foreign, item.value, first, value)
                continue
        yield item


def _of_tables(environ: Mapping[str, str], engine: str) -> Iterator[Own | Note | Problem]:
    for name, variable in VARIABLES.items():
        value = environ.get(name)
        if not value or variable.unread or variable.heeded:
            continue
        try:
            if variable.refused and value.lower() not in variable.unless:
                raise ValueError(variable.refused)
            made = _CONVERSIONS[variable.convert](value, engine)
        except ValueError as error:
            yield Problem(f"environment variable {name}", name, f"{shown(f'{name}={value}')}: {error}")
            continue
        if (own := variable.own(engine)) and made is not None:
            yield Own(name, own, made)
        elif not variable.refused:
            yield Note(name, variable.idle)


def contradiction(first: str, value: str, second: str, other: str) -> Problem:
    """Two variables of one option have two values; those of secrets are not shown."""
    secret = is_secret(f"{first}={value}") or is_secret(f"{second}={other}")
    values = "" if secret else f" ({value} and {other})"
    return Problem(
        "", first, f"environment variables {first} and {second} contradict each other{values}: leave one out"
    )


def _of_vllms_image(environ: Mapping[str, str], engine: str) -> Iterator[Own]:
    names = sorted(name for name in environ if name.startswith(SM_VLLM))
    owns = [of_vllms_variable(name, environ[name]) for name in names]
    given = {item.name for item in owns} | ({"OPTION_LLM_ENGINE"} if engine else set())
    if names:
        for name, value in ALONG.items():
            if name not in given and not environ.get(name):
                yield Own(names[0], name, value)
    yield from owns


def of_vllms_variable(name: str, value: str) -> Own:
    """Return the variable of the handler's that one of AWS's vLLM image stands for."""
    key, value = name.removeprefix(SM_VLLM).lower(), value or "true"
    if key.startswith("no_") and f"option.{key}" not in KNOWN and value.lower() in ("true", "false"):
        key, value = key.removeprefix("no_"), json.dumps(value.lower() == "false")
    for option in KNOWN.get(f"option.{key}", ()):
        if not option.engines or "vllm" in option.engines:
            key, value = option.key.removeprefix("option."), _joined(value)
    return Own(name, f"OPTION_{key.upper()}", value)


def _joined(value: str) -> str:
    """Write a JSON array of texts as our own options take it, separated by commas."""
    try:
        found = read_json(value) if value.startswith("[") else None
    except ValueError:
        return value
    return ",".join(found) if found and all(isinstance(one, str) for one in found) else value
