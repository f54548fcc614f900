"""Check a configuration without loading, fetching, converting or running anything."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from handler import engines
from handler.config import environment, model_files, user_files
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.config.environment import spread
from handler.config.loader import Reading, read_server_config
from handler.config.model_files import chat_template, find_task, read_json
from handler.config.options.tables import STAND_IN
from handler.config.user_files import unused_handle
from handler.core.devices import read_driver, visible_gpus
from handler.core.errors import ConfigError, Problem, Problems
from handler.core.framing import FRAMINGS
from handler.core.values import Role, Sampling, Task
from handler.engines import downloads, s3
from handler.engines.base import Capabilities, EngineConfig
from handler.engines.huggingface import files
from handler.engines.process.engine_process import Spec
from handler.engines.process.replicas import ReplicaSet
from handler.engines.process.supervisor import ANYWHERE, EngineSupervisor, Place, on_cores, on_devices
from handler.plugins.aws import STANDARDS, Handlers, check_handlers, collecting, files_of, find_handlers, script_of
from handler.plugins.functions import Formatters, check_model_py, check_syntax, choose, find_formatters, model_py
from handler.plugins.handle import Handle, find_handle
from handler.plugins.tool_parser import find_tool_parser, load_tool_format
from handler.protocols.assistant.response_template.template import ResponseTemplate, read_response_template
from handler.protocols.assistant.tools.formats.hf import HF
from handler.protocols.assistant.tools.request import AUTO, NONE
from handler.protocols.kernel.dialect import GenerationDefaults
from handler.protocols.kernel.parameters import MODEL_DEFAULTS
from handler.scheduler.lora import AdapterHome, AdapterRegistry, adapters_in, named_adapters
from handler.serving.media.loader import media_rules
from handler.serving.metrics.tracing import find_exporter
from handler.serving.sessions import sessions_root

log = logging.getLogger("handler.launch")

_OWN = ("serving.properties", "model.py", "requirements.txt")
_DRAFT = "speculative_draft_model"


def engine_spec(config: Config) -> Spec:
    """Return what the engine's process loads; fetch or convert the model's files where that is needed.

    Raises:
        ConfigError: there is no such engine or model.
    """
    name = choose_engine(config)
    served_task(config, name, config.model_id)  # refuses before anything is fetched
    try:
        model_id = engines.fetch(name, config.model_id, EngineConfig(config))
        config = _with_directories(config, name, model_id)
        task = served_task(config, name, model_id)
        model = engines.prepare(name, model_id, EngineConfig(config, task=task))
    except OSError as error:
        raise ConfigError(f"the model's files cannot be fetched: {error}") from error
    source = Path(model_id) if model_id and Path(model_id).is_dir() else None
    return Spec(name, EngineConfig(config, model, chat_template(config), task, None if source == model else source))


def _with_directories(config: Config, engine: str, model_id: str | None) -> Config:
    """Name the directories of models of S3 in their place, as DJL Serving does: engines and adapters look there."""
    if s3.is_url(config.model_id):
        config = replace(config, model_id=model_id)
        if s3.is_download(config.directory):  # of the settings alone, which the model has too
            return _with_draft(replace(config, directory=Path(str(model_id))), engine)
        for path in [path for path in map(Path(str(model_id)).joinpath, _OWN) if path.is_file()]:
            log.warning("%s of the model on S3 is not read: options and code come from this machine", path.name)
    return _with_draft(config, engine)


def _with_draft(config: Config, engine: str) -> Config:
    if s3.is_url(draft := config.engine_options.get(_DRAFT)):
        fetched = engines.fetch(engine, draft, EngineConfig(config))
        config = replace(config, engine_options={**config.engine_options, _DRAFT: fetched})
    return config


def downloads_of(config: Config, engine: str) -> dict[str, str]:
    """Return the models of S3 that a start downloads, by their options."""
    if config.handle_role is Role.ALONE:
        url = config.settings.get("option.model_id")
        return {"option.model_id": url} if s3.is_url(url) else {}
    if not engines.fetches(engine):
        return {}
    named = {"option.model_id": config.model_id, f"option.{_DRAFT}": config.engine_options.get(_DRAFT)}
    return {key: url for key, url in named.items() if s3.is_url(url)}


def hub_note(config: Config, engine: str) -> str:
    """Say what a start fetches from the hub, and does with it; "" where it fetches nothing there."""
    model = config.model_id or ""
    if config.handle_role is Role.ALONE or not engines.fetches(engine) or not files.is_hub_reference(model):
        return ""
    rest = engines.conversion(engine, model)
    return f"{model}: the start downloads it from the hub{rest and '; ' + rest}"


def choose_engine(config: Config) -> str:
    """Return the name of an engine that is installed and can run the model.

    Raises:
        ConfigError: the engine is not installed, or does not run on so many devices.
    """
    name, problems = config.engine, Problems()
    with problems:
        engines.entry(name)
    if not ENGINES[name].spreads and name != STAND_IN and config.tensor_parallel_degree not in ("1", "max"):
        key = "option.tensor_parallel_degree"
        chosen = ", and no option names another (option.llm_engine)" if config.llm_engine == "auto" else ""
        message = f"{key}={config.tensor_parallel_degree}: the engine {name} runs on one device{chosen}"
        problems.append(Problem(config.where(key), key, message))
    problems.check()
    return name


def served_task(config: Config, engine: str, model_id: str | None) -> Task:
    """Find what the model computes.

    Args:
        model_id: that of the options; of a hub's model, the directory that was fetched, once it is there.

    Raises:
        ConfigError: the engine does not compute that; or as `find_task`.
    """
    task = find_task(config.task, Path(model_id) if model_id else None)
    engines.check_task(engine, task, config.task)
    return task


# -- files of the user's beside serving.properties or the model: model.py, adapters, a parser of tool calls ------------


def model_formatters(config: Config, directory: Path | None = None, *, handlers: bool = False) -> Formatters:
    """Return the formatters of a model.py, and the parser of tool calls; importing them runs them.

    Before that, what requirements.txt beside model.py names is installed.

    Args:
        config: may name the formatters.
        directory: where model.py lies; by default beside serving.properties, else in the model's own directory.
        handlers: the host calls handlers and middleware of AWS's vLLM image, and LMI's handle, too.

    Raises:
        ConfigError: model.py cannot be used, or an option names what it does not have.
    """
    own = model_py_directory(config) if directory is None else None  # DJL Serving installs requirements.txt itself
    if (file := user_files.requirements_file(own, wanted=config.install_requirements)) is not None:
        user_files.install(file)
    custom: Handlers | None = None
    if handlers:
        with collecting() as decorated:
            formatters = find_formatters(directory or own, handlers=STANDARDS)
        custom = find_handlers(handlers_home(config), environment.custom_code(), decorated)
    else:
        formatters = find_formatters(directory or own)
    try:
        key, name = "option.input_formatter", config.input_formatter
        read = choose(formatters.inputs, name, "input")
        key, name = "option.output_formatter", config.output_formatter
        write = None if name in FRAMINGS else choose(formatters.outputs, name, "output")
    except ValueError as error:
        raise ConfigError(f"{config.where(key)}: {key}={name}: {error}" if name else f"{error} by {key}") from None
    if write is not None and config.rolling_batch == "disable" and config.handle_role is not Role.ALONE:
        raise ConfigError(
            f"model.py's output formatter {write.name!r} is for rolling batch, but option.rolling_batch=disable "
            f"({config.where('option.rolling_batch')}); option.output_formatter=json leaves it out"
        )
    plugin = config.tool_parser_plugin and load_tool_format(config.tool_parser_plugin, plugin_directories(config))
    handle = users_handle(config, model_py(directory or own)) if handlers else None
    return Formatters(read, write, config, custom, handle, plugin or None)


def users_handle(config: Config, path: Path | None) -> Handle | None:
    """Return LMI's `handle` of a model.py where it is called.

    Raises:
        ConfigError: it cannot be.
    """
    if unused := unused_handle(config, path):
        log.warning("%s", unused)
    if path is None or config.handle_role is Role.NONE:
        return None
    device = "0" if Path("/dev/nvidia0").exists() else "-1"
    return find_handle(path, config.handle_role, config.settings, release=config.lmi_version, device=device)


def model_py_directory(config: Config) -> Path | None:
    """Return where DJL would have model.py: beside serving.properties, else in the model's own directory."""
    if config.directory is not None:
        return config.directory
    return Path(config.model_id) if config.model_id and Path(config.model_id).is_dir() else None


