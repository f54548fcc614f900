"""Loader of the configuration: `-o` beats serving.properties, which beats the environment, which beats defaults.

DJL Serving has the same precedence: the model directory's serving.properties beats `OPTION_*` and `SERVING_*`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from handler.config.config import Config
from handler.config.model_py import role_of
from handler.config.options import COMMON, KNOWN, OPTIONS, Option
from handler.config.options.common import BY_ROLLING_BATCH, STAND_IN
from handler.config.options.lookup import Unknown, find_option, unknown_option, wrong_arguments
from handler.config.options.option import shown
from handler.config.options.variables import Note
from handler.config.sources import (
    Setting,
    as_lmi_reads,
    from_environment,
    from_file,
    from_foreign_variables,
    from_overrides,
    java_engine,
    joined,
    named_engine,
)
from handler.core.custom_handlers import Role
from handler.core.errors import ConfigError, Problem

_UNKNOWN_OPTIONS = "LMI_UNKNOWN_OPTIONS"
_STANDS_IN = "echo stands in for the engine that has it"


class Reading(NamedTuple):
    """Values and problems of all sources.

    Attributes:
        config: has the default in place of a wrong value.
        engine: "" where the options do not say which.
    """

    config: Config
    problems: tuple[Problem, ...]
    engine: str

    def checked(self) -> Config:
        """Return the configuration, or raise ConfigError with all problems."""
        if self.problems:
            raise ConfigError(*self.problems)
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
    """Read every source, check every value, and options against one another. Never raises.

    Args:
        properties: a serving.properties file.
        overrides: `key=value` as `-o` takes them, keys as serving.properties writes them.
        environ: the environment, `os.environ` by default.
        settings: the host's own; they beat all others. An equal value keeps the origin of the other source.
        java: DJL Serving's Java side runs, and reads its own keys.
        djl: the version of that DJL Serving; "" where it is not known.
        auto: the engine where no option names one; "" where that is not known here.
    """
    environ, settings = os.environ if environ is None else environ, list(settings)
    # Weakest first; later ones win.
    places: list[list[Setting | Problem | Note | Unknown]] = [
        [*from_environment(environ)],
        [*(from_file(properties) if properties else ())],
        [*from_overrides(overrides)],
    ]
    named = named_engine([*(item for item in chain(*places) if isinstance(item, Setting)), *settings], "")
    places.insert(0, [*from_foreign_variables(environ, named)])
    written = {item.key: item.value.strip() for item in [*chain(*places), *settings] if isinstance(item, Setting)}
    found = [item for place in places for item in joined(place)]
    problems = [item for item in found if isinstance(item, Problem)]
    sources = [item for item in found if isinstance(item, Setting)]
    is_mode_given = any(setting.key == "option.rolling_batch" for setting in settings)
    given = {setting.key: setting for setting in sources}
    sources = as_lmi_reads(sources, environ, djl, java=java, is_mode_given=is_mode_given)
    engine = named_engine([*sources, *settings], auto)
    unknown = [item for item in found if isinstance(item, Unknown)]
    chosen = _choose(sources, settings, engine, unknown)
    fields = {str(option.field): _value(option, engine, chosen, problems) for option in COMMON}
    engine_options = _engine_options(engine, chosen, problems)
    notes = [f"{item.foreign} has no effect here: {item.message}" for item in found if isinstance(item, Note)]
    idle = {key: why for key, why in _idle(fields, engine, engine_options, java=java) if key in chosen}
    fields |= {str(chosen[key].option.field): chosen[key].option.default for key in idle}
    warnings = (
        *notes,
        *_of_unknown(unknown, environ, problems),
        *(_without(f"{chosen[key].setting.key} ({chosen[key].setting.origin})", why) for key, why in idle.items()),
        *_without_effect(chosen.values(), engine, problems, java=java),
        *(() if java else _in_the_place_of_javas(given, engine)),
    )
    config = Config(
        **fields,
        engine_options=engine_options,
        warnings=warnings,
        directory=properties.absolute().parent if properties else None,
        origins={key: setting.origin for key, (_, setting) in chosen.items()},
        settings=written,
    )
    config = replace(config, warnings=(*config.warnings, *_lost_in_the_mode(config, java=java), *_coarser(config)))
    problems += _contradictions(config, {problem.name for problem in problems})
    origins = (item.where if isinstance(item, Problem) else item.origin for item in found if not isinstance(item, Note))
    order = {origin: place for place, origin in enumerate(origins)}
    problems.sort(key=lambda problem: order.get(problem.where, len(order)))
    return Reading(config, tuple(problems), engine)


def read_server_config(
    model: str | None = None,
    engine: str | None = None,
    properties: Path | None = None,
    overrides: Iterable[str] = (),
) -> Reading:
    """Read the sources of a server; where no file is named, the model directory's serving.properties, as in DJL.

    Args:
        model, engine: they beat all other sources; None: those decide.
        properties, overrides: as in `read_config`.
    """
    given = [Setting("option.llm_engine", engine, f"--engine {engine}")] if engine else []
    named = [Setting("option.model_id", model, "the MODEL argument")] if model else []
    reading = read_config(properties=properties, overrides=overrides, settings=given + named)
    model_id = reading.config.model_id
    own = Path(model_id or "", "serving.properties")
    if properties is None and model_id and own.is_file():
        properties = own
        reading = read_config(properties=own, overrides=overrides, settings=given)
        reading = reading._replace(config=replace(reading.config, model_id=reading.config.model_id or model_id))
    config = reading.config
    directory = config.directory or (Path(config.model_id) if config.model_id else None)
    path = directory / "model.py" if directory is not None else None
    if path is None or not path.is_file():
        return _without_model_py(reading)
    role = role_of(config, path)
    if role is Role.ALONE:
        without = read_config(properties=properties, overrides=overrides, settings=[*named, _NO_ENGINE])
        return _of_handle_alone(without, directory, config.settings)
    return reading._replace(config=replace(config, handle_role=role)) if role is not Role.NONE else reading


def _without_model_py(reading: Reading) -> Reading:
    key = "option.entryPoint"
    if reading.config.settings.get(key) != "model.py":
        return reading
    where = reading.config.where(key)
    return reading._replace(problems=(*reading.problems, Problem(where, key, f"{key}=model.py: there is no such file")))


_NO_ENGINE = Setting("option.llm_engine", STAND_IN, "model.py")
_OF_HANDLES = ("option.predict_timeout", "option.model_loading_timeout", "option.install_requirements")
"""Options that a server reads also where model.py answers alone."""


def _of_handle_alone(reading: Reading, directory: Path | None, settings: Mapping[str, str]) -> Reading:
    """Return what remains to be read where model.py answers alone: its options are its own, known or not."""
    config = replace(
        reading.config,
        model_id=None,
        task="auto",
        directory=directory,
        settings=settings,
        handle_role=Role.ALONE,
        warnings=("no engine is loaded: the function handle of model.py answers alone (documents: custom-code)",),
    )
    own = [one for one in reading.problems if not one.name.startswith("option.") or one.name in _OF_HANDLES]
    return Reading(config, tuple(own), reading.engine)


def _choose(
    sources: Iterable[Setting], settings: Collection[Setting], engine: str, unknown: list[Unknown]
) -> dict[str, _Chosen]:
    """Find the option of each setting, by its key; settings without one are added to `unknown`."""
    chosen: dict[str, _Chosen] = {}
    for setting in [*sources, *settings]:
        option = find_option(setting.key, engine)
        if option is None:
            unknown.append(unknown_option(setting.key, engine, setting.origin))
            continue
        before = chosen.get(option.key)
        same = before is not None and before.setting.value.strip() == setting.value.strip()
        if before is None or not same or setting not in settings:
            chosen[option.key] = _Chosen(option, setting)
    return chosen


def _of_unknown(unknown: Iterable[Unknown], environ: Mapping[str, str], problems: list[Problem]) -> Iterator[str]:
    """Warn of names that nobody has, as LMI drops them; those near a known one, and all by a variable, are problems."""
    strict, dropped = environ.get(_UNKNOWN_OPTIONS, "warn"), []
    if strict not in ("warn", "error"):
        where = f"environment variable {_UNKNOWN_OPTIONS}"
        problems.append(
            Problem(where, _UNKNOWN_OPTIONS, f"{shown(f'{_UNKNOWN_OPTIONS}={strict}')}: must be warn or error")
        )
    for one in unknown:
        if one.is_near or strict == "error":
            problems.append(Problem(one.origin, one.key, one.message))
        else:
            dropped.append(one.origin if one.key in one.origin else f"{one.key} ({one.origin})")
    if dropped:
        yield _without(", ".join(dropped), f"the name is not known; {_UNKNOWN_OPTIONS}=error refuses such names")


def _idle(
    fields: Mapping[str, Any], engine: str, engine_options: Mapping[str, Any], *, java: bool
) -> Iterator[tuple[str, str]]:
    """Yield common options that have no effect beside the others, and why."""
    if fields["rolling_batch"] != "disable":
        if fields["enable_streaming"]:
            yield "option.enable_streaming", "a rolling batch streams by request"
        if fields["batch_size"] > 1:
            yield "batch_size", "a rolling batch takes option.max_rolling_batch_size"
    if fields["chat_template"] and engine == STAND_IN and "echo_tokenizer" not in engine_options:
        yield "option.chat_template", "echo lays chats out by itself, without option.echo_tokenizer"
    if fields["djl_metrics"] and not java:
        yield "option.djl_metrics", "the embedded server has its metrics at /metrics"


def _without(names: str, why: str) -> str:
    return f"without effect here: {names}; {why}"


def _engine_options(engine: str, chosen: Mapping[str, _Chosen], problems: list[Problem]) -> dict[str, Any]:
    """Read the engine's options; `engine_args` are the arguments of its own class, checked by name and type."""
    own = [option for option in OPTIONS if option.field and engine in option.engines]
    values = {str(option.field): _value(option, engine, chosen, problems) for option in own}
    arguments = [option for option, _ in chosen.values() if option.argument and engine in option.engines]
    passed = {option.key.removeprefix("option."): _value(option, engine, chosen, problems) for option in arguments}
    given = values.get("engine_args") or {}
    for message in wrong_arguments(given, engine):
        key = "option.engine_args"
        problems.append(Problem(chosen[key].setting.origin, key, f"{key}: {message}"))
    if passed or given:
        values["engine_args"] = {**passed, **given}
    return {name: value for name, value in values.items() if value is not None}


