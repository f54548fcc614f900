"""LMI's options for TensorRT-LLM that it alone has; those of its TensorRT engines are refused by the modern name."""

from __future__ import annotations

from handler.options.kinds import Option

TRTLLM: tuple[Option, ...] = ()
