"""Where options come from and who wins: `-o`, then serving.properties, then the environment, then defaults.

DJL's precedence (contract djl.md, section 3): the model directory's serving.properties beats `OPTION_*`; `SERVING_*`
sets the server's keys and is beaten by the file's own. `-o` is ours and beats all. The result is one frozen value.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import javaproperties

from handler.errors import ConfigError
from handler.options import ENVIRONMENT, KNOWN, OF_JAVA, OPTIONS, SERVER_ENVIRONMENT, Option

BY_ROLLING_BATCH = {"trtllm": "trtllm", "vllm": "vllm", "lmi-dist": "vllm"}
"""Values of option.rolling_batch that name an engine; LMI itself made lmi-dist mean vLLM."""

_GPU_ENGINES = ("vllm", "trtllm")


class Setting(NamedTuple):
    """One value as somebody wrote it, and where: `serving.properties, line 3` or `environment variable OPTION_X`."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True)
class Config:
    """Every option, typed and checked; the fields are described in `handler.options` and docs/options.md."""

    model_id: str | None
    model_name: str
    llm_engine: str
    rolling_batch: str
    max_rolling_batch_size: int
    dtype: str
    tensor_parallel_degree: str
    output_formatter: str | None
    input_formatter: str | None
    tgi_compat: bool
    enable_streaming: bool
    unknown_parameters: str
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
    batch_size: int
    max_batch_delay: int
    job_queue_size: int
    max_request_size: int
    engine_options: Mapping[str, Any] = field(default_factory=dict)  # those of `engine` alone; absent: as it chooses
    warnings: tuple[str, ...] = ()
    directory: Path | None = field(default=None, compare=False)  # where serving.properties lies
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)  # of what was set: key -> where

    @property
    def engine(self) -> str:
        """The engine's name; "" where llm_engine and rolling_batch contradict each other."""
        by_batch = BY_ROLLING_BATCH.get(self.rolling_batch)
        if self.llm_engine == "auto":
            return by_batch or "openvino"  # every kind of model that we read is one that it reads
        return self.llm_engine if by_batch in (None, self.llm_engine) else ""

    def where(self, key: str) -> str:
        return self.origins.get(key, "default")


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
        java: there is a Java side that reads its own keys.
        settings: what a host knows to be so; beats the rest. An equal value keeps the origin of the other source.

    Raises:
        ConfigError: an unknown or misspelt key, or a wrong value; names it and where it stands.
    """
    given: dict[str, Setting] = {}
    # Weakest first; later ones win.
    for source in (
        _from_environment(os.environ if environ is None else environ),
        _from_file(properties) if properties else (),
        _from_overrides(overrides),
    ):
        for setting in source:
            given[_known(setting)] = setting
    for setting in settings:
        earlier = given.get(_known(setting))
        if earlier is None or earlier.value.strip() != setting.value.strip():
            given[_known(setting)] = setting
    values = {option.field: _value(option, given) for option in OPTIONS if option.field and not option.engines}
    if values["max_rolling_batch_size"] is None:
        values["max_rolling_batch_size"] = 0  # until the engine is known
    origins = {key: setting.origin for key, setting in given.items()}
    directory = properties.absolute().parent if properties else None
    config = Config(**values, directory=directory, origins=origins)
    return _checked(_with_engine_options(config, given, java=java))


def _with_engine_options(config: Config, given: Mapping[str, Setting], *, java: bool) -> Config:
    """What depends on which engine it is."""
    found: dict[str, Any] = {}
    idle: dict[str, list[str]] = {}
    own = {option.key for option in OPTIONS if config.engine in option.engines}
    for option in OPTIONS:
        setting = given.get(option.key)
        if option.field is None:
            if setting is not None and not (java and option.help is OF_JAVA):
                idle.setdefault(option.help, []).append(f"{setting.key} ({setting.origin})")
        elif config.engine in option.engines:
            value = _value(option, given)
            if value is not None:
                found[option.field] = value
        elif option.engines and setting is not None and option.key not in own:
            _value(option, given)  # a wrong value is one with any engine
            if not option.idle:
                raise ConfigError(
                    f"{setting.origin}: {setting.key} is for {' and '.join(option.engines)}; "
                    f"the engine here is {config.engine or 'not known'}"
                )
            idle.setdefault(option.idle, []).append(f"{setting.key} ({setting.origin})")
    warnings = tuple(f"without effect here: {', '.join(keys)}; {why}" for why, keys in idle.items())
    size = config.max_rolling_batch_size or (256 if config.engine in _GPU_ENGINES else 32)
    return replace(config, engine_options=found, warnings=warnings, max_rolling_batch_size=size)


def option_key(name: str) -> str | None:
    """The key of the option that DJL calls `name`: it hands options over without their prefix."""
    found = KNOWN.get(f"option.{name}") or KNOWN.get(name)
    return found.key if found else None


def _known(setting: Setting) -> str:
    """The option's key; aliases are resolved, anything unknown is refused with the nearest known name."""
    option = KNOWN.get(setting.key)
    if option is None:
        bare = {name.removeprefix("option."): name for name in KNOWN}
        near = difflib.get_close_matches(setting.key.removeprefix("option."), bare, n=1, cutoff=0.75)
        hint = f"; did you mean {bare[near[0]]!r}?" if near else "; docs/options.md lists those there are"
        raise ConfigError(f"{setting.origin}: unknown option {setting.key!r}{hint}")
    return option.key


def _value(option: Option, given: Mapping[str, Setting]) -> Any:
    setting = given.get(option.key)
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
    """A Java properties file; of a key that stands twice the last one counts, as in Java."""
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
    """`OPTION_X_Y` is option.x_y, `SERVING_X` the server's x; the few names of LMI's guides have keys of their own."""
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
        # These are the weakest of the environment's names: LMI reads them where the option itself is unset.
        option_name = "OPTION_" + key.removeprefix("option.").upper()
        if name in environ and option_name not in environ:
            yield Setting(key, environ[name], f"environment variable {name}")


def _checked(config: Config) -> Config:
    """What must agree between options."""
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
