"""Finds the container's model: in /opt/ml/model, else as the environment names it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from handler.config.environment import model_path
from handler.config.model_files import holds_model, model_below
from handler.core.errors import ConfigError

_CHANNELS = "additional-model-data-sources"
DEFAULT = "LMI_DEFAULT_MODEL"
"""Names a model in the image itself; images with the demo model set it."""


class ModelSource(NamedTuple):
    """The model and SageMaker's data.

    Attributes:
        directory: SageMaker's model data, read only; None where there are none.
        model_id: value of option.model_id; None where serving.properties in `directory` has it, or for no model.
        channels: directories of the additional model data sources, by name.
    """

    directory: Path | None
    model_id: str | None
    channels: Mapping[str, Path]

    @property
    def properties(self) -> Path | None:
        file = self.directory and self.directory / "serving.properties"
        return file if file and file.is_file() else None


def find_model(environ: Mapping[str, str], *, needed: bool = True) -> ModelSource:
    """Find the model.

    Args:
        needed: false for an engine without a model.

    Raises:
        ConfigError: there is no model, two places name different ones, or the path of one is missing.
    """
    root = model_path(environ)
    channels = _channels(root.parent / _CHANNELS)
    name = environ.get("OPTION_MODEL_ID") or environ.get("HF_MODEL_ID")
    present = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
    directory = root if present else None
    if directory and holds_model(directory):
        if name and Path(name) != directory:
            raise ConfigError(
                f"{directory} holds a model, and the environment names another, {name}: leave one of them out "
                "(additional models go into additional model data sources)"
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
            f"{directory} holds no model: no config.json, openvino_model.xml, .gguf file or serving.properties, but "
            f"{', '.join(present[:8])}. Where the model lies in a directory below, say "
            f"OPTION_MODEL_ID={model_below(directory) or directory / 'NAME'}; archives within the model data are not "
            "unpacked"
        )
    if own := _own(environ):
        return ModelSource(None, own, channels)
    raise ConfigError(f"there is no model: {root} is empty, and neither OPTION_MODEL_ID nor HF_MODEL_ID is set")


def _own(environ: Mapping[str, str]) -> str | None:
    """Path of the image's own model; the variable is also set in images without one."""
    own = environ.get(DEFAULT)
    return own if own and Path(own).is_file() else None


def _channels(parent: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(parent.iterdir()) if path.is_dir()} if parent.is_dir() else {}


def _check(name: str, directory: Path | None, channels: Mapping[str, Path], environ: Mapping[str, str]) -> str:
    """Check that a path exists; the engine looks up any other name."""
    if name == "demo":
        return _own(environ) or name
    if not os.path.isabs(name) or Path(name).exists():
        return name
    places = [str(path) for path in (directory, *channels.values()) if path]
    raise ConfigError(
        f"the environment names the model {name}, which is not there; SageMaker brought "
        f"{', '.join(places) or 'no model data'}"
    )
