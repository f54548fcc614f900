"""Models of the Hugging Face hub: their names, and their files in huggingface_hub's cache."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from handler.core.errors import ConfigError

log = logging.getLogger("handler.engine")

OTHER_FORMATS = ("*.pth", "*.msgpack", "*.h5", "*.gguf", "*.onnx", "original/*")
"""Files of the same weights in formats that no engine here reads from a directory."""

DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.xml")
"""Files of tokenizers, templates and configurations, of OpenVINO too: all but the weights."""

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_GGUF = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/([\w./-]+\.gguf)", re.ASCII)


def is_hub_name(model_id: str | None) -> bool:
    """Whether a name means a model of the hub: `owner/model` that is no path here."""
    return model_id is not None and not Path(model_id).exists() and _NAME.fullmatch(model_id) is not None


def gguf_file(model_id: str | None) -> tuple[str, str] | None:
    """Return model and file of `owner/model/file.gguf`; None for any other name, and for a path that is here."""
    if model_id is None or Path(model_id).exists():
        return None
    # Two names and a file may also be a path of the user's whose file is missing.
    found = None if Path(model_id).parent.exists() else _GGUF.fullmatch(model_id)
    return None if found is None else (found[1], found[2])


def fetch(
    name: str, revision: str | None, *, only: Sequence[str] | None = None, without: Sequence[str] = OTHER_FORMATS
) -> Path:
    """Return the directory of a hub's model; fetch what is not in the cache of huggingface_hub.

    Args:
        revision: branch, tag or commit; None is the main branch.
        only: patterns of the files to fetch; None is all of them.
        without: patterns of those to leave out.

    Raises:
        ConfigError: the hub does not have it, or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    if only is None:
        log.info("fetching %s from the hub, unless it is in the cache", name)
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=None if only is None else list(only),
                ignore_patterns=list(without),
            )
        )
    # The base of its HTTP library's errors, those of connections and of the cache, and of wrong names.
    except (HTTPError, OSError, ValueError) as error:
        directory = name.partition("/")[2]
        raise ConfigError(
            f"there is no directory {name!r} here, and the model cannot be fetched from the hub: {error} "
            f"Where the hub can be reached, run: hf download {name} --local-dir {directory}; "
            f"then copy the directory, and run: lmi serve ./{directory}"
        ) from None
