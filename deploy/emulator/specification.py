"""The processes of `lmi deploy local FILE`: one for the endpoint, or one for each inference component.

Each process runs one copy of this package's server. The specification's image, instances and scaling apply only on AWS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.emulator.container import Command, settings_of_arguments, start
from deploy.emulator.endpoint import EndpointComponent
from deploy.errors import SpecError
from deploy.spec import Spec
from deploy.spec.components import servers, title
from deploy.spec.options import ADVICE, is_aws_image, options_problems, problems_error, settings_of
from handler.config.engines import ENGINES
from handler.config.options.names import variable
from handler.core.devices import read_driver, visible_gpus

_MIB = 2**20


@dataclass(frozen=True)
class Machine:
    """The resources of this machine that are available to components.

    Attributes:
        memory_mb: total memory of the machine, in MB.
        gpus: the GPUs in the notation of CUDA_VISIBLE_DEVICES. If empty, components run on the CPU.
    """

    memory_mb: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Started:
    """The processes to start, and the inference components that they serve.

    Attributes:
        commands: commands by component name. An endpoint without components has the name "".
        components: components, including adapters, by name. Each has the address of its process.
        adapters: directories of adapters, by the name of the adapter component.
        notes: differences from a deployment on AWS, each as a sentence.
    """

    commands: Mapping[str, Command]
    components: Mapping[str, EndpointComponent]
    adapters: Mapping[str, str]
    notes: tuple[str, ...] = ()


def this_machine() -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB
    return Machine(memory, tuple(visible_gpus(read_driver(), os.environ)))


def with_arguments(spec: Spec, options: Sequence[str], engine: str | None) -> Spec:
    """Return the specification with the options from the command line set for the endpoint and every component.

    Raises:
        DeployError: an option is not KEY=VALUE.
        SpecError: the container would reject an option.
    """
    extra = {name.removeprefix("option."): value for name, value in settings_of_arguments(options).items()}
    if engine:
        extra["llm_engine"] = engine
    components = tuple(item.model_copy(update={"options": {**item.options, **extra}}) for item in spec.components)
    result = spec.model_copy(update={"options": {**spec.options, **extra}, "components": components})
    if wrong := options_problems(result):
        raise problems_error(wrong, ADVICE)
    return result


OF_ADAPTERS = ("option.enable_lora=true", "option.adapters_root=/", "option.adapters_code=true")
"""Options of a server with adapters, in any directory of this machine, because only the emulator registers them."""


def started(spec: Spec, port: Callable[[], int], *, machine: Machine, adapters: Mapping[str, str]) -> Started:
    """Return the processes to start for a specification.

    Args:
        port: function that returns a free port on each call.
        adapters: directories of the specification's adapters, by name.

    Raises:
        SpecError: a component does not fit on this machine, its model or an adapter is not on this machine, or all
            components have 0 copies.
    """
    _refuse_without_room(spec, machine)
    gpus, processes = _gpus(spec, machine), _processes(spec)
    ports = _free_ports(port, processes)
    commands = {
        name: start({**_variables(server, name), **gpus.get(name, {})}, ports[name])
        for name, server in processes.items()
    }
    if not commands:
        raise SpecError("components[].copies: all components have 0 copies, so there is nothing to start")
    return Started(commands, _components(spec, commands), _directories(spec, adapters), tuple(_notes(spec)))


def command_of(server: Spec, port: int) -> Command:
    """Return the command that runs one server of a specification, without its components, on a port of 127.0.0.1.

    Raises:
        SpecError: the model is not on this machine.
    """
    return start(_variables(server, ""), port)


def _processes(spec: Spec) -> dict[str, Spec]:
    """Return the server that each process runs, by component name ("" if there are no components).

    A component without copies gets no process. Requests to it fail for lack of capacity, as on AWS.
    """
    if not spec.components:
        return {"": spec}
    return {item.name: server for server in servers(spec) for item in server.components if item.copies}


def _free_ports(port: Callable[[], int], names: Iterable[str]) -> dict[str, int]:
    """Return a different free port for each name, even if `port` repeats a port that no process listens on yet."""
    ports: dict[str, int] = {}
    for name in names:
        while (number := port()) in ports.values():
            continue
        ports[name] = number
    return ports


def _components(spec: Spec, commands: Mapping[str, Command]) -> dict[str, EndpointComponent]:
    """Return the specification's components, followed by their adapters, by name."""
    urls = {name: command.url for name, command in commands.items()}
    bases = {
        item.name: EndpointComponent(copies=item.copies, container=urls.get(item.name)) for item in spec.components
    }
    return bases | {
        adapter.name: EndpointComponent(adapter.name, item.copies, urls.get(item.name), base=item.name)
        for item in spec.components
        for adapter in item.adapters
    }


