"""Loads the configuration. `-o` overrides serving.properties, which overrides the environment.

DJL Serving has the same precedence: serving.properties in the model directory overrides `OPTION_*` and `SERVING_*`.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import javaproperties

from handler.config import lmi_version
from handler.config.config import Config
from handler.config.engines import LLM_ENGINES
from handler.config.environment import key_variables
from handler.config.options import COMMON, ENVIRONMENT, KNOWN, OPTIONS, Option
from handler.config.options.names import (
    KEY_VARIABLES,
    KEYS,
    SECRET,
    SM_VLLM,
    Note,
    Own,
    Unknown,
    find_option,
    is_unknown,
    key_of,
    translate,
    unknown_option,
    unknown_variable,
    wrong_arguments,
)
from handler.config.options.option import dotted_value, shown
from handler.config.options.tables import BY_ROLLING_BATCH, ROLLING_BATCHES, STAND_IN, TASKS, engine_name
from handler.config.user_files import role_of
from handler.core import text_files
from handler.core.errors import Problem, refuse
from handler.core.numbers import is_digits
from handler.core.user_functions import Role


class Setting(NamedTuple):
    """The value of an option as text, and its origin, such as `serving.properties, line 3`."""

    key: str
    value: str
    origin: str

    def __str__(self) -> str:
        return f"{self.key} ({self.origin})"


MOST_BYTES = 1 << 20
"""Maximum size of a serving.properties file, in bytes."""

_HANDLERS = {"trtllm": "trtllm", "tensorrt_llm": "trtllm", "vllm": "vllm"}
"""Maps a part of a djl_python module name to the engine that the module runs."""

_OF_JAVA = ("rust", "onnxruntime", "pytorch")
_POOLS = frozenset(one for task, others in TASKS.items() if task != "text-generation" for one in (task, *others))
_TRANSLATORS = ("ai.djl.huggingface.translator.TextEmbeddingTranslatorFactory",)


def from_file(path: Path) -> Iterator[Setting | Problem]:
    """Yield the settings in a Java properties file, in order, or a problem if the file cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        text = decode_properties(data)
        if _is_json(text):
            raise ValueError("it is JSON: write one KEY=VALUE on each line")
    except (OSError, ValueError) as error:
        yield Problem("", "", f"cannot read {path}: {error}")
        return
    yield from settings_of(text, path.name)


def _is_json(text: str) -> bool:
    """Return whether a text is a JSON object, or begins like one that is broken or cut short."""
    return re.match(r"\s*\{\s*([\"}]|$)", text) is not None


def settings_of(text: str, name: str) -> Iterator[Setting | Problem]:
    """Yield the settings and problems in the text of a Java properties file.

    Args:
        text: the text that `decode_properties` returns.
        name: the name of the file, for the origins of settings.
    """
    stream = io.StringIO(text)
    elements = javaproperties.parse(stream)
    line, read = 1, 0
    while True:
        line, read = line + text.count("\n", read, stream.tell()), stream.tell()
        origin = f"{name}, line {line}"
        try:
            element = next(elements, None)
        except javaproperties.InvalidUEscapeError as error:
            yield Problem(origin, "", str(error))
            elements = javaproperties.parse(stream)  # continues at the next line
            continue
        if element is None:
            return
        if isinstance(element, javaproperties.KeyValue):
            yield Setting(element.key, element.value, origin)


def _with_repeated(items: Iterable[Setting | Problem]) -> Iterator[Setting | Problem | Note]:
    """Add a note for each value that a later line of the same file replaces with a different value."""
    before: dict[str, Setting] = {}
    for item in items:
        yield item
        if isinstance(item, Setting):
            earlier = before.setdefault(item.key, item)
            if earlier.value != item.value:
                line = item.origin.rpartition(", ")[2]
                yield Note(str(earlier), f"{line} sets it to another value")
            before[item.key] = item


def decode_properties(data: bytes) -> str:
    """Decode a properties file as UTF-8, or else as ISO 8859-1, which was the encoding of such files before Java 9.

    Each continued line is joined with the lines that continue it, and these are replaced by blank lines. Otherwise, the
    parsing time of javaproperties would grow with the square of their number.

    Raises:
        ValueError: if the file is UTF-16.
    """
    lines: list[str] = []
    parts: list[str] = []  # of a continued line
    for line in _LINE_END.split(text_files.decode(data, otherwise="iso-8859-1")):
        text = line.lstrip(_BLANK)
        if (parts or not text.startswith(("#", "!"))) and (len(line) - len(line.rstrip("\\"))) % 2:
            parts.append((text if parts else line)[:-1])
        elif parts:
            lines += ["".join([*parts, text]), *[""] * len(parts)]
            parts = []
        else:
            lines.append(line)
    return "\n".join([*lines, "".join(parts)] if parts else lines)


