"""A hub on loopback: what huggingface_hub asks of Hugging Face's, for models of the test's own.

Paths and headers are those of huggingface_hub's `hf_api.py` and `file_download.py`: information about a revision, the
tree of a commit, and files with their commit and ETag.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.doubles.http_thread import serving

COMMIT = "a" * 40


@dataclass
class Hub:
    """A running hub. `asked` has the paths of all requests, and grows."""

    url: str = ""
    asked: list[str] = field(default_factory=list)

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
) -> Iterator[Hub]:
    """Serve models, each with its files by name.

    Args:
        rate: bytes a second of each file.
        failures: statuses and bodies of paths, by a part of them.
    """
    hub = Hub()
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
                return self.send(200, files[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'})
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
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
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
