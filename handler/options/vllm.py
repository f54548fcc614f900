"""LMI's options for vLLM that vLLM alone has."""

from __future__ import annotations

from handler.options.kinds import Option

VLLM: tuple[Option, ...] = ()
