"""SageMaker's instance types, from a table that `python -m tests.tools.instances` updates.

AWS adds types every few months, so an unknown type is accepted with a warning. Types that can run none of the images
are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from deploy.data import table
from deploy.errors import SpecError
from deploy.service_model import instance_types
from deploy.spec import Spec
from deploy.spec.values import Architecture
from handler.config.engines import ENGINES
from handler.core.numbers import is_digits

_NVLINK = ("p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300")
_ARM = re.compile(r"[a-z]+[0-9]+[a-z]*g[a-z]*|p[0-9]+e-gb[0-9]+")
GPU_FAMILIES = ("g", "p")
"""The first letters of families with GPUs."""

_OTHER_CHIPS = {"inf": "Inferentia", "trn": "Trainium", "dl": "Gaudi", "eia": "Elastic Inference"}

LLAMACPP = "llamacpp"
"""The engine that uses GPUs if the image has llama.cpp with CUDA, and the CPU otherwise."""

CPU_ENGINES = [name for name, engine in ENGINES.items() if not engine.spreads and name != LLAMACPP]
"""The engines that do not use a GPU."""


def without_gpus(engine: object, cuda: tuple[int, int] | None) -> bool:
    """Return whether an engine uses no GPU in an image with this CUDA version, or with none."""
    return engine in CPU_ENGINES or (engine == LLAMACPP and cuda is None)


@dataclass(frozen=True)
class InstanceType:
    """One instance type.

    Attributes:
        name: name of the type, e.g. `ml.g6e.xlarge`.
        gpu: name of the GPU, or None for a CPU type.
        gpus: number of GPUs.
        gpu_mib: memory of one GPU in MiB, as reported by the driver (22888 for an "A10G 24 GB").
        vcpus: number of vCPUs.
        ram_gib: memory of the host in GiB.
        nvme_gb: size of the local NVMe disk in GB, or 0 if the type uses an EBS volume.
        compute: compute capability of the GPU, e.g. (8, 9), or (0, 0) for a CPU type.
    """

    name: str
    gpu: str | None
    gpus: int
    gpu_mib: int
    vcpus: int
    ram_gib: int
    nvme_gb: int
    compute: tuple[int, int]

    @property
    def family(self) -> str:
        return family(self.name)

    @property
    def architecture(self) -> Architecture:
        return architecture(self.name)

    @property
    def gpu_gib(self) -> float:
        return self.gpu_mib / 1024

    @property
    def nvlink(self) -> bool:
        """Return whether NVLink connects the GPUs, rather than only the PCIe bus."""
        return self.gpus > 1 and self.family in _NVLINK

    @property
    def blackwell(self) -> bool:
        return self.compute >= (10, 0)


def family(name: str) -> str:
    """Return the family of an instance type, e.g. `g6e` for `ml.g6e.xlarge`."""
    return name.removeprefix("ml.").partition(".")[0]


def architecture(name: str) -> Architecture:
    """Return the processor architecture of an instance type, known or not, by its family's name."""
    return "arm64" if _ARM.fullmatch(family(name)) else "amd64"


@cache
def all_types() -> tuple[InstanceType, ...]:
    """Return all known instance types. GPU types come first."""
    return tuple(_gpu_type(*row) for row in table("instances")["gpu"].items()) + tuple(
        InstanceType(name, None, 0, 0, row["vcpu"], row["ram"], 0, (0, 0))
        for name, row in table("instances")["cpu"].items()
    )


def find(name: str) -> InstanceType | None:
    """Return the instance type with this name, or None if it is not in the tables.

    Raises:
        SpecError: the type is an arm64 host with GPUs, or has accelerators that are not NVIDIA GPUs.
    """
    kind = family(name)
    if kind.startswith(GPU_FAMILIES) and architecture(name) == "arm64":
        raise SpecError(
            f"instance.type: {name} is an arm64 host with GPUs, but the images with GPU engines are built for amd64",
            "Use an x86 type with GPUs, such as ml.g6e.* or ml.p5.*.",
        )
    if (chip := _OTHER_CHIPS.get(re.split(r"[0-9]", kind)[0])) is not None:
        raise SpecError(
            f"instance.type: {name} has {chip} accelerators, which none of the handler's engines supports",
            "Use a type with NVIDIA GPUs (ml.g5 to ml.p6) or a CPU type (ml.c7i, ml.m7i).",
        )
    return next((item for item in all_types() if item.name == name), None)


