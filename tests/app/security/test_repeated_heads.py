"""Heads that a connection sends again: what was checked for them holds only where the checks cannot have changed."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from handler.http.app import App
from handler.http.security import OPEN, Access, AllowedHosts, Cors, Keys
from tests.services import echo_service
from tests.unit.http.connection import Connection, connected

BODY = b'{"inputs": "a b"}'
HEAD = b"POST /invocations HTTP/1.1\r\nHost: h\r\nOrigin: https://page.example\r\nContent-Type: text/plain\r\n"
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY)


class Switched:
    """Passes each request to one of several applications, as a user's own application may."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def status_of(connection: Connection) -> int:
    connection.receive(REQUEST, BODY)
    head = await connection.read_until(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    await connection.read(int(fields[b"content-length"]))
    return int(head.split()[1])


@pytest.mark.parametrize(
    ("refusing", "status"),
    [
        ({"access": Access(keys=("k",), origins=frozenset("*"))}, 401),
        ({"hosts": AllowedHosts(["other"]), "access": Access(origins=frozenset("*"))}, 403),
        ({}, 403),  # a page of another origin
    ],
    ids=["keys", "hosts", "origins"],
)
def test_a_head_that_one_application_admits_is_checked_by_the_next(refusing: dict[str, Any], status: int) -> None:
    async def story() -> None:
        model = await echo_service()
        admits = App(model, Access(origins=frozenset("*")))
        refuses = App(model, **refusing)
        app = Switched(admits)
        async with connected(app) as connection:
            assert [await status_of(connection) for _ in range(4)] == [200] * 4
            app.app = refuses
            assert await status_of(connection) == status
        model.close()

    asyncio.run(story())


def test_the_settings_that_admit_a_head_cannot_change() -> None:
    for field in dataclasses.fields(Access):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(OPEN, field.name, ())
    keys, names, origins = ["k"], ["h"], {"https://page.example"}
    checks = Keys(keys), AllowedHosts(names), Cors(origins)
    for changed in (keys, names, origins):
        changed.clear()
    assert checks[0].owner("Bearer k")
    assert checks[1].admits("h")
    scope: Scope = {"headers_by_name": {"origin": "https://page.example"}, "method": "POST"}
    assert not checks[2].is_forgery(scope)
