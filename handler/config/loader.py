"""Loader of the configuration: `-o` beats serving.properties, which beats the environment, which beats defaults.

DJL Serving has the same precedence: the model directory's serving.properties beats `OPTION_*` and `SERVING_*`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import javaproperties

from handler.config.options import ENVIRONMENT, KNOWN, OF_JAVA, OPTIONS, SERVER_ENVIRONMENT, Option
from handler.core.errors import ConfigError

BY_ROLLING_BATCH = {"trtllm": "trtllm", "vllm": "vllm", "lmi-dist": "vllm"}
"""Values of option.rolling_batch that name an engine; LMI itself serves lmi-dist by vLLM."""

_SEQUENCES = {"vllm": 256, "trtllm": 256}
"""LMI's default of option.max_rolling_batch_size, where it is not 32."""


class Setting(NamedTuple):
    """One value as text, and its origin: `serving.properties, line 3` or `environment variable OPTION_X`."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True)
class Config:
    """Every option, typed and checked; docs/options.md describes the fields."""

    model_id: str | None
    model_name: str
    served_model_name: tuple[str, ...] | None
    llm_engine: str
    rolling_batch: str
    max_rolling_batch_size: int
    dtype: str
    tensor_parallel_degree: str
    output_formatter: str | None
    input_formatter: str | None
    tgi_compat: bool
    root_schema: str
    enable_streaming: bool
    unknown_parameters: str
    tool_call_parser: str
    predict_timeout: float
    request_time_limit: float | None
    model_loading_timeout: float
    engine_timeout: float
    engine_isolation: str
    max_model_len: int | None
    max_num_batched_tokens: int | None
    kv_cache_gib: int
    enable_prefix_caching: bool | None
    log_prompts: bool
    client_timeout: float
    keep_alive_timeout: float
    batch_size: int
    max_batch_delay: int
    job_queue_size: int
    max_request_size: int
    enable_stateful_sessions: bool
    sessions_expiration: int
    sessions_path: str | None
    engine_options: Mapping[str, Any] = field(default_factory=dict)  # the engine's own, without its defaults
    warnings: tuple[str, ...] = ()
    directory: Path | None = field(default=None, compare=False)  # of serving.properties
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)  # key -> origin of its value

    @property
    def engine(self) -> str:
        """Name of the engine; "" where llm_engine and rolling_batch contradict each other."""
        return engine_name(self.llm_engine, self.rolling_batch)

    def where(self, key: str) -> str:
        return self.origins.get(key, "default")


def engine_name(llm_engine: str, rolling_batch: str) -> str:
    """Name the engine of the two options; "" where they contradict each other."""
    by_batch = BY_ROLLING_BATCH.get(rolling_batch)
    if llm_engine == "auto":
        return by_batch or "openvino"  # it reads every kind of model
    return llm_engine if by_batch in (None, llm_engine) else ""


def load_config(
    *,
    properties: Path | None = None,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    settings: Iterable[Setting] = (),
    java: bool = False,
) -> Config:
    """Read every source, check every value.

    Args:
        properties: a serving.properties file.
        overrides: `key=value` as `-o` takes them, keys as serving.properties writes them.
        environ: the environment, `os.environ` by default.
        java: DJL Serving's Java side runs, and reads its own keys.
        settings: the host's own; they beat all others. An equal value keeps the origin of the other source.

    Raises:
        ConfigError: a key is unknown, or a value is wrong; the message has the name and the origin.
    """
    # Weakest first; later ones win.
    sources = [
        *_from_environment(os.environ if environ is None else environ),
        *(_from_file(properties) if properties else ()),
        *_from_overrides(overrides),
    ]
    settings = list(settings)
    engine = _engine([*sources, *settings])
    by_key = {_option(setting, engine).key: setting for setting in sources}
    for setting in settings:
        key = _option(setting, engine).key
        if key not in by_key or by_key[key].value.strip() != setting.value.strip():
            by_key[key] = setting
    values = {option.field: _value(option, by_key) for option in OPTIONS if option.field and not option.engines}
    values["max_rolling_batch_size"] = values["max_rolling_batch_size"] or _SEQUENCES.get(engine, 32)
    own = [option for option in OPTIONS if engine in option.engines]
    engine_options = {str(option.field): value for option in own if (value := _value(option, by_key)) is not None}
    others = {key: setting for key, setting in by_key.items() if key not in {option.key for option in own}}
    config = Config(
        **values,
        engine_options=engine_options,
        warnings=_without_effect(others, engine, java=java),
        directory=properties.absolute().parent if properties else None,
        origins={key: setting.origin for key, setting in by_key.items()},
    )
    return _checked(config)


def _engine(settings: Iterable[Setting]) -> str:
    """Name the engine before values are checked: engines may read an option's name differently."""
    texts = {"option.llm_engine": "auto", "option.rolling_batch": "auto"}
    texts |= {setting.key: setting.value.strip() for setting in settings if setting.key in texts}
    return engine_name(*texts.values())


