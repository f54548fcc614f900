"""Describes the machine on which a measurement runs, and the load from other processes."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

_PACKAGES = ("lmi-handler", "openvino-genai", "tensorrt-llm", "vllm", "uvicorn", "uvloop", "httptools", "orjson")
_PROC = Path("/proc")


def describe() -> dict[str, Any]:
    """Return the machine, versions, commit and date for the JSON line of a report."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_gb": _memory_gb(),
            "system": platform.platform(),
        },
        "python": platform.python_version(),
        "versions": _versions(),
        "commit": _commit(),
    }


def summary(report: dict[str, Any]) -> str:
    """Return the time, machine and versions of a report as one line of text."""
    return f"{taken(report)}; {where(report)}"


def taken(report: Mapping[str, Any]) -> str:
    """Return the date and commit of a report as text."""
    commit = f", commit {report['commit']}" if report["commit"] else ""
    return f"{report['date']}{commit}"


def where(report: Mapping[str, Any]) -> str:
    """Return the machine and versions of a report as text."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB"
    return f"{hardware}; Python {report['python']}, {versions}"


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_gb() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    except (ValueError, OSError):
        return None


def _commit() -> str | None:
    """Return the commit of this checkout, with `+` if it has local changes, or None if this is not a checkout."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class OthersMeter:
    """Measures the number of CPU cores that processes other than this process and its descendants keep busy."""

    def __init__(self) -> None:
        self._at, self._other = time.monotonic(), _other_seconds()

    def cores(self) -> float | None:
        """Return the average number of busy cores since the meter was created, or None if there is no /proc."""
        now = _other_seconds()
        if now is None or self._other is None:
            return None
        return max(0.0, (now - self._other) / (time.monotonic() - self._at))


T = TypeVar("T")


def undisturbed(
    repeat: int, quiet: float, measure: Callable[[int], T], load_of: Callable[[T], float]
) -> tuple[list[T], int]:
    """Measure `repeat` times, and repeat measurements disturbed by other processes, up to `2 * repeat` in total.

    Args:
        repeat: number of measurements to return.
        quiet: number of cores that other processes may keep busy without disturbing a measurement.
        measure: a function that measures once. Its argument is the index of the measurement.
        others: a function that returns the number of cores that other processes kept busy during a measurement.

    Returns:
        The `repeat` least disturbed measurements, and the number of disturbed measurements.
    """
    quiet_results: list[T] = []
    disturbed: list[T] = []
    for turn in range(2 * repeat):
        measurement = measure(turn)
        (disturbed if load_of(measurement) > quiet else quiet_results).append(measurement)
        if len(quiet_results) == repeat:
            break
    disturbed.sort(key=load_of)
    return quiet_results + disturbed[: repeat - len(quiet_results)], len(disturbed)


def _other_seconds() -> float | None:
    try:
        # user nice system idle iowait irq softirq steal; steal counts, as the hypervisor's other guests also disturb
        ticks = list(map(int, (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]))
        busy = sum(ticks) - ticks[3] - ticks[4]
        return busy / os.sysconf("SC_CLK_TCK") - _tree_seconds(os.getpid())
    except OSError:
        return None


def _tree_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, including descendants that have ended."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    for thread in (_PROC / str(pid) / "task").iterdir():
        for child in (thread / "children").read_text().split():
            seconds += _tree_seconds(int(child))
    return seconds
