"""Print tables, plans, progress and generated text, in colour on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import yaml
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from deploy.deployer.plan import Action, Plan, Verb
from deploy.deployer.wait import Progress, Report
from deploy.diagnostics import advice
from deploy.errors import Refused
from deploy.operations.status import MINUTES, ComponentStatus, EndpointStatus
from deploy.preflight.check import Check, Verdict
from deploy.preflight.checks import lines, refuse_errors
from deploy.redaction import HIDDEN, is_secret, redact
from deploy.resolve.components import Placed, Sums
from deploy.resolve.fit import COLUMNS, Candidates, Fit, rows, title
from deploy.resolve.prices import Prices
from deploy.resources.resource import FAILED, MIXED, READY, Json, resolved
from deploy.s3.upload import UploadProgress
from handler.core.sizes import format_size
from handler.core.terminal import escaped, unescaped

_WIDE = 180  # width of a table in characters, without a terminal


def out(*, aside: bool = False) -> Console:
    """Return the console for output, which is on standard error with `aside`, while JSON goes to standard output."""
    file = sys.stderr if aside else sys.stdout
    return _Escaping(emoji=False, markup=False, file=unescaped(file), width=None if file.isatty() else _WIDE)


class _Escaping(Console):
    """A console that escapes the text between its colours, as `terminal.escaping` does elsewhere."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text, self.encoding))


def say(console: Console, line: str, style: str = "") -> None:
    """Print a line without interpreting markup and without wrapping it."""
    console.print(escaped(line, console.encoding), style=style or None, markup=False, highlight=False, soft_wrap=True)


_WORD = 20  # maximum length of a word that a table does not break


