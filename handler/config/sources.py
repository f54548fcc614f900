"""Sources of options: a serving.properties, `-o` and the environment; each yields settings, and problems of its own."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import javaproperties

from handler.config import lmi_version
from handler.config.engines import LLM_ENGINES
from handler.config.options import ENVIRONMENT, KNOWN, SERVER_ENVIRONMENT
from handler.config.options.common import BY_ROLLING_BATCH, ROLLING_BATCHES, engine_name
from handler.config.options.lookup import Unknown, key_of, unknown_variable
from handler.config.options.option import shown
from handler.config.options.variables import SECRET, SM_VLLM, Note, Own, translate
from handler.core.errors import Problem


class Setting(NamedTuple):
    """One value as text, and its origin: `serving.properties, line 3` or `environment variable OPTION_X`."""

    key: str
    value: str
    origin: str


_MOST_CHARACTERS = 1 << 20  # of a file of options
_HANDLERS = {"trtllm": "trtllm", "tensorrt_llm": "trtllm", "vllm": "vllm"}
"""Words in the names of djl_python's modules, and their engines."""


def from_file(path: Path) -> Iterator[Setting | Problem]:
    """Read a Java properties file; the last value of a key counts, as in Java."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        yield Problem("", "", f"cannot read {path}: {error}")
        return
    if len(text) > _MOST_CHARACTERS:
        yield Problem("", "", f"cannot read {path}: it has more than {_MOST_CHARACTERS} characters")
        return
    stream = io.StringIO(text)
    elements = javaproperties.parse(stream)
    while True:
        origin = f"{path.name}, line {text.count(chr(10), 0, stream.tell()) + 1}"
        try:
            element = next(elements, None)
        except javaproperties.InvalidUEscapeError as error:
            yield Problem(origin, "", str(error))
            elements = javaproperties.parse(stream)  # goes on with the next line
            continue
        if element is None:
            return
        if isinstance(element, javaproperties.KeyValue):
            yield Setting(element.key, element.value, origin)


def from_overrides(overrides: Iterable[str]) -> Iterator[Setting | Problem]:
    """Read the texts of `-o`."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals:
            yield Setting(key.strip(), value, f"-o {shown(override)}")
        else:
            yield Problem(f"-o {shown(override)}", "", "write it as key=value")


def from_environment(environ: Mapping[str, str]) -> Iterator[Setting | Unknown]:
    """Read `OPTION_X_Y` as option.x_y, `SERVING_X` as the server's x, and the names in `ENVIRONMENT`."""
    for name, value in environ.items():
        origin = f"environment variable {name}"
        key = key_of(name)
        if name.startswith("SERVING_") and key not in KNOWN:
            if key not in SERVER_ENVIRONMENT:
                yield unknown_variable(name)
        elif name.startswith(("OPTION_", "SERVING_")):
            yield Setting(key, value, origin)
    for name, key in ENVIRONMENT.items():
        # As LMI does: `OPTION_*` beats these names.
        option_name = "OPTION_" + key.removeprefix("option.").upper()
        if name in environ and option_name not in environ:
            yield Setting(key, environ[name], f"environment variable {name}")


def from_foreign_variables(environ: Mapping[str, str], engine: str) -> Iterator[Setting | Problem | Note]:
    """Read TGI's, Hugging Face's and AWS's names.

    Args:
        engine: the one that options name; "" where they name none.
    """
    for item in translate(environ, engine):
        if not isinstance(item, Own):
            yield item
        elif item.name not in environ and item.name not in SECRET:
            yield Setting(key_of(item.name), item.value, f"environment variable {item.foreign}")


def of_lmis_version(settings: list[Setting], environ: Mapping[str, str], djl: str) -> Iterator[Setting]:
    """Yield what the configuration tells of LMI's release, weakest first; option.lmi_version itself beats it.

    Args:
        djl: the version of the DJL Serving that runs the handler; "" where none does.
    """
    for name in sorted(name for name in environ if name.startswith(SM_VLLM))[:1]:
        yield Setting(lmi_version.KEY, str(lmi_version.ASYNC), f"environment variable {name}")
    if (mode := lmis_async_mode(settings)) is not None:
        yield Setting(lmi_version.KEY, str(lmi_version.ASYNC), mode.origin)
    if (version := lmi_version.release_of(djl)) is not None:
        yield Setting(lmi_version.KEY, str(version), f"DJL Serving {djl}")


