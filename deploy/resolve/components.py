"""Resolve the inference components of an endpoint: a common instance type, and enough resources for all copies.

SageMaker starts a copy only on an instance with enough free resources. A copy does not share its GPUs, and reserves a
part of the instance's memory and cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from deploy.errors import DoesNotFit, SpecError
from deploy.resolve.decision import Decision, joined
from deploy.resolve.fit import Fit, Resolution, cheapest, cpu_limit
from deploy.resolve.instances import InstanceType, find
from deploy.spec import Spec
from deploy.spec.components import servers, title
from deploy.spec.sections import Component, Model


@dataclass(frozen=True)
class Placed:
    """A component and the resources that it needs.

    Attributes:
        name: name of the component.
        model: name, S3 URI or path of the model.
        copies: initial number of copies.
        gpus: number of GPUs for each copy.
        memory_mb: host memory for each copy, in MB.
        cpus: number of cores for each copy, or 0 if the component requests no cores.
        fit: the model's memory on the instance type, or None if the model size or the type is unknown.
    """

    name: str
    model: str
    copies: int
    gpus: int
    memory_mb: int
    cpus: float = 0.0
    fit: Fit | None = None


@dataclass(frozen=True)
class Sums:
    """The resources that the initial copies of all components need, and the resources that the instances have.

    Attributes:
        placed: components, each with the resources that it needs.
        instance: the instance type, or None if it is unknown.
        count: number of instances.
    """

    placed: tuple[Placed, ...]
    instance: InstanceType | None
    count: int

    def rows(self) -> Iterator[tuple[str, float, float]]:
        """Yield each resource's name, the amount that all copies need, and the amount that all instances have."""
        if self.instance is None:
            return
        for name, of_copy, has in _resources(self.instance):
            taken = sum(item.copies * of_copy(item) for item in self.placed)
            if has:
                yield name, taken, has * self.count


def resolve_components(spec: Spec, resolve: Callable[[Spec], Resolution]) -> Resolution:
    """Resolve each server of the components separately, and merge the decisions.

    Args:
        resolve: function that resolves a specification whose components share one server.

    Raises:
        DoesNotFit: a model does not fit, or no instance type has enough resources for the initial copies.
        SpecError: a server's settings are invalid, the servers need different hosts, or the instances do not have
            enough resources for the initial copies.
    """
    served = _serve(spec, servers(spec), resolve)
    _check_hosts(served)
    sums = _sums(spec, served, find(served[0].decision.instance_type))
    if not spec.instance.unchecked and (problem := _without_room(sums, spec)):
        raise SpecError(problem, _MORE_ROOM)
    decision = joined(
        [item.decision for item in served],
        (*_warnings(served), *_tight(sums, spec)),
        components={component.name: item.decision for item in served for component in item.server.components},
    )
    first = served[0].resolution
    return replace(first, decision=decision, candidates=first.candidates if len(served) == 1 else None, sums=sums)


class ResolvedServer(NamedTuple):
    """A server that serves components, and its resolution."""

    server: Spec
    resolution: Resolution

    @property
    def decision(self) -> Decision:
        return self.resolution.decision


def _serve(spec: Spec, groups: Sequence[Spec], resolve: Callable[[Spec], Resolution]) -> list[ResolvedServer]:
    """Resolve each server. With `auto`, resolve them again on the common instance type unless all of them chose it."""
    served = [ResolvedServer(server, _resolved_server(server, resolve, alone=len(groups) == 1)) for server in groups]
    if spec.instance.type != "auto":
        return served
    kind = _common_type(spec, served)
    if all(item.decision.instance_type == kind for item in served):
        return served
    instance = spec.instance.model_copy(update={"type": kind})
    on_type = [server.model_copy(update={"instance": instance}) for server in groups]
    return _serve(spec.model_copy(update={"instance": instance}), on_type, resolve)


_MORE_ROOM = "Use fewer copies, fewer accelerators each, or more instances. options.replicas adds engines to a copy."