def encode_properties(text: str) -> str:
    """Encode a properties file in ASCII, so that all readers read the same text. Java reads the bytes as ISO 8859-1.

    A single backslash before a non-ASCII character has no meaning. It is dropped, because it would escape the backslash
    of the new escape sequence.
    """

    def escaped(match: re.Match[str]) -> str:
        units = match[2].encode("utf-16-be").hex()
        return match[1] + "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))

    return re.sub(r"((?:\\\\)*)\\?([^\x00-\x7f]+)", escaped, text)


def misread_by_java(file: Path) -> Iterator[str]:
    """Yield messages about parts of serving.properties in a model directory that only this package reads correctly.

    DJL's ModelInfo reads the bytes as ISO 8859-1. Its BaseModelLoader reads UTF-8, and raises MalformedInputException.
    """
    with contextlib.suppress(OSError), file.open("rb") as stream:
        data = stream.read(MOST_BYTES)
        try:
            data.decode()
        except UnicodeDecodeError:
            yield f"{file} is not UTF-8: DJL Serving itself does not start with it; save it as UTF-8"
        first = next(from_file(file), None)
        if data.startswith(codecs.BOM_UTF8) and isinstance(first, Setting) and first.origin.endswith(", line 1"):
            where = f"{first.key} ({first.origin})"
            yield f"DJL Serving does not read {where}: a byte order mark precedes it; save the file without the mark"


_LINE_END = re.compile(r"\r\n|\r|\n")
_BLANK = " \t\f"  # characters that Java skips at the beginning of a line


