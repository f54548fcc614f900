"""API keys: what the command line says of them, who is let in, and that none is written anywhere."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from starlette.routing import Route

from handler.config.environment import warning_without_keys
from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.http.inference import Endpoint
from handler.http.routes import ASSETS
from handler.http.security import Access, ApiKeys, Keys, read_access, warning_of
from handler.protocols.registry import INVOCATIONS
from tests.app.server import serve
from tests.environment import clean_environment
from tests.one_test import in_one_test
from tests.servers import PATIENCE, LiveServer, http, wait_for

# -- API keys: who is let in, what the others are told, and that no key is written anywhere ----------------------------


ASK = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}
NAMED = "X-Amzn-SageMaker-Custom-Attributes"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    """Keys from both sources."""
    with serve("--engine", "echo", "--api-key", "fromflag", env={"LMI_API_KEY": "one, two"}) as server:
        yield server


# -- the comparison ----------------------------------------------------------------------------------------------


@in_one_test(
    ("header", "let_in"),
    [
        ("Bearer one", True),
        ("bearer two", True),
        ("  Bearer   one ", True),
        ("", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("one", False),
        ("Basic one", False),
        ("Bearer onee", False),
        ("Bearer on", False),
        ("Bearer ONE", False),
        ("Bearer one two", False),
        ("Bearer one,two", False),
        ("Bearer \u00e9", False),
        ("Bearer \udc80", False),
    ],
)
def test_admission(header: str, let_in: bool) -> None:
    assert bool(Keys(["one", "two"]).owner(header)) is let_in


@in_one_test(
    ("authorization", "api_key", "let_in"),
    [
        ("", "two", True),
        ("Bearer wrong", " one ", True),
        ("Bearer one", "wrong", True),
        ("", "wrong", False),
        ("Basic one", "", False),
        ("", "Bearer one", False),
    ],
)
def test_admission_by_anthropics_header(authorization: str, api_key: str, let_in: bool) -> None:
    assert bool(Keys(["one", "two"]).owner(authorization, api_key)) is let_in


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of one length, all of them, also after one that fits."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return real(given, known)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert Keys(["one", "two", "three"]).owner("Bearer one")
    given = hashlib.sha256(b"one").digest()
    assert compared == [(given, hashlib.sha256(key).digest()) for key in (b"one", b"two", b"three")]


# -- routes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["one", "two", "fromflag"])
def test_a_key_opens_the_server(locked: LiveServer, key: str) -> None:
    assert locked.post(ASK, headers=bearer(key)).json() == {"generated_text": " a b a"}
    for headers in (bearer(key), {"x-api-key": key}):
        assert http.get(locked.url + "/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/ping", "/", "/docs", *ASSETS])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_is_open(locked: LiveServer, method: str, path: str) -> None:
    assert http.request(method, locked.url + path).status_code == 200
    assert http.request(method, locked.url + path, headers=bearer("wrong")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/invocations"),
        ("POST", "/predictions/model"),
        ("POST", "/models/model/invoke"),
        ("GET", "/models"),
        ("GET", "/models/other"),
        ("GET", "/metrics"),
        ("GET", "/adapters"),
        ("POST", "/models/model/adapters"),
        ("GET", "/api-doc/openapi.json"),
        ("GET", "/invocations"),
        ("DELETE", "/ping"),
        ("POST", "/docs"),
        ("OPTIONS", "/invocations"),
    ],
)
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"authorization": "one"}, {"x-api-key": "wrong"}])
def test_everything_else_is_locked(locked: LiveServer, method: str, path: str, headers: dict[str, str]) -> None:
    """Authenticate before reading the body and checking the method, as TGI 3.3.7 does (GET /generate: 401)."""
    found = http.request(method, locked.url + path, headers=headers)
    assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")
    assert found.json() == {
        "code": 401,
        "type": "UnauthorizedException",
        "message": "this server needs a key: send the header Authorization: Bearer KEY, or x-api-key: KEY",
        "error": "this server needs a key: send the header Authorization: Bearer KEY, or x-api-key: KEY",
    }
    assert found.headers["x-request-id"]


def test_a_refused_request_has_a_line_in_the_log(locked: LiveServer) -> None:
    for method, path in (("GET", "/metrics"), ("GET", "/invocations"), ("POST", "/invocations")):
        id = http.request(method, locked.url + path, headers=bearer("wrong")).headers["x-request-id"]
        (line,) = (line for line in locked.log.splitlines() if f"id={id}" in line)
        assert "status=401" in line or "outcome=refused" in line
        assert "wrong" not in line


def test_every_route_that_there_is_needs_a_key(locked: LiveServer) -> None:
    """Also one that is added later: the document lists them all."""
    api = http.get(locked.url + "/api-doc/openapi.json", headers=bearer("one")).json()
    tried = 0
    for path, item in api["paths"].items():
        for method in item.keys() - {"parameters"}:
            is_open = item[method].get("security") == []
            where = path.replace("{", "").replace("}", "")
            found = http.request(method, locked.url + where)
            assert (found.status_code == 401) is not is_open, (method, path)
            assert is_open or found.headers["www-authenticate"] == "Bearer"
            tried += 1
    assert tried > 20


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("it was let in")


def test_a_route_of_any_kind_is_locked() -> None:
    """Not only those that are made of our Endpoint; and one takes over the form of those under the same name."""
    other = Endpoint({"POST": _hello}, errors=INVOCATIONS["tgi_compat"].errors)
    routes = [Route("/v9/plain", _Plain()), Route("/v9/generate", other), Route("/alone", _Plain())]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    gate = ApiKeys(["k"], [])
    for path, form in (("/v9/plain", b'"error_type"'), ("/alone", b'"UnauthorizedException"')):
        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "headers_by_name": {}, "request_id": "1"}
        assert not gate.admits(scope)
        assert asyncio.run(gate.refuse(scope, send, routes))
        assert (sent[-2]["status"], form in sent[-1]["body"]) == (401, True)
    scope["path"] = "/nowhere"
    assert not asyncio.run(gate.refuse(scope, send, routes))


class _Plain:
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await _hello(scope, receive, send)


def test_a_path_that_is_not_there_is_404_for_anyone(locked: LiveServer) -> None:
    assert http.get(locked.url + "/nowhere").status_code == 404


def test_the_body_is_not_waited_for(locked: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", locked.port), timeout=5) as connection:
        connection.sendall(b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 Unauthorized\r\n")


def test_a_named_route_is_no_way_around(locked: LiveServer) -> None:
    for route in ("/ping", "/nowhere", "/predictions/model", "/"):
        assert locked.post(ASK, headers={NAMED: f"route={route}"}).status_code == 401
    assert locked.post(ASK, headers={NAMED: "route=/nowhere", **bearer("one")}).status_code == 424


def test_the_dialect_says_it_in_its_own_form() -> None:
    with serve("--engine", "echo", "-o", "option.tgi_compat=true", env={"LMI_API_KEY": "k"}) as server:
        assert server.post(ASK).json() == {
            "error": "this server needs a key: send the header Authorization: Bearer KEY, or x-api-key: KEY",
            "error_type": "authentication",
            "code": 401,
        }
        assert server.post({**ASK, "stream": True}, headers=bearer("k")).status_code == 200


def test_openai_is_told_as_it_knows(locked: LiveServer) -> None:
    found = locked.post({"messages": []}, "/v1/chat/completions")
    assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")


def test_refusals_are_counted(locked: LiveServer) -> None:
    def refused() -> Any:
        text = http.get(locked.url + "/metrics", headers=bearer("one")).text
        return next(line for line in text.splitlines() if line.startswith('lmi_requests_total{outcome="refused"}'))

    before = float(refused().split()[1])
    locked.post(ASK, headers={"x-request-id": "locked-out"})
    assert float(refused().split()[1]) == before + 1
    wait_for(lambda: "id=locked-out outcome=refused" in locked.log, 5, "no log line")


# -- secrecy -----------------------------------------------------------------------------------------------------


def test_keys_are_written_nowhere(tmp_path: Path) -> None:
    """Not in the log, nor in an answer, nor in what a model.py gets."""
    (tmp_path / "model.py").write_text(
        "import json, os\n"
        "from handler.formatters import input_formatter\n"
        "@input_formatter\n"
        "def read(item):\n"
        "    seen = json.dumps([dict(item.properties), dict(os.environ)])\n"
        "    return {'inputs': seen if 'secret' in seen else 'nothing'}\n"
    )
    (tmp_path / "serving.properties").write_text("option.llm_engine=echo\n")
    env = {"LMI_API_KEY": "secret-one,secret-two"}
    with serve("--properties", str(tmp_path / "serving.properties"), env=env) as server:
        found = server.post(ASK, headers=bearer("secret-two"))
        assert found.json()["generated_text"].startswith(" nothing")
        refused = server.post(ASK, headers=bearer("secret-three"))
        assert "secret" not in found.text + refused.text + json.dumps(
            [*found.headers.items(), *refused.headers.items()]
        )
    assert "secret" not in server.log


@pytest.mark.parametrize("text", [
    "from djl_python import Output\n"
    "def handle(inputs):\n"
    "    return None if inputs.is_empty() else Output().add_as_json(sorted(inputs.get_properties().items()))\n",
    "async def custom_sagemaker_invocation_handler(request):\n    return sorted(request.headers.items())\n",
    "import model_hosting_container_standards.sagemaker as standards\n"
    "@standards.custom_invocation_handler\n"
    "def decorated(request):\n    return sorted(request.headers.items())\n",
], ids=["handle", "name", "decorator"])  # fmt: skip
def test_the_users_code_gets_other_headers_but_no_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.py").write_text(text)
    (tmp_path / "serving.properties").write_text("option.llm_engine=echo\n")
    properties = str(tmp_path / "serving.properties")
    with serve("--engine", "echo", "--properties", properties, env={"LMI_API_KEY": "secret-one"}) as server:
        for header in ({"Authorization": "Bearer secret-one"}, {"X-API-Key": "secret-one"}):
            with httpx.Client(headers={**header, "X-Other": "kept"}, timeout=PATIENCE) as client:
                for number in range(4):  # the head comes again
                    found = client.post(server.url + "/invocations", json={**ASK, "inputs": "a" * number})
                    assert (found.status_code, "kept" in found.text, "secret" in found.text) == (200, True, False)


def test_each_head_of_a_connection_needs_a_key(locked: LiveServer) -> None:
    with httpx.Client(timeout=PATIENCE, limits=httpx.Limits(max_connections=1)) as client:
        for keys in (["one"] * 3, ["two"] * 3, ["oni"] * 3, ["one", "oni"] * 2, ["one", "", "one"]):
            for key in keys:
                headers = bearer(key) if key else {}
                status = client.post(locked.url + "/invocations", json=ASK, headers=headers).status_code
                assert status == (200 if key in ("one", "two") else 401)


def test_a_server_without_keys_is_open(echo_server: LiveServer) -> None:
    assert echo_server.post(ASK, headers=bearer("anything")).status_code == 200
    assert "security" not in http.get(echo_server.url + "/api-doc/openapi.json").json()


# -- access ------------------------------------------------------------------------------------------------------------
# What the command line and the environment say of keys, origins and certificates, and what is wrong with them.


def read(*keys: str, environ: dict[str, str] | None = None, **more: Any) -> Access:
    return read_access(keys, environ={} if environ is None else environ, **more)


def test_keys_come_from_both_sources_and_leave_the_environment() -> None:
    environ = {"LMI_API_KEY": "b, c,a", "OTHER": "x"}
    assert read("a", environ=environ).keys == ("a", "b", "c")
    assert environ == {"OTHER": "x"}
    assert "hidden-key" not in repr(read("hidden-key"))


@in_one_test("name", ["API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY"])
def test_keys_of_other_servers_are_required_and_leave_the_environment(name: str) -> None:
    environ = {name: "their-key", "OTHER": "x"}
    assert read("flag", environ=environ).keys == ("flag", "their-key")
    assert environ == {"OTHER": "x"}
    assert read(environ={name: ""}).keys == ()  # as in those servers
    with pytest.raises(ConfigError, match=f"environment variable {name}: must be keys") as found:
        read(environ={name: "sec ret"})
    assert "sec ret" not in str(found.value)


@in_one_test("name", ["API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY"])
def test_on_sagemaker_a_key_of_another_program_is_left_to_model_py(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v2/credentials/x")
        patch.delenv("ECS_CONTAINER_METADATA_URI_V4", raising=False)
        environ = {name: "the key, of a weather service", "LMI_API_KEY": "own"}
        assert read(environ=environ).keys == ("own",)
        assert environ == {name: "the key, of a weather service"}
        for java in (False, True):
            config = read_config(environ=environ, java=java).checked()
            assert any(name in line and "SageMaker" in line for line in config.warnings)


@pytest.mark.parametrize("name", ["API_KEY", "VLLM_API_KEY"])
def test_a_server_moved_with_its_key_variable_is_not_open(name: str) -> None:
    tgi = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}
    chat = {"model": "lmi", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with serve("--engine", "echo", env={name: "secret-one"}) as server:
        for path, body in {"/generate": tgi, "/invocations": tgi, "/v1/chat/completions": chat}.items():
            assert server.post(body, path).status_code == 401
            assert server.post(body, path, headers=bearer("secret-one")).status_code == 200
    assert "secret" not in server.log


def test_a_server_that_others_reach_without_a_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", raising=False)
    for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        assert warning_of(Access(), host) == ""
    for host in ("0.0.0.0", "::", "10.1.2.3", "lmi.example.com"):
        assert warning_of(Access(keys=("key",)), host) == ""
        assert f"the server listens on {host}: anyone" in warning_of(Access(), host)
        assert warning_of(Access(), host).endswith("unless option.owner_header tells those of a gateway apart")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v2/credentials/x")
    assert warning_of(Access(), "0.0.0.0") == ""  # SageMaker
    monkeypatch.setenv("ECS_CONTAINER_METADATA_URI_V4", "http://169.254.170.2/v4/x")
    assert warning_of(Access(), "0.0.0.0") != ""


def test_the_warning_about_djl_serving_names_no_key_that_it_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", raising=False)
    message = warning_without_keys("0.0.0.0", checks_keys=False)
    assert message.startswith("DJL Serving checks no API keys")
    assert "use LMI_FRONT=embedded with LMI_API_KEY=KEY" in message


@in_one_test("key", ["", "with space", "a,b", "\u00e9", "x" * 1025, "line\n"])
def test_a_key_that_no_header_could_bear(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key: a key must be 1 to 1024 visible ASCII") as found:
        read(key)
    assert not key or key not in str(found.value)


@pytest.mark.parametrize("keys", ["", ",", "secret1,,secret2", "secret1,sec ret2"])
def test_a_variable_that_would_leave_the_server_open(keys: str) -> None:
    with pytest.raises(ConfigError, match="environment variable LMI_API_KEY: must be keys") as found:
        read(environ={"LMI_API_KEY": keys})
    assert "sec" not in str(found.value).replace("separated", "")


@in_one_test(
    "origin", ["*", "https://example.com", "http://localhost:3000", "https://[::1]:8443", "HTTPS://Example.COM"]
)
def test_origins(origin: str) -> None:
    assert read(origins=[origin]).origins == {origin.lower()}


@in_one_test("origin", ["", "example.com", "https://example.com/", "https://a.b/c", "https://u@a.b", "null"])
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allow-origin"):
        read(origins=[origin])


def test_tgis_variable_sets_an_origin_too() -> None:
    environ = {"CORS_ALLOW_ORIGIN": "https://a.example"}
    assert read(origins=["https://b.example"], environ=environ).origins == {"https://a.example", "https://b.example"}
    with pytest.raises(ConfigError, match=r"environment variable CORS_ALLOW_ORIGIN=a\.b/c: must be"):
        read(environ={"CORS_ALLOW_ORIGIN": "a.b/c"})


# -- certificates ------------------------------------------------------------------------------------------------


class Files:
    """A certificate authority, one below it, and what the latter has signed for loopback: leaf, chain and key."""

    def __init__(self, directory: Path) -> None:
        root = trustme.CA()
        middle = root.create_child_ca()
        leaf, other = middle.issue_cert("127.0.0.1"), middle.issue_cert("127.0.0.1")
        self.chain, self.key, self.both = directory / "chain.pem", directory / "key.pem", directory / "both.pem"
        self.other_key, self.root = directory / "other.pem", directory / "root.pem"
        self.chain.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(str(self.key))
        leaf.private_key_and_cert_chain_pem.write_to_path(str(self.both))
        other.private_key_pem.write_to_path(str(self.other_key))
        root.cert_pem.write_to_path(str(self.root))
        self.alone = directory / "alone.pem"
        leaf.cert_chain_pems[0].write_to_path(str(self.alone))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


def test_https_with_a_chain(files: Files) -> None:
    with serve("--engine", "echo", "--ssl-certfile", str(files.chain), "--ssl-keyfile", str(files.key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(files.root))
        found = httpx.post(f"{server.url}/invocations", json=ASK, verify=trust)
        assert found.json() == {"generated_text": " a b a"}
        with httpx.stream("POST", f"{server.url}/invocations", json={**ASK, "stream": True}, verify=trust) as stream:
            assert len([*stream.iter_lines()]) == 3
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.post(f"{server.url}/invocations", json=ASK)
        with pytest.raises(httpx.RemoteProtocolError):
            http.get(server.url.replace("https", "http") + "/ping")
        assert "a bug" not in server.log
        assert "Traceback" not in server.log


def test_one_file_with_both(files: Files) -> None:
    with serve("--engine", "echo", "--ssl-certfile", str(files.both)) as server:
        trust = ssl.create_default_context(cafile=str(files.root))
        assert httpx.get(f"{server.url}/ping", verify=trust).status_code == 200


def test_a_client_that_does_not_have_the_one_between_refuses(files: Files) -> None:
    """The chain has to be in the file: what a test with one self-signed certificate would not show."""
    with serve("--engine", "echo", "--ssl-certfile", str(files.alone), "--ssl-keyfile", str(files.key)) as server:
        trust = ssl.create_default_context(cafile=str(files.root))
        with pytest.raises(httpx.ConnectError, match="unable to get local issuer"):
            httpx.get(f"{server.url}/ping", verify=trust)


def test_what_is_wrong_with_files(files: Files, tmp_path: Path) -> None:
    nothing, garbage = tmp_path / "nothing.pem", tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_text(_encrypted(files.key))
    cases: list[tuple[Path | None, Path | None, str]] = [
        (None, files.key, "--ssl-keyfile: requires --ssl-certfile"),
        (nothing, files.key, f"--ssl-certfile {nothing}: No such file"),
        (files.chain, nothing, f"--ssl-keyfile {nothing}: No such file"),
        (tmp_path, files.key, f"--ssl-certfile {tmp_path}: Is a directory"),
        (garbage, files.key, f"--ssl-certfile {garbage}: contains no PEM certificate"),
        (files.key, files.key, f"--ssl-certfile {files.key}: contains no PEM certificate"),
        (files.chain, garbage, f"--ssl-keyfile {garbage}: contains no PEM private key"),
        (files.chain, None, f"--ssl-certfile {files.chain}: contains no PEM private key"),
        (files.chain, files.other_key, f"--ssl-keyfile {files.other_key}: does not match the first certificate"),
        (files.chain, encrypted, f"--ssl-keyfile {encrypted}: the key is encrypted"),
    ]
    for certfile, keyfile, message in cases:
        with pytest.raises(ConfigError) as found:
            read(certfile=certfile, keyfile=keyfile)
        assert str(found.value).startswith(message)


def _encrypted(key: Path) -> str:
    from cryptography.hazmat.primitives import serialization

    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    scheme = serialization.BestAvailableEncryption(b"password")
    kind = serialization.PrivateFormat.PKCS8
    return loaded.private_bytes(serialization.Encoding.PEM, kind, scheme).decode()


def test_a_wrong_certificate_stops_the_start_before_anything_is_loaded(files: Files) -> None:
    command = [sys.executable, "-m", "handler", "serve", "--engine", "echo", "--port", "0"]
    done = subprocess.run(
        [*command, "--ssl-certfile", str(files.chain), "--ssl-keyfile", str(files.other_key)],
        env={**os.environ, **clean_environment()}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"lmi: --ssl-keyfile {files.other_key}: does not match")
    assert done.stderr.count("\n") == 1