def handlers_home(config: Config) -> Path:
    """Return where the script of AWS's vLLM image lies: where model.py does, else where SageMaker lays a model."""
    return model_py_directory(config) or environment.model_path()


def users_files(config: Config) -> list[Path]:
    """Return the files of the user's code that a host imports which calls handlers."""
    own = model_py(model_py_directory(config))
    files = [own, *files_of(handlers_home(config), environment.custom_code())]
    if config.handle_role is not Role.ALONE:
        files += [model_py(path) for path in adapters_at_start(config, None).values()]
    return list(dict.fromkeys(path for path in files if path is not None))


def plugin_directories(config: Config) -> tuple[Path | None, Path]:
    """Return where the files of options lie: beside serving.properties, else in the working directory."""
    return config.directory, Path()


def adapter_home(config: Config, spec: Spec, directory: Path | None = None) -> AdapterHome:
    """Find the adapters beside the model, in `adapters/`.

    Args:
        directory: where serving.properties lies, or would; by default where it does.

    Raises:
        ConfigError: one of them cannot be used; or the environment's number of adapters is none.
    """
    limit = environment.max_adapters()
    if config.handle_role is Role.ALONE:
        return AdapterHome(AdapterRegistry(limit, unavailable="no engine is loaded: handle of model.py answers alone"))
    homes = adapter_directories(config, directory)
    if missing := engines.capabilities(spec.engine, spec.config).no_adapters:
        if config.engine_options.get("lora_modules"):
            raise ConfigError(f"option.lora_modules: {spec.engine}: {missing}")
        if homes:
            log.warning("the adapters in %s are not loaded: %s: %s", homes[0], spec.engine, missing)
        return AdapterHome(AdapterRegistry(limit, unavailable=f"{spec.engine}: {missing}"))
    return AdapterHome(AdapterRegistry(limit, _base(config, directory)), adapters_at_start(config, directory))