def from_overrides(overrides: Iterable[str]) -> Iterator[Setting | Problem]:
    """Yield the settings from `-o` arguments, and a problem for each argument without `=`."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals:
            yield Setting(key.strip(), value, f"-o {shown(override)}")
        else:
            yield Problem(f"-o {shown(override)}", "", "write it as key=value")


def from_environment(environ: Mapping[str, str]) -> Iterator[Setting | Unknown]:
    """Yield the settings from `OPTION_*` and `SERVING_*` variables, and from the variables in `ENVIRONMENT`."""
    for name, value in environ.items():
        origin = f"environment variable {name}"
        key = key_of(name)
        if is_unknown(name):
            yield unknown_variable(name)
        elif name.startswith("OPTION_") or (name.startswith("SERVING_") and key in KNOWN):
            yield Setting(key, value, origin)
    for name, key in ENVIRONMENT.items():
        # As in LMI, `OPTION_*` overrides these names.
        option_name = "OPTION_" + key.removeprefix("option.").upper()
        if name in environ and option_name not in environ:
            yield Setting(key, environ[name], f"environment variable {name}")


def from_foreign_variables(
    environ: Mapping[str, str], engine: str, *, java: bool = False
) -> Iterator[Setting | Problem | Note]:
    """Yield the settings from the environment variables of other servers, and problems with those that protect one.

    Args:
        environ: the environment.
        engine: the engine that the options select, or "" if they select no engine.
        java: whether DJL Serving runs the handler. It reads its own variables, but checks no keys.
    """
    if java:
        environ = {name: value for name, value in environ.items() if not name.startswith("SERVING_")}
        yield from (_unchecked(name) for name in key_variables() if environ.get(name))
    for name in {*KEY_VARIABLES} - {*key_variables()}:
        if environ.get(name):
            yield Note(name, f"on SageMaker, clients cannot send a key; {KEYS} would require one")
            environ = {other: value for other, value in environ.items() if other != name}
    for item in translate(environ, engine):
        if not isinstance(item, Own):
            yield item
        elif item.name not in environ and item.name not in SECRET:
            yield Setting(key_of(item.name), item.value, f"environment variable {item.foreign}")


def _unchecked(name: str) -> Problem:
    why = "DJL Serving checks no keys: unset it, or use the embedded server (LMI_FRONT=embedded, or `lmi serve`)"
    return Problem(f"environment variable {name}", name, why)


_Item: TypeAlias = Setting | Problem | Note | Unknown
"""An item from a source: a setting, a problem, a note or an unknown name."""

_Kind = TypeVar("_Kind", Setting, Problem, Note, Unknown)


def _only(kind: type[_Kind], items: Iterable[_Item]) -> list[_Kind]:
    return [item for item in items if isinstance(item, kind)]


def joined(source: Iterable[_Item]) -> list[_Item]:
    """Join dotted names in a source. `option.x.a=1` and `option.x.b.c=2` result in `option.x={"a": 1, "b": {"c": 2}}`.

    This follows vLLM's FlexibleArgumentParser (vllm/utils/argparse_utils.py), which reads dotted names after all other
    names. A value is JSON or text, or a list of strings if its name ends with `+`. Lists with the same name are
    concatenated. The joined object replaces any value of the option itself.
    """
    plain: list[_Item] = []
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
    overridden = (item for item in _only(Setting, plain) if item.key in last)
    notes = (Note(str(item), "overridden by its fields under dotted names, as in vLLM") for item in overridden)
    return [*plain, *last.values(), *notes]


def _dotted_names(key: str) -> list[str]:
    """Return the components of a dotted name that sets a part of an option, or [] for any other key."""
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


_RENAMED = {"option.runner": "option.task", "option.convert": "option.task", "option.s3url": "option.model_id"}
"""Maps two vLLM options, and the former LMI name of option.model_id, to the options that they set."""


def as_lmi_reads(
    settings: Iterable[Setting], environ: Mapping[str, str], djl: str, *, java: bool, is_mode_given: bool
) -> list[Setting]:
    """Add settings that other settings imply in LMI. Drop or override settings that have a different meaning in LMI.

    The DJL Serving version, async mode, and variables of AWS's vLLM image imply the LMI release. An LMI module in
    option.entryPoint implies the engine. In async mode, Java does not batch, and requires option.rolling_batch=disable.
    In other modes, a batch_size above 1 selects dynamic batching, and option.rolling_batch then selects only the
    engine.

    Args:
        settings: the settings from all sources, in order of increasing precedence.
        environ: the environment.
        djl: the version of DJL Serving if it runs the handler, or "".
        java: whether DJL Serving runs the handler, and therefore reads the names of its modules itself.
        is_mode_given: whether the host has determined the mode in which Java calls the handler.

    Returns:
        The translated settings, in order of increasing precedence.
    """
    settings = list(settings)
    last = {setting.key: setting for setting in settings}
    mode = _async_mode(last)
    weak = [*_release(mode, environ, djl), *_renamed(last)]  # put before the settings
    strong: list[Setting] = []  # put after them
    omitted = {*_RENAMED}
    rolling = last.get("option.rolling_batch", Setting("", "auto", ""))
    batch = _dynamic_batch(last) if mode is None and not is_mode_given else None
    if batch is not None:
        strong.append(Setting("option.rolling_batch", "disable", batch.origin))
        if engine := BY_ROLLING_BATCH.get(rolling.value.strip()):
            weak.append(Setting("option.llm_engine", engine, batch.origin))
    if not java:
        if (own := java_engine(last)) is not None:
            strong.append(Setting("option.task", "pooling", own.origin))  # the files determine the exact task
            weak.append(Setting("option.async_mode", "false", own.origin))
            omitted.update((own.key, "translatorFactory"))
        module = last.get("option.entryPoint", Setting("", "", ""))
        engines = [engine for word, engine in _HANDLERS.items() if word in module.value]
        if module.value.startswith("djl_python.") and engines:
            weak.insert(0, Setting("option.llm_engine", engines[0], module.origin))
            omitted.add("option.entryPoint")
        if mode is not None and last.get("option.async_mode", mode) is mode:
            weak.append(Setting("option.async_mode", "true", mode.origin))
            settings = [item for item in settings if item.key != rolling.key or item.value.strip() != "disable"]
        elif not strong and rolling.value.strip() == "scheduler":  # `auto` chooses no mode
            weak.append(Setting("option.async_mode", "false", rolling.origin))
    return [*weak, *(item for item in settings if item.key not in omitted), *strong]


def java_engine(last: Mapping[str, Setting]) -> Setting | None:
    """Return the setting that selects a native DJL engine for an embedding or reranking model, or None."""
    engine, task = last.get("engine"), last.get("option.task")
    if engine is None or engine.value.strip().lower() not in _OF_JAVA:
        return None
    translator = last.get("translatorFactory")
    is_other = translator is not None and translator.value.strip() not in _TRANSLATORS
    return None if is_other or (task is not None and task.value.strip() not in _POOLS) else engine


def _async_mode(last: Mapping[str, Setting]) -> Setting | None:
    """Return the setting that selects LMI's async mode (option.async_mode or an async handler module), or None."""
    switch, module = last.get("option.async_mode"), last.get("option.entryPoint")
    if switch is not None and switch.value.strip().lower() == "true":
        return switch
    is_async = module is not None and module.value.strip().startswith("djl_python.") and "_async_" in module.value
    return module if is_async else None


