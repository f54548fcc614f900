"""Whether engines (option.replicas) and copies of components fit the GPUs of an instance, and of all instances."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.errors import SpecError
from deploy.resolve.instances import InstanceType
from deploy.spec import Spec


def device_warnings(spec: Spec, instance: InstanceType | None, degree: int) -> tuple[str, ...]:
    """Return a sentence for what stays idle, or has no room after scaling.

    Args:
        instance: None: the tables do not know the type, and nothing is checked.
        degree: GPUs of one engine: tensor parallel degree times pipeline stages.

    Raises:
        SpecError: a server's engines need more GPUs than it has, or the copies more than the instances have.
    """
    if instance is None or instance.gpus == 0:
        return ()
    servers = [(f"component {item.name}", item.accelerators) for item in spec.components] or [
        (instance.name, instance.gpus)
    ]
    found = [sentence for where, gpus in servers for sentence in _engines(spec, where, gpus, degree)]
    return (*found, *_copies(spec, instance))


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


def _copies(spec: Spec, instance: InstanceType) -> Iterator[str]:
    """Compare the GPUs of all copies with those of all instances, as SageMaker starts no copy without room."""
    if not spec.components:
        return
    managed = spec.instance.managed
    count = spec.instance.count if managed is None else managed.max
    have = count * instance.gpus
    first = sum(item.copies * item.accelerators for item in spec.components)
    place = f"{count} x {instance.name}" + ("" if managed is None else " (instance.managed.max)")
    if first > have and not spec.instance.unchecked:
        raise SpecError(
            f"components[].copies: the first copies need {first} GPUs, and {place} have {have}",
            "Take fewer copies, fewer accelerators each, or more instances; options.replicas adds engines to a copy.",
        )
    if spec.scaling is not None:
        most = sum(max(spec.scaling.max, item.copies) * item.accelerators for item in spec.components)
        if most > have:
            yield f"scaling.max: all components at their maximum need {most} GPUs, and {place} have {have}."
