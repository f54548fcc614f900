"""Print a `Status` as tables, or write it as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.cli.console import table
from deploy.diagnostics.advice import advice
from deploy.operations.status import MINUTES, Component, Status
from deploy.resources.resource import FAILED, MIXED, READY

_COLOURS = dict.fromkeys((*READY, "OK"), "green") | dict.fromkeys((*FAILED, *MIXED, "ALARM"), "red")


def as_json(status: Status) -> dict[str, Any]:
    return {**asdict(status), "serving": status.serving}


def view(status: Status) -> RenderableType:
    parts: list[RenderableType] = [_summary(status), _places(status)]
    for title, rows in (("Scaling", _scaling(status)), ("Alarms", _alarms(status)), ("Metrics", _metrics(status))):
        if rows:
            parts.append(_table((), rows, title=title))
    parts += [Text(f"not read: {item}", style="yellow") for item in status.unread]
    hints = advice("\n".join([status.reason, *(item.reason for item in status.components)]), name=status.name)
    if hints:
        parts.append(Text(hints))
    return Group(*parts)


def _summary(status: Status) -> Table:
    serving = Text("yes", style="green") if status.serving else Text("no", style="red")
    if status.serving and status.asleep:
        serving = Text("asleep: requests wait until an instance is up", style="yellow")
    rows: list[tuple[RenderableType, ...]] = [
        ("endpoint", f"{status.name} ({status.region})"),
        ("status", coloured(status.status)),
        *([("reason", Text(status.reason))] if status.reason else []),
        ("serving", serving),
        ("configuration", status.config),
        ("changed", status.changed),
    ]
    return _table((), rows)


def _places(status: Status) -> Table:
    rows: list[tuple[RenderableType, ...]] = []
    for variant in status.variants:
        what = " ".join(part for part in (variant.type or "", variant.image) if part)
        rows.append((variant.name, "", str(variant.instances), str(variant.desired), f"instances {what}".strip()))
    for item in status.components:
        what = _copies(item) if item.base is None else f"adapter of {item.base}"
        now, wanted = (str(item.copies), str(item.desired)) if item.base is None else ("", "")
        rows.append((item.name, coloured(item.status), now, wanted, Text(" ".join((what, item.reason)).strip())))
    return _table(("variant or component", "status", "now", "wanted", "what"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], **look: Any) -> Table:
    return table(columns, rows, box=None, padding=(0, 2), show_header=bool(columns), header_style="bold", **look)


def _copies(item: Component) -> str:
    """Return e.g. `copies of llama-0123abcd, 2 GPUs each`."""
    gpus = f"{item.gpus} GPU{'s' * (item.gpus > 1)} each" if item.gpus else ""
    return ", ".join(part for part in (f"copies of {item.model}" if item.model else "copies", gpus) if part)


def _scaling(status: Status) -> list[tuple[RenderableType, ...]]:
    rows: list[tuple[RenderableType, ...]] = []
    for item in status.scaling:
        rows.append((item.target, f"{item.min} to {item.max}", ", ".join(item.policies) or "no policy"))
        rows += [("", "", activity) for activity in item.activities]
    return rows


def _alarms(status: Status) -> list[tuple[RenderableType, ...]]:
    return [(item.name, coloured(item.state), Text(item.reason)) for item in status.alarms]


def _metrics(status: Status) -> list[tuple[RenderableType, ...]]:
    return [
        (name, "none" if value is None else f"{value:g}", f"in {MINUTES} min") for name, value in status.metrics.items()
    ]


def coloured(word: str) -> Text:
    return Text(word, style=_COLOURS.get(word, "yellow"))