def _dynamic_batch(last: Mapping[str, Setting]) -> Setting | None:
    """Return the setting of a batch size above 1, or None if it is missing or option.rolling_batch is `disable`."""
    size, rolling = last.get("batch_size") or last.get("max_dynamic_batch_size"), last.get("option.rolling_batch")
    if size is None or (rolling is not None and rolling.value.strip() == "disable"):
        return None
    return size if len(size.value) < 20 and is_digits(size.value.strip()) and int(size.value) > 1 else None


def _release(mode: Setting | None, environ: Mapping[str, str], djl: str) -> Iterator[Setting]:
    """Yield implied settings of option.lmi_version, in order of increasing precedence. The option overrides them."""
    for name in sorted(name for name in environ if name.startswith(SM_VLLM))[:1]:
        yield Setting(lmi_version.KEY, str(lmi_version.ASYNC), f"environment variable {name}")
    if mode is not None:
        yield Setting(lmi_version.KEY, str(lmi_version.ASYNC), mode.origin)
    if (version := lmi_version.release_of(djl)) is not None:
        yield Setting(lmi_version.KEY, str(version), f"DJL Serving {djl}")


def _renamed(last: Mapping[str, Setting]) -> Iterator[Setting]:
    """Yield settings whose keys are in `_RENAMED`, with the new keys. Other settings of the new keys override them."""
    for key, option in _RENAMED.items():
        if key in last and (key != "option.convert" or last[key].value.strip() not in ("auto", "none")):
            yield last[key]._replace(key=option)


def named_engine(settings: Iterable[Setting], auto: str) -> str:
    """Return the name of the engine that settings select, or "" for an unknown engine or contradictory settings.

    The engine must be known before values are checked, because engines may have different options with the same name.

    Args:
        settings: the settings, in order of increasing precedence.
        auto: the engine to return if no setting selects an engine.
    """
    texts = {"option.llm_engine": "auto", "option.rolling_batch": "auto"}
    texts |= {setting.key: setting.value.strip() for setting in settings if setting.key in texts}
    llm_engine, rolling_batch = texts.values()
    if llm_engine not in LLM_ENGINES or rolling_batch not in ROLLING_BATCHES:
        return ""
    if llm_engine == "auto" and rolling_batch not in BY_ROLLING_BATCH:
        return auto
    return engine_name(llm_engine, rolling_batch)


_MODEL = "option.model_id"
_UNKNOWN_OPTIONS = "LMI_UNKNOWN_OPTIONS"
_STANDS_IN = "echo replaces the engine that supports it"


class Reading(NamedTuple):
    """The result of reading all sources.

    Attributes:
        config: the configuration, in which defaults replace invalid values.
        problems: the problems with all sources and values.
        engine: the name of the engine, or "" if the options do not determine it.
    """

    config: Config
    problems: tuple[Problem, ...]
    engine: str

    def checked(self) -> Config:
        """Return the configuration, or raise a ConfigError that contains all problems."""
        refuse(self.problems)
        return self.config


class _Chosen(NamedTuple):
    option: Option
    setting: Setting


