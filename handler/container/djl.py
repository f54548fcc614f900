"""Functions that prepare DJL Serving as the container's server: its model directory, files, command and environment."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from handler.config import user_files
from handler.config.config import Config
from handler.config.implied import java_engine
from handler.config.lmi_version import ASYNC_SINCE
from handler.config.loader import read_config
from handler.config.model_files import locate
from handler.config.options import ENTRY_POINTS
from handler.config.options.tables import BY_ROLLING_BATCH
from handler.config.sources import Setting, decode_properties, encode_properties, from_environment, from_file
from handler.config.user_files import defines_handle
from handler.container.arguments import ContainerArguments, ModelSource
from handler.core.errors import ConfigError

log = logging.getLogger("handler.container")

_NOT_LINKED = ("serving.properties", "requirements.txt")

# The default mode (docs/djl.md, Modes) is async mode if DJL Serving has it: Java does not batch then. `scheduler` is a
# synonym of `auto` that Java does not interpret.
_MODES = {"option.rolling_batch", "option.async_mode", "batch_size"}
_ASYNC, _ROLLING = ["option.async_mode=true", "option.rolling_batch=disable"], ["option.rolling_batch=scheduler"]

S5CMD = Path("/opt/djl/bin/s5cmd")
"""The program that Java uses, if it is installed, to download models from S3."""

_DRAFT = "option.speculative_draft_model"
_ENTRY = "option.entryPoint=handler.entry"
_STAND_IN = ["engine=Python", "option.task=pooling"]
"""Settings that replace DJL's own engine for embeddings. The exact task is read from the model's files."""

RETRIES = {"SERVING_RETRY_THRESHOLD": "10"}
"""Variable for the number of successive worker failures after which DJL Serving gives up on the model. Since 0.30, the
default is 0.
"""


def home(environ: Mapping[str, str]) -> Path:
    """Find the directory of DJL Serving, from `DJL_SERVING_HOME` or from `djl-serving` on PATH.

    Raises:
        ConfigError: if DJL Serving is not installed.
    """
    if directory := environ.get("DJL_SERVING_HOME"):
        path = Path(directory)
    else:
        program = shutil.which("djl-serving", path=environ.get("PATH"))
        path = Path(program).resolve().parent.parent if program else Path()
    if not (path / "bin" / "serving").is_file():
        raise ConfigError("LMI_FRONT=djl: DJL Serving is not installed in this image; set LMI_FRONT=embedded instead")
    return path


def version(directory: Path) -> tuple[int, ...]:
    """Return the version in the file name of DJL Serving's own jar, or () if there is no such jar."""
    for jar in sorted((directory / "lib").glob("serving-*.jar")):
        if match := re.match(r"serving-([0-9]+(?:\.[0-9]+)+)", jar.name):
            return tuple(int(part) for part in match[1].split("."))
    return ()


def make_model(
    arguments: ContainerArguments, source: ModelSource, environ: Mapping[str, str], target: Path, since: tuple[int, ...]
) -> str:
    """Make a model directory at `target`. SageMaker's directory is read-only, and lacks the settings that Java needs.

    The directory has links to the files of the model data, and a copy of serving.properties with the handler's lines
    added. The packages of requirements.txt are installed here and the file is omitted, because DJL would install
    them offline and without dependencies (`ai.djl.offline`).

    Args:
        since: the version of DJL Serving.

    Returns:
        The model's name.

    Raises:
        ConfigError: if an option is invalid or the model does not exist.
    """
    _link_files(source, target)
    file = target / "serving.properties"
    properties = _text(source.properties) if source.properties else ""
    lines = ["engine=Python", "minWorkers=1", "maxWorkers=1"]
    if not defines_handle(target / "model.py"):
        lines.append(_ENTRY)
    if source.model_id:
        lines.append(f"option.model_id={_model_id(source.model_id, target.parent / 'weights')}")
    written = _settings_of(source.properties, environ)
    if "option.entryPoint" in written and written["option.entryPoint"].value.strip().lower() in ENTRY_POINTS:
        properties = f"{properties}\n{_ENTRY}"  # otherwise LMI's own handler, which its image also has, would serve
    if (engine := java_engine(written)) is not None:  # this image may not have that engine
        properties = "\n".join([properties, *_STAND_IN, *([] if written.keys() & _MODES else _ROLLING)])
        log.info("engine=%s is passed to DJL Serving as %s", engine.value.strip(), ", ".join(_STAND_IN))
    _write(file, [*lines, properties, *arguments.options])
    config = read_config(properties=file, environ=environ, java=True).checked()
    mode: list[str] = []
    if not config.origins.keys() & _MODES:
        mode = _ASYNC if since >= ASYNC_SINCE and not config.of_tgi else _ROLLING  # async mode has no TGI format
    _write(file, [*lines, *mode, properties, *arguments.options, *_rolling_batch(config), *_batches(config)])
    _check(file, environ, asynchronous=mode == _ASYNC)
    if (packages := user_files.requirements_file(source.directory, is_enabled=config.install_requirements)) is not None:
        user_files.install(packages, environ)
    return config.name


def _link_files(source: ModelSource, target: Path) -> None:
    """Recreate the directory `target`, with links to the files of the model data."""
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for entry in source.directory.iterdir() if source.directory else ():
        if entry.name not in _NOT_LINKED:
            (target / entry.name).symlink_to(entry)


