"""The report of a run, with examples: as JSON, for a terminal, and as an HTML page without scripts.

Unless content is shown, the values in an example are replaced with labels. Equal values have equal labels on both
sides.
"""

from __future__ import annotations

import difflib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from proof.bench.report import table
from proof.replay.comparison import CLASSES, Class, framing_text, media_text
from proof.replay.content import NotJson, public_name, read_documents
from proof.replay.exchange import Response
from proof.replay.journal import SIDES, TIMES, Example, Summary
from proof.replay.noise import Noise

_PERCENTILES = (50, 90, 99)

Report = Mapping[str, Any]
"""A report as `document` returns it."""


def document(run: Mapping[str, Any], summary: Summary, noise: Noise, allowed: Mapping[Class, float]) -> dict[str, Any]:
    compared = summary.num_compared
    return {
        "run": dict(run),
        "compared": compared,
        "classes": {
            cls.value: {
                "requests": summary.classes[cls],
                "percent": round(100 * summary.classes[cls] / compared, 4) if compared else 0.0,
                "allowed_percent": None if cls is Class.EQUAL else allowed.get(cls, 0.0),
            }
            for cls in CLASSES
        },
        "beyond": [cls.value for cls in summary.beyond(allowed)],
        "findings": {cls.value: dict(summary.names[cls].most_common()) for cls in CLASSES if summary.names[cls]},
        "unreadable": {
            "count": summary.num_unreadable,
            "first": [{"place": item.location, "reason": item.reason} for item in summary.unreadable],
        },
        "answered": {
            side: [f"{run[name]}{f' ({by})' if by else ''}" for by in summary.answered[side] or [""]]
            for side, name in (("reference", "against"), ("target", "to"))
        },
        "throttled": dict(summary.throttled),
        "volatile": dict(summary.volatile),
        "asked_again": noise.repeats,
        "times_ms": {
            side: {
                name: {f"p{percent}": _ms(summary.times[side][name].percentile(percent)) for percent in _PERCENTILES}
                for name in TIMES
            }
            for side in SIDES
        },
        "examples": {cls.value: summary.examples[cls] for cls in CLASSES if cls in summary.examples},
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


# -- tables and notes for the terminal and the page -------------------------------------------------------------------


BEYOND = "beyond"
"""The last cell in the row for a class that has more requests than allowed."""

_TIMES = {"first": "first byte", "gap": "between pieces", "total": "whole response"}


class Table(NamedTuple):
    """A table, which is shown only if it has rows."""

    head: Sequence[str]
    rows: list[list[str]]


def classes(report: Report) -> Table:
    rows = []
    for name, values in report["classes"].items():
        allowed = "" if values["allowed_percent"] is None else f"{values['allowed_percent']:g}"
        verdict = BEYOND if name in report["beyond"] else ""
        rows.append([name, f"{values['requests']:,}", f"{values['percent']:g}", allowed, verdict])
    return Table(["class", "requests", "%", "allowed %", ""], rows)


def findings(report: Report, maximum: int | None = None) -> Table:
    """Return the table of findings.

    Args:
        maximum: the maximum number of findings per class, or None for all findings.
    """
    rows = [
        [cls, name, f"{count:,}"]
        for cls, names in report["findings"].items()
        for name, count in list(names.items())[:maximum]
    ]
    return Table(["class", "what differs", "requests"], rows)


def times(report: Report) -> Table:
    """Return the table of measured times."""
    rows = [
        [f"{label}, {side}", *(f"{value:,.1f}" for value in values[name].values())]
        for name, label in _TIMES.items()
        for side, values in report["times_ms"].items()
        if values[name]["p50"] is not None
    ]
    return Table(["milliseconds", "p50", "p90", "p99"], rows)


def notes(report: Report) -> Iterator[tuple[str, list[str]]]:
    """Yield the notes in the report, each with its details, if any."""
    for side, names in report["answered"].items():
        yield f"the {side} that answered: {'; '.join(names)}", []
    if count := report["unreadable"]["count"]:
        yield f"skipped: {count:,}", [f"{item['place']}: {item['reason']}" for item in report["unreadable"]["first"]]
    for side, count in report["throttled"].items():
        if count:
            yield f"the {side} was busy; retries: {count:,}", []
    if volatile := report["volatile"]:
        yield "volatile, not compared", sorted(volatile)


def example_lines(example: Mapping[str, Any]) -> list[str]:
    """Return the findings of an example, and its request if content is shown."""
    body = example.get("body")
    return [*example["findings"], *([f"request: {body}"] if body else [])]


# -- the report for a terminal -----------------------------------------------------------------------------------------


_MOST = 10  # findings per class in the table


def show(report: Report) -> str:
    """Return the report for a terminal."""
    return "\n".join(_parts(report))


def _parts(report: Report) -> Iterator[str]:
    yield table(*classes(report))
    for part in (findings(report, _MOST), times(report)):
        if part.rows:
            yield "\n" + table(*part)
    yield ""
    for note, items in notes(report):
        yield note
        yield from (f"  {item}" for item in items)
    for name, example in report["examples"].items():
        yield f"\n{name}: the smallest example, {example['id']}, {example['request']}"
        yield from (f"  {line}" for line in (*example_lines(example), *example["diff"]))


# -- the report as one HTML file, without scripts ----------------------------------------------------------------------


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #bbb;padding:.2rem .6rem;text-align:left}
td{font-variant-numeric:tabular-nums}pre{background:#f4f4f4;padding:.6rem;overflow-x:auto}.beyond{background:#fdd}
h2::first-letter{text-transform:uppercase}.add{color:#060}.del{color:#900}"""


def page(report: Report) -> str:
    """Return the report as an HTML page."""
    return "\n".join(["<!doctype html>", '<html lang="en"><meta charset="utf-8"><title>lmi replay</title>',
                      f"<style>{_STYLE}</style>", *_body(report), "</html>\n"])  # fmt: skip


def _body(report: Report) -> Iterator[str]:
    run = report["run"]
    yield f"<h1>lmi replay</h1><p>{_text(run['requests'])} to {_text(run['to'])} against {_text(run['against'])}</p>"
    yield from _table(classes(report))
    yield from _table(findings(report), "What differs")
    yield from _table(times(report), "Times")
    for note, items in notes(report):
        yield f"<h2>{_text(note)}</h2>"
        yield from _list(items)
    for name, example in report["examples"].items():
        yield f"<h2>{name}: the smallest example</h2><p>{_text(example['id'])}: {_text(example['request'])}</p>"
        yield from _list(example_lines(example))
        yield f"<pre>{chr(10).join(map(_diff_line, example['diff']))}</pre>"


def _table(table: Table, title: str = "") -> Iterator[str]:
    if not table.rows:
        return
    yield f"<h2>{title}</h2>" if title else ""
    yield f"<table><tr>{''.join(f'<th>{_text(name)}' for name in table.head)}</tr>"
    for row in table.rows:
        mark = ' class="beyond"' if row[-1] == BEYOND else ""
        yield f"<tr{mark}>{''.join(f'<td>{_text(value)}' for value in row)}</tr>"
    yield "</table>"


def _list(items: Sequence[str]) -> Iterator[str]:
    if items:
        yield "<ul>" + "".join(f"<li>{_text(item)}" for item in items) + "</ul>"


def _diff_line(line: str) -> str:
    kind = {"+": "add", "-": "del"}.get(line[:1])
    return f'<span class="{kind}">{_text(line)}</span>' if kind else _text(line)


def _text(value: Any) -> str:
    return html.escape(str(value))


# -- the example of a class: a request's two responses as a diff -------------------------------------------------------


_MAX_LINES = 400  # of each side, because the time of a diff grows with their product


def describe(example: Example, cls: Class, show: bool) -> dict[str, Any]:
    """Return an example for the journal and the reports.

    Args:
        show: whether to show content. Otherwise, labels replace it.
    """
    request = example.request
    labels = None if show else Labels()
    reference, target = (
        list(islice(_lines(response, labels), _MAX_LINES)) for response in (example.reference, example.target)
    )
    described = {
        "size": example.size,
        "id": printable(request.id),
        "request": printable(f"{request.method} {request.path.partition('?')[0]}"),
        "findings": [printable(_finding(finding, show)) for finding in example.findings if finding.cls is cls],
        "diff": [
            printable(line) for line in difflib.unified_diff(reference, target, "reference", "target", lineterm="", n=3)
        ],
    }
    if show:
        described["body"] = printable(request.body.decode("utf-8", "replace"))
    return described


def printable(text: str) -> str:
    """Replace control characters, and characters that UTF-8 cannot encode."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def _finding(finding: Any, show: bool) -> str:
    parts = [finding.name, finding.change, finding.content if show else ""]
    return ": ".join(part for part in parts if part)


class Labels:
    """Labels that replace the values of an example."""

    def __init__(self) -> None:
        self._labels: dict[tuple[type, Any], str] = {}

    def of(self, value: Any) -> Any:
        """Return the value with its scalars replaced by labels."""
        if isinstance(value, dict):
            return {public_name(name): self.of(part) for name, part in value.items()}
        if isinstance(value, list):
            return [self.of(part) for part in value]
        return value if value is None else self.label(value)

    def label(self, value: Any) -> str:
        kind = {str: "text", bool: "boolean"}.get(type(value), "number")
        size = f", {len(value)} characters" if isinstance(value, str) else ""
        return self._labels.setdefault((type(value), value), f"<{kind} {len(self._labels) + 1}{size}>")


def _lines(response: Response, labels: Labels | None) -> Iterator[str]:
    if response.lost:
        yield f"lost: {response.lost}"
        return
    yield f"status {response.status}"
    media = response.content_type if labels is None else media_text(response.content_type)
    yield f"content-type: {media if response.content_type else 'unknown'}"
    try:
        documents = read_documents(response.body)
    except NotJson:
        text = response.body.decode("utf-8", "replace")
        yield from text.splitlines() if labels is None else [labels.label(text)]
        return
    for glue, value in zip(documents.glue, [*documents.values, None], strict=True):
        if glue:
            yield f"framing: {json.dumps(glue) if labels is None else framing_text(glue)}"
        if value is not None:
            printed = value if labels is None else labels.of(value)
            yield from json.dumps(printed, indent=1, ensure_ascii=False).splitlines()
