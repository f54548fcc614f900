"""A model's files on this machine, in S3 or on the hub: their sizes, parts of their content, and config.json."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deploy.errors import SpecError
from deploy.s3.prefix import bucket_and_key

if TYPE_CHECKING:
    from deploy.aws import Aws

LARGEST_FILE = 16 << 20
"""Maximum size of a JSON file in bytes. In config.json, the list of unquantized modules can reach several megabytes."""

_LARGEST = 100_000_000
_MOST_LAYERS = 4096
LONGCAT = "longcat_flash"
"""The type of models with two attentions in each of their `num_layers` layers."""

_ADVICE = "Set model.shape in the specification."


def parse(name: str, content: bytes) -> dict[str, Any]:
    """Parse the JSON object in one of the model files.

    Raises:
        SpecError: the content is not a JSON object, or is nested too deeply.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise SpecError(f"the model's {name} is nested too deeply", _ADVICE) from None
    except ValueError as error:
        raise SpecError(f"the model's {name} is not JSON: {error}", _ADVICE) from None
    if not isinstance(value, dict):
        raise SpecError(f"the model's {name} is not a JSON object", _ADVICE)
    return value


_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Parts of a multimodal model's config.json that describe the language model. One may contain another."""

_MAX_PARTS = 4


class Config:
    """The values of a config.json that describe the language model, under the names that transformers uses."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._values = dict(whole)
        text: Mapping[str, Any] = whole
        for _ in range(_MAX_PARTS):
            parts = (text.get(key) for key in _TEXT_PARTS)
            text = next((part for part in parts if isinstance(part, Mapping)), {})
            self._values |= text
        self.type = str(self._values.get("model_type", ""))

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        """Return a value without checking its type, or None if it is missing."""
        return self._values.get(name)

    def number(self, *names: str, default: int | None = None, largest: int = _LARGEST) -> int:
        """Return the value of the first name that has a value other than 0, or the default.

        Raises:
            SpecError: a value is not a whole number from 0 to `largest`, or there is neither a value nor a default.
        """
        for name in names:
            if (value := whole_number(name, self._values.get(name), largest)) > 0:
                return value
        if default is None:
            raise SpecError(f"the model's config.json has no {names[0]}", _ADVICE)
        return default

    def explicit(self, *names: str, default: int) -> int:
        """Return the value of the first name that has a value, which may be 0, or the default.

        Raises:
            SpecError: the value is not a whole number from 0 to 100,000,000.
        """
        return next((whole_number(name, self._values[name]) for name in names if name in self), default)

    def of_layer(self, layer: int, *names: str, default: int | None = None) -> int:
        """Return a number as `number` does, but of one layer if the value is a list with an item for each layer."""
        for name in names:
            items = self.list(name)
            if len(items) == self.layers() and layer < len(items) and (value := whole_number(name, items[layer])) > 0:
                return value
        return self.number(*names, default=default)

    def layers(self) -> int:
        listed = len(self.words()) or None
        listed = listed or len(self.list("block_configs")) or None
        first = ["num_layers"] if self.type.startswith(LONGCAT) else []
        return self.number(
            *first, "num_hidden_layers", "n_layer", "n_layers", "num_layers", default=listed, largest=_MOST_LAYERS
        )

    def of(self, layer: int) -> Config:
        """Return the values of one layer, if `per_layer_config` has values for it."""
        of_layers = self.part("per_layer_config")
        for width in range(1, len(str(_MOST_LAYERS)) + 1):  # the numbers begin with zeros
            if values := part(of_layers, f"{layer:0{width}}"):
                own = Config(values)
                own._values = {**self._values, **values}
                own.type = self.type
                return own
        return self

    def words(self) -> tuple[str, ...]:
        """Return the kind of each layer as named in config.json, or an empty tuple if it has no list of layers."""
        for name in ("layer_types", "layers_block_type"):
            if self.list(name):
                return tuple(map(str, self.list(name)))
        letters = self._values.get("hybrid_override_pattern")
        return tuple(letters[:_MOST_LAYERS]) if isinstance(letters, str) else ()

    def flag(self, name: str) -> bool:
        return bool(self._values.get(name))

    def part(self, name: str) -> Mapping[str, Any]:
        """Return a nested object, or {} if it is missing."""
        return part(self._values, name)

    def list(self, name: str) -> tuple[Any, ...]:
        value = self._values.get(name)
        return tuple(value[:_MOST_LAYERS]) if isinstance(value, list) else ()


def part(value: object, name: str) -> Mapping[str, Any]:
    """Return a nested object, or {} if it is missing."""
    content = value.get(name) if isinstance(value, Mapping) else None
    return content if isinstance(content, Mapping) else {}


def whole_number(name: str, value: object, largest: int = _LARGEST) -> int:
    """Return a number from config.json: 0 for null or false, and the maximum for a list with a value for each layer.

    Raises:
        SpecError: the value is negative, too large, or not a whole number.
    """
    if value is None or value is False:
        return 0
    if isinstance(value, list) and 0 < len(value) <= _MOST_LAYERS and not any(isinstance(item, list) for item in value):
        return max(whole_number(name, item, largest) for item in value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        text = repr(value)
        text = text if len(text) <= 40 else f"{text[:40]}…"
        raise SpecError(f"the model's config.json: {name}: {text} is not a whole number from 0 to {largest}", _ADVICE)
    return value


class Files(Protocol):
    """The files of one model, except for files in subdirectories."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the sizes of all files in bytes, by name."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """Read up to `length` bytes of a file from offset `start`."""