def read_config(
    *,
    properties: Path | None = None,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    settings: Iterable[Setting] = (),
    java: bool = False,
    djl: str = "",
    auto: str = "openvino",
) -> Reading:
    """Read all sources and check all values. Problems are returned in the result instead of being raised.

    1. Read the sources in order of increasing precedence, and join the dotted names in each source. 2. Add the settings
    that other settings imply in LMI (`as_lmi_reads`). This determines the engine. 3. Look up the option of each
    setting. The last setting of an option wins. 4. Parse the values. An invalid value is reported as a problem, and
    replaced by the default. 5. Warn about options that have no effect, and check for contradictions between options.

    Args:
        properties: the path of a serving.properties, or None.
        overrides: arguments of `-o`, in the form `key=value` with keys as in serving.properties.
        environ: the environment. The default is `os.environ`.
        settings: the settings of the host, which override all others. If another source sets the same value, its origin
            is retained.
        java: whether the Java side of DJL Serving runs the handler and reads its own keys.
        djl: the version of DJL Serving, or "" if it is not known.
        auto: the engine to use if no option selects an engine, or "" if it is unknown.
    """
    environ, settings = os.environ if environ is None else environ, list(settings)
    own: list[list[_Item]] = [
        [*from_environment(environ)],
        [*(_with_repeated(from_file(properties)) if properties else ())],
        [*from_overrides(overrides)],
    ]
    engine = named_engine([*_only(Setting, chain(*own)), *settings], "")
    foreign = from_foreign_variables(environ, engine, java=java)
    sources: list[list[_Item]] = [[*foreign], *own]  # later ones override earlier ones
    reader = _Reader([*map(joined, sources)], settings, environ, java=java, djl=djl, auto=auto)
    fields, engine_options = reader.fields(), reader.engine_options()
    idle = reader.idle(fields, engine_options)
    config = Config(
        **{**fields, **{str(reader.chosen[key].option.field): reader.chosen[key].option.default for key in idle}},
        engine_options=engine_options,
        warnings=tuple(reader.warnings(idle)),
        directory=properties.absolute().parent if properties else None,
        origins={key: reader.chosen[key].setting.origin for key in reader.chosen},
        settings={item.key: item.value.strip() for item in [*_only(Setting, chain(*sources)), *settings]},
    )
    config = replace(config, warnings=(*config.warnings, *_lost_in_the_mode(config, java=java), *_coarser(config)))
    return Reading(config, reader.all_problems(config), reader.engine)


