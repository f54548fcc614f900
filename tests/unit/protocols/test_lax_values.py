"""Values of another JSON type than a field's: each dialect reads those that its original reads, and refuses the others.

The originals of the first table are pydantic's models, in lax mode, or read JSON's own types alone, as its strict mode
does: both are run here. LMI's prompts go through Python code that checks no types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from handler.core.errors import ServingError
from handler.core.values import Request
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, DIALECTS

Body = Mapping[str, Any]

VALUES = (
    8, 8.0, 8.5, 0, 0.0, 1, 1.0, 2, -1, -0.0, 0.5, 1e20, 9.3e18, 10**30, True, False, ["a"], {"a": 1},
    "8", " 8 ", "\t8\n", "8\u00a0", "8.0", "8.", "8.00", "8.5", "8.0_0", "+8", "-8", "- 8", "+-1", "--1", "0008",
    "1_000", "1__0", "_1", "1_", "1_0.0", "1_0.5", "1_e5", "1._5", "1e2", "1e_5", "1.5e3", "0x10", "\u0663", "",
    " ", ".", "+", "-", ".0", ".5", " .5 ", "+.5", "5.", "e5", "0", "1", "-0", "0_0", "0.7", "1.0", "1 2", "9" * 30,
    "inf", "-Infinity", "nan", "1e400", "true", "True", "TRUE", " true", "t", "f", "yes", "No", "y", "on", "OFF", "hot",
)  # fmt: skip

CHAT: Body = {"messages": [{"role": "user", "content": "a"}]}
PROMPT: Body = {"prompt": "a"}
INPUTS: Body = {"inputs": "a"}
TEXTS: Body = {"input": "a"}


INT64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
COUNT = Annotated[int, Field(ge=1, lt=1 << 31)]
ID = Annotated[int, Field(ge=0, lt=1 << 31)]
SHARE = Annotated[float, Field(ge=0, le=1)]
NUMBER = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Case(NamedTuple):
    """A field of a dialect.

    Attributes:
        name: the field's, after a dot inside an object.
        kind: its type, with its range, as the original declares it.
        body: makes a body with a value of the field.
        found: what was read.
    """

    dialect: str
    name: str
    kind: Any
    body: Callable[[Any], Body]
    found: Callable[[Request], Any]


def field(dialect: str, rest: Body, name: str, kind: Any, found: Callable[[Request], Any]) -> Case:
    """Make a case of a field beside the others of a body."""
    outer, _, inner = name.rpartition(".")
    return Case(
        dialect, name, kind, lambda value: {**rest, **({outer: {inner: value}} if outer else {name: value})}, found
    )


def new_tokens(request: Request) -> int:
    return request.sampling.max_new_tokens


def temperature(request: Request) -> float:
    return request.sampling.temperature if request.sampling.do_sample else 0.0


def ignores_eos(request: Request) -> bool:
    return request.sampling.ignore_eos


def dimensions(request: Request) -> int | None:
    assert request.pooling
    return request.pooling.dimensions


def normalizes(request: Request) -> bool | None:
    assert request.pooling
    return request.pooling.normalize


def priority(request: Request) -> int:
    return request.priority


LAX = [
    *(
        field(dialect, CHAT, name, kind, found)
        for dialect in ("openai_chat", "lmi", "tgi_compat", "dynamic_batch", "lmi_async")
        for name, kind, found in (
            ("max_tokens", COUNT, new_tokens),
            ("temperature", Annotated[float, Field(ge=0, le=2)], temperature),
            ("ignore_eos", bool, ignores_eos),
        )
    ),
    field("openai_chat", CHAT, "logprobs", bool, lambda one: one.sampling.logprobs),
    field("openai_chat", CHAT, "add_generation_prompt", bool, lambda one: one.template.add_generation_prompt),
    field(
        "openai_chat",
        CHAT,
        "logit_bias.3",
        Annotated[float, Field(ge=-100, le=100)],
        lambda one: one.sampling.logit_bias[0][1] if one.sampling.logit_bias else 0.0,
    ),
    Case(
        "openai_chat",
        "stop_token_ids",
        ID,
        lambda value: {**CHAT, "stop_token_ids": [value]},
        lambda one: one.sampling.stop_token_ids[0],
    ),
    field("openai_completions", PROMPT, "n", Annotated[int, Field(ge=1, le=32)], lambda one: one.sampling.n),
    field("openai_completions", PROMPT, "include_stop_str_in_output", bool, lambda one: one.sampling.include_stop),
    field("lmi_async", PROMPT, "ignore_eos", bool, ignores_eos),
    field("lmi_async", INPUTS, "parameters.max_new_tokens", COUNT, new_tokens),
    field("lmi_async", INPUTS, "parameters.temperature", NUMBER, temperature),
    field("lmi_async", INPUTS, "parameters.ignore_eos_token", bool, ignores_eos),
    field("lmi_async", INPUTS, "parameters.details", bool, lambda one: one.details),
    field("lmi_async", INPUTS, "parameters.return_full_text", bool, lambda one: one.full_text),
    field("openai_responses", TEXTS, "max_output_tokens", COUNT, new_tokens),
    field("openai_responses", TEXTS, "top_p", SHARE, lambda one: one.sampling.top_p),
    field("anthropic_messages", {**CHAT, "max_tokens": 5}, "top_p", SHARE, lambda one: one.sampling.top_p),
    field("openai_embeddings", TEXTS, "dimensions", COUNT, dimensions),
    field("openai_embeddings", TEXTS, "use_activation", bool, normalizes),
    field("rerank", {"query": "a", "documents": ["b"]}, "priority", INT64, priority),
    field("vllm_score", {"text_1": "a", "text_2": "b"}, "priority", INT64, priority),
    field("vllm_pooling", TEXTS, "priority", INT64, priority),
]
"""Fields of vLLM's requests (its protocol.py files) and of LMI's ChatProperties."""

STRICT = [
    field("tgi", INPUTS, "parameters.max_new_tokens", COUNT, new_tokens),
    field(
        "tgi_generate",
        INPUTS,
        "parameters.seed",
        Annotated[int, Field(ge=0, lt=1 << 64)],
        lambda one: one.sampling.seed,
    ),
    field(
        "tgi",
        INPUTS,
        "parameters.repetition_penalty",
        Annotated[float, Field(gt=0, allow_inf_nan=False)],
        lambda one: one.sampling.repetition_penalty,
    ),
    field("tgi", INPUTS, "parameters.details", bool, lambda one: one.details),
    field("mindie", INPUTS, "parameters.max_new_tokens", COUNT, new_tokens),
    field("mindie", INPUTS, "parameters.details", bool, lambda one: one.details),
    field("tei_embed", INPUTS, "normalize", bool, normalizes),
    field("tei_embed", INPUTS, "dimensions", COUNT, dimensions),
]
"""Fields of the originals that take JSON's own types alone, by serde. Triton's vLLM backend reads texts too."""

REFUSED = "refused"


def read(case: Case, value: Any) -> Any:
    try:
        return case.found(DIALECTS[case.dialect].parse(case.body(value), CAPABLE).requests[0])
    except ServingError:
        return REFUSED


def original(kind: Any, value: Any, *, strict: bool) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value, strict=strict)
    except ValidationError:
        return REFUSED


CASES = [*((case, False) for case in LAX), *((case, True) for case in STRICT)]


@pytest.mark.parametrize(("case", "strict"), CASES, ids=[f"{case.dialect}-{case.name}" for case, _ in CASES])
def test_a_value_is_read_as_the_original_reads_it(case: Case, strict: bool) -> None:
    found = {repr(value): read(case, value) for value in VALUES}
    wanted = {repr(value): original(case.kind, value, strict=strict) for value in VALUES}
    assert {name: (found[name], one) for name, one in wanted.items() if found[name] != one} == {}


@in_one_test(
    ("name", "value", "wanted"),
    [
        ("max_new_tokens", 8.0, 8),
        ("max_new_tokens", "8", REFUSED),  # which Python does not compare with a number
        ("max_new_tokens", 8.5, REFUSED),
        ("max_new_tokens", True, REFUSED),
        ("temperature", "0.5", REFUSED),
        ("ignore_eos_token", 1, True),
        ("ignore_eos_token", 0.0, False),
        ("ignore_eos_token", 2, REFUSED),
        ("ignore_eos_token", "true", REFUSED),  # where "false" would be true too
        ("seed", "42", 42),
        ("seed", " 4_2 ", 42),
        ("seed", 42.9, 42),
        ("seed", True, 1),
        ("seed", "42.0", REFUSED),
        ("seed", float("inf"), REFUSED),
        ("seed", "9" * 5000, REFUSED),
        ("seed", [42], REFUSED),
    ],
)
def test_prompts_of_lmi_are_read_as_its_python_reads_them(name: str, value: Any, wanted: Any) -> None:
    fields = {"max_new_tokens": new_tokens, "temperature": temperature, "ignore_eos_token": ignores_eos}
    for dialect in ("lmi", "tgi_compat", "dynamic_batch"):
        found = fields.get(name, lambda request: request.sampling.seed)
        case = field(dialect, INPUTS, f"parameters.{name}", None, found)
        assert read(case, value) == wanted, dialect


@in_one_test(
    ("dialect", "body"),
    [
        ("openai_chat", {**CHAT, "stream": "yes", "stream_options": {"include_usage": 1}}),
        ("openai_completions", {**PROMPT, "stream": 1.0}),
        ("openai_responses", {**TEXTS, "stream": "true"}),
        ("anthropic_messages", {**CHAT, "max_tokens": 9, "stream": "on"}),
        ("lmi", {**INPUTS, "stream": 1}),
        ("lmi_async", {**INPUTS, "stream": "1"}),
        ("lmi_async", {**CHAT, "stream": 1}),
        ("openai_transcriptions", {"file": "aQ==", "stream": "1", "temperature": "0.0"}),
    ],
)
def test_a_flag_beside_the_parameters_is_read_so_too(dialect: str, body: Body) -> None:
    assert DIALECTS[dialect].parse(body, CAPABLE).streams