def _write(file: Path, lines: Sequence[str]) -> None:
    file.write_text(encode_properties("\n".join([*lines, ""])), encoding="ascii")


def _text(properties: Path) -> str:
    try:
        return decode_properties(properties.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {properties}: {error}") from None


def _settings_of(file: Path | None, environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the user's settings in the environment and serving.properties, by key."""
    settings = [*from_environment(environ), *(from_file(file) if file else ())]
    return {item.key: item for item in settings if isinstance(item, Setting)}


def _rolling_batch(config: Config) -> list[str]:
    """Return the lines that replace the user's option.rolling_batch with values that Java does not interpret.

    For a model with a config.json, DJL Serving's LmiConfigRecommender turns `auto` into dynamic batching. Java runs
    `trtllm` under MPI, which needs GPUs and mpirun. Version 0.28 does the same for `lmi-dist`.
    """
    mode = config.rolling_batch
    if "option.rolling_batch" not in config.origins or mode not in ("auto", "trtllm", "lmi-dist") or not config.engine:
        return []
    lines = [*_ROLLING, *([f"option.llm_engine={config.engine}"] if mode in BY_ROLLING_BATCH else [])]
    log.info("option.rolling_batch=%s is passed to DJL Serving as %s", mode, ", ".join(lines))
    return lines


def _batches(config: Config) -> list[str]:
    """Return the lines that make Java collect batches only for dynamic batching, and then also without a config.json.

    Java collects batches of `batch_size` in every mode, and fails them in all other modes.
    """
    if config.batch_size == 1:
        return []
    size, lines = config.batch_size, ["batch_size=1"]
    if config.rolling_batch == "disable" and not config.async_mode:
        engine = [] if config.llm_engine == "auto" else [f"option.llm_engine={config.llm_engine}"]
        lines = ["option.rolling_batch=disable", f"batch_size={size}", *engine]
    log.info("batch_size=%d (%s) is passed to DJL Serving as %s", size, config.where("batch_size"), ", ".join(lines))
    return lines


def make_configuration(target: Path, arguments: ContainerArguments) -> Path:
    """Write config.properties, which puts both of DJL's interfaces on SageMaker's port, as in LMI's images."""
    file = target / "config.properties"
    address = f"http://{arguments.host}:{arguments.port}"
    file.write_text(f"inference_address={address}\nmanagement_address={address}\n")
    return file


def command(directory: Path, configuration: Path, name: str, model: Path, *, gpu: bool) -> list[str]:
    """Return the command that serves the model.

    Without a GPU, the command selects device -1. DJL Serving would otherwise require GPU 0 for sessions and adapters.
    """
    engine = "Python" if gpu else "Python:-1"
    return [str(directory / "bin" / "serving"), "-f", str(configuration), "-m", f"{name}::{engine}=file:{model}"]


def environment(directory: Path, environ: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Return the environment of Java and its worker. The user's own values override our values.

    HF_MODEL_ID is omitted, because Java would load a second model from it. serving.properties already names the model.
    """
    server_home = directory if (directory / "plugins").is_dir() else scratch
    (server_home / "plugins").mkdir(exist_ok=True)  # Java needs the directory, even empty
    ours = {
        "DJL_CACHE_DIR": str(scratch / "djl"),
        "MODEL_SERVER_HOME": str(server_home),
        "PYTHON_EXECUTABLE": sys.executable,
        **RETRIES,
    }
    return {**ours, **{name: value for name, value in environ.items() if name != "HF_MODEL_ID"}}


def _model_id(model: str, weights: Path) -> str:
    """Return a model directory or a hub name, because DJL would mistake the path of a file for a hub name.

    If the model is a file, the directory is `weights`, with a link to the file.
    """
    if model != "demo" and not os.path.isabs(model):
        return model
    path = locate(model).path.resolve()
    if path.is_dir():
        return str(path)
    weights.mkdir(exist_ok=True)
    (weights / path.name).unlink(missing_ok=True)
    (weights / path.name).symlink_to(path)
    return str(weights)


def _check(file: Path, environ: Mapping[str, str], *, asynchronous: bool) -> None:
    """Check the options. If they name a model on S3, check that Java has a program to download it.

    Raises:
        ConfigError: if an option is invalid, or if a model is on S3 and neither s5cmd nor aws is installed.
    """
    # In async mode, Java gets `disable`, although the handler batches.
    rolling = [Setting("option.rolling_batch", "auto", "async mode")] if asynchronous else []
    config = read_config(properties=file, environ=environ, settings=rolling, java=True).checked()
    for warning in config.warnings:
        log.info("%s", warning)
    urls = {"option.model_id": config.model_id, _DRAFT: config.engine_options.get(_DRAFT.removeprefix("option."))}
    for key, url in urls.items():
        if url is None or not url.startswith("s3://"):
            continue
        if not S5CMD.is_file() and shutil.which("aws", path=environ.get("PATH")) is None:
            raise ConfigError(
                f"{key}={url}: DJL Serving needs {S5CMD} or aws to download it, and this image has neither; omit the "
                "option, and set the prefix as ModelDataSource, which SageMaker downloads"
            )
        log.info("%s=%s is downloaded by DJL Serving's Java side", key, url)
