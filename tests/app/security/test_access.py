"""What the command line and the environment say of keys, origins and certificates, and what is wrong with them."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from handler.core.errors import ConfigError
from handler.http.security import Access, read_access
from tests.app.server import serve
from tests.environment import clean_environment
from tests.one_test import in_one_test
from tests.servers import http

ASK = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}


def read(*keys: str, environ: dict[str, str] | None = None, **more: Any) -> Access:
    return read_access(keys, environ={} if environ is None else environ, **more)


def test_keys_come_from_both_sources_and_leave_the_environment() -> None:
    environ = {"LMI_API_KEY": "b, c,a", "OTHER": "x"}
    assert read("a", environ=environ).keys == ("a", "b", "c")
    assert environ == {"OTHER": "x"}
    assert "hidden-key" not in repr(read("hidden-key"))


@in_one_test("key", ["", "with space", "a,b", "\u00e9", "x" * 1025, "line\n"])
def test_a_key_that_no_header_could_bear(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key: a key is 1 to 1024 visible ASCII") as found:
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
        (None, files.key, "--ssl-keyfile: needs --ssl-certfile"),
        (nothing, files.key, f"--ssl-certfile {nothing}: No such file"),
        (files.chain, nothing, f"--ssl-keyfile {nothing}: No such file"),
        (tmp_path, files.key, f"--ssl-certfile {tmp_path}: Is a directory"),
        (garbage, files.key, f"--ssl-certfile {garbage}: holds no certificate"),
        (files.key, files.key, f"--ssl-certfile {files.key}: holds no certificate"),
        (files.chain, garbage, f"--ssl-keyfile {garbage}: holds no private key"),
        (files.chain, None, f"--ssl-certfile {files.chain}: holds no private key"),
        (files.chain, files.other_key, f"--ssl-keyfile {files.other_key}: does not belong to the first certificate"),
        (files.chain, encrypted, f"--ssl-keyfile {encrypted}: its key is encrypted"),
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
    assert done.stderr.startswith(f"lmi: --ssl-keyfile {files.other_key}: does not belong")
    assert done.stderr.count("\n") == 1
