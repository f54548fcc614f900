"""Print a plan, or write it as JSON. Secrets are hidden in both."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from deploy.cli.console import say, table
from deploy.deployer.plan import Action, Plan, Verb
from deploy.preflight.check import Check, Verdict
from deploy.preflight.checks import lines
from deploy.redaction import HIDDEN, is_secret, redact
from deploy.resolve.candidates import COLUMNS, Candidates, rows, title
from deploy.resolve.prices import Prices
from deploy.resources.resource import Json, Ref, resolved

_MARKS = {
    Verb.CREATE: ("+", "green"),
    Verb.REPLACE: ("+", "green"),
    Verb.UPDATE: ("~", "yellow"),
    Verb.TAG: ("~", "yellow"),
    Verb.UNCHANGED: ("=", "dim"),
    Verb.DELETE: ("-", "red"),
}
_LONG = 100  # characters to print of a changed value


def print_plan(console: Console, plan: Plan, *, whole: bool = True) -> None:
    """Print every action and its changes; with `whole` its request too."""
    for action in plan.actions:
        _print_action(console, action, whole)
    say(console, summary(plan), "bold")


def summary(plan: Plan) -> str:
    """Return the number of actions by sort."""
    verbs = [action.verb for action in plan.actions]
    counts = {
        "to create": verbs.count(Verb.CREATE),
        "new versions": verbs.count(Verb.REPLACE),
        "to change": verbs.count(Verb.UPDATE) + verbs.count(Verb.TAG),
        "to delete": verbs.count(Verb.DELETE),
        "unchanged": verbs.count(Verb.UNCHANGED),
    }
    text = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{text or 'nothing there, nothing wanted'}."


def as_json(plan: Plan, **more: Any) -> str:
    """Return the plan as JSON: `actions` with requests and changes, and `more`."""
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
                    "place": change.place,
                    "before": _hidden(change.place, change.before),
                    "after": _hidden(change.place, change.after),
                }
                for change in action.changes
            ],
            "why": action.why,
        }
        for action in plan.actions
    ]
    return json.dumps({"deployment": plan.deployment, "asked": plan.online, **more, "actions": actions}, indent=2)


def printable(value: Any) -> Any:
    """Return a request for JSON: secrets hidden, unknown values in words."""
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return redact(resolved(value, _reference))


def candidates_table(candidates: Candidates, prices: Prices) -> Table:
    """Return the table of instance types, with the chosen one marked."""
    return table(COLUMNS, rows(candidates), title=title(candidates), caption=prices.source)


def checks_as_json(checks: Sequence[Check]) -> list[dict[str, str]]:
    return [{**asdict(check), "verdict": check.verdict.value} for check in checks]


def print_warnings(console: Console, warnings: Sequence[str]) -> None:
    for warning in warnings:
        say(console, f"! {warning}", "yellow")


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print a line for each check, and its advice below."""
    styles = {Verdict.OK: "dim", Verdict.WARNING: "yellow", Verdict.ERROR: "red"}
    for check in checks:
        say(console, "\n".join(lines([check])), styles[check.verdict])


def _print_action(console: Console, action: Action, whole: bool) -> None:
    mark, style = _MARKS[action.verb]
    call = f"  {action.service}.{action.operation}" if action.operation and whole else ""
    why = f"  ({action.why})" if action.why else ""
    say(console, f"{mark} {action.verb.value} {action.key}{call}{why}", style)
    for change in action.changes:
        before, after = (_short(_hidden(change.place, value)) for value in (change.before, change.after))
        say(console, f"    {change.place}: {before} -> {after}", style)
    if whole and action.request and action.verb is not Verb.DELETE:
        say(console, _yaml(action.request), "dim" if action.changes else "")


def _yaml(request: Json) -> str:
    text = yaml.safe_dump(printable(request), sort_keys=False, width=10_000, default_flow_style=False)
    return "\n".join(f"    {line}" for line in text.splitlines())


def _hidden(place: str, value: Any) -> Any:
    """Return a value, hidden if its name or itself looks like a secret."""
    if isinstance(value, str | int | float) and is_secret(place.rpartition(".")[2], value):
        return HIDDEN
    return printable(value)


def _short(value: Any) -> str:
    if value is None:
        return "(none)"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def _reference(ref: Ref) -> str:
    return f"<{ref.attribute} of {ref.key}>"
