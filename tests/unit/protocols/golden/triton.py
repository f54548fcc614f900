"""The golden cases of Triton's generate extension."""

from __future__ import annotations

from typing import Any

from handler.core.values import Delta, Finish
from tests.unit.protocols.answers import deltas, failing, shorter, with_logits

ASK = {"text_input": "What is", "max_tokens": 9}
STREAM = {**ASK, "stream": True}
EXTRAS = {
    "return_finish_reason": True,
    "return_cumulative_logprob": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}
LOGITS = {"return_log_probs": True, "return_context_logits": True, "return_generation_logits": True}

INFER = {
    "inputs": [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["What is"]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [9]},
    ]
}
SCORED = {"name": "return_log_probs", "datatype": "BOOL", "shape": [1, 1], "data": [True]}
NAMED = [{"name": "output_log_probs"}, {"name": "text_output"}, {"name": "finish_reason"}, {"name": "batch_index"}]

_GENERATE, _STREAM, _INFER = "triton_generate", "triton_generate_stream", "triton_infer"

CASES: dict[str, tuple[str, Any, list[Delta] | None]] = {
    "triton/plain": (_GENERATE, ASK, None),
    "triton/id": (_GENERATE, {"id": "42", **ASK, "exclude_input_in_output": True}, None),
    "triton/seed_002": (
        _GENERATE,
        {"id": "42", "text_input": "client input", "parameters": {"stream": False, "temperature": 0}},
        None,
    ),
    "triton/llmapi": (_GENERATE, {"text_input": ["What is"], "sampling_param_max_tokens": [9], **EXTRAS}, None),
    "triton/sampling_parameters": (
        _GENERATE,
        {
            "text_input": "What is",
            "sampling_parameters": '{"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}',
        },
        None,
    ),
    "triton/log_probs": (_GENERATE, {**ASK, "parameters": {"return_log_probs": True}}, None),
    "triton/logits": (_GENERATE, {**ASK, **LOGITS}, with_logits()),
    "triton/beams": (
        _GENERATE,
        {**ASK, "beam_width": 2, "return_log_probs": True, **EXTRAS},
        [*deltas(0), *shorter(1)],
    ),
    "triton/one_token": (
        _GENERATE,
        {**ASK, "return_log_probs": True},
        [deltas()[0]._replace(finish=Finish.LENGTH)],
    ),
    "triton/unknown": (_GENERATE, {**ASK, "accumulate_tokens": True, "parameters": {"x": 1}}, None),
    "triton/fails": (_GENERATE, ASK, failing(2)),
    "triton/two_responses": (_GENERATE, STREAM, None),
    "triton/no_inputs": (_GENERATE, {}, None),
    "triton/no_object": (_GENERATE, [], None),
    "triton/no_json": (_GENERATE, b'{"text_input"', None),
    "triton/bad_parameter": (_GENERATE, {**ASK, "top_p": 2}, None),
    "triton/array": (_GENERATE, {**ASK, "arr": [1]}, None),
    "triton/twice": (_GENERATE, {**ASK, "parameters": {"max_tokens": 9}}, None),
    "triton/infer": (_INFER, INFER, None),
    "triton/infer_outputs": (_INFER, {"id": "42", "inputs": [*INFER["inputs"], SCORED], "outputs": NAMED}, None),
    "triton/infer_no_text": (_INFER, {"inputs": INFER["inputs"][1:]}, None),
    "triton/infer_unknown": (_INFER, {**INFER, "x": 1, "parameters": {"priority": 1}}, None),
    "triton/infer_invocations": ("lmi", INFER, None),
    "triton/infer_fails": (_INFER, INFER, failing(2)),
    "triton/stream": (_STREAM, ASK, None),
    "triton/stream_id": (_STREAM, {"id": 'a "b"', **STREAM}, None),
    "triton/stream_prompt": (_STREAM, {**STREAM, "exclude_input_in_output": False}, None),
    "triton/stream_whole": (_STREAM, {**ASK, "stream": False}, None),
    "triton/stream_extras": (_STREAM, {**STREAM, "return_log_probs": True, **EXTRAS}, None),
    "triton/stream_finish_reason": (_STREAM, {**STREAM, "return_finish_reason": True}, None),
    "triton/stream_logits": (_STREAM, {**STREAM, **LOGITS}, with_logits()),
    "triton/stream_fails": (_STREAM, STREAM, failing(2)),
    "triton/stream_fails_at_once": (_STREAM, STREAM, failing(0)),
    "triton/stream_whole_fails": (_STREAM, {**ASK, "stream": False}, failing(2)),
    "triton/stream_bad_parameter": (_STREAM, {**STREAM, "max_tokens": "x"}, None),
    "triton/shape": ("tgi_compat", ASK, None),
    "triton/shape_stream": ("lmi", {**ASK, "parameters": {"stream": True}}, None),
    "triton/shape_bad_parameter": ("tgi_compat", {**ASK, "top_p": 2}, None),
    "triton/shape_dynamic_batch": ("dynamic_batch", ASK, None),
}
