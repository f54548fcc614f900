"""LoraConfig since 1.3."""

from __future__ import annotations

from tensorrt_llm._double.api import MANNERS, LoraConfig

if MANNERS.release < (1, 3):
    raise ImportError("tensorrt_llm._torch.peft.lora.config comes with 1.3")

__all__ = ["LoraConfig"]
