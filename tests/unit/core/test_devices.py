"""The GPUs that an engine sees, and the driver that NVML describes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from handler.core.devices import GpuDriver, read_driver, visible_gpus


def nvml(**failures: int) -> SimpleNamespace:
    """NVML with two GPUs; a call in `failures` has another status than 0."""

    def tells(name: str, value: Any) -> Any:
        def call(target: Any, *size: int) -> int:
            getattr(target, "_obj", target).value = value
            return failures.get(name, 0)

        return call

    return SimpleNamespace(
        nvmlInit_v2=lambda: failures.get("init", 0),
        nvmlShutdown=lambda: 0,
        nvmlSystemGetDriverVersion=tells("driver", b"580.1"),
        nvmlSystemGetCudaDriverVersion_v2=tells("cuda", 12080),
        nvmlDeviceGetCount_v2=tells("count", 2),
    )


def test_the_driver_is_read_or_there_is_none() -> None:
    assert read_driver(lambda name: nvml()) == GpuDriver("580.1", (12, 8), 2)
    for failed in ("init", "driver", "cuda", "count"):
        assert read_driver(lambda name, failed=failed: nvml(**{failed: 1})) is None  # type: ignore[misc]

    def missing(name: str) -> None:
        raise OSError(name)

    assert read_driver(missing) is None


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1"]), ("", []), ("1", ["1"]), ("1, 0", ["1", "0"]), ("0,1,2", ["0", "1"]), ("0,-1,1", ["0"]),
        ("-1", []), ("GPU-a,GPU-b,GPU-c", ["GPU-a", "GPU-b", "GPU-c"]),
    ],
)  # fmt: skip
def test_cuda_visible_devices_limits_the_gpus(visible: str | None, names: list[str]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(GpuDriver("580.1", (12, 8), 2), environ) == names
    assert visible_gpus(None, environ) == []
