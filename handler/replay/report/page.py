"""The report as one HTML file, without scripts."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from handler.replay.report import tables

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #bbb;padding:.2rem .6rem;text-align:left}
td{font-variant-numeric:tabular-nums}pre{background:#f4f4f4;padding:.6rem;overflow-x:auto}.beyond{background:#fdd}
h2::first-letter{text-transform:uppercase}.add{color:#060}.del{color:#900}"""


def page(report: Mapping[str, Any]) -> str:
    """Return the page."""
    return "\n".join(["<!doctype html>", '<html lang="en"><meta charset="utf-8"><title>lmi replay</title>',
                      f"<style>{_STYLE}</style>", *_body(report), "</html>\n"])  # fmt: skip


def _body(report: Mapping[str, Any]) -> Iterator[str]:
    run = report["run"]
    yield f"<h1>lmi replay</h1><p>{_text(run['requests'])} to {_text(run['to'])} against {_text(run['against'])}</p>"
    yield from _table(tables.classes(report))
    yield from _table(tables.findings(report), "What differs")
    yield from _table(tables.times(report), "Times")
    for note, items in tables.notes(report):
        yield f"<h2>{_text(note)}</h2>"
        yield from _list(items)
    for name, example in report["examples"].items():
        yield f"<h2>{name}: the smallest example</h2><p>{_text(example['id'])}: {_text(example['request'])}</p>"
        yield from _list(tables.example_lines(example))
        yield f"<pre>{chr(10).join(map(_diff_line, example['diff']))}</pre>"


def _table(table: tables.Table, title: str = "") -> Iterator[str]:
    if not table.rows:
        return
    yield f"<h2>{title}</h2>" if title else ""
    yield f"<table><tr>{''.join(f'<th>{_text(name)}' for name in table.head)}</tr>"
    for row in table.rows:
        mark = ' class="beyond"' if row[-1] == tables.BEYOND else ""
        yield f"<tr{mark}>{''.join(f'<td>{_text(value)}' for value in row)}</tr>"
    yield "</table>"


def _list(items: Sequence[str]) -> Iterator[str]:
    if items:
        yield "<ul>" + "".join(f"<li>{_text(one)}" for one in items) + "</ul>"


def _diff_line(line: str) -> str:
    kind = {"+": "add", "-": "del"}.get(line[:1])
    return f'<span class="{kind}">{_text(line)}</span>' if kind else _text(line)


def _text(value: Any) -> str:
    return html.escape(str(value))
