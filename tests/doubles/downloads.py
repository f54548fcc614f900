"""A hub and a bucket of S3 on loopback, for models of the test's own."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

# -- an HTTP server of a test's own, on a thread -----------------------------------------------------------------------


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    """Its URL, while it serves."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield "http://{}:{}".format(*server.server_address[:2])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# -- a hub on loopback: what huggingface_hub asks of Hugging Face's, for models of the test's own ----------------------
# Paths and headers are those of huggingface_hub's `hf_api.py` and `file_download.py`: information about a revision,
# the tree of a commit, and files with their commit and ETag.


COMMIT = "a" * 40


@dataclass
class Hub:
    """A running hub. `asked` has the paths of all requests, and grows."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def environment(self, home: Path) -> dict[str, str]:
        """The variables with which a process asks this hub, and keeps what it fetches below `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


def files_of(directory: Path) -> dict[str, bytes]:
    """The files of a model, by their names below its directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@contextmanager
def serve_hub(
    models: Mapping[str, Mapping[str, bytes]],
    *,
    rate: int = 1 << 40,
    failures: Mapping[str, tuple[int, bytes]] = MappingProxyType({}),
    headers: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Iterator[Hub]:
    """Serve models, each with its files by name.

    Args:
        rate: bytes a second of each file.
        failures: statuses and bodies of paths, by a part of them.
        headers: headers instead of the hub's, of paths, by a part of them.
    """
    hub = Hub(headers=headers)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub, models, rate, failures))
    with serving(server) as hub.url:
        yield hub


class _Handler(http.server.BaseHTTPRequestHandler):
    def __init__(
        self,
        hub: Hub,
        models: Mapping[str, Mapping[str, bytes]],
        rate: int,
        failures: Mapping[str, tuple[int, bytes]],
        *more: Any,
    ) -> None:
        self.hub, self.models, self.rate, self.failures = hub, models, rate, failures
        super().__init__(*more)

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.hub.asked.append(self.path)
        for part, (status, body) in self.failures.items():
            if part in self.path:
                return self.send(status, body, {"X-Repo-Commit": COMMIT, "ETag": '"failure"'})
        for model, files in self.models.items():
            if self.path.startswith(f"/api/models/{model}/"):
                return self.describe(model, files, self.path.removeprefix(f"/api/models/{model}/"))
            start = f"/{model}/resolve/{COMMIT}/"
            if self.path.startswith(start) and self.path.removeprefix(start) in files:
                name = self.path.removeprefix(start)
                return self.send(200, files[name], {"X-Repo-Commit": COMMIT, "ETag": etag(name.encode())})
        return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def describe(self, model: str, files: Mapping[str, bytes], what: str) -> None:
        tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in files.items()]
        about = {"id": model, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        if what.startswith("tree/"):
            self.send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        elif what.split("?")[0] == "revision/main":
            self.send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})
        else:
            self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        instead = next((found for part, found in self.hub.headers.items() if part in self.path), {})
        for key, value in {**headers, **instead, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(OSError):  # the client was ended meanwhile
                self.write_slowly(body)

    def write_slowly(self, body: bytes) -> None:
        size = max(1, self.rate // 20)
        for start in range(0, len(body), size):
            self.wfile.write(body[start : start + size])
            if start + size < len(body):
                time.sleep(0.05)

    def log_message(self, format: str, *args: object) -> None:
        pass


# -- bucket ------------------------------------------------------------------------------------------------------------
# A bucket of S3 on loopback that is slow or refuses, which moto's is not: ListObjectsV2 and GetObject, by path.
#
# Shapes are those of S3's API reference: a list in XML, ranges, If-Match, errors with a code in XML.


_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_CHANGED = "2026-03-01T10:00:00.000Z"


@dataclass
class Bucket:
    """A running S3. `asked` has the keys and ranges of all reads, and grows; a list is `?list`.

    Attributes:
        objects: their content by key; a test may change them.
        failures: status and code of S3's error, by a part of the path and query.
        headers: of the answers that fail.
        more: what is sent after an object's content, though the list says nothing of it.
        cut: the number of answers whose connection ends amid their content; it falls.
        size: of all objects in the list; "": their own.
        endless: each list has no object, and says that there are more.
        strays: each list has all objects, whatever their prefix.
    """

    objects: dict[str, bytes]
    rate: int
    failures: Mapping[str, tuple[int, str]]
    headers: Mapping[str, str]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    more: bytes = b""
    cut: int = 0
    size: str = ""
    endless: bool = False
    strays: bool = False

    def environment(self) -> dict[str, str]:
        """The variables with which a process reads this S3."""
        return {"AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
                "AWS_EC2_METADATA_DISABLED": "true"}  # fmt: skip


@contextmanager
def serve_bucket(
    objects: Mapping[str, bytes],
    *,
    rate: int = 1 << 40,
    failures: Mapping[str, tuple[int, str]] = MappingProxyType({}),
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Bucket]:
    """Serve the objects of a bucket of any name.

    Args:
        rate: bytes a second of each answer.
    """
    bucket = Bucket(dict(objects), rate, failures, headers)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_BucketHandler, bucket))
    with serving(server) as bucket.url:
        yield bucket


class _BucketHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, bucket: Bucket, *more: Any) -> None:
        self.bucket = bucket
        super().__init__(*more)

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        key = unquote(address.path).partition("/")[2].partition("/")[2]
        for part, (status, code) in self.bucket.failures.items():
            if part in self.path:
                body = f"{_XML}<Error><Code>{code}</Code><Message>no</Message></Error>"
                return self.send(status, body.encode(), {"Content-Type": "application/xml", **self.bucket.headers})
        if not key:
            self.bucket.asked.append("?list")
            return self.send(200, self.listed(parse_qs(address.query).get("prefix", [""])[0]), {})
        if key not in self.bucket.objects:
            return self.send(404, f"{_XML}<Error><Code>NoSuchKey</Code></Error>".encode(), {})
        data = self.bucket.objects[key]
        if self.headers.get("If-Match", etag(data)) != etag(data):
            return self.send(412, f"{_XML}<Error><Code>PreconditionFailed</Code></Error>".encode(), {})
        given = self.headers.get("Range")
        self.bucket.asked.append(f"{key} {given}" if given else key)
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", given or ""):
            first, last = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
            about = {"Content-Range": f"bytes {first}-{last}/{len(data)}", "ETag": etag(data)}
            return self.send(206, data[first : last + 1], about)
        return self.send(200, data + self.bucket.more, {"ETag": etag(data)})

    def listed(self, prefix: str) -> bytes:
        if self.bucket.endless:
            token = f"<NextContinuationToken>{len(self.bucket.asked)}</NextContinuationToken>"
            return f"{_XML}<ListBucketResult><IsTruncated>true</IsTruncated>{token}</ListBucketResult>".encode()
        rows = [
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_CHANGED}</LastModified>"
            f"<ETag>{escape(etag(data))}</ETag><Size>{self.bucket.size or len(data)}</Size></Contents>"
            for key, data in sorted(self.bucket.objects.items())
            if key.startswith(prefix) or self.bucket.strays
        ]
        return f"{_XML}<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>".encode()

    def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.bucket.cut and self.path.partition("?")[0].count("/") > 1 and body:
            self.bucket.cut -= 1
            self.close_connection = True
            body = body[: len(body) // 2]
        with contextlib.suppress(OSError):  # the client was ended meanwhile
            size = max(1, self.bucket.rate // 20)
            for start in range(0, len(body), size):
                self.wfile.write(body[start : start + size])
                if start + size < len(body):
                    time.sleep(0.05)

    def log_message(self, format: str, *args: object) -> None:
        pass


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
