"""Sources of options: a serving.properties, `-o` and the environment; each yields settings, and problems of its own."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import javaproperties

from handler.config import lmi_version
from handler.config.engines import LLM_ENGINES
from handler.config.options import ENVIRONMENT, KNOWN, SERVER_ENVIRONMENT
from handler.config.options.common import BY_ROLLING_BATCH, ROLLING_BATCHES, TASKS, engine_name
from handler.config.options.lookup import Unknown, find_option, key_of, unknown_variable
from handler.config.options.option import dotted_value, shown
from handler.config.options.variables import SECRET, SM_VLLM, Note, Own, translate
from handler.core import text_files
from handler.core.errors import Problem


class Setting(NamedTuple):
    """One value as text, and its origin: `serving.properties, line 3` or `environment variable OPTION_X`."""

    key: str
    value: str
    origin: str


_MOST_BYTES = 1 << 20  # of a file of options
_HANDLERS = {"trtllm": "trtllm", "tensorrt_llm": "trtllm", "vllm": "vllm"}
"""Words in the names of djl_python's modules, and their engines."""

_OF_JAVA = ("rust", "onnxruntime", "pytorch")
_POOLS = frozenset(one for task, others in TASKS.items() if task != "text-generation" for one in (task, *others))
_TRANSLATORS = ("ai.djl.huggingface.translator.TextEmbeddingTranslatorFactory",)


def from_file(path: Path) -> Iterator[Setting | Problem]:
    """Read a Java properties file; the last value of a key counts, as in Java."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        text = decode_properties(data)
    except (OSError, ValueError) as error:
        yield Problem("", "", f"cannot read {path}: {error}")
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


def decode_properties(data: bytes) -> str:
    """Return the text of a properties file: UTF-8, else ISO 8859-1, as Java's `Properties.load` reads it.

    Raises:
        ValueError: it is UTF-16.
    """
    return text_files.decode(data, otherwise="iso-8859-1")


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


_T = TypeVar("_T")


def joined(source: Iterable[_T]) -> list[_T | Setting | Problem | Note]:
    """Join the dotted names of one source: `option.x.a=1` and `option.x.b.c=2` are `option.x={"a": 1, "b": {"c": 2}}`.

    As vLLM's FlexibleArgumentParser does (vllm/utils/argparse_utils.py), which takes them after all others: values are
    JSON or text, a final `+` makes a list of them, lists grow, and an option's own value is replaced.
    """
    plain: list[_T | Setting | Problem | Note] = []
    values: dict[str, dict[str, Any]] = {}
    last: dict[str, Setting] = {}
    for item in source:
        names = _dotted_names(item.key) if isinstance(item, Setting) else []
        if not isinstance(item, Setting) or not names:
            plain.append(item)
            continue
        root = f"option.{names[0]}"
        try:
            value = dotted_value(item.value, is_list=item.key.endswith("+"))
            for name in reversed(names[1:]):
                value = {name: value}
            _update(values.setdefault(root, {}), value)
            last[root] = Setting(root, json.dumps(values[root]), item.origin)
        except (ValueError, RecursionError):
            plain.append(Problem(item.origin, root, f"{shown(root)}: nested too deeply"))
    told = [
        Note(f"{item.key} ({item.origin})", "names with dots replace it, as in vLLM")
        for item in plain
        if isinstance(item, Setting) and item.key in last
    ]
    return [*plain, *last.values(), *told]


def _dotted_names(key: str) -> list[str]:
    """Split the key of an option's part; [] for any other key."""
    names = key.removeprefix("option.").removesuffix("+").split(".")
    is_part = key.startswith("option.") and len(names) > 1 and key not in KNOWN
    return names if is_part and find_option(f"option.{names[0]}", "") else []


