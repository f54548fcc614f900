"""Safetensors files for tests: headers of any size, and content that is only a hole in the file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "I32": 4}

Tensors = Mapping[str, tuple[str, Sequence[int]]]
"""Types and shapes by name."""


def header(tensors: Tensors) -> tuple[bytes, int]:
    """Return a file's beginning, and the bytes of all tensors."""
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * BYTES[dtype]
        said[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    content = json.dumps(said).encode()
    return struct.pack("<Q", len(content)) + content, at


def write(path: Path, tensors: Tensors) -> int:
    """Write a file, and return the bytes of its tensors."""
    start, size = header(tensors)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + size)
    return size