class Directory:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.sizes: Mapping[str, int] = {item.name: item.stat().st_size for item in path.iterdir() if item.is_file()}

    def read(self, name: str, start: int, length: int) -> bytes:
        with (self._path / name).open("rb") as file:
            file.seek(start)
            return file.read(length)


class S3Prefix:
    """The files of a model under `s3://bucket/prefix/`, read with ranged GetObject requests."""

    def __init__(self, aws: Aws, prefix: str) -> None:
        self._s3: Any = aws.client("s3")
        self._bucket, self._path = bucket_and_key(prefix)
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._path, Delimiter="/"
        )
        self.sizes: Mapping[str, int] = {
            item["Key"].removeprefix(self._path): item["Size"] for page in pages for item in page.get("Contents", ())
        }

    def read(self, name: str, start: int, length: int) -> bytes:
        byte_range = f"bytes={start}-{start + length - 1}"
        with self._s3.get_object(Bucket=self._bucket, Key=self._path + name, Range=byte_range)["Body"] as body:
            return bytes(body.read(length))


def json_file(files: Files, name: str) -> dict[str, Any] | None:
    """Return the JSON object in one of the model files, or None if the file does not exist.

    Raises:
        SpecError: the file is too large, or is not a JSON object.
    """
    size = files.sizes.get(name)
    if size is None:
        return None
    if size > LARGEST_FILE:
        raise SpecError(
            f"the model's {name} has {size / 1e6:.0f} MB, but at most {LARGEST_FILE / 1e6:.0f} MB are supported",
            _ADVICE,
        )
    return parse(name, files.read(name, 0, size) if size else b"")


# -- the Hugging Face hub ----------------------------------------------------------------------------------------------
# With huggingface_hub, this section would have half as many lines. But it reads responses of any length, raises
# KeyError or RecursionError for malformed responses, has no timeout for all requests of a model together, and since 1.0
# raises the errors of another HTTP library. It would also add 0.2 s to the start of each command.


_ENDPOINT = "https://huggingface.co"
_SECONDS = 10.0
"""Timeout of one request."""
_IN_ALL = 60.0
"""Total timeout of all requests for one model, in seconds."""