def _update(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        old = values.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            _update(old, value)
        elif isinstance(value, list) and isinstance(old, list):
            old += value
        else:
            values[key] = value


def as_lmi_reads(
    settings: Iterable[Setting], environ: Mapping[str, str], djl: str, *, java: bool, is_mode_given: bool
) -> list[Setting]:
    """Return the settings, weakest first, with what they mean in LMI, and without the names that this replaces.

    LMI's release is told by its DJL Serving, else by its async mode, else by variables of AWS's vLLM image. A module of
    LMI's names the engine. In async mode Java batches nothing, and asks for option.rolling_batch=disable; else
    batch_size above 1 switches to dynamic batching, whatever option.rolling_batch says, which still names an engine.

    Args:
        djl: the version of the DJL Serving that runs the handler; "" where none does.
        java: that one runs, and reads the names of its modules itself.
        is_mode_given: the host says which mode Java runs.
    """
    settings = list(settings)
    last = {setting.key: setting for setting in settings}
    rolling = last.get("option.rolling_batch", Setting("", "auto", ""))
    mode, batch = _async_mode(last), None if is_mode_given else _dynamic_batch(last)
    weak, strong, replaced = [*_release(mode, environ, djl), *_task(last)], [], {"option.runner", "option.convert"}
    if mode is None and batch is not None:
        strong.append(Setting("option.rolling_batch", "disable", batch.origin))
        if (named := rolling.value.strip()) in BY_ROLLING_BATCH:
            weak.append(Setting("option.llm_engine", BY_ROLLING_BATCH[named], batch.origin))
    if not java:
        if (own := java_engine(last)) is not None:
            strong.append(Setting("option.task", "pooling", own.origin))  # so that its files say what it is for
            weak.append(Setting("option.async_mode", "false", own.origin))
            replaced |= {own.key, "translatorFactory"}
        module = last.get("option.entryPoint", Setting("", "", ""))
        if engine := _engine_of(module.value):
            weak.insert(0, Setting("option.llm_engine", engine, module.origin))
            replaced.add("option.entryPoint")
        if mode is not None and last.get("option.async_mode", mode) is mode:
            weak.append(Setting("option.async_mode", "true", mode.origin))
            settings = [one for one in settings if one.key != rolling.key or one.value.strip() != "disable"]
        elif not strong and rolling.value.strip() == "scheduler":  # `auto` chooses no mode
            weak.append(Setting("option.async_mode", "false", rolling.origin))
    return [*weak, *(one for one in settings if one.key not in replaced), *strong]


def java_engine(last: Mapping[str, Setting]) -> Setting | None:
    """Return the setting that names an engine of DJL's own for a model that embeds texts or compares them."""
    named, task = last.get("engine"), last.get("option.task")
    if named is None or named.value.strip().lower() not in _OF_JAVA:
        return None
    translator = last.get("translatorFactory")
    other = translator is not None and translator.value.strip() not in _TRANSLATORS
    return None if other or (task is not None and task.value.strip() not in _POOLS) else named


def _async_mode(last: Mapping[str, Setting]) -> Setting | None:
    """Return the setting that chooses LMI's async mode: option.async_mode, or an async handler's name."""
    switch, module = last.get("option.async_mode"), last.get("option.entryPoint")
    if switch is not None and switch.value.strip().lower() == "true":
        return switch
    is_async = module is not None and module.value.strip().startswith("djl_python.") and "_async_" in module.value
    return module if is_async else None


def _dynamic_batch(last: Mapping[str, Setting]) -> Setting | None:
    """Return the setting that asks for batches of more than one, unless option.rolling_batch=disable does so too."""
    size, rolling = last.get("batch_size") or last.get("max_dynamic_batch_size"), last.get("option.rolling_batch")
    if size is None or (rolling is not None and rolling.value.strip() == "disable"):
        return None
    return size if len(size.value) < 20 and size.value.strip().isdecimal() and int(size.value) > 1 else None


def _release(mode: Setting | None, environ: Mapping[str, str], djl: str) -> Iterator[Setting]:
    """Yield what tells LMI's release, weakest first; option.lmi_version itself beats it."""
    for name in sorted(name for name in environ if name.startswith(SM_VLLM))[:1]:
        yield Setting(lmi_version.KEY, str(lmi_version.ASYNC), f"environment variable {name}")
    if mode is not None:
        yield Setting(lmi_version.KEY, str(lmi_version.ASYNC), mode.origin)
    if (version := lmi_version.release_of(djl)) is not None:
        yield Setting(lmi_version.KEY, str(version), f"DJL Serving {djl}")


def _task(last: Mapping[str, Setting]) -> Iterator[Setting]:
    """Yield vLLM's runner and convert as option.task, which beats them."""
    for key in ("option.runner", "option.convert"):
        if key in last and (key != "option.convert" or last[key].value.strip() not in ("auto", "none")):
            yield last[key]._replace(key="option.task")


def _engine_of(module: str) -> str:
    """Return the engine that one of LMI's own modules runs; "" for any other."""
    if not module.startswith("djl_python."):
        return ""
    return next((engine for word, engine in _HANDLERS.items() if word in module), "")


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
