"""LoRA adapters on vLLM: a check of their weights, which vLLM does not make, and batches without a mixture on CPUs."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RANK_AXIS = {"lora_A.weight": 0, "lora_B.weight": 1}


def check_weights(directory: Path) -> None:
    """Check that the weights are finite, and of the rank in adapter_config.json.

    Measured with vLLM 0.32: weights that are not finite spoil the answers of all later requests, with and without
    adapters.

    Raises:
        ValueError: names the tensor.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if alpha is not None and not (isinstance(alpha, int | float) and math.isfinite(alpha)):
        raise ValueError(f"adapter_config.json: lora_alpha={alpha} is not a number")
    for name, tensor in _tensors(directory):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"the weights {name} are not all numbers")
        for end, axis in _RANK_AXIS.items():
            if name.endswith(end) and (tensor.ndim != 2 or tensor.shape[axis] != rank):
                raise ValueError(f"the weights {name} of shape {list(tensor.shape)} are not of rank {rank}")


def _tensors(directory: Path) -> list[tuple[str, Any]]:
    safe = directory / "adapter_model.safetensors"
    if safe.is_file():
        from safetensors.torch import load_file

        return list(load_file(safe).items())
    import torch

    return list(torch.load(directory / "adapter_model.bin", map_location="cpu", weights_only=True).items())


class LoraExclusion:
    """Keeps requests of two kinds apart: only one kind is in the engine at a time, in order of arrival.

    `enter` starts a request at once where possible; `leave` starts those that waited.
    """

    def __init__(self) -> None:
        self._inside: dict[int, bool] = {}  # key -> kind, the same for all
        self._waiting: deque[tuple[int, bool, Callable[[], None]]] = deque()

    def enter(self, key: int, kind: bool, start: Callable[[], None]) -> None:
        """Call `start`, now or in a later `leave`. If it raises now, the key does not enter."""
        if self._waiting or not self._fits(kind):
            self._waiting.append((key, kind, start))
            return
        start()
        self._inside[key] = kind

    def leave(self, key: int) -> list[tuple[int, Exception]]:
        """Remove a request, inside or waiting; unknown keys are ignored.

        Returns:
            Requests that could not be started now, and their errors.
        """
        self._inside.pop(key, None)
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != key)
        failed: list[tuple[int, Exception]] = []
        while self._waiting and self._fits(self._waiting[0][1]):
            next_key, kind, start = self._waiting.popleft()
            try:
                start()
            except Exception as error:  # the engine refuses this request; the others go on
                failed.append((next_key, error))
            else:
                self._inside[next_key] = kind
        return failed

    def _fits(self, kind: bool) -> bool:
        return not self._inside or next(iter(self._inside.values())) == kind