def _without_effect(by_key: Mapping[str, Setting], engine: str, *, java: bool) -> tuple[str, ...]:
    """Warn of options without effect here.

    Raises:
        ConfigError: an option belongs to another engine, and cannot be ignored.
    """
    idle: dict[str, list[str]] = {}
    for key, setting in by_key.items():
        options = KNOWN[key]
        option = options[0]
        if option.field is None:
            why = "" if java and option.help is OF_JAVA else option.help
        elif option.engines:
            _value(option, by_key)  # a wrong value is refused with any engine
            why = option.idle
            if not why:
                names = " and ".join(name for option in options for name in option.engines)
                raise ConfigError(
                    f"{setting.origin}: {setting.key} is for {names}; the engine here is {engine or 'not known'}"
                )
        else:
            continue
        if why:
            idle.setdefault(why, []).append(f"{setting.key} ({setting.origin})")
    return tuple(f"without effect here: {', '.join(keys)}; {why}" for why, keys in idle.items())


def option_key(name: str) -> str | None:
    """Find the key of an option by DJL's name, which has no prefix."""
    key = next((name for name in (f"option.{name}", name) if name in KNOWN), None)
    if key is None:
        return None
    keys = {option.key for option in KNOWN[key]}
    return keys.pop() if len(keys) == 1 else key  # two engines' own: load_config knows which


def _option(setting: Setting, engine: str) -> Option:
    """Find a setting's option.

    Raises:
        ConfigError: it is unknown; the message has the nearest known name.
    """
    options = KNOWN.get(setting.key)
    if options is None:
        bare = {name.removeprefix("option."): name for name in KNOWN}
        near = difflib.get_close_matches(setting.key.removeprefix("option."), bare, n=1, cutoff=0.75)
        hint = f"; did you mean {bare[near[0]]!r}?" if near else "; docs/options.md lists those there are"
        raise ConfigError(f"{setting.origin}: unknown option {setting.key!r}{hint}")
    return next((option for option in options if engine in option.engines), options[0])


def _value(option: Option, by_key: Mapping[str, Setting]) -> Any:
    setting = by_key.get(option.key)
    if setting is None:
        return option.default
    try:
        return option.parse(setting.value.strip())
    except ValueError as error:
        what = (
            setting.origin if setting.origin.startswith("-o ") else f"{setting.origin}: {setting.key}={setting.value}"
        )
        raise ConfigError(f"{what}: {error}") from None


def _from_file(path: Path) -> Iterable[Setting]:
    """Read a Java properties file; the last value of a key counts, as in Java."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    line = 1
    try:
        for element in javaproperties.parse(text):
            if isinstance(element, javaproperties.KeyValue):
                yield Setting(element.key, element.value, f"{path.name}, line {line}")
            line += element.source.count("\n")
    except javaproperties.InvalidUEscapeError as error:
        raise ConfigError(f"{path.name}, line {line}: {error}") from None


def _from_overrides(overrides: Iterable[str]) -> Iterable[Setting]:
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"-o {override}: write it as key=value")
        yield Setting(key.strip(), value, f"-o {override}")


def _from_environment(environ: Mapping[str, str]) -> Iterable[Setting]:
    """Read `OPTION_X_Y` as option.x_y, `SERVING_X` as the server's x, and the names in `ENVIRONMENT`."""
    for name, value in environ.items():
        origin = f"environment variable {name}"
        if name.startswith("OPTION_"):
            rest = name.removeprefix("OPTION_")
            key = "option." + (rest.lower() if rest == rest.upper() else rest)  # DJL keeps mixed case as it is
            yield Setting(
                {"option.entrypoint": "option.entryPoint", "option.engine": "engine"}.get(key, key), value, origin
            )
        elif name.startswith("SERVING_"):
            key = name.removeprefix("SERVING_").lower()
            if key not in KNOWN and key not in SERVER_ENVIRONMENT:
                near = difflib.get_close_matches(key, [*KNOWN, *SERVER_ENVIRONMENT], n=1)
                hint = f"; did you mean 'SERVING_{near[0].upper()}'?" if near else ""
                raise ConfigError(f"{origin}: unknown setting{hint}")
            if key in KNOWN:
                yield Setting(key, value, origin)
    for name, key in ENVIRONMENT.items():
        # As LMI does: `OPTION_*` beats these names.
        option_name = "OPTION_" + key.removeprefix("option.").upper()
        if name in environ and option_name not in environ:
            yield Setting(key, environ[name], f"environment variable {name}")


def _checked(config: Config) -> Config:
    """Check options against one another."""
    where = config.where
    if config.rolling_batch == "disable":
        if config.enable_streaming and config.batch_size > 1:
            raise ConfigError(
                f"{where('option.enable_streaming')}: option.enable_streaming=true needs batch_size=1, "
                f"but batch_size={config.batch_size} ({where('batch_size')})"
            )
        if config.tgi_compat:
            raise ConfigError(
                f"{where('option.tgi_compat')}: option.tgi_compat=true is for rolling batch, "
                f"but option.rolling_batch=disable ({where('option.rolling_batch')})"
            )
    else:
        for key in ("option.enable_streaming", "batch_size"):
            field = key.removeprefix("option.")
            default = next(option.default for option in OPTIONS if option.key == key)
            if getattr(config, field) != default:
                raise ConfigError(
                    f"{where(key)}: {key} belongs to dynamic batching and needs option.rolling_batch=disable, "
                    f"but option.rolling_batch={config.rolling_batch} ({where('option.rolling_batch')})"
                )
    return config
