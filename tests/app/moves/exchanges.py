"""A user's requests before and after a move: what the old server answered, by shape, and what ours answers.

`tests/golden/moves/NAME.json` has the old answers, an exchange a line. They were recorded by these same requests; the
test of each move says from what.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from botocore.exceptions import ClientError

from proof.replay.content import NotJson, differences, frames, merged, read_documents, shape
from tests.deploy.local.servers import client, emulated
from tests.servers import ANSWER_LIMIT, LiveServer, http

RECORDS = Path(__file__).parents[2] / "golden" / "moves"
DOCS = Path(__file__).parents[3] / "docs"
HEADERS = ("content-type", "x-service", "x-answered-by")


@dataclass(frozen=True)
class Ask:
    """A request. `body` is sent as JSON, a string as it is."""

    body: Any
    path: str = "/invocations"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        return self.body.encode() if isinstance(self.body, str) else json.dumps(self.body).encode()

    @property
    def streams(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("stream"))


def body_shape(body: str) -> dict[str, Any]:
    """Return the shape of a body.

    `frames` are those of its first JSON document, of all between, and of its last one; `glue` is the text before them,
    between them (each different one once) and after them. A body that is not JSON has its text alone.
    """
    try:
        documents = read_documents(body.encode())
    except NotJson:
        return {"text": body}
    glue = documents.glue
    return {
        "glue": [glue[0], *dict.fromkeys(glue[1:-1]), glue[-1]],
        "frames": [merged([shape(value) for value in part]) for part in frames(documents.values).values()],
    }


def by_http(server: LiveServer, ask: Ask) -> dict[str, Any]:
    """Ask without SageMaker in between."""
    method = "GET" if ask.body is None else "POST"
    sent = {"Content-Type": "application/json", **ask.headers}
    answer = http.request(
        method,
        server.url + ask.path,
        content=None if ask.body is None else ask.content,
        headers=sent,
        timeout=ANSWER_LIMIT,
    )
    return {"status": answer.status_code, **_headers(answer.headers), **body_shape(answer.text)}


def _headers(headers: httpx.Headers) -> dict[str, str]:
    return {name: headers[name] for name in HEADERS if name in headers}


@contextlib.contextmanager
def endpoint(server: LiveServer) -> Iterator[Any]:
    """Stock boto3 before SageMaker Runtime's emulator before a server."""
    with emulated(server) as url, contextlib.closing(client(url)) as runtime:
        yield runtime


def by_boto3(runtime: Any, ask: Ask) -> dict[str, Any]:
    """Ask as a client of SageMaker does, by the call that fits; errors of the container included."""
    given = {"EndpointName": "local", "Body": ask.content, "ContentType": "application/json"}
    try:
        if ask.streams:
            answer = runtime.invoke_endpoint_with_response_stream(**given)
            body = b"".join(part["PayloadPart"]["Bytes"] for part in answer["Body"])
        else:
            answer = runtime.invoke_endpoint(**given)
            body = answer["Body"].read()
    except ClientError as error:
        return {"status": error.response["OriginalStatusCode"], **body_shape(error.response["OriginalMessage"])}
    types = {"content-type": answer["ContentType"]} if "ContentType" in answer else {}
    return {"status": 200, **types, **body_shape(body.decode())}


def record(name: str) -> dict[str, dict[str, Any]]:
    """Return what the old server answered, by the exchange's name."""
    found: dict[str, dict[str, Any]] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return found


_PLACES = ((), ("$",), ("first", "last"), ("first", "between", "last"))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Return what a client finds changed: the status, a header, the framing, and each field of the first, a middle
    and the last JSON document."""
    before, after = old.get("frames", ()), new.get("frames", ())
    changed = {name for name in {*old, *new} - {"frames"} if old.get(name) != new.get(name)}
    found = {f"{name}: {old.get(name)} -> {new.get(name)}" for name in changed}
    if len(before) != len(after):
        return {*found, f"documents: {len(before)} -> {len(after)}"}
    for place, one, other in zip(_PLACES[len(before)], before, after, strict=True):
        found.update(differences(one, other, place))
    return found


@dataclass(frozen=True)
class Reason:
    """Why answers differ on purpose: a row of a document, by its beginning, and the changes that it explains.

    Args:
        asked: a pattern of the exchanges' names.
        changes: patterns, each of a whole change.
    """

    page: str
    row: str
    changes: tuple[str, ...]
    asked: str = ".*"

    def explains(self, name: str, change: str) -> bool:
        return bool(re.fullmatch(self.asked, name)) and any(re.fullmatch(one, change) for one in self.changes)


def compare(record_name: str, answers: Mapping[str, Mapping[str, Any]], reasons: Sequence[Reason]) -> set[Reason]:
    """Check that all answers have their old shape, but for what has a reason; return the reasons that were needed."""
    used, unexplained = set(), []
    old = record(record_name)
    for name, answer in answers.items():
        for change in sorted(changes(old[name], answer)):
            found = [reason for reason in reasons if reason.explains(name, change)]
            used.update(found)
            if not found:
                unexplained.append(f"{name}: {change}")
    assert not unexplained, "\n".join(unexplained)
    return used


def check_documented(reasons: Sequence[Reason], used: set[Reason]) -> None:
    """Check that every reason was needed, and stands in its document."""
    for reason in reasons:
        assert reason in used, f"nothing needs the reason {reason.row!r}"
        rows = (DOCS / reason.page).read_text(encoding="utf-8").splitlines()
        assert any(row.startswith(f"| {reason.row}") for row in rows), f"{reason.page} has no row {reason.row!r}"
