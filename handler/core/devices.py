"""The NVIDIA driver and the GPUs that a process may use, detected without CUDA or torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.errors import ConfigError
from handler.core.numbers import is_digits


class GpuDriver(NamedTuple):
    """The NVIDIA driver.

    Attributes:
        version: version of the driver.
        cuda: newest CUDA version that the driver supports, as (major, minor).
        num_gpus: number of GPUs in the container.
    """

    version: str
    cuda: tuple[int, int]
    num_gpus: int


def read_driver(load: Callable[[str], Any] = ctypes.CDLL) -> GpuDriver | None:
    """Read the driver version from NVML, which the container runtime mounts. Return None if there is no driver."""
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
        return GpuDriver(version.value.decode(), (cuda.value // 1000, cuda.value % 1000 // 10), count.value)
    finally:
        nvml.nvmlShutdown()


def visible_gpus(driver: GpuDriver | None, environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that an engine can use, by index or UUID as in CUDA_VISIBLE_DEVICES.

    As in CUDA, the first empty or negative entry of that variable ends the list.

    Args:
        driver: the driver, or None if there is none.
    """
    if driver is None:
        return []
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return [str(number) for number in range(driver.num_gpus)]
    names = [*takewhile(lambda name: name and not name.startswith("-"), map(str.strip, text.split(",")))]
    return names[: driver.num_gpus] if all(is_digits(name) for name in names) else names


# -- whether the driver fits an image's CUDA ---------------------------------------------------------------------------
# Checked before anything imports torch: with a driver too old, an engine fails with an obscure error, or the endpoint
# stays in Creating without a log.


_COMPAT = Path("/usr/local/cuda/compat")
_AMI = {
    13: "al2023-ami-sagemaker-inference-gpu-4-1 (driver 580, CUDA 13.0)",
    12: "al2-ami-sagemaker-inference-gpu-3-1 (driver 550, CUDA 12.4)",
}
"""Maps the major CUDA version of an image to a suitable InferenceAmiVersion (SageMaker API reference,
ProductionVariant).
"""


class DriverCheck(NamedTuple):
    """Result of `check_driver`.

    Attributes:
        line: log message, or "" to log nothing.
        library_path: directory to prepend to LD_LIBRARY_PATH, or "" if none is needed.
    """

    line: str
    library_path: str = ""


def check_driver(driver: GpuDriver | None, environ: Mapping[str, str], compat: Path = _COMPAT) -> DriverCheck:
    """Compare the driver with the CUDA version of the image, which NVIDIA's base images set as CUDA_VERSION.

    A newer minor version of CUDA runs on any driver of the same major version. A newer major version requires the
    compatibility library in the image. If the image contains this library, it is used with every older driver.

    Raises:
        ConfigError: the image needs a newer driver.
    """
    image = _version(environ.get("CUDA_VERSION", ""))
    if image is None:
        return DriverCheck(_describe(driver, environ) if driver else "")
    if driver is None:
        return DriverCheck(
            f"CUDA {_text(image)} in the image, but no NVIDIA driver is visible: the GPU engines will not start"
        )
    line = f"{_describe(driver, environ)}; CUDA {_text(image)} in the image"
    if driver.cuda >= image:
        return DriverCheck(line)
    library = next((path.parent for path in sorted(compat.glob("**/libcuda.so.1"))), None)
    if library is not None:
        return DriverCheck(f"{line}; using the image's compatibility library in {library}", str(library))
    if driver.cuda[0] < image[0]:
        ami = f"InferenceAmiVersion={_AMI[image[0]]}" if image[0] in _AMI else "a newer driver"
        raise ConfigError(
            f"{line}: the driver is too old for it. Deploy with {ami}, or use an image with CUDA {driver.cuda[0]}"
        )
    return DriverCheck(f"{line}, which works through CUDA's minor version compatibility")


def _describe(driver: GpuDriver, environ: Mapping[str, str]) -> str:
    return f"GPUs visible: {len(visible_gpus(driver, environ))}; driver {driver.version} with CUDA {_text(driver.cuda)}"


def _version(text: str) -> tuple[int, int] | None:
    parts = text.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and is_digits(parts[0]) and is_digits(parts[1]) else None


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
