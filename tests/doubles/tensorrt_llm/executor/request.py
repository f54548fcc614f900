"""LoRARequest."""

from __future__ import annotations

import os
from typing import Any

from tensorrt_llm._double.api import record


class _Checked:
    def __post_init__(self: Any) -> None:
        if self.lora_ckpt_source not in ("hf", "nemo"):
            raise ValueError(f"lora_ckpt_source must be 'hf' or 'nemo', not {self.lora_ckpt_source!r}")
        if not os.path.exists(self.lora_path):
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")

    @property
    def adapter_id(self: Any) -> int:
        return int(self.lora_int_id)

    @property
    def name(self: Any) -> str:
        return str(self.lora_name)

    @property
    def path(self: Any) -> str:
        return str(self.lora_path)

    @property
    def ckpt_source(self: Any) -> str:
        return str(self.lora_ckpt_source)


LoRARequest: Any = record("LoRARequest", (_Checked,))
