"""Which model a container serves: /opt/ml/model where it holds one, else what the environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from handler.core.errors import ConfigError

_MARKS = ("config.json", "openvino_model.xml")
_CHANNELS = "additional-model-data-sources"
DEFAULT = "LMI_DEFAULT_MODEL"
"""Names a model in the image itself; the images that carry the demo model set it."""


class Found(NamedTuple):
    """Where the model is, and what SageMaker laid beside it.

    Attributes:
        directory: SageMaker's model data, read only; None where it brought none.
        model_id: as option.model_id takes it; None: serving.properties in `directory` says it.
        channels: the additional model data sources by name.
    """

    directory: Path | None
    model_id: str | None
    channels: Mapping[str, Path]

    @property
    def properties(self) -> Path | None:
        file = self.directory and self.directory / "serving.properties"
        return file if file and file.is_file() else None


def find_model(environ: Mapping[str, str], *, needed: bool = True) -> Found:
    """
    Args:
        needed: false for an engine that has no model.

    Raises:
        ConfigError: there is no model, two places name different ones, or what is named is not there.
    """
    root = Path(environ.get("SAGEMAKER_MODEL_PATH") or "/opt/ml/model")
    channels = _channels(root.parent / _CHANNELS)
    named = environ.get("OPTION_MODEL_ID") or environ.get("HF_MODEL_ID")
    present = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
    directory = root if present else None
    if directory and _holds_model(directory):
        if named and Path(named) != directory:
            raise ConfigError(
                f"{directory} holds a model, and the environment names another, {named}: leave one of them out "
                "(additional models go into additional model data sources)"
            )
        return Found(directory, str(directory), channels)
    if named:
        return Found(directory, _known(named, directory, channels, environ), channels)
    if not needed or (directory and (directory / "serving.properties").is_file()):
        return Found(directory, None, channels)
    if directory:
        raise ConfigError(
            f"{directory} holds no model: no config.json, openvino_model.xml, .gguf file or serving.properties, but "
            f"{', '.join(present[:8])}. Where the model lies in a directory below, say "
            f"OPTION_MODEL_ID={directory}/NAME; archives within the model data are not unpacked"
        )
    if own := _own(environ):
        return Found(None, own, channels)
    raise ConfigError(f"there is no model: {root} is empty, and neither OPTION_MODEL_ID nor HF_MODEL_ID is set")


def _holds_model(directory: Path) -> bool:
    return any((directory / mark).is_file() for mark in _MARKS) or any(directory.glob("*.gguf"))


def _own(environ: Mapping[str, str]) -> str | None:
    """The model in the image; the variable is there in images that were built without it too."""
    own = environ.get(DEFAULT)
    return own if own and Path(own).is_file() else None


def _channels(parent: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(parent.iterdir()) if path.is_dir()} if parent.is_dir() else {}


def _known(named: str, directory: Path | None, channels: Mapping[str, Path], environ: Mapping[str, str]) -> str:
    """A path must be there; any other name is the engine's to find."""
    if named == "demo":
        return _own(environ) or named
    if not os.path.isabs(named) or Path(named).exists():
        return named
    places = [str(path) for path in (directory, *channels.values()) if path]
    raise ConfigError(
        f"the environment names the model {named}, which is not there; SageMaker brought "
        f"{', '.join(places) or 'no model data'}"
    )