def adapters_at_start(config: Config, directory: Path | None) -> dict[str, Path]:
    """Find the adapters that a start loads by name: those beside the model, and those of option.lora_modules.

    Raises:
        ConfigError: one of them cannot be used.
    """
    named = config.engine_options.get("lora_modules") or {}
    return {**adapters_in(adapter_directories(config, directory)), **named_adapters(named, _base(config, directory))}


def _base(config: Config, directory: Path | None) -> Path | None:
    """Return the directory at which relative paths of adapters begin."""
    if homes := adapter_directories(config, directory):
        return homes[0]
    first = next((place for place in _places(config, directory) if place.is_dir()), None)
    return first and first.absolute() / "adapters"


def _places(config: Config, directory: Path | None) -> list[Path]:
    places = [directory or config.directory, Path(config.model_id) if config.model_id else None]
    return [place for place in dict.fromkeys(places) if place]


def adapter_directories(config: Config, directory: Path | None) -> list[Path]:
    places = _places(config, directory)
    return [path for place in places if (path := place.absolute() / "adapters").is_dir()]


# -- the sampling parameters that hold where clients leave them out: those of the model's generation_config.json -------


_LENGTH = "max_new_tokens"


def generation_defaults(config: Config, model: Path | None, able: Capabilities) -> GenerationDefaults:
    """Read the model's defaults, and log which hold. One that the engine does not support is left out with a warning.

    Raises:
        ConfigError: as `read_defaults`.
    """
    values = read_defaults(config, model)
    length = values.pop(_LENGTH, None)
    for name, why in ((name, _unsupported(name, value, able)) for name, value in [*values.items()]):
        if why:
            log.warning("the model's default %s=%s has no effect: %s", name, values.pop(name), why)
    if unread := [name for name in config.override_generation_config or () if name not in MODEL_DEFAULTS]:
        log.warning("%s: %s has no effect", model_files.OVERRIDE, ", ".join(unread))
    limits = model_files.limits_answers(config)
    found = GenerationDefaults(values, length, length if limits else None)
    if found.shown:
        said = ", ".join(f"{name}={value:g}" for name, value in found.shown.items())
        log.info(
            "sampling parameters that clients leave out: %s (%s; %s=vllm turns the model's off)",
            said,
            model_files.origin(config, model),
            model_files.KEY,
        )
    return found