def refuse_mistyped(name: str) -> None:
    """Raise an error for an unknown instance type that is probably a typo.

    Types in botocore's list and types of new generations are accepted.

    Raises:
        SpecError: the name is within an edit distance of 2 of a known type of the same generation.
    """
    names = {*instance_types("ProductionVariantInstanceType"), *(item.name for item in all_types())}
    if name in names:
        return
    generation = re.sub(r"\D", "", family(name))
    away = {item: _edits(name, item) for item in names if re.sub(r"\D", "", family(item)) == generation}
    nearest = min(away.values(), default=3)
    if nearest > 2:
        return
    meant = sorted(item for item, edits in away.items() if edits == nearest)[:3]
    raise SpecError(
        f"instance.type: {name} is unknown; did you mean {' or '.join(meant)}?",
        "If it is a new type, set instance.unchecked: true.",
    )


def _edits(item: str, other: str) -> int:
    """Return the number of letters to insert, delete or change between two names, or 1 for any reordering of them."""
    if sorted(item) == sorted(other):
        return int(item != other)
    previous = list(range(len(other) + 1))  # edits between no letters of `item` and each beginning of `other`
    for number, letter in enumerate(item, 1):
        row = [number]
        for index, letter_of_other in enumerate(other):
            deleted = previous[index + 1] + 1
            inserted = row[index] + 1
            changed = previous[index] + (letter != letter_of_other)
            row.append(min(deleted, inserted, changed))
        previous = row
    return previous[-1]


def _gpu_type(name: str, row: dict[str, str | int]) -> InstanceType:
    major, minor = str(row["sm"]).split(".")
    return InstanceType(
        name,
        str(row["gpu"]),
        int(row["count"]),
        int(row["mib"]),
        int(row["vcpu"]),
        int(row["ram"]),
        int(row["nvme"]),
        (int(major), int(minor)),
    )


# -- check that the engines (option.replicas) fit on the GPUs of an instance or of a component -------------------------


def device_warnings(
    spec: Spec, instance: InstanceType | None, degree: int, cuda: tuple[int, int] | None
) -> tuple[str, ...]:
    """Return a warning for each component or instance with idle GPUs, or a single warning if the engine uses no GPU.

    Args:
        instance: the instance type, or None if it is unknown, in which case nothing is checked.
        degree: number of GPUs of one engine.
        cuda: the CUDA version of the image, or None if it is unknown.

    Raises:
        SpecError: the engines of a component or instance need more GPUs than it has.
    """
    if instance is None or instance.gpus == 0:
        return ()
    if without_gpus(engine := spec.options.get("llm_engine"), cuda):
        gpus = "GPUs" if instance.gpus > 1 else "GPU"
        return (f"{instance.name}: the engine {engine} leaves the {gpus} idle. Use a CPU type (ml.c7i, ml.m7i).",)
    if engine == LLAMACPP:
        return ()  # it divides the layers of a model between all GPUs
    servers = [(f"component {item.name}", item.accelerators) for item in spec.components] or [
        (instance.name, instance.gpus)
    ]
    return tuple(sentence for where, gpus in servers for sentence in _engines(spec, where, gpus, degree))


def num_engines(spec: Spec, gpus: int, degree: int) -> int:
    """Return the number of engines (option.replicas) of a server.

    Args:
        gpus: number of GPUs of the server.
        degree: number of GPUs of one engine.
    """
    replicas = str(spec.options.get("replicas", 1))
    if replicas == "auto":
        return 1 if _takes_all(spec) else max(gpus // degree, 1)
    return int(replicas) if is_digits(replicas) else 1


def _takes_all(spec: Spec) -> bool:
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
            f"options.{name}: {engines} need {needed} GPUs, but {where} has {gpus}",
            "Use fewer replicas, a smaller degree, more components[].accelerators, or a larger instance type.",
        )
    if needed < gpus:
        yield f"{where}: {gpus - needed} of {gpus} GPUs stay idle; options.replicas: auto would use them."
