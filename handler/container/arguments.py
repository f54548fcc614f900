"""Command line and environment of the container, translated into the handler's own options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from handler.config.loader import engine_name
from handler.core.errors import ConfigError

_PORT = 8080
_BIND = "SAGEMAKER_BIND_TO_PORT"

_ALIASES = {
    "HF_MODEL_QUANTIZE": "OPTION_QUANTIZE",
    "HF_MODEL_TRUST_REMOTE_CODE": "OPTION_TRUST_REMOTE_CODE",
    "HF_TRUST_REMOTE_CODE": "OPTION_TRUST_REMOTE_CODE",
    "SM_NUM_GPUS": "TENSOR_PARALLEL_DEGREE",
    "MAX_CONCURRENT_REQUESTS": "SERVING_JOB_QUEUE_SIZE",
    "MAX_BATCH_PREFILL_TOKENS": "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS",
    "MAX_BATCH_SIZE": "OPTION_MAX_ROLLING_BATCH_SIZE",
    "HUGGING_FACE_HUB_TOKEN": "HF_TOKEN",
    "HUGGINGFACE_HUB_TOKEN": "HF_TOKEN",
    "HF_API_TOKEN": "HF_TOKEN",
}

_MEMORY = {"trtllm": "OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION", "vllm": "OPTION_GPU_MEMORY_UTILIZATION"}

_WITHOUT_EFFECT = {
    "MAX_INPUT_LENGTH": "OPTION_MAX_INPUT_LEN (trtllm)",
    "MAX_INPUT_TOKENS": "OPTION_MAX_INPUT_LEN (trtllm)",
    "MAX_TOTAL_TOKENS": "OPTION_MAX_MODEL_LEN",
    "MAX_BATCH_TOTAL_TOKENS": "OPTION_KV_CACHE_GIB",
    "MAX_CLIENT_BATCH_SIZE": "SERVING_BATCH_SIZE",
}
"""TGI's names without effect, in LMI's image too, and the options nearest to them."""

_SAME = (("HF_MODEL_ID", "OPTION_MODEL_ID"), ("TENSOR_PARALLEL_DEGREE", "OPTION_TENSOR_PARALLEL_DEGREE"))
"""Pairs of names of one option, of which the handler would take the second."""

_SECRET = frozenset({"HF_TOKEN"})


class Arguments(NamedTuple):
    """Command line: `options` are texts `key=value`, `port` is the one that SageMaker calls."""

    port: int
    options: tuple[str, ...] = ()
    host: str = "0.0.0.0"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def read_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """Read the words after the image's name: SageMaker says `serve`, users also nothing or flags.

    Raises:
        ConfigError: a command, a flag or the port is wrong.
    """
    parser = _Parser(
        prog="serve",
        description="Serve the model of SageMaker's model data, or of the environment.",
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?")
    parser.add_argument("--engine", help="option.llm_engine")
    parser.add_argument("--port", help=f"by default {_BIND}, else {_PORT}")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="KEY=VALUE")
    flags = parser.parse_args(argv)
    if flags.command == "train":
        raise ConfigError("this image serves models; it has no `train`")
    if flags.command not in (None, "serve"):
        raise ConfigError(
            f"{flags.command!r} is no command: an image is run with `serve`, nothing, or flags of it; to run another "
            "program in it, use docker run --entrypoint"
        )
    engine = [f"option.llm_engine={flags.engine}"] if flags.engine else []
    name, text = ("--port", flags.port) if flags.port is not None else (_BIND, environ.get(_BIND, str(_PORT)))
    if not text.isdecimal() or len(text) > 5 or not 0 < int(text) < 65536:
        raise ConfigError(f"{name}={text}: must be a number from 1 to 65535")
    return Arguments(int(text), (*engine, *flags.options), environ.get("LMI_HOST") or "0.0.0.0")


class Translation(NamedTuple):
    """An environment in the handler's own names; `lines` are for the log, one a foreign name."""

    environ: Mapping[str, str]
    lines: tuple[str, ...]


def translate(environ: Mapping[str, str]) -> Translation:
    """Add the handler's own names for TGI's and SageMaker's, as LMI's image does; an empty value counts as unset.

    Raises:
        ConfigError: two names of one option have different values.
    """
    result = dict(environ)
    lines: list[str] = []
    for alias, name, value in _aliases(environ):
        _agree(alias, value, name, result.get(name))
        result[name] = value
        if name in _SECRET:
            del result[alias]  # DJL Serving's log shows HF_* but for HF_TOKEN
        lines.append(f"{alias} is understood as {name}{'' if name in _SECRET else '=' + value}")
    for weak, strong in _SAME:
        if result.get(weak):
            _agree(weak, result[weak], strong, result.get(strong))
    lines += [f"{name} has no effect here; see {to}" for name, to in _WITHOUT_EFFECT.items() if environ.get(name)]
    return Translation(result, tuple(lines))


def _aliases(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for alias, name in _ALIASES.items():
        if value := environ.get(alias):
            yield alias, name, value
    engine = engine_name(environ.get("OPTION_LLM_ENGINE", "auto"), environ.get("OPTION_ROLLING_BATCH", "auto"))
    if (value := environ.get("CUDA_MEMORY_FRACTION")) and engine in _MEMORY:
        yield "CUDA_MEMORY_FRACTION", _MEMORY[engine], value
    if value := environ.get("ENABLE_CUDA_GRAPHS"):
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"environment variable ENABLE_CUDA_GRAPHS={value}: must be true or false")
        if engine == "vllm":
            yield "ENABLE_CUDA_GRAPHS", "OPTION_ENFORCE_EAGER", "false" if value.lower() == "true" else "true"
        elif engine == "trtllm":
            yield "ENABLE_CUDA_GRAPHS", "OPTION_USE_CUDA_GRAPH", value.lower()


def _agree(first: str, value: str, second: str, second_value: str | None) -> None:
    if second_value and second_value != value:
        values = "" if {first, second} & _SECRET else f" ({value} and {second_value})"
        raise ConfigError(f"environment variables {first} and {second} contradict each other{values}: leave one out")
