"""Writes a blank model, to which all tokens but one are equally likely, for checks of structured output.

It is made in milliseconds, takes a few megabytes, and runs in a pipeline with another model's tokenizer.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_SIZE = 32  # of its one attention head: the CPU plugin's smallest


def blank_model(num_logits: int, favourite: int | None = None) -> Mapping[str, bytes]:
    """Make the model's files; returns name -> content.

    Args:
        favourite: a token that is more likely than all others together.
    """
    with tempfile.TemporaryDirectory() as directory:
        write_blank_model(Path(directory), num_logits, favourite)
        return {file.name: file.read_bytes() for file in Path(directory).iterdir()}


def write_blank_model(directory: Path, num_logits: int, favourite: int | None = None) -> None:
    """Write `openvino_model.xml` and `.bin`, with inputs and state named as in a model that optimum-intel exports.

    GenAI replaces the attention by paged attention, and finds it by its cache, so there must be one.
    """
    import numpy as np
    import openvino
    from openvino import Type
    from openvino import opset13 as ops

    inputs = {
        "input_ids": ops.parameter([-1, -1], Type.i64),
        "attention_mask": ops.parameter([-1, -1], Type.i64),
        "position_ids": ops.parameter([-1, -1], Type.i64),
        "beam_idx": ops.parameter([-1], Type.i32),
    }
    for name, node in inputs.items():
        node.set_friendly_name(name)
        node.output(0).set_names({name})

    def whole(*values: int) -> Any:
        return np.array(values, dtype=np.int64)

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, dtype=np.float32)

    # The inputs are multiplied by zero, but must be connected.
    used = ops.add(ops.convert(inputs["input_ids"], "f32"), ops.convert(inputs["position_ids"], "f32"))
    hidden = ops.multiply(ops.unsqueeze(used, whole(-1)), zeros(1, 1, _SIZE))  # [batch, tokens, _SIZE]
    sinks: list[Any] = []
    batch = ops.gather(ops.shape_of(inputs["input_ids"]), whole(0), whole(0))
    heads = _heads(hidden, whole)
    empty = ops.broadcast(zeros(), ops.concat([batch, whole(1, 0, _SIZE)], 0))
    keys, values = (
        _cached(ops, f"past_key_values.0.{kind}present.0.{kind}", heads(), empty, inputs["beam_idx"], sinks)
        for kind in ("key", "value")
    )
    mask = ops.multiply(
        ops.convert(ops.unsqueeze(ops.unsqueeze(inputs["attention_mask"], whole(1)), whole(1)), "f32"), zeros(1)
    )
    attended = ops.scaled_dot_product_attention(heads(), keys, values, mask)
    flat = ops.reshape(ops.transpose(attended, whole(0, 2, 1, 3)), whole(0, 0, _SIZE), True)
    likely = zeros(1, 1, num_logits)
    if favourite is not None:
        likely[..., favourite] = 3 + math.log(num_logits)
    logits = ops.add(ops.matmul(flat, zeros(_SIZE, num_logits), False, False), likely)
    logits.output(0).set_names({"logits"})
    model = openvino.Model([ops.result(logits)], sinks, list(inputs.values()), "blank")
    openvino.save_model(model, directory / "openvino_model.xml", compress_to_fp16=False)


def _heads(hidden: Any, whole: Callable[..., Any]) -> Callable[[], Any]:
    from openvino import opset13 as ops

    return lambda: ops.transpose(ops.reshape(hidden, whole(0, 0, 1, _SIZE), True), whole(0, 2, 1, 3))


def _cached(ops: Any, name: str, new: Any, empty: Any, beams: Any, sinks: list[Any]) -> Any:
    """Append `new` to the earlier values, which a variable keeps."""
    import numpy as np
    from openvino import PartialShape, Type
    from openvino.op.util import Variable, VariableInfo

    info = VariableInfo()
    info.data_shape = PartialShape([-1, 1, -1, _SIZE])
    info.data_type = Type.f32
    info.variable_id = name
    variable = Variable(info)
    before = ops.gather(ops.read_value(empty, variable), beams, np.int64(0))
    whole = ops.concat([before, new], 2)
    sinks.append(ops.assign(whole, variable))
    return whole