def _without_effect(
    chosen: Collection[_Chosen], engine: str, problems: list[Problem], *, java: bool
) -> tuple[str, ...]:
    """Warn of options without effect here; those of other engines that cannot be ignored are problems."""
    idle: dict[str, list[str]] = {}
    is_named = named_engine((setting for _, setting in chosen), "")
    by_default = "" if is_named else " by default (option.llm_engine)"
    for option, setting in chosen:
        has_field = option.field is not None or option.argument
        if (java and option.of_java) or (has_field and (not option.engines or engine in option.engines)):
            continue
        if not has_field:
            why = option.help
            if refusal := _refusal(option, setting):
                problems.append(_wrong_value(option, setting, refusal))
                continue
        else:
            if setting.value.strip().lower() in option.harmless:
                continue
            options = [option] if option.argument else KNOWN[option.key]
            refusals = [refusal for one in options if (refusal := _refusal(one, setting))]
            why = (option.idle or (_STANDS_IN if engine == STAND_IN else "")) if engine else ""
            if len(refusals) == len(options):  # a wrong value is refused with any engine
                problems.append(_wrong_value(option, setting, refusals[0]))
            elif engine and not why:
                names = " and ".join(name for option in options for name in option.engines)
                message = f"{setting.key} is for {names}; the engine here is {engine}{by_default}"
                problems.append(Problem(setting.origin, option.key, message))
        if why:
            idle.setdefault(why, []).append(f"{setting.key} ({setting.origin})")
    return tuple(_without(", ".join(keys), why) for why, keys in idle.items())