class _Reader:
    """Converts the contents of the sources to the configuration in steps. Each step records its problems.

    Args:
        sources: the contents of the sources, in order of increasing precedence: foreign variables, variables of the
            handler, serving.properties, and `-o` arguments.
        settings: the settings of the host.

    Attributes:
        engine: the name of the engine, or "" if the options do not determine it.
        chosen: the options that are set, with their last settings, by key.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[_Item]],
        settings: Collection[Setting],
        environ: Mapping[str, str],
        *,
        java: bool,
        djl: str,
        auto: str,
    ) -> None:
        self._sources, self._environ, self._java = sources, environ, java
        self._items = [*chain(*sources)]
        self._problems, self._unknown = _only(Problem, self._items), _only(Unknown, self._items)
        is_mode_given = any(setting.key == "option.rolling_batch" for setting in settings)
        own = _only(Setting, self._items)
        translated = as_lmi_reads(own, environ, djl, java=java, is_mode_given=is_mode_given)
        self.engine = named_engine([*translated, *settings], auto)
        self.chosen: dict[str, _Chosen] = {}
        for setting in [*translated, *settings]:
            option = find_option(setting.key, self.engine)
            if option is None:
                self._unknown.append(unknown_option(setting.key, self.engine, setting.origin))
                continue
            before = self.chosen.get(option.key)
            same = before is not None and before.setting.value.strip() == setting.value.strip()
            if before is None or not same or setting not in settings:
                self.chosen[option.key] = _Chosen(option, setting)

    def fields(self) -> dict[str, Any]:
        """Return the values of the common options, by field of `Config`."""
        return {str(option.field): self._value(option) for option in COMMON}

    def engine_options(self) -> dict[str, Any]:
        """Return the values of the engine options."""
        options = [option for option in OPTIONS if option.field and self.engine in option.engines]
        values = {str(option.field): self._value(option) for option in options}
        if arguments := self._arguments(values.get("engine_args") or {}):
            values["engine_args"] = arguments
        return {name: value for name, value in values.items() if value is not None}

    def _arguments(self, engine_args: dict[str, Any]) -> dict[str, Any]:
        """Return the native arguments set by options or `engine_args`. Check the names and types in `engine_args`."""
        chosen = [option for option, _ in self.chosen.values() if option.argument and self.engine in option.engines]
        values = {option.key.removeprefix("option."): self._value(option) for option in chosen}
        for message in wrong_arguments(engine_args, self.engine):
            key = "option.engine_args"
            self._problems.append(Problem(self.chosen[key].setting.origin, key, f"{key}: {message}"))
        return {**values, **engine_args}

    def _value(self, option: Option) -> Any:
        """Return the parsed value of an option. If the value is invalid, add a problem and return the default."""
        if option.key not in self.chosen:
            return option.default_with(self.engine)
        setting = self.chosen[option.key].setting
        try:
            return option.parse(setting.value.strip())
        except ValueError as error:
            self._problems.append(_wrong_value(option, setting, str(error)))
            return option.default_with(self.engine)

    def idle(self, fields: Mapping[str, Any], engine_options: Mapping[str, Any]) -> dict[str, str]:
        """Return the common options that have no effect because of other options, with the reasons."""
        reasons: dict[str, str] = {}
        if fields["rolling_batch"] != "disable":
            if fields["enable_streaming"]:
                reasons["option.enable_streaming"] = "rolling batch streams whenever the request asks for it"
            if fields["batch_size"] > 1:
                reasons["batch_size"] = "rolling batch uses option.max_rolling_batch_size"
        if fields["chat_template"] and self.engine == STAND_IN and "echo_tokenizer" not in engine_options:
            reasons["option.chat_template"] = "echo formats chats itself unless option.echo_tokenizer is set"
        if fields["djl_metrics"] and not self._java:
            reasons["option.djl_metrics"] = "the embedded server exports its metrics at /metrics"
        return {key: reason for key, reason in reasons.items() if key in self.chosen}

    def warnings(self, idle: Mapping[str, str]) -> Iterator[str]:
        """Yield warnings about names and options that have no effect.

        Args:
            idle: the result of `idle`.
        """
        for note in _only(Note, self._items):
            yield f"{note.foreign} has no effect here: {note.message}"
        yield from self._of_unknown()
        yield from self._overridden()
        for key, reason in idle.items():
            yield _without(str(self.chosen[key].setting), reason)
        yield from self._without_effect()
        java_setting = java_engine({setting.key: setting for setting in _only(Setting, self._items)})
        if java_setting is not None and not self._java:
            yield (
                f"{java_setting.key}={java_setting.value.strip()} ({java_setting.origin}): DJL's own engines do not "
                f"run here; {self.engine} computes the model's embeddings or scores (documentation: embeddings)"
            )

    def _of_unknown(self) -> Iterator[str]:
        """Yield a warning about unknown names, which LMI ignores.

        Unknown names that resemble a known name are reported as problems instead. With LMI_UNKNOWN_OPTIONS=error, all
        unknown names are problems.
        """
        strict, dropped = self._environ.get(_UNKNOWN_OPTIONS, "warn"), []
        if strict not in ("warn", "error"):
            where = f"environment variable {_UNKNOWN_OPTIONS}"
            message = f"{shown(f'{_UNKNOWN_OPTIONS}={strict}')}: must be warn or error"
            self._problems.append(Problem(where, _UNKNOWN_OPTIONS, message))
        for name in self._unknown:
            if name.is_near or strict == "error":
                self._problems.append(Problem(name.origin, name.key, name.message))
            else:
                dropped.append(name.origin if name.key in name.origin else f"{name.key} ({name.origin})")
        if dropped:
            yield _without(", ".join(dropped), f"no option has this name; {_UNKNOWN_OPTIONS}=error refuses such names")

    def _overridden(self) -> Iterator[str]:
        """Yield a warning for each environment variable that serving.properties overrides with a different value.

        A variable for the model is also named if the command line overrides it.
        """
        *environment, file, _ = (_only(Setting, source) for source in self._sources)
        for setting in chain(*environment):
            option = find_option(setting.key, self.engine)
            if option is None or option.key not in self.chosen:
                continue
            stronger = self.chosen[option.key].setting
            is_stated = stronger in file or option.key == _MODEL
            if is_stated and stronger != setting and not _is_same(option, setting.value, stronger.value):
                yield _without(str(setting), f"{stronger} overrides it with another value")

    def _without_effect(self) -> Iterator[str]:
        """Yield warnings about options that have no effect. Options that only other engines support are problems."""
        settings: dict[str, list[str]] = {}
        is_named = named_engine((chosen.setting for chosen in self.chosen.values()), "")
        for option, setting in self.chosen.values():
            if (self._java and option.of_java) or (
                _is_read(option) and (not option.engines or self.engine in option.engines)
            ):
                continue
            problem, reason = _fate(option, setting, self.engine, "" if is_named else " by default (option.llm_engine)")
            if problem is not None:
                self._problems.append(problem)
            if reason:
                settings.setdefault(reason, []).append(str(setting))
        return (_without(", ".join(names), reason) for reason, names in settings.items())

    def all_problems(self, config: Config) -> tuple[Problem, ...]:
        """Return all problems in the order of the sources, including contradictions between options."""
        problems = [*_with_comments_named(self._problems, self.chosen), *_contradictions(config, self._problems)]
        items = (item for item in self._items if not isinstance(item, Note))
        origins = (item.where if isinstance(item, Problem) else item.origin for item in items)
        order = {origin: position for position, origin in enumerate(origins)}
        return tuple(sorted(problems, key=lambda problem: order.get(problem.where, len(order))))


def read_server_config(
    model: str | None = None,
    engine: str | None = None,
    properties: Path | None = None,
    overrides: Iterable[str] = (),
) -> Reading:
    """Read the configuration of an embedded server.

    If `properties` is None, serving.properties is read from the model directory, as in DJL.

    Args:
        model: the model, or None. It overrides all other sources, unless its directory contains a serving.properties
            file.
        engine: the engine, or None. It overrides all other sources.
        properties: the path of a serving.properties, or None.
        overrides: arguments of `-o`, in the form `key=value`.
    """
    engine_settings = [Setting("option.llm_engine", engine, f"--engine {engine}")] if engine else []
    model_settings = [Setting("option.model_id", model, "the MODEL argument")] if model else []
    reading = read_config(properties=properties, overrides=overrides, settings=engine_settings + model_settings)
    model_id = reading.config.model_id
    if properties is None and model_id and Path(model_id, "serving.properties").is_file():
        properties = Path(model_id, "serving.properties")
        reading = read_config(properties=properties, overrides=overrides, settings=engine_settings)
        reading = reading._replace(config=_with_model_of(reading.config, model_id, model))
    config = reading.config
    directory = config.directory or (Path(config.model_id) if config.model_id else None)
    path = directory / "model.py" if directory is not None else None
    if path is None or not path.is_file():
        key = "option.entryPoint"
        if config.settings.get(key) != "model.py":
            return reading
        problem = Problem(config.where(key), key, f"{key}=model.py: there is no such file")
        return reading._replace(problems=(*reading.problems, problem))
    role = role_of(config, path)
    if role is Role.ALONE:
        reading = read_config(properties=properties, overrides=overrides, settings=[*model_settings, _NO_ENGINE])
        return _of_handle_alone(reading, directory, config.settings)
    return reading._replace(config=replace(config, handle_role=role))


def _with_model_of(config: Config, directory: str, argument: str | None) -> Config:
    """Return the configuration with the directory of serving.properties as its model, unless it names another one.

    Args:
        argument: the MODEL argument, or None. A variable that overrides it is named in a warning.
    """
    if not config.model_id:
        return replace(config, model_id=directory)
    origin = config.origins.get(_MODEL, "")
    if argument is None or config.model_id == argument or not origin.startswith("environment variable"):
        return config
    warning = _without(f"the model in {argument} (the MODEL argument)", f"{_MODEL} ({origin}) overrides it")
    return replace(config, warnings=(*config.warnings, warning))


_NO_ENGINE = Setting("option.llm_engine", STAND_IN, "model.py")
_OF_HANDLES = ("option.predict_timeout", "option.model_loading_timeout", "option.install_requirements")
"""The options that a server reads even if model.py responds to all requests and no engine is loaded."""


def _of_handle_alone(reading: Reading, directory: Path | None, settings: Mapping[str, str]) -> Reading:
    """Return the result for a model.py that responds to all requests. Problems with engine options are dropped.

    Args:
        reading: the result of reading all sources without an engine.
        directory: the model directory.
        settings: the values from all sources as written, by key.
    """
    config = replace(
        reading.config,
        model_id=None,
        task="auto",
        directory=directory,
        settings=settings,
        handle_role=Role.ALONE,
        warnings=("no engine is loaded: handle in model.py serves its routes (documentation: custom-code)",),
    )
    problems = [
        problem for problem in reading.problems if not problem.name.startswith("option.") or problem.name in _OF_HANDLES
    ]
    return Reading(config, tuple(problems), reading.engine)


def _is_same(option: Option, value: str, other: str) -> bool:
    try:
        return bool(option.parse(value.strip()) == option.parse(other.strip()))
    except ValueError:
        return value.strip() == other.strip()


def _without(names: str, why: str) -> str:
    return f"ignored: {names}; {why}"


def _is_read(option: Option) -> bool:
    """Return whether any engine reads the option."""
    return option.field is not None or option.argument


def _fate(option: Option, setting: Setting, engine: str, by_default: str) -> tuple[Problem | None, str]:
    """Return a problem (or None) with an option that the engine does not read, and why it has no effect (or "")."""
    if not _is_read(option):
        refusal = _refusal(option, setting)
        return (_wrong_value(option, setting, refusal), "") if refusal else (None, option.help)
    if setting.value.strip().lower() in option.harmless:
        return None, ""
    why = (option.idle or (_STANDS_IN if engine == STAND_IN else "")) if engine else ""
    options = [option] if option.argument else KNOWN[option.key]
    refusals = [_refusal(candidate, setting) for candidate in options]
    if all(refusals):  # an invalid value is refused with any engine
        return _wrong_value(option, setting, refusals[0]), ""
    if not engine or why:
        return None, why
    names = " and ".join(name for option in options for name in option.engines)
    message = f"{setting.key} is for {names}; the engine here is {engine}{by_default}"
    return Problem(setting.origin, option.key, message), ""


def _lost_in_the_mode(config: Config, *, java: bool) -> Iterator[str]:
    """Yield warnings about options that LMI's async mode ignores, or a warning if the release has no async mode."""
    key = "option.async_mode"
    if config.async_mode and not config.async_schema and not java:  # Java's async mode does not depend on the release
        yield f"no effect on responses: {key} ({config.where(key)}); LMI {config.lmi_version} has no async mode"
    if not config.async_schema:
        return
    if config.tgi_compat:
        yield _lost("option.tgi_compat", config)
    if config.output_formatter in ("json", "jsonlines", "sse"):  # any other name is a user's formatter
        yield _lost("option.output_formatter", config)


