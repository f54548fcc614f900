"""Check of the NVIDIA driver at the start, before anything imports torch.

With a driver too old for the image's CUDA an engine fails with an obscure error. Or the endpoint stays in Creating,
without a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from handler.core.devices import Driver, visible_gpus
from handler.core.errors import ConfigError

_COMPAT = Path("/usr/local/cuda/compat")
_AMI = {
    13: "al2023-ami-sagemaker-inference-gpu-4-1 (driver 580, CUDA 13.0)",
    12: "al2-ami-sagemaker-inference-gpu-3-1 (driver 550, CUDA 12.4)",
}
"""InferenceAmiVersion by the image's CUDA (SageMaker API reference, ProductionVariant)."""


class Check(NamedTuple):
    """Result: `line` is for the log, empty for none; `library_path` goes before LD_LIBRARY_PATH."""

    line: str
    library_path: str = ""


def check(driver: Driver | None, environ: Mapping[str, str], compat: Path = _COMPAT) -> Check:
    """Compare the driver with the image's CUDA, which NVIDIA's base images name in CUDA_VERSION.

    A newer minor version of CUDA runs on any driver of its major version. A newer major version needs the image's
    compatibility library, which goes first wherever the driver is older.

    Raises:
        ConfigError: the image needs a newer driver.
    """
    image = _version(environ.get("CUDA_VERSION", ""))
    if image is None:
        return Check(_describe(driver, environ) if driver else "")
    if driver is None:
        return Check(
            f"CUDA {_text(image)} in the image, but no NVIDIA driver is visible: the GPU engines will not start"
        )
    line = f"{_describe(driver, environ)}; CUDA {_text(image)} in the image"
    if driver.cuda >= image:
        return Check(line)
    library = next((path.parent for path in sorted(compat.glob("**/libcuda.so.1"))), None)
    if library is not None:
        return Check(f"{line}; through its compatibility library in {library}", str(library))
    if driver.cuda[0] < image[0]:
        raise ConfigError(
            f"{line}: the driver is too old for it. Deploy with InferenceAmiVersion="
            f"{_AMI.get(image[0], 'of a newer driver')}, or use an image with CUDA {driver.cuda[0]}"
        )
    return Check(f"{line}, which its minor versions' compatibility covers")


def _describe(driver: Driver, environ: Mapping[str, str]) -> str:
    return f"GPUs visible: {len(visible_gpus(driver, environ))}; driver {driver.version} with CUDA {_text(driver.cuda)}"


def _version(text: str) -> tuple[int, int] | None:
    parts = text.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdecimal() and parts[1].isdecimal() else None


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
