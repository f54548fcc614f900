"""Who owns what a client stores: by the keys that the server checks, by what a gateway says, and everyone otherwise."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.server import BY_KEY, serve
from tests.app.sockets.client import open_socket, send, until
from tests.servers import LiveServer, options

Headers = Mapping[str, str]

NOBODY: Headers = {}
ANN, BOB = {"authorization": "Bearer ann"}, {"x-api-key": "bob"}
BODY = {"input": "one two", "max_output_tokens": 2}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
MESSAGE = {"custom_id": "a", "params": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}}
SESSION, NEW = "x-amzn-sagemaker-session-id", "x-amzn-sagemaker-new-session-id"


def ask(server: LiveServer, path: str, headers: Headers, method: str = "GET", **more: Any) -> httpx.Response:
    return httpx.request(method, f"{server.url}{path}", headers={**headers, **more.pop("also", {})}, timeout=30, **more)


def made(server: LiveServer, path: str, headers: Headers, **more: Any) -> str:
    """The id of what a POST has made."""
    found = ask(server, path, headers, "POST", **more)
    assert found.status_code == 200, found.text
    id: str = found.json()["id"]
    return id


def response(server: LiveServer, headers: Headers) -> str:
    return f"/v1/responses/{made(server, '/v1/responses', headers, json=BODY)}"


def background(server: LiveServer, headers: Headers) -> str:
    return f"/v1/responses/{made(server, '/v1/responses', headers, json={**BODY, 'background': True})}"


def over_a_socket(server: LiveServer, headers: Headers) -> str:
    with open_socket(server, "/v1/responses", additional_headers=headers) as socket:
        send(socket, {"type": "response.create", **BODY})
        return f"/v1/responses/{until(socket, 'response.incomplete')[-1]['response']['id']}"


def conversation(server: LiveServer, headers: Headers) -> str:
    return f"/v1/conversations/{made(server, '/v1/conversations', headers, json={})}"


def file_id(server: LiveServer, headers: Headers) -> str:
    form = {"files": {"file": ("a.jsonl", json.dumps(LINE).encode())}, "data": {"purpose": "batch"}}
    return made(server, "/v1/files", headers, **form)


def file(server: LiveServer, headers: Headers) -> str:
    return f"/v1/files/{file_id(server, headers)}"


def batch(server: LiveServer, headers: Headers) -> str:
    body = {"input_file_id": file_id(server, headers), "endpoint": LINE["url"], "completion_window": "24h"}
    return f"/v1/batches/{made(server, '/v1/batches', headers, json=body)}"


def message_batch(server: LiveServer, headers: Headers) -> str:
    body = {"requests": [MESSAGE]}
    return f"/v1/messages/batches/{made(server, '/v1/messages/batches', headers, json=body)}"


def session(server: LiveServer, headers: Headers) -> str:
    found = ask(server, "/invocations", headers, "POST", json={"requestType": "NEW_SESSION"})
    return found.headers[NEW].partition(";")[0]


KINDS: tuple[Callable[[LiveServer, Headers], str], ...] = (
    response, background, over_a_socket, conversation, file, batch, message_batch, session
)  # fmt: skip


def is_found(server: LiveServer, place: str, headers: Headers) -> bool:
    if place.startswith("/"):
        found = ask(server, place, headers)
        assert found.status_code in (200, 404), found.text
        return found.status_code == 200
    found = ask(server, "/invocations", headers, "POST", json={"inputs": "a"}, also={SESSION: place})
    assert found.status_code in (200, 400), found.text
    return found.status_code == 200


def stores(directory: Path) -> tuple[str, ...]:
    on = ("responses_store", "batches_store", "sessions_path")
    places = [f"option.{name}={directory / name}" for name in on]
    return ("--engine", "echo", *options(*places, "option.enable_stateful_sessions=true", "option.max_model_len=100"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(*stores(tmp_path_factory.mktemp("open"))) as server:
        yield server


@pytest.mark.parametrize("make", KINDS)
def test_without_keys_everyone_finds_what_anyone_made(server: LiveServer, make: Any) -> None:
    """A client library always sends a key. Programs without one must find what it made, and the other way round."""
    places = [make(server, maker) for maker in (NOBODY, ANN, BOB)]
    for place, reader in itertools.product(places, (NOBODY, ANN, BOB)):
        assert is_found(server, place, reader), (place, reader)


def test_without_keys_the_lists_are_everyones(server: LiveServer) -> None:
    made = [file(server, maker).rpartition("/")[2] for maker in (NOBODY, ANN, BOB)]
    for reader in (NOBODY, ANN, BOB):
        listed = {each["id"] for each in ask(server, "/v1/files", reader).json()["data"]}
        assert {*made} <= listed


USER = ("-o", "option.owner_header=X-User")
NAMED_ANN, NAMED_BOB = (
    {"x-user": "ann", "authorization": "Bearer one"},
    {"x-user": "bob", "authorization": "Bearer one"},
)


@pytest.mark.parametrize(
    ("settings", "ann", "bob"),
    [
        (BY_KEY, ANN, BOB),
        (("-o", "option.owner_header=x-api-key"), ANN, BOB),
        (("--api-key", "ann", "--api-key", "bob"), ANN, BOB),
        (USER, {"x-user": "ann"}, {"x-user": "bob"}),
        (USER, NAMED_ANN, NAMED_BOB),
        ((*USER, "--api-key", "one"), NAMED_ANN, NAMED_BOB),
        ((*USER, "--api-key", "one"), NAMED_ANN, {"authorization": "Bearer one"}),
        ((*USER, "--api-key", "one", "--api-key", "two"), NAMED_ANN, {**NAMED_ANN, "authorization": "Bearer two"}),
    ],
    ids=[
        "key of a gateway",
        "its other header",
        "keys",
        "names",
        "names beside a key",
        "names and keys",
        "no name",
        "a name with two keys",
    ],
)
def test_each_owner_finds_only_its_own(tmp_path: Path, settings: tuple[str, ...], ann: Headers, bob: Headers) -> None:
    with serve(*stores(tmp_path), *settings) as server:
        for make in KINDS:
            place = make(server, ann)
            assert is_found(server, place, ann), make
            assert not is_found(server, place, bob), make
            mixed = [*ann.items(), *bob.items()]
            if "x-user" in ann and "x-user" in bob:  # a gateway that adds its header to the client's own
                assert httpx.get(f"{server.url}/v1/files", headers=mixed).json()["data"] == []


def test_nothing_is_lost_by_an_upgrade(tmp_path: Path) -> None:
    """Earlier releases told unchecked keys apart. Each client still finds what it made then, and only that."""
    with serve(*stores(tmp_path), *BY_KEY) as earlier, serve(*stores(tmp_path)) as server:
        anns, nobodys = ([make(earlier, maker) for make in KINDS] for maker in (ANN, NOBODY))
        for place in anns:
            assert is_found(server, place, ANN), place
            assert not is_found(server, place, BOB), place
            assert not is_found(server, place, NOBODY), place
        for place, reader in itertools.product(nobodys, (NOBODY, ANN, BOB)):
            assert is_found(server, place, reader), (place, reader)
        again = {**BODY, "previous_response_id": anns[0].rpartition("/")[2]}
        assert is_found(server, f"/v1/responses/{made(server, '/v1/responses', ANN, json=again)}", BOB)
        added = {"items": [{"role": "user", "content": "a"}]}
        assert ask(server, f"{anns[3]}/items", ANN, "POST", json=added).status_code == 200
        listed = {each["id"] for each in ask(server, "/v1/files", ANN).json()["data"]}
        assert {place.rpartition("/")[2] for place in (anns[4], nobodys[4])} <= listed
        close = ask(server, "/invocations", ANN, "POST", json={"requestType": "CLOSE"}, also={SESSION: anns[7]})
        assert close.status_code == 200, close.text
        assert not is_found(earlier, anns[7], ANN)
        for place in (anns[0], anns[3]):
            assert ask(server, place, ANN, "DELETE").status_code == 200
            assert not is_found(earlier, place, ANN)


MIDDLEWARE = """
from model_hosting_container_standards.common.fastapi.middleware import custom_middleware


@custom_middleware("throttle")
async def passing(request, call_next):
    return await call_next(request)
"""


def test_middleware_changes_no_owner(tmp_path: Path) -> None:
    """It sees no key, as the server removes the keys that it checks."""
    (tmp_path / "model.py").write_text(MIDDLEWARE)
    (tmp_path / "serving.properties").write_text("engine=Python\n")
    keys = ("--api-key", "ann", "--api-key", "bob", "--properties", str(tmp_path / "serving.properties"))
    with serve(*stores(tmp_path), *keys) as server:
        for make in KINDS:
            place = make(server, ANN)
            assert is_found(server, place, ANN), make
            assert not is_found(server, place, BOB), make