def _coarser(config: Config) -> Iterator[str]:
    """Yield a warning if 8-bit quantization with bitsandbytes is requested, because vLLM may use 4 bits.

    LMI passes only the name bitsandbytes to vLLM, which then uses 4 bits unless the checkpoint has 8-bit weights.
    """
    options = config.engine_options
    key = "option.load_in_8bit" if options.get("load_in_8bit") else "option.quantize"
    if options.get("load_in_8bit") or options.get("quantization") == "bitsandbytes8":
        yield (
            f"{key} ({config.where(key)}): vLLM's bitsandbytes uses 4 bits unless the checkpoint has 8-bit weights; "
            "option.quantize=fp8 uses 8 bits"
        )


def _lost(key: str, config: Config) -> str:
    return f"ignored: {key} ({config.where(key)}), as in LMI's async mode (option.async_mode)"


_COMMENTED = re.compile(r"\s[#!]")
_ADVICE = "in this format, `# ...` after a value is part of the value: put comments on separate lines"


def _with_comments_named(problems: Iterable[Problem], chosen: Mapping[str, _Chosen]) -> Iterator[Problem]:
    """Replace all problems that are caused by trailing comments with a single problem about trailing comments."""
    commented = {
        key: setting.origin
        for key, (_, setting) in chosen.items()
        if ", line " in setting.origin and _COMMENTED.search(setting.value)
    }
    origins = [commented["option.model_id"]] if "option.model_id" in commented else []
    for problem in problems:
        if commented.get(problem.name) == problem.where:
            origins.append(problem.where)
        else:
            yield problem
    if origins:
        also = ", ".join(origin.rpartition(", ")[2] for origin in origins[1:])
        yield Problem(origins[0], "", _ADVICE + (f" (also {also})" if also else ""))


