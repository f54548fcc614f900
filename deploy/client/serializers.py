"""Serializers, with the interface of SageMaker's SDK: the SDK's own also work."""

from __future__ import annotations

import io
import json
from typing import Any, Protocol


class Serializer(Protocol):
    @property
    def CONTENT_TYPE(self) -> str: ...

    def serialize(self, data: Any) -> bytes | str: ...


class Deserializer(Protocol):
    @property
    def ACCEPT(self) -> tuple[str, ...]: ...

    def deserialize(self, stream: Any, content_type: str) -> Any:
        """Return the value. `stream` has `read` and `close`."""


class JSONSerializer:
    """Serializes values as JSON; bytes and text stay as they are."""

    CONTENT_TYPE = "application/json"

    def serialize(self, data: Any) -> bytes | str:
        return data if isinstance(data, bytes | str) else json.dumps(data, ensure_ascii=False)


class JSONDeserializer:
    """Returns the value of a JSON answer; the text of any other answer."""

    ACCEPT = ("application/json",)

    def deserialize(self, stream: Any, content_type: str) -> Any:
        text = stream.read().decode("utf-8", "replace")
        try:
            return json.loads(text)
        except ValueError:
            return text


class BytesDeserializer:
    ACCEPT = ("*/*",)

    def deserialize(self, stream: Any, content_type: str) -> bytes:
        return bytes(stream.read())


def deserialize_body(deserializer: Deserializer, body: bytes, content_type: str) -> Any:
    return deserializer.deserialize(io.BytesIO(body), content_type)