def table(columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], **look: Any) -> Table:
    """Return a table that does not break short words. `look` contains further arguments of rich's `Table`."""
    result = Table(title_justify="left", caption_justify="left", **look)
    rows = [[escaped(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    for index, column in enumerate(columns):
        lines = "\n".join([column, *(str(row[index]) for row in rows)]).splitlines()
        word = min(_WORD, max(len(word) for line in lines for word in [*line.split(), ""]))
        result.add_column(column, overflow="fold", min_width=word, no_wrap=max(map(len, lines)) <= word)
    for row in rows:
        result.add_row(*row)
    return result


_NARROW = 140  # terminal width in characters; on narrower terminals, notes are printed below the table


def print_noted(
    console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str, caption: str | None = None
) -> None:
    """Print a table with many columns. The last column contains notes."""
    rows = [*rows]
    if console.width >= _NARROW:
        return console.print(table(columns, rows, title=title, caption=caption))
    look: dict[str, Any] = {"box": None, "collapse_padding": True, "pad_edge": False}
    heads = [column.replace(" ", "\n") for column in columns[:-1]]
    console.print(table(heads, [row[:-1] for row in rows], title=title, caption=caption, **look))
    for name, *_, note in rows:
        if note:
            say(console, f"{name}: {note}")


def confirm(question: str, *, yes: bool, needed: bool, aside: bool = False) -> bool:
    """Ask the user to confirm on the terminal, and return whether to continue.

    Args:
        yes: whether `--yes` is set, so that the user is not asked.
        needed: whether the user must confirm, even if there is no terminal.
        aside: whether to ask on standard error.

    Raises:
        Refused: there is no terminal, and the user must confirm.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        if needed:
            raise Refused(f"{question} There is no terminal on which to ask.", "Pass --yes.")
        return True
    if aside:
        print(escaped(f"{question} [y/N] "), end="", file=sys.stderr, flush=True)
    return input("" if aside else escaped(f"{question} [y/N] ")).strip().lower() in ("y", "yes")


# -- print or return as JSON how each component fits, and what the first copies need in total --------------------------


_COLUMNS = ("component", "model", "copies", "GPUs", "MB", "weights GiB", "KV GiB", "KV tokens", "requests", "")
_NAMES = {"accelerators": "GPUs", "memory_mb": "MB of memory", "cpus": "CPU cores", "models": "GiB for the models"}


def print_sums(console: Console, sums: Sums) -> None:
    """Print a table of the resources of each component, followed by the sum for all initial copies."""
    title = "Components (GPUs and MB per copy, GiB per GPU)"
    print_noted(console, _COLUMNS, map(_row, sums.placed), title=title)
    say(console, _sum(sums))


def components_as_json(sums: Sums) -> dict[str, Any]:
    return {
        "placed": [_as_json(item) for item in sums.placed],
        "instances": sums.count,
        "sums": {name: {"taken": taken, "of": has} for name, taken, has in sums.rows()},
    }


def _row(item: Placed) -> tuple[str, ...]:
    columns = ("", "", "", "", "not checked: the model's size or the instance type is unknown")
    if (fit := item.fit) is not None:
        memory = (f"{fit.weights:.1f}", f"{max(0.0, fit.room):.1f}", str(fit.tokens), str(fit.sequences))
        columns = (*memory, fit.problem or "fits")
    return (item.name, item.model, str(item.copies), str(item.gpus), str(item.memory_mb), *columns)


def _sum(sums: Sums) -> str:
    """Return a sentence such as `The components' first copies on 1 x ml.g6e.12xlarge: 3 of 4 GPUs: they fit.`"""
    if sums.instance is None:
        return "Whether the first copies fit together is not checked, as the instance type is unknown."
    rows = list(sums.rows())
    parts = ", ".join(f"{taken:g} of {has:g} {_NAMES[name]}" for name, taken, has in rows if taken)
    verdict = "they fit" if all(taken <= has for _, taken, has in rows) else "they do not fit together"
    return f"The components' first copies on {sums.count} x {sums.instance.name}: {parts or 'nothing'}: {verdict}."


def _as_json(item: Placed) -> dict[str, Any]:
    memory = None if item.fit is None else fit_as_json(item.fit)
    resources = {"copies": item.copies, "gpus": item.gpus, "memory_mb": item.memory_mb, "cpus": item.cpus}
    return {"name": item.name, "model": item.model, **resources, "fit": memory}


def fit_as_json(fit: Fit) -> dict[str, Any]:
    """Return a model's memory on an instance type and the number of requests that fit, for JSON output."""
    return {
        "weights_gib": fit.weights,
        "kv_gib": max(0.0, fit.room),
        "kv_tokens": fit.tokens,
        "requests": fit.sequences,
        "problem": fit.problem,
    }


# -- print a plan or convert it to JSON, with secrets hidden -----------------------------------------------------------


_MARKS = {
    Verb.CREATE: ("+", "green"),
    Verb.REPLACE: ("+", "green"),
    Verb.UPDATE: ("~", "yellow"),
    Verb.TAG: ("~", "yellow"),
    Verb.UNCHANGED: ("=", "dim"),
    Verb.DELETE: ("-", "red"),
}
_LONG = 100  # maximum number of characters to print of a changed value


def print_plan(console: Console, plan: Plan, *, whole: bool = True) -> None:
    """Print each action and its changes. With `whole`, also print its request."""
    for action in plan.actions:
        _print_action(console, action, whole)
    say(console, summary(plan), "bold")


def summary(plan: Plan) -> str:
    """Return a sentence with the number of actions of each kind."""
    verbs = [action.verb for action in plan.actions]
    replaced = verbs.count(Verb.REPLACE)
    counts = {
        "to create": verbs.count(Verb.CREATE),
        "new version" if replaced == 1 else "new versions": replaced,
        "to change": verbs.count(Verb.UPDATE) + verbs.count(Verb.TAG),
        "to delete": verbs.count(Verb.DELETE),
        "unchanged": verbs.count(Verb.UNCHANGED),
    }
    text = ", ".join(f"{count} {label}" for label, count in counts.items() if count)
    return f"{text or 'no resources exist or are specified'}."


def plan_as_json(plan: Plan, **more: Any) -> dict[str, Any]:
    """Return the plan for JSON, with each action's request and changes. `more` contains further top-level fields."""
    actions = [
        {
            "verb": action.verb.value,
            "kind": action.kind.value,
            "name": action.which[-1],
            "service": action.service,
            "operation": action.operation,
            "request": printable(action.request or {}),
            "changes": [
                {
                    "place": change.path,
                    "before": _hidden(change.path, change.before),
                    "after": _hidden(change.path, change.after),
                }
                for change in action.changes
            ],
            "why": action.reason,
        }
        for action in plan.actions
    ]
    return {"deployment": plan.deployment, "asked": plan.online, **more, "actions": actions}


def printable(value: Any) -> Any:
    """Return a request for JSON, with secrets hidden and references replaced by descriptions."""
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return redact(resolved(value, lambda ref: f"<{ref.attribute} of {ref.key}>"))


def print_candidates(console: Console, candidates: Candidates, prices: Prices) -> None:
    """Print the table of instance types, in which the chosen type is marked."""
    print_noted(console, COLUMNS, rows(candidates), title=title(candidates), caption=prices.source)


def checks_as_json(checks: Sequence[Check]) -> list[dict[str, str]]:
    return [{**asdict(check), "verdict": check.verdict.value} for check in checks]


def print_warnings(console: Console, warnings: Sequence[str]) -> None:
    for warning in warnings:
        say(console, f"! {warning}", "yellow")


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print a line for each check, followed by its advice."""
    styles = {Verdict.OK: "dim", Verdict.WARNING: "yellow", Verdict.ERROR: "red"}
    for check in checks:
        say(console, "\n".join(lines([check])), styles[check.verdict])


def print_and_refuse(console: Console, checks: Sequence[Check]) -> None:
    """Print the checks.

    Raises:
        Refused: a check found an error.
    """
    print_checks(console, checks)
    refuse_errors(checks)


def _print_action(console: Console, action: Action, whole: bool) -> None:
    mark, style = _MARKS[action.verb]
    call = f"  {action.service}.{action.operation}" if action.operation and whole else ""
    reason = f"  ({action.reason})" if action.reason else ""
    say(console, f"{mark} {action.verb.value} {action.key}{call}{reason}", style)
    for change in action.changes:
        before, after = (_short(_hidden(change.path, value)) for value in (change.before, change.after))
        say(console, f"    {change.path}: {before} -> {after}", style)
    if whole and action.request and action.verb is not Verb.DELETE:
        say(console, _yaml(action.request), "dim" if action.changes else "")


def _yaml(request: Json) -> str:
    text = yaml.safe_dump(printable(request), sort_keys=False, width=10_000, default_flow_style=False)
    return "\n".join(f"    {line}" for line in text.splitlines())


def _hidden(name: str, value: Any) -> Any:
    """Return a value for printing, or `***` if the value or its name looks like a secret."""
    if isinstance(value, str | int | float) and is_secret(name.rpartition(".")[2], value):
        return HIDDEN
    return printable(value)


def _short(value: Any) -> str:
    if value is None:
        return "(none)"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


# -- print progress: live lines on a terminal, otherwise a new line for each change ------------------------------------


_GOOD, _BAD = (*READY, ""), (*FAILED, *MIXED)


@contextmanager
def live_progress(console: Console) -> Iterator[Report]:
    """Yield a function for `wait_for` that shows progress. Its last state remains on the screen."""
    if not console.is_terminal:
        yield _plain_progress(console)
        return
    newest: dict[str, Progress] = {}
    with Live(console=console, refresh_per_second=4) as live:

        def report(progress: Progress) -> None:
            newest[progress.key] = progress
            live.update(progress_table(newest.values()))

        yield report


def progress_table(states: Iterable[Progress]) -> Table:
    """Return a table with a row for each resource, followed by the last line of its log and a hint."""
    grid = Table.grid(padding=(0, 2))
    for state in states:
        grid.add_row(_mark(state), state.key, Text(_sentence(state)), _minutes(state.elapsed))
        for below in (state.log, state.hint):
            if below:
                grid.add_row("", "", Text(below, style="dim", overflow="ellipsis", no_wrap=below is state.log), "")
    return grid


def _plain_progress(console: Console) -> Report:
    newest: dict[str, tuple[str, str, str]] = {}

    def report(progress: Progress) -> None:
        now = (progress.phase, progress.log, progress.hint)
        before = newest.get(progress.key)
        newest[progress.key] = now
        if now == before:
            return
        if before is None or before[0] != progress.phase:
            say(console, f"{_minutes(progress.elapsed)} {progress.key}: {_sentence(progress)}")
        for old, new in zip(before[1:] if before else ("", ""), now[1:], strict=True):
            if new and new != old:
                say(console, f"        {new}")

    return report


def _sentence(progress: Progress) -> str:
    return f"{progress.phase} ({progress.status})" if progress.status else progress.phase


def _mark(progress: Progress) -> Text:
    if progress.status in _GOOD:
        return Text("✓", style="green")
    return Text("✗", style="red") if progress.status in _BAD else Text("…", style="yellow")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"


# -- print an `EndpointStatus` as tables, or convert it to JSON --------------------------------------------------------


_COLOURS = dict.fromkeys((*READY, "OK"), "green") | dict.fromkeys((*FAILED, *MIXED, "ALARM"), "red")


def status_as_json(status: EndpointStatus) -> dict[str, Any]:
    return {**asdict(status), "serving": status.serving}


def view(status: EndpointStatus) -> RenderableType:
    parts: list[RenderableType] = [_summary(status), _places(status)]
    for heading, content in (("Scaling", _scaling(status)), ("Alarms", _alarms(status)), ("Metrics", _metrics(status))):
        if content:
            parts.append(_table((), content, title=heading))
    parts += [Text(f"could not be read: {item}", style="yellow") for item in status.unread]
    hints = advice("\n".join([status.reason, *(item.reason for item in status.components)]), name=status.name)
    if hints:
        parts.append(Text(hints))
    return Group(*parts)


def _summary(status: EndpointStatus) -> Table:
    serving = Text("yes", style="green") if status.serving else Text("no", style="red")
    if status.serving and status.asleep:
        serving = Text("scaled to zero: requests wait until an instance is running", style="yellow")
    rows: list[tuple[RenderableType, ...]] = [
        ("endpoint", f"{status.name} ({status.region})"),
        ("status", coloured(status.status)),
        *([("reason", Text(status.reason))] if status.reason else []),
        ("serving", serving),
        ("configuration", status.config),
        ("changed", status.changed),
    ]
    return _table((), rows)


def _places(status: EndpointStatus) -> Table:
    rows: list[tuple[RenderableType, ...]] = []
    for variant in status.variants:
        details = " ".join(part for part in ("instances", variant.type, variant.image) if part)
        rows.append((variant.name, "", str(variant.instances), str(variant.desired), details))
    for item in status.components:
        if item.base is None:
            details = f"{_copies(item)} {item.reason}".rstrip()
            counts = (str(item.copies), str(item.desired))
        else:
            details = f"adapter of {item.base} {item.reason}".rstrip()
            counts = ("", "")
        rows.append((item.name, coloured(item.status), *counts, Text(details)))
    return _table(("variant or component", "status", "current", "desired", "details"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], **look: Any) -> Table:
    return table(columns, rows, box=None, padding=(0, 2), show_header=bool(columns), header_style="bold", **look)


def _copies(item: ComponentStatus) -> str:
    """Return a phrase such as `copies of llama-0123abcd, 2 GPUs each`."""
    gpus = f"{item.gpus} GPU{'s' * (item.gpus > 1)} each" if item.gpus else ""
    return ", ".join(part for part in (f"copies of {item.model}" if item.model else "copies", gpus) if part)


def _scaling(status: EndpointStatus) -> list[tuple[RenderableType, ...]]:
    rows: list[tuple[RenderableType, ...]] = []
    for item in status.scaling:
        rows.append((item.target, f"{item.min} to {item.max}", ", ".join(item.policies) or "no policy"))
        rows += [("", "", activity) for activity in item.activities]
    return rows


def _alarms(status: EndpointStatus) -> list[tuple[RenderableType, ...]]:
    return [(item.name, coloured(item.state), Text(item.reason)) for item in status.alarms]


def _metrics(status: EndpointStatus) -> list[tuple[RenderableType, ...]]:
    return [
        (name, "none" if value is None else f"{value:g}", f"in {MINUTES} min") for name, value in status.metrics.items()
    ]


def coloured(word: str) -> Text:
    return Text(word, style=_COLOURS.get(word, "yellow"))


# -- print the progress of an upload: a bar on a terminal, otherwise a line for every 10% ------------------------------


@contextmanager
def upload_progress(console: Console) -> Iterator[Callable[[UploadProgress], None]]:
    """Yield a function for `upload` that shows progress."""
    if not console.is_terminal:
        yield _plain_upload(console)
        return
    name = TextColumn("{task.description}")
    with Bar(name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("uploading", total=None)

        def report(progress: UploadProgress) -> None:
            files = f"{progress.files} of {progress.of_files} files"
            bar.update(task, total=progress.of_size, completed=progress.size, description=files)

        yield report


def _plain_upload(console: Console) -> Callable[[UploadProgress], None]:
    last = -1

    def report(progress: UploadProgress) -> None:
        nonlocal last
        tenth = 10 * progress.size // max(progress.of_size, 1)
        if tenth != last:
            last = tenth
            size = f"{format_size(progress.size)} of {format_size(progress.of_size)}"
            say(console, f"uploaded {size}, {progress.files} of {progress.of_files} files")

    return report