def endpoint() -> str:
    """Return the hub URL: HF_ENDPOINT if it is set, or else the URL of the public hub."""
    return (os.environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")


class HubError(Exception):
    """Raised when the hub cannot be reached or does not provide a model. The message is one line."""


def hub_to_ask() -> Hub | None:
    """Return the hub to query, or None if HF_HUB_OFFLINE has a value that huggingface_hub interprets as true.

    Raises:
        SpecError: the value of HF_ENDPOINT is not an http or https URL.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return None
    return Hub()


class Hub:
    """A client of the hub at `endpoint()`. It lists each model's files once, and sends HF_TOKEN only to the hub itself.

    Raises:
        SpecError: the hub URL is not an http or https URL.
    """

    def __init__(self) -> None:
        self.endpoint = endpoint()
        self._token = os.environ.get("HF_TOKEN")
        self._asked: dict[tuple[str, str], HubFiles | HubError] = {}
        if urllib.parse.urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise SpecError(f"HF_ENDPOINT: {self.endpoint} is not an http or https URL")

    @property
    def name(self) -> str:
        return str(urllib.parse.urlsplit(self.endpoint).hostname)

    def files(self, model: str, revision: str = "main") -> HubFiles:
        """Return the files of the model named `OWNER/MODEL`.

        Raises:
            HubError: the hub cannot be reached, or does not provide the model.
        """
        key = model, revision
        if key not in self._asked:
            try:
                self._asked[key] = HubFiles(self, model, revision)
            except HubError as error:
                self._asked[key] = error
        files = self._asked[key]
        if isinstance(files, HubError):
            raise files
        return files

    def get(self, path: str, start: int | None = None, length: int = LARGEST_FILE, until: float | None = None) -> bytes:
        """Send a GET request to the hub, and return the response body.

        Args:
            path: path and query of the URL.
            start: offset for a range request of `length` bytes, or None to request the whole content.
            length: maximum length of the body in bytes.
            until: deadline on the monotonic clock, or None.

        Raises:
            HubError: the hub does not respond in time, rejects the request, ignores the range, or sends too many bytes.
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
            with OPENER.open(request, timeout=left) as response:
                if start and response.status != 206:
                    raise HubError(f"{self.name} does not support range requests (status {response.status})")
                content: bytes = response.read(length + (start is None))
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
            gated = "is gated" if error.headers.get("X-Error-Code") == "GatedRepo" else "is gated, private, or missing"
            advice = "accept the model's licence with the token's account" if self._token else "set HF_TOKEN"
            return f"{model} on {self.name} {gated} (status {error.code}); {advice}"
        if error.code == 404:
            return f"{self.name} has no {model} (status 404)"
        return f"{self.name} responded with status {error.code}"


class HubFiles:
    """The files of one model on the hub."""

    def __init__(self, hub: Hub, model: str, revision: str) -> None:
        self._hub = hub
        self._until = time.monotonic() + _IN_ALL
        quoted = urllib.parse.quote(revision, safe="")
        self._path = f"/{urllib.parse.quote(model)}/resolve/{quoted}/"
        listing = hub.get(f"/api/models/{urllib.parse.quote(model)}/revision/{quoted}?blobs=true", until=self._until)
        self.sizes: Mapping[str, int] = _sizes(parse("list of files", listing))

    def read(self, name: str, start: int, length: int) -> bytes:
        return self._hub.get(self._path + urllib.parse.quote(name), start, length, self._until)


def _sizes(listing: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a model's files by name, except for files in subdirectories."""
    listed = listing.get("siblings")
    sizes = {}
    for item in listed if isinstance(listed, list) else ():
        if isinstance(item, dict) and isinstance(item.get("rfilename"), str) and "/" not in item["rfilename"]:
            size = item.get("size")
            sizes[item["rfilename"]] = size if isinstance(size, int) and size >= 0 else 0
    return sizes


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A redirect handler that does not send the token to other hosts, such as file stores."""

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


OPENER = urllib.request.build_opener(_Redirects)
"""Sends HTTP requests. The Authorization header is not forwarded on a redirect to another host."""
