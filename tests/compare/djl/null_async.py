"""The minimal handler for DJL's async mode, which yields an Output for each token, up to max_new_tokens.

This is the model.py of a worker. Its cost is mainly the queue of djl_python and its thread switch for each Output.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from djl_python import Output  # type: ignore[import-not-found, unused-ignore]

LINE = '{"token": {"id": 1, "text": " word", "log_prob": -0.5}}\n'


async def handle(inputs: Any) -> Any:
    if inputs.is_empty():
        return Output()
    return _outputs(inputs.get_as_json()["parameters"]["max_new_tokens"])


async def _outputs(tokens: int) -> AsyncIterator[Output]:
    for left in range(tokens, 0, -1):
        output = Output()
        output.add_property("Content-Type", "application/jsonlines")
        output.add(Output.binary_encode({"data": LINE, "last": left == 1}), key="data")
        yield output
