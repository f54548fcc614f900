"""Rules of sessions and adapters in SageMaker and LMI."""

from __future__ import annotations

import re

from proof.conform import sources
from proof.conform.exchange import Response
from proof.conform.rule import LMI, expect, expect_refused, expect_response, expect_status, rule, skip
from proof.conform.server import Server

_STATEFUL = ("sagemaker", "lmi-0.38")
_WITH_ADAPTERS = ("sagemaker", *LMI)
_SESSION = "X-Amzn-SageMaker-Session-Id"
_ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
_EXPIRES = re.compile(r"([^;\s]+); *Expires=[0-9]{4}-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9]Z")


async def _open(server: Server) -> tuple[Response, str]:
    """Open a session, and return the response and the session ID."""
    response = await server.post("/invocations", {"requestType": "NEW_SESSION"})
    if not response.ok:
        skip(f"the server opens no session: {response.got}")
    lmi = server.profile == "lmi-0.38"
    name = _SESSION if lmi else "X-Amzn-SageMaker-New-Session-Id"
    match = _EXPIRES.fullmatch(response.headers.get(name.lower(), ""))
    expect(match, f"the header {name}: ID; Expires=2026-11-24T10:00:00Z", response)
    assert match is not None
    return response, match[1]


async def _in_session(server: Server, session: str) -> Response:
    return await server.generate(tokens=2, headers={_SESSION: session})


async def _close(server: Server, session: str) -> Response:
    return await server.post("/invocations", {"requestType": "CLOSE"}, headers={_SESSION: session})


def _expect_unknown(server: Server, response: Response) -> None:
    if server.profile == "lmi-0.38":
        expect_status(response, 424)
    else:
        expect_refused(response)


@rule("sessions.open", "NEW_SESSION opens a session; a header has its ID and expiry time.", sources.SESSIONS, _STATEFUL)
async def sessions_open(server: Server) -> None:
    response, session = await _open(server)
    await _close(server, session)
    expect(session in str(response.object.get("result", session)), "the session's ID in result", response)


@rule("sessions.use", "Requests with the session's ID are answered.", sources.SESSIONS, _STATEFUL)
async def sessions_use(server: Server) -> None:
    _, session = await _open(server)
    response = await _in_session(server, session)
    await _close(server, session)
    expect_response(response)


@rule("sessions.close", "CLOSE closes a session; a header of the response has its ID.", sources.SESSIONS, _STATEFUL)
async def sessions_close(server: Server) -> None:
    _, session = await _open(server)
    response = expect_response(await _close(server, session))
    name = "X-Amzn-SageMaker-Closed-Session-Id"
    expect(response.headers.get(name.lower()) == session, f"the header {name}: {session}", response)


@rule("sessions.closed", "Requests for a closed session are refused.", sources.SESSIONS, _STATEFUL)
async def sessions_closed(server: Server) -> None:
    _, session = await _open(server)
    await _close(server, session)
    _expect_unknown(server, await _in_session(server, session))


@rule("sessions.unknown", "Requests for an unknown session are refused.", sources.SESSIONS, _STATEFUL)
async def sessions_unknown(server: Server) -> None:
    _, session = await _open(server)
    await _close(server, session)
    _expect_unknown(server, await _in_session(server, "00000000-0000-4000-8000-000000000000"))


# -- adapters ----------------------------------------------------------------------------------------------------


def _adapter(server: Server) -> tuple[str, str]:
    name, _, directory = server.asking.adapter.partition("=")
    if not directory:
        skip("requires an adapter: --adapter NAME=DIRECTORY")
    return name, directory


async def _with_adapter(server: Server, name: str) -> Response:
    return await server.generate(tokens=2, headers={_ADAPTER: name})


async def _register(server: Server) -> Response:
    name, directory = _adapter(server)
    await server.ask("DELETE", f"/adapters/{name}")
    return await server.post("/adapters", {"name": name, "src": directory})


@rule("adapters.unknown", "A request for an unknown adapter is refused.", sources.STANDARDS, _WITH_ADAPTERS)
async def adapters_unknown(server: Server) -> None:
    expect_refused(await _with_adapter(server, "conform-has-no-such-adapter"), ", not a response of the base model")


@rule("adapters.register", "POST /adapters registers an adapter by name and src.", sources.STANDARDS, _WITH_ADAPTERS)
async def adapters_register(server: Server) -> None:
    response = await _register(server)
    expect(response.ok, "status 200", response)


@rule("adapters.use", "The name in SageMaker's header selects the adapter.", sources.ADAPTERS, _WITH_ADAPTERS)
async def adapters_use(server: Server) -> None:
    name, _ = _adapter(server)
    await _register(server)
    expect_response(await _with_adapter(server, name))


@rule(
    "adapters.delete",
    "DELETE /adapters/NAME unregisters the adapter: requests for it are refused.",
    sources.STANDARDS,
    _WITH_ADAPTERS,
)
async def adapters_delete(server: Server) -> None:
    name, _ = _adapter(server)
    await _register(server)
    response = await server.ask("DELETE", f"/adapters/{name}")
    expect(response.ok, "status 200", response)
    expect_refused(await _with_adapter(server, name), " after DELETE")


@rule("adapters.delete-unknown", "DELETE of an unknown adapter is refused.", sources.STANDARDS, _WITH_ADAPTERS)
async def adapters_delete_unknown(server: Server) -> None:
    response = await server.ask("DELETE", "/adapters/conform-has-no-such-adapter")
    expect_refused(response)
    if response.status == 405:
        skip("the server does not have this route")
