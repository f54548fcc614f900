"""The report as one HTML file, without scripts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #bbb;padding:.2rem .6rem;text-align:left}
td.n{text-align:right}pre{background:#f4f4f4;padding:.6rem;overflow-x:auto}.beyond{background:#fdd}
.add{color:#060}.del{color:#900}"""


def page(report: Mapping[str, Any]) -> str:
    """Return the page."""
    return "\n".join(["<!doctype html>", '<html lang="en"><meta charset="utf-8"><title>lmi replay</title>',
                      f"<style>{_STYLE}</style>", *_body(report), "</html>\n"])  # fmt: skip


def _body(report: Mapping[str, Any]) -> Iterator[str]:
    run = report["run"]
    yield f"<h1>lmi replay</h1><p>{_text(run['requests'])} to {_text(run['to'])} against {_text(run['against'])}</p>"
    yield "<table><tr><th>class<th>requests<th>%<th>allowed %</tr>"
    for name, values in report["classes"].items():
        allowed = "" if values["allowed_percent"] is None else f"{values['allowed_percent']:g}"
        mark = ' class="beyond"' if name in report["beyond"] else ""
        cells = [f"{values['requests']:,}", f"{values['percent']:g}", allowed]
        yield f"<tr{mark}><td>{name}{_cells(cells)}</tr>"
    yield "</table>"
    found = [(cls, name, f"{n:,}") for cls, names in report["findings"].items() for name, n in names.items()]
    if found:
        yield "<h2>What differs</h2><table><tr><th>class<th>what<th>requests</tr>"
        yield from (f"<tr><td>{cls}<td>{_text(name)}{_cells([count])}</tr>" for cls, name, count in found)
        yield "</table>"
    yield "<h2>Times in milliseconds</h2><table><tr><th>side<th>time<th>p50<th>p90<th>p99</tr>"
    for side, times in report["times_ms"].items():
        for name, values in times.items():
            cells = ["" if value is None else f"{value:,.1f}" for value in values.values()]
            yield f"<tr><td>{side}<td>{name}{_cells(cells)}</tr>"
    yield "</table>"
    yield from _list("Left out", [f"{one['place']}: {one['reason']}" for one in report["unreadable"]["first"]])
    yield from _list("Volatile, not compared", sorted(report["volatile"]))
    for name, example in report["examples"].items():
        yield f"<h2>{name}</h2><p>{_text(example['id'])}: {_text(example['request'])}</p>"
        yield from _list("", example["findings"])
        yield f"<pre>{chr(10).join(map(_diff_line, example['diff']))}</pre>"


def _list(title: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        yield (f"<h2>{title}</h2>" if title else "") + "<ul>" + "".join(f"<li>{_text(one)}" for one in items) + "</ul>"


def _cells(values: Iterable[str]) -> str:
    return "".join(f'<td class="n">{value}' for value in values)


def _diff_line(line: str) -> str:
    kind = {"+": "add", "-": "del"}.get(line[:1])
    return f'<span class="{kind}">{_text(line)}</span>' if kind else _text(line)


def _text(value: Any) -> str:
    return html.escape(str(value))
