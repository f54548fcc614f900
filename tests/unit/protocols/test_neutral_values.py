"""Values of sampling parameters that ask for nothing, in the dialects that lack these parameters."""

from __future__ import annotations

from typing import Any

from handler.protocols.triton.request import INPUTS
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, DIALECTS, with_options

NEUTRAL = {
    **dict.fromkeys(("repetition_penalty", "length_penalty", "n", "best_of", "num_beams", "beam_width"), 1),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_length", "min_tokens"), 0),
    **dict.fromkeys(("early_stopping", "watermark", "decoder_input_details", "ignore_eos", "ignore_eos_token"), False),
    **{key: [] for key in ("stop", "stop_token_ids", "bad_words", "bad_sequences")},
    **{"use_beam_search": False, "no_repeat_ngram_size": 0, "skip_special_tokens": True, "logit_bias": {}},
}
ASKED: dict[str, dict[str, Any]] = {
    **{key: {"inputs": "a"} for key in ("lmi", "tgi_compat", "lmi_async", "tgi", "mindie")},
    "dynamic_batch": {"inputs": ["a"]},
    "triton_generate": {"text_input": "a"},
    "openai_chat": {"model": "model", "messages": [{"role": "user", "content": "a"}]},
    "openai_completions": {"model": "model", "prompt": "a"},
    "openai_responses": {"model": "model", "input": "a"},
    "anthropic_messages": {"model": "model", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]},
}


@in_one_test("dialect", ASKED)
def test_values_that_ask_for_nothing_are_ignored_by_no_dialect(dialect: str) -> None:
    """A client that sends all defaults gets no header, and passes a server that refuses unknown names."""
    context = with_options(CAPABLE, unknown_parameters="refuse")
    for name, value in NEUTRAL.items():
        if dialect == "triton_generate" and isinstance(value, list | dict) and name not in INPUTS:
            continue  # Triton takes such values for its inputs alone
        nested = "inputs" in ASKED[dialect]
        body = {**ASKED[dialect], **({"parameters": {name: value}} if nested else {name: value})}
        assert list(DIALECTS[dialect].parse(body, context).ignored) == [], name


@in_one_test(
    ("name", "value"), [("n", 2), ("n", True), ("min_p", 0.1), ("early_stopping", 0), ("stop_sequences", ["x"])]
)
def test_other_values_of_unknown_parameters_are_reported(name: str, value: Any) -> None:
    found = DIALECTS["tgi"].parse({"inputs": "a", "parameters": {name: value}}, CAPABLE)
    assert list(found.ignored) == [f"parameters.{name}"]
