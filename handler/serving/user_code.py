"""User files next to serving.properties or the model: model.py, adapters, and a tool call parser."""

from __future__ import annotations

import logging
from pathlib import Path

from handler import engines
from handler.config import environment, user_files
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.config.user_files import unused_handle
from handler.core.errors import ConfigError
from handler.core.framing import FRAMINGS
from handler.core.user_functions import Role
from handler.engines.process.engine_process import Spec
from handler.plugins.aws import STANDARDS, Handlers, collecting, files_of, find_handlers
from handler.plugins.functions import Formatters, choose, find_formatters, model_py
from handler.plugins.handle import Handle, find_handle
from handler.plugins.tool_parser import load_tool_format
from handler.scheduler.lora import (
    AdapterHome,
    AdapterRegistry,
    AdapterRoots,
    adapters_in,
    files_by_name,
    named_adapters,
)
from handler.serving.secure_mode import check_secure_mode

log = logging.getLogger("handler.launch")

_PLATFORM = Path("/opt/ml")


def model_formatters(config: Config, directory: Path | None = None, *, handlers: bool = False) -> Formatters:
    """Import and thus run the user code, and return the functions that the server calls.

    The requirements.txt next to model.py is installed first, unless `directory` is set: DJL Serving installs it itself.

    Args:
        config: configuration, which may specify the formatters.
        directory: directory of model.py. The default is the directory of serving.properties, or else the model
            directory.
        handlers: whether the host also calls handlers and middleware, as AWS's vLLM image does, and LMI's `handle`.

    Raises:
        ConfigError: model.py cannot be used, or an option names a function that it does not contain.
    """
    check_users_files(config, directory)
    # DJL Serving passes its directory, and installs requirements.txt itself.
    model_directory = model_py_directory(config) if directory is None else None
    if (file := user_files.requirements_file(model_directory, is_enabled=config.install_requirements)) is not None:
        user_files.install(file)
    custom: Handlers | None = None
    if handlers:
        with collecting() as decorated:
            formatters = find_formatters(directory or model_directory, handlers=STANDARDS)
        custom = find_handlers(handlers_home(config), environment.custom_code(), decorated)
    else:
        formatters = find_formatters(directory or model_directory)
    try:
        key, name = "option.input_formatter", config.input_formatter
        read = choose(formatters.inputs, name, "input")
        key, name = "option.output_formatter", config.output_formatter
        write = None if name in FRAMINGS else choose(formatters.outputs, name, "output")
    except ValueError as error:
        raise ConfigError(f"{config.where(key)}: {key}={name}: {error}" if name else f"{error} with {key}") from None
    if write is not None and config.rolling_batch == "disable" and config.handle_role is not Role.ALONE:
        raise ConfigError(
            f"model.py's output formatter {write.name!r} requires rolling batch, but option.rolling_batch=disable "
            f"({config.where('option.rolling_batch')}); option.output_formatter=json disables the formatter"
        )
    plugin = config.tool_parser_plugin and load_tool_format(config.tool_parser_plugin, plugin_directories(config))
    handle = users_handle(config, model_py(directory or model_directory)) if handlers else None
    return Formatters(read, write, config, custom, handle, plugin or None)


def users_handle(config: Config, path: Path | None) -> Handle | None:
    """Return the `handle` function of model.py if LMI would call it, or None otherwise.

    Raises:
        ConfigError: the function cannot be called.
    """
    if unused := unused_handle(config, path):
        log.warning("%s", unused)
    if path is None or config.handle_role is Role.NONE:
        return None
    device = "0" if Path("/dev/nvidia0").exists() else "-1"
    return find_handle(path, config.handle_role, config.settings, release=config.lmi_version, device=device)


def model_py_directory(config: Config) -> Path | None:
    """Return the directory where DJL expects model.py: that of serving.properties, or else the model directory."""
    if config.directory is not None:
        return config.directory
    return Path(config.model_id) if config.model_id and Path(config.model_id).is_dir() else None


def handlers_home(config: Config) -> Path:
    """Return the script directory for AWS's vLLM image: that of model.py, or else the SageMaker model directory."""
    return model_py_directory(config) or environment.model_path()


