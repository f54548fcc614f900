"""Derive timeouts of a start from the model's size.

SageMaker's default (eight minutes) is too short to load tens of GiB. A timeout that is too long costs nothing when the
start succeeds, so each rate is at the slow end of the usual:

    download      50 MiB/s from S3 to the instance (usual: 100 and more), and 300 s for the image and the disk
    from a hub    40 MiB/s, in the container, so it counts as startup
    load          200 MiB/s from disk to the GPUs
    ready         600 s: the process, CUDA, the choice of kernels, CUDA graphs, the first token
    TensorRT-LLM  900 s more: autotuning, and kernels that are compiled at the first start
    djl-tensorrtllm  AWS's image compiles the whole engine at its start: all of the 3600 s

SageMaker accepts 60 to 3600 seconds for each.
"""

from __future__ import annotations

from typing import NamedTuple

_LONGEST = 3600
_UNKNOWN_GIB = 20.0
_DOWNLOAD, _HUB, _LOAD = 50, 40, 200  # MiB/s


class Times(NamedTuple):
    """Timeouts in seconds, and warnings where SageMaker's maximum may be too short."""

    download: int
    startup: int
    warnings: tuple[str, ...] = ()


def times(gib: float | None, *, engine: str = "", from_hub: bool = False, builds_engine: bool = False) -> Times:
    """Return the timeouts of a start.

    Args:
        gib: size of the checkpoint; None: unknown, 20 GiB are assumed.
        engine: option.llm_engine.
        from_hub: whether the container downloads the model.
        builds_engine: whether the image compiles the model at its start.
    """
    mib = (_UNKNOWN_GIB if gib is None else gib) * 1024
    download = 300 + (0 if from_hub else mib / _DOWNLOAD)
    startup = 600 + mib / _LOAD + (900 if engine == "trtllm" else 0) + (mib / _HUB if from_hub else 0)
    if builds_engine:
        startup = max(startup, _LONGEST)
    warnings = []
    if download > _LONGEST:
        warnings.append(
            f"Model data of {mib / 1024:.0f} GiB may take longer than the {_LONGEST} s that SageMaker waits."
        )
    if startup > _LONGEST:
        advice = "; put it into S3 (model.path), whose download is counted by itself" if from_hub else ""
        warnings.append(
            f"Loading {mib / 1024:.0f} GiB may take longer than the {_LONGEST} s that SageMaker waits{advice}."
        )
    return Times(_rounded(download), _rounded(startup), tuple(warnings))


def _rounded(seconds: float) -> int:
    """Round up to whole minutes, within SageMaker's limits."""
    return min(_LONGEST, -(-int(seconds) // 60) * 60)
