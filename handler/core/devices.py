"""The NVIDIA driver and the GPUs that a process may use, without CUDA and torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Driver(NamedTuple):
    """The driver: `cuda` is the newest version that it supports, (major, minor); `num_gpus` counts the container's."""

    version: str
    cuda: tuple[int, int]
    num_gpus: int


def read_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Driver | None:
    """Read the driver's version from NVML, which the container runtime mounts; None without a driver."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        version = ctypes.create_string_buffer(80)
        cuda, count = ctypes.c_int(), ctypes.c_uint()
        failed = (
            nvml.nvmlSystemGetDriverVersion(version, len(version))
            or nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
            or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        )
        if failed:
            return None
        return Driver(version.value.decode(), (cuda.value // 1000, cuda.value % 1000 // 10), count.value)
    finally:
        nvml.nvmlShutdown()


def visible_gpus(driver: Driver | None, environ: Mapping[str, str]) -> list[str]:
    """Name the GPUs that an engine sees, as CUDA_VISIBLE_DEVICES does, which limits them up to its first negative one.

    Args:
        driver: None where there is none, and no GPU.
    """
    if driver is None:
        return []
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return [str(number) for number in range(driver.num_gpus)]
    names = [name.strip() for name in text.split(",")]
    stop = next((place for place, name in enumerate(names) if not name or name.startswith("-")), len(names))
    names = names[:stop]
    return names[: driver.num_gpus] if all(name.isdecimal() for name in names) else names
