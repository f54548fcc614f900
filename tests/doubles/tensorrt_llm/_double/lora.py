"""LoraConfig, whose module depends on the version."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._double.api import record


class _Checked:
    def __post_init__(self: Any) -> None:
        assert self.lora_ckpt_source in ("hf", "nemo"), f"Unsupported: {self.lora_ckpt_source}"


LoraConfig: Any = record("LoraConfig", (_Checked,))
