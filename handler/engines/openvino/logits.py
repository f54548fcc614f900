"""Computes a model's logits with OpenVINO: at selected positions, and after states that are inputs and outputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

ROWS = "rows"
"""The input with the positions whose logits are computed."""

PAST, PRESENT = "past", "present"
"""Beginnings of the names of the inputs and outputs for states, such as `past.0` and `present.0`."""

_PREFIX_BYTES = 1 << 28  # limits the memory of stored prefixes; a single prefix may be larger

_ELEMENTWISE = frozenset({"Add", "Convert", "Divide", "Multiply", "Tanh"})
"""Operations that may follow a model's last matrix multiplication."""

States = dict[str, Any]
"""The states of a model after a part of a prompt, such as its keys and values: tensors by the names of inputs."""

Prefix = tuple[str | int, ...]
"""The salt of the prefix cache, and the token ids of a prefix."""


class LogitModel:
    """A compiled model whose states are arguments and results.

    With states that the CPU plugin manages itself, all parts of a prompt after the first use a slow attention kernel
    (`mha_single_token` in OpenVINO's scaled_attn.cpp). The demo model then takes 1.3 times as long for 550 tokens, and
    1.8 times as long for 2,000 tokens.

    Args:
        model: a model in OpenVINO's format, which is changed.
        properties: properties of OpenVINO's CPU plugin.
    """

    def __init__(self, model: Any, properties: Mapping[str, str]) -> None:
        import openvino

        select_rows(model)
        expose_states(model)
        self._request = openvino.Core().compile_model(model, "CPU", properties).create_infer_request()
        self._inputs = frozenset(port.any_name for port in model.inputs)
        self._outputs = {name: name.replace(PAST, PRESENT) for name in self._inputs if name.startswith(f"{PAST}.")}
        self.empty = {port.any_name: _empty(port) for port in model.inputs if port.any_name in self._outputs}

    def infer(self, part: Sequence[int], start: int, rows: Sequence[int], states: States) -> Any:
        """Return the logits at some positions of a part of a prompt, or at all positions if the model selects none.

        Args:
            part: token ids.
            start: number of tokens before the part.
            rows: positions in the part.
            states: the states after the tokens before the part.

        Returns:
            A float32 numpy array of shape [rows, vocabulary].
        """
        import numpy

        end = start + len(part)
        values = {
            "input_ids": numpy.array([part], dtype=numpy.int64),
            "attention_mask": numpy.ones((1, end), dtype=numpy.int64),
            "position_ids": numpy.arange(start, end, dtype=numpy.int64)[None],
            "beam_idx": numpy.zeros(1, dtype=numpy.int32),
            ROWS: numpy.array(rows, dtype=numpy.int64),
        }
        self._request.infer({name: value for name, value in values.items() if name in self._inputs} | states)
        return self._request.get_tensor("logits").data[0].astype(numpy.float32, copy=False)

    def states(self) -> States:
        """Return copies of the states after the last call of `infer`."""
        import openvino

        tensors = {past: self._request.get_tensor(present) for past, present in self._outputs.items()}
        return {name: openvino.Tensor(tensor.data.copy()) for name, tensor in tensors.items()}


def _empty(port: Any) -> Any:
    """Return the state before the first token: zeros for a single sequence, and no tokens."""
    import openvino

    first, *others = port.get_partial_shape()
    sizes = [dimension.get_length() if dimension.is_static else 0 for dimension in others]
    tensor = openvino.Tensor(port.get_element_type(), [first.get_length() if first.is_static else 1, *sizes])
    tensor.data[:] = 0
    return tensor


def select_rows(model: Any) -> None:
    """Add the input `ROWS` to a model, because the logits at all positions take about a quarter of the time.

    Models whose logits do not come from a matrix multiplication stay unchanged.
    """
    import numpy
    from openvino import opset13

    node = model.output("logits").get_node().input_value(0).get_node()
    while node.get_type_name() in _ELEMENTWISE:
        node = node.input_value(0).get_node()
    if node.get_type_name() != "MatMul" or len(node.input_value(0).get_partial_shape()) != 3:
        return
    rows = opset13.parameter([-1], numpy.int64, name=ROWS)
    rows.output(0).set_names({ROWS})
    selected = opset13.gather(node.input_value(0), rows, opset13.constant(1, numpy.int64))
    node.input(0).replace_source_output(selected.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def expose_states(model: Any) -> None:
    """Replace the states of a model with inputs and outputs."""
    from openvino import opset13

    nodes = model.get_ordered_ops()
    reads = {node.get_variable_id(): node for node in nodes if node.get_type_name() == "ReadValue"}
    for index, assign in enumerate(model.get_sinks()):
        past = _parameter_for(reads[assign.get_variable_id()])
        past.output(0).set_names({f"{PAST}.{index}"})
        present = opset13.result(assign.input_value(0))
        present.output(0).set_names({f"{PRESENT}.{index}"})
        model.remove_sink(assign)
        model.add_parameters([past])
        model.add_results([present])
    for node in nodes:
        if node.get_type_name() == "Broadcast" and node.get_attributes()["mode"] == "bidirectional":
            _keep_sizes(node)
    model.validate_nodes_and_infer_types()


def _parameter_for(read: Any) -> Any:
    """Return a parameter of the model that replaces the reading of a state."""
    from openvino import opset13

    past = opset13.parameter(read.get_output_partial_shape(0), read.get_output_element_type(0))
    for target in read.output(0).get_target_inputs():
        target.replace_source_output(past.output(0))
    return past


def _keep_sizes(broadcast: Any) -> None:
    """Replace target sizes of 0 with 1, so that the input's sizes are kept.

    GenAI's conversion of GGUF files repeats keys and values with a target of 0 tokens. This has no effect where the
    CPU plugin fuses attention and states.
    """
    from openvino import opset13

    sizes = broadcast.input_value(1)
    least = opset13.constant(1, sizes.get_element_type())
    broadcast.input(1).replace_source_output(opset13.maximum(sizes, least).output(0))


class PrefixStates:
    """Stores the states of a model after the prefixes of prompts. The most recently used prefixes are kept.

    The result of a request must not depend on earlier requests, so a prefix is only reused completely, never in part.
    """

    def __init__(self) -> None:
        self._states: OrderedDict[Prefix, States] = OrderedDict()
        self._num_bytes = 0

    def get(self, prefix: Prefix) -> States | None:
        """Return the states after a prefix, or None if they are not stored."""
        if prefix in self._states:
            self._states.move_to_end(prefix)
        return self._states.get(prefix)

    def put(self, prefix: Prefix, states: States) -> None:
        """Store the states after a prefix, and drop prefixes that do not fit any more."""
        self._states[prefix] = states
        self._num_bytes += _num_bytes(states)
        while self._num_bytes > _PREFIX_BYTES and len(self._states) > 1:
            self._num_bytes -= _num_bytes(self._states.popitem(last=False)[1])


def _num_bytes(states: States) -> int:
    return sum(tensor.byte_size for tensor in states.values())
