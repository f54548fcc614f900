"""Print how each component fits, and what all first copies take together; or return it for JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from deploy.cli.console import say, table
from deploy.resolve.components import Placed, Sums

_COLUMNS = ("component", "model", "copies", "GPUs", "MB", "weights GiB", "KV GiB", "KV tokens", "requests", "")
_NAMES = {"accelerators": "GPUs", "memory_mb": "MB of memory", "cpus": "CPU cores", "models": "GiB for the models"}


def print_sums(console: Console, sums: Sums) -> None:
    """Print a row for each component, GiB of one GPU, and the sum below."""
    title = "Components: GPUs and MB of one copy, GiB of one GPU"
    console.print(table(_COLUMNS, map(_row, sums.placed), title=title))
    say(console, _sum(sums))


def components_as_json(sums: Sums) -> dict[str, Any]:
    return {
        "placed": [_as_json(item) for item in sums.placed],
        "instances": sums.count,
        "sums": {name: {"taken": taken, "of": has} for name, taken, has in sums.rows()},
    }


def _row(item: Placed) -> tuple[str, ...]:
    known = ("", "", "", "", "not checked: the model's size, or the type, is not known")
    if (fit := item.fit) is not None:
        memory = (f"{fit.weights:.1f}", f"{max(0.0, fit.room):.1f}", str(fit.tokens), str(fit.sequences))
        known = (*memory, fit.problem or "fits")
    return (item.name, item.model, str(item.copies), str(item.gpus), str(item.memory_mb), *known)


def _sum(sums: Sums) -> str:
    """Return e.g. `First copies on 1 x ml.g6e.12xlarge: 3 of 4 GPUs, 4096 of 393216 MB of memory: they fit.`"""
    if sums.instance is None:
        return "The instance type is not known, so it is not checked whether the first copies fit together."
    rows = list(sums.rows())
    parts = ", ".join(f"{taken:g} of {has:g} {_NAMES[name]}" for name, taken, has in rows if taken)
    verdict = "they fit" if all(taken <= has for _, taken, has in rows) else "they do not fit together"
    return f"First copies on {sums.count} x {sums.instance.name}: {parts or 'nothing'}: {verdict}."


def _as_json(item: Placed) -> dict[str, Any]:
    fit = item.fit
    memory = None
    if fit is not None:
        memory = {
            "weights_gib": fit.weights,
            "kv_gib": max(0.0, fit.room),
            "kv_tokens": fit.tokens,
            "requests": fit.sequences,
            "problem": fit.problem,
        }
    asked = {"copies": item.copies, "gpus": item.gpus, "memory_mb": item.memory_mb, "cpus": item.cpus}
    return {"name": item.name, "model": item.model, **asked, "fit": memory}
