"""DJL Serving as the container's process: a model directory and a configuration made for it, and how it is started."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from handler.config.loader import BY_ROLLING_BATCH, Config, Setting, load_config
from handler.config.model_files import locate
from handler.container.arguments import Arguments
from handler.container.model import Found
from handler.core.errors import ConfigError

log = logging.getLogger("handler.container")

_NOT_LINKED = ("serving.properties", "requirements.txt")

# Where nobody names a mode (docs/djl.md, Modes): the one in which Java batches nothing, if it has it. `scheduler` is
# `auto` in a word that Java leaves alone.
_MODES = {"option.rolling_batch", "option.async_mode", "batch_size"}
_ASYNC, _ROLLING = ["option.async_mode=true", "option.rolling_batch=disable"], ["option.rolling_batch=scheduler"]
_ASYNC_SINCE = (0, 31)

RETRIES = {"SERVING_RETRY_THRESHOLD": "10"}
"""Deaths of the worker after which DJL Serving gives the model up. It counts them all; 0.30 and later allow none."""


def home(environ: Mapping[str, str]) -> Path:
    """Where DJL Serving is: `DJL_SERVING_HOME`, else the home of the `djl-serving` on PATH.

    Raises:
        ConfigError: this image has none.
    """
    if named := environ.get("DJL_SERVING_HOME"):
        found = Path(named)
    else:
        program = shutil.which("djl-serving", path=environ.get("PATH"))
        found = Path(program).resolve().parent.parent if program else Path()
    if not (found / "bin" / "serving").is_file():
        raise ConfigError("LMI_FRONT=djl: there is no DJL Serving in this image; LMI_FRONT=embedded needs none")
    return found


def version(directory: Path) -> tuple[int, ...]:
    """From the name of DJL Serving's own jar; () where it has none."""
    for jar in sorted((directory / "lib").glob("serving-*.jar")):
        if found := re.match(r"serving-(\d+(?:\.\d+)+)", jar.name):
            return tuple(int(part) for part in found[1].split("."))
    return ()


def make_model(
    arguments: Arguments, found: Found, environ: Mapping[str, str], target: Path, since: tuple[int, ...]
) -> str:
    """Lay out a model directory of our own at `target`: the model's may not be written, and Java wants ours in it.

    What SageMaker brought is linked, its serving.properties is taken over line by line. A requirements.txt is left
    out, as DJL would install it at every start.

    Args:
        since: DJL Serving's version.

    Returns:
        The name that the model is served under.

    Raises:
        ConfigError: an option is wrong, or there is no such model; better said now than by Java.
    """
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    files = {entry.name: entry for entry in sorted(found.directory.iterdir())} if found.directory else {}
    if "requirements.txt" in files:
        log.warning("%s is not installed: build what it names into the image", files["requirements.txt"])
    for name, entry in files.items():
        if name not in _NOT_LINKED:
            (target / name).symlink_to(entry)
    written = target / "serving.properties"
    own = found.properties.read_text(encoding="utf-8") if found.properties else ""
    lines = ["engine=Python", "minWorkers=1", "maxWorkers=1"]
    if "model.py" not in files:
        lines.append("option.entryPoint=handler.entry")
    if found.model_id:
        lines.append(f"option.model_id={_model_id(found.model_id, target.parent / 'weights')}")
    written.write_text("\n".join([*lines, own, *arguments.options, ""]), encoding="utf-8")
    given = load_config(properties=written, environ=environ, java=True)
    mode: list[str] = []
    if not given.origins.keys() & _MODES:
        mode = _ASYNC if since >= _ASYNC_SINCE else _ROLLING
    written.write_text("\n".join([*lines, *mode, own, *arguments.options, *_kept(given), ""]), encoding="utf-8")
    return _checked(written, environ, asynchronous=mode == _ASYNC)


def _kept(given: Config) -> list[str]:
    """The user's rolling batch in words that Java leaves alone.

    For a model with a config.json, DJL Serving's LmiConfigRecommender makes dynamic batching of `auto`, and starts
    `trtllm` under MPI, which needs GPUs and mpirun; 0.28 does the latter for `lmi-dist` too.
    """
    mode = given.rolling_batch
    if "option.rolling_batch" not in given.origins or mode not in ("auto", "trtllm", "lmi-dist") or not given.engine:
        return []
    lines = [*_ROLLING, *([f"option.llm_engine={given.engine}"] if mode in BY_ROLLING_BATCH else [])]
    log.info("option.rolling_batch=%s is handed to DJL Serving as %s", mode, ", ".join(lines))
    return lines


def make_configuration(target: Path, arguments: Arguments) -> Path:
    """config.properties: both of DJL's interfaces on SageMaker's port, as in LMI's images."""
    file = target / "config.properties"
    address = f"http://{arguments.host}:{arguments.port}"
    file.write_text(f"inference_address={address}\nmanagement_address={address}\n")
    return file


def command(directory: Path, configuration: Path, name: str, model: Path) -> list[str]:
    return [str(directory / "bin" / "serving"), "-f", str(configuration), "-m", f"{name}::Python=file:{model}"]


def environment(directory: Path, environ: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """What Java and its worker are started with.

    What the user has set counts. HF_MODEL_ID is left out: Java would make a second model of it, and our
    serving.properties has it already.
    """
    server_home = directory if (directory / "plugins").is_dir() else scratch
    (server_home / "plugins").mkdir(exist_ok=True)  # Java wants the directory there, be it empty
    ours = {
        "DJL_CACHE_DIR": str(scratch / "djl"),
        "MODEL_SERVER_HOME": str(server_home),
        "PYTHON_EXECUTABLE": sys.executable,
        **RETRIES,
    }
    return {**ours, **{name: value for name, value in environ.items() if name != "HF_MODEL_ID"}}


def _model_id(model: str, weights: Path) -> str:
    """A directory, or a name on the hub; a file is linked into a directory, for DJL takes other names for the hub's."""
    if model != "demo" and not os.path.isabs(model):
        return model
    path = locate(model).path.resolve()
    if path.is_dir():
        return str(path)
    weights.mkdir(exist_ok=True)
    (weights / path.name).unlink(missing_ok=True)
    (weights / path.name).symlink_to(path)
    return str(weights)


def _checked(file: Path, environ: Mapping[str, str], *, asynchronous: bool) -> str:
    # In async mode `disable` is said to Java; the handler batches all the same.
    rolling = [Setting("option.rolling_batch", "auto", "async mode")] if asynchronous else []
    config = load_config(properties=file, environ=environ, settings=rolling, java=True)
    for warning in config.warnings:
        log.info("%s", warning)
    return config.model_name
