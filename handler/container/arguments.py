"""The container's command line, environment variables and model, translated into the handler's own options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from handler.config.environment import model_path
from handler.config.implied import selected_engine
from handler.config.model_files import holds_model, model_below
from handler.config.options.names import SECRET, Own, contradiction, translate
from handler.config.options.option import redacted
from handler.config.sources import Setting, from_environment
from handler.core.errors import ConfigError
from handler.core.numbers import is_digits

_PORT = 8080
_BIND = "SAGEMAKER_BIND_TO_PORT"

_SAME = (("HF_MODEL_ID", "OPTION_MODEL_ID"), ("TENSOR_PARALLEL_DEGREE", "OPTION_TENSOR_PARALLEL_DEGREE"))
"""Pairs of variables that set the same option. If both are set, the handler uses the second variable of the pair."""


_OF_DJL_SERVING = {"-f": "--config-file", "-i": "--install", "-w": "--workflows"}
"""Flags of DJL Serving (its Arguments.java) that the container does not support."""


class ContainerArguments(NamedTuple):
    """The parsed command line of the container.

    Attributes:
        port: the port that SageMaker calls.
        options: options in the form `key=value`.
        host: the address to listen on.
        check: whether to check the configuration without starting a server.
    """

    port: int
    options: tuple[str, ...] = ()
    host: str = "0.0.0.0"
    check: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = message.startswith("unrecognized arguments")  # vLLM's and TGI's images accept options as flags
        raise ConfigError(f"{message}: set options with -o option.NAME=VALUE, or OPTION_NAME" if unknown else message)


def read_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> ContainerArguments:
    """Read the arguments that follow the image name.

    SageMaker passes `serve`. Users also pass `djl-serving`, only flags, or nothing.

    Raises:
        ConfigError: if a command, a flag or the port is invalid.
    """
    parser = _Parser(
        prog="serve",
        description="Serve the model in SageMaker's model data, or the model that the environment names.",
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?")
    parser.add_argument("--engine", help="option.llm_engine")
    parser.add_argument("--port", help=f"port to listen on (default: {_BIND}, or {_PORT} if it is not set)")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--check", action="store_true", help="only list every problem of the configuration")
    parser.add_argument("-m", "--models", nargs="+", default=[], help="DJL Serving's flag; must be the model directory")
    parser.add_argument("-s", "--model-store", help="DJL Serving's flag; must be the model directory")
    for short, name in _OF_DJL_SERVING.items():
        parser.add_argument(short, name, nargs="+", help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.command == "train":
        raise ConfigError("this image only serves models; it cannot `train` them")
    if flags.command not in (None, "serve", "djl-serving"):
        raise ConfigError(
            f"{flags.command!r} is not a command: run the image with `serve`, with flags, or without arguments; "
            "to run another program in it, use docker run --entrypoint"
        )
    engine = [f"option.llm_engine={flags.engine}"] if flags.engine else []
    name_of_model = _model_name(flags, environ)
    name, text = ("--port", flags.port) if flags.port is not None else (_BIND, environ.get(_BIND, str(_PORT)))
    if not is_digits(text) or len(text) > 5 or not 0 < int(text) < 65536:
        raise ConfigError(f"{name}={text}: must be a number from 1 to 65535")
    return ContainerArguments(
        int(text), (*engine, *flags.options, *name_of_model), environ.get("LMI_HOST") or "0.0.0.0", flags.check
    )


def _model_name(flags: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Return the option for the model name in DJL Serving's flags, which its image also accepts after `serve`.

    The flag for a model is `[NAME:VERSION:ENGINE:DEVICES]=URL`, or only a URL.

    Raises:
        ConfigError: if a flag names another directory or several models, or is supported only by DJL Serving.
    """
    for name in _OF_DJL_SERVING.values():
        if getattr(flags, name.strip("-").replace("-", "_")) is not None:
            raise ConfigError(f"{name}: only DJL Serving supports this flag; set OPTION_* or SERVING_* variables")
    home = str(model_path(environ))
    if len(flags.models) > 1:
        raise ConfigError(f"--models {' '.join(flags.models)}: this container serves one model")
    served = ""
    for model in flags.models:
        endpoint, _, url = model.rpartition("=")
        served = endpoint.strip("[]").partition(":")[0]
        _check_home("--models", model, url.removeprefix("file:").removeprefix("//"), home)
    if flags.model_store is not None:
        _check_home("--model-store", flags.model_store, flags.model_store, home)
    return [f"option.model_name={served}"] if served else []


def _check_home(flag: str, value: str, directory: str, home: str) -> None:
    if directory.rstrip("/") != home.rstrip("/"):
        raise ConfigError(f"{flag} {value}: the model is in {home}; set SAGEMAKER_MODEL_PATH, or OPTION_MODEL_ID")