def read_defaults(config: Config, model: Path | None) -> dict[str, Any]:
    """Read the fields of Sampling that generation_config.json and `option.override_generation_config` set.

    Raises:
        ConfigError: with all values that are wrong, or as `model_files.sampling_values`.
    """
    values, problems = model_files.sampling_values(config, model), Problems()
    read: dict[str, Any] = {}
    for name, reader in MODEL_DEFAULTS.items():
        if (value := values.get(name)) is None:
            continue
        try:
            read[name] = reader(value)
        except ValueError as error:
            problems.append(model_files.wrong_value(config, model, name, value, str(error)))
    problems.check()
    return read


def _unsupported(name: str, value: Any, able: Capabilities) -> str:
    """Return why the engine cannot follow a default; "" where it can, or where the value changes nothing."""
    if value == Sampling._field_defaults[name]:
        return ""
    if why := able.unsupported.get(name):
        return f"the engine lacks it: {why}"
    most = able.limits.get(name)
    return f"the engine takes at most {most:g}" if most is not None and value > most else ""


# -- the engines of a model: one, or `option.replicas` of them, each with its own devices or cores ---------------------


_KEY = "option.replicas"
_LEAST_PATIENCE = 2.0  # seconds; a step of a slow model takes one
_SILENT = 0.25  # the part of option.engine_timeout without a step after which requests may move to another replica


def start_engine(config: Config, spec: Spec) -> EngineSupervisor | ReplicaSet:
    """Start the engine, or all its replicas.

    Raises:
        ConfigError: there are too few devices, or as in check_replicas.
    """
    isolated = engines.entry(spec.engine).isolated
    if config.engine_isolation != "auto":
        isolated = config.engine_isolation == "process"
    timeouts = {"timeout": config.engine_timeout, "load_timeout": config.model_loading_timeout}
    check_replicas(config)
    places = [ANYWHERE] if config.replicas == "1" else replica_places(config, _devices(spec), _cores())
    started: list[EngineSupervisor] = []
    for place in places:
        if len(places) > 1:
            where = ", ".join(f"{name}={value}" for name, value in place.environ.items())
            cores = ",".join(map(str, sorted(place.cores)))
            log.info("replica %d: %s", len(started), where or (cores and f"cores {cores}") or "starts")
        started.append(EngineSupervisor(spec, isolated=isolated or len(places) > 1, place=place, **timeouts))
    if len(started) == 1:
        return started[0]
    follows = config.enable_prefix_caching
    if follows is None:  # as the engine does
        follows = ENGINES[spec.engine].caches_prefixes
    patience = max(config.engine_timeout * _SILENT, _LEAST_PATIENCE)
    return ReplicaSet(started, config.max_rolling_batch_size, follows_prompts=follows, patience=patience)


def check_replicas(config: Config) -> None:
    """Check what needs no look at the machine.

    Raises:
        ConfigError: replicas are to run on threads, or the engine is one by URL.
    """
    if config.replicas != "1" and config.engine == "openai":
        _refuse(
            config, "for several servers by URL, list their addresses in option.base_url; leave option.replicas out"
        )
    if config.replicas != "1" and config.engine_isolation == "thread":
        where = config.where("option.engine_isolation")
        _refuse(config, f"replicas are processes, but option.engine_isolation=thread ({where})")


