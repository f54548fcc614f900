"""Whether engines (option.replicas) fit the GPUs of an instance, or of a component."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.errors import SpecError
from deploy.resolve.instances import InstanceType
from deploy.spec import Spec


def device_warnings(spec: Spec, instance: InstanceType | None, degree: int) -> tuple[str, ...]:
    """Return a sentence for what stays idle.

    Args:
        instance: None: the tables do not know the type, and nothing is checked.
        degree: GPUs of one engine: tensor parallel degree times pipeline stages.

    Raises:
        SpecError: a server's engines need more GPUs than it has.
    """
    if instance is None or instance.gpus == 0:
        return ()
    servers = [(f"component {item.name}", item.accelerators) for item in spec.components] or [
        (instance.name, instance.gpus)
    ]
    return tuple(sentence for where, gpus in servers for sentence in _engines(spec, where, gpus, degree))


def num_engines(spec: Spec, gpus: int, degree: int) -> int:
    """Return the engines (option.replicas) of a server with so many GPUs, `degree` of them for each."""
    replicas = str(spec.options.get("replicas", 1))
    if replicas == "auto":
        return 1 if _takes_all(spec) else max(gpus // degree, 1)
    return int(replicas) if replicas.isdigit() else 1


def _takes_all(spec: Spec) -> bool:
    """Whether the engines share all GPUs that there are."""
    return spec.options.get("tensor_parallel_degree") == "max"


def _engines(spec: Spec, where: str, gpus: int, degree: int) -> Iterator[str]:
    if _takes_all(spec):
        return
    count = num_engines(spec, gpus, degree)
    needed = count * degree
    if needed > gpus:
        engines = f"{count} engine{'s' * (count > 1)} of {degree} GPU{'s' * (degree > 1)}"
        name = "replicas" if count > 1 else "tensor_parallel_degree"
        raise SpecError(
            f"options.{name}: {engines} need {needed} GPUs, and {where} has {gpus}",
            "Take fewer replicas, a smaller degree, more components[].accelerators, or a larger type.",
        )
    if needed < gpus:
        yield f"{where}: {gpus - needed} of {gpus} GPUs stay idle; options.replicas: auto starts engines on them."