class Translation(NamedTuple):
    """An environment with the handler's own variables, and a log line for each foreign variable that was translated."""

    environ: Mapping[str, str]
    lines: tuple[str, ...]


def translated_environment(environ: Mapping[str, str]) -> Translation:
    """Translate TGI's, Hugging Face's and AWS's variables, and add the handler's own variables to the environment.

    An empty value counts as unset. Variables that are refused or have no effect are passed on to the server, which
    reports them together with all other problems.

    Raises:
        ConfigError: if two of the handler's own variables set the same option to different values.
    """
    result = dict(environ)
    lines: list[str] = []
    settings = [item for item in from_environment(environ) if isinstance(item, Setting)]
    for item in translate(environ, selected_engine(settings, "")):
        if isinstance(item, Own):
            result[item.name] = item.value
            if item.name in SECRET:
                del result[item.foreign]  # DJL Serving logs every HF_* variable except HF_TOKEN
            lines.append(f"{item.foreign} is understood as {redacted(f'{item.name}={item.value}')}")
    pairs = [(weak, strong) for weak, strong in _SAME if result.get(weak) and result.get(strong)]
    if pairs := [(weak, strong) for weak, strong in pairs if result[weak] != result[strong]]:
        raise ConfigError(*(contradiction(weak, result[weak], strong, result[strong]) for weak, strong in pairs))
    return Translation(result, tuple(lines))


# -- the model: the one in /opt/ml/model, or else the one that the environment names -----------------------------------


_CHANNELS = "additional-model-data-sources"
DEFAULT = "LMI_DEFAULT_MODEL"
"""Variable that contains the path of a model inside the image. Images that include the demo model set it."""


class ModelSource(NamedTuple):
    """The model, and the directories that SageMaker has mounted.

    Attributes:
        directory: the read-only directory of SageMaker's model data, or None if it is empty.
        model_id: the value for option.model_id, or None if serving.properties in `directory` sets it or no model is
            needed.
        channels: the directories of the additional model data sources, by name.
    """

    directory: Path | None
    model_id: str | None
    channels: Mapping[str, Path]

    @property
    def properties(self) -> Path | None:
        file = self.directory and self.directory / "serving.properties"
        return file if file and file.is_file() else None


def find_model(environ: Mapping[str, str], *, needed: bool = True) -> ModelSource:
    """Find the model in SageMaker's model data, the environment or the image.

    Args:
        needed: whether the engine needs a model.

    Raises:
        ConfigError: if there is no model, if the model data and the configuration name different models, or if the
            model's path does not exist.
    """
    root = model_path(environ)
    channels = _channels(root.parent / _CHANNELS)
    name = environ.get("OPTION_MODEL_ID") or environ.get("HF_MODEL_ID")
    present = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
    directory = root if present else None
    if directory and holds_model(directory):
        if name and Path(name) != directory:
            raise ConfigError(
                f"{directory} contains a model, but the configuration names another model, {name}: remove one of "
                "the two (put additional models into additional model data sources)"
            )
        return ModelSource(directory, str(directory), channels)
    if name and directory and Path(name) == directory and (directory / "serving.properties").is_file():
        return ModelSource(directory, None, channels)
    if name:
        return ModelSource(directory, _check(name, directory, channels, environ), channels)
    if not needed or (directory and (directory / "serving.properties").is_file()):
        return ModelSource(directory, None, channels)
    if directory:
        raise ConfigError(
            f"{directory} contains no model: no config.json, openvino_model.xml, .gguf file or serving.properties, but "
            f"{', '.join(present[:8])}. If the model is in a subdirectory, set "
            f"OPTION_MODEL_ID={model_below(directory) or directory / 'NAME'}; archives inside the model data are not "
            "unpacked"
        )
    if file := _default_file(environ):
        return ModelSource(None, file, channels)
    raise ConfigError(f"there is no model: {root} has no files, and neither OPTION_MODEL_ID nor HF_MODEL_ID is set")


def _default_file(environ: Mapping[str, str]) -> str | None:
    """Return the path of the model inside the image, or None if the file that the variable names does not exist."""
    file = environ.get(DEFAULT)
    return file if file and Path(file).is_file() else None


def _channels(parent: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(parent.iterdir()) if path.is_dir()} if parent.is_dir() else {}


def _check(name: str, directory: Path | None, channels: Mapping[str, Path], environ: Mapping[str, str]) -> str:
    """Return the model's name or path, or raise ConfigError if it is an absolute path that does not exist."""
    if name == "demo":
        return _default_file(environ) or name
    if not os.path.isabs(name) or Path(name).exists():
        return name
    places = [str(path) for path in (directory, *channels.values()) if path]
    raise ConfigError(
        f"the configuration names the model {name}, which does not exist; SageMaker's model data: "
        f"{', '.join(places) or 'none'}"
    )
