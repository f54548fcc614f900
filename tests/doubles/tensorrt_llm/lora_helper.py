"""LoraConfig before 1.3; there this module only leads to another one, and is to go."""

from __future__ import annotations

from tensorrt_llm._double.api import MANNERS, LoraConfig, misuse

if MANNERS.release >= (1, 3):
    raise misuse("LoraConfig is in tensorrt_llm._torch.peft.lora.config since 1.3")

__all__ = ["LoraConfig"]
