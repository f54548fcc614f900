"""Lines and directories of SageMaker's data capture, as it writes them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def part(body: bytes, mode: str, content_type: str = "application/json", encoding: str = "JSON") -> dict[str, str]:
    data = base64.b64encode(body).decode() if encoding == "BASE64" else body.decode()
    return {"observedContentType": content_type, "mode": mode, "data": data, "encoding": encoding}


def line(
    id: str,
    request: dict[str, str] | None = None,
    answer: dict[str, str] | None = None,
    time: str = "2026-11-24T10:00:00Z",
    **about: Any,
) -> str:
    data = {"endpointInput": request, "endpointOutput": answer}
    event = {
        "captureData": {name: value for name, value in data.items() if value is not None},
        "eventMetadata": {"eventId": id, **about, "inferenceTime": time},
        "eventVersion": "0",
    }
    return json.dumps(event, ensure_ascii=False)


def asked(id: str, request: bytes = b"{}", answer: bytes = b"[]", time: str = "2026-11-24T10:00:00Z") -> str:
    return line(id, part(request, "INPUT"), part(answer, "OUTPUT"), time)


def write(path: Path, lines: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{one}\n" for one in lines))
    return path
