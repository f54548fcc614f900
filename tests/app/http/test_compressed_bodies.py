"""Compressed request bodies on the routes, by HTTP."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proof.replay.exchange import Request
from proof.replay.sources import open_requests
from tests.app.server import serve
from tests.servers import LiveServer, http, options, raw

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    import backports.zstd as zstd

LIMIT = 2_000_000
CODES: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}
CHAT = {"model": "model", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 2}
ROUTES: dict[str, Any] = {
    "/invocations": {"inputs": "one two", "parameters": {"max_new_tokens": 2}},
    "/predictions/model": {"inputs": "one two", "parameters": {"max_new_tokens": 2}},
    "/generate": {"inputs": "one two", "parameters": {"max_new_tokens": 2}},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "model", "prompt": "one two", "max_tokens": 2},
    "/v1/responses": {"model": "model", "input": "one two", "max_output_tokens": 2, "store": False},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "model", "messages": CHAT["messages"]},
    "/v2/models/model/generate": {"text_input": "one two", "max_tokens": 2},
    "/v1/systemone": {"model": "model", "state": "one", "questions": {"a": {"type": "noul", "instructions": "two?"}}},
    "/tokenize": {"prompt": "one two", "model": "model"},
}


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def server(captures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    stores = (f"option.batches_store={tmp_path_factory.mktemp('b')}", "option.batches_max_file_bytes=1000000")
    limits = (f"max_request_size={LIMIT}", f"option.capture_requests={captures}")
    with serve("--engine", "echo", *options(*stores, *limits)) as server:
        yield server


def post(server: LiveServer, path: str, body: bytes, encoding: str, kind: str = "application/json") -> httpx.Response:
    headers = {"content-encoding": encoding, "content-type": kind}
    return http.post(server.url + path, content=body, headers=headers)


def size_of(answer: httpx.Response) -> tuple[int, int, list[str]]:
    value = answer.json()
    return answer.status_code, len(json.dumps(value)), sorted(value) if isinstance(value, dict) else []


@pytest.mark.parametrize("code", CODES)
def test_every_route_reads_a_compressed_body_like_a_plain_one(server: LiveServer, code: str) -> None:
    for path, body in ROUTES.items():
        text = json.dumps(body).encode()
        plain = post(server, path, text, "identity")
        assert plain.status_code == 200, f"{path}: {plain.text}"
        for header in (code, code.upper(), f"identity, {code}"):
            packed = post(server, path, CODES[code](text), header)
            assert size_of(packed) == size_of(plain), f"{path}: {packed.text}"


def test_a_large_body_is_read_however_it_is_sent(server: LiveServer) -> None:
    """It is decompressed in two steps, and then decoded apart."""
    body = json.dumps({**CHAT, "metadata": {"note": "x" * 1_500_000}}).encode()
    plain = post(server, "/v1/chat/completions", body, "identity")
    for code, compress in CODES.items():
        found = post(server, "/v1/chat/completions", compress(body), code)
        assert (found.status_code, len(found.text)) == (plain.status_code, len(plain.text)), found.text
    text = json.dumps(CHAT).encode()
    packed = zstd.compress(text)
    pieces = (packed[at : at + 1] for at in range(len(packed)))
    headers = {"content-encoding": "zstd", "content-type": "application/json"}
    assert http.post(f"{server.url}/v1/chat/completions", content=pieces, headers=headers).status_code == 200


BODY = json.dumps(ROUTES["/generate"]).encode()
FAULTS: dict[str, tuple[str, bytes, int, str]] = {
    "plain": ("zstd", BODY, 400, "is not compressed as its Content-Encoding says"),
    "cut off": ("gzip", gzip.compress(BODY)[:-9], 400, "is cut off before its end"),
    "empty": ("zstd", b"", 400, "is cut off before its end"),
    "more": ("zstd", zstd.compress(BODY) + b"more", 400, "has further data after its end"),
    "a gzip bomb": ("gzip", gzip.compress(bytes(LIMIT + 1)), 413, f"more than {LIMIT} bytes (max_request_size)"),
    "a zstd bomb": ("zstd", zstd.compress(bytes(50 * LIMIT)), 413, f"more than {LIMIT} bytes (max_request_size)"),
    "not JSON": ("gzip", gzip.compress(b"{"), 400, "not valid JSON"),
    "two": (
        "gzip, zstd",
        BODY,
        415,
        "content-encoding 'gzip, zstd' is not supported; accepted: gzip, deflate, zstd, one at a time",
    ),
    "raw deflate": ("deflate", zlib.compress(BODY)[2:-4], 400, "it must begin with a gzip or zlib header"),
    "br": ("br", BODY, 415, "content-encoding 'br' is not supported"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_its_status_in_the_form_of_the_route(server: LiveServer, fault: str) -> None:
    encoding, body, status, words = FAULTS[fault]
    for path in ("/generate", "/v1/chat/completions", "/v1/messages"):
        found = post(server, path, body, encoding)
        assert (found.status_code, words in found.text) == (status, True), f"{path}: {found.text}"
    found = post(server, "/invocations", body, encoding)
    assert found.status_code == {400: 424}.get(status, status), found.text
    assert post(server, "/generate", zstd.compress(BODY), "zstd").status_code == 200


def test_several_lines_of_encodings_are_one_list(server: LiveServer) -> None:
    """A proxy may add a line of its own. The first line alone was read."""
    packed = gzip.compress(BODY)
    for lines, status in ((("identity", "gzip"), 200), (("gzip", "identity"), 200), (("gzip", "gzip"), 415)):
        headers = [("content-type", "application/json"), *(("content-encoding", line) for line in lines)]
        found = http.post(f"{server.url}/generate", content=packed, headers=headers)
        assert found.status_code == status, (lines, found.text)


def test_routes_without_a_body_ignore_the_encoding(server: LiveServer) -> None:
    for path in ("/v1/models", "/ping", "/metrics"):
        assert http.get(server.url + path, headers={"content-encoding": "zstd"}).status_code == 200


def test_a_client_that_asks_first_may_send_a_compressed_body(server: LiveServer) -> None:
    packed = zstd.compress(BODY)
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += (
        f"Content-Length: {len(packed)}\r\nContent-Encoding: zstd\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    assert b" 200 " in raw(server, head.encode() + packed)


LINES = b"".join(
    json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": CHAT}).encode()
    + b"\n"
    for number in range(3)
)


FORM = "multipart/form-data; boundary=cut"


def form(file: bytes) -> bytes:
    files, data = {"file": ("a.jsonl", file)}, {"purpose": "batch"}
    return httpx.Request("POST", "http://a", files=files, data=data, headers={"content-type": FORM}).read()


@pytest.mark.parametrize("code", CODES)
def test_a_file_for_batches_may_be_compressed(server: LiveServer, code: str) -> None:
    sent = post(server, "/v1/files", CODES[code](form(LINES)), code, FORM)
    assert (sent.status_code, sent.json()["bytes"]) == (200, len(LINES)), sent.text
    id = sent.json()["id"]
    assert http.get(f"{server.url}/v1/files/{id}/content").content == LINES
    batch = {"input_file_id": id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    created = post(server, "/v1/batches", CODES[code](json.dumps(batch).encode()), code)
    assert (created.status_code, created.json()["input_file_id"]) == (200, id)


def uploaded(server: LiveServer) -> list[str]:
    """Return the IDs of the files that clients have sent; those of the other tests' batches appear meanwhile."""
    return [file["id"] for file in http.get(f"{server.url}/v1/files").json()["data"] if file["purpose"] == "batch"]


