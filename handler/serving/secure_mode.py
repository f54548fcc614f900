"""SageMaker's secure mode, whose controls forbid what can run code of a model's publisher.

Variables and controls are those of DJL Serving's plugin `secure-mode` (0.28 to 0.36). Its rules also apply to files and
options of this server that have the same effect.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from handler.config import environment, gguf
from handler.config.config import Config
from handler.config.model_files import read_json
from handler.config.options import ENTRY_POINTS
from handler.core.errors import ConfigError, Problem, refuse

_CONTROLS, _CHANNELS = "SAGEMAKER_SECURITY_CONTROLS", "SAGEMAKER_UNTRUSTED_CHANNELS"

_SCRIPTS, _REQUIREMENTS = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS", "DISALLOW_REQUIREMENTS_TXT"
_REMOTE_CODE, _PICKLE, _TEMPLATE = "DISALLOW_TRUST_REMOTE_CODE", "DISALLOW_PICKLE_FILES", "DISALLOW_CHAT_TEMPLATE"

_PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)", re.IGNORECASE | re.DOTALL)
_NO = frozenset(("none", "", "false", "f", "no", "n", "off", "0"))
"""Values of an option or an engine's argument that is off. Python and pydantic read any other as true, or refuse it."""
_WITH_TEMPLATES = ("tokenizer_config.json", "processor_config.json", "chat_template.json")
"""JSON files whose member `chat_template` is a template."""


def controls() -> frozenset[str]:
    """Return the controls of secure mode, or none if secure mode is off.

    Raises:
        ConfigError: secure mode is on, but its controls are missing, or one of them is unknown.
    """
    if not environment.secure_mode():
        return frozenset()
    names = [name.strip() for name in os.environ.get(_CONTROLS, "").split(",")]
    if not any(names):
        raise ConfigError(f"{environment.SECURE_MODE}=true needs {_CONTROLS}, which is not set")
    refuse(
        f"{_CONTROLS}: this release does not know the control {name!r}, and so cannot honor it"
        for name in names
        if name and name not in _FORBIDDEN
    )
    return frozenset(filter(None, names))


def check_secure_mode(config: Config, home: Path | None, files: Iterable[Path]) -> None:
    """Check the options and files against the controls of secure mode.

    Args:
        home: directory of model.py, or None if there is none.
        files: existing Python files of the user.

    Raises:
        ConfigError: a control forbids an option or a file. The error lists all of them.
    """
    names = controls()
    problems = [_problem(name, what) for name in sorted(names) for what in _FORBIDDEN[name](config, home)]
    refuse([*(_problem(_SCRIPTS, str(file)) for file in files if _SCRIPTS in names), *problems])


def adapter_problem(path: Path) -> str:
    """Return what the controls of secure mode forbid in an adapter's directory, or "".

    Raises:
        ConfigError: the controls are invalid.
    """
    found = (_problem(name, what) for name in sorted(controls()) for what in _of_adapter(name, path))
    return next((problem.message for problem in found), "")


def _problem(control: str, what: str) -> Problem:
    return Problem("", control, f"{what}: {control} ({_CONTROLS}) forbids it")


def _of_adapter(control: str, path: Path) -> Iterator[str]:
    files = {_SCRIPTS: "model.py", _REQUIREMENTS: "requirements.txt"}
    if control in files and (path / files[control]).is_file():
        yield str(path / files[control])
    if control == _PICKLE:
        yield from map(str, filter(_is_pickle, _files(path)))


def _scripts(config: Config, home: Path | None) -> Iterator[str]:
    entry = config.settings.get("option.entryPoint", "").strip()
    if entry and entry.lower() not in ENTRY_POINTS and not entry.startswith(("djl_python.", "handler.entry")):
        yield f"option.entryPoint={entry}"
    yield from (f"environment variable {name}={value}" for name, value in environment.custom_code().items())
    if config.tool_parser_plugin:
        yield f"option.tool_parser_plugin={config.tool_parser_plugin}"
    if config.engine_options.get("adapters_code"):
        yield "option.adapters_code=true"


def _requirements(config: Config, home: Path | None) -> Iterator[str]:
    if home is not None and (file := home / "requirements.txt").is_file():
        yield str(file)


def _remote_code(config: Config, home: Path | None) -> Iterator[str]:
    options = config.engine_options
    sources = (
        options,
        options.get("engine_args", {}),
        {"trust_remote_code": config.settings.get("option.trust_remote_code")},
    )
    if not _NO.issuperset(str(source.get("trust_remote_code")).strip().lower() for source in sources):
        yield "option.trust_remote_code=true"


def _pickles(config: Config, home: Path | None) -> Iterator[str]:
    is_weights = functools.partial(_is_pickle, of_openvino=config.engine == "openvino")
    yield from map(str, filter(is_weights, _in_channels(config, home)))


def _is_pickle(path: Path, *, of_openvino: bool = False) -> bool:
    """Return whether a file has a name of Python's pickles. OpenVINO's weights are not, despite their name."""
    if not _PICKLES.fullmatch(path.name):
        return False
    return not (of_openvino and path.suffix == ".bin" and path.with_suffix(".xml").is_file())


def _templates(config: Config, home: Path | None) -> Iterator[str]:
    if config.chat_template:
        yield "option.chat_template"
    yield from map(str, filter(_has_template, _in_channels(config, home)))


def _has_template(path: Path) -> bool:
    if gguf.is_gguf_name(path):
        return b"tokenizer.chat_template" in gguf.read_values(path)
    return path.suffix == ".jinja" or (path.name in _WITH_TEMPLATES and "chat_template" in read_json(path))


_FORBIDDEN: Mapping[str, Callable[[Config, Path | None], Iterator[str]]] = {
    _SCRIPTS: _scripts,
    _REQUIREMENTS: _requirements,
    _REMOTE_CODE: _remote_code,
    _PICKLE: _pickles,
    _TEMPLATE: _templates,
}
"""Maps each control to a function that names what it forbids in a configuration and its model.py directory."""


def _in_channels(config: Config, home: Path | None) -> Iterator[Path]:
    """Yield the files in the untrusted channels. By default, these are the directories of the model.

    Raises:
        ConfigError: a channel is not a directory.
    """
    channels = [Path(name.strip()) for name in os.environ.get(_CHANNELS, "").split(",") if name.strip()]
    refuse(f"{_CHANNELS}: {path} is not a directory" for path in channels if not path.is_dir())
    own = [home, environment.model_path(), Path(config.model_id or "/dev/null")]
    for path in dict.fromkeys(channels or filter(None, own)):
        yield from [path] if path.is_file() else _files(path)


def _files(directory: Path) -> Iterable[Path]:
    """Yield all files in a directory and below it, in order. Links to directories are not followed."""
    for folder, directories, names in os.walk(directory):
        directories.sort()
        yield from (Path(folder, name) for name in sorted(names))
