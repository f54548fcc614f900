"""Directories that hold an adapter as PEFT writes it, for tests: small, and of no use to a real model."""

from __future__ import annotations

import json
from pathlib import Path


def write_adapter(directory: Path, *, weights: str = "adapter_model.safetensors", **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, **config}))
    (directory / weights).write_bytes(b"")
    return directory