def _in_the_place_of_javas(given: Mapping[str, Setting], engine: str) -> Iterator[str]:
    if (own := java_engine(given)) is not None:
        yield (
            f"{own.key}={own.value.strip()} ({own.origin}): DJL's own engines do not run here; {engine} computes the "
            "model's embeddings or scores (documents: embeddings)"
        )


def _lost_in_the_mode(config: Config, *, java: bool) -> Iterator[str]:
    """Name the options that LMI's async mode does not heed, or the mode itself where the release has none."""
    key = "option.async_mode"
    if config.async_mode and not config.async_schema and not java:  # whose mode it is all the same
        yield f"without effect on answers: {key} ({config.where(key)}); LMI {config.lmi_version} has no async mode"
    if not config.async_schema:
        return
    if config.tgi_compat:
        yield _lost("option.tgi_compat", config)
    if config.output_formatter in ("json", "jsonlines", "sse"):  # else a formatter of the user's
        yield _lost("option.output_formatter", config)


def _coarser(config: Config) -> Iterator[str]:
    """Say what becomes of LMI's 8 bits: it gives vLLM the name bitsandbytes alone, which means 4."""
    options = config.engine_options
    key = "option.load_in_8bit" if options.get("load_in_8bit") else "option.quantize"
    if options.get("load_in_8bit") or options.get("quantization") == "bitsandbytes8":
        yield (
            f"{key} ({config.where(key)}): vLLM's bitsandbytes has 4 bits, unless the checkpoint has 8; "
            "option.quantize=fp8 has 8"
        )


