"""Image files, sound and broken, and a server of them on loopback that also misbehaves."""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import PIL.Image

from tests.app.media.clips import clip_file
from tests.doubles.downloads import serving

HOST = "127.0.0.2"
"""Of the server: tests call this address public, and no other of loopback."""

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


def image_file(kind: str = "PNG", size: tuple[int, int] = (8, 6), mode: str = "RGB", **options: Any) -> bytes:
    """One with a different colour in each row."""
    image = PIL.Image.new("RGB", size)
    for row in range(size[1]):
        image.paste((row * 20 % 256, 90, 200), (0, row, size[0], row + 1))
    file = io.BytesIO()
    image.convert(mode).save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG whose header says so, with these chunks after it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [_chunk(name, data) for name, data in ((b"IHDR", head), *chunks, (b"IEND", b""))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


class FileServer(ThreadingHTTPServer):
    """Attributes:
    asked: the paths that were asked for.
    left: set when a client of /slow has closed its connection.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self.asked: list[str] = []
        self.left = threading.Event()

    def url(self, path: str = "/ok.png") -> str:
        return f"http://{HOST}:{self.server_port}{path}"

    @property
    def domain(self) -> str:
        return f"{HOST}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        with contextlib.suppress(OSError):
            getattr(self, "_" + self.path.strip("/").partition(".")[0], self._missing)()

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _ok(self) -> None:
        self._answer(200, image_file())

    def _once(self) -> None:
        self._answer(200 if self.server.asked.count(self.path) == 1 else 410, image_file())

    def _clip(self) -> None:
        self._answer(200, clip_file(kind="FLAC"), Content_Type="audio/flac")

    def _moved(self) -> None:
        self._answer(302, Location="/ok.png")

    def _away(self) -> None:
        self._answer(302, Location="http://example.com/a.png")

    def _inside(self) -> None:
        self._answer(307, Location="http://169.254.169.254/latest/meta-data/")

    def _port(self) -> None:
        self._answer(301, Location=f"http://{HOST}:22/")

    def _file(self) -> None:
        self._answer(302, Location="file:///etc/passwd")

    def _circle(self) -> None:
        self._answer(302, Location="/circle")

    def _slow(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(image_file()[:20])
        while self.connection.recv(1 << 10):
            pass
        self.server.left.set()

    def _long(self) -> None:
        self._answer(200, Content_Length=str(10**12))

    def _endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(bytes(1 << 16))

    def _zip(self) -> None:
        self._answer(200, zlib.compress(bytes(1 << 20)), Content_Encoding="deflate")

    def _short(self) -> None:
        self._answer(200, image_file()[:40], Content_Length="400")

    def _mute(self) -> None:
        self.connection.close()

    def _svg(self) -> None:
        self._answer(200, SVG, Content_Type="image/png")

    def _missing(self) -> None:
        self._answer(404)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def file_server() -> Iterator[FileServer]:
    server = FileServer()
    with serving(server):
        yield server