def without_room(sums: Sums, where: str) -> str:
    """Return why the instances do not have enough resources for the initial copies, or an empty string if they do.

    Args:
        where: text that names the instances.
    """
    for name, taken, has in sums.rows():
        if taken > has:
            need = f"{taken:g} {_UNITS[name]}"
            return f"components[].copies: the initial copies need {need}, but {where} have {has:g}"
    return ""


_UNITS = {
    "accelerators": "GPUs",
    "memory_mb": "MB of memory (memory_mb)",
    "cpus": "CPU cores (cpus)",
    "models": "GiB of memory for their models",
}


def _without_room(sums: Sums, spec: Spec) -> str:
    return without_room(sums, _where(sums, spec)) if sums.instance is not None else ""


def _where(sums: Sums, spec: Spec) -> str:
    name = "" if sums.instance is None else sums.instance.name
    return f"{sums.count} x {name}" + ("" if spec.instance.managed is None else " (instance.managed.max)")


def _resources(instance: InstanceType) -> list[tuple[str, Callable[[Placed], float], float]]:
    return [
        ("accelerators", lambda item: item.gpus, instance.gpus),
        ("memory_mb", lambda item: item.memory_mb, instance.ram_gib * 1024),
        ("cpus", lambda item: item.cpus, instance.vcpus),
        # Without GPUs, the models are in the host's memory.
        ("models", _held, 0.0 if instance.gpus else round(cpu_limit(instance), 1)),
    ]


def _held(item: Placed) -> float:
    """Return the size of a copy's weights and other memory, without its KV cache, in GiB."""
    return 0.0 if item.fit is None else round(item.fit.weights + item.fit.overhead, 1)


def _resolved_server(server: Spec, resolve: Callable[[Spec], Resolution], *, alone: bool) -> Resolution:
    try:
        return resolve(server)
    except (DoesNotFit, SpecError) as error:
        if alone:
            raise
        raise type(error)(f"{title(server)}: {error}", error.advice) from error


def _common_type(spec: Spec, served: Sequence[ResolvedServer]) -> str:
    """Return the cheapest instance type on which each model fits, with enough resources for all initial copies.

    If there is only one server and no such type, return the cheapest type on which its model fits.

    Raises:
        DoesNotFit: there are several servers, and no such type.
    """
    candidates = [item.resolution.candidates.fits for item in served if item.resolution.candidates is not None]
    for name in _types_of_all(candidates):
        if not any(taken > has for _, taken, has in _sums(spec, served, find(name)).rows()):
            return name
    if len(served) == 1:
        return cheapest(candidates[0]).instance.name  # the later check of the copies reports the problem
    raise DoesNotFit(
        "instance.type: auto: no known instance type has enough resources for the initial copies of all components",
        f"{_MORE_ROOM} Or choose the type yourself with instance.type.",
    )


def _types_of_all(candidates: Sequence[Sequence[Fit]]) -> list[str]:
    """Return the instance types on which each model fits, sorted by their worst rank for any model."""
    ranks = [{item.instance.name: rank for rank, item in enumerate(fits)} for fits in candidates]
    fitting = [{item.instance.name for item in fits if item.fits} for fits in candidates]
    return sorted(set.intersection(*fitting), key=lambda name: (max(of_model[name] for of_model in ranks), name))


def _sums(spec: Spec, served: Sequence[ResolvedServer], instance: InstanceType | None) -> Sums:
    """Return the resources that the copies need, and the resources that the specification's instances have."""
    needed = []
    for server, resolution in served:
        needed += [placed(item, server.model, resolution.decision, resolution.chosen) for item in server.components]
    return Sums(tuple(needed), instance, _instances(spec))


def placed(item: Component, model: Model, decision: Decision, fit: Fit | None = None) -> Placed:
    gpus = item.accelerators if decision.gpus else 0
    where = model.id or model.s3 or model.path or ""
    return Placed(item.name, where, item.copies, gpus, item.memory_mb, item.cpus or 0.0, fit)


def _instances(spec: Spec) -> int:
    return spec.instance.count if spec.instance.managed is None else spec.instance.managed.max


