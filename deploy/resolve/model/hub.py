"""A model's files on the Hugging Face hub, or on a mirror of it (HF_ENDPOINT): their list, and pieces of them."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from deploy.errors import SpecError
from deploy.resolve.model.config import LARGEST_FILE, parse

_ENDPOINT = "https://huggingface.co"
_SECONDS = 10.0
_IN_ALL = 60.0
"""Seconds for all requests for one model."""


def endpoint() -> str:
    """Return the hub's address: HF_ENDPOINT, else the public one's."""
    return (os.environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")


class HubError(Exception):
    """The hub does not say it: a reason for one line."""


def hub_to_ask() -> Hub | None:
    """Return the hub; None: HF_HUB_OFFLINE is set, as huggingface_hub reads it.

    Raises:
        SpecError: HF_ENDPOINT is no address.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return None
    return Hub()


class Hub:
    """The hub, asked once for each model.

    Args:
        address: None: `endpoint()`.
        token: sent to the hub alone; None: HF_TOKEN, else none.

    Raises:
        SpecError: the endpoint is no address.
    """

    def __init__(self, address: str | None = None, token: str | None = None) -> None:
        self.endpoint = address or endpoint()
        self._token = token or os.environ.get("HF_TOKEN")
        self._asked: dict[tuple[str, str], HubFiles | HubError] = {}
        if urllib.parse.urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise SpecError(f"HF_ENDPOINT: {self.endpoint} is not an http or https address")

    @property
    def name(self) -> str:
        return str(urllib.parse.urlsplit(self.endpoint).hostname)

    def files(self, model: str, revision: str = "main") -> HubFiles:
        """Return the files of `OWNER/MODEL`.

        Raises:
            HubError: the hub cannot be reached, or does not give them.
        """
        place = model, revision
        if place not in self._asked:
            try:
                self._asked[place] = HubFiles(self, model, revision)
            except HubError as error:
                self._asked[place] = error
        found = self._asked[place]
        if isinstance(found, HubError):
            raise found
        return found

    def get(self, path: str, start: int | None = None, length: int = LARGEST_FILE, until: float | None = None) -> bytes:
        """Fetch at most `length` bytes.

        Raises:
            HubError: it cannot be reached, or refuses.
        """
        request = urllib.request.Request(self.endpoint + path)
        if start is not None:
            request.add_header("Range", f"bytes={start}-{start + length - 1}")
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        left = _SECONDS if until is None else min(_SECONDS, until - time.monotonic())
        if left <= 0:
            raise HubError(f"{self.name} took more than {_IN_ALL:.0f} s")
        try:
            with _OPENER.open(request, timeout=left) as answer:
                if start and answer.status != 206:
                    raise HubError(f"{self.name} gives no pieces of files (status {answer.status})")
                content: bytes = answer.read(length + (start is None))
        except urllib.error.HTTPError as error:
            with error:
                raise HubError(self._refused(error, path)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise HubError(f"{self.name} cannot be reached: {type(error).__name__}: {reason}") from None
        if len(content) > length:
            raise HubError(f"{self.name}: {path} has more than {length} bytes")
        return content

    def _refused(self, error: urllib.error.HTTPError, path: str) -> str:
        model = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        if error.code in (401, 403):
            gated = (
                "is gated" if error.headers.get("X-Error-Code") == "GatedRepo" else "is gated, private, or not there"
            )
            advice = "accept its licence, and give the token of an account that did" if self._token else "set HF_TOKEN"
            return f"{self.name} does not give {model} to everyone (status {error.code}): it {gated}; {advice}"
        if error.code == 404:
            return f"{self.name} has no {model} (status 404)"
        return f"{self.name} answers with status {error.code}"


class HubFiles:
    """The files of one model (`deploy.resolve.model.files.Files`)."""

    def __init__(self, hub: Hub, model: str, revision: str) -> None:
        self._hub = hub
        self._until = time.monotonic() + _IN_ALL
        place = urllib.parse.quote(revision, safe="")
        self._path = f"/{urllib.parse.quote(model)}/resolve/{place}/"
        answer = hub.get(f"/api/models/{urllib.parse.quote(model)}/revision/{place}?blobs=true", until=self._until)
        self.sizes: Mapping[str, int] = _sizes(parse("list of files", answer))

    def read(self, name: str, start: int, length: int) -> bytes:
        """Read a piece of a file; shorter where the file ends."""
        return self._hub.get(self._path + urllib.parse.quote(name), start, length, self._until)


def _sizes(answer: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the files at the top."""
    listed = answer.get("siblings")
    found = {}
    for item in listed if isinstance(listed, list) else ():
        if isinstance(item, dict) and isinstance(item.get("rfilename"), str) and "/" not in item["rfilename"]:
            size = item.get("size")
            found[item["rfilename"]] = size if isinstance(size, int) and size >= 0 else 0
    return found


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to a store of files without handing it the token."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and _origin(req.full_url) != _origin(newurl):
            request.remove_header("Authorization")
        return request


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


_OPENER = urllib.request.build_opener(_Redirects)
