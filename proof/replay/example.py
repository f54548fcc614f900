"""The example of a class: a request's two answers as a diff.

Unless content is to be shown, each value is a label: the same value has the same one on both sides.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from proof.replay.comparison import framing_text, media_text
from proof.replay.content import NotJson, public_name, read_documents
from proof.replay.exchange import Answer
from proof.replay.findings import Class
from proof.replay.journal import Example

_MAX_LINES = 400  # of each side: a diff takes time by their product


def describe(example: Example, cls: Class, show: bool) -> dict[str, Any]:
    """Return an example for the journal and the reports."""
    request = example.request
    labels = None if show else Labels()
    old, new = (list(islice(_lines(answer, labels), _MAX_LINES)) for answer in (example.old, example.new))
    described = {
        "size": example.size,
        "id": printable(request.id),
        "request": printable(f"{request.method} {request.path.partition('?')[0]}"),
        "findings": [printable(_finding(one, show)) for one in example.findings if one.cls is cls],
        "diff": [printable(line) for line in difflib.unified_diff(old, new, "reference", "target", lineterm="", n=3)],
    }
    if show:
        described["body"] = printable(request.body.decode("utf-8", "replace"))
    return described


def printable(text: str) -> str:
    """Return text without what a terminal obeys, and what UTF-8 cannot write."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "\ufffd" for one in text)


def _finding(finding: Any, show: bool) -> str:
    parts = [finding.name, finding.change, finding.content if show else ""]
    return ": ".join(part for part in parts if part)


class Labels:
    """Names values instead of showing them."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, Any], str] = {}

    def of(self, value: Any) -> Any:
        """Return the value with labels in the place of its scalars."""
        if isinstance(value, dict):
            return {public_name(name): self.of(part) for name, part in value.items()}
        if isinstance(value, list):
            return [self.of(part) for part in value]
        return value if value is None else self.label(value)

    def label(self, value: Any) -> str:
        kind = {str: "text", bool: "boolean"}.get(type(value), "number")
        size = f", {len(value)} characters" if isinstance(value, str) else ""
        return self._known.setdefault((type(value), value), f"<{kind} {len(self._known) + 1}{size}>")


def _lines(answer: Answer, labels: Labels | None) -> Iterator[str]:
    if answer.lost:
        yield f"lost: {answer.lost}"
        return
    yield f"status {answer.status}"
    media = answer.content_type if labels is None else media_text(answer.content_type)
    yield f"content-type: {media if answer.content_type else 'unknown'}"
    try:
        documents = read_documents(answer.body)
    except NotJson:
        text = answer.body.decode("utf-8", "replace")
        yield from text.splitlines() if labels is None else [labels.label(text)]
        return
    for glue, value in zip(documents.glue, [*documents.values, None], strict=True):
        if glue:
            yield f"framing: {json.dumps(glue) if labels is None else framing_text(glue)}"
        if value is not None:
            shown = value if labels is None else labels.of(value)
            yield from json.dumps(shown, indent=1, ensure_ascii=False).splitlines()
