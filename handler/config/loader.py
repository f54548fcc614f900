"""Loads the configuration. `-o` overrides serving.properties, which overrides the environment.

DJL Serving has the same precedence: serving.properties in the model directory overrides `OPTION_*` and `SERVING_*`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from handler.config.config import Config
from handler.config.implied import as_lmi_reads, java_engine, selected_engine
from handler.config.options import COMMON, KNOWN, OPTIONS, Option
from handler.config.options.images import Note
from handler.config.options.names import Unknown, find_option, unknown_option, wrong_arguments
from handler.config.options.option import redacted
from handler.config.options.tables import BY_ROLLING_BATCH, STAND_IN
from handler.config.sources import Item, Setting, Sources, from_foreign_variables, joined, only
from handler.config.user_files import role_of
from handler.core import deprecations
from handler.core.errors import Problem, refuse
from handler.core.user_functions import Role

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
    return _resolved(Sources.read(properties, overrides, environ), list(settings), java=java, djl=djl, auto=auto)


def _resolved(
    sources: Sources, settings: Collection[Setting], *, java: bool = False, djl: str = "", auto: str = "openvino"
) -> Reading:
    """Return the configuration that sources contain. The other arguments are those of `read_config`."""
    engine = selected_engine([*only(Setting, chain(*sources.options)), *settings], "")
    foreign = from_foreign_variables(sources.environ, engine, java=java)
    contents: list[list[Item]] = [[*foreign], *sources.options]  # later ones override earlier ones
    reader = _Reader([*map(joined, contents)], settings, sources.environ, java=java, djl=djl, auto=auto)
    fields, engine_options = reader.fields(), reader.engine_options()
    idle = reader.idle(fields, engine_options)
    config = Config(
        **fields | reader.defaults_of(idle),
        engine_options=engine_options,
        warnings=tuple(reader.warnings(idle)),
        directory=sources.directory,
        origins={key: reader.chosen[key].setting.origin for key in reader.chosen},
        settings={item.key: item.value.strip() for item in [*only(Setting, chain(*contents)), *settings]},
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
        sources: Sequence[Sequence[Item]],
        settings: Collection[Setting],
        environ: Mapping[str, str],
        *,
        java: bool,
        djl: str,
        auto: str,
    ) -> None:
        self._sources, self._environ, self._java = sources, environ, java
        self._items = [*chain(*sources)]
        self._problems, self._unknown = only(Problem, self._items), only(Unknown, self._items)
        is_mode_set = any(setting.key == "option.rolling_batch" for setting in settings)
        settings_of_sources = only(Setting, self._items)
        translated = as_lmi_reads(settings_of_sources, environ, djl, java=java, is_mode_set=is_mode_set)
        self.engine = selected_engine([*translated, *settings], auto)
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
            if fields["batch_size"] > 1 and not self._java:  # Java batches in every mode
                reasons["batch_size"] = "rolling batch uses option.max_rolling_batch_size"
        if fields["chat_template"] and self.engine == STAND_IN and "echo_tokenizer" not in engine_options:
            reasons["option.chat_template"] = "echo formats chats itself unless option.echo_tokenizer is set"
        if fields["djl_metrics"] and not self._java:
            reasons["option.djl_metrics"] = "the embedded server exports its metrics at /metrics"
        return {key: reason for key, reason in reasons.items() if key in self.chosen}

    def defaults_of(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the default values of common options, by field of `Config`."""
        options = [self.chosen[key].option for key in keys]
        return {str(option.field): option.default for option in options}

    def warnings(self, idle: Mapping[str, str]) -> Iterator[str]:
        """Yield warnings about deprecated names, and about names and options that have no effect.

        Args:
            idle: the result of `idle`.
        """
        for note in only(Note, self._items):
            yield str(note)
        used = {setting.key: str(setting) for setting in only(Setting, self._items)}
        yield from deprecations.warnings((*used, *self._environ), used)
        yield from self._of_unknown()
        yield from self._overridden()
        for key, reason in idle.items():
            yield _without(str(self.chosen[key].setting), reason)
        yield from self._without_effect()
        java_setting = java_engine({setting.key: setting for setting in only(Setting, self._items)})
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
            message = f"{redacted(f'{_UNKNOWN_OPTIONS}={strict}')}: must be warn or error"
            self._problems.append(Problem(where, _UNKNOWN_OPTIONS, message))
        for name in self._unknown:
            if name.is_near or strict == "error":
                self._problems.append(Problem(name.origin, name.key, name.message))
            else:
                hint = f" (did you mean {name.hint}?)" if name.hint else ""
                dropped.append((name.origin if name.key in name.origin else f"{name.key} ({name.origin})") + hint)
        if dropped:
            yield _without(", ".join(dropped), f"no option has this name; {_UNKNOWN_OPTIONS}=error refuses such names")

    def _overridden(self) -> Iterator[str]:
        """Yield a warning for each environment variable that serving.properties overrides with a different value.

        A variable for the model is also named if the command line overrides it.
        """
        *environment, file, _ = (only(Setting, source) for source in self._sources)
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
        is_selected = selected_engine((chosen.setting for chosen in self.chosen.values()), "")
        for option, setting in self.chosen.values():
            if (self._java and option.of_java) or (
                _is_read(option) and (not option.engines or self.engine in option.engines)
            ):
                continue
            default = "" if is_selected else " by default (option.llm_engine)"
            problem, reason = _fate(option, setting, self.engine, default)
            if problem is not None:
                self._problems.append(problem)
            if reason:
                settings.setdefault(reason, []).append(str(setting))
        return (_without(", ".join(names), reason) for reason, names in settings.items())

    def all_problems(self, config: Config) -> tuple[Problem, ...]:
        """Return all problems in the order of the sources, including contradictions between options."""
        problems = [*_with_comments(self._problems, self.chosen), *_contradictions(config, self._problems)]
        items = (item for item in self._items if not isinstance(item, Note))
        origins = (item.where if isinstance(item, Problem) else item.origin for item in items)
        order = {origin: position for position, origin in enumerate(origins)}
        return tuple(sorted(problems, key=lambda problem: order.get(problem.where, len(order))))