def lmis_async_mode(settings: Iterable[Setting]) -> Setting | None:
    """Return the setting that chooses LMI's async mode: option.async_mode, or an async handler's name."""
    last = {setting.key: setting for setting in settings}
    switch, module = last.get("option.async_mode"), last.get("option.entryPoint")
    if switch is not None and switch.value.strip().lower() == "true":
        return switch
    is_async = module is not None and module.value.strip().startswith("djl_python.") and "_async_" in module.value
    return module if is_async else None


def from_lmis_batch_size(settings: list[Setting]) -> list[Setting]:
    """Let batch_size above 1 switch to dynamic batching, as in LMI, whatever option.rolling_batch says.

    A rolling batch that names an engine still does so. LMI's async mode has no dynamic batching.
    """
    last = {setting.key: setting for setting in settings}
    size = last.get("batch_size") or last.get("max_dynamic_batch_size")
    rolling = last.get("option.rolling_batch", Setting("", "auto", "")).value.strip()
    if size is None or rolling == "disable" or lmis_async_mode(settings) or not _is_above_one(size.value):
        return settings
    engine = (
        [Setting("option.llm_engine", BY_ROLLING_BATCH[rolling], size.origin)] if rolling in BY_ROLLING_BATCH else []
    )
    return [*engine, *settings, Setting("option.rolling_batch", "disable", size.origin)]


def _is_above_one(text: str) -> bool:
    return len(text) < 20 and text.strip().isdecimal() and int(text) > 1


def from_vllms_runner(settings: list[Setting]) -> list[Setting]:
    """Read vLLM's runner and convert as option.task, which beats them."""
    last = {setting.key: setting for setting in settings}
    runner, convert = last.get("option.runner"), last.get("option.convert")
    if convert is not None and convert.value.strip() in ("auto", "none"):
        convert = None
    named = [one._replace(key="option.task") for one in (runner, convert) if one is not None]
    return [*named, *(one for one in settings if one.key not in ("option.runner", "option.convert"))]


def from_lmis_handler(settings: list[Setting]) -> list[Setting]:
    """Read what LMI's own handlers mean: their module names the engine, and async mode batches without DJL's help.

    `djl_python.lmi_vllm.vllm_async_service` is the default of LMI's images since 0.35; it asks for
    option.rolling_batch=disable, as Java then batches nothing.
    """
    last = {setting.key: setting for setting in settings}
    mode, module = lmis_async_mode(settings), last.get("option.entryPoint", Setting("", "", ""))
    engine = next((engine for word, engine in _HANDLERS.items() if word in module.value), "")
    if module.value.startswith("djl_python.") and engine:
        settings = [one for one in settings if one.key != "option.entryPoint"]
        settings.insert(0, Setting("option.llm_engine", engine, module.origin))
    if mode is not None and last.get("option.async_mode", mode) is mode:
        settings.insert(0, Setting("option.async_mode", "true", mode.origin))
        settings = [one for one in settings if (one.key, one.value.strip()) != ("option.rolling_batch", "disable")]
    elif (rolling := last.get("option.rolling_batch", module)).value.strip() == "scheduler":  # `auto` chooses no mode
        settings.insert(0, Setting("option.async_mode", "false", rolling.origin))
    return settings


def named_engine(settings: Iterable[Setting], auto: str) -> str:
    """Name the engine before values are checked, as engines may read an option's name differently; "" if unknown."""
    texts = {"option.llm_engine": "auto", "option.rolling_batch": "auto"}
    texts |= {setting.key: setting.value.strip() for setting in settings if setting.key in texts}
    llm_engine, rolling_batch = texts.values()
    if llm_engine not in LLM_ENGINES or rolling_batch not in ROLLING_BATCHES:
        return ""
    if llm_engine == "auto" and rolling_batch not in BY_ROLLING_BATCH:
        return auto
    return engine_name(llm_engine, rolling_batch)
