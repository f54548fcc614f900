"""The files of examples/hosting, by the programs that read them: systemd, nginx, and the container's entry point."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import yaml

from handler.container.start import prepare
from handler.http.sockets.readers import INVOKE_SOCKET, REALTIME
from tests.app.server import serve
from tests.environment import clean_environment
from tests.examples.programs import EXAMPLES
from tests.joints.proxies import path_of
from tests.servers import PATIENCE, free_port, http, wait_for

HOSTING = EXAMPLES / "hosting"
SOCKETS = (INVOKE_SOCKET, REALTIME)
ASK = {"inputs": "a b", "parameters": {"max_new_tokens": 2}, "stream": True}


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (HOSTING / "lmi.service").read_text()
    unit = tmp_path / "lmi.service"
    unit.write_text(text.replace("/opt/lmi-handler/.venv/bin/lmi", str(Path(sys.executable).with_name("lmi"))))
    verify = [path_of("systemd-analyze", "systemd"), "verify", "--man=no", str(unit)]
    found = subprocess.run(verify, capture_output=True, text=True, timeout=PATIENCE)
    assert (found.returncode, found.stderr) == (0, "")


def test_nginx_serves_the_site(tmp_path: Path) -> None:
    port = free_port()
    with serve("--engine", "echo", "--api-key", "k") as server:
        site = (HOSTING / "nginx.conf").read_text()
        assert site.count("listen 80;") == site.count("127.0.0.1:8080") == 1
        site = site.replace("listen 80;", f"listen 127.0.0.1:{port};").replace(
            "127.0.0.1:8080", f"127.0.0.1:{server.port}"
        )
        paths = "".join(
            f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("proxy", "fastcgi", "uwsgi", "scgi", "client_body")
        )
        user = "user root;" if os.geteuid() == 0 else ""
        own = f"{user} daemon off; worker_processes 1; pid {tmp_path}/pid; error_log stderr; events {{}}"
        (tmp_path / "nginx.conf").write_text(f"{own} http {{ access_log off; {paths} {site} }}")
        command = [path_of("nginx", "nginx-light"), "-c", str(tmp_path / "nginx.conf"), "-e", str(tmp_path / "log")]
        nginx = subprocess.Popen(command)
        try:
            url = f"http://127.0.0.1:{port}"
            headers = {"Host": "llm.example.com", "Authorization": "Bearer k"}

            def answers() -> bool:
                assert nginx.poll() is None
                return _status(url) == 200

            wait_for(answers, PATIENCE, "nginx does not answer")
            found = http.post(url + "/invocations", json=ASK, headers=headers)
            assert (found.status_code, len(found.text.splitlines())) == (200, 2)
            assert f"id={found.headers['x-request-id']} outcome=ok" in server.log
            assert http.get(url + "/metrics", headers=headers).status_code == 403
            offer = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            for path in (*SOCKETS, "/v1/chat/completions", "/v1/responses", "/v1/completions", "/generate_stream"):
                assert _handshake(port, path, offer) == 101, path
            offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
            assert _handshake(port, "/v1/models", offer) == 200
        finally:
            nginx.terminate()
            nginx.wait(PATIENCE)


def _handshake(port: int, path: str, offer: str) -> int:
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nAuthorization: Bearer k\r\n"
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: llm.example.com\r\n{offer}{key}\r\n".encode())
        return int(connection.recv(64)[9:12])


def _status(url: str) -> int:
    try:
        return http.get(url + "/ping").status_code
    except httpx.TransportError:
        return 0


def test_the_container_takes_what_compose_gives_it(tmp_path: Path) -> None:
    service = yaml.safe_load((HOSTING / "compose.yaml").read_text())["services"]["lmi"]
    given = {name: re.sub(r"\$\{(\w+):.*}", r"\1", value) for name, value in service["environment"].items()}
    environ = {**clean_environment(), **given, "SAGEMAKER_MODEL_PATH": str(tmp_path)}
    start = prepare(["serve"], environ, None)  # the image's CMD
    assert start.command[-3:] == ["--port", "8080", given["OPTION_MODEL_ID"]]
    assert start.environ["LMI_CACHE"].startswith(service["volumes"][0].partition(":")[2])
