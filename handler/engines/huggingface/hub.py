"""Models of the Hugging Face hub: their names, and their files in huggingface_hub's cache."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeGuard

from handler.config import model_files
from handler.config.options.option import beginning
from handler.core.errors import ConfigError
from handler.engines import downloads, s3
from handler.engines.base import EngineConfig

log = logging.getLogger("handler.engine")

OTHER_FORMATS = (
    "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.ot", "*.tflite", "*.gguf", "*.onnx", "*.onnx_data", "*.mlmodel",
    "original/*", "onnx/*", "openvino/*", "coreml/*",
)  # fmt: skip
"""Files of the same weights in formats that no engine here reads from a directory.

Mistral's `consolidated*.safetensors` is no such file: where it is, vLLM reads it in place of `model*.safetensors`.
"""

TORCH = ("pytorch_model*.bin",)
"""Weights of checkpoints from before safetensors."""

DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.xml")
"""Files of tokenizers, templates and configurations, of OpenVINO too: all but the weights."""

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*/?|(?!.*\.gguf$)\w[\w.-]*", re.ASCII)
_GGUF = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/([\w./-]+\.gguf)", re.ASCII)

_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
_SECRET = re.compile(r"\bhf_\w{8,}|(?<=Bearer )\S+|(?<=://)[^/\s@]+(?=@)")
"""Tokens, which a hub may repeat in its answer, and names with passwords in addresses."""


def is_hub_name(model_id: str | None) -> TypeGuard[str]:
    """Whether a name means a model of the hub: `owner/model`, or `model` of the first ones, that is no path here."""
    if model_id is None or model_id == model_files.DEMO or Path(model_id).exists():
        return False
    return _NAME.fullmatch(model_id) is not None


def is_fetched(model_id: str | None) -> bool:
    """Whether a start fetches the model before it reads its files.

    Raises:
        ConfigError: as `s3.check`.
    """
    if s3.is_url(model_id):
        s3.check(model_id)
        return True
    return is_hub_name(model_id)


def gguf_file(model_id: str | None) -> tuple[str, str] | None:
    """Return model and file of `owner/model/file.gguf`; None for any other name, and for a path that is here."""
    if model_id is None or Path(model_id).exists():
        return None
    # Two names and a file may also be a path of the user's whose file is missing.
    found = None if Path(model_id).parent.exists() else _GGUF.fullmatch(model_id)
    return None if found is None else (found[1], found[2])


def is_hub_reference(model_id: str | None) -> TypeGuard[str]:
    """Whether a name means a model of the hub: `owner/model`, or `owner/model/file.gguf`."""
    return is_hub_name(model_id) or gguf_file(model_id) is not None


def download_checkpoint(name: str, revision: str | None, *, torch: bool = True) -> Path:
    """Download a checkpoint, with weights of torch only where there are no safetensors, and `torch` can be read."""
    directory = download(name, revision, without=(*OTHER_FORMATS, *TORCH))
    return download(name, revision) if torch and not model_files.visible(directory, "*.safetensors") else directory


def download_descriptions(name: str, revision: str | None) -> Path:
    """Download all but the weights."""
    return download(name, revision, only=DESCRIPTIONS)


def download(
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
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_without_secrets)
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=None if only is None else list(only),
                ignore_patterns=list(without),
            )
        )
    except (json.JSONDecodeError, LookupError, TypeError, AttributeError) as error:  # of JSON that is not the hub's
        raise _cannot_fetch(name, f"HF_ENDPOINT does not answer as a hub does: {error!r}") from None
    # The base of its HTTP library's errors, those of connections and of the cache, and of wrong names.
    except (HTTPError, OSError, ValueError) as error:
        if (failed := _connection_error(error, HTTPError)) is not None:
            raise _cannot_fetch(name, f"it cannot be reached ({_ERRNO.sub('', str(failed))})") from None
        reason, cause = str(error), error.__cause__
        if isinstance(error, LocalEntryNotFoundError) and str(cause) not in reason:  # it does not name the status
            reason = f"{cause} {reason}"
        raise _cannot_fetch(name, reason) from None


def _connection_error(error: BaseException | None, kind: type[Exception]) -> BaseException | None:
    """Return the error of the HTTP library behind `error` that no answer caused; None where there is none."""
    while error is not None and not (isinstance(error, kind) and getattr(error, "response", None) is None):
        error = error.__cause__ or error.__context__
    return error


def _without_secrets(record: logging.LogRecord) -> bool:
    record.msg, record.args = _SECRET.sub("***", record.getMessage()), ()
    return True


def _cannot_fetch(name: str, reason: str) -> ConfigError:
    directory = name.rpartition("/")[2]
    reason = beginning(" ".join(_SECRET.sub("***", reason).split()))
    return ConfigError(
        f"there is no directory {name!r} here, and the model cannot be fetched from the hub: {reason}"
        f"{'' if reason.endswith('.') else '.'} "
        f"Where the hub can be reached, run: hf download {name} --local-dir {directory}; "
        f"then copy the directory, and run: lmi serve ./{directory}"
    )


Download = Callable[[str, "str | None"], Path]
"""Returns the directory or file of a hub's name in a revision; a function of a module, for another process calls it."""


def fetch(
    model_id: str | None,
    config: EngineConfig,
    download: Download = download_checkpoint,
    is_name: Callable[[str | None], TypeGuard[str]] = is_hub_name,
) -> str | None:
    """See `engines.fetch`. What is not in the cache is downloaded; of S3's models the files that `download` would take.

    Args:
        is_name: whether a name means a model of the hub.

    Raises:
        ConfigError: as `download` does; or the process ended before its end.
    """
    if s3.is_url(model_id):
        only = DESCRIPTIONS if download is download_descriptions else ()
        return downloads.fetch(s3.download, model_id, list(only))
    if not is_name(model_id):
        return model_id
    model_id = model_id.rstrip("/")  # which the hub does not take
    log.info("fetching %s from the hub, unless it is in the cache", model_id)
    return downloads.fetch(download, model_id, config.options.engine_options.get("revision"))


fetch_descriptions = partial(fetch, download=download_descriptions)