def users_files(config: Config) -> list[Path]:
    """Return the user's Python files that are imported by hosts that call handlers."""
    model_file = model_py(model_py_directory(config))
    files = [model_file, *files_of(handlers_home(config), environment.custom_code())]
    if config.handle_role is not Role.ALONE:
        files += [model_py(path) for path in adapters_at_start(config, None).values()]
    return list(dict.fromkeys(path for path in files if path is not None))


def check_users_files(config: Config, directory: Path | None) -> None:
    """Check that SageMaker's secure mode, if it is on, allows the options and the user's files.

    Args:
        directory: directory of model.py. The default is taken from `config`.

    Raises:
        ConfigError: secure mode forbids an option or a file.
    """
    if environment.secure_mode():
        home = directory or model_py_directory(config)
        files = [model_py(home), *(users_files(config) if config.engine else ())]
        check_secure_mode(config, home, [path for path in dict.fromkeys(files) if path is not None])


def plugin_directories(config: Config) -> tuple[Path | None, Path]:
    """Return where to search for a file from an option: the serving.properties directory, and the working directory."""
    return config.directory, Path()


def adapter_home(config: Config, spec: Spec, directory: Path | None = None) -> AdapterHome:
    """Return the adapter registry of the model, and the adapters to register at startup.

    Args:
        directory: directory of serving.properties, even if the file does not exist. The default is taken from `config`.

    Raises:
        ConfigError: an adapter cannot be used, or the environment variable for the number of adapters is invalid.
    """
    limit = environment.max_adapters()
    if config.handle_role is Role.ALONE:
        unavailable = "no engine is loaded: handle of model.py answers the requests on its routes"
        return AdapterHome(AdapterRegistry(limit, unavailable=unavailable))
    homes = adapter_directories(config, directory)
    if missing := engines.capabilities(spec.engine, spec.config).no_adapters:
        if config.engine_options.get("lora_modules"):
            raise ConfigError(f"option.lora_modules: {spec.engine}: {missing}")
        if homes:
            log.warning("the adapters in %s are not loaded: %s: %s", homes[0], spec.engine, missing)
        return AdapterHome(AdapterRegistry(limit, unavailable=f"{spec.engine}: {missing}"))
    at_start = adapters_at_start(config, directory)
    if ENGINES[spec.engine].has_server_adapters:
        return AdapterHome(AdapterRegistry(limit), at_start, of_server=True)
    registry = AdapterRegistry(limit, _base(config, directory))
    return AdapterHome(registry, at_start, adapter_roots(config, directory))


def adapter_roots(config: Config, directory: Path | None) -> AdapterRoots:
    """Return the directories from which clients may register adapters. On SageMaker, only the platform can register
    adapters, whose files it stores below `_PLATFORM`.
    """
    directories = [path.absolute() for path in _places(config, directory) if path.is_dir()]
    root = config.engine_options.get("adapters_root")
    roots = [] if root is None else [Path(root).absolute()]
    return AdapterRoots([*directories, _PLATFORM], roots, bool(config.engine_options.get("adapters_code")))


def adapters_at_start(config: Config, directory: Path | None) -> dict[str, Path]:
    """Return the adapters to register at startup, by name: the adapters in `adapters/` next to the model, and the
    adapters of option.lora_modules. For llama.cpp's and SGLang's servers, the latter are files of the server.

    Raises:
        ConfigError: an adapter cannot be used.
    """
    modules = config.engine_options.get("lora_modules") or {}
    if ENGINES[config.engine].has_server_adapters:
        return files_by_name(modules, "option.lora_modules")
    adapters = adapters_in(adapter_directories(config, directory))
    return {**adapters, **named_adapters(modules, _base(config, directory), "option.lora_modules")}


def _base(config: Config, directory: Path | None) -> Path | None:
    """Return the directory against which relative paths of adapters are resolved."""
    if homes := adapter_directories(config, directory):
        return homes[0]
    first = next((place for place in _places(config, directory) if place.is_dir()), None)
    return first and first.absolute() / "adapters"


def _places(config: Config, directory: Path | None) -> list[Path]:
    places = [directory or config.directory, Path(config.model_id) if config.model_id else None]
    return [path for path in dict.fromkeys(places) if path]


def adapter_directories(config: Config, directory: Path | None) -> list[Path]:
    places = _places(config, directory)
    return [path for place in places if (path := place.absolute() / "adapters").is_dir()]