def replica_places(config: Config, devices: Sequence[str], cores: Sequence[int]) -> list[Place]:
    """Return the place of each of several replicas, or that of the one that `auto` finds room for.

    Args:
        devices: the GPUs that the engine may use; empty: it runs on the cores.
        cores: empty where processes cannot be kept to cores.

    Raises:
        ConfigError: there are too few devices.
    """
    if not devices:
        return [ANYWHERE] if config.replicas == "auto" else on_cores(cores, int(config.replicas))
    model = spread(config.tensor_parallel_degree, config.engine_options)
    each = model.gpus(len(devices))
    if config.replicas == "auto":
        count = max(len(devices) // each, 1)
        return [ANYWHERE] if count == 1 else on_devices(devices[: count * each], count)
    count = int(config.replicas)
    if count * model.least > len(devices):
        _refuse(config, f"with {model} it needs {count * model.least} GPUs; there are {len(devices)}")
    return on_devices(devices if model.tensor is None else devices[: count * each], count)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _devices(spec: Spec) -> list[str]:
    """Name the GPUs; none for an engine that runs on the processor."""
    return visible_gpus(read_driver(), os.environ) if ENGINES[spec.engine].spreads else []


def _refuse(config: Config, why: str) -> None:
    raise ConfigError(Problem(config.where(_KEY), _KEY, f"{_KEY}={config.replicas}: {why}"))


# -- the model's own response template, where it reads the answers -----------------------------------------------------


_OPTIONS = ("option.reasoning_parser", "option.tool_call_parser")


def response_template(config: Config, model: Path | None) -> ResponseTemplate | None:
    """Read the template of the tokenizer's files; None where there is none, or the options leave it out.

    It reads whole answers, so `auto` takes it unless an option names another parser. One that is wrong is left out
    with a warning there, and refused where an option names it.

    Args:
        model: the model's directory or file.

    Raises:
        ConfigError: an option names it, and it is missing, wrong, lacks that part, or stands beside another parser.
    """
    given = dict(zip(_OPTIONS, (config.reasoning, config.tool_call_parser), strict=True))
    plugin = {"option.tool_parser_plugin": config.tool_parser_plugin} if config.tool_parser_plugin else {}
    named = [key for key, name in given.items() if name == HF.name]
    others = [f"{key}={name}" for key, name in {**given, **plugin}.items() if name not in (AUTO, NONE, HF.name)]
    if named and others:
        raise _refused(config, named[0], f"reads whole answers, and cannot stand beside {others[0]}")
    if others or set(given.values()) == {NONE}:
        return None
    path = None if model is None else model / "tokenizer_config.json"
    value = None if path is None else read_json(path).get("response_template")
    if value is None:
        if named:
            raise _refused(
                config, named[0], f"{path or 'the model'} has no response_template; auto goes by the chat template"
            )
        return None
    try:
        template = read_response_template(value)
    except ValueError as error:
        if named:
            raise _refused(config, named[0], f"{path}: {error}") from None
        log.warning("%s: %s; answers are read by the chat template", path, error)
        return None
    lacks = {
        "option.reasoning_parser": (template.reasoning, "thinking"),
        "option.tool_call_parser": (template.calls, "tool_calls"),
    }
    for key in named:
        part, name = lacks[key]
        if part is None:
            raise _refused(config, key, f"{path}: response_template.fields has no {name}")
    return template


def _refused(config: Config, key: str, why: str) -> ConfigError:
    return ConfigError(Problem(config.where(key), key, f"{key}={HF.name}: {why}"))


def check(reading: Reading, directory: Path | None = None, *, handlers: bool = False) -> Problems:
    """Find all problems that show before anything is loaded, fetched, converted or run.

    Those of the options, the sessions' path, the replicas, the exporter of traces, the syntax of a user's files, the
    engine, its arguments and files, adapters, the directory of media.

    Args:
        directory: where serving.properties lies, or would; by default where it does.
        handlers: the host calls handlers and middleware of AWS's vLLM image.
    """
    config, problems = reading.config, Problems(reading.problems)
    traces = functools.partial(find_exporter, config.otlp_traces_endpoint)
    template = functools.partial(chat_template, config)
    path = model_py(directory or model_py_directory(config))
    syntax = functools.partial(check_model_py, path)
    if handlers:
        syntax = functools.partial(_check_code, path, config)
    sessions, replicas = functools.partial(sessions_root, config), functools.partial(check_replicas, config)
    plugin = functools.partial(_check_tool_parser, config)
    media = functools.partial(media_rules, config)
    generation = functools.partial(read_defaults, config, Path(config.model_id) if config.model_id else None)
    answers = functools.partial(_check_response_template, config)
    parts = (environment.max_adapters, sessions, replicas, traces, template, syntax, plugin, media, generation, answers)
    for part in parts:
        with problems:
            part()
    if not reading.engine:
        return problems
    arguments = EngineConfig(config)
    with problems:
        found = Problems()
        with found:
            arguments = replace(arguments, task=served_task(config, reading.engine, config.model_id))
        with found:
            engines.check(reading.engine, config.model_id, arguments)
        if found:
            raise ConfigError(*(_with_origin(problem, config) for problem in found))
    with problems:
        name = choose_engine(config)
        if not engines.capabilities(name, arguments).no_adapters:
            for path in adapters_at_start(config, directory).values():
                with problems:
                    check_model_py(model_py(path))
    return problems


def _check_code(path: Path | None, config: Config) -> None:
    home, variables = handlers_home(config), environment.custom_code()
    if path is not None and path != script_of(home, variables):
        check_model_py(path, handlers=STANDARDS)
    check_handlers(home, variables)


def _check_response_template(config: Config) -> None:
    directory = config.engine_options.get("echo_tokenizer") or config.model_id
    if directory and Path(directory).is_dir():  # or it is fetched
        response_template(config, Path(directory))


def _check_tool_parser(config: Config) -> None:
    if config.tool_parser_plugin:
        check_syntax(find_tool_parser(config.tool_parser_plugin, plugin_directories(config)))


def _with_origin(problem: Problem, config: Config) -> Problem:
    """Add the origin of the first option that an engine's problem names; where it names none, it is the model's."""
    named = [key for key in re.findall(r"option\.\w+", problem.message) if key in config.origins]
    key = named[0] if named else problem.name or "option.model_id"
    return Problem(config.origins.get(key, ""), key, problem.message)


# -- read a server's configuration; of a model directory on S3 its serving.properties too ------------------------------


def read_sources(
    model: str | None = None,
    engine: str | None = None,
    properties: Path | None = None,
    overrides: Iterable[str] = (),
) -> Reading:
    """Read the sources of a server that starts, and download options and code of `HF_MODEL_ID=s3://...`.

    As in LMI, that variable names the model directory itself, so that its serving.properties and model.py count.
    `option.model_id` names the model's files alone.

    Args:
        model, engine, properties, overrides: as in `read_server_config`.

    Raises:
        ConfigError: they cannot be downloaded.
    """
    overrides = list(overrides)
    reading = read_server_config(model, engine, properties, overrides)
    url = reading.config.model_id
    if reading.config.directory or "OPTION_MODEL_ID" in os.environ or url != os.environ.get("HF_MODEL_ID"):
        return reading
    if not (reading.engine and engines.fetches(reading.engine) and s3.is_url(url)):
        return reading
    directory = Path(downloads.fetch(s3.download, url, list(s3.SETTINGS)))
    if (own := directory / "serving.properties").is_file():
        reading = read_server_config(None, engine, own, overrides)
    model_id = reading.config.model_id or url
    return reading._replace(config=replace(reading.config, model_id=model_id, directory=directory))
