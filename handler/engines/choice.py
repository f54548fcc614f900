"""Chooses the engine for a GGUF file: OpenVINO if it reads the file, and llama.cpp otherwise."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from handler.config import gguf, llama_server, model_files
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.config.options.tables import BY_ROLLING_BATCH
from handler.config.sources import Setting
from handler.core.errors import ConfigError
from handler.core.values import Task
from handler.engines import downloads, s3
from handler.engines.huggingface import files
from handler.engines.llamacpp import readable
from handler.engines.openvino.gguf import unreadable

log = logging.getLogger("handler.launch")

OPENVINO, LLAMACPP = "openvino", "llamacpp"
_KEY, _PROGRAM = "option.llm_engine", "option.llama_server"
_ONLY_TEXT = "is for {}, but OpenVINO reads GGUF files only for text generation"
_IN_PARTS = "is a model in {} parts, but OpenVINO reads only one file"


class Readers(NamedTuple):
    """Which engines read a GGUF file.

    Attributes:
        path: the file, or the first part of the model.
        reasons: why an engine does not read the file, by the engine's name; "" if it does.
    """

    path: Path
    reasons: dict[str, str]


def readers_of(config: Config) -> Readers | None:
    """Return which engines read the model, or None if it is no complete GGUF model on this machine."""
    path = model_files.find_gguf(config.model_id)
    if path is None:
        return None
    try:
        header = gguf.check_parts(path)
        task = model_files.find_task(config.task, path)
    except (ConfigError, OSError, ValueError):
        return None
    return Readers(path, reasons_of(header, task))


def reasons_of(header: gguf.Header, task: Task) -> dict[str, str]:
    """Return why OpenVINO and llama.cpp cannot read a GGUF file, by the names of the engines; "" if they can."""
    reason = unreadable(header)
    for_openvino = "" if reason is None else reason.text
    if header.num_parts > 1:
        for_openvino = _IN_PARTS.format(header.num_parts)
    elif task is not Task.GENERATION:
        for_openvino = _ONLY_TEXT.format(task.value)
    for_llamacpp = readable.unreadable(header)
    return {OPENVINO: for_openvino, LLAMACPP: for_llamacpp}


def engine_of(config: Config) -> Setting | None:
    """Return the engine that option.llm_engine=auto means for the model if it is not the default, or else None.

    llama.cpp serves a GGUF file that OpenVINO does not read, or any GGUF file if OpenVINO is not installed.
    """
    if not _is_open(config):
        return None
    if (readers := readers_of(config)) is None:
        return None
    return _choose(str(readers.path), readers.reasons)


def _is_open(config: Config) -> bool:
    """Return whether the options leave the choice to the model, and llama-server is on this machine."""
    is_auto = config.llm_engine == "auto" and config.rolling_batch not in BY_ROLLING_BATCH
    return is_auto and find_server(config) is not None


def _choose(name: str, reasons: Mapping[str, str]) -> Setting | None:
    """Return the setting that selects llama.cpp, with the reason as its origin, or None for OpenVINO.

    Args:
        name: the name of the model.
        reasons: the result of `reasons_of`.
    """
    reason = f"{name} {reasons[OPENVINO]}" if reasons[OPENVINO] else ""
    if not is_installed(OPENVINO):
        reason = reason or "OpenVINO is not installed"
    if not reason or reasons[LLAMACPP]:
        return None
    return Setting(_KEY, LLAMACPP, f"chosen, because {reason}")


def is_installed(name: str) -> bool:
    """Return whether the package of an engine is installed."""
    needs = ENGINES[name].needs
    return needs is None or importlib.util.find_spec(needs) is not None


def find_server(config: Config) -> str | None:
    """Return the path of llama-server, or None if it is not on this machine."""
    return llama_server.find(config.settings.get(_PROGRAM) or "")


# -- models that are not on this machine yet: their headers are read before the models are downloaded ------------------


_LONGEST = 1 << 26  # bytes of a header; the largest vocabularies take 16 MiB


def engine_of_remote(config: Config) -> Setting | None:
    """Return the engine for a GGUF file on the hub or on S3, as `engine_of` does. This reads the header of the file.

    Return None if the header cannot be read. The download will report the reason.
    """
    model_id = config.model_id or ""
    if not _is_open(config) or not (s3.is_url(model_id) or files.gguf_file(model_id)):
        return None
    try:
        reasons = json.loads(downloads.fetch(remote_reasons, model_id, config.settings.get("option.revision")))
    except ConfigError as error:
        log.info("the header of %s cannot be read, and is not used to choose the engine: %s", model_id, error)
        return None
    return None if not reasons else _choose(model_id, reasons)


def note(config: Config) -> str:
    """Return a note for `lmi serve --check` about a GGUF file on the hub whose header is not read yet, or ""."""
    if not _is_open(config) or not files.gguf_file(config.model_id):
        return ""
    return "the header of the file then decides whether openvino or llamacpp serves it"


def remote_reasons(model_id: str, revision: str | None) -> str:
    """Return the result of `reasons_of` for a GGUF model on the hub or on S3 as JSON; {} for any other model.

    Raises:
        ConfigError: the header cannot be read.
    """
    if (file := files.gguf_file(model_id)) is not None:
        with files.first_bytes(*file, revision, _LONGEST) as parts:
            headers = [_header(model_id, parts)]
    else:
        headers = [_header(name, parts) for name, parts in s3.first_bytes(model_id, _LONGEST)]
    models = [header for header in headers if header.is_model]
    return json.dumps(reasons_of(models[0], Task.GENERATION) if models else {})


def _header(name: str, parts: Iterable[bytes]) -> gguf.Header:
    """Read a header from the beginning of a file.

    Raises:
        ConfigError: the header is broken, or is longer than the parts.
    """
    data, tried = _Beginning(), 0
    data.name = name
    for part in chain(parts, [b""]):
        data.seek(0, io.SEEK_END)
        data.write(part)
        if part and data.tell() < 2 * tried:
            continue
        tried = data.tell()
        try:
            return gguf.read_header(data)
        except ValueError as error:
            if not part or tried >= _LONGEST:
                raise ConfigError(str(error)) from None
    raise ConfigError(f"{name} is empty")


class _Beginning(io.BytesIO):
    """The first bytes of a file, which contain its header. Errors contain its attribute `name`."""

    name = ""


def describe(config: Config) -> list[str]:
    """Return a line for each engine that could serve the model's GGUF file: whether it reads the file, or why not.

    Return no lines for other models, and if another engine is selected.
    """
    readers = readers_of(config) if config.engine in (OPENVINO, LLAMACPP) else None
    return [] if readers is None else [_line(name, readers, config) for name in readers.reasons]


def _line(name: str, readers: Readers, config: Config) -> str:
    if reason := readers.reasons[name]:
        return f"engine {name}: no, because {readers.path} {reason}"
    if name == LLAMACPP and (program := find_server(config)) is None:
        return f"engine {name}: reads {readers.path}, but {llama_server.missing(config.settings.get(_PROGRAM))}"
    if not is_installed(name):
        return f"engine {name}: reads {readers.path}, but it is not installed"
    return f"engine {name}: reads {readers.path}{f', with {program}' if name == LLAMACPP else ''}"