def _refuse_without_room(spec: Spec, machine: Machine) -> None:
    left = machine.memory_mb
    for item in spec.components:
        needed = item.memory_mb if item.copies else 0
        if needed > left:
            raise SpecError(
                f"component {item.name}: memory_mb: {needed} MB are requested, but only {left} MB of this machine's "
                f"{machine.memory_mb} MB are left",
                "Run fewer components here (copies: 0), or lower memory_mb. With --set, the file stays unchanged.",
            )
        left -= needed


def _gpus(spec: Spec, machine: Machine) -> dict[str, dict[str, str]]:
    """Return the variable that assigns GPUs to each component. As on SageMaker, components do not share GPUs."""
    left = list(machine.gpus)
    variables: dict[str, dict[str, str]] = {}
    for server in servers(spec):
        engine = ENGINES.get(str(server.options.get("llm_engine")))
        if not machine.gpus or (engine is not None and not engine.spreads):
            continue
        for item in server.components:
            if not item.copies:
                continue
            if item.accelerators > len(left):
                raise SpecError(
                    f"component {item.name}: accelerators: {item.accelerators} GPUs are requested, but only "
                    f"{len(left)} of this machine's {len(machine.gpus)} GPUs are left",
                    "Run fewer components here (copies: 0), or use an engine that needs no GPU (--engine echo).",
                )
            taken, left = left[: item.accelerators], left[item.accelerators :]
            variables[item.name] = {"CUDA_VISIBLE_DEVICES": ",".join(taken)}
    return variables


def _variables(server: Spec, name: str) -> dict[str, str]:
    """Return the environment variables of a server process: the same as on AWS, but with a local model path."""
    environ = {setting.name: setting.value for setting in settings_of(server.options, server.environment)}
    if server.model.context is not None:
        environ.setdefault("OPTION_MAX_MODEL_LEN", str(server.model.context))
    if any(item.adapters for item in server.components):
        environ |= {variable(name): value for name, value in settings_of_arguments(OF_ADAPTERS).items()}
    if server.network.isolated:
        environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**environ, **_model(server, f"component {name}: " if name else "")}


def _model(server: Spec, who: str) -> dict[str, str]:
    model = server.model
    if model.id is not None:
        return {"SAGEMAKER_MODEL_PATH": os.devnull, "OPTION_MODEL_ID": model.id}
    if model.directory is not None:
        if not model.directory.is_dir():
            raise SpecError(f"{who}model.path: {model.path} is not a directory on this machine")
        return {"SAGEMAKER_MODEL_PATH": str(model.directory.resolve())}
    raise SpecError(
        f"{who}model.s3: {model.s3} is not on this machine",
        "Use model.path with model.upload, or model.id, or rehearse the deployment: lmi deploy local --aws.",
    )


def _directories(spec: Spec, adapters: Mapping[str, str]) -> dict[str, str]:
    """Return the directories of the adapters to load, by name. Components without copies load no adapters."""
    loaded = [(item.name, adapter.name) for item in spec.components if item.copies for adapter in item.adapters]
    for component, adapter in loaded:
        if adapter not in adapters:
            raise SpecError(
                f"component {component}: adapters: {adapter} is in S3, not on this machine",
                f"Unpack the adapter, and pass its directory: --adapter {adapter}=PATH",
            )
    if unknown := adapters.keys() - {adapter.name for item in spec.components for adapter in item.adapters}:
        raise SpecError(f"--adapter {sorted(unknown)[0]}: there is no such adapter (components[].adapters)")
    return {adapter: adapters[adapter] for _, adapter in loaded}


def _notes(spec: Spec) -> Iterator[str]:
    for server in servers(spec):
        if server.image.aws is not None or is_aws_image(server.image.uri or ""):
            yield f"{_who(server)}this package's server runs here instead of AWS's image, with the same options."
        if server.model.token_secret is not None:
            yield f"{_who(server)}model.token_secret is ignored here, so the model is downloaded without a token."
    if spec.shadow is not None:
        yield "shadow: the shadow variant does not run here. `lmi deploy local --aws` emulates its data capture."
    if spec.capture is not None:
        yield "capture: data capture is off here. Use `lmi deploy local --aws` to emulate it."
    for item in spec.components:
        if item.copies > 1:
            yield f"component {item.name}: only one of {item.copies} copies runs here."


def _who(server: Spec) -> str:
    return f"{title(server)}: " if server.components else ""
