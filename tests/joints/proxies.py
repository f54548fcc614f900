"""Debian's nginx and HAProxy on loopback, each with a configuration in a temporary directory."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from tests.environment import skipped_on
from tests.servers import PATIENCE, free_port, http, wait_for

NGINX = {
    "nginx": "",  # HTTP/1.0 to the server, a connection for each request, and answers buffered
    "nginx, unbuffered": "proxy_buffering off;",
    "nginx, HTTP/1.1": 'proxy_http_version 1.1; proxy_set_header Connection "";',
    "nginx, HTTP/1.1, unbuffered": 'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;',
    "nginx, deaf": "proxy_ignore_headers X-Accel-Buffering;",
}
"""Directives of a location, by the name of what they make of nginx."""

_NGINX = """
{user}
daemon off;
worker_processes 1;
pid {directory}/pid;
error_log {directory}/log info;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    client_max_body_size 0;
    upstream server {{ server 127.0.0.1:{server}; keepalive 4; }}
    {servers}
}}
"""

_NGINX_SERVER = """
    server {{
        listen 127.0.0.1:{port};
        location = /generation {{ return 200 {generation}; }}
        location /public/ {{ proxy_pass http://server/; proxy_set_header Host models.example.com; }}
        location / {{
            proxy_pass http://server;
            proxy_set_header Host 127.0.0.1:{server};
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto https;
            proxy_set_header X-Forwarded-Host models.example.com;
            {directives}
        }}
    }}
"""

_HAPROXY = """
global
    nbthread 1
    stats socket {directory}/socket level admin
defaults
    mode http
    timeout connect 60s
    timeout client 60s
    timeout server 60s
    http-reuse always
    option forwardfor
    option abortonclose
frontend clients
    bind 127.0.0.1:{port}
    http-request return status 200 content-type text/plain string {generation} if {{ path /generation }}
    http-request set-header X-Forwarded-Proto https
    http-request set-header X-Forwarded-Host models.example.com
    http-request set-header Host models.example.com if {{ path_beg /public/ }}
    http-request replace-path /public(/.*) \\1
    default_backend server
backend server
    server one 127.0.0.1:{server} pool-purge-delay 60s
"""


class Proxies:
    """One program, which listens on a port for each of its configurations.

    Attributes:
        urls: by the names of the configurations.
    """

    def __init__(self, program: str, names: tuple[str, ...], directory: Path, server: int) -> None:
        self._program = program
        self._directory = directory
        self._server = server
        self._ports = {name: free_port() for name in names}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._generation = 0
        self.urls = {name: f"http://127.0.0.1:{port}" for name, port in self._ports.items()}

    def start(self) -> None:
        raise NotImplementedError

    def reload(self) -> None:
        """Read the configuration again; return when new connections are those of the new one."""
        raise NotImplementedError

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(PATIENCE)

    def _run(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._directory / "output").open("a") as output:
            process = subprocess.Popen([self._program, *arguments], stdout=output, stderr=output)
        self._processes.append(process)
        return process

    def _write(self, text: str) -> Path:
        path = self._directory / "config"
        path.write_text(text)
        return path

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        def is_new() -> bool:
            assert process.poll() is None, (self._directory / "output").read_text()
            return all(_generation(url) == str(self._generation) for url in self.urls.values())

        wait_for(is_new, PATIENCE, f"{self._program} does not answer")


class Nginx(Proxies):
    def start(self) -> None:
        self._run("-c", str(self._configured()), "-e", str(self._directory / "log"))
        self._wait(self._processes[-1])

    def reload(self) -> None:
        self._generation += 1
        self._configured()
        self._processes[-1].send_signal(signal.SIGHUP)
        self._wait(self._processes[-1])

    def _configured(self) -> Path:
        servers = [
            _NGINX_SERVER.format(port=port, generation=self._generation, server=self._server, directives=NGINX[name])
            for name, port in self._ports.items()
        ]
        user = "user root;" if os.geteuid() == 0 else ""  # pytest's directories are their owner's alone
        return self._write(
            _NGINX.format(user=user, directory=self._directory, server=self._server, servers="".join(servers))
        )


class HaProxy(Proxies):
    def start(self) -> None:
        self._wait(self._run("-db", "-f", str(self._configured())))

    def reload(self) -> None:
        """Start a new process, which has the old one end after its last answer."""
        self._generation += 1
        old = str(self._processes[-1].pid)
        self._wait(self._run("-db", "-f", str(self._configured()), "-sf", old))

    def _configured(self) -> Path:
        (port,) = self._ports.values()
        return self._write(
            _HAPROXY.format(directory=self._directory, port=port, generation=self._generation, server=self._server)
        )


HAPROXY = "HAProxy"
"""The name of its only configuration."""


@contextlib.contextmanager
def in_front_of(server: int, directory: Path) -> Iterator[Callable[[str], Proxies]]:
    """Yield what returns the program that has a configuration of this name; it starts when it is first asked for.

    Args:
        server: a port of loopback.
    """
    with contextlib.ExitStack() as running:

        @functools.cache
        def start(kind: type[Proxies], program: str, package: str, names: tuple[str, ...]) -> Proxies:
            home = directory / program
            home.mkdir()
            made = kind(path_of(program, package), names, home, server)
            running.callback(made.stop)
            made.start()
            return made

        def named(name: str) -> Proxies:
            if name == HAPROXY:
                return start(HaProxy, "haproxy", "haproxy", (HAPROXY,))
            return start(Nginx, "nginx", "nginx-light", tuple(NGINX))

        yield named


def path_of(program: str, package: str) -> str:
    """Return the path of a program of Debian's; skip the test where it is not installed."""
    with skipped_on(FileNotFoundError):
        path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if path is None:
            raise FileNotFoundError(f"there is no {program}: apt-get install {package}")
    return path


def _generation(url: str) -> str:
    try:
        return http.get(url + "/generation").text
    except httpx.TransportError:
        return ""
