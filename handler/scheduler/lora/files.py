"""Adapter directories: their names, and the checks of what PEFT writes into one."""

from __future__ import annotations

import json
import math
import re
import stat
import urllib.parse
from collections.abc import Iterable, Mapping
from pathlib import Path

from handler.core import text_files
from handler.core.errors import AdapterFailed, BadRequest, ConfigError, ServingError

_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._:@+=~-]{1,256}")
"""Names go into paths, headers and logs, so they hold no character that needs escaping there."""

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Files that PEFT's `save_pretrained` writes beside adapter_config.json."""

_OF_MACOS = "__MACOSX"  # beside the files of an archive that macOS has packed
_MAX_CONFIG = 1 << 20  # bytes of an adapter_config.json; PEFT writes about one thousand


def check_name(name: str) -> None:
    """Check an adapter's name.

    Raises:
        BadRequest: the name has a character that is not allowed, or a wrong length.
    """
    if not _NAME.fullmatch(name):
        raise BadRequest(f"name={name!r}: must be 1 to 256 letters, digits and . _ : @ + = ~ -, and not dots alone")


def adapter_path(src: str, base: Path | None) -> Path:
    """Find the directory that `src` names and check its files; a relative path begins at `base`.

    Raises:
        BadRequest: `src` is neither a path nor a file URL.
        AdapterFailed: the directory lacks adapter_config.json or the weights, or one of them is broken.
    """
    directory = _local(src, base)
    try:
        if not directory.is_dir():
            raise AdapterFailed(f"src={src}: there is no such directory")
        _check_config(src, directory / "adapter_config.json")
        weights = [file for name in _WEIGHTS if (file := directory / name).exists()]
        if not weights:
            raise AdapterFailed(f"src={src}: holds neither {' nor '.join(_WEIGHTS)}")
        for file in weights:  # check all: each engine opens another one
            _check_regular(src, file)
    except OSError as error:
        raise AdapterFailed(f"src={src}: cannot be read: {error.strerror or error}") from None
    return directory


def _local(src: str, base: Path | None) -> Path:
    if not src.isprintable():
        raise BadRequest(f"src={src!r}: must be a path")
    scheme, colon, _ = src.partition(":")
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        try:
            url = urllib.parse.urlsplit(src)
        except ValueError as error:
            raise BadRequest(f"src={src}: {error}") from None
        if url.scheme != "file" or url.netloc not in ("", "localhost") or url.query or url.fragment:
            raise BadRequest(f"src={src}: adapters are read from directories of this machine: a path, or file:///path")
        path = Path(urllib.parse.unquote(url.path))
        if not path.is_absolute():
            raise BadRequest(f"src={src}: a file URL has an absolute path: file:///path")
        return path
    path = Path(src)
    if path.is_absolute():
        return path
    if base is None:
        raise BadRequest(f"src={src}: must be an absolute path: the model has no directory that it could be in")
    return base / path


def _check_config(src: str, file: Path) -> None:
    try:
        _check_regular(src, file)
        with file.open("rb") as stream:
            content = stream.read(_MAX_CONFIG + 1)
        if len(content) > _MAX_CONFIG:
            raise AdapterFailed(f"src={src}: {file.name} has more than {_MAX_CONFIG} bytes")
        config = json.loads(text_files.decode(content, mark=False), parse_constant=_finite, parse_float=_finite)
    except FileNotFoundError:
        raise AdapterFailed(f"src={src}: holds no {file.name}") from None
    except RecursionError:
        raise AdapterFailed(f"src={src}: {file.name} is nested too deeply") from None
    except ValueError as error:
        raise AdapterFailed(f"src={src}: {file.name} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterFailed(f"src={src}: {file.name} is not that of a LoRA adapter: no JSON object")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        value = repr(kind[:80]) if isinstance(kind, str) else "no string"  # it may be anything, at any depth
        raise AdapterFailed(f"src={src}: {file.name} is not that of a LoRA adapter (peft_type: {value})")


def _check_regular(src: str, file: Path) -> None:
    """Check that a file is regular: reading a FIFO or a device may never end.

    Raises:
        AdapterFailed: the file is not regular.
        OSError: the file is missing, or its status cannot be read.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise AdapterFailed(f"src={src}: {file.name} is not a regular file")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a number in JSON")
    return value


def adapters_of(directory: Path) -> dict[str, Path]:
    """List the adapters in a directory by name: one subdirectory each, hidden ones left out.

    Raises:
        ConfigError: an adapter cannot be used; the message names it.
    """
    adapters = {}
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.name.startswith(".") and path.name != _OF_MACOS:
            try:
                check_name(path.name)
                adapters[path.name] = adapter_path(str(path.absolute()), None)
            except ServingError as error:
                raise ConfigError(f"the adapter {path.name} cannot be used: {error.message}") from None
    return adapters


def named_adapters(named: Mapping[str, str], base: Path | None) -> dict[str, Path]:
    """Find adapters by name and path; a relative path begins at `base`.

    Raises:
        ConfigError: an adapter cannot be used; the message names it.
    """
    adapters = {}
    for name, path in named.items():
        try:
            check_name(name)
            adapters[name] = adapter_path(path, base)
        except ServingError as error:
            raise ConfigError(f"option.lora_modules: the adapter {name} cannot be used: {error.message}") from None
    return adapters


def adapters_in(homes: Iterable[Path]) -> dict[str, Path]:
    """List the adapters of several directories by name, sorted.

    Raises:
        ConfigError: two have the same name.
    """
    adapters: dict[str, Path] = {}
    for home in homes:
        for name, path in adapters_of(home).items():
            if (other := adapters.setdefault(name, path)).resolve() != path.resolve():
                raise ConfigError(f"the adapter {name} is in two places: {other} and {path}")
    return dict(sorted(adapters.items()))
