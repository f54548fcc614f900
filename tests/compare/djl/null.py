"""The minimal handler for DJL's step protocol, which returns one token per step for each request, up to max_new_tokens.

This is the model.py of a worker. Its cost is mainly the reading and writing in djl_python itself.
"""

from __future__ import annotations

from typing import Any

from djl_python import Output  # type: ignore[import-not-found, unused-ignore]

LINE = '{"token": {"id": 1, "text": " word", "log_prob": -0.5}}\n'

_left: list[int] = []  # remaining tokens of each running request, in DJL's order


def handle(inputs: Any) -> Any:
    if inputs.is_empty():
        return None
    known = len(_left)
    if inputs.get_batch_size() > known:
        _left.extend(new.get_as_json()["parameters"]["max_new_tokens"] for new in inputs.get_batches()[known:])
    output = Output()
    for index, left in enumerate(_left):
        output.add(Output.binary_encode({"data": LINE, "last": left == 1}), key="data", batch_index=index)
        if index >= known:
            output.add_property(f"batch_{index}_Content-Type", "application/jsonlines")
    _left[:] = [left - 1 for left in _left if left > 1]
    return output