UPLOADS: dict[str, tuple[Callable[[bytes], bytes], int, str]] = {
    "cut off": (lambda body: zstd.compress(body)[:-1], 400, "is cut off before its end"),
    "plain": (bytes, 400, "is not compressed as its Content-Encoding says"),
    "more": (lambda body: zstd.compress(body) + b"x", 400, "has further data after its end"),
    "a bomb after the form": (lambda body: zstd.compress(body + bytes(1 << 30)), 400, "outside its file"),
    "a bomb as the file": (lambda _: zstd.compress(form(bytes(1 << 26))), 413, "'file' has more than 1000000 bytes"),
}


@pytest.mark.parametrize("fault", UPLOADS)
def test_a_compressed_file_with_a_fault_leaves_nothing_behind(server: LiveServer, fault: str) -> None:
    spoil, status, words = UPLOADS[fault]
    before = uploaded(server)
    found = post(server, "/v1/files", spoil(form(LINES)), "zstd", FORM)
    assert (found.status_code, words in found.text) == (status, True), found.text
    assert uploaded(server) == before


def test_a_captured_body_is_decompressed(server: LiveServer, captures: Path) -> None:
    text = json.dumps({**CHAT, "user": "captured"}).encode()
    assert post(server, "/v1/chat/completions", zstd.compress(text), "zstd").status_code == 200
    http.get(server.url + "/metrics")
    found = [one for one in open_requests(str(captures)) if isinstance(one, Request) and one.body == text]
    assert [one.headers.get("content-encoding") for one in found] == [None]