def read_server_config(
    model: str | None = None,
    engine: str | None = None,
    properties: Path | None = None,
    overrides: Iterable[str] = (),
    chosen: Setting | None = None,
) -> Reading:
    """Read the configuration of an embedded server.

    If `properties` is None, serving.properties is read from the model directory, as in DJL. Each source is read once.

    Args:
        model: the model, or None. It overrides all other sources, unless its directory contains a serving.properties
            file.
        engine: the engine, or None. It overrides all other sources.
        properties: the path of a serving.properties, or None.
        overrides: arguments of `-o`, in the form `key=value`.
        chosen: the engine to use instead of the engine of all sources, or None.
    """
    engine_settings = [Setting("option.llm_engine", engine, f"--engine {engine}")] if engine else []
    if chosen is not None:
        engine_settings = [chosen]
    model_settings = [Setting("option.model_id", model, "the MODEL argument")] if model else []
    sources = Sources.read(properties, overrides, None)
    reading = _resolved(sources, engine_settings + model_settings)
    model_id = reading.config.model_id
    if properties is None and model_id and Path(model_id, "serving.properties").is_file():
        sources = sources.with_file(Path(model_id, "serving.properties"))
        reading = _resolved(sources, engine_settings)
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
        reading = _resolved(sources, [*model_settings, _NO_ENGINE])
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


def _without(names: str, reason: str) -> str:
    return f"ignored: {names}; {reason}"


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
    reason = (option.idle or (_STANDS_IN if engine == STAND_IN else "")) if engine else ""
    options = [option] if option.argument else KNOWN[option.key]
    refusals = [_refusal(candidate, setting) for candidate in options]
    if all(refusals):  # an invalid value is refused with any engine
        return _wrong_value(option, setting, refusals[0]), ""
    if not engine or reason:
        return None, reason
    names = " and ".join(name for option in options for name in option.engines)
    message = f"{setting.key} is for {names}; the engine here is {engine}{by_default}"
    return Problem(setting.origin, option.key, message), ""


def _lost_in_the_mode(config: Config, *, java: bool) -> Iterator[str]:
    """Yield warnings about options that LMI's async mode ignores, or a warning if the release has no async mode."""
    key = "option.async_mode"
    if config.async_mode and not config.async_schema and not java:  # Java's async mode does not depend on the release
        yield f"no effect on responses: {key} ({config.where(key)}); LMI {config.lmi_version} has no async mode"
    if config.tgi_version is not None and config.tgi_compat:
        yield f"ignored: option.tgi_compat ({config.where('option.tgi_compat')}), because option.tgi_version is set"
    if not config.async_schema:
        return
    if config.of_tgi:
        yield _lost(_tgi_option(config)[0], config)
    if config.output_formatter in ("json", "jsonlines", "sse"):  # any other name is a user's formatter
        yield _lost("option.output_formatter", config)


def _tgi_option(config: Config) -> tuple[str, str]:
    """Return the option that selects TGI's format, and its value."""
    if config.tgi_version is None:
        return "option.tgi_compat", "true"
    return "option.tgi_version", str(config.tgi_version)


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


def _with_comments(problems: Iterable[Problem], chosen: Mapping[str, _Chosen]) -> Iterator[Problem]:
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


def _wrong_value(option: Option, setting: Setting, message: str) -> Problem:
    if setting.origin.startswith("-"):  # the origin already shows the value
        return Problem(setting.origin, option.key, message)
    return Problem(setting.origin, option.key, f"{redacted(f'{setting.key}={setting.value}')}: {message}")


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
        if config.of_tgi:
            key, value = _tgi_option(config)
            yield against(key, f"{key}={value} is for rolling batch", "option.rolling_batch", "disable")