def _lost(key: str, config: Config) -> str:
    return f"without effect here: {key} ({config.where(key)}); LMI's async mode ignores it (option.async_mode)"


def _value(option: Option, engine: str, chosen: Mapping[str, _Chosen], problems: list[Problem]) -> Any:
    """Parse an option's value. A wrong one becomes a problem; the default stands in for it."""
    if option.key not in chosen:
        return option.default_with(engine)
    setting = chosen[option.key].setting
    try:
        return option.parse(setting.value.strip())
    except ValueError as error:
        problems.append(_wrong_value(option, setting, str(error)))
        return option.default_with(engine)


def _refusal(option: Option, setting: Setting) -> str:
    """Say why the option does not take the value; "" where it does."""
    try:
        option.parse(setting.value.strip())
    except ValueError as error:
        return str(error)
    return ""


def _wrong_value(option: Option, setting: Setting, why: str) -> Problem:
    if setting.origin.startswith("-"):  # an argument shows it already
        return Problem(setting.origin, option.key, why)
    return Problem(setting.origin, option.key, f"{shown(f'{setting.key}={setting.value}')}: {why}")


def _contradictions(config: Config, wrong: set[str]) -> Iterator[Problem]:
    """Check options against one another, unless the value of one of them is wrong already."""
    where = config.where
    if "option.rolling_batch" in wrong:
        return
    if not config.engine and "option.llm_engine" not in wrong:
        yield Problem(
            where("option.rolling_batch"),
            "option.rolling_batch",
            f"option.rolling_batch={config.rolling_batch} asks for {BY_ROLLING_BATCH[config.rolling_batch]}, "
            f"but option.llm_engine={config.llm_engine} ({where('option.llm_engine')})",
        )
    if config.rolling_batch == "disable":
        if config.enable_streaming and config.batch_size > 1:
            yield Problem(
                where("option.enable_streaming"),
                "option.enable_streaming",
                f"option.enable_streaming=true needs batch_size=1, "
                f"but batch_size={config.batch_size} ({where('batch_size')})",
            )
        if config.tgi_compat:
            yield Problem(
                where("option.tgi_compat"),
                "option.tgi_compat",
                f"option.tgi_compat=true is for rolling batch, "
                f"but option.rolling_batch=disable ({where('option.rolling_batch')})",
            )