def _check_hosts(served: Sequence[ResolvedServer]) -> None:
    """Check that all images can run on the same host AMI, as an endpoint configuration has only one AMI.

    Raises:
        SpecError: the images need different values of InferenceAmiVersion.
    """
    if len({item.decision.ami for item in served}) > 1:
        hosts = "; ".join(f"{title(item.server)}: {item.decision.ami or 'the default'}" for item in served)
        raise SpecError(
            f"components[].image: the images need different host AMIs ({hosts}), but an endpoint has only one",
            "Use images with the same CUDA version (set image.cuda if the tag does not state it), or set instance.ami.",
        )


def _warnings(served: Sequence[ResolvedServer]) -> Iterator[str]:
    """Yield the warnings of all servers. A warning that does not concern all servers names its components."""
    common = set.intersection(*(set(item.decision.warnings) for item in served))
    for item in served:
        for warning in item.decision.warnings:
            yield warning if warning in common else f"{title(item.server)}: {warning}"


def _tight(sums: Sums, spec: Spec) -> Iterator[str]:
    """Yield a warning for each resource that may be too small: on single instances, for a model, or after scaling."""
    if sums.instance is None:
        return
    if spec.instance.unchecked and (problem := _without_room(sums, spec)):
        yield f"{problem} (instance.unchecked)."
    elif alone := _left_over(sums):
        yield (
            f"components[].copies: {alone} may not find an instance with enough free resources, as each copy must fit "
            f"on a single {sums.instance.name}."
        )
    if not sums.instance.gpus:
        for item in sums.placed:
            if item.fit is not None and item.memory_mb < (
                needed := round(1024 * (item.fit.weights + item.fit.overhead))
            ):
                yield f"component {item.name}: memory_mb is {item.memory_mb}, but the model needs about {needed} MB."
    if spec.scaling is not None and sums.instance.gpus:
        gpus = sum(max(spec.scaling.max, item.copies) * item.gpus for item in sums.placed)
        have = sums.count * sums.instance.gpus
        if gpus > have:
            where = _where(sums, spec)
            yield f"scaling.max: with all components at their maximum, {gpus} GPUs are needed, but {where} have {have}."


def _left_over(sums: Sums) -> str:
    """Return a component with a copy that fits on no instance if larger copies are placed first, or an empty string.

    The amount of work is bounded, because there are at most a thousand copies and instances, and identical copies are
    placed together.
    """
    assert sums.instance is not None
    resources = [resource for resource in _resources(sums.instance) if resource[2]]
    free = [Room([has for _, _, has in resources], sums.count)]
    for item in sorted(sums.placed, key=lambda placed: tuple(-of_copy(placed) for _, of_copy, _ in resources)):
        free, left = _distribute(item.copies, [of_copy(item) for _, of_copy, _ in resources], free)
        if left:
            return f"component {item.name}"
    return ""


class Room(NamedTuple):
    """A number of identical instances, and the resources that are free on each of them."""

    free: list[float]
    instances: int

    def copies(self, needs: Sequence[float], maximum: int) -> int:
        """Return the number of copies that fit on one instance, or `maximum` if a copy needs no resources."""
        return min((int(has // need) for has, need in zip(self.free, needs, strict=True) if need), default=maximum)

    def less(self, needs: Sequence[float], copies: int, instances: int) -> Room:
        """Return the resources that remain free on some of the instances after placing `copies` more copies on each."""
        return Room([has - copies * need for has, need in zip(self.free, needs, strict=True)], instances)


def _distribute(left: int, needs: Sequence[float], free: Sequence[Room]) -> tuple[list[Room], int]:
    """Place copies on instances. Return the free resources, and the number of copies that could not be placed.

    Args:
        left: number of copies to place.
        needs: resources that each copy needs.
    """
    remaining: list[Room] = []
    for room in free:
        each = room.copies(needs, left)
        full = min(left // each, room.instances) if each else 0
        left -= each * full
        extra = min(each, left) if full < room.instances else 0  # on one more instance
        left -= extra
        parts = ((each, full), (extra, int(extra > 0)), (0, room.instances - full - int(extra > 0)))
        remaining += [room.less(needs, copies, instances) for copies, instances in parts if instances]
    return remaining, left