def _refusal(option: Option, setting: Setting) -> str:
    """Return the reason why the option does not accept the value, or "" if it does."""
    try:
        option.parse(setting.value.strip())
    except ValueError as error:
        return str(error)
    return ""


def _wrong_value(option: Option, setting: Setting, why: str) -> Problem:
    if setting.origin.startswith("-"):  # the origin already shows the value
        return Problem(setting.origin, option.key, why)
    return Problem(setting.origin, option.key, f"{shown(f'{setting.key}={setting.value}')}: {why}")


def _contradictions(config: Config, problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield the contradictions between options. An option that already has a problem is not checked."""
    where, wrong = config.where, {problem.name for problem in problems}
    if "option.rolling_batch" in wrong:
        return

    def against(key: str, text: str, other: str, value: object) -> Problem:
        return Problem(where(key), key, f"{text}, but {other}={value} ({where(other)})")

    if not config.engine and "option.llm_engine" not in wrong:
        text = f"option.rolling_batch={config.rolling_batch} asks for {BY_ROLLING_BATCH[config.rolling_batch]}"
        yield against("option.rolling_batch", text, "option.llm_engine", config.llm_engine)
    if config.rolling_batch == "disable":
        if config.enable_streaming and config.batch_size > 1:
            text = "option.enable_streaming=true needs batch_size=1"
            yield against("option.enable_streaming", text, "batch_size", config.batch_size)
        if config.tgi_compat:
            text = "option.tgi_compat=true is for rolling batch"
            yield against("option.tgi_compat", text, "option.rolling_batch", "disable")
