"""Place of an engine's process: the devices in its environment, or its share of the processor's cores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """What an engine's process gets beside its host's environment.

    Attributes:
        environ: variables that replace the host's.
        cores: to which the process and its threads are kept; empty: the host's.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] = frozenset()


ANYWHERE = Place()


def on_devices(devices: Sequence[str], count: int) -> list[Place]:
    """Give each of `count` processes as many devices.

    Args:
        devices: indices or UUIDs, as CUDA_VISIBLE_DEVICES names them; at least `count`.
    """
    each = len(devices) // count
    parts = (devices[index * each : (index + 1) * each] for index in range(count))
    return [Place({"CUDA_VISIBLE_DEVICES": ",".join(part)}) for part in parts]


def on_cores(cores: Collection[int], count: int) -> list[Place]:
    """Divide the cores among `count` processes, neighbours together; with fewer cores than processes some share one.

    Args:
        cores: empty where processes cannot be kept to cores.
    """
    order = sorted(cores)
    if not order:
        return [ANYWHERE] * count
    if len(order) < count:
        return [Place(cores=frozenset({order[index % len(order)]})) for index in range(count)]
    parts = (order[index * len(order) // count : (index + 1) * len(order) // count] for index in range(count))
    return [Place(cores=frozenset(part)) for part in parts]
